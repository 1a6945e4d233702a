"""Streams recorded from the real engine beside its own unstreamed replies, and what the engine seldom does.

tests/data/assembly/NAME.sse and NAME.json are the two answers to one request, written by tests/contract/test_assembly.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from supervisor import sse
from supervisor.assemble import Assembler, Route, must_pass_unstreamed, request_body
from supervisor.errors import Error

STREAMS = sorted((Path(__file__).parent / "data" / "assembly").glob("*.sse"))
VARYING = {"id", "created", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"} | {
    "predicted_ms",
    "predicted_per_token_ms",
    "predicted_per_second",
}


def comparable(reply: object) -> Any:
    """The reply as lists of pairs, so that the keys' order counts too, without what differs from one answer to the next."""
    return json.loads(
        json.dumps(reply),
        object_pairs_hook=lambda pairs: [(key, None if key in VARYING else value) for key, value in pairs],
    )


def assemble(stream: bytes, route: Route, *, cut: int = 0) -> Assembler:
    parser, assembler = sse.Parser(), Assembler(route)
    for chunk in (stream[:cut], stream[cut:]):
        for payload in parser.feed(chunk):
            assembler.feed(payload)
    return assembler


def recorded(path: Path) -> tuple[bytes, dict[str, Any], Route]:
    reply = json.loads(path.with_suffix(".json").read_bytes())
    return path.read_bytes(), reply, "/v1/chat/completions" if reply["object"] == "chat.completion" else "/v1/completions"


def chunk(**choice: object) -> bytes:
    head = {"created": 1, "model": "m", "system_fingerprint": "b1", "object": "chat.completion.chunk", "id": "chatcmpl-1"}
    return json.dumps({"choices": [{"finish_reason": None, "index": 0, "delta": {}, **choice}], **head}).encode()


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.stem)
def test_a_recorded_stream_gives_the_recorded_reply(path: Path) -> None:
    stream, reply, route = recorded(path)
    assembler = assemble(stream, route)
    assert assembler.done
    assert assembler.error is None
    assert comparable(assembler.result()) == comparable(reply)


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.stem)
def test_where_a_stream_is_cut_does_not_matter(path: Path) -> None:
    stream, _, route = recorded(path)
    whole = assemble(stream, route).result()
    for cut in range(0, len(stream), 13):
        assert assemble(stream, route, cut=cut).result() == whole


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.stem)
def test_a_stream_without_its_end_is_no_reply(path: Path) -> None:
    stream, _, route = recorded(path)
    for end in range(0, len(stream) - 1, 97):
        with pytest.raises(Error, match="before its end"):
            assemble(stream[:end], route).result()


def test_the_recordings_cover_what_they_should() -> None:
    replies = {path.stem: path.with_suffix(".json").read_text() for path in STREAMS}
    assert '"reasoning_content":' in replies["reasoning"]
    assert '"tool_calls":' in replies["talking_tool_call"]
    assert "🎉" in replies["glyphs"]
    assert '"index":1' in replies["n"]
    assert '"index":1' in replies["text_n"]
    assert b"data: null\n" in next(path for path in STREAMS if path.stem == "prompts").read_bytes()


def test_an_error_ends_the_stream_and_is_the_answer() -> None:
    error = {"code": 500, "message": "Compute error.", "type": "server_error"}
    stream = b"data: " + chunk(delta={"role": "assistant", "content": None}) + b"\n\n" + sse.event({"error": error})
    assembler = assemble(stream, "/v1/chat/completions")
    assert assembler.error == error
    assert "failed" in repr(assembler)
    with pytest.raises(Error, match="Compute error") as raised:
        assembler.result()
    assert (raised.value.status, raised.value.code) == (500, "server_error")


@pytest.mark.parametrize("error", ["gone", None, {}])
def test_an_error_of_another_shape_is_one_too(error: object) -> None:
    assembler = Assembler("/v1/completions")
    assembler.feed(json.dumps({"error": error}).encode())
    with pytest.raises(Error) as raised:
        assembler.result()
    assert raised.value.status == 502


