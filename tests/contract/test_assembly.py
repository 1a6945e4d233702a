"""An assembled reply is the engine's own unstreamed one, on the real engine, case by case; and where it isn't, how.

Three fixtures give a server each, all with the `tiny` model, two slots of at least 1024 tokens and one thread; two are conftest.py's:

``engine_server() -> Iterator[httpx2.Client]``
    a client whose base URL is a real llama-server with the model's own chat template.
``tool_engine_server() -> Iterator[httpx2.Client]``
    the same, started with ``--chat-template-file tests/data/hermes_tools.jinja``, which has tools and thoughts.
``infill_engine_server() -> Iterator[httpx2.Client]``
    the first again, told that three tokens of its vocabulary mark a prefix, a suffix and a middle.

Text that the model wouldn't write by itself is forced with a grammar. ``LLMCTL_RECORD=1`` writes the cases marked ``record`` into
tests/data/assembly/, for the pure tests of tests/test_assemble.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from supervisor import engine, meter
from supervisor.assemble import Assembler, must_pass_unstreamed, request_body
from supervisor.meter import Meter
from supervisor.reply import ASSEMBLERS
from supervisor.routes import ROUTES
from supervisor.sse import Parser
from tests.conftest import bare_engine

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
NATIVE = "/completion"
INFILL = "/infill"
RECORDED = Path(__file__).parent.parent / "data" / "assembly"

PARIS = "The capital of France is"
HELLO = [{"role": "user", "content": "Say hello."}]
GLYPHS = 'root ::= "é🎉日本語 ünï"'
EMOJI = 'root ::= "🎉 hi"'
"""Its first token is a part of a glyph, of which no event tells."""
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


def blocks(*turns: tuple[str, ...], thinking: str = "", text: str = "") -> list[dict[str, Any]]:
    """The same dialogue in Anthropic's words."""
    messages: list[dict[str, Any]] = []
    for number, cities in enumerate(turns):
        said = [{"type": "thinking", "thinking": thinking, "signature": ""}] if thinking else []
        said += [{"type": "text", "text": text}] if text else []
        said += [{"type": "tool_use", "id": f"{number}{city}", "name": "get_weather", "input": {"city": city}} for city in cities]
        messages.append({"role": "user", "content": f"Weather in {' and '.join(cities)}?"})
        messages.append({"role": "assistant", "content": said})
    return messages[:-1]


