"""One child's HTTP face: requests to its Unix socket, and the reply's bytes as they come.

A request gets a connection of its own, since llama-server closes after every stream and a pool would only bring races. The hot path
is :meth:`Exchange.data_received`: httptools takes the chunk framing off and the body's bytes go straight to the consumer, without a
task, a queue or a stream object in between. What is not per token (health, warm-up, properties) goes through httpx.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Self, cast

import httptools
import httpx2

from supervisor.argv import SOCKET
from supervisor.child import Child
from supervisor.errors import Error, Exit

PROBE_S: Final = 5.0
"""Bound on a health or property request; /health answers at once or the child is not well."""
WARM_UP_TOKENS: Final = 8
"""Decoded before a child is called ready: the first decode is where memory that was promised is really taken."""


_DOOR: Final = int(socket.SOCK_STREAM | socket.SOCK_NONBLOCK)


class Broken(Exception):
    """The connection ended before the reply did; the proxy branches on it."""


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a reply. Header names are lower case."""

    status: int
    headers: dict[bytes, bytes]


Consume = Callable[[bytes], None]
"""Takes the next bytes of a body."""
Begin = Callable[[Head], Consume | None]
"""Looks at a reply's head in the turn of the loop in which it came, and may take the body from there on."""


class Exchange(asyncio.Protocol):
    """One request and its reply. ``await head()``, then :meth:`pipe` the body somewhere, then ``await ended()``.

    With ``begin`` the body can be taken sooner, without a turn of the loop in between. Whoever opened it calls :meth:`abort` in a
    ``finally``; after the end that does nothing. Aborting closes the socket at once, which is how llama-server learns that nobody wants
    the rest.
    """

    def __init__(self, owner: Upstream, begin: Begin | None = None) -> None:
        self._owner = owner
        self._begin = begin
        self._loop = asyncio.get_running_loop()
        self._parser: Any = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._head: asyncio.Future[Head] = self._loop.create_future()
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._parts: list[bytes] = []
        self._consume: Consume | None = None
        self._transport: asyncio.Transport | None = None
        self._paused = False

    def __repr__(self) -> str:
        return f"<Exchange {'ended' if self._end.done() else 'open'} with {self._owner!r}>"

    def send(self, rest: bytes | memoryview) -> None:
        """Write what the socket didn't take at once of the request."""
        assert self._transport is not None
        self._transport.write(rest)

    async def head(self) -> Head:
        """The reply's status and headers. Raises :class:`Broken`."""
        return await self._head

    def pipe(self, consume: Consume) -> None:
        """From now on ``consume`` gets the body's bytes, those that already came first."""
        self._consume = consume
        self._hand_on()

    async def ended(self) -> None:
        """Returns when the whole body went to the consumer. Raises :class:`Broken` when the connection ended before."""
        await self._end

    def pause(self) -> None:
        """Stop reading: the consumer can't take more. The child then waits in its own write."""
        if not self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._paused and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self._paused = False

    def abort(self) -> None:
        """Close the connection now, whatever is on its way."""
        if self._transport is not None:
            self._transport.abort()
        self._finish(Broken("given up"))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """The hot path: once per chunk of every stream."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._finish(Broken(f"the child's reply is not HTTP: {exc}"))
            self.abort()
            return
        if self._parts and self._consume is not None:
            self._hand_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop, once."""
        self._finish(Broken(f"the child closed the connection before its reply ended{f': {exc}' if exc else ''}"))

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """The head is whole."""
        if self._head.done():
            return
        head = Head(self._parser.get_status_code(), self._headers)
        self._head.set_result(head)
        if self._begin is not None:
            self._consume = self._begin(head)

    def on_body(self, body: bytes) -> None:
        """A piece of the body, its chunk framing taken off."""
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """The reply is whole."""
        if self._consume is not None and self._parts:
            self._hand_on()
        self._finish(None)

    def _hand_on(self) -> None:
        parts = self._parts
        if not parts or self._consume is None:
            return
        self._parts = []
        self._consume(parts[0] if len(parts) == 1 else b"".join(parts))

    def _finish(self, problem: Broken | None) -> None:
        if self._end.done():
            return
        self._owner.exchanges.discard(self)
        if problem is None:
            self._end.set_result(None)
            if self._transport is not None:
                self._transport.close()
            return
        for future in (self._head, self._end):
            if not future.done():
                future.set_exception(problem)
                future.exception()  # mark it as seen: the proxy may have been cancelled meanwhile


class Upstream:
    """The face of one child. Close it before the child is stopped: llama-server waits for its connections."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.exchanges: set[Exchange] = set()
        self._loop = asyncio.get_running_loop()
        self._folder = os.open(child.folder, os.O_PATH | os.O_DIRECTORY)
        # A socket's path may have 107 bytes. Through the folder's descriptor it always fits.
        self._path = f"/proc/self/fd/{self._folder}/{SOCKET}"
        self._slow = httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(uds=self._path), base_url="http://child", timeout=PROBE_S
        )

    def __repr__(self) -> str:
        return f"<Upstream {self.child.name} {len(self.exchanges)} open>"

    async def request(self, path: str, body: bytes, begin: Begin | None = None) -> Exchange:
        """POST ``body`` (JSON) to ``path``. Raises :class:`Broken` when the child doesn't take connections.

        The request is on its way before the loop has a transport for the reply: the child begins that much sooner.
        """
        exchange = Exchange(self, begin)
        head = f"POST {path} HTTP/1.1\r\nHost: child\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        door = socket.socket(socket.AF_UNIX, _DOOR)
        try:
            door.connect(self._path)  # a Unix socket connects at once or says why not
            sent = door.sendmsg((head, body)) - len(head)
            self.exchanges.add(exchange)
            await self._loop.create_unix_connection(lambda: exchange, sock=door)
        except OSError as exc:
            exchange.abort()
            door.close()
            raise Broken(f"the child takes no connection: {exc.strerror}") from exc
        except BaseException:
            exchange.abort()
            door.close()
            raise
        if sent < len(body):
            exchange.send(memoryview(body)[sent:] if sent >= 0 else head[sent:] + body)
        return exchange

    async def healthy(self) -> bool:
        """Whether /health says 200; False while it loads or doesn't answer."""
        try:
            return (await self._slow.get("/health")).status_code == 200
        except httpx2.HTTPError:
            return False

    async def warm_up(self) -> int:
        """Decode a few tokens, so that what only the first decode allocates is there. Returns the context of one slot, in tokens.

        Raises :class:`Error` (exit code 8) when the child refuses, and :class:`httpx2.HTTPError` when it goes away.
        """
        body = {"prompt": "Hello", "n_predict": WARM_UP_TOKENS, "ignore_eos": True, "cache_prompt": False}
        reply = await self._slow.post("/completion", json=body, timeout=None)
        if reply.status_code != 200:
            raise Error(f"the warm-up of {self.child.name} was refused: {reply.text[:200]}", exit=Exit.CHILD, hint="llmctl logs")
        props = (await self._slow.get("/props")).json()
        return int(props["default_generation_settings"]["n_ctx"])

    async def close(self) -> None:
        """Cut every exchange and let go of the socket. Twice is harmless."""
        for exchange in list(self.exchanges):
            exchange.abort()
        await self._slow.aclose()
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
