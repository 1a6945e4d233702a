"""The fake llama-server is what it claims to be; everything tested over it stands on this."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor import meter
from supervisor.assemble import request_body
from supervisor.meter import Meter
from supervisor.reply import ASSEMBLERS
from supervisor.routes import ROUTES
from supervisor.sse import Parser
from tests import fakes
from tests.fakes import gguf

CHAT = {"messages": [{"role": "user", "content": "Say something nice"}], "stream": True}


class Client(http.client.HTTPConnection):
    """HTTP over the engine's Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("engine", timeout=10)
        self.path = str(path)
        self.replies: list[http.client.HTTPResponse] = []

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(10)
        self.sock.connect(self.path)

    def ask(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> http.client.HTTPResponse:
        self.request("POST", path, json.dumps(body))
        return self.getresponse()

    def getresponse(self) -> http.client.HTTPResponse:
        self.replies.append(super().getresponse())
        return self.replies[-1]

    def leave(self) -> None:
        """Close the socket, which a reply without a length has taken over."""
        self.close()
        for reply in self.replies:
            reply.close()


class Running:
    """A started fake, its files and its clients."""

    def __init__(self, folder: Path, *flags: str, **knobs: Any) -> None:
        self.folder, self.sock = folder, folder / "x.sock"
        self.clients: list[Client] = []
        wrapper = fakes.install(folder, **knobs)
        argv = [str(wrapper), "-m", "model.gguf", "--host", str(self.sock), "-np", "2", "-c", "4096", "--alias", "tiny", *flags]
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(argv, stderr=log)

    def client(self) -> Client:
        self.clients.append(Client(self.sock))
        return self.clients[-1]

    def wait(self, kind: str, **match: Any) -> dict[str, Any]:
        return fakes.wait_event(self.folder, kind, **match)

    def get(self, path: str) -> tuple[int, Any]:
        client = self.client()
        client.request("GET", path)
        reply = client.getresponse()
        return reply.status, json.loads(reply.read())


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Running] = []

    def begin(*flags: str, until: str = "loaded", **knobs: Any) -> Running:
        running.append(Running(tmp_path / "engine", *flags, **knobs))
        if until:
            running[-1].wait(until)
        return running[-1]

    yield begin
    for one in running:
        one.process.kill()
        one.process.wait()
        for client in one.clients:
            client.leave()


def events(text: bytes) -> list[Any]:
    lines = [line[6:] for line in text.decode().split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def said(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices if choice["index"] == index)


def test_loads_before_it_answers(start: Start) -> None:
    engine = start(until="bound", load_s=0.15)
    assert engine.get("/health") == (503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}})
    engine.wait("loaded")
    assert engine.get("/health") == (200, {"status": "ok"})
    assert engine.get("/v1/models")[1]["data"][0]["id"] == "tiny"
    assert engine.get("/nowhere")[0] == 404
    assert f"listening on unix://{engine.sock}" in engine.log.read_text()
    assert engine.wait("start")["argv"][:2] == ["-m", "model.gguf"]


def test_streams_a_chat_in_the_engines_shapes(start: Start) -> None:
    engine = start(text="one two three", tokens=3)
    chunks = events(engine.client().ask({**CHAT, "stream_options": {"include_usage": True}}).read())
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert said(chunks) == "one two three"
    assert chunks[-3]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-2]["usage"]["completion_tokens"] == chunks[-2]["timings"]["predicted_n"] == 3
    assert chunks[-1] == "[DONE]"


def test_counts_choices_and_limits(start: Start) -> None:
    engine = start(text="one two three", tokens=3)
    chunks = events(engine.client().ask({**CHAT, "n": 2, "max_tokens": 2}).read())
    assert (said(chunks, 0), said(chunks, 1)) == ("one two", "one two")
    assert [c["choices"][0]["finish_reason"] for c in chunks if c != "[DONE]"][-2:] == ["length", "length"]
    refused = engine.client().ask({**CHAT, "n": 3})
    assert (refused.status, json.load(refused)["error"]["type"]) == (400, "invalid_request_error")


