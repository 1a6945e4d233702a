"""The front door against an engine that misbehaves, and clients that do: every way a request can end, one record each."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx2
import psutil
import pytest

from supervisor import accounts
from supervisor.units import MIB
from tests import fakes
from tests.conftest import WAIT_S, Box, Client, until

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"

Boxes = Callable[..., Box]


def ask(client: Client, path: str = CHAT, **fields: Any) -> httpx2.Response:
    with client.http as http:
        return http.post(path, json={"model": "tiny", "messages": HELLO} | fields)


def stream(client: Client, **fields: Any) -> tuple[bytes, bool]:
    """A stream's bytes, and whether it came to a clean end."""
    got = b""
    try:
        with (
            client.http as http,
            http.stream("POST", CHAT, json={"model": "tiny", "messages": HELLO, "stream": True} | fields) as reply,
        ):
            for chunk in reply.iter_raw():
                got += chunk
    except httpx2.RemoteProtocolError:
        return got, False
    return got, True


def raw(client: Client, text: bytes) -> socket.socket:
    """A connection of a client that does as it likes."""
    host, _, port = client.address.removeprefix("http://").rpartition(":")
    door = socket.create_connection((host, int(port)), timeout=WAIT_S)
    door.sendall(text)
    return door


def post(body: bytes, path: str = CHAT, *headers: str) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


# What is refused before an engine hears of it


@pytest.fixture(scope="module")
def healthy(module_fake_box: Boxes) -> Client:
    return module_fake_box(tokens=4).up("--set", "slots=2")


@pytest.mark.parametrize(
    ("body", "status", "code", "word"),
    [
        (b"{", 400, "invalid_request_error", "EOF"),
        (b"[1]", 400, "invalid_request_error", "object"),
        (b'{"messages": []}', 400, "missing_model", "names no model"),
        (b'{"model": "gpt-4"}', 404, "model_not_found", "tiny"),
        (b'{"model": 5}', 400, "invalid_request_error", "model"),
    ],
)
def test_a_faulty_body_is_the_clients_fault(healthy: Client, body: bytes, status: int, code: str, word: str) -> None:
    with healthy.http as http:
        reply = http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["source"]) == (status, code, "llmctl")
    assert word in error["message"]
    assert error["try"]


def test_a_refused_request_has_its_record_too(healthy: Client) -> None:
    def refused() -> int:
        rows = accounts.records(healthy.box.home.ledger, 1000)
        return sum(row["status"] == "refused" and row["route"] == "/v1/completions" for row in rows)

    assert refused() == 0
    assert ask(healthy, "/v1/completions", model="gpt-4").status_code == 404
    until(lambda: refused() == 1)


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        ({"Content-Type": "application/json", "Origin": "https://evil.example"}, 403, "origin_not_allowed"),
        ({"Content-Type": "application/json", "Host": "evil.example"}, 403, "host_not_allowed"),
    ],
)
def test_a_web_page_may_not_spend_the_card(healthy: Client, headers: dict[str, str], status: int, code: str) -> None:
    with healthy.http as http:
        reply = http.post(CHAT, content=json.dumps({"model": "tiny", "messages": HELLO}), headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)


def test_an_unknown_path_and_a_wrong_method_speak_the_same_envelope(healthy: Client) -> None:
    with healthy.http as http:
        missing, wrong = http.get("/v1/nothing"), http.get(CHAT)
    assert (missing.status_code, missing.json()["error"]["source"]) == (404, "llmctl")
    assert (wrong.status_code, wrong.json()["error"]["source"]) == (405, "llmctl")
    assert wrong.headers["allow"] == "POST"


def test_a_body_over_the_limit_is_refused_unread(healthy: Client) -> None:
    with raw(healthy, post(b"")[:-4].replace(b"Content-Length: 0", b"Content-Length: 99999999") + b"\r\n\r\n") as door:
        assert door.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_the_status_route_needs_the_token_of_this_start(healthy: Client) -> None:
    with healthy.http as http:
        assert http.get("/llmctl/status").status_code == 401
        token = json.loads((healthy.box.home.run / "instance.json").read_text())["token"]
        assert http.get("/llmctl/status", headers={"Authorization": f"Bearer {token}"}).json()["presets"][0]["name"] == "tiny"


def test_a_second_request_on_the_wire_before_the_first_is_answered_closes_the_connection(module_fake_box: Boxes) -> None:
    client = module_fake_box(tokens=500, pace_s=0.02).up()
    body = json.dumps({"model": "tiny", "messages": HELLO, "stream": True}).encode()
    with raw(client, post(body)) as door:
        assert door.recv(100)
        door.sendall(post(body))
        while door.recv(65536):
            pass
    assert client.box.closed_records(1)[0]["status"] == "cancelled"


