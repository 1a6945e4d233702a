"""A trace of records: whose beginning a prompt has, how much of it in tokens, and what is left out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from bench import traffic
from bench.trace import Shape, Trace
from supervisor.likeness import Trails
from supervisor.record import Record

CHAT = "/v1/chat/completions"
BEGAN_AT = 1_000_000.0


def record(name: str, at_s: float, took_s: float = 1.0, **fields: Any) -> Record:
    """One that was answered."""
    told = {
        "preset": "tiny",
        "route": CHAT,
        "stream": True,
        "status": "ok",
        "attempts": 1,
        "shared_chars": 0,
        "client": "loopback",
    }
    opened_at = BEGAN_AT + at_s
    return Record(id=name, opened_at=opened_at, closed_at=opened_at + took_s, total_ms=took_s * 1e3, **{**told, **fields})


def shapes(*records: Record, **more: Any) -> tuple[Shape, ...]:
    return made(records, **more).requests


def made(records: Sequence[Record], **more: Any) -> Trace:
    window = {"since_at": BEGAN_AT, "until_at": BEGAN_AT + 3600, "recorded_at": BEGAN_AT + 3600, "source": "test"}
    return traffic.trace(records, **{**window, **more})


FIRST = record("a", 1.0, prompt_tokens=100, prompt_chars=280, cached_tokens=30, completion_tokens=21)


def link(child: Record, *, parent: Record = FIRST) -> tuple[int | None, int, int]:
    found = shapes(parent, child)[1]
    return found.parent, found.shared_tokens, found.answer_tokens


def after(**fields: Any) -> Record:
    """One that comes after :data:`FIRST` and has all of its prompt."""
    told = {"prompt_tokens": 160, "prompt_chars": 440, "completion_tokens": 5, "shared_with": "a", "shared_chars": 280}
    return record("b", 3.0, **{"parted_in": "message 2 (assistant)", **told, **fields})


def test_what_the_cache_had_beyond_the_parent_s_prompt_is_of_its_answer() -> None:
    assert link(after(cached_tokens=120)) == (0, 100, 20)
    assert link(after(cached_tokens=112)) == (0, 100, 12)  # the rest of it came back as other tokens
    assert link(after(cached_tokens=100)) == (0, 100, 0)
    assert link(after(cached_tokens=150)) == (0, 100, 20)  # it can't be more than was made


def test_a_prompt_that_parts_from_it_a_little_sooner_does_by_what_the_cache_had() -> None:
    """A thought that was begun for the answer, and isn't in the dialogue."""
    assert link(after(cached_tokens=97)) == (0, 97, 0)


def test_what_the_cache_had_lost_is_reckoned() -> None:
    assert link(after(cached_tokens=30)) == (0, 100, 20)
    assert link(after(cached_tokens=30, parted_in="message 3 (user)")) == (0, 100, 0)  # it isn't an answer that follows
    assert link(after(cached_tokens=None)) == (0, 100, 20)


def test_an_answer_that_was_not_there_yet_is_not_in_it() -> None:
    late = record("a", 1.0, 5.0, prompt_tokens=100, prompt_chars=280, cached_tokens=30, completion_tokens=21)
    assert link(after(cached_tokens=120), parent=late) == (0, 100, 0)


def test_bytes_become_tokens_by_the_parent_s() -> None:
    """30 tokens are the template's: the rest, 70, are 280 bytes."""
    half = {"shared_chars": 140, "parted_in": "message 1 (user)"}
    assert link(after(cached_tokens=None, **half)) == (0, 65, 0)
    assert link(after(cached_tokens=33, **half)) == (0, 65, 0)
    assert link(after(cached_tokens=60, **half)) == (0, 60, 0)
    assert link(after(cached_tokens=68, **half)) == (0, 68, 0)


def test_the_same_prompt_again_is_the_same() -> None:
    same = {"prompt_tokens": 100, "prompt_chars": 280, "parted_in": None}
    assert link(after(cached_tokens=99, **same)) == (0, 100, 0)


def test_turns_that_were_dropped_leave_only_what_the_cache_says() -> None:
    assert link(after(cached_tokens=35, dropped_turns=2)) == (0, 35, 0)


def test_one_that_begins_like_none_has_no_parent() -> None:
    assert link(record("b", 3.0, prompt_tokens=90, prompt_chars=250, cached_tokens=30, completion_tokens=5)) == (None, 0, 0)


def test_a_parent_is_one_that_came_before_though_it_ended_after() -> None:
    """The record of the first knows the second, which ended sooner, and that of the second knows nothing."""
    slow = record("a", 0.0, 9.0, prompt_tokens=100, prompt_chars=280, completion_tokens=9, shared_with="b", shared_chars=200)
    quick = record("b", 1.0, 1.0, prompt_tokens=100, prompt_chars=280, completion_tokens=9)
    first, second = shapes(slow, quick)
    assert (first.parent, second.parent) == (None, 0)
    assert second.shared_tokens > 50