def test_other_routes(start: Start) -> None:
    engine = start(tokens=2)
    whole = json.load(engine.client().ask({**CHAT, "stream": False}))
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "t0 t1"}
    text = events(engine.client().ask({"prompt": "a b", "stream": True}, "/v1/completions").read())
    assert [c["choices"][0]["text"] for c in text[:-1]] == ["t0", " t1", ""]
    assert text[-2]["usage"]["prompt_tokens"] == 2
    native = events(engine.client().ask({"prompt": "a b", "stream": True}, "/completion").read())
    assert [event["content"] for event in native] == ["t0", " t1", ""]
    assert native[-1]["stop"] is True


ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a b"}], "n": 2},
    "/v1/completions": {"prompt": ["a b", "c"]},
    "/v1/responses": {"input": "a b"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a b"}], "n": 7},
    "/completion": {"prompt": ["a b", "c"]},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
}


@pytest.mark.parametrize("path", ASKED)
def test_every_route_streams_what_it_says_whole(start: Start, path: str) -> None:
    """As the real engine's do: tests/contract/test_assembly.py."""
    engine, route = start(tokens=3), ROUTES[path]
    streamed = engine.client().ask(json.loads(request_body(route.api, json.dumps(ASKED[path]).encode())), path).read()
    whole = engine.client().ask(ASKED[path], path).read()
    assembler = ASSEMBLERS[route.api]()
    for payload in Parser().feed(streamed):
        assembler.feed(payload)
    assert _lasting(assembler.result()) == _lasting(json.loads(whole))
    metered = Meter(route.api)
    metered.feed(streamed, 1.0)
    figures = metered.read()
    assert figures.completion_tokens == (6 if path in ("/v1/chat/completions", "/v1/completions", "/completion") else 3)
    assert not figures.counted
    if path not in ("/v1/chat/completions", "/v1/completions"):  # whose body tells the first choice's alone
        assert meter.whole(whole).completion_tokens == figures.completion_tokens


def _lasting(reply: object) -> Any:
    """As pairs, since the order of keys counts; without what differs from one answer to the next."""
    varying = {"id", "created", "created_at", "completed_at", "timings", "id_slot"}
    return json.loads(
        json.dumps(reply), object_pairs_hook=lambda pairs: [(key, None if key in varying else value) for key, value in pairs]
    )


@pytest.mark.parametrize("path", ASKED)
def test_every_route_ends_in_an_error_as_its_api_does(start: Start, path: str) -> None:
    engine, route = start(error_after_tokens=1), ROUTES[path]
    stream = engine.client().ask({**ASKED[path], "stream": True}, path).read()
    found, metered = ASSEMBLERS[route.api](), Meter(route.api)
    for payload in Parser().feed(stream):
        found.feed(payload)
    metered.feed(stream, 1.0)
    assert found.error == {"code": 500, "message": "Compute error.", "type": "server_error"}
    assert metered.failed


@pytest.mark.parametrize("path", ASKED)
def test_every_route_keeps_to_its_limit(start: Start, path: str) -> None:
    engine = start(tokens=3)
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    whole = engine.client().ask({**ASKED[path], limit: 2}, path).read()
    assert meter.whole(whole).completion_tokens == (4 if path == "/completion" else 2)


