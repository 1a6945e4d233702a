#!/usr/bin/env python3
"""A llama-server that needs no model: the real one's command line, logs, HTTP and SSE, and it can be told to misbehave.

It is a process of its own, started through the wrapper that :func:`tests.fakes.install` writes, since what it stands for is a
process: it can die, hang, hold its socket, outlive its parent. What it copies was read off the pinned engine (b11312), and the same
contract tests run over both. It is also the paced upstream of ``bench/proof/proxy.py``, so a token costs one timer and one ``write``, and
nothing heavier than httptools is imported.

Misbehaviour is asked for by :class:`~tests.fakes.knobs.Knobs`: in the JSON file named by ``--fake-knobs`` (llmctl scrubs the
environment), or for one request in its body's field ``fake``, which a proxy passes on as the real engine would ignore it. SIGUSR1 has its
main loop hang, SIGUSR2 has it die as of a fault, after it said what it was doing.

The journal's events: ``start, bound, loaded, request, first_byte, stalled, client_closed, finished, lost, signal, exit``. Each completion
that was begun has exactly one of ``client_closed``, ``finished`` and ``lost`` (it was in work when the process ended by itself).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import httptools
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started as a script, isolated

from tests.fakes.completion import Reply, words_in
from tests.fakes.knobs import CUDA_OOM, Journal, Knobs, say
from tests.fakes.voices import FINGERPRINT, compact, timings

VERSION = "version: 0.5.0 (build 11312, commit 0c1e57098)\nbuilt with GNU 12.2.0 for Linux x86_64\n"
HELP = Path(__file__).resolve().parents[1] / "data" / "llama-server-help.txt"

LONG = {"-m": "--model", "-np": "--parallel", "-c": "--ctx-size", "-a": "--alias"}
VALUED = {"--model", "--host", "--port", "--parallel", "--ctx-size", "--alias", "--spec-type"}

IDLE_S = 5.0
"""How long the engine keeps an unstreamed connection that asks nothing."""

SPUN = bytes(1 << 20)
FLOOD_S = 0.02
FLOOD_LINE_BYTES = len("0.00.000.000 W srv          stop: cancel task, id_task = 0\n")

REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error", 501: "Not Implemented"}
ERROR_TYPES = {400: "invalid_request_error", 404: "not_found_error", 501: "not_supported_error", 503: "unavailable_error"}


@dataclass(frozen=True)
class Options:
    """What the fake reads of its command line; the last one of a kind wins, the rest it ignores."""

    hosts: list[str]
    port: int
    slots: int
    context: int
    model: str
    alias: str
    guesses: str
    """Its ``--spec-type``; empty for none."""
    flags: list[str]

    @property
    def slot_context(self) -> int:
        """A slot's share."""
        return self.context // self.slots

    @classmethod
    def read(cls, argv: list[str]) -> Options:
        """Parse; a flag without its value counts as empty."""
        values: dict[str, str] = {}
        words = iter(argv)
        for word in words:
            if (name := LONG.get(word, word)) in VALUED:
                values[name] = next(words, "")
        slots = int(values.get("--parallel", -1))
        model = values.get("--model", "")
        return cls(
            hosts=values.get("--host", "127.0.0.1").split(","),
            port=int(values.get("--port", 8080)),
            slots=slots if slots > 0 else 4,  # unset means four
            context=int(values.get("--ctx-size", 0)) or 4096,
            model=model,
            alias=values.get("--alias") or Path(model).name,
            guesses=values.get("--spec-type", ""),
            flags=flags_in(argv),
        )


def flags_in(argv: list[str]) -> list[str]:
    """The words that are flags and not negative numbers."""
    return [word for word in argv if word[:1] == "-" and not word[1:2].isdigit()]