# What a client may not choose, and what passes


def test_slot_and_lora_of_a_request_are_overruled_and_unknown_fields_pass(healthy: Client) -> None:
    ask(healthy, id_slot=7, lora=[{"id": 0, "scale": 9}], my_field=[1, {"a": None}])
    sent = json.loads(fakes.events(healthy.box.engine.parent, "request", path=CHAT)[-1]["body"])
    assert sent["id_slot"] == -1
    assert sent["lora"] == []
    assert sent["my_field"] == [1, {"a": None}]
    assert sent["stream"] is True  # the engine is always asked to stream


def test_a_streams_body_goes_upstream_byte_for_byte(healthy: Client) -> None:
    body = b'{ "model":"tiny",\t"stream" : true, "messages":[{"role":"user","content":"\\u00e9\xc3\xa9"}], "seed": 1.50 }'
    with healthy.http as http:
        http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert fakes.events(healthy.box.engine.parent, "request", path=CHAT)[-1]["body"].encode() == body


@pytest.mark.parametrize("streamed", [True, False])
def test_a_body_larger_than_any_socket_buffer_arrives_whole(healthy: Client, streamed: bool) -> None:
    """The engine parses it: a byte lost or twice would be its 500."""
    reply = ask(healthy, messages=[{"role": "user", "content": "x" * (12 * MIB)}], stream=streamed)
    assert reply.status_code == 200
    headers = dict(fakes.events(healthy.box.engine.parent, "request", path=CHAT)[-1]["headers"])
    assert int(headers["content-length"]) > 12 * MIB


def test_no_client_header_reaches_the_engine(healthy: Client) -> None:
    with healthy.http as http:
        headers = {"Authorization": "Bearer secret", "X-Conversation-Id": "c1", "Cookie": "a=b"}
        http.post(CHAT, json={"model": "tiny", "messages": HELLO}, headers=headers)
    seen = {name.lower() for name in dict(fakes.events(healthy.box.engine.parent, "request", path=CHAT)[-1]["headers"])}
    assert seen == {"host", "content-type", "content-length"}


# How a request can end


def test_a_child_that_dies_mid_stream_is_told_and_never_a_clean_end(fake_box: Boxes) -> None:
    client = fake_box(healthy_requests=1, tokens=50, die_after_tokens=5).up()
    got, clean = stream(client)
    assert not clean
    last = got.split(b"\n\n")[-2]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_died"
    row = client.box.closed_records(1)[0]
    assert row["status"] == "truncated"
    assert row["completion_tokens"] >= 5


def test_a_request_of_which_each_child_dies_is_an_error_after_the_second(fake_box: Boxes) -> None:
    client = fake_box(healthy_requests=1, tokens=50, die_after_tokens=5).up()
    reply = ask(client)
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "engine_crashed"
    row = client.box.closed_records(1)[0]
    assert (row["status"], row["attempts"]) == ("error", 2)


def test_a_child_that_died_is_started_again_and_serves(fake_box: Boxes) -> None:
    box = fake_box(healthy_requests=1, die_after_tokens=1)
    client = box.up()
    stream(client)
    fakes.tune(box.engine.parent, tokens=3)
    reply = ask(client)  # waits for the restart
    assert reply.status_code == 200
    assert len(fakes.events(box.engine.parent, "start")) == 2
    status = json.loads(box.llmctl("status", "--json").stdout)["presets"][0]
    assert (status["state"], status["restarts"]) == ("ready", 1)
    assert "CUDA error" in status["cause"]  # of the last end, also once it is back


def test_an_engines_error_event_ends_the_stream_without_a_clean_end(fake_box: Boxes) -> None:
    client = fake_box(healthy_requests=1, error_after_tokens=3).up()
    got, clean = stream(client)
    assert b'"error"' in got
    assert not clean
    assert client.box.closed_records(1)[0]["status"] == "error"


def test_an_engines_error_event_is_an_unstreamed_clients_status(fake_box: Boxes) -> None:
    client = fake_box(healthy_requests=1, error_after_tokens=3).up()
    reply = ask(client)
    assert reply.status_code == 500
    assert reply.json()["error"]["source"] == "engine"


def test_garbage_from_the_child_is_an_error_and_not_a_hang(fake_box: Boxes) -> None:
    client = fake_box(healthy_requests=1, malformed=True).up()
    assert ask(client).status_code == 502
    assert ask(client, stream=True).status_code == 502


