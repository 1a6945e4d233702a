"""llmctl's own counters, as Prometheus reads them; what is counted here, the engine is never asked for (its ``/metrics`` can freeze it).

Requests are counted once, when they close, on the ledger's writer thread (:meth:`Metrics.observe`); nothing is done on a request's path.
What is true only now (states, slots, memory) comes with the scrape, as :class:`Live`. Unknown is absent, never 0.

Every metric is declared once, in :data:`DECLARED`. Labels are presets, routes and words of ours, so that no client can make new series.
A preset that :class:`Live` names has all its series from the first scrape on: what appears with 1 has no rate.

Tokens are counted while they are made: ``llmctl_tokens_total{kind="completion"}`` is those of closed requests and what those in work have
made so far, and never less than the last scrape said. A request that closes with another figure than it was seen with, or that a scrape
meets between its end and its counting, lets the counter stand still until the truth has caught up. It never goes back, since Prometheus
would take that for a restart and count everything again; and an overstatement is never added to.

The buckets are chosen for what is to be told apart, and no quantile is read off finer than they are.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

from supervisor import __version__, pace
from supervisor.lifecycle import State
from supervisor.meter import Reading
from supervisor.record import STATUSES, Record, Run
from supervisor.routes import ROUTES

if TYPE_CHECKING:
    from prometheus_client.core import Metric

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

Kind = Literal["counter", "gauge", "histogram", "info"]

TTFT_S: Final = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
"""From a cached prompt on a card to a long one on a CPU, or behind a load; a step is at most a doubling."""
GAP_BINS: Final = range(159, 248, 4)
"""Every fourth bin of ``pace``: bounds from 0.98 ms to 2 s, a half doubling apart, so that a gap's bin lies in one bucket and nothing is
interpolated. They hold 1,000 tokens/s of a small model on a card, and a large one on a CPU that stalls; two speeds that are 1.4 times
apart are in different buckets."""
GAP_S: Final = tuple(pace.upper_s(number) for number in GAP_BINS)
WAIT_S: Final = (0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""In the first are those that didn't wait; a load is told in seconds, a queue in the length of answers."""
WHOLE_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

_LONGEST_GAP_BIN: Final = 400
"""11 days."""
_BUCKET: Final = tuple(bisect_left(GAP_BINS, number) for number in range(_LONGEST_GAP_BIN + 1))
"""A gap's bucket by its bin."""
_MIDDLE_S: Final = tuple(pace.upper_s(number) * 2 ** (-0.5 / pace.A_DOUBLING) for number in range(_LONGEST_GAP_BIN + 1))
"""What a gap adds to the sum: the geometric middle of its bin, which is at most 4.5 % off."""


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric, by the name that it is scraped with."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without +Inf."""


def _seconds(name: str, told: str, bounds: tuple[float, ...]) -> Declared:
    return Declared(f"llmctl_{name}_seconds", "histogram", told, ("preset",), "seconds", bounds)


