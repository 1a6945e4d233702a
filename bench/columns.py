"""The table of a result: which columns there are, each declared once, and what of a file may be printed.

The terminal and the page show the same table. A result is a file that anybody may have written: a text of it is printed with what can't be
printed as escapes, and a number that is none (a text, a list, not finite) is as unknown as one that isn't there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench import figures, gauges
from bench.ask import Level
from bench.intervals import LEAST, t_quantile
from bench.result import Point, Repetition, Result, Subject
from bench.workload import Workload, told

LONGEST: Final = 4000
"""Characters of a text."""
MOST: Final = 1e15
"""No figure is larger, and what is can't be drawn."""
SHA: Final = 12
"""Characters of a digest: enough to tell models apart."""
SURE: Final = 0.95
TAIL: Final = 100
"""Requests from which on a 99th percentile is shown: of fewer it is the slowest one, more or less."""


@dataclass(frozen=True, slots=True)
class Column:
    """Declares one."""

    name: str
    """Short, with its unit at its end; each word on a line of its own."""
    meaning: str
    """With its formula; empty where the column before it says it."""
    of: Callable[[Point], float | None]


def plain(text: object, longest: int = LONGEST) -> str:
    """A text as one line of some length that gives a terminal no orders and that any encoding can hold."""
    whole = str(text)
    shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in whole[:longest])
    return shown if len(whole) <= longest else f"{shown}…"