def items(*turns: tuple[str, ...]) -> list[dict[str, Any]]:
    """The same dialogue as Responses has it."""
    found: list[dict[str, Any]] = []
    for cities in turns:
        found.append({"role": "user", "content": f"Weather in {' and '.join(cities)}?"})
        found += [
            {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": json.dumps({"city": city})}
            for city in cities
        ]
    return found[: -len(turns[-1])]


@dataclass(frozen=True)
class Case:
    name: str
    route: str
    fields: dict[str, Any]
    finish: str = "length"
    calls: int = 0  # tool calls in each choice
    tools: bool = False
    record: bool = False

    @property
    def mark(self) -> str:
        """The case's name as a file and a test have it."""
        return self.name.replace(" ", "_")


ONE_CALL = weather(("Rome",), ("Paris",))
TWO_CALLS = weather(("Rome", "Oslo"), ("Lima", "Bern"))
FLAT_TOOLS = [{"type": "function", **TOOLS[0]["function"]}]
ANTHROPIC_TOOLS = [{"name": "get_weather", "input_schema": TOOLS[0]["function"]["parameters"]}]
PREFIX = {"input_prefix": "def add(a, b):\n    ", "input_suffix": "\n    return c"}
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
    Case("native", NATIVE, {"prompt": PARIS, "n_predict": 5}, "limit", record=True),
    Case("native none asked", NATIVE, {"prompt": PARIS, "n_predict": 0}, "limit"),
    Case("native end", NATIVE, {"prompt": PARIS, "grammar": 'root ::= " Paris"'}, "eos"),
    Case("native glyphs", NATIVE, {"prompt": PARIS, "grammar": GLYPHS}, "eos"),
    Case("native stop string", NATIVE, {"prompt": PARIS, "grammar": 'root ::= "One, two, three"', "stop": [", th"]}, "word"),
    Case("native schema", NATIVE, {"prompt": PARIS, "json_schema": SCHEMA}, "eos"),
    Case("native n", NATIVE, {"prompt": PARIS, "n_predict": 3, "n_cmpl": 2}, "limit"),
    Case("native prompts", NATIVE, {"prompt": [PARIS, "One two three"], "n_predict": 3}, "limit", record=True),
    Case("native more prompts", NATIVE, {"prompt": [PARIS, "One two three", "Dear", [504, 3575]], "n_predict": 3}, "limit"),
    Case("native array of one", NATIVE, {"prompt": [PARIS], "n_predict": 3}, "limit"),
    Case("native post sampling", NATIVE, {"prompt": PARIS, "n_predict": 3, "post_sampling_probs": True}, "limit"),
    Case(
        "native progress", NATIVE, {"prompt": PARIS, "n_predict": 3, "return_progress": True, "timings_per_token": True}, "limit"
    ),
    Case("native verbose", NATIVE, {"prompt": PARIS, "n_predict": 3, "verbose": True}, "limit"),
    Case("native legacy", NATIVE, {"prompt": PARIS, "n_predict": 3, "reasoning_format": "deepseek-legacy"}, "limit"),
    Case("infill", INFILL, {**PREFIX, "n_predict": 4}, "limit"),
    Case("infill n", INFILL, {**PREFIX, "n_predict": 4, "n": 2}, "limit"),
    Case("infill extra", INFILL, {**PREFIX, "n_predict": 4, "input_extra": [{"text": "x = 1", "filename": "x.py"}]}, "limit"),
    Case("response", RESPONSES, {"input": "Say hello.", "max_output_tokens": 10}, record=True),
    Case("response end", RESPONSES, {"input": "Say hello.", "grammar": 'root ::= "Hello."'}),
    Case("response empty", RESPONSES, {"input": "Say hello.", "grammar": 'root ::= ""'}),
    Case("response glyphs", RESPONSES, {"input": "Say hello.", "grammar": GLYPHS}),
    Case("response emoji", RESPONSES, {"input": "Say hello.", "grammar": EMOJI}, record=True),
    Case("response stop string", RESPONSES, {"input": "Count.", "grammar": 'root ::= "One, two, three"', "stop": [", th"]}),
    Case(
        "response schema",
        RESPONSES,
        {"input": "Who?", "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}},
    ),
    Case("response reasoning", RESPONSES, {"input": "Count.", "grammar": THOUGHTS}, tools=True, record=True),
    Case("response reasoning cut", RESPONSES, {"input": "Count.", "grammar": THOUGHTS, "max_output_tokens": 9}, tools=True),
    Case("response tool call", RESPONSES, {"input": items(("Rome",), ("Paris",)), "tools": FLAT_TOOLS}, calls=1, tools=True),
    Case(
        "response tool calls",
        RESPONSES,
        {"input": items(("Rome", "Oslo"), ("Lima", "Bern")), "tools": FLAT_TOOLS},
        calls=2,
        tools=True,
    ),
    Case("message", MESSAGES, {"messages": HELLO, "max_tokens": 10}, "max_tokens", record=True),
    Case("message none asked", MESSAGES, {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
    Case("message end", MESSAGES, {"messages": HELLO}, "end_turn"),
    Case("message stop string", MESSAGES, {"messages": HELLO, "stop_sequences": ["o"]}, "end_turn"),
    Case("message system", MESSAGES, {"system": "Be short.", "messages": HELLO, "max_tokens": 5}, "max_tokens"),
    Case(
        "message continued",
        MESSAGES,
        {"messages": [*HELLO, {"role": "assistant", "content": "Hello, my"}], "max_tokens": 4},
        "max_tokens",
    ),
    Case(
        "message tool call",
        MESSAGES,
        {"messages": blocks(("Rome",), ("Paris",)), "tools": ANTHROPIC_TOOLS},
        "tool_use",
        calls=1,
        tools=True,
    ),
    Case(
        "message talking tool call",
        MESSAGES,
        {
            "messages": blocks(("Rome",), ("Oslo",), ("Paris",), thinking="They ask.", text="I look it up."),
            "tools": ANTHROPIC_TOOLS,
        },
        "tool_use",
        calls=1,
        tools=True,
        record=True,
    ),
    Case(
        "message tool calls",
        MESSAGES,
        {"messages": blocks(("Rome", "Oslo"), ("Lima", "Bern")), "tools": ANTHROPIC_TOOLS},
        "tool_use",
        calls=2,
        tools=True,
    ),
]

Server = Callable[..., httpx2.Client]


@pytest.fixture(scope="module")
def infill_engine_server(real_engine: engine.Engine, tiny_model: Path) -> Iterator[httpx2.Client]:
    marks = ",".join(f"tokenizer.ggml.fim_{part}_token_id=int:{token}" for part, token in (("pre", 4), ("suf", 5), ("mid", 6)))
    with bare_engine(real_engine.server, tiny_model, "--override-kv", marks) as client:
        yield client


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Server:
    def of(route: str, *, tools: bool = False) -> httpx2.Client:
        name = "infill_engine_server" if route == INFILL else "tool_engine_server" if tools else "engine_server"
        client: httpx2.Client = request.getfixturevalue(name)
        return client

    return of


def post(client: httpx2.Client, route: str, body: bytes) -> httpx2.Response:
    # The engine closes after a streamed reply whatever it promised, so no connection is used twice.
    headers = {"Content-Type": "application/json", "Connection": "close"}
    return client.post(route, content=body, headers=headers, timeout=120)


def both(client: httpx2.Client, route: str, fields: dict[str, Any]) -> tuple[httpx2.Response, httpx2.Response]:
    """What the engine answers unstreamed, and streamed to the body the front door makes of the same request."""
    body = json.dumps({"temperature": 0, "cache_prompt": False, "max_tokens": 64, **fields}).encode()
    if route == MESSAGES:
        post(client, route, body)  # its converter drops cache_prompt: so that both find the same cached
    return post(client, route, body), post(client, route, request_body(ROUTES[route].api, body))


def assemble(route: str, stream: bytes) -> Assembler:
    assembler = ASSEMBLERS[ROUTES[route].api]()
    for payload in Parser().feed(stream):
        assembler.feed(payload)
    return assembler


VARYING = {"id", "created", "id_slot", "created_at", "completed_at", "call_id"}


def comparable(reply: object) -> Any:
    """The reply as lists of pairs, so that the keys' order counts too, without what differs from one answer to the next."""

    def pairs(items: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return [(key, None if key in VARYING or key.endswith(("_ms", "_per_second")) else value) for key, value in items]

    return json.loads(json.dumps(reply), object_pairs_hook=pairs)


SLOW = (
    *("tool call cut", "tool calls and n", "response tool calls", "message tool calls"),
    *(
        "talking tool call",
        "response tool call",
        "json schema",
        "reasoning raw",
        "reasoning legacy",
        "response schema",
        "json object",
    ),
)
"""A quarter of a minute for what other cases mostly show."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case.name in SLOW else [], id=case.mark) for case in CASES]
)
def test_assembled_is_unstreamed(case: Case, server: Server) -> None:
    assert not must_pass_unstreamed(ROUTES[case.route].api, case.fields)
    unstreamed, streamed = both(server(case.route, tools=case.tools), case.route, case.fields)
    assert (unstreamed.status_code, streamed.status_code) == (200, 200)
    if case.record and os.environ.get("LLMCTL_RECORD"):
        RECORDED.mkdir(exist_ok=True)
        for kind, answer in (("sse", streamed), ("json", unstreamed)):
            named = re.sub(rb'"model":"[^"]*"', b'"model":"tiny"', answer.content)  # not the file's path
            (RECORDED / f"{case.mark}.{kind}").write_bytes(named)
    reply: Any = assemble(case.route, streamed.content).result()
    assert comparable(reply) == comparable(unstreamed.json())
    _check(case, reply)
    measured = Meter(ROUTES[case.route].api)
    measured.feed(streamed.content, 1.0)
    figures, said = measured.read(), meter.whole(unstreamed.content)
    if "choices" not in reply or len(reply["choices"]) == 1:  # of several the unstreamed body tells the first one's figures
        assert (figures.completion_tokens, figures.counted) == (said.completion_tokens, False)
        assert (figures.prompt_tokens, figures.cached_tokens) == (said.prompt_tokens, said.cached_tokens)


def _check(case: Case, reply: Any) -> None:
    """It ended as it was meant to, with the calls that were meant."""
    if case.route in (NATIVE, INFILL):
        replies = reply if isinstance(reply, list) else [reply]
        assert [each["stop_type"] for each in replies] == [case.finish] * len(replies)
    elif case.route == MESSAGES:
        assert reply["id"].startswith("chatcmpl-")
        assert reply["stop_reason"] == case.finish
        calls = [block for block in reply["content"] if block["type"] == "tool_use"]
        assert len({call["id"] for call in calls}) == len(calls) == case.calls
        assert all(list(call["input"]) == ["city"] for call in calls)
    elif case.route == RESPONSES:
        assert reply["id"].startswith("resp_")
        calls = [item for item in reply["output"] if item["type"] == "function_call"]
        assert len({call["id"] for call in calls}) == len(calls) == case.calls
    else:
        assert reply["id"].startswith("chatcmpl-")
        assert [choice["finish_reason"] for choice in reply["choices"]] == [case.finish] * len(reply["choices"])
        calls = [call for choice in reply["choices"] for call in choice.get("message", {}).get("tool_calls", [])]
        assert len(calls) == case.calls * len(reply["choices"])
        assert len({call["id"] for call in calls}) == len(calls)
        assert all(call["id"] and call["function"]["arguments"].startswith('{"city":') for call in calls)


@pytest.mark.parametrize("key", ["stream", "\\u0073tream"])
def test_the_last_of_two_equal_keys_wins(key: str, server: Server) -> None:
    body = f'{{"prompt": "{PARIS}", "max_tokens": 2, "{key}": false, "stream_options": {{"include_usage": false}} }} \n'
    reply = post(server(TEXT), TEXT, request_body(ROUTES[TEXT].api, body.encode()))
    assert reply.headers["content-type"] == "text/event-stream"
    assert reply.content.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("route", [TEXT, NATIVE])
def test_an_error_in_mid_stream_is_the_unstreamed_one(route: str, server: Server) -> None:
    # One more prompt than slots: the last one is looked at after the first was answered.
    unstreamed, streamed = both(server(route), route, {"prompt": [PARIS, PARIS, "word " * 4000], "max_tokens": 1})
    assert (unstreamed.status_code, streamed.status_code) == (400, 200)
    assert assemble(route, streamed.content).error == unstreamed.json()["error"]


@pytest.mark.parametrize(
    ("route", "fields", "missing"),
    [
        (TEXT, {"prompt": PARIS, "grammar": 'root ::= "One" "a"+', "stop": ["a" * 99], "max_tokens": 4}, "a+"),
        (TEXT, {"prompt": PARIS, "grammar": GLYPHS, "max_tokens": 3}, "\ufffd"),
        (CHAT, {"messages": HELLO, "grammar": 'root ::= "<think>"'}, "<think>"),
        (NATIVE, {"prompt": PARIS, "grammar": 'root ::= "One" "a"+', "stop": ["a" * 99], "max_tokens": 4}, "a+"),
        (NATIVE, {"prompt": PARIS, "grammar": GLYPHS, "max_tokens": 3}, "\ufffd"),
    ],
    ids=["half_a_stop_string", "part_of_a_glyph", "nothing_parsed", "half_a_stop_string_native", "part_of_a_glyph_native"],
)
def test_what_a_stream_lacks(route: str, fields: dict[str, Any], missing: str, server: Server) -> None:
    """The three ends of ``assemble``'s docstring. When one fails, the engine got better and the docstring can get shorter."""
    unstreamed, streamed = both(server(route, tools=True), route, fields)
    ours: Any = assemble(route, streamed.content).result()
    theirs = unstreamed.json()
    where = {CHAT: "content", TEXT: "text", NATIVE: "content"}[route]
    choices = [reply["choices"][0] if "choices" in reply else reply for reply in (ours, theirs)]
    choices = [choice.get("message", choice) for choice in choices]
    assert re.fullmatch(missing, choices[1][where].removeprefix(choices[0][where]))
    choices[0][where] = choices[1][where]
    assert comparable(ours) == comparable(theirs)


def test_a_message_that_begins_with_an_emoji_lacks_its_head(server: Server) -> None:
    """Streamed, the engine leaves out ``message_start``; ``messages``'s docstring. When this fails, it got better."""
    turns = [
        turn
        for word in ("party", "cake", "star")
        for turn in ({"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": f"🎉 {word}"})
    ]
    asked = {"messages": [*turns, {"role": "user", "content": "Say moon."}], "max_tokens": 8}
    unstreamed, streamed = both(server(MESSAGES), MESSAGES, asked)
    assert b"message_start" not in streamed.content
    ours: Any = assemble(MESSAGES, streamed.content).result()
    theirs = unstreamed.json()
    assert ours["content"] == theirs["content"]
    assert ours["content"][0]["text"].startswith("🎉")
    assert (ours["id"], ours["model"], ours["usage"]["input_tokens"]) == (None, None, None)
    assert ours["usage"]["output_tokens"] == theirs["usage"]["output_tokens"]


INDENTED = 'root ::= "    a\\n    b\\nc\\nd"'


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (
            CHAT,
            {
                "messages": [*HELLO, {"role": "assistant", "content": "Hello, my"}],
                "max_tokens": 2,
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
        ),
        (CHAT, {"messages": HELLO, "max_tokens": 2, "verbose": True}),
        (TEXT, {"prompt": "def f():\n", "n_indent": 4, "grammar": INDENTED}),
        (NATIVE, {"prompt": "def f():\n", "n_indent": 4, "grammar": INDENTED}),
        (NATIVE, {"prompt": PARIS, "max_tokens": 2, "return_tokens": True}),
        (NATIVE, {"prompt": PARIS, "max_tokens": 2, "n_probs": 1}),
        (RESPONSES, {"input": "Say hello.", "max_output_tokens": 2, "n": 2}),
    ],
    ids=["continue_final_message", "verbose", "n_indent", "n_indent_native", "return_tokens", "n_probs", "response_n"],
)
def test_what_must_pass_unstreamed_differs(route: str, fields: dict[str, Any], server: Server) -> None:
    assert must_pass_unstreamed(ROUTES[route].api, fields)
    unstreamed, streamed = both(server(route), route, fields)
    assert comparable(assemble(route, streamed.content).result()) != comparable(unstreamed.json())


def test_response_fields_take_away_what_tells_the_last_event(server: Server) -> None:
    fields = {"prompt": PARIS, "max_tokens": 2, "response_fields": ["content", "timings"]}
    assert must_pass_unstreamed(ROUTES[NATIVE].api, fields)
    unstreamed, streamed = both(server(NATIVE), NATIVE, fields)
    assert list(unstreamed.json()) == ["content", "timings"]
    last = json.loads(Parser().feed(streamed.content)[-1])
    assert "stop" not in last


def test_a_stream_lacks_the_tokens_that_split_a_glyph(server: Server) -> None:
    unstreamed, streamed = both(server(NATIVE), NATIVE, {"prompt": PARIS, "grammar": GLYPHS, "return_tokens": True})
    tokens = [token for payload in Parser().feed(streamed.content) for token in json.loads(payload)["tokens"]]
    assert 0 < len(tokens) < len(unstreamed.json()["tokens"])


def test_streamed_logprobs_are_fewer(server: Server) -> None:
    fields = {"messages": HELLO, "grammar": GLYPHS, "logprobs": True, "top_logprobs": 1}
    assert must_pass_unstreamed(ROUTES[CHAT].api, fields)
    unstreamed, streamed = both(server(CHAT), CHAT, fields)
    chunks = [json.loads(payload) for payload in Parser().feed(streamed.content) if payload != b"[DONE]"]
    tokens = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("logprobs", {}).get("content", [])]
    assert 0 < len(tokens) < len(unstreamed.json()["choices"][0]["logprobs"]["content"])


@pytest.mark.parametrize("stream", [0, "true", [True]])
@pytest.mark.parametrize(
    ("route", "fields"),
    [(TEXT, {"prompt": PARIS}), (NATIVE, {"prompt": PARIS}), (RESPONSES, {"input": "a"}), (MESSAGES, {"messages": HELLO})],
)
def test_a_stream_that_is_no_boolean_is_refused_by_the_engine(
    route: str, fields: dict[str, Any], stream: object, server: Server
) -> None:
    """So the front door may refuse it at once."""
    body = json.dumps({**fields, "max_tokens": 1, "stream": stream}).encode()
    assert post(server(route), route, body).status_code == 400
