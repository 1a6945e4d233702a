"""One record explained in plain words: where its time went, why its prompt was cached or wasn't, and how that compares. Pure.

Every sentence is one fact with its numbers; what isn't known isn't told. Their order is always the same: what became of the request, where
its time went (the longest part first), its wait, the cache, the depth of the context, the answer, energy.

A figure is called faster or slower than usual only where it lies outside Tukey's fences, that is more than 1.5 times the distance of the
preset's quartiles beyond them (Exploratory Data Analysis, 1977), and at least :data:`TELLING` from the median. Speeds are compared only
over enough tokens: a batch takes its time however few are in it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from supervisor.record import Record, Run
from supervisor.units import JOULES_A_WH, spell_ms

FEWEST: Final = 8
"""Records that a usual is made of."""
FENCE: Final = 1.5
TELLING: Final = 0.1
"""Of the median."""
PREFILL_TOKENS: Final = 64
"""Computed, before the speed is compared."""
DECODE_TOKENS: Final = 16
"""Made, before the speed or their gaps are."""
WAIT_MS: Final = 50.0
"""A shorter wait isn't told."""
NEGLIGIBLE: Final = 0.01
"""Of the whole time; a shorter part isn't told in words."""
CACHED_FOR_SHARED: Final = 0.8
"""So much of what is shared, by length, counts as all of it: bytes are no tokens, and the cache is cut at a checkpoint."""
SLACK_TOKENS: Final = 64
"""Fewer that are missing are no loss worth a reason."""
OVERLAP_S: Final = 0.1
"""A client may send its next request before the last one's record is closed."""
STALL: Final = 4.0
"""The longest gaps are so many times the median, and longer than :data:`STALL_MS`: the text came unevenly."""
STALL_MS: Final = 500.0
GAPS: Final = 200
"""Of so many tokens, one gap in a hundred is told; of fewer that is the longest."""
LARGE_BYTES: Final = 1024
"""A shorter prompt costs little, whatever changes in it."""
HEAD: Final = ("tools", "system", "message 1 (system)", "message 1 (developer)", "input 1 (system)", "input 1 (developer)")
"""Pieces that are meant to stay the same."""
WH_FROM_J: Final = 360.0
"""From a tenth of a watt-hour on."""

ERRORS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "queue_full": "the queue was full",
        "queue_timeout": "no slot became free in time",
        "does_not_fit": "the model doesn't fit into the memory that is free",
        "cannot_start": "its engine can't be started (llmctl status has the reason)",
        "engine_unavailable": "its engine is down (llmctl status has the reason)",
        "faulty_preset": "its preset can't be read (llmctl check has the reason)",
        "model_not_downloaded": "the preset's model isn't on this machine (llmctl pull fetches it)",
        "model_not_found": "there is no preset of the name that it asked for",
        "missing_model": "it named no model, and no preset is the default",
        "wrong_kind": "its preset is for another kind of request",
        "context_length_exceeded": "its prompt is longer than the context of a slot",
        "body_too_large": "its body was too large",
        "body_timeout": "its body didn't arrive in time",
        "invalid_request_error": "something in it can't be used",
        "engine_crashed": "an engine died twice with this request in work",
        "engine_died": "its engine ended before its answer did",
        "stopping": "llmctl was about to stop",
        "upstream_error": "the engine's answer broke off",
        "upstream_event_too_large": "the engine sent an event too large to pass on",
        "internal_error": "llmctl had a fault of its own (llmctl logs has it)",
    }
)
"""What an error's code means, in the record of a request."""
REMEDIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "context_length_exceeded": "A larger context, fewer slots or `truncate: oldest` in its preset would make room for it.",
        "queue_full": "More slots, or fewer requests at a time, keep the queue short.",
        "queue_timeout": "More slots, or fewer requests at a time, keep the queue short.",
        "engine_died": "Sent again, it goes to a new engine.",
    }
)
"""What to do about it, where the reason doesn't say that."""
_ENGINES: Final = "engine_"
"""How the codes of the engine's own errors begin: the HTTP status follows."""