class Connection(asyncio.Protocol):
    """One client: parses its requests one at a time, and knows when it has gone. A half-closed one has gone too."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.parser = httptools.HttpRequestParser(self)
        self.reply: Reply | None = None
        self.idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.engine.connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.fail(400, "Invalid request")

    def connection_lost(self, exc: Exception | None) -> None:
        self.engine.connections.discard(self)
        if self.idle:
            self.idle.cancel()
        if self.reply:
            self.reply.client_left()
        self.engine.leave_if_idle()

    def pause_writing(self) -> None:
        if self.reply:
            self.reply.block(True)

    def resume_writing(self) -> None:
        if self.reply:
            self.reply.block(False)

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self.idle:
            self.idle.cancel()
        self.url, self.headers, self.body = b"", dict[str, str](), bytearray()

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.engine.dispatch(self, self.parser.get_method().decode(), self.url.decode("latin-1").partition("?")[0])

    def json(self) -> dict[str, Any]:
        """The request's body. What is no JSON is a ValueError, which the engine answers with 500."""
        body: dict[str, Any] = json.loads(self.body)
        return body

    # Answering.

    def send(self, value: object, status: int = 200, kind: str = "application/json; charset=utf-8") -> None:
        """A whole reply. The connection lives on for :data:`IDLE_S`, after an error it is closed."""
        data = value if isinstance(value, bytes) else compact(value)
        ok = status < 400
        after = "Keep-Alive: timeout=5, max=100" if ok else "Connection: close"
        head = (
            f"HTTP/1.1 {status} {REASONS.get(status, 'Service Unavailable')}\r\nServer: llama.cpp\r\nAccess-Control-Allow-Origin: \r\n"
            f"Content-Type: {kind}\r\nContent-Length: {len(data)}\r\n{after}\r\n\r\n"
        )
        self.transport.write(head.encode() + data)
        if ok:
            self.idle = self.engine.loop.call_later(IDLE_S, self.transport.close)
        else:
            self.transport.close()

    def fail(self, status: int, message: str) -> None:
        """An error in the engine's shape."""
        self.send({"error": {"code": status, "message": message, "type": ERROR_TYPES.get(status, "server_error")}}, status)

    def send_stream_head(self) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nAccess-Control-Allow-Origin: \r\nX-Accel-Buffering: no\r\n"
            b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nKeep-Alive: timeout=5, max=100\r\n\r\n"
        )

    def send_chunk(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self) -> None:
        """The last chunk, and a close at once, whatever the Keep-Alive header says: so does the engine."""
        self.transport.write(b"0\r\n\r\n")
        self.transport.close()