def test_counts_and_other_answers(start: Start) -> None:
    engine = start("--embeddings", "--reranking")

    def answer(path: str, **body: Any) -> Any:
        return json.load(engine.client().ask(body, path))

    turns = [{"role": "user", "content": "a b c"}]
    assert answer("/v1/chat/completions/input_tokens", messages=turns) == {"input_tokens": 3, "object": "response.input_tokens"}
    assert answer("/v1/responses/input_tokens", input="a b") == {"input_tokens": 2, "object": "response.input_tokens"}
    assert answer("/v1/messages/count_tokens", messages=turns) == {"input_tokens": 3}
    assert answer("/tokenize", content="a b") == {"tokens": [0, 1]}
    assert answer("/detokenize", tokens=[0, 1]) == {"content": "t0 t1"}
    assert "a b c" in answer("/apply-template", messages=turns)["prompt"]
    assert [row["index"] for row in answer("/v1/embeddings", input=["a", "b"])["data"]] == [0, 1]
    ranked = answer("/v1/rerank", query="a", documents=["a", "b", "c"], top_n=2)
    assert ([row["index"] for row in ranked["results"]], ranked["usage"]["prompt_tokens"]) == ([0, 1], 3)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"{", 500),
        ("/v1/chat/completions", b"{}", 400),
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}', 500),
        ("/v1/messages/count_tokens", b"{}", 500),
        ("/v1/messages", b'{"messages":[{"role":"user","content":[{"type":"image"}]}]}', 500),
        ("/v1/responses", b"{}", 400),
        ("/v1/completions", b"{}", 400),
        ("/infill", b"{}", 500),
        ("/v1/embeddings", b'{"input":"a"}', 501),
        ("/v1/rerank", b'{"query":"a","documents":["b"]}', 501),
    ],
)
def test_refuses_with_the_engines_status(start: Start, path: str, body: bytes, status: int) -> None:
    """Also where that blames itself for the request: tests/contract/test_faults.py has the real engine's."""
    client = start().client()
    client.request("POST", path, body)
    reply = client.getresponse()
    assert reply.status == status
    assert json.load(reply)["error"]["code"] == status


def test_body_overrides_knobs_for_one_request(start: Start) -> None:
    engine = start(tokens=2)
    assert said(events(engine.client().ask({**CHAT, "fake": {"text": "hey", "tokens": 1}}).read())) == "hey"
    assert said(events(engine.client().ask(CHAT).read())) == "t0 t1"


def test_scripted_deltas_and_padding(start: Start) -> None:
    engine = start(deltas=[{"reasoning_content": "hm"}, {"content": "yes"}])
    assert [c["choices"][0]["delta"] for c in events(engine.client().ask(CHAT).read())[1:3]] == [
        {"reasoning_content": "hm"},
        {"content": "yes"},
    ]
    padded = engine.client().ask(
        {"prompt": "x", "stream": True, "fake": {"deltas": [], "chunk_bytes": 500, "tokens": 2}}, "/v1/completions"
    )
    assert len(padded.read().split(b"\n\n")[0]) + 2 == 500


def test_defers_what_has_no_slot(start: Start) -> None:
    engine = start("-np", "1", tokens=1000, pace_s=0.02)
    first, second = engine.client(), engine.client()
    first.ask(CHAT)
    second.request("POST", "/v1/chat/completions", json.dumps({**CHAT, "max_tokens": 1}))
    engine.wait("request", id=1)
    assert engine.get("/slots")[1][0]["id_task"] == 0
    assert second.sock is not None
    second.sock.settimeout(0.05)
    with pytest.raises(TimeoutError):
        second.sock.recv(1)
    first.leave()
    second.sock.settimeout(10)
    assert said(events(second.getresponse().read())) == "t0"


def test_notices_that_the_client_left(start: Start) -> None:
    engine = start(tokens=1000, pace_s=0.01)
    client = engine.client()
    reply = client.ask(CHAT)
    reply.readline()
    client.leave()
    engine.wait("client_closed", id=0)
    assert "slot      release: id  0 | task 0 | stop processing" in engine.log.read_text()
    assert engine.get("/slots")[1][0]["is_processing"] is False


def test_waits_for_a_reader(start: Start) -> None:
    engine = start(push_bytes=20_000_000)
    client = engine.client()
    reply = client.ask(CHAT)
    engine.wait("first_byte")
    time.sleep(0.1)  # nothing to wait for: it must not finish
    assert not fakes.events(engine.folder, "finished")
    assert len(reply.read()) >= 20_000_000
    engine.wait("finished", how="done")


@pytest.mark.parametrize(
    ("knob", "code"), [({"die_exit": -6}, -6), ({"die_exit": -9}, -9), ({"die_exit": 3, "die_log": "gone"}, 3)]
)
def test_dies_after_so_many_tokens(start: Start, knob: dict[str, Any], code: int) -> None:
    engine = start(die_after_tokens=2, **knob)
    with pytest.raises(http.client.IncompleteRead) as cut:
        engine.client().ask(CHAT).read()
    assert said(events(cut.value.partial)) == "t0 t1"
    assert engine.process.wait(10) == code
    assert knob.get("die_log", "CUDA error") in engine.log.read_text()


