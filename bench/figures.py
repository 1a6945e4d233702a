"""What is reckoned of samples: each figure declared once, with its tag, unit and formula.

Tags and the shape of a figure (``{unit, avg, p1, …, p99, min, max, std, count, sum}``) are AIPerf's, so that what reads its files reads
ours; the short names are those of our tables. Tools mean different things by TPOT and ITL: each formula is printed where the figure is.
Tokens are the server's count: one event may carry several, or none.

Percentiles are linear between order statistics (NumPy's default, which AIPerf and vLLM use).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from bench.sample import Sample

PERCENTILES: Final = (1, 5, 10, 25, 50, 75, 90, 95, 99)

Better = Literal["lower", "higher", ""]


@dataclass(frozen=True, slots=True)
class Figure:
    """Declares one."""

    tag: str
    name: str
    unit: str
    formula: str
    better: Better
    """Which way is good; empty where neither is."""
    of: Callable[[Sample], Iterable[float]] | None = None
    """Its values of one request; None for one of a whole repetition."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How a figure is spread over requests; the same field names as in the JSON. Of nothing there is none."""

    unit: str
    avg: float
    p1: float
    p5: float
    p10: float
    p25: float
    p50: float
    p75: float
    p90: float
    p95: float
    p99: float
    min: float
    max: float
    std: float
    count: int
    sum: float

    @classmethod
    def over(cls, unit: str, values: Sequence[float]) -> Spread | None:
        """Of the values; None where there are none."""
        if not values:
            return None
        ordered = sorted(values)
        total = math.fsum(ordered)
        cuts = {f"p{share}": percentile(ordered, share) for share in PERCENTILES}
        std = statistics.pstdev(ordered)
        return cls(unit, total / len(ordered), **cuts, min=ordered[0], max=ordered[-1], std=std, count=len(ordered), sum=total)

    def as_dict(self) -> dict[str, Any]:
        """For the JSON."""
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that ``share`` percent of the sorted values don't exceed, linear between two of them."""
    place = (len(ordered) - 1) * share / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _itl(sample: Sample) -> Iterable[float]:
    if sample.last_ms is not None and sample.ttft_ms is not None and (tokens := sample.completion_tokens or 0) > 1:
        yield (sample.last_ms - sample.ttft_ms) / (tokens - 1)


def tpot_ms(sample: Sample) -> float | None:
    """TPOT as vLLM has it."""
    if sample.e2e_ms is None or sample.ttft_ms is None or (sample.completion_tokens or 0) < 2:
        return None
    assert sample.completion_tokens is not None
    return (sample.e2e_ms - sample.ttft_ms) / (sample.completion_tokens - 1)


def _per_user(sample: Sample) -> Iterable[float]:
    return (1e3 / each for each in _itl(sample) if each > 0)


def _prefill(sample: Sample) -> Iterable[float]:
    if sample.ttft_ms and sample.prompt_tokens is not None:
        yield (sample.prompt_tokens - (sample.cached_tokens or 0)) / sample.ttft_ms * 1e3


def _known(value: float | None) -> Iterable[float]:
    return () if value is None else (value,)