class Quartiles(NamedTuple):
    """Of a figure over several requests: a quarter of them is below the first, half below the second."""

    q1: float
    median: float
    q3: float

    def off(self, value: float) -> float:
        """How far outside of what is usual, of the median: -0.22 is 22 % less; 0 inside."""
        reach = FENCE * (self.q3 - self.q1)
        inside = self.q1 - reach <= value <= self.q3 + reach
        off = (value - self.median) / self.median if self.median else math.copysign(math.inf, value)
        return 0.0 if inside or abs(off) < TELLING else off


@dataclass(frozen=True, slots=True)
class Usual:
    """What a preset's requests were like. A figure that fewer than :data:`FEWEST` of them have is None."""

    count: int = 0
    ttft_ms: Quartiles | None = None
    queue_ms: Quartiles | None = None
    prefill_tps: Quartiles | None = None
    decode_tps: Quartiles | None = None
    acceptance: Quartiles | None = None
    """Guessed tokens that were right, of one."""


class Segment(NamedTuple):
    """A part of a request's time."""

    name: str
    """queue, load, prefill, decode, first token, answer, rest."""
    ms: float


_PHRASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "queue": "waiting for a slot",
        "load": "until its engine was up",
        "prefill": "prefill",
        "decode": "decode",
        "first token": "at the engine before the first token",
        "answer": "after the first token",
        "rest": "elsewhere",
    }
)


def usual(records: Sequence[Record]) -> Usual | None:
    """What is usual by these, of which those count that were answered whole; None where they are fewer than :data:`FEWEST`."""
    whole = [each for each in records if each.status == "ok"]
    if len(whole) < FEWEST:
        return None

    def over(figure: Callable[[Record], float | None]) -> Quartiles | None:
        values = [value for each in whole if (value := figure(each)) is not None]
        return Quartiles(*statistics.quantiles(values, n=4, method="inclusive")) if len(values) >= FEWEST else None

    return Usual(
        count=len(whole),
        ttft_ms=over(lambda each: each.ttft_ms),
        queue_ms=over(lambda each: each.queue_ms),
        prefill_tps=over(_prefill_tps),
        decode_tps=over(_decode_tps),
        acceptance=over(_acceptance),
    )


def segments(record: Record) -> tuple[Segment, ...]:
    """The request's time in its parts, in their order; their sum is ``total_ms``. Empty where that isn't known.

    The engine's own figures are of its sequences one after the other: where they are more than the time there was (``n: 2``), or there are
    none (Anthropic's API), the first token divides it.
    """
    if record.total_ms is None:
        return ()
    waits = [Segment("queue", record.queue_ms or 0.0), Segment("load", record.load_ms or 0.0)]
    left_ms = record.total_ms - sum(each.ms for each in waits)
    works = [Segment("prefill", record.prefill_ms or 0.0), Segment("decode", record.decode_ms or 0.0)]
    if not 0.0 < sum(each.ms for each in works) <= left_ms:
        works = []
        if record.ttft_ms is not None and record.attempts == 1:
            first_ms = min(left_ms, max(0.0, record.ttft_ms - record.total_ms + left_ms))
            works = [Segment("first token", first_ms), Segment("answer", max(0.0, left_ms - first_ms))]
    rest = Segment("rest", max(0.0, left_ms - sum(each.ms for each in works)))
    return tuple(each for each in (*waits, *works, rest) if each.ms > 0.0)


def spell(ms: float) -> str:
    """``410.0`` → ``"410 ms"``, ``9400`` → ``"9.4 s"``."""
    return spell_ms(ms) if ms >= 1 else "under 1 ms"


def explain(
    record: Record, run: Run | None, usual: Usual | None, like: Record | None, earlier: Sequence[Record] = ()
) -> tuple[str, ...]:
    """The sentences. ``usual`` is of its preset's requests before it, ``earlier`` the last of those, ``like`` the one that begins alike."""
    known = usual or Usual()
    spent = (*_outcome(record), *_time(record, known), *_wait(record, known))
    cache = (*_prompt(record, known), *_likeness(record, run, like, earlier))
    return (*spent, *cache, *_answer(record, run, known), *_energy(record))