def test_a_client_that_leaves_while_the_engine_is_silent_is_noticed(fake_box: Boxes) -> None:
    client = fake_box(healthy_requests=1, prefill_s=600).up()
    with raw(client, post(json.dumps({"model": "tiny", "messages": HELLO, "stream": True}).encode())):
        fakes.wait_event(client.box.engine.parent, "request", path=CHAT)
        left_at = time.monotonic()
    closed = fakes.wait_event(client.box.engine.parent, "client_closed")
    assert closed["t"] >= left_at
    assert client.box.closed_records(1)[0]["status"] == "cancelled"


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("kib", [1, 70, 90, 200, 1000])
def test_one_that_leaves_is_noticed_whatever_its_request_weighed(silent: Client, kib: int, streamed: bool) -> None:
    """Uvicorn stops reading at 64 KiB of a body; whoever doesn't start it again never sees the client go."""
    folder = silent.box.engine.parent
    before = len(fakes.events(folder, "client_closed"))
    with raw(silent, post(json.dumps({"model": "tiny", "messages": [], "x": "y" * (kib << 10), "stream": streamed}).encode())):
        until(lambda: len(fakes.events(folder, "request", path=CHAT)) > before)
    fakes.wait_event(folder, "client_closed", count=before + 1)
    assert silent.box.closed_records(before + 1)[-1]["status"] == "cancelled"


@pytest.fixture(scope="module")
def silent(module_fake_box: Boxes) -> Client:
    return module_fake_box(healthy_requests=1, prefill_s=600).up()


def test_a_client_that_offers_http2_is_answered_in_http1(healthy: Client) -> None:
    """Java's HttpClient does so with every request; the parser then stops before the body."""
    body = json.dumps({"model": "tiny", "messages": HELLO}).encode()
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")
    whole = post(body, CHAT, *offer)
    for cut in (len(whole), len(whole) - 1, len(whole) - len(body), 30):
        with raw(healthy, whole[:cut]) as door:
            time.sleep(0.1)  # so that the pieces come apart
            door.sendall(whole[cut:])
            got = b""
            while piece := door.recv(65536):
                got += piece
        assert got.startswith(b"HTTP/1.1 200 ")
        assert b"chat.completion" in got


@pytest.mark.parametrize(
    "fields", [{"stream": True}, {"stream": False}, {"logprobs": True}], ids=["streamed", "assembled", "passed"]
)
def test_a_client_that_leaves_mid_answer_closes_the_upstream(fake_box: Boxes, fields: dict[str, Any]) -> None:
    client = fake_box(healthy_requests=1, tokens=100_000, pace_s=0.01).up()
    with raw(client, post(json.dumps({"model": "tiny", "messages": HELLO} | fields).encode())):
        fakes.wait_event(client.box.engine.parent, "request" if "logprobs" in fields else "first_byte", count=1)
        until(lambda: "logprobs" in fields or "processing task" in (client.box.home.logs / "tiny.log").read_text())
    fakes.wait_event(client.box.engine.parent, "client_closed")
    assert client.box.closed_records(1)[0]["status"] == "cancelled"


def test_a_client_that_leaves_the_queue_is_never_sent_upstream(fake_box: Boxes) -> None:
    client = fake_box(tokens=100000, pace_s=0.01).up("--set", "slots=1")
    folder = client.box.engine.parent
    body = post(json.dumps({"model": "tiny", "messages": HELLO, "stream": True}).encode())
    with raw(client, body) as first:
        assert first.recv(100)
        with raw(client, body):
            until(lambda: json.loads(client.box.llmctl("status", "--json").stdout)["presets"][0]["waiting"] == 1)
        until(lambda: json.loads(client.box.llmctl("status", "--json").stdout)["presets"][0]["waiting"] == 0)
    rows = client.box.closed_records(2)
    assert [row["status"] for row in rows] == ["cancelled", "cancelled"]
    assert sorted(row["attempts"] for row in rows) == [0, 1]
    assert len(fakes.events(folder, "request", path=CHAT)) == 1


# Places


