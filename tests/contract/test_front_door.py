"""What a client of the front door may rely on, over the fake engine and the real one."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from supervisor.sse import Parser
from tests.conftest import WAIT_S, Box, Client, until

HELLO = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module", params=["fake", "real"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    if request.param == "real":
        yield request.getfixturevalue("tiny")
        return
    make: Callable[..., Box] = request.getfixturevalue("module_fake_box")
    yield make(tokens=10_000, pace_s=0.002).up("--set", "slots=2")


def events(client: Client, path: str, **fields: Any) -> list[Any]:
    """The payloads of a stream, parsed; ``[DONE]`` stays a word."""
    with client.http as http, http.stream("POST", path, json={"model": "tiny", "stream": True, **fields}) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        parser = Parser()
        payloads = [payload for chunk in reply.iter_raw() for payload in parser.feed(chunk)]
    return [payload.decode() if payload == b"[DONE]" else json.loads(payload) for payload in payloads]


def test_a_chat_streams_to_its_done_with_timings_untouched(served: Client) -> None:
    found = events(served, "/v1/chat/completions", messages=HELLO, max_tokens=6)
    assert found[-1] == "[DONE]"
    assert found[0]["choices"][0]["delta"]["role"] == "assistant"
    assert found[-2]["choices"][0]["finish_reason"] == "length"
    assert found[-2]["timings"]["predicted_n"] == 6


def test_a_chat_without_stream_is_one_reply(served: Client) -> None:
    with served.http as http:
        reply = http.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO, "max_tokens": 6})
    body = reply.json()
    assert reply.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["usage"]["completion_tokens"] == 6
    assert body["timings"]["predicted_n"] == 6


def test_completions_stream_and_not(served: Client) -> None:
    found = events(served, "/v1/completions", prompt="Once upon", max_tokens=5, temperature=0)
    text = "".join(event["choices"][0]["text"] for event in found if event != "[DONE]")
    with served.http as http:
        whole = http.post(
            "/v1/completions", json={"model": "tiny", "prompt": "Once upon", "max_tokens": 5, "temperature": 0}
        ).json()
    assert whole["object"] == "text_completion"
    assert whole["choices"][0]["text"] == text


ASKED: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Say hello.", "max_output_tokens": 5},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5},
    "/completion": {"prompt": "Once upon", "n_predict": 5},
}


def _text(payloads: list[Any]) -> str:
    """What the events of any API say."""
    found = []
    for payload in payloads:
        delta = payload.get("delta", payload.get("content", ""))
        found.append(delta.get("text", "") if isinstance(delta, dict) else delta)
    return "".join(found)


def _whole_text(path: str, body: dict[str, Any]) -> str:
    part = body["output"][0]["content"][0] if path == "/v1/responses" else body if path == "/completion" else body["content"][0]
    return str(part.get("text", part.get("content")))


@pytest.mark.parametrize("path", ASKED)
def test_every_api_streams_and_not_and_is_metered_alike(served: Client, path: str) -> None:
    before = len(served.box.records())
    asked = {"temperature": 0, **ASKED[path]}
    streamed = _text(events(served, path, **asked))
    with served.http as http:
        whole = http.post(path, json={"model": "tiny", **asked})
    assert whole.status_code == 200, whole.text
    assert _whole_text(path, whole.json()) == streamed
    rows = served.box.closed_records(before + 2)[before:]
    assert [(row["status"], row["completion_tokens"], row["counted"]) for row in rows] == [("ok", 5, False)] * 2
    assert rows[0]["prompt_tokens"] == rows[1]["prompt_tokens"] > 0


COUNTED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions/input_tokens": {"messages": HELLO},
    "/v1/responses/input_tokens": {"input": "Say hello."},
    "/v1/messages/count_tokens": {"messages": HELLO},
}


@pytest.mark.parametrize("path", COUNTED)
def test_every_api_counts_tokens(served: Client, path: str) -> None:
    with served.http as http:
        assert http.post(path, json={"model": "tiny", **COUNTED[path]}).json()["input_tokens"] > 1


def test_what_takes_no_slot(served: Client) -> None:
    with served.http as http:
        tokens = http.post("/tokenize", json={"model": "tiny", "content": "Say hello."}).json()["tokens"]
        assert len(tokens) > 1
        assert http.post("/detokenize", json={"model": "tiny", "tokens": tokens}).json()["content"]
        assert "Say hello." in http.post("/apply-template", json={"model": "tiny", "messages": HELLO}).json()["prompt"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank"])
def test_a_route_of_another_kind_is_refused_with_a_route_that_fits(served: Client, path: str) -> None:
    with served.http as http:
        reply = http.post(path, json={"model": "tiny", "input": "a", "query": "a", "documents": ["b"]})
    error = reply.json()["error"]
    assert (reply.status_code, error["source"]) == (400, "llmctl")
    assert error["try"]


def test_two_choices_are_metered_as_two(served: Client) -> None:
    before = len(served.box.records())
    with served.http as http:
        body = http.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO, "max_tokens": 5, "n": 2}).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    row = served.box.closed_records(before + 1)[-1]
    assert row["status"] == "ok"
    assert row["completion_tokens"] == 10  # the engine's own usage counts one sequence


def test_every_request_has_one_closed_record(served: Client) -> None:
    before = len(served.box.records())
    events(served, "/v1/chat/completions", messages=HELLO, max_tokens=4)
    with served.http as http:
        http.post("/v1/completions", json={"model": "tiny", "prompt": "One", "max_tokens": 4})
        http.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO, "max_tokens": 4, "logprobs": True})
    rows = served.box.closed_records(before + 3)[before:]
    assert [row["status"] for row in rows] == ["ok", "ok", "ok"]
    assert [row["completion_tokens"] for row in rows] == [4, 4, 4]
    assert [row["stream"] for row in rows] == [True, False, False]
    assert [row["attempts"] for row in rows] == [1, 1, 1]
    assert all(row["prompt_tokens"] > 0 for row in rows)
    assert len({row["id"] for row in rows}) == 3


def test_a_client_that_leaves_frees_the_slot_and_is_recorded(served: Client) -> None:
    """The child says in its log that it released the slot; nobody polls it."""
    before = len(served.box.records())
    log = served.box.home.logs / "tiny.log"
    released = log.read_text().count("stop processing")
    with served.http as http:
        body = {"model": "tiny", "stream": True, "messages": HELLO, "max_tokens": 2000, "ignore_eos": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as reply:
            next(reply.iter_raw())
    row = served.box.closed_records(before + 1)[-1]
    assert row["status"] == "cancelled"
    assert 0 < row["completion_tokens"] < 2000
    assert row["counted"]
    until(lambda: log.read_text().count("stop processing") > released)


def test_an_unstreamed_client_that_leaves_frees_the_slot_too(served: Client) -> None:
    before = len(served.box.records())
    log = served.box.home.logs / "tiny.log"
    begun, released = (log.read_text().count(words) for words in ("processing task", "stop processing"))
    body = json.dumps({"model": "tiny", "messages": HELLO, "max_tokens": 3000, "ignore_eos": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    host, _, port = served.address.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as door:
        door.sendall(head.encode() + body)
        until(lambda: log.read_text().count("processing task") > begun)
    assert served.box.closed_records(before + 1)[-1]["status"] == "cancelled"
    until(lambda: log.read_text().count("stop processing") > released)
    (length,) = re.findall(r"stop processing: n_tokens = (\d+)", log.read_text())[-1:]
    assert int(length) < 2000  # it was stopped, and didn't just come to its end


def test_the_engines_refusal_keeps_its_words_and_names_its_source(served: Client) -> None:
    with served.http as http:
        reply = http.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO, "n": 50})
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["source"] == "engine"
    assert error["message"]


def test_the_models_route_knows_the_real_context(served: Client) -> None:
    with served.http as http:
        (model,) = http.get("/v1/models").json()["data"]
    assert model["id"] == "tiny"
    assert model["state"] == "ready"
    assert model["meta"]["n_ctx"] >= 256
    assert model["meta"]["slots"] == 2


def test_health_is_well(served: Client) -> None:
    with served.http as http:
        assert http.get("/health").json()["status"] == "ok"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": HELLO, "max_tokens": 20},
        {"messages": HELLO, "max_tokens": 8, "n": 2, "seed": 1},
        {"messages": HELLO, "max_tokens": 4, "logprobs": True},
        {"messages": HELLO, "max_tokens": 40, "response_format": {"type": "json_object"}},
    ],
    ids=["plain", "n", "logprobs", "json"],
)
def test_an_unstreamed_reply_is_the_engines_own(tiny: Client, engine_server: httpx2.Client, fields: dict[str, Any]) -> None:
    """Through the front door and without it, field by field. tests/contract/test_assembly.py has all the cases, without the door."""
    asked = {"model": "tiny", "temperature": 0, "cache_prompt": False} | fields
    with tiny.http as http:
        through = http.post("/v1/chat/completions", json=asked)
    plain = engine_server.post("/v1/chat/completions", json=asked, headers={"Connection": "close"})
    assert through.status_code == plain.status_code == 200
    assert _lasting(through.json()) == _lasting(plain.json())
    assert list(through.json()) == list(plain.json())  # in the engine's order


def _lasting(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply without what differs from one time to the next."""
    return {key: value for key, value in reply.items() if key not in ("id", "created", "timings", "model")}
