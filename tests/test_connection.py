"""The contract on what is used of uvicorn: a real Door on loopback, a small application, raw sockets as clients."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from supervisor import connection
from supervisor.connection import HEAD_LIMIT, KEY, Connection
from supervisor.serve import Door, bind
from supervisor.units import KIB, MIB

T = TypeVar("T")

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
BOUND_S = 10.0


class Client:
    """A raw socket with the Door, on the same loop."""

    def __init__(self, port: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setblocking(False)
        self.got = b""

    async def send(self, data: bytes) -> None:
        await self.loop.sock_sendall(self.sock, data)

    async def more(self) -> bytes:
        """What comes next; b"" is the end."""
        try:
            data = await self.loop.sock_recv(self.sock, 65536)
        except ConnectionResetError:
            data = b""
        self.got += data
        return data

    async def until(self, mark: bytes) -> bytes:
        """Read until ``mark`` is there; all that came up to it, which is forgotten."""
        while mark not in self.got:
            assert await self.more(), f"closed after {self.got!r}"
        head, _, self.got = self.got.partition(mark)
        return head + mark

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        while await self.more():
            pass
        return self.got

    def close(self) -> None:
        self.sock.close()


def serve(application: ASGIApp, story: Callable[[Callable[[], Client], Door], Awaitable[T]], *, loop: str = "uvloop") -> T:
    """Run the application behind a Door and the story in front of it."""

    async def live() -> T:
        with bind("127.0.0.1", 0) as sockets:
            port = sockets[0].getsockname()[1]
            door = Door(application, sockets)
            await door.open()
            clients: list[Client] = []

            def connect() -> Client:
                clients.append(Client(port))
                return clients[-1]

            try:
                async with asyncio.timeout(BOUND_S):
                    return await story(connect, door)
            finally:
                for client in clients:
                    client.close()
                await door.drain(0, asyncio.Event())
                await door.shut()

    return (uvloop.run if loop == "uvloop" else asyncio.run)(live())


async def answer(scope: Scope, receive: Receive, send: Send, body: bytes = b"hello") -> None:
    """Read the body, answer with it or with ``body``."""
    parts = []
    more = True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    found = b"".join(parts) or body
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(found)).encode())]})
    await send({"type": "http.response.body", "body": found})


class Silent:
    """Begins nothing and waits for ever; notes how it ended."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self.gone = False
        self.count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.count += 1
        self.started.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            self.gone = scope[KEY].gone
        finally:
            self.ended.set()


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Any:
    """Nothing that a client does is an error of ours."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


# Requests.


def test_a_request_finds_its_connection_in_the_scope_and_keeps_it() -> None:
    seen: list[Connection] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope[KEY])
        await answer(scope, receive, send)

    async def story(connect: Callable[[], Client], door: Door) -> None:
        client = connect()
        for _ in range(3):
            await client.send(GET)
            head = await client.until(b"hello")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert head.count(b"\r\ndate: ") == 1
            assert b"server: " not in head
        assert seen == [seen[0]] * 3
        assert isinstance(seen[0], Connection)
        assert "1 connections, 0 requests" in repr(door)

    serve(app, story)


def test_a_request_cut_at_every_byte_is_one_request() -> None:
    request = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"

    async def story(connect: Callable[[], Client], door: Door) -> None:
        client = connect()
        client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request:
            await client.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.until(b"\r\n\r\nabc")).startswith(b"HTTP/1.1 200")

    serve(answer, story)


def test_a_client_that_leaves_in_the_very_turn_of_its_request_was_there() -> None:
    silent = Silent()
    seen: list[Connection] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope[KEY])
        await (answer if len(seen) == 1 else silent)(scope, receive, send)

    async def story(connect: Callable[[], Client], door: Door) -> None:
        client = connect()
        await client.send(GET)
        await client.until(b"hello")
        seen[0].data_received(GET)
        seen[0].connection_lost(None)
        await silent.ended.wait()
        assert (silent.count, silent.gone) == (1, True)

    serve(app, story)


# Heads are bounded.


def refusal(reply: bytes, status: int) -> str:
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), reply[:200]
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert (error["code"], error["source"]) == (status, "llmctl")
    return str(error["message"])


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * HEAD_LIMIT + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: a\r\n" * (HEAD_LIMIT // 5) + b"\r\n",
        b"GET /" + b"a" * HEAD_LIMIT + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["one large header", "many headers", "a long target"],
)
def test_a_head_over_the_limit_is_refused_and_no_application_sees_it(request_: bytes) -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    async def story(connect: Callable[[], Client], door: Door) -> bytes:
        client = connect()
        await client.send(request_)
        return await client.rest()

    assert str(HEAD_LIMIT) in refusal(serve(app, story), 431)
    assert seen == []


@pytest.mark.parametrize(
    "start", [b"GET / HTTP/1.1\r\nHost: x\r\nX: ", b"GET /", b"GET / HTTP/1.1\r\nX"], ids=["value", "target", "name"]
)
def test_a_head_is_refused_at_the_limit_and_not_at_its_end(start: bytes) -> None:
    """One that never ends must not grow in memory until the time is up."""

    async def story(connect: Callable[[], Client], door: Door) -> bytes:
        client = connect()
        await client.send(start + b"a" * (4 * HEAD_LIMIT))
        return await client.rest()

    refusal(serve(answer, story), 431)


def test_a_head_below_the_limit_passes() -> None:
    async def story(connect: Callable[[], Client], door: Door) -> bytes:
        client = connect()
        await client.send(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * (HEAD_LIMIT - 1000) + b"\r\n\r\n")
        return await client.until(b"hello")

    assert serve(answer, story).startswith(b"HTTP/1.1 200")


def test_the_limit_is_for_each_request_anew_and_a_body_does_not_count() -> None:
    body = b"b" * (2 * HEAD_LIMIT)

    async def story(connect: Callable[[], Client], door: Door) -> None:
        client = connect()
        for _ in range(3):
            await client.send(
                b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nX: %b\r\n\r\n" % (len(body), b"a" * 20_000) + body
            )
            assert (await client.until(body)).startswith(b"HTTP/1.1 200")

    serve(answer, story)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX: a"], ids=["nothing", "half a head"])
def test_a_head_that_does_not_come_in_time_is_refused(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.1)

    async def story(connect: Callable[[], Client], door: Door) -> bytes:
        client = connect()
        if sent:
            await client.send(sent)
        return await client.rest()

    refusal(serve(answer, story), 408)


def test_the_second_head_of_a_connection_has_a_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.1)

    async def story(connect: Callable[[], Client], door: Door) -> bytes:
        client = connect()
        await client.send(GET)
        await client.until(b"hello")
        await client.send(b"GET / HT")
        return await client.rest()

    refusal(serve(answer, story), 408)


def test_neither_a_slow_answer_nor_an_idle_connection_runs_out_of_head_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.3)

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.4)
        await answer(scope, receive, send)

    async def story(connect: Callable[[], Client], door: Door) -> None:
        client = connect()
        for _ in range(2):
            await client.send(GET)
            assert (await client.until(b"hello")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.4)

    serve(slow, story)


def test_the_rest_of_a_body_that_was_refused_early_is_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate answers before the body is here. What still comes of it must not start the clock of a head that nobody sends."""
    monkeypatch.setattr(connection, "HEAD_S", 0.3)

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 415, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})

    async def story(connect: Callable[[], Client], door: Door) -> None:
        client = connect()
        for _ in range(2):
            await client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n")
            assert (await client.until(b"\r\n\r\nno")).startswith(b"HTTP/1.1 415")
            await client.send(b"body")
            await asyncio.sleep(0.4)
        assert client.got == b""

    serve(refuse, story)


