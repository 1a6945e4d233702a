"""Every way found at b11312 in which a request alone makes the engine answer 5xx, on the real engine: read as the request's fault.

When one is no longer a 5xx, the engine got better and the case can go; when a 5xx stays one, ``fault`` has missed it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from supervisor import engine, fault
from tests.conftest import bare_engine
from tests.contract.test_assembly import infill_engine_server, post

__all__ = ["infill_engine_server"]

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
CHATS = (CHAT, f"{CHAT}/input_tokens", "/apply-template")
HI = {"role": "user", "content": "Hi."}
PIXEL = "data:image/png;base64,AAAA"
BROKEN_CALL = {"type": "function", "id": "1", "function": {"name": "f", "arguments": "{"}}

STRICT = """\
{#- <tool_call> <function= <parameter= #}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('Unexpected message role.') }}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- else %}{{ raise_exception('No messages provided.') }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
"""Refuses what Qwen3.5's template does, and is read by the same code: the words of its first line lead there (common/chat.cpp:1213).
What a template of another kind refuses is a 400 already."""


@pytest.fixture(scope="module")
def strict_engine_server(
    real_engine: engine.Engine, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx2.Client]:
    template = tmp_path_factory.mktemp("strict") / "strict.jinja"
    template.write_text(STRICT)
    with bare_engine(real_engine.server, tiny_model, "--chat-template-file", str(template)) as client:
        yield client


@pytest.fixture(scope="module")
def embedding_server(real_engine: engine.Engine, tiny_model: Path) -> Iterator[httpx2.Client]:
    with bare_engine(real_engine.server, tiny_model, "--embeddings", "--pooling", "mean", "-b", "256", "-ub", "256") as client:
        yield client


def part(**content: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [content]}]}


NO_JSON = [
    *(pytest.param(path, b"{", id=f"no_json{path}") for path in (*CHATS, "/v1/completions", "/completion", "/infill")),
    *(pytest.param(path, b"{", id=f"no_json{path}") for path in (RESPONSES, f"{RESPONSES}/input_tokens", MESSAGES)),
    *(pytest.param(path, b"{", id=f"no_json{path}") for path in (f"{MESSAGES}/count_tokens", "/tokenize", "/detokenize")),
]

CASES: list[tuple[str, str, dict[str, Any]]] = [
    *(
        (name, path, fields)
        for path in CHATS
        for name, fields in (
            ("image", part(type="image_url", image_url={"url": PIXEL})),
            ("audio", part(type="input_audio", input_audio={"data": "AAAA"})),
            ("no role", {"messages": [{"content": "Hi."}]}),
            ("role of a wrong type", {"messages": [{"role": 7, "content": "Hi."}]}),
            ("tool of an unknown type", {"messages": [HI], "tools": [{"type": "frog"}]}),
            ("tool without a type", {"messages": [HI], "tools": [{}]}),
            ("reasoning format", {"messages": [HI], "reasoning_format": "frog"}),
            ("reasoning format's type", {"messages": [HI], "reasoning_format": 7}),
            ("schema and grammar", {"messages": [HI], "json_schema": {"type": "object"}, "grammar": 'root ::= "a"'}),
        )
    ),
    *(
        (name, path, fields)
        for path in (RESPONSES, f"{RESPONSES}/input_tokens")
        for name, fields in (
            ("image", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PIXEL}]}]}),
            ("reasoning format", {"input": "Hi.", "reasoning_format": "frog"}),
        )
    ),
    *(
        (name, path, {"max_tokens": 2, **fields})
        for path in (MESSAGES, f"{MESSAGES}/count_tokens")
        for name, fields in (
            ("no messages", {}),
            ("image", part(type="image", source={"type": "base64", "data": "AAAA"})),
            ("no role", {"messages": [{"content": "Hi."}]}),
        )
    ),
    ("no prefix", "/infill", {"input_suffix": "b"}),
    ("no suffix", "/infill", {"input_prefix": "a"}),
    ("prefix of a wrong type", "/infill", {"input_prefix": 7, "input_suffix": "b"}),
    ("content of a wrong type", "/tokenize", {"content": 7}),
    ("content with a null", "/tokenize", {"content": [1, None]}),
    ("tokens of a wrong type", "/detokenize", {"tokens": 7}),
    ("tokens that are text", "/detokenize", {"tokens": ["x"]}),
    ("a token that isn't there", "/detokenize", {"tokens": [99_999_999]}),
    ("a token below zero", "/detokenize", {"tokens": [-1]}),
    ("embeddings", "/v1/embeddings", {"input": "a"}),  # 501: not started for it
    ("rerank", "/v1/rerank", {"query": "a", "documents": ["b"]}),
]