def _outcome(record: Record) -> Iterator[str]:
    """What became of it, where that isn't an answer, and what it took to have one."""
    reason = _reason(record.error)
    status = f" with HTTP {record.http_status}" if record.http_status is not None and record.http_status >= 400 else ""
    made = f" after {_many(record.completion_tokens, 'token')}" if record.completion_tokens else ""
    early = " before the first token" if record.ttft_ms is None else ""
    said = {
        "open": "It is in work",
        "cancelled": f"Its client left{made or early}",
        "truncated": f"Its answer was cut{made}{reason}",
        "refused": f"It was refused{status}{reason}",
        "error": f"It had an error in the place of an answer{status}{reason}",
        "interrupted": f"llmctl ended while it was in work{reason}",
    }
    if record.status in said:
        yield f"{said[record.status]}."
    if record.error is not None and record.error in REMEDIES:
        yield REMEDIES[record.error]
    if record.error == "queue_full" and record.ahead is not None:
        yield f"{_were(record.ahead, 'request')} in work or waiting when it came."
    if record.attempts > 1:
        second = "a second engine because the first died"
        engines = second if record.attempts == 2 else f"{record.attempts} engines, because those before the last died"
        again = f"; {_were(record.wasted_tokens, 'token')} made twice" if record.wasted_tokens else ""
        yield f"It was put to {engines}{again}."
    elif record.wasted_tokens:
        yield f"{_were(record.wasted_tokens, 'token')} made and never delivered."
    if record.dropped_turns:
        yield f"{_were(record.dropped_turns, 'turn')} left out, the oldest, so that the rest fits into the context."


def _reason(code: str | None) -> str:
    if code is None:
        return ""
    if code not in ERRORS and code.startswith(_ENGINES):
        return f": the engine answered {code.removeprefix(_ENGINES)}"
    return f": {ERRORS[code]} ({code})" if code in ERRORS else f": {code}"


def _time(record: Record, usual: Usual) -> Iterator[str]:
    if record.total_ms is None:
        return
    parts = sorted((each for each in segments(record) if each.ms >= NEGLIGIBLE * record.total_ms), key=lambda each: -each.ms)
    told = ", ".join(f"{spell(each.ms)} {_PHRASES[each.name]}" for each in parts)
    is_told = any(each.name != "rest" for each in parts)
    yield f"It took {spell(record.total_ms)}{f': {told}' if is_told else ''}."
    if usual.ttft_ms is not None and record.ttft_ms is not None and usual.ttft_ms.off(record.ttft_ms) > 0:
        yield f"Its first token came after {spell(record.ttft_ms)}, and {spell(usual.ttft_ms.median)} is usual for this preset."


def _wait(record: Record, usual: Usual) -> Iterator[str]:
    if record.queue_ms is not None and record.queue_ms >= WAIT_MS:
        is_long = usual.queue_ms is not None and usual.queue_ms.off(record.queue_ms) > 0
        against = f", where {spell(usual.queue_ms.median)} is usual" if is_long and usual.queue_ms else ""
        ahead = f"; {_were(record.ahead, 'request')} in work or waiting before it" if record.ahead else ""
        yield f"It waited {spell(record.queue_ms)} for a slot{against}{ahead}."
        if record.batch:
            yield "It is of the class that may wait: others went before it."


def _prompt(record: Record, usual: Usual) -> Iterator[str]:
    """How much of the prompt was computed, and how fast."""
    prompt, cached = record.prompt_tokens, record.cached_tokens
    if prompt is None:
        return
    pace = _pace(record.prefill_tps, usual.prefill_tps) if _prefill_tps(record) is not None else ""
    if cached is None:
        yield f"Its prompt has {_many(prompt, 'token')}{f', computed{pace}' if pace else ''}."
    elif not cached:
        yield f"None of its {_many(prompt, 'prompt token')} came from the cache; all were computed{pace}."
    else:
        came = f"{cached:,} of its {_many(prompt, 'prompt token')} came from the cache"
        yield f"{came}; {max(0, prompt - cached):,} {'was' if prompt - cached == 1 else 'were'} computed{pace}."