def test_fails_within_a_stream_but_not_in_the_warm_up(start: Start) -> None:
    engine = start(error_after_tokens=1, healthy_requests=1)
    assert events(engine.client().ask({**CHAT, "max_tokens": 1}).read())[-1] == "[DONE]"
    assert events(engine.client().ask(CHAT).read())[-1] == {
        "error": {"code": 500, "message": "Compute error.", "type": "server_error"}
    }
    with pytest.raises(http.client.IncompleteRead):
        engine.client().ask({**CHAT, "fake": {"error_after_tokens": None, "cut_after_tokens": 1}}).read()
    refused = engine.client().ask({**CHAT, "fake": {"error_status": 503}})
    assert refused.status == 503
    with pytest.raises(http.client.BadStatusLine):
        engine.client().ask({**CHAT, "fake": {"malformed": True}})


@pytest.mark.parametrize("knob", [{"stall_after_tokens": 1}, {"headers_only": True}])
def test_stalls(start: Start, knob: dict[str, Any]) -> None:
    engine = start(**knob)
    client = engine.client()
    reply = client.ask(CHAT)
    if "stall_after_tokens" in knob:
        assert reply.readline().startswith(b"data: ")
    assert reply.status == 200
    assert engine.get("/slots")[1][0]["is_processing"] is True
    assert not fakes.events(engine.folder, "finished")


def slot(engine: Running) -> dict[str, Any]:
    row: dict[str, Any] = engine.get("/slots")[1][0]
    return row


def test_counts_a_long_prompt_in_batches(start: Start) -> None:
    engine = start(prefill_s=1.0, prefill_steps=50)
    engine.client().request("POST", "/v1/completions", json.dumps({"prompt": "word " * 100, "stream": True, "max_tokens": 1}))
    engine.wait("request", path="/v1/completions")
    seen = [0]
    while (row := slot(engine))["is_processing"]:
        seen.append(row["n_prompt_tokens_processed"])
    assert seen == sorted(seen)
    assert len(set(seen)) > 3
    assert {count % 2 for count in seen} == {0}  # whole batches


def test_slots_that_never_answer(start: Start) -> None:
    engine = start(slots_never_answer=True, tokens=2)
    client = engine.client()
    client.request("GET", "/slots")
    assert said(events(engine.client().ask(CHAT).read())) == "t0 t1"
    assert client.sock is not None
    client.sock.settimeout(0.05)
    with pytest.raises(TimeoutError):
        client.sock.recv(1)
    assert engine.get("/health")[0] == 200


def test_floods_its_log(start: Start) -> None:
    engine = start(flood_bytes_s=1_000_000)
    first = engine.log.stat().st_size
    until = time.monotonic() + 10
    while (more := engine.log.stat().st_size - first) < 100_000 and time.monotonic() < until:
        time.sleep(0.01)
    assert more >= 100_000
    assert engine.get("/health")[0] == 200


def used(engine: Running, field: str) -> int:
    """Of /proc/PID/status, in kB."""
    pid = engine.wait("start")["pid"]
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def test_grows_with_each_reply_but_the_warm_up(start: Start) -> None:
    engine = start(grow_mib=16, healthy_requests=1, tokens=1)
    engine.client().ask(CHAT).read()
    before = used(engine, "RssAnon:")
    for _ in range(2):
        engine.client().ask(CHAT).read()
    assert used(engine, "RssAnon:") - before >= 32 * 1024


def test_burns_a_core_while_it_says_nothing(start: Start) -> None:
    engine = start(headers_only=True, spin=True)
    stat = Path(f"/proc/{engine.wait('start')['pid']}/stat")

    def ticks() -> int:
        return sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13]))

    client = engine.client()
    client.ask(CHAT)
    begun, until = ticks(), time.monotonic() + 20
    while ticks() - begun < 10 and time.monotonic() < until:
        time.sleep(0.01)
    assert ticks() - begun >= 10
    assert slot(engine)["next_token"] == [{"n_decoded": 0}]
    client.leave()
    engine.wait("client_closed")