DECLARED: Final[Mapping[str, Declared]] = MappingProxyType(
    {
        each.name: each
        for each in (
            Declared("llmctl_info", "info", "The llmctl that runs, and its engine.", ("version", "engine")),
            Declared("llmctl_requests_total", "counter", "Requests that ended, by how.", ("preset", "route", "status")),
            Declared(
                "llmctl_tokens_total",
                "counter",
                "Tokens: prompt (cached ones too), cached, completion (while they are made), wasted (by engines that died), "
                "drafted, accepted (of the drafted).",
                ("preset", "kind"),
            ),
            _seconds("time_to_first_token", "From admission to the first token.", TTFT_S),
            _seconds("inter_token_latency", "Between arrivals of text of one answer. The sum is known to 4.5 %.", GAP_S),
            _seconds("queue", "Requests' wait for a place at an engine that was up.", WAIT_S),
            _seconds("load", "Requests' wait for an engine to be up.", WAIT_S),
            _seconds("request", "From admission to the end.", WHOLE_S),
            Declared("llmctl_preset_state", "gauge", "1 for the state that a preset is in.", ("preset", "state")),
            Declared("llmctl_slots", "gauge", "Slots of an engine: busy, free.", ("preset", "state")),
            Declared("llmctl_waiting_requests", "gauge", "Requests that wait for a place.", ("preset",)),
            Declared("llmctl_restarts_total", "counter", "Starts of an engine after it had ended by itself.", ("preset",)),
            Declared("llmctl_memory_bytes", "gauge", "Memory that an engine has: host, card.", ("preset", "where"), "bytes"),
            Declared("llmctl_power_watts", "gauge", "What the cards draw now.", unit="watts"),
            Declared(
                "llmctl_energy_joules_total",
                "counter",
                "What the cards took: for requests, idle while an engine was up.",
                ("use",),
                "joules",
            ),
            Declared("llmctl_turned_away_total", "counter", "Requests refused at the door, by the error's code.", ("code",)),
            Declared("llmctl_records_lost_total", "counter", "Records of requests that could not be kept."),
            Declared("process_cpu_seconds_total", "counter", "CPU time of llmctl itself.", unit="seconds"),
            Declared("process_resident_memory_bytes", "gauge", "Memory of llmctl itself.", unit="bytes"),
        )
    }
)
_TIMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "llmctl_time_to_first_token_seconds": "ttft_ms",
        "llmctl_queue_seconds": "queue_ms",
        "llmctl_load_seconds": "load_ms",
        "llmctl_request_seconds": "total_ms",
    }
)
"""A histogram, and the field of a record that it counts."""
_GAPS: Final = "llmctl_inter_token_latency_seconds"
_TOKENS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "prompt": "prompt_tokens",
        "cached": "cached_tokens",
        "completion": "completion_tokens",
        "wasted": "wasted_tokens",
        "drafted": "draft_tokens",
        "accepted": "draft_accepted",
    }
)
_times_of, _tokens_of = attrgetter(*_TIMES.values()), attrgetter(*_TOKENS.values())
_COMPLETION: Final = tuple(_TOKENS).index("completion")