class Engine:
    """The process: its slots, its connections, whether it has loaded and whether it was told to stop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, options: Options, knobs: Knobs, journal: Journal) -> None:
        self.loop, self.options, self.knobs, self.journal = loop, options, knobs, journal
        self.born = time.monotonic()
        self.connections: set[Connection] = set()
        self.free = list(range(options.slots))
        self.busy: dict[int, Reply] = {}
        self.deferred: deque[Reply] = deque()
        self.tasks = self.completions = 0
        self.ready = self.stopping = self.wedged = False
        self.servers: list[asyncio.AbstractServer] = []
        self.spinner: threading.Thread | None = None
        self.grown: list[bytearray] = []

    # Slots.

    def number(self, reply: Reply) -> int:
        """A task id; each choice of a reply has one."""
        self.completions += 1
        self.tasks += reply.choices
        return self.tasks - reply.choices

    def start_next(self) -> None:
        """Start those who have their slots; until then they wait in order and their clients hear nothing."""
        while self.deferred and len(self.free) >= self.deferred[0].places and not (self.stopping or self.wedged):
            reply = self.deferred.popleft()
            slots, self.free = self.free[: reply.places], self.free[reply.places :]
            self.busy |= dict.fromkeys(slots, reply)
            reply.slots = slots
            self.log_slots(reply, "launch_slot_", "processing task, is_child = 0")
            reply.start(slots)

    def give_back(self, reply: Reply) -> None:
        """A reply ended, or left the queue."""
        if reply in self.deferred:
            self.deferred.remove(reply)
            return
        self.log_slots(reply, "release", f"stop processing: n_tokens = {reply.prompt_n + max(reply.sent - 1, 0)}, truncated = 0")
        for slot in reply.slots:
            del self.busy[slot]
        self.free += reply.slots
        if not self.busy:
            self.log("I", "all slots are idle", "update_slots")
        self.start_next()

    # Requests.

    def dispatch(self, connection: Connection, method: str, path: str) -> None:
        """Answer one request."""
        is_health = path in ("/health", "/v1/health")
        if is_health and self.knobs.health_never_answers and self.ill:
            return
        if not is_health:
            body = bytes(connection.body[:4096]).decode(errors="replace")
            self.journal("request", id=self.tasks, method=method, path=path, headers=connection.headers, body=body)
        if not self.ready:
            connection.send({"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}, 503)
        elif answer := ROUTES.get((method, path)):
            try:
                answer(self, connection)
            except ValueError as problem:
                connection.fail(500, f"[json.exception.parse_error.101] {problem}")
        else:
            connection.send({"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}, 404)

    def complete(self, connection: Connection, route: str) -> None:
        """Queue a completion, or refuse it."""
        body = connection.json()
        count = 1 if route == "messages" else int(body.get("n_cmpl") or body.get("n") or 1)
        room = self.options.slot_context
        if refused := _unfit(route, body, connection.body):
            connection.fail(*refused)
        elif count > self.options.slots:
            connection.fail(400, f"Field 'n': Value must be between 1 <= value <= {self.options.slots}, but got {count}")
        elif (prompt_n := words_in(body)) >= room:
            message = f"request ({prompt_n} tokens) exceeds the available context size ({room} tokens), try increasing it"
            sizes = {"type": "exceed_context_size_error", "n_prompt_tokens": prompt_n, "n_ctx": room}
            connection.send({"error": {"code": 400, "message": message, **sizes}}, 400)
        else:
            connection.reply = Reply(connection, route, body)
            self.deferred.append(connection.reply)
            self.start_next()

    # Life.

    async def listen(self) -> None:
        """Bind as the engine does, before loading and without unlinking what is in the way; then begin to load."""
        for host in self.options.hosts:
            local = host.endswith(".sock")
            sock = socket.socket(socket.AF_UNIX if local else socket.AF_INET)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(host if local else (host, self.options.port))
            except OSError:
                self.log("E", f"couldn't bind HTTP server socket, hostname: {host}, port: {self.options.port}", "start")
                self.log("I", "operator(): cleaning up before exit...", "operator()")
                self.log("E", "exiting due to HTTP server error", "llama_server")
                self.leave(1)
            listen: Any = self.loop.create_unix_server if local else self.loop.create_server
            keep = {"cleanup_socket": False} if local and sys.version_info >= (3, 13) else {}
            self.servers.append(await listen(lambda: Connection(self), sock=sock, backlog=512, **keep))
        self.journal("bound")
        self.log("I", f"loading model '{self.options.model}'", "load_model")
        if not (self.knobs.never_healthy and self.ill):
            self.loop.call_later(self.knobs.load_s, self.loaded)

    def loaded(self) -> None:
        """The model is in memory, or isn't."""
        knobs, options = self.knobs, self.options
        oom = knobs.oom_at_load or (knobs.oom_above_ctx is not None and options.context > knobs.oom_above_ctx)
        code = 1 if oom else knobs.start_exit
        if code is not None and self.ill:
            say(f"{CUDA_OOM if oom else knobs.start_log}\n".encode())
            if code > 0:
                self.log("E", f"failed to load model, '{options.model}'", "load_model")
                self.log("I", "operator(): cleaning up before exit...", "operator()")
                self.log("E", "exiting due to model loading error", "llama_server")
            self.leave(code)
        for name, mib in knobs.allocates.items():
            self.log("I", f"{name} buffer size = {mib:8.2f} MiB", "load_tensors", "")
        shape = f"n_slots = {options.slots}, n_ctx_slot = {options.slot_context}"
        self.log("I", f"initializing, {shape}, kv_unified = 'false'", "load_model")
        self.ready = True
        self.log("I", "model loaded", "llama_server")
        if not knobs.ignore_sigterm:
            for number in (signal.SIGTERM, signal.SIGINT):
                self.loop.add_signal_handler(number, self.stop, number)
        self.loop.add_signal_handler(signal.SIGUSR1, self.wedge)
        self.loop.add_signal_handler(signal.SIGUSR2, self.fault)
        for host in options.hosts:
            where = f"unix://{host}" if host.endswith(".sock") else f"http://{host}:{options.port}"
            self.log("I", f"listening on {where}", "llama_server")
        self.log("I", "all slots are idle", "update_slots")
        self.journal("loaded")
        if knobs.flood_bytes_s:
            self.flood(self.loop.time())

    def stop(self, number: int) -> None:
        """A stop signal: close the listener, decode no further, leave when the last client has. The second one ends it at once."""
        self.journal("signal", number=number)
        if self.stopping:
            say(b"Received second interrupt, terminating immediately.\n")
            self.leave(1)
        self.stopping = True
        self.log("I", "operator(): cleaning up before exit...", "operator()")
        if self.knobs.slow_exit_s:
            self.loop.call_later(self.knobs.slow_exit_s, self.leave, 0)
            return
        for server in self.servers:
            server.close()
        self.hold()
        self.leave_if_idle()

    def wedge(self) -> None:
        """SIGUSR1: the main loop turns no more (llama.cpp#27388). Answers stand still, ``/slots`` is silent, ``/health`` is well."""
        self.journal("signal", number=int(signal.SIGUSR1))
        self.wedged = True
        self.hold()

    def fault(self) -> None:
        """SIGUSR2: a fault at run time, whatever is in work."""
        self.journal("signal", number=int(signal.SIGUSR2))
        self.die(self.knobs)

    def die(self, knobs: Knobs) -> None:
        """End as these knobs say, as soon as what was said is out: so the journal's counts are what was sent."""
        say(knobs.die_log.encode() + b"\n")
        self.wedged = True
        self.hold()
        self.loop.call_soon(self.loop.call_soon, self.leave, knobs.die_exit)  # uvloop writes at the end of a turn

    def hold(self) -> None:
        """Decode no further."""
        for reply in self.busy.values():
            if reply.timer:
                reply.timer.cancel()

    def leave_if_idle(self) -> None:
        """Stopping waits for clients with a request under way, and only for them."""
        waiting = any(connection.reply and not connection.reply.over for connection in self.connections)
        if self.stopping and not self.knobs.slow_exit_s and not waiting:
            self.leave(0)

    def leave(self, code: int) -> NoReturn:
        """End by exit status, or by the signal of a negative ``code``. The socket file stays, as the real one's does."""
        for reply in {*self.busy.values(), *self.deferred}:
            self.journal("lost", id=reply.task, tokens=reply.sent, **reply.account())
        self.journal("exit", code=code)
        if code < 0:
            signal.signal(-code, signal.SIG_DFL) if code != -signal.SIGKILL else None
            os.kill(os.getpid(), -code)
        os._exit(code & 0xFF)

    @property
    def ill(self) -> bool:
        """Whether this start is one of those that the knobs let fail."""
        return self.knobs.bites(self.journal.starts + 1)

    @property
    def dies_warming(self) -> bool:
        """Whether the completion under way is one that this process isn't to survive."""
        return self.knobs.die_warming and self.ill and self.completions == 1

    def spin(self) -> None:
        """Burn a core while a reply is under way. Hashing lets the interpreter go, so the loop isn't held up."""
        if self.spinner is not None and self.spinner.is_alive():
            return

        def burn() -> None:
            while self.busy:
                hashlib.sha256(SPUN).digest()

        self.spinner = threading.Thread(target=burn, name="spin", daemon=True)
        self.spinner.start()

    # Its log.

    def flood(self, due: float) -> None:
        """Write the lines of one :data:`FLOOD_S` after another."""
        line = "cancel task, id_task = 0"
        for _ in range(max(1, round(self.knobs.flood_bytes_s * FLOOD_S / FLOOD_LINE_BYTES))):
            self.log("W", line, "stop")
        self.loop.call_at(due + FLOOD_S, self.flood, due + FLOOD_S)

    def log(self, level: str, text: str, func: str, part: str = "srv  ") -> None:
        """A line as the engine writes it: minutes, seconds, milli- and microseconds of life, level, component, function, text."""
        millis, micros = divmod(int((time.monotonic() - self.born) * 1e6), 1000)
        seconds, millis = divmod(millis, 1000)
        stamp = f"{seconds // 60}.{seconds % 60:02}.{millis:03}.{micros:03}"
        say(f"{stamp} {level} {part}{func[:12]:>12}: {text}\n".encode())

    def log_slots(self, reply: Reply, func: str, *texts: str) -> None:
        """Lines about each slot of a reply."""
        for offset, slot in enumerate(reply.slots):
            for text in texts:
                self.log("I", f"id {slot:2} | task {reply.task + offset} | {text}", func, part="slot ")

    def log_timings(self, reply: Reply) -> None:
        """The four lines a finished request leaves."""
        t = timings(reply)
        rate = "({:8.2f} ms per token, {:8.2f} tokens per second)"
        prompt_rate = rate.format(t["prompt_per_token_ms"], t["prompt_per_second"])
        rate = rate.format(t["predicted_per_token_ms"], t["predicted_per_second"])
        self.log_slots(
            reply,
            "print_timings",
            f"prompt eval time = {t['prompt_ms']:10.2f} ms / {t['prompt_n']:5} tokens {prompt_rate}",
            f"       eval time = {t['predicted_ms']:10.2f} ms / {t['predicted_n']:5} tokens {rate}",
            f"      total time = {t['prompt_ms'] + t['predicted_ms']:10.2f} ms / {t['prompt_n'] + t['predicted_n']:5} tokens",
            f"   graphs reused = {max(t['predicted_n'] - 1, 0):10}",
        )