def _likeness(record: Record, run: Run | None, like: Record | None, earlier: Sequence[Record]) -> Iterator[str]:
    """Where the prompt parts from those before it, and what became of what they share."""
    size, shared = record.prompt_chars, record.shared_chars
    if not size or shared is None or record.cached_tokens is None:
        return
    if record.shared_with is None or not shared:
        yield from _unlike(record, record.cached_tokens, earlier)
        return
    missing = _missing(record, size, shared)
    ended_at, up_at = None if like is None else like.closed_at, _up_at(record)
    if missing and ended_at is not None and up_at is not None and ended_at <= up_at:
        yield f"{_parting(record, size, shared, like, is_lost=True)}, but the engine has been started anew since, and its cache was gone."
        return
    is_lost = missing > SLACK_TOKENS
    yield f"{_parting(record, size, shared, like, is_lost=is_lost)}."
    if is_lost:
        yield f"Most of that was in the cache no longer: {_loss(record, run, like)}."
    if record.parted_in in HEAD and size >= LARGE_BYTES and shared < size / 2:
        yield (
            "A prompt whose beginning changes (a time, an id, the order of the tools) is computed anew from there on: "
            "what changes belongs at its end."
        )


def _unlike(record: Record, cached: int, earlier: Sequence[Record]) -> Iterator[str]:
    """Nothing is the same: a first prompt, or one that begins otherwise than all before it."""
    up_at = _up_at(record)
    if up_at is None or cached > SLACK_TOKENS:
        return
    if not any(each.attempts and (each.closed_at or math.inf) > up_at for each in earlier):
        if not record.ahead:
            yield "It was the first prompt since its engine started."
        return
    is_opening = cached > 0 and record.parted_in != "prompt"
    said = (
        "Only the template's opening is the same as in a prompt before it" if is_opening else "No prompt before it begins like it"
    )
    costs = (
        ": a system prompt that changes at its beginning costs the whole cache" if "system" in (record.parted_in or "") else ""
    )
    yield f"{said}{costs}."


def _parting(record: Record, size: int, shared: int, like: Record | None, *, is_lost: bool) -> str:
    like_size = None if like is None else like.prompt_chars
    if shared >= size:
        return f"The prompt is {'the same as that' if like_size == size else 'the beginning of that'} of {record.shared_with}"
    first = f"its first {shared:,} of {_many(size, 'byte')}"
    if like_size == shared:
        rest = "" if is_lost else ", and only the rest is new"
        return f"The prompt goes on from that of {record.shared_with}: {first} are the whole of that one{rest}"
    where = f" and parts from it in {record.parted_in}" if record.parted_in else ""
    rest = "" if is_lost else ": everything from there had to be computed"
    return f"The prompt is the same as that of {record.shared_with} for {first}{where}{rest}"


def _missing(record: Record, size: int, shared: int) -> float:
    """Tokens that the prompts share and the cache didn't have, as far as bytes say how many that is; 0 where it had most of them."""
    expected, cached = (record.prompt_tokens or 0) * shared / size, record.cached_tokens or 0
    return expected - cached if cached < CACHED_FOR_SHARED * expected else 0.0


def _put_at(record: Record) -> float:
    """When an engine had it, in seconds since 1970."""
    return record.opened_at + ((record.queue_ms or 0.0) + (record.load_ms or 0.0)) / 1e3


def _up_at(record: Record) -> float | None:
    """When that engine came up, in seconds since 1970."""
    return None if record.up_ms is None else _put_at(record) - record.up_ms / 1e3


def _loss(record: Record, run: Run | None, like: Record | None) -> str:
    """Why that may be."""
    name = record.shared_with
    if record.dropped_turns:
        return "turns were left out, so what the engine got begins otherwise"
    ended_at = None if like is None else like.closed_at
    if like is not None and (ended_at is None or ended_at > _put_at(record) + OVERLAP_S):
        return f"{name} was still in work, and another slot had to compute it, too"
    if like is not None and like.status != "ok" and like.ttft_ms is None:
        return f"{name} ended ({like.status}) before its prompt was computed"
    slots = "" if run is None else f" (the engine has {_many(run.slots, 'slot')})"
    return f"other prompts took its place since{slots}, or the model can only go back to a checkpoint and there was none near"