Serve = Callable[[str], httpx2.Client]


@pytest.fixture
def serve(request: pytest.FixtureRequest) -> Serve:
    def of(path: str) -> httpx2.Client:
        client: httpx2.Client = request.getfixturevalue("infill_engine_server" if path == "/infill" else "engine_server")
        return client

    return of


def check(client: httpx2.Client, path: str, body: bytes) -> None:
    """The engine answers 5xx and ``fault`` 400, with the engine's words."""
    reply = post(client, path, body)
    assert reply.status_code in (500, 501), reply.text
    said = fault.of_reply(reply.content, reply.status_code)
    assert (said.status, said.kind, said.source) == (400, "invalid_request_error", "engine")
    assert said.message == reply.json()["error"]["message"]
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(("path", "body"), NO_JSON)
def test_what_is_no_json(path: str, body: bytes, serve: Serve) -> None:
    check(serve(path), path, body)


@pytest.mark.parametrize(("name", "path", "fields"), CASES, ids=[f"{name} {path}".replace(" ", "_") for name, path, _ in CASES])
def test_a_fault_of_the_request(name: str, path: str, fields: dict[str, Any], serve: Serve) -> None:
    assert name
    check(serve(path), path, json.dumps(fields).encode())


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/completion", "/v1/responses", "/v1/messages", "/infill"]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_too_long_tells_both_numbers(path: str, stream: bool, serve: Serve) -> None:
    words = "word " * 3000
    fields: dict[str, Any] = {
        "/v1/completions": {"prompt": words},
        "/completion": {"prompt": words},
        "/v1/responses": {"input": words},
        "/infill": {"input_prefix": "", "input_suffix": "", "input_extra": [], "prompt": words},
    }.get(path, {"messages": [{"role": "user", "content": words}]})
    reply = post(serve(path), path, json.dumps({**fields, "max_tokens": 2, "stream": stream}).encode())
    assert reply.status_code == 400, reply.text
    said = fault.of_reply(reply.content, 400)
    assert said.code == "context_length_exceeded"
    assert said.tokens is not None
    assert said.tokens[0] > 3000 > said.tokens[1]


TEMPLATED = (CHAT, f"{CHAT}/input_tokens", "/apply-template", MESSAGES, f"{MESSAGES}/count_tokens")
TWO_SYSTEMS = [HI, {"role": "system", "content": "Be short."}]


@pytest.mark.parametrize(
    ("key", "path", "turns", "words"),
    [
        *(("messages", path, TWO_SYSTEMS, "at the beginning") for path in TEMPLATED),
        *(("messages", path, [HI, {"role": "critic", "content": "Hm."}], "Unexpected message role") for path in TEMPLATED),
        *(("messages", path, [], "No messages provided") for path in TEMPLATED),
        ("input", RESPONSES, TWO_SYSTEMS, "at the beginning"),
        ("input", RESPONSES, [], "No messages provided"),
    ],
)
def test_a_templates_refusal(
    key: str, path: str, turns: list[dict[str, Any]], words: str, strict_engine_server: httpx2.Client
) -> None:
    body = json.dumps({key: turns}).encode()
    check(strict_engine_server, path, body)
    assert words in post(strict_engine_server, path, body).json()["error"]["message"]


def test_a_call_whose_arguments_are_no_json(tool_engine_server: httpx2.Client) -> None:
    """Agents send back what the model wrote."""
    turns = [
        HI,
        {"role": "assistant", "content": "", "tool_calls": [BROKEN_CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]
    for path in CHATS:
        check(tool_engine_server, path, json.dumps({"messages": turns}).encode())


def test_a_text_too_long_to_embed(embedding_server: httpx2.Client) -> None:
    """It can't be split over batches: the engine says 500, and OpenAI's clients look for a prompt too long."""
    reply = post(embedding_server, "/v1/embeddings", json.dumps({"input": "word " * 400}).encode())
    assert reply.status_code == 500
    said = fault.of_reply(reply.content, 500)
    assert (said.status, said.code) == (400, "context_length_exceeded")
    assert said.tokens is not None
    assert said.tokens[0] > 400 > said.tokens[1] == 256