def test_dies_of_a_word(start: Start) -> None:
    engine = start(killer="abracadabra", tokens=1)
    assert said(events(engine.client().ask(CHAT).read())) == "t0"
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        engine.client().ask({"prompt": "say abracadabra now"}, "/v1/completions")
    assert engine.process.wait(10) == -signal.SIGABRT
    assert "illegal memory access" in engine.log.read_text()


def test_dies_at_its_first_reply(start: Start) -> None:
    engine = start(die_warming=True, die_exit=1, die_log="gone")
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        engine.client().ask(CHAT)
    assert engine.process.wait(10) == 1


def test_only_the_starts_named_fail(start: Start) -> None:
    knobs: dict[str, Any] = {"fail_only": [2, 3], "start_exit": 1, "tokens": 1}
    for number in (1, 2, 3, 4):
        engine = start(until="", **knobs)
        fakes.wait_event(engine.folder, "exit" if number in (2, 3) else "loaded", pid=engine.process.pid)
        engine.process.kill()
        engine.process.wait()
        engine.sock.unlink()


def test_never_healthy_at_one_start_only(start: Start) -> None:
    engine = start(never_healthy=True, fail_only=[2])
    assert engine.get("/health")[0] == 200
    engine.process.kill()
    engine.process.wait()
    engine.sock.unlink()
    second = start(until="", never_healthy=True, fail_only=[2])
    fakes.wait_event(second.folder, "bound", pid=second.process.pid)
    assert second.get("/health")[0] == 503


def test_wedges(start: Start) -> None:
    engine = start(tokens=1000, pace_s=0.01)
    first, second = engine.client(), engine.client()
    first.ask(CHAT).readline()
    engine.process.send_signal(signal.SIGUSR1)
    engine.wait("signal")
    asked = engine.client()
    asked.request("GET", "/slots")
    second.request("POST", "/v1/chat/completions", json.dumps(CHAT))
    assert engine.get("/health")[0] == 200
    engine.wait("request", path="/slots")
    for silent in (asked, second):
        assert silent.sock is not None
        silent.sock.settimeout(0.05)
        with pytest.raises(TimeoutError):
            silent.sock.recv(1)
    assert engine.process.poll() is None


def test_stops_like_the_engine(start: Start) -> None:
    engine = start(tokens=1000, pace_s=0.01)
    client = engine.client()
    client.ask(CHAT)
    engine.process.terminate()
    engine.wait("signal")
    assert engine.process.poll() is None  # a client is connected
    client.leave()
    assert engine.process.wait(10) == 0
    assert engine.sock.exists()


def test_second_stop_signal_ends_it(start: Start) -> None:
    engine = start(tokens=1000, pace_s=0.01)
    engine.client().ask(CHAT)
    engine.process.terminate()
    engine.wait("signal")
    engine.process.terminate()
    assert engine.process.wait(10) == 1
    assert "Received second interrupt" in engine.log.read_text()


def test_stop_signal_while_loading_and_idle(start: Start) -> None:
    loading = start(until="bound", never_healthy=True)
    loading.process.terminate()
    assert loading.process.wait(10) == -signal.SIGTERM
    loading.sock.unlink()
    idle = start(until="")
    fakes.wait_event(idle.folder, "loaded", pid=idle.process.pid)
    idle.process.terminate()
    assert idle.process.wait(10) == 0


def test_ignores_the_stop_signal(start: Start) -> None:
    engine = start(ignore_sigterm=True)
    engine.process.terminate()
    engine.process.terminate()
    assert engine.get("/health")[0] == 200
    assert engine.process.poll() is None


def test_holds_its_socket_while_leaving(start: Start) -> None:
    engine = start(slow_exit_s=0.15)
    engine.process.terminate()
    engine.wait("signal")
    assert engine.get("/health")[0] == 200
    assert engine.process.wait(10) == 0


def test_stale_socket(start: Start) -> None:
    engine = start()
    engine.process.kill()
    engine.process.wait()
    second = start(until="")
    assert second.process.wait(10) == 1
    assert f"couldn't bind HTTP server socket, hostname: {second.sock}" in second.log.read_text()
    assert "exiting due to HTTP server error" in second.log.read_text()