def test_what_is_not_http_is_refused() -> None:
    async def story(connect: Callable[[], Client], door: Door) -> bytes:
        client = connect()
        await client.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
        return await client.rest()

    assert serve(answer, story).startswith(b"HTTP/1.1 400")


def test_a_web_socket_is_not_taken() -> None:
    """The application knows requests only."""
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    kinds = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        kinds.append(scope["type"])
        await answer(scope, receive, send)

    async def story(connect: Callable[[], Client], door: Door) -> bytes:
        client = connect()
        await client.send(b"GET / HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n")
        return await client.until(b"\r\n")

    assert b" 101 " not in serve(app, story)
    assert kinds == ["http"]


# Leaving.


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
def test_a_client_that_leaves_while_all_is_silent_cancels_its_request(how: str, loop: str) -> None:
    async def story(connect: Callable[[], Client], door: Door) -> Silent:
        silent.append(Silent())
        client = connect()
        await client.send(GET)
        await silent[0].started.wait()
        if how == "reset":
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        if how == "half-close":
            client.sock.shutdown(socket.SHUT_WR)
        else:
            client.close()
        await silent[0].ended.wait()
        return silent[0]

    silent: list[Silent] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await silent[0](scope, receive, send)

    assert serve(app, story, loop=loop).gone