@pytest.mark.parametrize(
    "payload", [b"", b"{", b"[]", b"7", b'"choices"', b"{}", b'{"choices":[{}]}', b'{"choices":{"a":1}}', b"\xff"]
)
def test_what_is_no_chunk_is_an_error(payload: bytes) -> None:
    with pytest.raises(Error, match="event 1 of the engine's stream") as raised:
        Assembler("/v1/chat/completions").feed(payload)
    assert raised.value.status == 502


def test_a_stream_of_nothing_but_its_end_is_no_reply() -> None:
    with pytest.raises(Error, match="ended after 1 events"):
        assemble(b"data: [DONE]\n\n", "/v1/completions").result()


def test_tool_calls_are_put_together_by_index() -> None:
    # The engine names a call anew, whole, when the name grew; a call may end without a name, an id or any arguments.
    assembler = Assembler("/v1/chat/completions")
    pieces: list[dict[str, object]] = [
        {"index": 1, "id": "b", "type": "function", "function": {"name": "get_"}},
        {"index": 0, "function": {"name": "other", "arguments": '{"x'}},
        {"index": 1, "id": "b", "type": "function", "function": {"name": "get_time", "arguments": '{"city":'}},
        {"index": 0, "function": {"arguments": '":1}'}},
        {"index": 1, "function": {"arguments": '"Rome"}'}},
        {"index": 2, "id": "c", "type": "function"},
    ]
    for piece in pieces:
        assembler.feed(chunk(delta={"tool_calls": [piece]}))
    assembler.feed(chunk(finish_reason="tool_calls"))
    assembler.feed(b"[DONE]")
    reply: Any = assembler.result()
    assert reply["choices"][0]["message"] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "other", "arguments": '{"x":1}'}},
            {"type": "function", "function": {"name": "get_time", "arguments": '{"city":"Rome"}'}, "id": "b"},
            {"type": "function", "function": {"name": "", "arguments": ""}, "id": "c"},
        ],
    }
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    assert "timings" not in reply


def test_usage_is_choice_zeros_whoever_ends_first() -> None:
    def end(tokens: int) -> bytes:
        return json.dumps(
            {**json.loads(chunk()), "choices": [], "usage": {"completion_tokens": tokens}, "timings": {"n": tokens}}
        ).encode()

    assembler = Assembler("/v1/chat/completions")
    events = [chunk(index=1, finish_reason="stop"), end(1), chunk(index=0, finish_reason="length"), end(9), b"[DONE]"]
    for event in events:
        assembler.feed(event)
    reply: Any = assembler.result()
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["length", "stop"]
    assert (reply["usage"], reply["timings"]) == ({"completion_tokens": 9}, {"n": 9})


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b" { } \r\n",
        b'{"prompt":"{"}',
        b'{"prompt":"}"}\n',
        b'{"messages":[{}], "options": {} }\t',
        b'{"stream":false,"stream_options":{"include_usage":false}}',
        b'{"stream":null}',
        '{"prompt":"é🎉 }"}'.encode(),
    ],
)
def test_a_request_streams_and_is_else_the_same(body: bytes) -> None:
    wanted = {**json.loads(body), "stream": True, "stream_options": {"include_usage": True}}
    made = request_body(body)
    assert json.loads(made) == wanted
    assert made.startswith(body.rstrip()[:-1].rstrip())


@pytest.mark.parametrize("body", [b"", b" ", b"[]", b"7", b'"{}"', b"{} x", b'{"a":1}\x00'])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(Error) as raised:
        request_body(body)
    assert raised.value.status == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True},
        {"logprobs": 3},
        {"n_probs": 1},
        {"continue_final_message": True},
        {"continue_final_message": "content"},
        {"verbose": True},
        {"stream": 0},
        {"stream": "true"},
    ],
)
def test_what_must_pass_unstreamed(fields: dict[str, object]) -> None:
    assert must_pass_unstreamed(fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream": False, "logprobs": False, "n_probs": 0, "verbose": False},
        {"stream": None, "logprobs": None, "continue_final_message": None},
        {"continue_final_message": True, "echo": True},
        {"messages": [{"role": "assistant", "content": "I"}]},
        {"prompt": ["a", "b"]},
        {"n": 4, "stop": ["x"], "tools": [{}]},
    ],
)
def test_what_is_assembled(fields: dict[str, object]) -> None:
    assert not must_pass_unstreamed(fields)