# Routes.


def _health(engine: Engine, connection: Connection) -> None:
    connection.send({"status": "ok"})


def _models(engine: Engine, connection: Connection) -> None:
    sizes = {"vocab_type": 2, "n_vocab": 49152, "n_ctx": engine.options.slot_context, "n_ctx_train": 8192, "n_embd": 576}
    about = {
        "created": int(time.time()),
        "owned_by": "llamacpp",
        "meta": {**sizes, "n_params": 134515008, "size": 96576768, "ftype": "Q4_1"},
    }
    connection.send({"object": "list", "data": [{"id": engine.options.alias, "object": "model", **about}]})


def _props(engine: Engine, connection: Connection) -> None:
    options = engine.options
    model = {"model_alias": options.alias, "model_path": options.model, "modalities": {"vision": False, "audio": False}}
    rest = {"total_slots": options.slots, **model, "chat_template": "", "build_info": FINGERPRINT, "is_sleeping": False}
    connection.send({"default_generation_settings": {"params": {}, "n_ctx": options.slot_context}, **rest})


def _slots(engine: Engine, connection: Connection) -> None:
    if engine.knobs.slots_never_answer or engine.wedged:
        return
    rows = []
    for slot in range(engine.options.slots):
        reply = engine.busy.get(slot)
        row: dict[str, Any] = {
            "id": slot,
            "n_ctx": engine.options.slot_context,
            "speculative": False,
            "is_processing": bool(reply),
        }
        if reply:
            row |= {"id_task": reply.task, "n_prompt_tokens": reply.prompt_n, "n_prompt_tokens_processed": reply.evaluated}
            row |= {"next_token": [{"n_decoded": reply.sent}]}
        rows.append(row)
    connection.send(rows)