def test_one_that_leaves_harms_no_other() -> None:
    silent: list[Silent] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (silent[0](scope, receive, send) if scope["path"] == "/silent" else answer(scope, receive, send))

    async def story(connect: Callable[[], Client], door: Door) -> None:
        silent.append(Silent())
        leaving, staying = connect(), connect()
        await leaving.send(GET.replace(b" / ", b" /silent "))
        await silent[0].started.wait()
        leaving.close()
        await silent[0].ended.wait()
        await staying.send(GET)
        await staying.until(b"hello")
        assert "1 connections, 0 requests" in repr(door)

    serve(app, story)


def test_a_pipelined_second_request_closes_the_connection_and_is_never_started() -> None:
    """It would hide the client's leaving: uvicorn stops reading while one waits."""
    silent: list[Silent] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await silent[0](scope, receive, send)

    async def story(connect: Callable[[], Client], door: Door) -> None:
        silent.append(Silent())
        client = connect()
        await client.send(GET)
        await silent[0].started.wait()
        await client.send(GET)
        assert await client.rest() == b""
        await silent[0].ended.wait()
        assert silent[0].gone
        assert silent[0].count == 1

    serve(app, story)


def test_two_requests_in_one_packet_close_it_as_well() -> None:
    silent: list[Silent] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await silent[0](scope, receive, send)

    async def story(connect: Callable[[], Client], door: Door) -> int:
        silent.append(Silent())
        client = connect()
        await client.send(GET + GET)
        assert await client.rest() == b""
        return silent[0].count

    assert serve(app, story) <= 1


# Streams.

HEADERS = [(b"content-type", b"text/event-stream")]
STREAM = {"type": "http.response.start", "status": 200, "headers": HEADERS}
END = {"type": "http.response.body", "body": b"", "more_body": False}


