"""How an answer of each API goes back, through a whole llmctl over the fake: its bytes, its ends, and what a waiting client hears."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from supervisor.errors import Error, Exit
from supervisor.reply import retry_headers
from supervisor.sse import Parser
from tests import fakes
from tests.conftest import Box, Client, until

ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Say hello."}]},
    "/v1/completions": {"prompt": "Say hello."},
    "/v1/responses": {"input": "Say hello."},
    "/v1/messages": {"messages": [{"role": "user", "content": "Say hello."}]},
    "/completion": {"prompt": "Say hello."},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
}
COUNTS = {
    "/v1/chat/completions/input_tokens": ASKED["/v1/chat/completions"],
    "/v1/responses/input_tokens": ASKED["/v1/responses"],
    "/v1/messages/count_tokens": ASKED["/v1/messages"],
}
COMPUTE = {"code": 500, "message": "Compute error.", "type": "server_error"}
IMAGE = {"code": 500, "message": "image input is not supported", "type": "server_error"}


@pytest.fixture(scope="module")
def served(module_fake_box: Callable[..., Box]) -> Client:
    """Two slots; what a request's answer is to do stands in its field ``fake``."""
    return module_fake_box(tokens=4, text="Hello there, you two.").up("--set", "slots=2")


@pytest.fixture(scope="module")
def narrow(module_fake_box: Callable[..., Box]) -> Client:
    """One slot."""
    return module_fake_box(tokens=4).up("--set", "slots=1")


def ask(client: Client, path: str, **fields: Any) -> httpx2.Response:
    with client.http as http:
        return http.post(path, json={"model": "tiny", **ASKED.get(path, {}), **fields})


def stream(client: Client, path: str, told: Callable[[bytes], None] = lambda _: None, **fields: Any) -> tuple[bytes, bool]:
    """A stream's bytes, and whether it came to a clean end."""
    got = b""
    body = {"model": "tiny", "stream": True, **ASKED[path], **fields}
    try:
        with client.http as http, http.stream("POST", path, json=body) as reply:
            assert reply.status_code == 200, reply.read()
            for chunk in reply.iter_raw():
                got += chunk
                told(got)
    except httpx2.RemoteProtocolError:
        return got, False
    return got, True


def last_event(got: bytes) -> tuple[str, Any]:
    """The name and the payload of the last event."""
    text = got.decode().rstrip("\n").rpartition("\n\n")[2]
    name, _, data = text.rpartition("data: ")
    return name.removeprefix("event: ").strip(), json.loads(data)


def check_error(path: str, body: dict[str, Any], source: str, message: str, *, event: bool = False) -> None:
    """An error body, or the payload of an error event, is of its API's shape."""
    assert body["error"]["source"] == source
    assert message in body["error"]["message"]
    typed = path == "/v1/messages" or (event and path == "/v1/responses")
    assert body.get("type") == ("error" if typed else None)


@pytest.mark.parametrize("path", ASKED)
def test_a_stream_passes_byte_for_byte(served: Client, path: str) -> None:
    """The fake is asked the same behind llmctl's back: all but ids and times is equal."""
    got, clean = stream(served, path)
    assert clean
    uds = httpx2.HTTPTransport(uds=str(next(served.box.home.run.rglob("*.sock"))))
    with httpx2.Client(transport=uds, base_url="http://child") as child:
        direct = child.post(path, json={"stream": True, **ASKED[path]}).content
    assert _shape(got) == _shape(direct)


def _shape(got: bytes) -> list[Any]:
    varying = ("id", "created", "created_at", "timings", "item_id", "id_slot")
    lines = []
    for line in got.split(b"\n"):
        data = line.removeprefix(b"data: ")
        if data.startswith(b"{"):
            lines.append(json.loads(data, object_pairs_hook=lambda pairs: [(k, None if k in varying else v) for k, v in pairs]))
        else:
            lines.append(line)
    return lines