def _metrics(engine: Engine, connection: Connection) -> None:
    if "--metrics" not in engine.options.flags:
        connection.fail(501, "This server does not support metrics endpoint. Start it with `--metrics`")
        return
    gauges = {"requests_processing": len(set(engine.busy.values())), "requests_deferred": len(engine.deferred)}
    text = "".join(f"# TYPE llamacpp:{name} gauge\nllamacpp:{name} {value}\n" for name, value in gauges.items())
    connection.send(text.encode(), kind="text/plain; version=0.0.4")


NO_IMAGES = "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj"


def _unfit(route: str, body: dict[str, Any], raw: bytearray) -> tuple[int, str] | None:
    """The status and the words with which the engine refuses a body it can't read; 500 for what is the request's fault (§11)."""
    needed, status = {"responses": ("input", 400), "messages": ("messages", 500), "chat": ("messages", 400)}.get(route, ("", 0))
    if needed and needed not in body:
        return status, f"'{needed}' is required"
    if route in ("chat", "responses", "messages") and (b'"image_url"' in raw or b'"image"' in raw):
        return 500, NO_IMAGES
    missing = [name for name in ("input_prefix", "input_suffix") if name not in body] if route == "infill" else []
    if missing:
        return 500, f"[json.exception.out_of_range.403] key '{missing[-1]}' not found"
    if route in ("text", "native") and "prompt" not in body:
        return 400, "[json.exception.out_of_range.403] key 'prompt' not found"
    return None


