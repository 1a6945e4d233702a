"""Whose fault an error is, and its words in each API. tests/contract/test_faults.py has the real engine's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from supervisor import fault, sse
from supervisor.errors import Error, Exit
from supervisor.fault import TooLong
from supervisor.routes import ROUTES, Api

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def engines(message: str, status: int = 500, kind: str = "server_error", **more: Any) -> bytes:
    """An error body as the engine writes it."""
    return json.dumps({"error": {"code": status, "message": message, "type": kind, **more}}).encode()


@pytest.mark.parametrize(
    "message",
    [
        "Compute error.",
        "Invalid input batch.",
        "Context size has been exceeded.",
        "decode() failed: failed to process speculative batch",
        "got exception: speculative batch index 3 is not inside the current sub-batch [0, 2)",
        "context shift cannot be used for shared prompt",
        "The model produced output that does not match the expected peg-native format",
        "Invalid diff: '[]' not found at start of '{}'",
        "std::bad_alloc",
        "unknown error",
    ],
)
def test_what_the_decoding_loop_or_the_outputs_reader_says_is_the_engines(message: str) -> None:
    said = fault.of_reply(engines(message), 500)
    assert (said.status, said.kind, said.code, said.source) == (500, "server_error", 500, "engine")
    assert said.message == message


@pytest.mark.parametrize(
    "message",
    [
        "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error",
        "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj",
        "Failed to parse messages: Missing 'role' in message: {}",
        "Failed to parse tool call arguments as JSON: [json.exception.parse_error.101]",
        "While executing CallExpression: Jinja Exception: System message must be at the beginning.",
        "'messages' is required",
        "Unknown reasoning format: frog",
        "vector::_M_range_check: __n (which is 99999999) >= this->size() (which is 49152)",
        "",
    ],
)
def test_any_other_500_is_the_requests(message: str) -> None:
    said = fault.of_reply(engines(message), 500)
    assert (said.status, said.kind, said.code, said.source) == (400, "invalid_request_error", 400, "engine")
    assert said.message == message


def test_what_this_model_cannot_do_is_the_requests_fault() -> None:
    said = fault.of_reply(engines("Infill is not supported by this model: ", 501, "not_supported_error"), 501)
    assert (said.status, said.kind) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (404, "not_found_error"), (503, "unavailable_error")]
)
def test_other_refusals_keep_their_words(status: int, kind: str) -> None:
    said = fault.of_reply(engines("no", status, kind), status)
    assert (said.status, said.kind, said.code, said.message) == (status, kind, status, "no")


@pytest.mark.parametrize("raw", [b"", b"gone", b"[]", b'{"error":"gone"}', b"\xff", b'{"error":null}'])
def test_a_body_that_is_no_error_object_is_the_engines_own(raw: bytes) -> None:
    said = fault.of_reply(raw, 500)
    assert (said.status, said.source) == (500, "engine")
    assert said.message == (raw.decode(errors="replace") or "the engine said 500")


TOO_LONG = engines("request (5031 tokens) exceeds…", 400, "exceed_context_size_error", n_prompt_tokens=5031, n_ctx=2048)
TOO_LARGE = engines(
    "input (5031 tokens) is too large to process. increase the physical batch size (current batch size: 2048)"
)  # an embedding's


@pytest.mark.parametrize(("raw", "status"), [(TOO_LONG, 400), (TOO_LARGE, 500)])
def test_a_prompt_too_long_is_told_as_each_vendor_tells_it(raw: bytes, status: int) -> None:
    said = fault.of_reply(raw, status)
    assert said.status == 400
    openais = said.body(CHAT)["error"]
    assert (openais["code"], openais["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert openais["message"].startswith(
        "This model's maximum context length is 2048 tokens. However, your messages resulted in 5031"
    )
    assert (openais["n_prompt_tokens"], openais["n_ctx"]) == (5031, 2048)
    anthropics = said.body(MESSAGES)
    assert (anthropics["type"], anthropics["error"]["type"]) == ("error", "invalid_request_error")
    assert anthropics["error"]["message"] == "prompt is too long: 5031 tokens > 2048 maximum"


def test_ours_is_worded_like_the_engines() -> None:
    ours, theirs = fault.of(TooLong(5031, 2048, hint="a shorter prompt")), fault.of_reply(TOO_LONG, 400)
    for path in (CHAT, MESSAGES):
        mine, other = ours.body(path)["error"], theirs.body(path)["error"]
        assert (mine.pop("source"), other.pop("source"), mine.pop("try")) == ("llmctl", "engine", "a shorter prompt")
        assert mine == other


@pytest.mark.parametrize(
    ("inside", "status"),
    [
        ({"code": 500, "message": "anything", "type": "server_error"}, 500),  # after the head the request was read: the engine's
        ({"message": "gone"}, 500),
        ({}, 500),
        ({"code": "x", "message": "gone"}, 500),
        ({"code": 7, "message": "gone"}, 500),
        ({"code": 400, "message": "no", "type": "invalid_request_error"}, 400),
        (json.loads(TOO_LONG)["error"], 400),
        (json.loads(TOO_LARGE)["error"], 400),
    ],
)
def test_an_error_event_says_its_status_itself(inside: dict[str, object], status: int) -> None:
    assert fault.of_event(inside).status == status


def test_an_error_of_ours_says_who_speaks_and_what_to_try() -> None:
    error = Error("the queue is full", exit=Exit.BUSY, hint="wait", status=429, code="queue_full")
    inside = {"message": "the queue is full", "type": "invalid_request_error", "param": None, "code": "queue_full"}
    assert fault.of(error).body(CHAT) == {"error": {**inside, "source": "llmctl", "try": "wait"}}
    anthropics = {
        "type": "rate_limit_error",
        "message": "the queue is full",
        "code": "queue_full",
        "source": "llmctl",
        "try": "wait",
    }
    assert fault.of(error).body(MESSAGES) == {"type": "error", "error": anthropics}
    assert fault.of(Error("oh", exit=Exit.CHILD)).body(CHAT)["error"]["type"] == "server_error"
    assert "try" not in fault.of(Error("oh", exit=Exit.CHILD)).body(MESSAGES)["error"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (408, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_anthropics_kinds(status: int, kind: str) -> None:
    assert fault.of(Error("x", exit=Exit.USAGE, status=status)).body("/v1/messages/count_tokens")["error"]["type"] == kind


def test_only_anthropics_routes_have_its_shape() -> None:
    said = fault.of(Error("x", exit=Exit.USAGE))
    shaped = {path for path in [*ROUTES, "/v1/models", "/nowhere"] if said.body(path).get("type") == "error"}
    assert shaped == {"/v1/messages", "/v1/messages/count_tokens"}


def test_the_event_that_ends_a_stream() -> None:
    said = fault.of(Error("gone", exit=Exit.CHILD, status=502, code="engine_died"))
    inside = said.body(CHAT)["error"]
    for api in (Api.CHAT, Api.TEXT, Api.NATIVE):
        assert said.event(api) == ("", {"error": inside})
    assert said.event(Api.ANTHROPIC) == ("error", said.body(MESSAGES))
    fields = {"type": "error", "code": "engine_died", "message": "gone", "param": None}
    assert said.event(Api.RESPONSES) == ("error", {**fields, "error": inside})
    name, payload = said.event(Api.ANTHROPIC)
    assert sse.event(payload, name=name).startswith(
        b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"gone"'
    )
