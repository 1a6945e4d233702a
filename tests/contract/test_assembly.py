"""An assembled reply is the engine's own unstreamed one, on the real engine, case by case; and where it isn't, how.

Two fixtures of conftest.py's give a server each, both with the `tiny` model, two slots of at least 1024 tokens and one thread:

``engine_server() -> Iterator[httpx2.Client]``
    a client whose base URL is a real llama-server with the model's own chat template.
``tool_engine_server() -> Iterator[httpx2.Client]``
    the same, started with ``--chat-template-file tests/data/hermes_tools.jinja``, which has tools and thoughts.

Text that the model wouldn't write by itself is forced with a grammar. ``LLMCTL_RECORD=1`` writes the cases marked ``record`` into
tests/data/assembly/, for the pure tests of tests/test_assemble.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from supervisor.assemble import Assembler, Route, must_pass_unstreamed, request_body
from supervisor.errors import Error
from supervisor.sse import Parser

CHAT: Route = "/v1/chat/completions"
TEXT: Route = "/v1/completions"
RECORDED = Path(__file__).parent.parent / "data" / "assembly"

PARIS = "The capital of France is"
HELLO = [{"role": "user", "content": "Say hello."}]
GLYPHS = 'root ::= "é🎉日本語 ünï"'
THOUGHTS = 'root ::= "<think>\\nOne and one.\\n</think>\\n\\nTwo"'
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def weather(*turns: tuple[str, ...], **answer: str) -> list[dict[str, Any]]:
    """A dialogue that the model carries on: a question about cities and one call for each, again and again. The last has no answer."""
    messages: list[dict[str, Any]] = []
    for cities in turns:
        calls = [
            {"type": "function", "id": "1", "function": {"name": "get_weather", "arguments": json.dumps({"city": city})}}
            for city in cities
        ]
        messages.append({"role": "user", "content": f"Weather in {' and '.join(cities)}?"})
        messages.append({"role": "assistant", "content": "", **answer, "tool_calls": calls})
    return messages[:-1]


@dataclass(frozen=True)
class Case:
    name: str
    route: Route
    fields: dict[str, Any]
    finish: str = "length"
    calls: int = 0  # tool calls in each choice
    tools: bool = False
    record: bool = False


ONE_CALL = weather(("Rome",), ("Paris",))
TWO_CALLS = weather(("Rome", "Oslo"), ("Lima", "Bern"))
TALKING_CALL = weather(("Rome",), ("Paris",), content="I look it up.", reasoning_content="They ask.")

CASES = [
    Case("plain", CHAT, {"messages": HELLO, "max_tokens": 24}),
    Case("one token", CHAT, {"messages": HELLO, "max_tokens": 1}),
    Case("no tokens asked", CHAT, {"messages": HELLO, "max_tokens": 0}),
    Case("end of turn", CHAT, {"messages": HELLO, "grammar": 'root ::= "Hello."'}, "stop"),
    Case("empty", CHAT, {"messages": HELLO, "grammar": 'root ::= ""'}, "stop"),
    Case("glyphs", CHAT, {"messages": HELLO, "grammar": GLYPHS}, "stop", record=True),
    Case("stop string", CHAT, {"messages": HELLO, "grammar": 'root ::= "One, two, three"', "stop": [", th"]}, "stop"),
    Case("n", CHAT, {"messages": HELLO, "max_tokens": 6, "n": 2}, record=True),
    Case("seed", CHAT, {"messages": HELLO, "max_tokens": 8, "seed": 7}),
    Case(
        "json schema",
        CHAT,
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}},
        "stop",
    ),
    Case("json object", CHAT, {"messages": HELLO, "max_tokens": 16, "response_format": {"type": "json_object"}}),
    Case("continued", CHAT, {"messages": [*HELLO, {"role": "assistant", "content": "Hello, my"}], "max_tokens": 4}),
    Case(
        "continued and echoed",
        CHAT,
        {
            "messages": [*HELLO, {"role": "assistant", "content": "Hello, my"}],
            "max_tokens": 4,
            "continue_final_message": True,
            "add_generation_prompt": False,
            "echo": True,
        },
    ),
    Case("stream false", CHAT, {"stream": False, "messages": HELLO, "max_tokens": 2}),
    Case("stream null", TEXT, {"stream": None, "prompt": PARIS, "max_tokens": 2}),
    Case("no usage wanted", CHAT, {"messages": HELLO, "max_tokens": 2, "stream_options": {"include_usage": False}}),
    Case("progress", CHAT, {"messages": HELLO, "max_tokens": 3, "timings_per_token": True, "return_progress": True}, record=True),
    Case("text", TEXT, {"prompt": PARIS, "max_tokens": 5}),
    Case("text echo", TEXT, {"prompt": PARIS, "max_tokens": 3, "echo": True}),
    Case("text stop string", TEXT, {"prompt": PARIS, "grammar": 'root ::= "One, two, three"', "stop": ", th"}, "stop"),
    Case("text n", TEXT, {"prompt": PARIS, "max_tokens": 6, "n": 2}, record=True),
    Case("text glyphs", TEXT, {"prompt": PARIS, "grammar": GLYPHS}, "stop"),
    Case("text empty", TEXT, {"prompt": PARIS, "grammar": 'root ::= ""'}, "stop"),
    Case("prompt of tokens", TEXT, {"prompt": [504, 3575, 282, 4649], "max_tokens": 3}),
    Case("prompts", TEXT, {"prompt": [PARIS, "One two three"], "max_tokens": 3}, record=True),
    Case("more prompts than slots", TEXT, {"prompt": [PARIS, "One two three", "Dear", [504, 3575]], "max_tokens": 3}),
    Case("prompts and n", TEXT, {"prompt": [PARIS, "One two three"], "max_tokens": 3, "n": 2}),
    Case("reasoning", CHAT, {"messages": HELLO, "grammar": THOUGHTS}, "stop", tools=True, record=True),
    Case("reasoning cut", CHAT, {"messages": HELLO, "grammar": THOUGHTS, "max_tokens": 9}, tools=True),
    Case("reasoning raw", CHAT, {"messages": HELLO, "grammar": THOUGHTS, "reasoning_format": "none"}, "stop", tools=True),
    Case(
        "reasoning legacy",
        CHAT,
        {"messages": HELLO, "grammar": THOUGHTS, "reasoning_format": "deepseek-legacy"},
        "stop",
        tools=True,
    ),
    Case("tool call cut", CHAT, {"messages": ONE_CALL, "tools": TOOLS, "max_tokens": 20}, calls=1, tools=True),
    Case("talking tool call", CHAT, {"messages": TALKING_CALL, "tools": TOOLS}, "tool_calls", calls=1, tools=True, record=True),
    Case("tool calls and n", CHAT, {"messages": TWO_CALLS, "tools": TOOLS, "n": 2}, "tool_calls", calls=2, tools=True),
]

Server = Callable[[bool], httpx2.Client]


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Server:
    return lambda tools: request.getfixturevalue("tool_engine_server" if tools else "engine_server")


def post(client: httpx2.Client, route: str, body: bytes) -> httpx2.Response:
    # The engine closes after a streamed reply whatever it promised, so no connection is used twice.
    headers = {"Content-Type": "application/json", "Connection": "close"}
    return client.post(route, content=body, headers=headers, timeout=120)


def both(client: httpx2.Client, route: Route, fields: dict[str, Any]) -> tuple[httpx2.Response, httpx2.Response]:
    """What the engine answers unstreamed, and streamed to the body the front door makes of the same request."""
    body = json.dumps({"temperature": 0, "cache_prompt": False, "max_tokens": 64, **fields}).encode()
    return post(client, route, body), post(client, route, request_body(body))


def assemble(route: Route, stream: bytes) -> Assembler:
    assembler = Assembler(route)
    for payload in Parser().feed(stream):
        assembler.feed(payload)
    return assembler


def comparable(reply: dict[str, Any]) -> Any:
    """The reply as lists of pairs, so that the keys' order counts too, without what differs from one answer to the next."""

    def pairs(items: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return [
            (key, None if key in {"id", "created"} or key.endswith(("_ms", "_per_second")) else value) for key, value in items
        ]

    return json.loads(json.dumps(reply), object_pairs_hook=pairs)


SLOW = ("tool call cut", "tool calls and n")
"""A quarter of a minute for what other cases mostly show."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if case.name in SLOW else [], id=case.name.replace(" ", "_")) for case in CASES],
)
def test_assembled_is_unstreamed(case: Case, server: Server) -> None:
    assert not must_pass_unstreamed(case.fields)
    unstreamed, streamed = both(server(case.tools), case.route, case.fields)
    assert (unstreamed.status_code, streamed.status_code) == (200, 200)
    if case.record and os.environ.get("LLMCTL_RECORD"):
        RECORDED.mkdir(exist_ok=True)
        (RECORDED / f"{case.name.replace(' ', '_')}.sse").write_bytes(streamed.content)
        (RECORDED / f"{case.name.replace(' ', '_')}.json").write_bytes(unstreamed.content)
    reply: Any = assemble(case.route, streamed.content).result()
    assert comparable(reply) == comparable(unstreamed.json())
    assert reply["id"].startswith("chatcmpl-")
    assert [choice["finish_reason"] for choice in reply["choices"]] == [case.finish] * len(reply["choices"])
    calls = [call for choice in reply["choices"] for call in choice.get("message", {}).get("tool_calls", [])]
    assert len(calls) == case.calls * len(reply["choices"])
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["id"] and call["function"]["arguments"].startswith('{"city":') for call in calls)


@pytest.mark.parametrize("key", ["stream", "\\u0073tream"])
def test_the_last_of_two_equal_keys_wins(key: str, server: Server) -> None:
    body = f'{{"prompt": "{PARIS}", "max_tokens": 2, "{key}": false, "stream_options": {{"include_usage": false}} }} \n'
    reply = post(server(False), TEXT, request_body(body.encode()))
    assert reply.headers["content-type"] == "text/event-stream"
    assert reply.content.endswith(b"data: [DONE]\n\n")


def test_an_error_in_mid_stream_is_the_unstreamed_one(server: Server) -> None:
    unstreamed, streamed = both(server(False), TEXT, {"prompt": [PARIS, "word " * 4000]})
    assert (unstreamed.status_code, streamed.status_code) == (400, 200)
    assembler = assemble(TEXT, streamed.content)
    assert assembler.error == unstreamed.json()["error"]
    with pytest.raises(Error) as raised:
        assembler.result()
    assert (raised.value.status, raised.value.message) == (400, unstreamed.json()["error"]["message"])


@pytest.mark.parametrize(
    ("route", "fields", "missing"),
    [
        (TEXT, {"prompt": PARIS, "grammar": 'root ::= "One" "a"+', "stop": ["a" * 99], "max_tokens": 4}, "a+"),
        (TEXT, {"prompt": PARIS, "grammar": GLYPHS, "max_tokens": 3}, "\ufffd"),
        (CHAT, {"messages": HELLO, "grammar": 'root ::= "<think>"'}, "<think>"),
    ],
    ids=["half_a_stop_string", "part_of_a_glyph", "nothing_parsed"],
)
def test_what_a_stream_lacks(route: Route, fields: dict[str, Any], missing: str, server: Server) -> None:
    """The three ends of ``assemble``'s docstring. When one fails, the engine got better and the docstring can get shorter."""
    unstreamed, streamed = both(server(True), route, fields)
    ours: Any = assemble(route, streamed.content).result()
    theirs = unstreamed.json()
    where = "content" if route == CHAT else "text"
    choices = [reply["choices"][0].get("message", reply["choices"][0]) for reply in (ours, theirs)]
    assert re.fullmatch(missing, choices[1][where].removeprefix(choices[0][where]))
    choices[0][where] = choices[1][where]
    assert comparable(ours) == comparable(theirs)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "messages": [*HELLO, {"role": "assistant", "content": "Hello, my"}],
            "max_tokens": 2,
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        {"messages": HELLO, "max_tokens": 2, "verbose": True},
    ],
    ids=["continue_final_message", "verbose"],
)
def test_what_must_pass_unstreamed_differs(fields: dict[str, Any], server: Server) -> None:
    assert must_pass_unstreamed(fields)
    unstreamed, streamed = both(server(False), CHAT, fields)
    assert comparable(assemble(CHAT, streamed.content).result()) != comparable(unstreamed.json())


def test_streamed_logprobs_are_fewer(server: Server) -> None:
    fields = {"messages": HELLO, "grammar": GLYPHS, "logprobs": True, "top_logprobs": 1}
    assert must_pass_unstreamed(fields)
    unstreamed, streamed = both(server(False), CHAT, fields)
    chunks = [json.loads(payload) for payload in Parser().feed(streamed.content) if payload != b"[DONE]"]
    tokens = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("logprobs", {}).get("content", [])]
    assert 0 < len(tokens) < len(unstreamed.json()["choices"][0]["logprobs"]["content"])


@pytest.mark.parametrize("stream", [0, "true", [True]])
def test_a_stream_that_is_no_boolean_is_refused_by_the_engine(stream: object, server: Server) -> None:
    assert must_pass_unstreamed({"stream": stream})
    body = json.dumps({"prompt": PARIS, "max_tokens": 1, "stream": stream}).encode()
    assert post(server(False), TEXT, body).status_code == 400
