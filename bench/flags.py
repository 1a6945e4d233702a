"""Why the figures of one subject at one level may not be trusted: a word, and a sentence with its numbers.

A flag changes no figure and refuses none. What is called off here is 5 %: of one configuration of llama.cpp's server, runs differ by up to
10 % (508, 455 and 427 tokens/s: polyserve's report on its own noise), of vLLM by 1 to 3 %, so that more than 5 % is more than a quiet
machine shows. Figures of single requests stand in a repetition as their median.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from bench import figures
from bench.result import Repetition
from bench.sample import Sample
from bench.workload import Workload

OFF: Final = 0.05
CLOCK_DROP: Final = 0.10
"""Of a clock, below the best of the repetitions: less than what heat does to a figure (12 to 18 % from cold to warm at craftrigs, 38 % in
fituna's one outlier), more than a boost clock's steps of 15 MHz."""
THROTTLED: Final = 0.05
"""Of the looks at a card."""
LOADED_CORES: Final = 0.5
"""From which on the server is taken to need the CPU: a core that idles lowers its clock, and that is no fault."""
TREND: Final = 1.645
"""Of Mann and Kendall's statistic: a trend that order alone makes in one of ten runs or fewer. Of 4 repetitions all must be in order, of 5
at most one pair may not; of 3 no order says anything."""
OTHERS_CORES: Final = 0.2
STEAL: Final = 0.02
"""Of all cores. Both lengthen whatever is measured on the CPU meanwhile; they are below what would be seen as :data:`OFF`."""
LATE_MS: Final = 5.0
"""At the 99th percentile: as exact as a replay has to be."""
GENERATOR_CORES: Final = 0.8
"""Of the one that it has: beyond, requests and events wait for the generator."""
FEW_TOKENS: Final = 21
"""With fewer, one token more or less in the count is more than 5 % of the ITL: 1 / (21 − 1)."""
OVERHEAD_MS: Final = 20.0
"""That may lie between the server's own time for a prompt and what a client sees: reading the body, the template, the tokenizer, the first
token's sampling. Measured with the tiny model, 36 tokens a prompt, on two cores that others used as well: 5 to 13 ms."""
CACHED: Final = 0.02
"""Of the prompts' tokens, found in the cache beyond what is shared: a text that two prompts begin with by chance is some tokens long."""
HEAD: Final = 0.75
"""Of the shortest fresh prompt, what a template may begin all prompts with."""
SCALE: Final = 1.4826
"""The median absolute deviation times this is the standard deviation where noise is normal: 1 / Φ⁻¹(3/4)."""


def of_point(
    workload: Workload, samples: Sequence[Sample], repetitions: Sequence[Repetition], *, replayed: bool = False
) -> tuple[str, ...]:
    """All that is to be said, ``errors: 3 of 40 requests failed, most often …``; none if nothing is.

    ``samples`` are those of the repetitions, warm-ups left out. What a replay's requests share is its trace's and not the workload's, so
    ``replayed`` leaves the cache alone.
    """
    gauges = [each.gauges for each in repetitions]
    found = [
        *_errors(samples),
        *_short_answers(samples),
        *_few_tokens(samples),
        *(() if replayed else _cache_hits(workload, samples)),
        *_timings_disagree(samples),
        *_clock_drop(gauges),
        *_spread(repetitions),
        *_busy_machine(gauges),
        *_late_generator(samples, gauges),
    ]
    return tuple(found)


def _errors(samples: Sequence[Sample]) -> Iterator[str]:
    failed = [each for each in samples if not each.ok and not each.left]
    if failed:
        ((reason, _),) = Counter(each.error or "no end came" for each in failed).most_common(1)
        yield f"errors: {len(failed)} of {len(samples)} requests failed, most often with: {reason}"


def _short_answers(samples: Sequence[Sample]) -> Iterator[str]:
    pairs = [
        (each.completion_tokens, each.asked_answer)
        for each in samples
        if each.ok and each.completion_tokens is not None and each.asked_answer is not None
    ]
    short = [(made, asked) for made, asked in pairs if made < asked]
    if short:
        made, asked = (statistics.median(side) for side in zip(*short, strict=True))
        yield f"short_answers: {len(short)} of {len(pairs)} ended early, in the median after {made:g} of {asked:g} tokens"


def _few_tokens(samples: Sequence[Sample]) -> Iterator[str]:
    made = [each.completion_tokens for each in samples if each.ok and each.completion_tokens is not None]
    if made and (median := statistics.median(made)) < FEW_TOKENS:
        yield f"few_tokens: answers have {median:g} tokens in the median; an ITL needs {FEW_TOKENS}"


def _cache_hits(workload: Workload, samples: Sequence[Sample]) -> Iterator[str]:
    """A template begins all prompts alike, which nobody has told us of: as many tokens are cached of each, however long it is."""
    pairs = [
        (each.cached_tokens, each.prompt_tokens)
        for each in samples
        if each.ok and each.cached_tokens is not None and each.prompt_tokens
    ]
    if not pairs:
        return
    expected = float(workload.shared)
    if not workload.shared:
        expected = min(statistics.median(cached for cached, _ in pairs), HEAD * min(read for _, read in pairs))
    share = sum(max(0.0, cached - expected) for cached, _ in pairs) / sum(read for _, read in pairs)
    if share > CACHED:
        meant = f"{workload.shared} of each were to be" if workload.shared else "each was to be new"
        yield f"cache_hits: {share:.0%} more of the prompts' tokens came out of the cache than was meant: {meant}"


def _timings_disagree(samples: Sequence[Sample]) -> Iterator[str]:
    ratios = [
        (each.completion_tokens - 1) / (each.last_ms - each.ttft_ms) * 1e3 / each.decode_tps
        for each in samples
        if each.ok and each.completion_tokens is not None and each.completion_tokens >= FEW_TOKENS
        if each.decode_tps and each.ttft_ms is not None and each.last_ms is not None and each.last_ms > each.ttft_ms
    ]
    if ratios and abs(off := statistics.median(ratios) - 1) > OFF:
        yield f"timings_disagree: tokens came {_than(off, 'faster', 'slower')} than the server says that it made them"
    yield from _prefills_disagree(samples)


def _prefills_disagree(samples: Sequence[Sample]) -> Iterator[str]:
    """Of requests that had the server for themselves until their first token: else they wait, and the server's clock doesn't run."""
    pairs = [
        ((each.prompt_tokens - each.cached_tokens) / each.prefill_tps * 1e3, each.ttft_ms)
        for each in _alone(samples)
        if each.prompt_tokens is not None and each.cached_tokens is not None and each.prefill_tps and each.ttft_ms
    ]
    if not pairs:
        return
    server_ms, seen_ms = (statistics.median(side) for side in zip(*pairs, strict=True))
    most_ms = max(OFF * server_ms, OVERHEAD_MS)
    if seen_ms < server_ms * (1 - OFF) or seen_ms > server_ms + most_ms:
        yield f"timings_disagree: the first token came after {seen_ms:.0f} ms, of which the server says that it read for {server_ms:.0f}"


def _alone(samples: Sequence[Sample]) -> Iterator[Sample]:
    """Those that were answered and met no other before their first token."""
    ordered = sorted(samples, key=lambda each: each.sent_s)
    busy_until_s = -math.inf
    for number, each in enumerate(ordered):
        following_s = ordered[number + 1].sent_s if number + 1 < len(ordered) else math.inf
        met = busy_until_s > each.sent_s or (each.ttft_ms is not None and following_s < each.sent_s + each.ttft_ms / 1e3)
        if each.ok and not met:
            yield each
        busy_until_s = max(busy_until_s, math.inf if each.ends_s is None else each.ends_s)


def _clock_drop(gauges: Sequence[Mapping[str, float]]) -> Iterator[str]:
    cards = [each["sm_mhz"] for each in gauges if "sm_mhz" in each]
    cores = [each["cpu_mhz"] for each in gauges if "cpu_mhz" in each and each.get("cpu_share", 0.0) >= LOADED_CORES]
    for whose, clocks in (("the card's", cards), ("the CPU's", cores)):
        if clocks and (drop := 1 - min(clocks) / max(clocks)) > CLOCK_DROP:
            yield f"clock_drop: {whose} clock was {max(clocks):.0f} MHz in one repetition and {min(clocks):.0f} in another, {drop:.0%} less"
    if (share := _mean(gauges, "throttled")) is not None and share > THROTTLED:
        yield f"clock_drop: heat or its power supply slowed a card down at {share:.0%} of the looks"


def _spread(repetitions: Sequence[Repetition]) -> Iterator[str]:
    """Of the figures that runs are compared by, the one that is worst: that it drifts, and how it is spread."""
    drifts, spreads = dict[str, float](), dict[str, float]()
    for tag in figures.HEADLINE:
        values = [each.values[tag] for each in repetitions if tag in each.values]
        if len(values) > 2 and statistics.median(values) > 0:
            drifts[figures.BY_TAG[tag].name] = drift(values)
            spreads[figures.BY_TAG[tag].name] = variation(values)
    if drifts:
        name = max(drifts, key=lambda each: abs(drifts[each]))
        if abs(off := drifts[name]) > OFF:
            yield f"rep_drift: {name} {'rose' if off > 0 else 'fell'} by {abs(off):.0%} from the first repetition to the last"
        name = max(spreads, key=lambda each: spreads[each])
        if spreads[name] > OFF:
            yield f"high_variance: {name} is spread by {spreads[name]:.0%} (robust CV) over {len(repetitions)} repetitions"


def drift(values: Sequence[float]) -> float:
    """How much of their median the values go up or down by from first to last; 0 where their order may be by chance.

    The slope is Theil and Sen's (the median of those of all pairs), the order's test Mann and Kendall's, normal approximation with
    continuity correction.
    """
    count = len(values)
    pairs = [(j - i, values[j] - values[i]) for i in range(count) for j in range(i + 1, count)]
    score = sum((difference > 0) - (difference < 0) for _, difference in pairs)
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    if not deviation or (abs(score) - 1) / deviation <= TREND:
        return 0.0
    return statistics.median(difference / steps for steps, difference in pairs) * (count - 1) / statistics.median(values)


def variation(values: Sequence[float]) -> float:
    """Their robust coefficient of variation: the scaled median absolute deviation, of the median."""
    median = statistics.median(values)
    return SCALE * statistics.median(abs(each - median) for each in values) / median


def _busy_machine(gauges: Sequence[Mapping[str, float]]) -> Iterator[str]:
    if (cores := _mean(gauges, "others_cpu_share")) is not None and cores > OTHERS_CORES:
        yield f"busy_machine: other processes used {cores:.2f} cores"
    if (share := _mean(gauges, "steal_share")) is not None and share > STEAL:
        yield f"busy_machine: the host of this virtual machine took {share:.0%} of its cores"


def _late_generator(samples: Sequence[Sample], gauges: Sequence[Mapping[str, float]]) -> Iterator[str]:
    late = sorted(each.late_ms for each in samples if each.late_ms is not None)
    if late and (p99 := figures.percentile(late, 99)) > LATE_MS:
        yield f"late_generator: requests were sent {p99:.1f} ms after they were due (p99)"
    cores = max((each["generator_cpu_share"] for each in gauges if "generator_cpu_share" in each), default=0.0)
    if cores > GENERATOR_CORES:
        yield f"late_generator: it used {cores:.0%} of the one core that it has"


def _than(off: float, more: str, less: str) -> str:
    return f"{abs(off):.0%} {more if off > 0 else less}"


def _mean(gauges: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Over the repetitions that have it."""
    known = [each[name] for each in gauges if name in each]
    return statistics.fmean(known) if known else None