def test_a_parent_is_found_over_those_that_are_left_out() -> None:
    between = record("x", 1.5, status="refused", attempts=0, prompt_chars=300, shared_with="a", shared_chars=280)
    child = after(cached_tokens=120, shared_with="x", shared_chars=290)
    found = made([FIRST, between, child])
    assert [(each.parent, each.shared_tokens) for each in found.requests] == [(None, 0), (0, 100)]
    assert found.left_out == {"never answered": 1}


@pytest.mark.parametrize("seed", range(5))
def test_parents_are_the_likest_earlier_prompts_whatever_order_they_ended_in(seed: int) -> None:
    """Against prompts compared one by one."""
    draw = random.Random(seed)
    texts: list[str] = []
    for _ in range(40):
        begin = draw.choice(texts)[: draw.randrange(8, 200, 8)] if texts and draw.random() < 0.8 else ""
        texts.append(begin + "".join(draw.choices("abcdef", k=64)))
    took_s = [draw.uniform(0.1, 20) for _ in texts]
    trails, parted = Trails(), {}
    for number in sorted(range(len(texts)), key=lambda each: each + took_s[each]):
        parted[number] = trails.compare(f"r{number:02}", [("message 1 (user)", texts[number].encode())])
    records = [
        record(
            f"r{number:02}",
            number,
            took_s[number],
            prompt_tokens=len(text),
            completion_tokens=1,
            prompt_chars=parted[number].prompt_chars,
            shared_chars=parted[number].shared_chars,
            shared_with=parted[number].shared_with,
        )
        for number, text in enumerate(texts)
    ]
    for number, shape in enumerate(shapes(*records)):
        best = max((alike(texts[number], other) for other in texts[:number]), default=0)
        found = alike(texts[number], texts[shape.parent]) if shape.parent is not None else 0
        assert best - 32 <= found <= best  # a block is that long there
        assert best - 32 <= shape.shared_tokens <= best


def alike(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_what_can_not_be_asked_again_is_counted() -> None:
    found = made(
        [
            FIRST,
            record("e", 2.0, route="/v1/embeddings", prompt_tokens=5),
            record("t", 2.1, route="/tokenize"),
            record("r", 2.2, status="refused", attempts=0),
            record("d", 2.3, status="error", attempts=2),
            record("o", 2.4, status="open"),
            record("n", 2.5, status="cancelled"),
            record("w", 5000.0, prompt_tokens=9),
            record("p", 2.6, preset="other", prompt_tokens=9),
        ],
        preset="tiny",
    )
    assert [each.prompt_tokens for each in found.requests] == [100]
    assert found.left_out == {
        "of /v1/embeddings": 1,
        "never answered": 2,
        "in work still": 1,
        "without tokens": 1,
    }


def test_a_client_that_left_leaves_again_and_its_prompt_is_reckoned_by_others() -> None:
    left = record("l", 4.0, 0.75, status="cancelled", prompt_chars=140, completion_tokens=None)
    _, found = shapes(FIRST, left)
    assert (found.leaves_s, found.prompt_tokens, found.completion_tokens, found.status) == (0.75, 65, 0, "cancelled")


def test_clients_are_numbers() -> None:
    found = shapes(
        FIRST,
        record("b", 2.0, prompt_tokens=9, key="alice"),
        record("c", 3.0, prompt_tokens=9, key="bob"),
        record("d", 4.0, prompt_tokens=9, key="alice"),
    )
    assert [each.client for each in found] == [0, 1, 2, 1]


def test_with_texts_only_those_are_kept_that_have_one() -> None:
    body = {"messages": []}
    found = made([FIRST, record("b", 2.0, prompt_tokens=9)], bodies={"a": body})
    assert [each.body for each in found.requests] == [body]
    assert found.left_out == {"without its text": 1}


def test_a_row_has_more_than_a_record() -> None:
    row = {name: getattr(FIRST, name) for name in traffic.columns(Record)} | {"seq": 4, "model": "m.gguf", "slots": 2}
    assert traffic.record(row) == FIRST


def test_a_prompt_that_begins_with_its_parent_s_first_turns_only_is_no_copy_of_it() -> None:
    """Between turns a template has tokens of its own, so that bytes of a long dialogue come to more of them than those of its beginning."""
    before = record("a", 1.0, prompt_tokens=616, prompt_chars=2000, cached_tokens=30, completion_tokens=11)
    assert link(after(prompt_tokens=360, prompt_chars=1270, shared_chars=1150, cached_tokens=314), parent=before) == (0, 314, 0)


def test_a_prompt_without_the_template_s_head_shares_none_of_it() -> None:
    assert link(after(cached_tokens=5, shared_chars=14)) == (0, 10, 0)
