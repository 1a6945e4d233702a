"""A trace is written, read and asked as it was; what is wrong with one is said with its line."""

from __future__ import annotations

import dataclasses
import json
import stat
from pathlib import Path
from typing import Any

import pytest

from bench import trace
from bench.ask import Answer, Words
from bench.trace import Shape, Trace
from supervisor.errors import Error, Exit

DIALOGUE = (
    Shape(at_s=0.0, preset="tiny", prompt_tokens=60, cached_tokens=0, completion_tokens=9),
    Shape(
        at_s=2.0,
        preset="tiny",
        prompt_tokens=100,
        cached_tokens=68,
        completion_tokens=5,
        parent=0,
        shared_tokens=60,
        answer_tokens=8,
    ),
    Shape(
        at_s=3.5,
        preset="tiny",
        prompt_tokens=150,
        cached_tokens=104,
        completion_tokens=7,
        parent=1,
        shared_tokens=100,
        answer_tokens=4,
    ),
    Shape(at_s=4.0, preset="tiny", prompt_tokens=80, cached_tokens=65, completion_tokens=7, parent=2, shared_tokens=65, client=1),
)
MADE = Trace(
    requests=DIALOGUE, window_s=10.0, recorded_at=1.5, source="llmctl 0", left_out={"of /v1/embeddings": 2, "never answered": 1}
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "trace.jsonl"


def test_a_trace_is_read_as_it_was_written(path: Path) -> None:
    trace.write(MADE, path)
    assert trace.read(path) == MADE
    assert trace.read(path).digest == MADE.digest
    head, *lines = path.read_text().splitlines()
    assert json.loads(head)["presets"] == ["tiny"]
    assert json.loads(lines[0]) == {
        "at_s": 0.0,
        "preset": "tiny",
        "prompt_tokens": 60,
        "cached_tokens": 0,
        "completion_tokens": 9,
    }
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_one_with_texts_is_its_owner_s_alone(path: Path) -> None:
    trace.write(MADE, path)
    body = {"messages": [{"role": "user", "content": "née\u2028"}]}
    with_texts = dataclasses.replace(MADE, requests=(dataclasses.replace(DIALOGUE[0], body=body),))
    trace.write(with_texts, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = trace.read(path)
    assert (found.texts, MADE.texts, found.requests[0].body) == (True, False, body)
    (ask,) = found.asks()
    assert (ask.body, ask.path, ask.pieces) == (body, "/v1/chat/completions", ())


def test_a_dialogue_carries_what_was_answered() -> None:
    first, second, third, fourth = MADE.asks()
    (one,) = first.pieces
    assert isinstance(one, Words)
    assert one.upto == 60
    *begin, own = second.pieces
    assert begin == [one, Answer(0, 8)]
    assert isinstance(own, Words)
    assert own.upto == 100
    assert third.pieces[:-1] == (one, Answer(0, 8), own, Answer(1, 4))
    assert fourth.pieces[:-1] == (one, Answer(0, 5))  # it parts from them within an answer
    assert len({piece.seed for ask in MADE.asks() for piece in ask.pieces if isinstance(piece, Words)}) == 4
    assert [ask.answer for ask in MADE.asks()] == [9, 5, 7, 7]


def test_what_is_shared_is_cut_where_prompts_part() -> None:
    pieces = (Words("a", 60), Answer(0, 8), Words("b", 100))
    assert trace.cut(pieces, 0) == ([], 0)
    assert trace.cut(pieces, 20) == ([Words("a", 20)], 20)
    assert trace.cut(pieces, 68) == ([Words("a", 60), Answer(0, 8)], 68)
    assert trace.cut(pieces, 70) == ([Words("a", 60), Answer(0, 8), Words("b", 70)], 70)
    assert trace.cut(pieces, 500) == (list(pieces), 100)


def test_an_equal_prompt_is_asked_as_it_was() -> None:
    again = Shape(at_s=1.0, prompt_tokens=60, completion_tokens=3, parent=0, shared_tokens=60)
    first, second = Trace(requests=(DIALOGUE[0], again), window_s=2.0).asks()
    assert first.pieces == second.pieces


def test_speed_moves_arrivals_and_no_client_s_patience() -> None:
    left = dataclasses.replace(DIALOGUE[3], leaves_s=6.0)
    asks = dataclasses.replace(MADE, requests=(*DIALOGUE[:3], left)).asks(speed=4.0)
    assert [ask.at_s for ask in asks] == [0.0, 0.5, 0.875, 1.0]
    assert asks[3].leaves_s == 6.0
    assert asks[3].answer > left.completion_tokens  # else there would be nothing to leave


def test_another_salt_makes_other_words_of_the_same_shape() -> None:
    some, others = MADE.asks(salt="a"), MADE.asks(salt="b")
    assert some == MADE.asks(salt="a")
    assert [ask.prompt for ask in some] == [ask.prompt for ask in others]
    assert not {piece for ask in some for piece in ask.pieces if isinstance(piece, Words)} & {
        piece for ask in others for piece in ask.pieces
    }


def test_a_route_without_a_template_is_asked_without_one() -> None:
    routes = ("/v1/messages", "/v1/responses", "/completion", "/v1/completions")
    made = Trace(requests=tuple(dataclasses.replace(DIALOGUE[0], route=route) for route in routes), window_s=1.0)
    assert [ask.api for ask in made.asks()] == ["chat", "chat", "text", "text"]


def test_what_it_is_and_what_it_lacks_is_told() -> None:
    assert MADE.told() == "4 requests in 10 s: 390 prompt tokens, 61% of them cached"
    assert MADE.told_left_out() == "3 of 7 left out: 2 of /v1/embeddings, 1 never answered"
    assert dataclasses.replace(MADE, left_out={}).told_left_out() == ""


def mooncake(*lines: dict[str, Any]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_mooncake_s_blocks_are_shared_text(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(
        mooncake(
            {"timestamp": 27000, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]},
            {"timestamp": 30000, "input_length": 1024, "output_length": 26, "hash_ids": [46, 49]},
        )
    )
    found = trace.read(path)
    first, second = found.asks()
    assert [piece.upto for piece in first.pieces if isinstance(piece, Words)] == [512, 1024, 1100]
    assert first.pieces[0] == second.pieces[0]
    assert first.pieces[1] != second.pieces[1]
    assert (first.at_s, second.at_s, second.answer, found.window_s) == (0.0, 3.0, 26, 3.0)
    again = tmp_path / "ours.jsonl"
    trace.write(found, again)
    assert trace.read(again) == found


HEAD = {"schema": trace.SCHEMA, "window_s": 1, "recorded_at": 0, "source": ""}
GOOD = {"at_s": 0.5, "prompt_tokens": 10, "completion_tokens": 1}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "is empty"),
        ([{"schema": "llmctl-bench/1"}], "has the schema 'llmctl-bench/1', this llmctl reads llmctl-trace/1"),
        ([{"schema": trace.SCHEMA}, GOOD], ":1 is no header"),
        ([HEAD, {}], ":2 is no request: at_s is missing"),
        ([HEAD, GOOD, {**GOOD, "at_s": 0.4}], ":3 came after 0.4 s, the one before it after 0.5 s"),
        ([HEAD, {**GOOD, "at_s": -1}], ":2 is no request: at_s is -1"),
        ([HEAD, {**GOOD, "at_s": float("inf")}], ":2 is no request: at_s is inf"),
        ([HEAD, {**GOOD, "prompt_tokens": 0}], ":2 is no request: prompt_tokens is 0, and should be a number from 1 on"),
        ([HEAD, {**GOOD, "prompt_tokens": "9"}], ":2 is no request: prompt_tokens is '9'"),
        ([HEAD, {**GOOD, "stream": "no"}], ":2 is no request: stream is 'no'"),
        ([HEAD, {**GOOD, "body": "x"}], ":2 is no request: body is 'x'"),
        ([HEAD, {**GOOD, "parent": 0, "shared_tokens": 1}], ":2 is request 0, and its parent 0 is none before it"),
        (
            [HEAD, GOOD, {**GOOD, "parent": 0, "shared_tokens": 11, "prompt_tokens": 20}],
            ":3 shares 11 tokens with a prompt that has 10",
        ),
        (
            [HEAD, GOOD, {**GOOD, "parent": 0, "shared_tokens": 8, "answer_tokens": 3}],
            ":3 has 8 shared tokens and 3 of an answer",
        ),
        (
            [{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}],
            ":1 is no request of Mooncake's: 600 tokens are 2",
        ),
        ([{"timestamp": 0, "input_length": 600}], ":1 is no request of Mooncake's"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, lines: list[dict[str, Any]], said: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(mooncake(*lines))
    with pytest.raises(Error) as caught:
        trace.read(path)
    assert said in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.exit is Exit.USAGE


def test_lines_are_counted_as_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps(HEAD)}\n\n{json.dumps(GOOD)}\n\n{{\n")
    with pytest.raises(Error, match=r"bad\.jsonl:5 is no JSON"):
        trace.read(path)


def test_a_file_that_can_not_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"none\.jsonl can't be read: No such file"):
        trace.read(tmp_path / "none.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(Error, match="can't be written"):
        trace.write(MADE, tmp_path / "file" / "trace.jsonl")