def rows() -> list[tuple[str, str, str, str]]:
    """Name, kind, labels and help of every metric, in the order in which they are scraped."""
    return [(each.name, each.kind, ", ".join(each.labels), each.help) for each in DECLARED.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePreset:
    """One preset at the moment of a scrape."""

    state: State
    slots: int = 0
    """Of its engine."""
    busy: int = 0
    waiting: int = 0
    restarts: int = 0
    made_tokens: int = 0
    """By the requests in work, so far."""
    host_bytes: int | None = None
    card_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What a scrape is told of the moment."""

    presets: Mapping[str, LivePreset]
    """Those that were asked for; each makes some 120 series."""
    power_w: float | None = None
    lost: int = 0
    """Records, since the start."""
    cpu_s: float
    rss_bytes: int


class _Histogram:
    __slots__ = ("bounds", "counts", "total_s")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total_s += seconds

    def add_gaps(self, gaps: Mapping[int, int]) -> None:
        counts, total_s, bucket, middle_s = self.counts, self.total_s, _BUCKET, _MIDDLE_S
        for number, count in gaps.items():
            known = number if number < _LONGEST_GAP_BIN else _LONGEST_GAP_BIN
            counts[bucket[known]] += count
            total_s += middle_s[known] * count
        self.total_s = total_s

    def copy(self) -> _Histogram:
        made = _Histogram(self.bounds)
        made.counts[:], made.total_s = self.counts, self.total_s
        return made


class _Sums:
    """What was counted of one preset."""

    __slots__ = ("histograms", "shown", "tokens")

    def __init__(self) -> None:
        self.tokens = [0] * len(_TOKENS)
        self.shown = 0
        """Completion tokens, as the last scrape said."""
        self.histograms = {name: _Histogram(DECLARED[name].bounds) for name in (*_TIMES, _GAPS)}

    def scraped(self, made_tokens: int) -> _Sums:
        """A copy for a scrape, with the tokens of requests in work."""
        self.shown = max(self.shown, self.tokens[_COMPLETION] + made_tokens)
        made = _Sums()
        made.tokens[:], made.tokens[_COMPLETION] = self.tokens, self.shown
        made.histograms = {name: each.copy() for name, each in self.histograms.items()}
        return made


@dataclass(slots=True)
class _Counts:
    """What was counted, but for what belongs to one preset."""

    requests: dict[tuple[str, str, str], int] = field(default_factory=dict)
    turned_away: Counter[str] = field(default_factory=Counter)
    energy_j: dict[str, float] = field(default_factory=dict)

    def copy(self) -> _Counts:
        return _Counts(self.requests.copy(), self.turned_away.copy(), self.energy_j.copy())


class Metrics:
    """The counters since the start. Every method may be called on any thread."""

    def __init__(self, engine: str) -> None:
        """``engine`` is the engine's build."""
        self._engine = engine
        self._lock = threading.Lock()
        self._counts = _Counts()
        self._presets: dict[str, _Sums] = {}

    def __repr__(self) -> str:
        return f"<Metrics {sum(self._counts.requests.values())} requests>"

    def observe(self, record: Record, _run: Run | None, reading: Reading) -> None:
        """Count a request that has closed; a reader of :class:`~supervisor.ledger.Ledger`."""
        route = record.route if record.route in ROUTES else ""
        with self._lock:
            requests, key = self._counts.requests, (record.preset, route, record.status)
            if key not in requests:
                requests.update(dict.fromkeys(((record.preset, route, each) for each in STATUSES[1:]), 0))
            requests[key] += 1
            sums = self._sums(record.preset)
            for index, count in enumerate(_tokens_of(record)):
                if count and count > 0:
                    sums.tokens[index] += count
            for name, milliseconds in zip(_TIMES, _times_of(record), strict=True):
                if milliseconds is not None:
                    sums.histograms[name].add(milliseconds * 1e-3)
            if reading.gaps:
                sums.histograms[_GAPS].add_gaps(reading.gaps)

    def turned_away(self, code: str) -> None:
        """Count a request that was refused at the door; ``code`` is one of our errors'."""
        with self._lock:
            self._counts.turned_away[code] += 1

    def spend(self, requests_j: float, idle_j: float) -> None:
        """Add what the cards took, in joules. Never called where no card says it: then there is no such metric."""
        with self._lock:
            energy = self._counts.energy_j
            for use, joules in (("requests", requests_j), ("idle", idle_j)):
                energy[use] = energy.get(use, 0.0) + joules

    def scrape(self, live: Live) -> Scrape:
        """What a scrape shows; it takes some 0.1 ms.

        To be called where requests close, the loop, with nothing awaited since ``live`` was made: so none is in both.
        """
        with self._lock:
            for name in live.presets:
                self._sums(name)
            made = {name: each.made_tokens for name, each in live.presets.items()}
            sums = {name: each.scraped(made.get(name, 0)) for name, each in self._presets.items()}
            return Scrape(self._engine, live, self._counts.copy(), sums)

    def _sums(self, preset: str) -> _Sums:
        found = self._presets.get(preset)
        if found is None:
            found = self._presets[preset] = _Sums()
        return found


_Samples = Iterable[tuple[Sequence[str], float]]
"""Label values and value."""


@dataclass(frozen=True, slots=True, eq=False)
class Scrape:
    """One scrape; to ``prometheus_client`` a collector."""

    _engine: str
    _live: Live
    _counts: _Counts
    _sums: Mapping[str, _Sums]

    def tokens(self) -> Mapping[str, Mapping[str, int]]:
        """Tokens of each preset, by kind, as the scrape shows them."""
        return {name: dict(zip(_TOKENS, each.tokens, strict=True)) for name, each in self._sums.items()}

    def render(self, accept: str) -> tuple[bytes, str]:
        """The body and its content type: OpenMetrics 1.0 for who takes it by its Accept header, else Prometheus' text 0.0.4.

        It takes some milliseconds: not for an event loop.
        """
        from prometheus_client import CollectorRegistry, exposition, openmetrics  # 22 ms and 3 MiB, for who is scraped

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        if _takes_openmetrics(accept):
            said: bytes = openmetrics.exposition.generate_latest(registry)  # type: ignore[no-untyped-call]
            return said, OPENMETRICS
        return exposition.generate_latest(registry), TEXT

    def collect(self) -> Iterator[Metric]:
        """Every metric, in the order of :data:`DECLARED`: ``prometheus_client`` asks a collector for it."""
        samples = self._samples()
        for declared in DECLARED.values():
            if declared.kind == "histogram":
                yield _histogram(declared, {preset: each.histograms[declared.name] for preset, each in self._sums.items()})
            else:
                yield _family(declared, samples[declared.name])

    def _samples(self) -> Mapping[str, _Samples]:
        """Of every metric that isn't a histogram, by its name."""
        live, presets = self._live, self._live.presets.items()
        memory = [
            ((name, where), size)
            for name, each in presets
            for where, size in (("host", each.host_bytes), ("card", each.card_bytes))
        ]
        return {
            "llmctl_info": [((__version__, self._engine), 1)],
            "llmctl_requests_total": self._counts.requests.items(),
            "llmctl_tokens_total": [
                ((name, kind), count)
                for name, each in self._sums.items()
                for kind, count in zip(_TOKENS, each.tokens, strict=True)
            ],
            "llmctl_preset_state": [((name, state.value), int(each.state is state)) for name, each in presets for state in State],
            "llmctl_slots": [
                ((name, state), count)
                for name, each in presets
                for state, count in (("busy", each.busy), ("free", max(0, each.slots - each.busy)))
            ],
            "llmctl_waiting_requests": [((name,), each.waiting) for name, each in presets],
            "llmctl_restarts_total": [((name,), each.restarts) for name, each in presets],
            "llmctl_memory_bytes": [(labels, size) for labels, size in memory if size is not None],
            "llmctl_power_watts": [((), live.power_w)] if live.power_w is not None else [],
            "llmctl_energy_joules_total": [((use,), joules) for use, joules in self._counts.energy_j.items()],
            "llmctl_turned_away_total": [((code,), count) for code, count in self._counts.turned_away.items()],
            "llmctl_records_lost_total": [((), live.lost)],
            "process_cpu_seconds_total": [((), live.cpu_s)],
            "process_resident_memory_bytes": [((), live.rss_bytes)],
        }


def _family(declared: Declared, samples: _Samples) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    if declared.kind == "info":
        info = InfoMetricFamily(declared.name.removesuffix("_info"), declared.help, labels=())
        for labels, _ in samples:
            info.add_metric((), dict(zip(declared.labels, labels, strict=True)))
        return info
    of = CounterMetricFamily if declared.kind == "counter" else GaugeMetricFamily
    family = of(declared.name, declared.help, labels=declared.labels, unit=declared.unit)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _histogram(declared: Declared, by_preset: Mapping[str, _Histogram]) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(declared.name, declared.help, labels=declared.labels, unit=declared.unit)
    for preset, histogram in by_preset.items():
        upto = accumulate(histogram.counts)
        names = [*map(str, declared.bounds), "+Inf"]
        family.add_metric((preset,), list(zip(names, upto, strict=True)), histogram.total_s)
    return family


def _takes_openmetrics(accept: str) -> bool:
    """Whether a client takes version 1.0.0; the library would say back any version that it is asked for, and fails at some."""
    for offer in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in offer.split(";"))
        versions = [part.partition("=")[2] for part in parameters if part.startswith("version=")]
        if kind == "application/openmetrics-text" and versions in ([], ["1.0.0"]) and "q=0" not in parameters:
            return True
    return False