def _tokenize(engine: Engine, connection: Connection) -> None:
    connection.send({"tokens": list(range(words_in(connection.json())))})


def _detokenize(engine: Engine, connection: Connection) -> None:
    connection.send({"content": " ".join(f"t{token}" for token in connection.json().get("tokens", []))})


def _apply_template(engine: Engine, connection: Connection) -> None:
    body = connection.json()
    if refused := _unfit("chat", body, connection.body):
        connection.fail(*refused)
        return
    turns = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in body["messages"]]
    connection.send({"prompt": "".join(turns) + "<|im_start|>assistant\n"})


def _count(route: str) -> Callable[[Engine, Connection], None]:
    """The count of a dialogue's tokens, on its own route."""

    def answer(engine: Engine, connection: Connection) -> None:
        body = connection.json()
        if refused := _unfit(route, body, connection.body):
            connection.fail(*refused)
            return
        noun = {} if route == "messages" else {"object": "response.input_tokens"}
        connection.send({"input_tokens": words_in(body), **noun})

    return answer


def _embeddings(engine: Engine, connection: Connection) -> None:
    if "--embeddings" not in engine.options.flags:
        connection.fail(501, "This server does not support embeddings. Start it with `--embeddings`")
        return
    body = connection.json()
    texts = body["input"] if isinstance(body.get("input"), list) else [body.get("input")]
    vector = [0.5, -0.5, 0.5, -0.5]
    form: dict[str, Any] = {"embedding": vector}
    if body.get("encoding_format") == "base64":
        form = {"embedding": base64.b64encode(struct.pack("<4f", *vector)).decode(), "encoding_format": "base64"}
    rows = [form | {"index": index, "object": "embedding"} for index in range(len(texts))]
    connection.send({"model": engine.options.alias, "object": "list", "usage": _usage(texts), "data": rows})


def _rerank(engine: Engine, connection: Connection) -> None:
    if "--reranking" not in engine.options.flags:
        connection.fail(501, "This server does not support reranking. Start it with `--reranking`")
        return
    body = connection.json()
    texts = body.get("documents") or []
    if not texts:
        connection.fail(400, '"documents" must be a non-empty string array')
        return
    rows = [{"index": index, "relevance_score": 1.0 / (index + 1)} for index in range(len(texts))]
    connection.send(
        {"model": engine.options.alias, "object": "list", "usage": _usage(texts), "results": rows[: body.get("top_n")]}
    )