def _answer(record: Record, run: Run | None, usual: Usual) -> Iterator[str]:
    made = record.completion_tokens or 0
    depth = None if record.prompt_tokens is None else record.prompt_tokens + made
    if run is not None and depth is not None and depth <= run.context:
        yield f"The context was {depth:,} of {_many(run.context, 'token')} deep."
    if _decode_tps(record) is not None:
        yield f"Decode ran{_pace(record.decode_tps, usual.decode_tps)}."
    elif (tps := _seen_tps(record)) is not None:
        yield f"The engine tells no timings on this route; after its first token the answer came at about {_number(tps, 10)} tokens/s."
    half_ms, most_ms = record.itl_p50_ms, record.itl_p99_ms
    if half_ms is not None and most_ms is not None and made >= DECODE_TOKENS and most_ms >= max(STALL_MS, STALL * half_ms):
        most = f"1 of 100 gaps was longer than {spell(most_ms)}" if made >= GAPS else f"at most {spell(most_ms)}"
        yield f"Its text came unevenly: usually {spell(half_ms)} apart, {most}."
    if (share := _acceptance(record)) is not None:
        often = f"; usually {usual.acceptance.median * 100:.0f} %" if usual.acceptance is not None else ""
        right = f"{record.draft_accepted:,} of {_many(record.draft_tokens, 'guessed token')}"
        yield f"{right} {'was' if record.draft_accepted == 1 else 'were'} right ({share * 100:.0f} %{often})."
    elif run is not None and run.speculative == "ngram" and record.decode_ms is not None and made >= DECODE_TOKENS:
        yield "Nothing was guessed ahead: nothing in it repeated what was said before."
    if made and record.finish_reason in ("length", "max_tokens", "limit"):
        is_full = run is not None and depth is not None and depth >= run.context - 1
        tokens = _many(made, "token")
        yield f"It stopped {f'where the context was full, after {tokens}' if is_full else f'at its limit of {tokens} (max_tokens)'}."


def _energy(record: Record) -> Iterator[str]:
    if record.energy_j is None:
        return
    said = f"{record.energy_j / JOULES_A_WH:.2g} Wh" if record.energy_j >= WH_FROM_J else f"{record.energy_j:.3g} J"
    each = f", {record.energy_j / record.completion_tokens:.2g} J a token" if record.completion_tokens else ""
    yield f"It took {said} of the card's energy{each}."


def _prefill_tps(record: Record) -> float | None:
    """If it says something about the machine."""
    computed = (record.prompt_tokens or 0) - (record.cached_tokens or 0)
    return record.prefill_tps if computed >= PREFILL_TOKENS else None


def _decode_tps(record: Record) -> float | None:
    return record.decode_tps if (record.completion_tokens or 0) >= DECODE_TOKENS else None


def _seen_tps(record: Record) -> float | None:
    """By when its first token came and when it ended, where the engine tells no times (Anthropic's API)."""
    if record.status != "ok" or record.attempts > 1 or record.prefill_ms or record.decode_ms or record.ttft_ms is None:
        return None
    made, answer_ms = record.completion_tokens or 0, (record.total_ms or 0.0) - record.ttft_ms
    return (made - 1) / answer_ms * 1e3 if made >= DECODE_TOKENS and answer_ms > 0 else None


def _acceptance(record: Record) -> float | None:
    """Guessed tokens that were right, of one."""
    return record.draft_accepted / record.draft_tokens if record.draft_tokens and record.draft_accepted is not None else None


def _pace(tps: float | None, quartiles: Quartiles | None) -> str:
    """A speed, beside what is usual."""
    if tps is None:
        return ""
    told = f" at {_number(tps)} tokens/s"
    if quartiles is None or not quartiles.median:
        return told
    if off := quartiles.off(tps):
        than = f"{'faster' if off > 0 else 'slower'} than this preset's usual {_number(quartiles.median)}"
        return f"{told}, {abs(off) * 100:.0f} % {than}"
    if quartiles.q1 <= tps <= quartiles.q3:
        return f"{told}, as usual (half of the others {_number(quartiles.q1)} to {_number(quartiles.q3)})"
    return f"{told}, not far from the usual {_number(quartiles.median)}"


def _number(value: float, whole: float = 20) -> str:
    return f"{value:,.0f}" if value >= whole else f"{value:.1f}"


def _many(number: int | None, what: str) -> str:
    return f"{number or 0:,} {what}{'' if number == 1 else 's'}"


def _were(number: int | None, what: str) -> str:
    return f"{_many(number, what)} {'was' if number == 1 else 'were'}"