@pytest.mark.parametrize("path", ASKED)
def test_an_unstreamed_answer_is_one_reply_and_is_metered(served: Client, path: str) -> None:
    before = len(served.box.records())
    reply = ask(served, path)
    assert reply.status_code == 200, reply.text
    assert "Hello there, you two." in reply.text
    row = served.box.closed_records(before + 1)[-1]
    assert (row["status"], row["completion_tokens"], row["route"]) == ("ok", 4, path)
    assert row["prompt_tokens"] == 2
    assert not row["counted"]
    asked = fakes.events(served.box.engine.parent, "request", path=path)[-1]["body"]
    assert '"stream":true' in asked  # so that the engine notices a client that leaves


def test_a_messages_head_that_the_engine_leaves_out_is_put_before_it(served: Client) -> None:
    """The engine's bytes follow as they are. tests/test_anthropic.py reads such a stream of the real engine's."""
    before = len(served.box.records())
    whole, clean = stream(served, "/v1/messages")
    lacking, _ = stream(served, "/v1/messages", fake={"half_glyph_first": True})
    assert clean
    row = served.box.closed_records(before + 2)[-1]
    first, rest = lacking.split(b"\n\n", 1)
    assert rest == whole.split(b"\n\n", 1)[1]
    name, message = last_event(first)
    assert (name, message["type"]) == ("message_start", "message_start")
    assert message["message"]["id"] == row["id"]
    assert (row["completion_tokens"], row["prompt_tokens"]) == (4, None)
    reply = ask(served, "/v1/messages", fake={"half_glyph_first": True}).json()
    assert reply["id"].startswith("req_")
    assert reply["content"][0]["text"] == "Hello there, you two."
    assert reply["usage"]["input_tokens"] is None


@pytest.mark.parametrize("path", COUNTS)
def test_a_count_has_its_record_and_no_tokens(served: Client, path: str) -> None:
    before = len(served.box.records())
    reply = ask(served, path, **COUNTS[path])
    assert reply.json()["input_tokens"] == 2
    row = served.box.closed_records(before + 1)[-1]
    assert (row["status"], row["completion_tokens"]) == ("ok", None)


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("inside", "status"), [(COMPUTE, 500), (IMAGE, 400)], ids=["engines_fault", "requests_fault"])
def test_the_engines_refusal_before_any_token(
    served: Client, path: str, streams: bool, inside: dict[str, Any], status: int
) -> None:
    before = len(served.box.records())
    reply = ask(served, path, stream=streams, fake={"error_status": 500, "error_body": inside})
    assert reply.status_code == status
    check_error(path, reply.json(), "engine", inside["message"])
    assert served.box.closed_records(before + 1)[-1]["status"] == "error"


@pytest.mark.parametrize("path", ASKED)
def test_an_engines_error_in_mid_stream_passes_as_it_comes(served: Client, path: str) -> None:
    got, clean = stream(served, path, fake={"error_after_tokens": 2})
    assert not clean
    name, payload = last_event(got)
    assert (name, payload) == (("error", COMPUTE) if path == "/v1/messages" else ("", {"error": COMPUTE}))


@pytest.mark.parametrize("path", ASKED)
def test_an_engines_error_in_the_middle_is_an_unstreamed_clients_status(served: Client, path: str) -> None:
    reply = ask(served, path, fake={"error_after_tokens": 2})
    assert reply.status_code == 500
    check_error(path, reply.json(), "engine", "Compute error.")


@pytest.mark.parametrize("path", ASKED)
def test_a_connection_that_ends_in_mid_stream_is_told_in_the_apis_words(served: Client, path: str) -> None:
    before = len(served.box.records())
    got, clean = stream(served, path, fake={"cut_after_tokens": 2})
    assert not clean
    name, payload = last_event(got)
    assert name == ("error" if path in ("/v1/messages", "/v1/responses") else "")
    check_error(path, payload, "llmctl", "ended before its answer did", event=True)
    if path == "/v1/responses":
        assert (payload["type"], payload["code"], payload["param"]) == ("error", "engine_died", None)
        assert "ended before its answer did" in payload["message"]
    assert served.box.closed_records(before + 1)[-1]["status"] == "truncated"