def _usage(texts: list[Any]) -> dict[str, int]:
    count = sum(len(str(text).split()) or 1 for text in texts)
    return {"prompt_tokens": count, "total_tokens": count}


def _completion(route: str) -> Callable[[Engine, Connection], None]:
    return lambda engine, connection: engine.complete(connection, route)


ROUTES: dict[tuple[str, str], Callable[[Engine, Connection], None]] = {
    ("GET", "/health"): _health,
    ("GET", "/v1/health"): _health,
    ("GET", "/v1/models"): _models,
    ("GET", "/props"): _props,
    ("GET", "/slots"): _slots,
    ("GET", "/metrics"): _metrics,
    ("POST", "/tokenize"): _tokenize,
    ("POST", "/detokenize"): _detokenize,
    ("POST", "/apply-template"): _apply_template,
    ("POST", "/v1/chat/completions"): _completion("chat"),
    ("POST", "/v1/chat/completions/input_tokens"): _count("chat"),
    ("POST", "/v1/completions"): _completion("text"),
    ("POST", "/v1/responses"): _completion("responses"),
    ("POST", "/v1/responses/input_tokens"): _count("responses"),
    ("POST", "/v1/messages"): _completion("messages"),
    ("POST", "/v1/messages/count_tokens"): _count("messages"),
    ("POST", "/completion"): _completion("native"),
    ("POST", "/infill"): _completion("infill"),
    ("POST", "/v1/embeddings"): _embeddings,
    ("POST", "/v1/rerank"): _rerank,
}


# The command line.


def help_text(hidden: list[str]) -> str:
    """The recorded --help without the lines of flags this build is to lack."""
    lines = HELP.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not set(hidden) & set(line.replace(",", " ").split()))


def refuse_unknown(argv: list[str], hidden: list[str]) -> None:
    """End as the engine does on a flag it doesn't have."""
    known = set(help_text(hidden).replace(",", " ").split())
    for flag in flags_in(argv):
        if flag not in known:
            say(f"error: invalid argument: {flag}\n".encode())
            os._exit(1)


def move_out_of_reach() -> None:
    """Serve from a forked child in a session of its own; this process only waits for it, and may be killed without it."""
    if pid := os.fork():
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    os.setsid()


def main(argv: list[str]) -> NoReturn:
    """Be llama-server with these arguments, after an optional leading ``--fake-knobs FILE``."""
    settings: dict[str, Any] = {}
    if argv[:1] == ["--fake-knobs"]:
        settings, argv = json.loads(Path(argv[1]).read_text()), argv[2:]
    journal_path = settings.pop("journal", "")
    knobs = Knobs(**settings)
    if "--version" in argv:
        say(VERSION.encode())
        sys.exit(0)
    if "--help" in argv or "-h" in argv:
        sys.stdout.write(help_text(knobs.hide_flags))
        sys.exit(0)
    if knobs.strict:
        refuse_unknown(argv, knobs.hide_flags)
    if knobs.outlive_parent:
        move_out_of_reach()
    signal.alarm(knobs.life_s)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the model has loaded the real one has no handlers
    if knobs.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    journal = Journal(journal_path)
    journal("start", argv=argv, env=sorted(os.environ), ppid=os.getppid(), cwd=os.getcwd())
    loop = uvloop.new_event_loop()
    engine = Engine(loop, Options.read(argv), knobs, journal)

    async def live() -> None:
        # In one run: a signal that comes between two runs of uvloop's loop is lost.
        await engine.listen()
        await loop.create_future()

    loop.run_until_complete(live())
    raise AssertionError("the loop ends only with the process")


if __name__ == "__main__":
    main(sys.argv[1:])