class Source:
    """What feeds a client; counts how it is told to wait."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.paused = asyncio.Event()
        self.flowing = asyncio.Event()
        self.flowing.set()

    def pause(self) -> None:
        self.calls.append("pause")
        self.paused.set()
        self.flowing.clear()

    def resume(self) -> None:
        self.calls.append("resume")
        self.flowing.set()

    def abort(self) -> None:
        self.calls.append("abort")


def test_chunks_are_framed_and_the_connection_lives_on() -> None:
    pieces = [b"data: a\n\n", b"x" * 300, b"\x00\r\n0\r\n\r\n"]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope[KEY].begin_chunked(HEADERS, Source())
        for piece in pieces:
            scope[KEY].write_chunk(piece)
        await send(END)

    async def story(connect: Callable[[], Client], door: Door) -> None:
        client = connect()
        for _ in range(2):
            await client.send(GET)
            head = await client.until(b"\r\n\r\n")
            assert b"transfer-encoding: chunked" in head
            framed = b"9\r\ndata: a\n\n\r\n" + b"12c\r\n" + b"x" * 300 + b"\r\n" + b"8\r\n\x00\r\n0\r\n\r\n\r\n" + b"0\r\n\r\n"
            while len(client.got) < len(framed):
                assert await client.more()
            assert client.got == framed
            client.got = b""

    serve(app, story)


def test_an_application_that_returns_without_an_end_cuts_the_connection() -> None:
    """So a client sees that a stream broke: no final chunk."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope[KEY].begin_chunked(HEADERS, Source())
        scope[KEY].write_chunk(b"data: {}\n\n")

    async def story(connect: Callable[[], Client], door: Door) -> bytes:
        client = connect()
        await client.send(GET)
        return await client.rest()

    reply = serve(app, story)
    assert reply.endswith(b"a\r\ndata: {}\n\n\r\n")


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_client_that_reads_nothing_pauses_its_source_and_one_that_reads_again_resumes_it(loop: str) -> None:
    total = 24 * MIB
    written = 0
    source = Source()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal written
        scope[KEY].begin_chunked(HEADERS, source)
        while written < total:
            await source.flowing.wait()
            scope[KEY].write_chunk(b"x" * (64 * KIB))
            written += 64 * KIB
            await asyncio.sleep(0)
        await send(END)
        assert scope[KEY].source is None

    async def story(connect: Callable[[], Client], door: Door) -> None:
        client = connect()
        await client.send(GET)
        await source.paused.wait()
        held = -1
        while held != written:  # until nothing more is taken: the kernel's buffers may grow at first
            held = written
            await asyncio.sleep(0.02)
        assert held < total
        tail = b""
        while not tail.endswith(b"\r\n0\r\n\r\n"):
            tail = (tail + await client.loop.sock_recv(client.sock, MIB))[-7:]
        assert written == total
        assert source.calls == ["pause", "resume"] * (len(source.calls) // 2)

    serve(app, story, loop=loop)


def test_a_source_that_comes_when_the_buffer_is_full_is_paused_at_once() -> None:
    source = Source()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while not scope[KEY].flow.write_paused:
            scope[KEY].transport.write(b"x" * (64 * KIB))
            await asyncio.sleep(0)
        scope[KEY].begin_chunked(HEADERS, source)
        await asyncio.sleep(600)

    async def story(connect: Callable[[], Client], door: Door) -> None:
        await connect().send(GET)
        await source.paused.wait()
        assert source.calls == ["pause"]

    serve(app, story)


def test_a_client_that_leaves_with_a_full_buffer_cancels_its_request() -> None:
    silent: list[Silent] = []
    sources: list[Source] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        sources.append(Source())
        scope[KEY].begin_chunked(HEADERS, sources[0])
        while not scope[KEY].flow.write_paused:
            scope[KEY].write_chunk(b"x" * (64 * KIB))
            await asyncio.sleep(0)
        await silent[0](scope, receive, send)

    async def story(connect: Callable[[], Client], door: Door) -> bool:
        silent.append(Silent())
        client = connect()
        await client.send(GET)
        await silent[0].started.wait()
        client.close()
        await silent[0].ended.wait()
        assert sources[0].calls == ["pause", "abort"]  # at once: a closed transport takes no chunk
        return silent[0].gone

    assert serve(app, story)


def test_a_head_goes_out_with_the_first_chunk_or_when_told() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope[KEY].begin_chunked(HEADERS, Source())
        scope[KEY].flush_head()
        await receive()
        await asyncio.sleep(600)

    async def story(connect: Callable[[], Client], door: Door) -> bytes:
        client = connect()
        await client.send(GET)
        return await client.until(b"\r\n\r\n")

    head = serve(app, story)
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"content-type: text/event-stream\r\n" in head


# The Door's end.


def test_draining_lets_what_is_in_work_end_and_closes_the_rest() -> None:
    go: list[asyncio.Event] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(STREAM)
        await go[0].wait()
        scope[KEY].write_chunk(b"data: {}\n\n")
        await send(END)

    async def story(connect: Callable[[], Client], door: Door) -> None:
        go.append(asyncio.Event())
        idle, busy = connect(), connect()
        await busy.send(GET)
        await busy.until(b"\r\n\r\n")
        async with asyncio.TaskGroup() as group:
            drain = group.create_task(door.drain(BOUND_S, asyncio.Event()))
            assert await idle.rest() == b""
            with pytest.raises(ConnectionRefusedError):
                connect()
            assert not drain.done()
            go[0].set()
            assert await busy.rest() == b"a\r\ndata: {}\n\n\r\n0\r\n\r\n"
            await drain

    serve(app, story)


@pytest.mark.parametrize("cause", ["force", "limit"])
def test_draining_ends_at_the_limit_or_by_force(cause: str) -> None:
    silent: list[Silent] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await silent[0](scope, receive, send)

    async def story(connect: Callable[[], Client], door: Door) -> None:
        silent.append(Silent())
        client = connect()
        await client.send(GET)
        await silent[0].started.wait()
        force = asyncio.Event()
        if cause == "force":
            force.set()
        await door.drain(600 if cause == "force" else 0.02, force)
        await door.shut()
        assert silent[0].ended.is_set()
        await client.rest()
        assert repr(door) == "<Door 0 connections, 0 requests>"

    serve(app, story)