@pytest.mark.parametrize(
    ("retry_after_s", "retry", "headers"),
    [
        (None, None, ()),
        (7, None, ((b"retry-after", b"7"),)),
        (None, False, ((b"x-should-retry", b"false"),)),
        (1, True, ((b"retry-after", b"1"), (b"x-should-retry", b"true"))),
    ],
)
def test_a_refusal_says_whether_to_try_again(
    retry_after_s: int | None, retry: bool | None, headers: tuple[tuple[bytes, bytes], ...]
) -> None:
    error = Error("full", exit=Exit.BUSY, status=429, retry_after_s=retry_after_s, retry=retry)
    assert retry_headers(error) == headers


class Holder:
    """Keeps a client's only slot until it is let go."""

    def __init__(self, client: Client) -> None:
        self._go = threading.Event()
        self._told = threading.Event()
        self._thread = threading.Thread(target=self._hold, args=(client,))
        self._thread.start()
        assert self._told.wait(60)

    def _hold(self, client: Client) -> None:
        body = {"model": "tiny", "stream": True, **ASKED["/v1/chat/completions"], "fake": {"stall_after_tokens": 1}}
        with client.http as http, http.stream("POST", "/v1/chat/completions", json=body) as reply:
            chunks = reply.iter_raw()  # held: without it the connection would be closed
            next(chunks)
            self._told.set()
            assert self._go.wait(60)

    def release(self) -> None:
        self._go.set()
        self._thread.join()


@pytest.fixture
def holder(narrow: Client) -> Iterator[Holder]:
    found = Holder(narrow)
    yield found
    found.release()


def on_comment(holder: Holder) -> Callable[[bytes], None]:
    """Lets go at the first comment."""

    def told(got: bytes) -> None:
        if got.startswith(b":"):
            holder.release()

    return told


def test_a_waiting_stream_hears_comments_and_then_its_whole_answer(narrow: Client, holder: Holder) -> None:
    got, clean = stream(narrow, "/v1/chat/completions", on_comment(holder))
    assert clean
    assert got.startswith(b":\n\n")
    payloads = Parser().feed(got)
    assert payloads[-1] == b"[DONE]"
    assert len(payloads) == 7  # the role, four tokens, the end


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_refusal_after_a_comment_is_an_event_and_a_cut(narrow: Client, holder: Holder, path: str) -> None:
    got, clean = stream(narrow, path, on_comment(holder), fake={"error_status": 500, "error_body": IMAGE})
    assert not clean
    assert got.startswith(b":\n\n")
    name, payload = last_event(got)
    assert name == ("" if path == "/v1/chat/completions" else "error")
    check_error(path, payload, "engine", IMAGE["message"], event=True)
    row = narrow.box.closed_records(len(narrow.box.records()))[-1]
    assert row["status"] == "error"


def test_an_unstreamed_answer_that_waits_hears_nothing(narrow: Client, holder: Holder) -> None:
    """Its status is still open."""
    found: list[httpx2.Response] = []
    thread = threading.Thread(
        target=lambda: found.append(ask(narrow, "/v1/messages", fake={"error_status": 500, "error_body": IMAGE}))
    )
    thread.start()
    until(lambda: json.loads(narrow.box.llmctl("status", "--json").stdout)["presets"][0]["slots"]["busy"] == 1)
    holder.release()
    thread.join()
    assert found[0].status_code == 400


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("body", [b"{", b"[]", b'{"model": 7}', b'{"stream": "yes"}', b'{"x": NaN}'])
def test_a_body_that_is_none_is_refused_before_the_engine(served: Client, path: str, body: bytes) -> None:
    before = len(fakes.events(served.box.engine.parent, "request"))
    with served.http as http:
        reply = http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    check_error(path, reply.json(), "llmctl", "the request's body can't be used")
    assert len(fakes.events(served.box.engine.parent, "request")) == before
