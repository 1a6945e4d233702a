"""One record in words: each case its sentences, nothing said of what isn't known, and the command on a ledger's file."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from supervisor import why
from supervisor.commands.why import BAR, LOOKS, _cells
from supervisor.errors import Exit
from supervisor.ledger import Ledger
from supervisor.likeness import Parting
from supervisor.meter import Reading
from supervisor.record import STATUSES, Record, Run
from supervisor.row import Measured
from supervisor.why import ERRORS, REMEDIES, Quartiles, Segment, Usual, explain, segments, spell, usual
from tests import console

SOURCE = Path(why.__file__).parent
RUN = Run(model="m.gguf", engine="b11312", context=65_536, slots=1, speculative="mtp")
NO_REQUESTS = {"invalid_api_key", "preset_not_found", "not_found", "method_not_allowed"}
"""Codes of what has no record: our own routes, and what is turned away at the door."""

ANSWERED = Record(
    id="req_2",
    opened_at=1000.0,
    closed_at=1009.4,
    preset="tiny",
    route="/v1/chat/completions",
    status="ok",
    http_status=200,
    attempts=1,
    ahead=0,
    queue_ms=0.1,
    load_ms=6100.0,
    ttft_ms=9000.0,
    prefill_ms=2900.0,
    decode_ms=390.0,
    total_ms=9400.0,
    prompt_tokens=5321,
    cached_tokens=4096,
    completion_tokens=79,
    prefill_tps=480.4,
    decode_tps=41.2,
    up_ms=5.0,
)
LIKE = dataclasses.replace(ANSWERED, id="req_1", opened_at=900.0, closed_at=910.0, prompt_chars=16_384)


def of(record: Record = ANSWERED, **fields: Any) -> Record:
    return dataclasses.replace(record, **fields)


def told(record: Record, run: Run | None = None, usual: Usual | None = None, like: Record | None = None) -> tuple[str, ...]:
    found = explain(record, run, usual, like)
    for sentence in found:
        assert re.fullmatch(r"\S.*[^.]\.", sentence), sentence
        assert "None" not in sentence.removeprefix("None of")
        assert "  " not in sentence
    return found


# Where the time went


def test_the_longest_part_is_told_first_and_every_part_with_its_time() -> None:
    assert told(ANSWERED)[0] == "It took 9.4 s: 6.1 s until its engine was up, 2.9 s prefill, 390 ms decode."
    assert sum("engine" in each for each in told(ANSWERED)) == 1


def test_the_order_is_always_the_same() -> None:
    words = {"It took 9": "time", "It waited": "wait", "4,096 of": "cache", "The context": "depth", "Decode ran": "answer"}
    for fields in ({}, {"decode_ms": 4000.0}, {"prefill_ms": 100.0, "decode_ms": 100.0}):
        found = told(of(queue_ms=900.0, load_ms=100.0, **fields), RUN)
        assert [name for each in found for word, name in words.items() if each.startswith(word)] == [*words.values()]


def test_the_parts_add_up_to_the_whole() -> None:
    dice = random.Random(3)

    def maybe(most: float) -> float | None:
        return None if dice.random() < 0.3 else dice.random() * most

    names = set()
    for _ in range(2000):
        record = of(
            queue_ms=maybe(900),
            load_ms=maybe(900),
            prefill_ms=maybe(3000),
            decode_ms=maybe(3000),
            ttft_ms=maybe(4000),
            total_ms=2000 + dice.random() * 5000,
        )
        parts = segments(record)
        assert all(part.ms > 0 for part in parts)
        waited = (record.queue_ms or 0) + (record.load_ms or 0)
        assert sum(part.ms for part in parts) == pytest.approx(max(record.total_ms or 0, waited))
        names |= {part.name for part in parts}
        told(record)
    assert names == set(LOOKS)
    assert segments(of(total_ms=None)) == ()


def test_without_the_engines_times_the_first_token_divides_it() -> None:
    bare = of(prefill_ms=None, decode_ms=None, load_ms=0.0, queue_ms=1000.0, ttft_ms=3000.0, total_ms=5000.0)
    assert segments(bare) == (Segment("queue", 1000), Segment("first token", 2000), Segment("answer", 2000))
    at_once = of(bare, prefill_ms=2000.0, decode_ms=9000.0)  # two sequences, decoded beside each other
    assert segments(at_once) == segments(bare)
    assert segments(of(bare, ttft_ms=None)) == (Segment("queue", 1000), Segment("rest", 4000))
    assert told(bare)[0] == (
        "It took 5.0 s: 2.0 s at the engine before the first token, 2.0 s after the first token, 1.0 s waiting for a slot."
    )
    assert told(of(bare, queue_ms=None, ttft_ms=None))[0] == "It took 5.0 s."


def test_a_wait_is_told_with_who_was_before_it() -> None:
    waited = of(queue_ms=1200.0, load_ms=0.0)
    assert "It waited 1.2 s for a slot; 3 requests were in work or waiting before it." in told(of(waited, ahead=3))
    assert "It waited 1.2 s for a slot; 1 request was in work or waiting before it." in told(of(waited, ahead=1))
    assert "It waited 1.2 s for a slot." in told(waited)
    assert "It is of the class that may wait: others went before it." in told(of(waited, batch=True))
    assert not any("for a slot" in each for each in told(of(waited, queue_ms=10.0)))


# The prompt


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "4,096 of its 5,321 prompt tokens came from the cache; 1,225 were computed at 480 tokens/s."),
        ({"cached_tokens": 0}, "None of its 5,321 prompt tokens came from the cache; all were computed at 480 tokens/s."),
        ({"cached_tokens": 5320}, "5,320 of its 5,321 prompt tokens came from the cache; 1 was computed."),
        ({"cached_tokens": None}, "Its prompt has 5,321 tokens, computed at 480 tokens/s."),
        ({"cached_tokens": None, "prefill_tps": None}, "Its prompt has 5,321 tokens."),
        ({"prompt_tokens": 9, "cached_tokens": 2}, "2 of its 9 prompt tokens came from the cache; 7 were computed."),
    ],
)
def test_what_of_the_prompt_was_computed(fields: dict[str, Any], sentence: str) -> None:
    assert sentence in told(of(**fields))


def alike(shared: int = 16_384, size: int = 21_300, parted: str | None = "message 2 (user)", **fields: Any) -> Record:
    return of(prompt_chars=size, shared_chars=shared, shared_with="req_1", parted_in=parted, **fields)


LOST = "Most of that was in the cache no longer: "


@pytest.mark.parametrize(
    ("record", "like", "sentences"),
    [
        pytest.param(
            alike(),
            of(LIKE, prompt_chars=20_000),
            [
                "The prompt is the same as that of req_1 for its first 16,384 of 21,300 bytes and parts from it in "
                "message 2 (user): everything from there had to be computed."
            ],
            id="parts in the middle",
        ),
        pytest.param(
            alike(),
            None,
            [
                "The prompt is the same as that of req_1 for its first 16,384 of 21,300 bytes and parts from it in "
                "message 2 (user): everything from there had to be computed."
            ],
            id="the other record is gone",
        ),
        pytest.param(
            alike(),
            LIKE,
            [
                "The prompt goes on from that of req_1: its first 16,384 of 21,300 bytes are the whole of that one, "
                "and only the rest is new."
            ],
            id="a later turn",
        ),
        pytest.param(
            alike(16_384, 16_384, None, cached_tokens=5320),
            LIKE,
            ["The prompt is the same as that of req_1."],
            id="the same again",
        ),
        pytest.param(
            alike(16_384, 16_384, None, cached_tokens=5320),
            of(LIKE, prompt_chars=20_000),
            ["The prompt is the beginning of that of req_1."],
            id="the beginning of another",
        ),
        pytest.param(of(prompt_chars=21_300, shared_chars=0), None, [], id="like none that is known, and yet cached"),
        pytest.param(
            alike(cached_tokens=0, up_ms=6000.0),
            of(LIKE, closed_at=1000.05),
            [
                "The prompt goes on from that of req_1: its first 16,384 of 21,300 bytes are the whole of that one, "
                "but the engine has been started anew since, and its cache was gone.",
            ],
            id="the engine started anew between the two",
        ),
        pytest.param(
            alike(32, 32, None, prompt_tokens=39, cached_tokens=0, load_ms=4600.0, up_ms=1.4),
            of(LIKE, closed_at=999.0, prompt_chars=32),
            ["The prompt is the same as that of req_1, but the engine has been started anew since, and its cache was gone."],
            id="a short one, which waited for the new engine",
        ),
        pytest.param(
            alike(32, 32, None, prompt_tokens=39, cached_tokens=38, up_ms=1.4),
            of(LIKE, closed_at=999.0, prompt_chars=32),
            ["The prompt is the same as that of req_1."],
            id="cached although the engine is new",
        ),
        pytest.param(
            alike(cached_tokens=None, status="cancelled"),
            LIKE,
            [],
            id="cancelled before the engine said it",
        ),
        pytest.param(
            alike(16_384, 16_384, None, cached_tokens=100, up_ms=1e6),
            LIKE,
            [
                "The prompt is the same as that of req_1.",
                f"{LOST}other prompts took its place since (the engine has 1 slot), or the model can only go back to a "
                "checkpoint and there was none near.",
            ],
            id="evicted",
        ),
        pytest.param(
            alike(16_384, 16_384, None, cached_tokens=100, up_ms=1e6, load_ms=0.0),
            of(LIKE, closed_at=1003.0),
            [
                "The prompt is the same as that of req_1.",
                f"{LOST}req_1 was still in work, and another slot had to compute it, too.",
            ],
            id="at the same time",
        ),
        pytest.param(
            alike(16_384, 16_384, None, cached_tokens=100, up_ms=1e6),
            of(LIKE, status="cancelled", ttft_ms=None),
            [
                "The prompt is the same as that of req_1.",
                f"{LOST}req_1 ended (cancelled) before its prompt was computed.",
            ],
            id="the other was never computed",
        ),
        pytest.param(
            alike(cached_tokens=100, up_ms=1e6, dropped_turns=2),
            of(LIKE, prompt_chars=20_000),
            [
                "The prompt is the same as that of req_1 for its first 16,384 of 21,300 bytes and parts from it in message 2 (user).",
                f"{LOST}turns were left out, so what the engine got begins otherwise.",
            ],
            id="turns were left out",
        ),
        pytest.param(
            alike(24, 20_000, "message 1 (system)", cached_tokens=5, up_ms=1e6),
            LIKE,
            [
                "The prompt is the same as that of req_1 for its first 24 of 20,000 bytes and parts from it in "
                "message 1 (system): everything from there had to be computed.",
                "A prompt whose beginning changes (a time, an id, the order of the tools) is computed anew from there on: "
                "what changes belongs at its end.",
            ],
            id="a clock in the beginning",
        ),
        pytest.param(of(), None, [], id="nothing is known of it"),
    ],
)
def test_why_the_prompt_was_cached_or_was_not(record: Record, like: Record | None, sentences: list[str]) -> None:
    words = ("The prompt ", "A prompt ", "Most of that ", "None of this preset's")
    assert [each for each in told(record, RUN, None, like) if each.startswith(words)] == sentences


EARLIER = of(closed_at=990.0)


@pytest.mark.parametrize(
    ("fields", "earlier", "sentences"),
    [
        ({}, [], ["It was the first prompt since its engine started."]),
        ({"cached_tokens": 1}, [], ["It was the first prompt since its engine started."]),
        ({"up_ms": 16_000.0}, [EARLIER], ["It was the first prompt since its engine started."]),
        ({}, [of(EARLIER, attempts=0, status="refused")], ["It was the first prompt since its engine started."]),
        ({"ahead": 1}, [], []),
        ({}, [EARLIER], ["No prompt before it begins like it."]),
        (
            {"parted_in": "message 1 (system)"},
            [EARLIER],
            ["No prompt before it begins like it: a system prompt that changes at its beginning costs the whole cache."],
        ),
        (
            {"parted_in": "message 1 (user)", "cached_tokens": 7},
            [EARLIER],
            ["Only the template's opening is the same as in a prompt before it."],
        ),
        ({"parted_in": "prompt", "cached_tokens": 1}, [EARLIER], ["No prompt before it begins like it."]),
        ({"cached_tokens": 3000}, [EARLIER], []),
        ({"cached_tokens": None}, [EARLIER], []),
        ({"up_ms": None}, [EARLIER], []),
    ],
)
def test_a_prompt_that_begins_like_none(fields: dict[str, Any], earlier: list[Record], sentences: list[str]) -> None:
    """The engine came up at 906.1, or at 990.1 where it is up for 16 s."""
    bare = of(prompt_chars=21_300, shared_chars=0, **{"cached_tokens": 0, "up_ms": 100_000.0, **fields})
    words = ("It was the first prompt", "No prompt", "Only the template")
    assert [each for each in explain(bare, RUN, None, None, earlier) if each.startswith(words)] == sentences


# The answer


def test_depth_guesses_and_what_ended_it() -> None:
    found = told(of(draft_tokens=312, draft_accepted=222), RUN, Usual(acceptance=Quartiles(0.6, 0.64, 0.7)))
    assert "The context was 5,400 of 65,536 tokens deep." in found
    assert "222 of 312 guessed tokens were right (71 %; usually 64 %)." in found
    assert "222 of 312 guessed tokens were right (71 %)." in told(of(draft_tokens=312, draft_accepted=222))
    assert not any("guessed" in each for each in told(of(draft_tokens=0, draft_accepted=0)))
    ended = "It stopped at its limit of 79 tokens (max_tokens)."
    assert ended in told(of(finish_reason="length"))
    assert ended in told(of(finish_reason="max_tokens"), RUN)
    full = dataclasses.replace(RUN, context=5400)
    assert "It stopped where the context was full, after 79 tokens." in told(of(finish_reason="length"), full)
    assert not any(each.startswith("It stopped") for each in told(of(finish_reason="stop")))
    assert not any("deep" in each for each in told(of(prompt_tokens=70_000), RUN))  # the sum of several sequences


def test_nothing_guessed_is_told_only_of_an_engine_that_guesses_by_repetition() -> None:
    said = "Nothing was guessed ahead: nothing in it repeated what was said before."
    ngram = dataclasses.replace(RUN, speculative="ngram")
    assert said in told(of(), ngram)
    assert said not in told(of(), RUN)
    assert said not in told(of(decode_ms=None), ngram)
    assert said not in told(of(draft_tokens=34, draft_accepted=7), ngram)
    assert "7 of 34 guessed tokens were right (21 %)." in told(of(draft_tokens=34, draft_accepted=7), ngram)


def test_a_route_that_tells_no_timings_has_a_rate_by_the_clock() -> None:
    bare = of(prefill_ms=None, decode_ms=None, prefill_tps=None, decode_tps=None, ttft_ms=2900.0, total_ms=9400.0)
    said = "The engine tells no timings on this route; after its first token the answer came at about 12 tokens/s."
    assert said in told(bare)  # 78 in 6.5 s
    for fields in ({"status": "cancelled"}, {"completion_tokens": 3}, {"attempts": 2}, {"ttft_ms": None}, {"decode_ms": 5.0}):
        assert not any("no timings" in each for each in told(of(bare, **fields)))


def test_a_refusal_says_what_to_do() -> None:
    refused = of(status="refused", http_status=400, error="context_length_exceeded")
    assert told(refused)[1] == "A larger context, fewer slots or `truncate: oldest` in its preset would make room for it."
    assert set(REMEDIES) <= set(ERRORS)


def test_text_that_came_in_fits_and_starts() -> None:
    many = "Its text came unevenly: usually 20 ms apart, 1 of 100 gaps was longer than 2.0 s."
    assert many in told(of(itl_p50_ms=20.0, itl_p99_ms=2000.0, completion_tokens=200))
    few = "Its text came unevenly: usually 20 ms apart, at most 2.0 s."
    assert few in told(of(itl_p50_ms=20.0, itl_p99_ms=2000.0, completion_tokens=199))
    assert not any("unevenly" in each for each in told(of(itl_p50_ms=200.0, itl_p99_ms=700.0)))
    assert not any("unevenly" in each for each in told(of(itl_p50_ms=20.0, itl_p99_ms=60.0)))
    assert not any("unevenly" in each for each in told(of(itl_p50_ms=20.0, itl_p99_ms=2000.0, completion_tokens=3)))


@pytest.mark.parametrize(
    ("energy_j", "sentence"),
    [
        (12.34, "It took 12.3 J of the card's energy, 0.16 J a token."),
        (6840.0, "It took 1.9 Wh of the card's energy, 87 J a token."),
    ],
)
def test_energy_is_told_in_a_unit_that_fits(energy_j: float, sentence: str) -> None:
    assert sentence in told(of(energy_j=energy_j))


# What is usual


def some(count: int, **fields: Any) -> list[Record]:
    return [of(id=f"req_{at}", **fields) for at in range(count)]


def test_fewer_than_eight_answers_are_no_usual() -> None:
    assert usual(some(7)) is None
    assert usual(some(7) + some(20, status="cancelled")) is None
    found = usual(some(8) + some(20, status="cancelled", decode_tps=1.0))
    assert found is not None
    assert (found.count, found.decode_tps) == (8, Quartiles(41.2, 41.2, 41.2))
    assert found.acceptance is None  # nothing was guessed


def test_quartiles_are_of_the_figures_that_are_known_and_tell_something() -> None:
    records = [of(decode_tps=float(at), ttft_ms=None if at > 3 else 9.0) for at in range(1, 10)]
    records += some(5, completion_tokens=3, decode_tps=999.0) + some(5, cached_tokens=5320, prefill_tps=3.0)
    found = usual(records)
    assert found is not None
    assert found.count == 19
    assert found.decode_tps is not None
    assert found.decode_tps.q1 < found.decode_tps.median < 41.3
    assert found.prefill_tps == Quartiles(480.4, 480.4, 480.4)
    assert found.ttft_ms is not None


def test_noise_is_not_told_as_a_difference() -> None:
    """Of values drawn from what is usual, almost none is called unusual; twice as slow is."""
    dice = random.Random(9)
    records = [of(decode_tps=dice.gauss(53, 2), prefill_tps=dice.gauss(480, 30)) for _ in range(200)]
    known = usual(records)
    assert known is not None
    assert known.decode_tps is not None
    assert known.prefill_tps is not None
    off = [each for each in records if known.decode_tps.off(each.decode_tps or 0) or known.prefill_tps.off(each.prefill_tps or 0)]
    assert len(off) <= 8  # of 400 draws
    assert "Decode ran at 41 tokens/s, 22 % slower than this preset's usual 53." in told(of(), usual=known)
    assert any("at 53 tokens/s, as usual (half of the others " in each for each in told(of(decode_tps=53.0), usual=known))
    assert "Decode ran at 50 tokens/s, not far from the usual 53." in told(of(decode_tps=50.0), usual=known)
    assert any("faster than this preset's usual" in each for each in told(of(decode_tps=90.0), usual=known))
    computed = "1,225 were computed at 200 tokens/s, 58 % slower than this preset's usual"
    assert any(computed in each for each in told(of(prefill_tps=200.0), usual=known))


def test_a_steady_preset_has_fences_all_the_same() -> None:
    steady = Quartiles(50.0, 50.0, 50.0)
    assert steady.off(54.9) == 0
    assert steady.off(56.0) == pytest.approx(0.12)
    assert Quartiles(0.0, 0.0, 0.0).off(5.0) > 0
    assert Quartiles(0.0, 0.0, 0.0).off(0.0) == 0


def test_only_a_longer_wait_is_told_beside_the_usual() -> None:
    known = Usual(queue_ms=Quartiles(1, 2, 9), ttft_ms=Quartiles(2700, 2800, 2900))
    found = told(of(queue_ms=1200.0, load_ms=0.0), usual=known)
    assert "It waited 1.2 s for a slot, where 2 ms is usual." in found
    assert "Its first token came after 9.0 s, and 2.8 s is usual for this preset." in found
    assert not any("is usual" in each for each in told(of(ttft_ms=100.0), usual=known))


# What became of it


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"status": "refused", "http_status": 429, "error": "queue_full"},
            "It was refused with HTTP 429: the queue was full (queue_full).",
        ),
        (
            {"status": "refused", "http_status": 400, "error": "context_length_exceeded"},
            "It was refused with HTTP 400: its prompt is longer than the context of a slot (context_length_exceeded).",
        ),
        (
            {"status": "error", "http_status": 500, "error": "engine_500"},
            "It had an error in the place of an answer with HTTP 500: the engine answered 500.",
        ),
        ({"status": "error", "error": "new_code"}, "It had an error in the place of an answer: new_code."),
        (
            {"status": "truncated", "error": "engine_died", "completion_tokens": 120},
            "Its answer was cut after 120 tokens: its engine ended before its answer did (engine_died).",
        ),
        ({"status": "cancelled", "ttft_ms": None, "completion_tokens": None}, "Its client left before the first token."),
        ({"status": "cancelled", "completion_tokens": 1}, "Its client left after 1 token."),
        ({"status": "interrupted"}, "llmctl ended while it was in work."),
        ({"status": "open"}, "It is in work."),
    ],
)
def test_what_became_of_it_comes_first(fields: dict[str, Any], sentence: str) -> None:
    assert told(of(**fields))[0] == sentence


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"attempts": 2, "wasted_tokens": 120},
            "It was put to a second engine because the first died; 120 tokens were made twice.",
        ),
        ({"attempts": 2, "wasted_tokens": 0}, "It was put to a second engine because the first died."),
        ({"attempts": 3}, "It was put to 3 engines, because those before the last died."),
        ({"wasted_tokens": 1}, "1 token was made and never delivered."),
        ({"dropped_turns": 1}, "1 turn was left out, the oldest, so that the rest fits into the context."),
        ({"error": "queue_full", "status": "refused", "ahead": 9}, "9 requests were in work or waiting when it came."),
    ],
)
def test_what_it_took_is_told(fields: dict[str, Any], sentence: str) -> None:
    assert sentence in told(of(**fields))


def test_an_answered_one_says_nothing_of_what_became_of_it() -> None:
    assert told(of())[0].startswith("It took ")


def test_every_code_that_a_record_can_have_is_put_into_words() -> None:
    codes = {
        code
        for path in SOURCE.rglob("*.py")
        for code in re.findall(r'code="([a-z_]+)"|code: str = "([a-z_]+)"', path.read_text())
    }
    named = {first or second for first, second in codes} | {
        "queue_full",
        "queue_timeout",
        "does_not_fit",
        "cannot_start",
        "missing_model",
    }
    assert len(named) > 15
    assert set(ERRORS) - {"context_length_exceeded"} <= named
    assert named - NO_REQUESTS <= set(ERRORS)


def test_nothing_is_said_of_what_is_not_known() -> None:
    for status in STATUSES[1:]:
        bare = Record(id="req_1", opened_at=1.0, preset="tiny", route="/v1/messages", status=status)
        assert len(told(bare, None, None, None)) == (status != "ok")
        assert len(told(bare, RUN, usual(some(9)), LIKE)) == (status != "ok")


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0.2, "under 1 ms"), (41.0, "41 ms"), (410.0, "410 ms"), (999.6, "1.0 s"), (9400.0, "9.4 s"), (75_000.0, "1 min 15 s")],
)
def test_a_time_is_spelt_as_people_read_it(ms: float, text: str) -> None:
    assert spell(ms) == text


# The picture


def test_every_part_has_a_cell_and_all_of_them_are_the_bar() -> None:
    dice = random.Random(5)
    for _ in range(500):
        values = [10.0 ** dice.uniform(-2, 5) for _ in range(dice.randrange(1, 6))]
        cells = _cells(values, BAR)
        assert sum(cells) == BAR
        assert min(cells) >= 1
        assert sorted(cells) == [cells[at] for at in sorted(range(len(values)), key=lambda at: values[at])]


# The command


def llmctl(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return console.llmctl({"LLMCTL_HOME": str(home)}, "why", *words)


def ledger(home: Path) -> Ledger:
    return Ledger(home / "data" / "ledger.sqlite")


def add(book: Ledger, preset: str = "tiny", parting: Parting | None = None, **fields: Any) -> str:
    row = book.open("/v1/chat/completions", preset, client_id=fields.pop("client_id", None))
    values = {"status": "ok", "attempts": 1, "load_s": 0.0, "queue_s": 0.0, "up_s": 100.0, "run": RUN, **fields}
    for name, value in values.items():
        setattr(row, name, value)
    row.opened_s -= 9.4
    figures = {
        "prefill_ms": 2900.0,
        "decode_ms": 400.0,
        "prompt_tokens": 5321,
        "cached_tokens": 4096,
        "completion_tokens": 79,
        "decode_tps": 53.0,
        "first_s": row.opened_s + 3,
    }
    book.close(row, lambda: Measured(Reading(**figures), parting))
    return row.id


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def test_the_last_one_as_a_picture_and_in_words(home: Path) -> None:
    book = ledger(home)
    first = add(book)
    for _ in range(8):
        add(book)
    last = add(book, queue_s=1.2, load_s=4.0, ahead=3, parting=Parting(21_300, 16_384, first, "message 2 (user)"))
    book.shut()
    done = llmctl(home, "last")
    assert (done.returncode, done.stderr) == (0, "")
    head, _, bar, legend, _, *sentences = done.stdout.splitlines()
    assert head.startswith(f"{last}  tiny  /v1/chat/completions  ok  20")
    assert len(bar) == BAR
    assert re.fullmatch("░+▒+▓+█+·+", bar)
    assert legend.startswith(
        "░ queue 1.2 s (13 %)   ▒ load 4.0 s (43 %)   ▓ prefill 2.9 s (31 %)   █ decode 400 ms (4 %)   · rest "
    )
    assert "It waited 1.2 s for a slot, where under 1 ms is usual; 3 requests were in work or waiting before it." in sentences
    assert "Decode ran at 53 tokens/s, as usual (half of the others 53 to 53)." in sentences
    assert any(f"that of {first} for its first 16,384 of 21,300 bytes" in each for each in sentences)
    assert "\x1b" not in done.stdout
    asked = json.loads(llmctl(home, last, "--json").stdout)
    assert set(asked) == {"record", "run", "usual", "sentences"}
    assert (asked["record"]["id"], asked["run"]["context"], asked["usual"]["count"]) == (last, 65_536, 9)
    assert asked["usual"]["decode_tps"] == {"q1": 53.0, "median": 53.0, "q3": 53.0}
    assert asked["sentences"] == sentences


def test_one_is_found_by_what_a_person_has_of_it(home: Path) -> None:
    book = ledger(home)
    mine = add(book, client_id="mine")
    other = add(book, "other")
    again = add(book, client_id="mine")
    book.shut()

    def found(*words: str) -> str:
        done = llmctl(home, *words, "--json")
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["record"]["id"])

    assert found(mine) == mine
    assert found(mine[:-1]) == mine
    assert found("last", "--preset", "other") == other
    done = llmctl(home, "mine")
    assert done.stdout.startswith(again)
    assert done.stdout.splitlines()[0].endswith("came as mine")
    assert done.stderr == "2 requests came with that X-Request-Id; this is the last of them\n"


def test_what_there_is_not_is_one_sentence(home: Path) -> None:
    def refused(*words: str) -> tuple[str, str]:
        done = llmctl(home, *words)
        assert done.returncode == Exit.USAGE
        assert done.stdout == ""
        sentence, hint = done.stderr.splitlines()
        return sentence, hint

    listing = "try: llmctl usage --records"
    assert refused("last") == ("error: no request has ended yet", "try: llmctl up tiny")
    book = ledger(home)
    ids = [add(book) for _ in range(2)]
    book.shut()
    assert refused("req_00000000000") == ("error: there is no request 'req_00000000000'", listing)
    assert refused("last", "--preset", "other") == ("error: no request has ended yet for other", listing)
    assert refused(ids[0][:10]) == (
        f"error: '{ids[0][:10]}' is the beginning of 2 requests' ids, the last of them {', '.join(ids)}",
        f"try: llmctl why {ids[1]}",
    )
    assert refused()[0].startswith("error: missing argument")


def test_a_refusal_has_no_picture(home: Path) -> None:
    book = ledger(home)
    row = book.open("/v1/chat/completions", "tiny")
    row.status, row.error = "refused", "context_length_exceeded"
    book.close(row)
    book.shut()
    lines = llmctl(home, "last").stdout.splitlines()
    assert lines[1].startswith("It was refused: ")
    assert "rest" not in "".join(lines[2:]).replace("truncate: oldest", "")


def test_one_without_any_time_has_no_picture(home: Path) -> None:
    book = ledger(home)
    book.open("/v1/chat/completions")
    book.shut()
    ledger(home).shut()  # closes what was left open
    done = llmctl(home, "last")
    assert done.stdout.splitlines()[1:] == ["llmctl ended while it was in work."]