def known(value: object) -> float | None:
    """A number of a file; None for what is none."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) and -MOST <= value <= MOST else None


def values(repetitions: Iterable[Repetition], tag: str) -> list[float]:
    """A figure of each repetition that has it."""
    return [value for each in repetitions if (value := known(each.values.get(tag))) is not None]


def metric(point: Point, tag: str, field: str) -> float | None:
    """``metric(point, "time_to_first_token", "p50")``."""
    spread = point.metrics.get(tag)
    return known(spread.get(field)) if isinstance(spread, Mapping) else None


def _of(tag: str, field: str, factor: float = 1.0) -> Callable[[Point], float | None]:
    def of(point: Point) -> float | None:
        value = metric(point, tag, field)
        return None if value is None else value * factor

    return of


def _tail(point: Point) -> float | None:
    enough = (metric(point, "time_to_first_token", "count") or 0) >= TAIL
    return metric(point, "time_to_first_token", "p99") if enough else None


def half_width_percent(point: Point) -> float | None:
    """Half of the interval in which the mean of the tokens/s in all lies, :data:`SURE`, in percent of it; None of too few repetitions.

    Student's, over repetitions: mean ± t · s / √n.
    """
    found = values(point.repetitions, "output_token_throughput")
    if len(found) < LEAST or (mean := statistics.fmean(found)) <= 0:
        return None
    return t_quantile((1 + SURE) / 2, len(found) - 1) * statistics.stdev(found) / math.sqrt(len(found)) / mean * 100


def _gauge(name: str, fold: Callable[[Sequence[float]], float]) -> Callable[[Point], float | None]:
    def of(point: Point) -> float | None:
        seen = [value for each in point.repetitions if (value := known(each.gauges.get(name))) is not None]
        return fold(seen) if seen else None

    return of


def _formula(tag: str) -> str:
    return figures.BY_TAG[tag].formula


def _failed(point: Point) -> float | None:
    return known(point.counts.error) or None


_CARD: Final = "VRAM"
COLUMNS: Final = (
    Column("TTFT p50 ms", f"time to the first token: {_formula('time_to_first_token')}", _of("time_to_first_token", "p50")),
    Column("TTFT p95 ms", "", _of("time_to_first_token", "p95")),
    Column("TTFT p99 ms", "", _tail),
    Column("ITL p50 ms", f"time between tokens: {_formula('inter_token_latency')}", _of("inter_token_latency", "p50")),
    Column("ITL p95 ms", "", _of("inter_token_latency", "p95")),
    Column(
        "user tok/s",
        f"tokens a second of one user, median: {_formula('output_token_throughput_per_user')}",
        _of("output_token_throughput_per_user", "p50"),
    ),
    Column(
        "all tok/s",
        f"tokens a second in all, mean of the repetitions: {_formula('output_token_throughput')}",
        _of("output_token_throughput", "avg"),
    ),
    Column("± %", f"of that mean: it lies so near, {SURE * 100:.0f} % sure, by how repetitions differ", half_width_percent),
    Column("req/s", _formula("request_throughput"), _of("request_throughput", "avg")),
    Column("good req/s", f"goodput: {_formula('goodput')}", _of("goodput", "avg")),
    Column("cached %", _formula("cached_share"), _of("cached_share", "avg", 100)),
    Column("accepted %", _formula("draft_acceptance"), _of("draft_acceptance", "avg", 100)),
    Column("RAM MiB", gauges.BY_NAME["rss_mib"].help, _gauge("rss_mib", max)),
    Column(f"{_CARD} MiB", gauges.BY_NAME["server_card_mib"].help, _gauge("server_card_mib", max)),
    Column(f"{_CARD} MiB", gauges.BY_NAME["card_mib"].help, _gauge("card_mib", max)),
    Column("power W", gauges.BY_NAME["power_w"].help, _gauge("power_w", statistics.fmean)),
    Column("failed", "requests that had an error or no end", _failed),
)
"""From left to right. Percentiles are over all requests of a level."""


def columns(result: Result) -> tuple[Column, ...]:
    """Those of which anybody has a number; of two with one name the first."""
    found: dict[str, Column] = {}
    for column in COLUMNS:
        if column.name not in found and any(column.of(point) is not None for point in result.points):
            found[column.name] = column
    return tuple(found.values())


def digits(numbers: Iterable[float | None]) -> int:
    """Decimals of a column: three figures of its least number, three decimals at most."""
    least = min((abs(number) for number in numbers if number), default=100.0)
    return max(0, min(3, 2 - math.floor(math.log10(least))))


def written(number: float | None, decimals: int) -> str:
    """``1,234.5``; a number that nobody has is a dash."""
    return "–" if number is None else f"{number:,.{decimals}f}"


def short(number: float) -> str:
    """One number in a sentence."""
    return written(number, digits([number]))


def levels(result: Result) -> tuple[Level, ...]:
    """In the order in which they were measured."""
    return tuple({point.level.key: point.level for point in reversed(result.points)}.values())[::-1]


def measured(workload: Workload) -> str:
    """What was asked, in words: ``chat: prompts of 80-240 tokens, answers of 128, 5 repetitions``."""
    limits = ", ".join(f"{name.removesuffix('_ms').upper()} {limit:g} ms" for name, limit in workload.limits.items())
    return f"{told(workload)}, {workload.repetitions} repetitions" + (f"; good is within {limits}" if limits else "")


def about(subject: Subject) -> str:
    """A subject in words, of what is known: ``llmctl, SmolLM2.gguf (sha256 1234…), llama.cpp b11312, 4 slots, 4,096 tokens each``."""
    kind = " ".join(each for each in (subject.kind, subject.version) if each)
    model = subject.file or subject.model
    if model and subject.sha256:
        model += f" (sha256 {subject.sha256[:SHA]})"
    slots = f"{subject.slots} slot{'s' * (subject.slots != 1)}" if subject.slots else ""
    room = f"{written(context, 0)} tokens of context" if (context := known(subject.context)) else ""
    engine = f"engine {subject.engine}" if subject.engine else ""
    return plain(", ".join(each for each in (kind, model, engine, slots, room) if each))


def machine(result: Result) -> str:
    """The machine in words."""
    found = result.manifest.machine
    told = (
        f"{found.cores} × {found.cpu}",
        f"{written(known(found.memory_mib), 0)} MiB",
        *(found.cards or ("no card",)),
        found.driver and f"driver {found.driver}",
        found.kernel,
        found.governor and f"governor {found.governor}",
    )
    return plain(", ".join(each for each in told if each))


def generator(result: Result) -> str:
    """What the load generator itself took; empty where it isn't known."""
    seen = result.manifest.generator
    share, each = known(seen.get("cpu_share")), known(seen.get("us_an_event"))
    if share is None:
        return ""
    return f"the load generator took {share * 100:.1f} % of one core" + (f", {each:.0f} µs an event" if each is not None else "")


def failures(result: Result) -> list[str]:
    """How requests ended that weren't answered as they were asked, a sentence a point."""
    sentences = []
    for point in result.points:
        ok, error, left, short_ = (
            int(known(each) or 0) for each in (point.counts.ok, point.counts.error, point.counts.left, point.counts.short)
        )
        parts = ((error, "failed"), (short_, "had fewer or more tokens than were asked"), (left, "were left"))
        if said := ", ".join(f"{count} {what}" for count, what in parts if count):
            sentences.append(plain(f"{point.target}, {point.level}: of {ok + error + left} requests {said}"))
    return sentences