FIGURES: Final = (
    Figure("time_to_first_token", "TTFT", "ms", "first event with text − sending", "lower", lambda one: _known(one.ttft_ms)),
    Figure(
        *("time_to_first_output_token", "TTFO", "ms", "first event with text that is no thought − sending", "lower"),
        lambda one: _known(one.ttfo_ms),
    ),
    Figure("inter_token_latency", "ITL", "ms", "(last event with text − first) / (tokens − 1), of each request", "lower", _itl),
    Figure(
        "inter_chunk_latency",
        "gaps",
        "ms",
        "between events with text, of all requests together",
        "lower",
        lambda one: one.gaps_ms,
    ),
    Figure(
        *("time_per_output_token", "TPOT", "ms", "(end − first event with text) / (tokens − 1), as vLLM has it", "lower"),
        lambda one: _known(tpot_ms(one)),
    ),
    Figure(
        "request_latency",
        "E2E",
        "ms",
        "end of the answer − sending (AIPerf: last event with text)",
        "lower",
        lambda one: _known(one.e2e_ms),
    ),
    Figure("output_token_throughput_per_user", "tok/s/user", "tokens/sec/user", "1 / ITL, of each request", "higher", _per_user),
    Figure(
        *(
            "computed_prefill_throughput_per_user",
            "prefill",
            "tokens/sec/user",
            "(prompt − cached tokens) / TTFT, of each request",
            "higher",
        ),
        _prefill,
    ),
    Figure("output_sequence_length", "answer", "tokens", "tokens of an answer", "", lambda one: _known(one.completion_tokens)),
    Figure("input_sequence_length", "prompt", "tokens", "tokens of a prompt", "", lambda one: _known(one.prompt_tokens)),
    Figure(
        *("usage_prompt_cache_read_tokens", "cached", "tokens", "prompt tokens that came out of the server's cache", ""),
        lambda one: _known(one.cached_tokens),
    ),
    Figure("schedule_lag", "late", "ms", "sending − when it was due", "lower", lambda one: _known(one.late_ms)),
    # Of a whole repetition: a value each, and their spread is over repetitions.
    Figure("output_token_throughput", "tok/s", "tokens/sec", "tokens of all answers / duration", "higher"),
    Figure("total_token_throughput", "all tok/s", "tokens/sec", "tokens of all prompts and answers / duration", "higher"),
    Figure("request_throughput", "req/s", "requests/sec", "answered requests / duration", "higher"),
    Figure("goodput", "goodput", "requests/sec", "requests within all limits / duration", "higher"),
    Figure("cached_share", "cached", "ratio", "cached tokens / prompt tokens", ""),
    Figure("draft_acceptance", "accepted", "ratio", "draft tokens that were right / draft tokens", ""),
    Figure("energy_per_output_token", "J/token", "J", "the cards' energy / tokens of all answers", "lower"),
)
"""In the order of the report. Duration is from the first sending to the last answer's end."""
BY_TAG: Final[Mapping[str, Figure]] = MappingProxyType({each.tag: each for each in FIGURES})
HEADLINE: Final = ("time_to_first_token", "inter_token_latency", "output_token_throughput")
"""What two runs are compared by: how soon, how fast, how much."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How requests ended."""

    ok: int
    error: int
    left: int
    """Clients that were to leave, and did."""
    short: int
    """Answered, with fewer or more tokens than were meant."""


def count(samples: Iterable[Sample]) -> Counts:
    """Of the samples."""
    found = list(samples)
    ok = [each for each in found if each.ok]
    short = sum(each.asked_answer is not None and each.completion_tokens != each.asked_answer for each in ok)
    left = sum(each.left for each in found)
    return Counts(len(ok), len(found) - len(ok) - left, left, short)


def duration_s(samples: Iterable[Sample]) -> float:
    """From the first sending to the last end; 0 of nothing."""
    ended = [(each.sent_s, each.ends_s) for each in samples if each.ends_s is not None]
    return max(end for _, end in ended if end is not None) - min(sent for sent, _ in ended) if ended else 0.0


def is_good(sample: Sample, limits: Mapping[str, float]) -> bool:
    """Whether it was answered within every limit; one that couldn't be held against a limit wasn't."""
    seen = {"ttft_ms": sample.ttft_ms, "tpot_ms": tpot_ms(sample), "e2e_ms": sample.e2e_ms}
    return sample.ok and all((value := seen[name]) is not None and value <= limit for name, limit in limits.items())


def of_requests(samples: Iterable[Sample]) -> dict[str, Spread]:
    """Figures of single requests, over all that were answered, by tag."""
    ok = [each for each in samples if each.ok]
    spreads = {
        figure.tag: Spread.over(figure.unit, [value for sample in ok for value in figure.of(sample)])
        for figure in FIGURES
        if figure.of is not None
    }
    return {tag: spread for tag, spread in spreads.items() if spread is not None}


def of_repetition(samples: Iterable[Sample], limits: Mapping[str, float], energy_j: float | None = None) -> dict[str, float]:
    """Figures of one repetition as a whole, by tag; what isn't known isn't in it.

    ``energy_j`` is what the cards took meanwhile. Of the figures of single requests the median is in it, too: it is what repetitions are
    compared by.
    """
    found = list(samples)
    ok = [each for each in found if each.ok]
    lasted_s = duration_s(ok)
    values = {tag: spread.p50 for tag, spread in of_requests(ok).items()}
    if not lasted_s:
        return values
    made = _sum(each.completion_tokens for each in ok)
    read, cached = _sum(each.prompt_tokens for each in ok), _sum(each.cached_tokens for each in ok)
    drafted, right = _sum(each.draft_tokens for each in ok), _sum(each.draft_accepted for each in ok)
    values["request_throughput"] = len(ok) / lasted_s
    if made is not None:
        values["output_token_throughput"] = made / lasted_s
        if read is not None:
            values["total_token_throughput"] = (made + read) / lasted_s
        if energy_j is not None and made:
            values["energy_per_output_token"] = energy_j / made
    if limits:
        values["goodput"] = sum(is_good(each, limits) for each in ok) / lasted_s
    if cached is not None and read:
        values["cached_share"] = cached / read
    if drafted and right is not None:
        values["draft_acceptance"] = right / drafted
    return values


def _sum(values: Iterable[float | None]) -> float | None:
    """Of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    return math.fsum(known) if known else None