def test_never_more_upstream_than_slots_and_all_are_served(fake_box: Boxes) -> None:
    box = fake_box(tokens=5, pace_s=0.01)
    client = box.up("--set", "slots=2")
    replies: list[int] = []
    threads = [threading.Thread(target=lambda: replies.append(ask(client).status_code)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert replies == [200] * 12
    inside = most = 0
    for event in fakes.events(box.engine.parent):
        if event["event"] == "request" and event["path"] == CHAT:
            inside += 1
        elif event["event"] in ("finished", "client_closed") and event.get("path", CHAT) == CHAT:
            inside = max(0, inside - 1)
        most = max(most, inside)
    assert most <= 2
    assert len(box.closed_records(12)) == 12


def test_a_request_that_comes_while_the_model_loads_waits_for_it(fake_box: Boxes) -> None:
    box = fake_box(load_s=1.0, tokens=3)
    box.start("--port", "0")
    instance = until(lambda: _instance(box))
    with httpx2.Client(base_url=instance["address"], timeout=WAIT_S) as http:
        assert http.get("/health").status_code == 503
        assert http.post(CHAT, json={"model": "tiny", "messages": HELLO}).status_code == 200


def _instance(box: Box) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((box.home.run / "instance.json").read_text())
    except (OSError, ValueError):
        return None
    return found if found["address"] else None


# Back-pressure


def test_a_client_that_reads_nothing_holds_the_child_back_and_costs_no_memory(fake_box: Boxes) -> None:
    """The upstream pushes 100 MiB; what is in between may hold socket buffers, not the stream."""
    client = fake_box(healthy_requests=1, push_bytes=100 * MIB).up()
    llmctl = psutil.Process(client.process.pid)
    before = llmctl.memory_info().rss
    body = post(json.dumps({"model": "tiny", "messages": HELLO, "stream": True}).encode())
    with raw(client, body) as door:
        assert door.recv(1)
        settled = _settled(llmctl)
        assert settled - before < 8 * MIB
        got = 0
        while piece := door.recv(1 << 20):
            got += len(piece)
            if piece.endswith(b"0\r\n\r\n"):
                break
    assert got > 100 * MIB
    assert llmctl.memory_info().rss - before < 16 * MIB


def _settled(process: psutil.Process) -> int:
    """The memory of a process once it stops using the CPU."""
    last = -1.0
    for _ in range(200):
        now = sum(process.cpu_times()[:2])
        if now == last:
            break
        last = now
        time.sleep(0.1)
    return int(process.memory_info().rss)


@pytest.mark.parametrize(
    ("kind", "pooling", "route", "body"),
    [
        ("embedding", "mean", "/v1/embeddings", {"input": ["one", "two", "three"]}),
        ("rerank", "model", "/v1/rerank", {"query": "one", "documents": ["two", "three", "four"]}),
    ],
)
def test_a_preset_of_another_kind_serves_its_own_route(
    real_box: Box, kind: str, pooling: str, route: str, body: dict[str, Any]
) -> None:
    """It is started and warmed up by a request of its kind, in the real engine; a chat gets a 400 that names its route."""
    small = ("threads=1", "context=1024", "slots=2", f"pooling={pooling}", f"kind={kind}")
    client = real_box.up(*(word for each in small for word in ("--set", each)))
    with client.http as http:
        reply = http.post(route, json={"model": "tiny", **body})
        chat = http.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO})
    memory = json.loads(real_box.llmctl("status", "--json").stdout)["presets"][0]["memory"]
    assert client.stop() == 0
    planned, allocated = memory["planned_mib"]["device"], memory["allocated_mib"]["device"]
    assert allocated["compute"] > 90  # an output of every token: a chat's buffer has 18 MiB
    assert allocated["compute"] <= planned["compute"] <= 1.06 * allocated["compute"]
    found = reply.json()
    assert len(found["data" if kind == "embedding" else "results"]) == 3
    error = chat.json()["error"]
    assert (chat.status_code, error["code"], error["try"]) == (400, "wrong_kind", route)
    assert error["message"] == f"tiny is a preset for {kind}, and /v1/chat/completions wants one for chat"
    record, refused = real_box.records()[-2:]
    assert (record["route"], record["status"], record["prompt_tokens"]) == (route, "ok", found["usage"]["prompt_tokens"])
    assert (refused["route"], refused["status"], refused["preset"]) == ("/v1/chat/completions", "refused", "")


def test_a_chat_preset_says_so_to_an_embedding_request(healthy: Client) -> None:
    with healthy.http as http:
        reply = http.post("/v1/embeddings", json={"model": "tiny", "input": "Hello"})
    assert reply.json()["error"]["message"] == "tiny is a preset for chat, and /v1/embeddings wants one for embedding"
    assert reply.json()["error"]["try"] == "/v1/chat/completions"


def test_an_embedding_preset_of_a_chat_model_is_told_to_name_its_pooling(real_box: Box) -> None:
    done = real_box.llmctl("up", "tiny", "--port", "0", "--detach", "--model", str(real_box.model), "--set", "kind=embedding")
    assert done.returncode == 8
    *_, error, hint = done.stderr.splitlines()
    assert "tiny refused its warm-up: Pooling type 'none' is not OAI compatible" in error
    assert hint == "try: --set pooling=mean"