def test_fails_to_load(start: Start) -> None:
    engine = start(until="exit", oom_above_ctx=2048, fail_starts=1)
    assert engine.process.wait(10) == 1
    assert "cudaMalloc failed: out of memory" in engine.log.read_text()
    assert "exiting due to model loading error" in engine.log.read_text()
    engine.sock.unlink()
    again = start(until="", oom_above_ctx=2048, fail_starts=1)
    fakes.wait_event(again.folder, "loaded", pid=again.process.pid)
    assert again.get("/health")[0] == 200


def test_aborts_at_start(start: Start) -> None:
    engine = start(until="exit", start_exit=-6, start_log=fakes.CUDA_ABORT)
    assert engine.process.wait(10) == -signal.SIGABRT


def test_outlives_its_parent(start: Start) -> None:
    engine = start(outlive_parent=True)
    serving = engine.wait("start")["pid"]
    assert serving != engine.process.pid
    engine.process.kill()
    engine.process.wait()
    try:
        assert engine.get("/health")[0] == 200
    finally:
        os.kill(serving, signal.SIGKILL)


def test_flags(tmp_path: Path) -> None:
    wrapper = fakes.install(tmp_path, strict=True, hide_flags=["--spec-type"])

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(wrapper), *argv], capture_output=True, text=True, timeout=10)

    assert run("--version").stderr.startswith("version: 0.5.0 (build 11312, commit 0c1e57098)\n")
    assert "--ctx-size" in run("--help").stdout
    assert "--spec-type" not in run("--help").stdout.split()
    bogus = run("--bogus")
    assert (bogus.returncode, bogus.stderr) == (1, "error: invalid argument: --bogus\n")
    assert run("--spec-type", "draft-mtp").returncode == 1
    with pytest.raises(TypeError, match="no such knob: toekns"):
        fakes.install(tmp_path, toekns=3)


def test_minimal_gguf(tmp_path: Path) -> None:
    data = gguf.minimal(tmp_path / "m.gguf", llama__block_count=30).read_bytes()
    assert data[:8] == b"GGUF\x03\0\0\0"
    assert int.from_bytes(data[16:24], "little") == len(gguf.KEYS)


def test_tells_what_the_cache_had(start: Start) -> None:
    engine = start(cached=2)
    *_, last, _ = events(engine.client().ask(CHAT).read())
    assert (last["timings"]["cache_n"], last["timings"]["prompt_n"]) == (2, 1)
    message = json.loads(engine.client().ask({**CHAT, "stream": False, "fake": {"cached": 99}}, "/v1/messages").read())
    assert message["usage"] == {"cache_read_input_tokens": 2, "input_tokens": 1, "output_tokens": 16}  # one is always computed


def test_writes_down_what_it_made_for_whom(start: Start) -> None:
    engine = start("--spec-type", "ngram-mod", cached=1, drafts={"ngram-mod": [4, 3]})
    engine.client().ask({**CHAT, "user": "somebody", "n": 2, "fake": {"tokens": 8}}).read()
    made = {"prompt": 6, "cached": 2, "completion": 16, "draft_n": 16, "draft_n_accepted": 12}
    assert engine.wait("finished", user="somebody", how="done", route="chat")["made"] == made


def test_a_fault_takes_what_was_said_to_its_client_and_tells_of_each(start: Start) -> None:
    engine = start()
    silent = engine.client().ask({**CHAT, "user": "silent", "fake": {"stall_after_tokens": 5}})
    engine.client().ask({**CHAT, "user": "quick"}).read()
    engine.wait("stalled", user="silent")
    deferred = engine.client()
    deferred.request("POST", "/v1/chat/completions", json.dumps({**CHAT, "user": "deferred", "n": 2}))
    engine.wait("request", count=3)
    engine.process.send_signal(signal.SIGUSR2)
    assert engine.process.wait(10) == -signal.SIGABRT
    with pytest.raises(http.client.IncompleteRead) as broken:
        silent.read()
    assert broken.value.partial.count(b'"content":"') == 5
    assert {event["user"]: event["tokens"] for event in fakes.events(engine.folder, "lost")} == {"silent": 5, "deferred": 0}
