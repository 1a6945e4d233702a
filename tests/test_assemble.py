"""Streams recorded from the real engine beside its own unstreamed replies, and what the engine seldom does.

tests/data/assembly/NAME.sse and NAME.json are the two answers to one request, written by tests/contract/test_assembly.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from supervisor import sse
from supervisor.assemble import Assembler, must_pass_unstreamed, request_body
from supervisor.choices import Chat, Text
from supervisor.errors import Error
from supervisor.messages import Messages
from supervisor.native import Native
from supervisor.responses import Responses
from supervisor.routes import Api

STREAMS = sorted((Path(__file__).parent / "data" / "assembly").glob("*.sse"))
VARYING = {
    "id",
    "id_slot",
    "created",
    "created_at",
    "completed_at",
    "call_id",
    "prompt_ms",
    "prompt_per_token_ms",
    "prompt_per_second",
} | {
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


Make = type[Assembler]


def assemble(stream: bytes, make: Make, *, cut: int = 0) -> Assembler:
    parser, assembler = sse.Parser(), make()
    for chunk in (stream[:cut], stream[cut:]):
        for payload in parser.feed(chunk):
            assembler.feed(payload)
    return assembler


def recorded(path: Path) -> tuple[bytes, Any, Make]:
    reply = json.loads(path.with_suffix(".json").read_bytes())
    nouns: dict[object, Make] = {"chat.completion": Chat, "text_completion": Text, "response": Responses}
    if isinstance(reply, list) or "stop_type" in reply:
        return path.read_bytes(), reply, Native
    return path.read_bytes(), reply, nouns[reply["object"]] if "object" in reply else Messages


def chunk(**choice: object) -> bytes:
    head = {"created": 1, "model": "m", "system_fingerprint": "b1", "object": "chat.completion.chunk", "id": "chatcmpl-1"}
    return json.dumps({"choices": [{"finish_reason": None, "index": 0, "delta": {}, **choice}], **head}).encode()


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.stem)
def test_a_recorded_stream_gives_the_recorded_reply(path: Path) -> None:
    stream, reply, make = recorded(path)
    assembler = assemble(stream, make)
    assert assembler.done
    assert assembler.error is None
    assert comparable(assembler.result()) == comparable(reply)


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.stem)
def test_where_a_stream_is_cut_does_not_matter(path: Path) -> None:
    stream, _, make = recorded(path)
    whole = assemble(stream, make).result()
    for cut in range(0, len(stream), 13):
        assert assemble(stream, make, cut=cut).result() == whole


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.stem)
def test_a_stream_without_its_end_is_no_reply(path: Path) -> None:
    """Of several native sequences the end is HTTP's, and a cut before it is the upstream's to tell."""
    stream, reply, make = recorded(path)
    last = stream.rstrip(b"\n").rfind(b"\n\n")
    for end in (*range(0, last, 97), last):
        if isinstance(reply, list) and b'"stop":true' in stream[:end]:
            break
        with pytest.raises(Error, match="before its end"):
            assemble(stream[:end], make).result()


def test_the_recordings_cover_what_they_should() -> None:
    replies = {path.stem: path.with_suffix(".json").read_text() for path in STREAMS}
    assert '"reasoning_content":' in replies["reasoning"]
    assert '"tool_calls":' in replies["talking_tool_call"]
    assert "🎉" in replies["glyphs"]
    assert '"index":1' in replies["n"]
    assert '"index":1' in replies["text_n"]
    assert '"type":"reasoning"' in replies["response_reasoning"]
    assert all(f'"type":"{kind}"' in replies["message_talking_tool_call"] for kind in ("thinking", "text", "tool_use"))
    assert replies["native_prompts"].startswith("[")
    assert b"data: null\n" in next(path for path in STREAMS if path.stem == "prompts").read_bytes()


ERROR = {"code": 500, "message": "Compute error.", "type": "server_error"}


@pytest.mark.parametrize("make", [Chat, Text, Responses, Native])
def test_an_error_ends_the_stream(make: Make) -> None:
    assembler = assemble(sse.event({"error": ERROR}), make)
    assert assembler.error == ERROR
    assert "failed" in repr(assembler)
    with pytest.raises(Error, match="Compute error") as raised:
        assembler.result()
    assert raised.value.status == 502


def test_an_error_after_some_text_is_one_too() -> None:
    assembler = Chat()
    assembler.feed(chunk(delta={"role": "assistant", "content": None}))
    assembler.feed(json.dumps({"error": ERROR}).encode())
    assert assembler.error == ERROR


def test_anthropics_error_event_has_no_envelope() -> None:
    """``format_error`` in tools/server/server-context.cpp:4396 hands the bare error to the event."""
    assembler = assemble(sse.event(ERROR, name="error"), Messages)
    assert assembler.error == ERROR


@pytest.mark.parametrize("error", ["gone", None, {}])
def test_an_error_of_another_shape_is_one_too(error: object) -> None:
    assembler = Text()
    assembler.feed(json.dumps({"error": error}).encode())
    with pytest.raises(Error) as raised:
        assembler.result()
    assert raised.value.status == 502


@pytest.mark.parametrize(
    "payload", [b"", b"{", b"[]", b"7", b'"choices"', b"{}", b'{"choices":[{}]}', b'{"choices":{"a":1}}', b"\xff"]
)
def test_what_is_no_chunk_is_an_error(payload: bytes) -> None:
    with pytest.raises(Error, match="event 1 of the engine's stream") as raised:
        Chat().feed(payload)
    assert raised.value.status == 502


@pytest.mark.parametrize(
    ("make", "payload"),
    [
        (Native, b'{"content":"x"}'),
        (Native, b'{"index":0,"content":"x"}'),
        (Responses, b'{"response":{}}'),
        (Responses, b'{"type":"response.completed"}'),
        (Messages, b'{"type":"content_block_delta","index":0}'),
        (Messages, b'{"type":"content_block_delta","index":7,"delta":{"type":"input_json_delta","partial_json":"{"}}'),
        (Messages, b"[1]"),
    ],
)
def test_what_is_no_event_of_another_api_is_an_error(make: Make, payload: bytes) -> None:
    with pytest.raises(Error, match="event 1 of the engine's stream") as raised:
        make().feed(payload)
    assert raised.value.status == 502


def test_a_stream_of_nothing_but_its_end_is_no_reply() -> None:
    with pytest.raises(Error, match="ended after 1 events"):
        assemble(b"data: [DONE]\n\n", Text).result()
    with pytest.raises(Error, match="ended after 0 events"):
        Native().result()


def events(make: Make, *payloads: dict[str, Any]) -> Any:
    assembler = make()
    for payload in payloads:
        assembler.feed(json.dumps(payload).encode())
    return assembler.result()


def test_native_sequences_come_in_their_order() -> None:
    end = {"stop": True, "content": "", "generation_settings": {"stream": True, "reasoning_in_content": True, "seed": 1}}
    replies = events(
        Native,
        {"index": 1, "content": "b", "stop": False},
        {"index": 0, "content": "a", "stop": False},
        {"index": 1, **end},
        {"index": 0, **end},
    )
    assert [(each["index"], each["content"]) for each in replies] == [(0, "a"), (1, "b")]
    assert replies[0]["generation_settings"] == {"stream": False, "reasoning_in_content": False, "seed": 1}


def test_native_sequences_that_did_not_all_end_are_no_reply() -> None:
    with pytest.raises(Error, match="before its end"):
        events(Native, {"index": 0, "content": "a", "stop": True}, {"index": 1, "content": "b", "stop": False})


def delta(index: int, **delta: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def start(index: int, **block: str) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


MESSAGE_END = (
    {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": {"output_tokens": 5}},
    {"type": "message_stop"},
)


def test_a_block_that_begins_again_goes_on() -> None:
    """The engine's last event doesn't know which blocks the ones before had begun (``to_json_anthropic_stream``)."""
    usage = {"cache_read_input_tokens": 3, "input_tokens": 4, "output_tokens": 0}
    reply = events(
        Messages,
        {"type": "message_start", "message": {"id": "m", "model": "tiny", "usage": usage}},
        start(0, type="text", text=""),
        delta(0, type="text_delta", text="Hel"),
        start(0, type="text", text=""),
        delta(0, type="text_delta", text="lo"),
        start(1, type="tool_use", id="t", name="get_"),
        start(1, type="tool_use", id="t", name="get_time"),
        delta(1, type="input_json_delta", partial_json='{"city":'),
        delta(1, type="input_json_delta", partial_json='"Rome"}'),
        start(2, type="tool_use", id="u", name="broken"),
        delta(2, type="input_json_delta", partial_json='{"city":'),
        {"type": "content_block_stop", "index": 0},
        *MESSAGE_END,
    )
    assert reply == {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "content": [
            {"type": "text", "text": "Hello"},
            {"type": "tool_use", "id": "t", "name": "get_time", "input": {"city": "Rome"}},
            {"type": "tool_use", "id": "u", "name": "broken", "input": {}},
        ],
        "model": "tiny",
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"cache_read_input_tokens": 3, "input_tokens": 4, "output_tokens": 5},
    }


def test_a_message_without_its_head_knows_no_more_than_was_said() -> None:
    reply = events(Messages, start(0, type="text", text=""), delta(0, type="text_delta", text="🎉"), *MESSAGE_END)
    assert (reply["id"], reply["model"]) == (None, None)
    assert reply["usage"] == {"cache_read_input_tokens": None, "input_tokens": None, "output_tokens": 5}


def test_tool_calls_are_put_together_by_index() -> None:
    # The engine names a call anew, whole, when the name grew; a call may end without a name, an id or any arguments.
    assembler = Chat()
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

    assembler = Chat()
    events = [chunk(index=1, finish_reason="stop"), end(1), chunk(index=0, finish_reason="length"), end(9), b"[DONE]"]
    for event in events:
        assembler.feed(event)
    reply: Any = assembler.result()
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["length", "stop"]
    assert (reply["usage"], reply["timings"]) == ({"completion_tokens": 9}, {"n": 9})


BODIES = [
    b"{}",
    b" { } \r\n",
    b'{"prompt":"{"}',
    b'{"prompt":"}"}\n',
    b'{"messages":[{}], "options": {} }\t',
    b'{"stream":false,"stream_options":{"include_usage":false}}',
    b'{"stream":null}',
    '{"prompt":"é🎉 }"}'.encode(),
]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("api", [Api.CHAT, Api.TEXT])
def test_a_request_streams_with_its_usage_and_is_else_the_same(api: Api, body: bytes) -> None:
    made = request_body(api, body)
    assert json.loads(made) == {**json.loads(body), "stream": True, "stream_options": {"include_usage": True}}
    assert made.startswith(body.rstrip()[:-1].rstrip())


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("api", [Api.RESPONSES, Api.ANTHROPIC, Api.NATIVE])
def test_a_request_of_another_api_streams_and_is_else_the_same(api: Api, body: bytes) -> None:
    made = request_body(api, body)
    assert json.loads(made) == {**json.loads(body), "stream": True}
    assert made.startswith(body.rstrip()[:-1].rstrip())


@pytest.mark.parametrize("body", [b"", b" ", b"[]", b"7", b'"{}"', b"{} x", b'{"a":1}\x00'])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(Error) as raised:
        request_body(Api.CHAT, body)
    assert raised.value.status == 400


EVERYWHERE: list[dict[str, object]] = [
    {"logprobs": True},
    {"logprobs": 3},
    {"n_probs": 1},
    {"continue_final_message": True},
    {"continue_final_message": "content"},
    {"n_indent": 4},
]


@pytest.mark.parametrize("fields", EVERYWHERE)
def test_what_must_pass_unstreamed(fields: dict[str, object]) -> None:
    assert all(must_pass_unstreamed(api, fields) for api in (Api.CHAT, Api.TEXT, Api.RESPONSES, Api.NATIVE))
    assert not must_pass_unstreamed(Api.ANTHROPIC, fields)  # its converter drops them


@pytest.mark.parametrize(
    ("fields", "apis"),
    [
        ({"verbose": True}, {Api.CHAT, Api.TEXT}),
        ({"return_tokens": True}, {Api.NATIVE}),
        ({"response_fields": ["content"]}, {Api.NATIVE}),
        ({"n": 2}, {Api.RESPONSES}),
        ({"n_cmpl": 2}, {Api.RESPONSES}),
    ],
)
def test_what_must_pass_unstreamed_on_some_routes(fields: dict[str, object], apis: set[Api]) -> None:
    assert {api for api in Api if must_pass_unstreamed(api, fields)} == apis


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream": False, "logprobs": False, "n_probs": 0, "verbose": False, "n": 1, "response_fields": []},
        {"stream": None, "logprobs": None, "continue_final_message": None, "n": None, "n_indent": 0},
        {"continue_final_message": True, "echo": True},
        {"messages": [{"role": "assistant", "content": "I"}], "max_tokens": 0},
        {"prompt": ["a", "b"], "post_sampling_probs": True, "return_progress": True},
        {"stop": ["x"], "tools": [{}]},
    ],
)
def test_what_is_assembled(fields: dict[str, object]) -> None:
    assert not any(must_pass_unstreamed(api, fields) for api in Api)
