"""One child's HTTP face: requests to its Unix socket, and the reply's bytes as they come.

A request gets a connection of its own, since llama-server closes after every stream and a pool would only bring races. It is a plain
socket that the loop watches: an asyncio transport costs 80 µs to make and two turns of the loop, a watched socket 15 µs and none, so the
request leaves in the turn in which it was admitted. The hot path is :meth:`Exchange._readable`: httptools takes the chunk framing off
and the body's bytes go straight to the consumer, without a task, a queue or a stream object in between. What is not per token (health,
warm-up, properties) goes through httpx.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterable
from typing import Any, Final, Self

import httptools
import httpx2

from supervisor import progress
from supervisor.argv import SOCKET
from supervisor.causes import Cause
from supervisor.child import Child
from supervisor.errors import Error, Exit
from supervisor.units import KIB
from supervisor.warmup import Question

log = logging.getLogger("llmctl.upstream")

PROBE_S: Final = 5.0
"""Bound on a health or property request; /health answers at once or the child is not well."""

ASK_S: Final = 60.0
"""Bound on a question about a prompt: 30 MB of text are tokenised in seconds, on busy cores."""
_TOKEN: Final = 1
"""Any token id."""
SETTLE_S: Final = 0.2
"""How long after its connections a child's end may be noticed."""
LOOKED_AFTER_S: Final = 3.0
"""For the keeper to find that a child takes no connections any more, and to end it."""
CLASSIFY_S: Final = 30.0
"""Bound on the word why a child ended, once it has: its log is read, and the card's driver is asked."""
_BUFFER: Final = memoryview(bytearray(64 * KIB))
"""Where every read lands: the parser copies what it hands on, and the loop reads one socket at a time."""
SOCKET_PATH_BYTES: Final = 107
"""Of a Unix socket (man 7 unix: sun_path has 108, one is the end)."""
_DOOR: Final = int(socket.SOCK_STREAM | socket.SOCK_NONBLOCK)


class Broken(Exception):
    """The connection ended before the reply did; the proxy branches on it."""


Consume = Callable[[bytes], None]
"""Takes the next bytes of a body."""
Begin = Callable[["Exchange", int], Consume | None]
"""Looks at a reply's status in the turn of the loop in which it came, and may take the body from there on."""


class Exchange:
    """One request and its reply. ``await head()``, then :meth:`pipe` the body somewhere, then ``await ended()``.

    With ``begin`` the body can be taken sooner, without a turn of the loop in between. Whoever opened it calls :meth:`abort` in a
    ``finally``; after the end that does nothing. Aborting closes the socket at once, which is how llama-server learns that nobody wants
    the rest.
    """

    __slots__ = (
        "_begin",
        "_closed",
        "_consume",
        "_door",
        "_end",
        "_head",
        "_loop",
        "_owner",
        "_parser",
        "_parts",
        "_paused",
        "_rest",
    )

    def __init__(self, owner: Upstream, door: socket.socket, begin: Begin | None = None) -> None:
        self._owner = owner
        self._door = door
        self._begin = begin
        self._loop = asyncio.get_running_loop()
        self._parser: Any = httptools.HttpResponseParser(self)
        self._head: asyncio.Future[int] = self._loop.create_future()
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._parts: list[bytes] = []
        self._consume: Consume | None = None
        self._rest = memoryview(b"")
        self._paused = False
        self._closed = False
        """Not ``_end.done()``: whoever is cancelled while it awaits a future cancels the future, and the socket is still to be closed."""

    def __repr__(self) -> str:
        return f"<Exchange {'ended' if self._closed else 'open'} with {self._owner!r}>"

    def start(self, head: bytes, body: bytes) -> None:
        """Write the request and watch for the reply. Raises OSError."""
        sent = self._door.sendmsg((head, body))
        if sent < len(head) + len(body):
            self._rest = memoryview(body)[sent - len(head) :] if sent >= len(head) else memoryview(head[sent:] + body)
            self._loop.add_writer(self._door, self._writable)
        self._loop.add_reader(self._door, self._readable)

    async def head(self) -> int:
        """The reply's status, once its head is whole. Raises :class:`Broken`."""
        return await self._head

    def pipe(self, consume: Consume) -> None:
        """From now on ``consume`` gets the body's bytes, those that already came first."""
        self._consume = consume
        self._hand_on()

    async def ended(self) -> None:
        """Returns when the whole body went to the consumer. Raises :class:`Broken` when the connection ended before."""
        await self._end

    @property
    def is_paused(self) -> bool:
        """Whether its client can't take more."""
        return self._paused

    def pause(self) -> None:
        """Stop reading: the consumer can't take more. The child then waits in its own write."""
        if not self._paused and not self._closed:
            self._paused = True
            self._loop.remove_reader(self._door)

    def resume(self) -> None:
        """Read again."""
        if self._paused and not self._closed:
            self._loop.add_reader(self._door, self._readable)
        self._paused = False

    def abort(self, why: str = "given up") -> None:
        """Close the connection now, whatever is on its way."""
        self._finish(Broken(why))

    def _readable(self) -> None:
        """The hot path: once per chunk of every stream."""
        try:
            count = self._door.recv_into(_BUFFER)
        except BlockingIOError:
            return
        except OSError as exc:
            self._finish(Broken(f"the child's connection broke: {exc.strerror}"))
            return
        if not count:
            self._finish(Broken("the child closed the connection before its reply ended"))
            return
        self._owner.heard += 1
        try:
            self._parser.feed_data(_BUFFER[:count])
            if self._parts and self._consume is not None:
                self._hand_on()
        except httptools.HttpParserError as exc:
            self._finish(Broken(f"the child's reply is not HTTP: {exc}"))
        except Exception as exc:  # a consumer's fault must not leave a hole in the stream
            log.exception("%r", self)
            self._finish(Broken(f"the reply can't be handed on: {exc!r}"))

    def _writable(self) -> None:
        """More of a request that was too large for the socket's buffer."""
        try:
            self._rest = self._rest[self._door.send(self._rest) :]
        except BlockingIOError:
            return
        except OSError as exc:
            self._finish(Broken(f"the child took only a part of the request: {exc.strerror}"))
            return
        if not self._rest:
            self._loop.remove_writer(self._door)

    # httptools callbacks

    def on_headers_complete(self) -> None:
        """The head is whole."""
        if self._head.done():
            return
        status: int = self._parser.get_status_code()
        self._head.set_result(status)
        if self._begin is not None:
            self._consume = self._begin(self, status)

    def on_body(self, body: bytes) -> None:
        """A piece of the body, its chunk framing taken off."""
        if not self._closed:
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
        if self._closed:
            return
        self._closed = True
        self._owner.exchanges.discard(self)
        self._loop.remove_reader(self._door)
        if self._rest:
            self._loop.remove_writer(self._door)
        self._door.close()
        self._parser = self._begin = None  # the parser holds us: without this every request would be a cycle
        if problem is None:
            if not self._end.done():
                self._end.set_result(None)
            return
        for future in (self._head, self._end):
            if not future.done():
                future.set_exception(problem)
                future.exception()  # mark it as seen: the proxy may have been cancelled meanwhile


def _refused(name: str, question: Question, reply: httpx2.Response) -> Error:
    try:
        said = str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = reply.text[:200]
    fault = reply.status_code < 500
    return Error(
        f"{name} refused {question.about}: {said}",
        exit=Exit.CONFIG if fault else Exit.CHILD,
        hint=question.hint if fault else "llmctl logs",
    )


class Upstream:
    """The face of one child. Close it before the child is stopped: llama-server waits for its connections."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.exchanges: set[Exchange] = set()
        self.heard = 0
        """Pieces of replies that came: it moves while the child does."""
        self.doubted = asyncio.Event()
        """Somebody found that it takes no connection: its keeper is to look after it."""
        self.obituary: asyncio.Future[Cause] = asyncio.get_running_loop().create_future()
        """Why it ended; its keeper says so, once."""
        self._closed = False
        self._folder = os.open(child.folder, os.O_PATH | os.O_DIRECTORY)
        # A longer path goes through the folder's descriptor, where it always fits (and costs 5 µs more).
        plain = str(child.folder / SOCKET)
        self._path = plain if len(os.fsencode(plain)) <= SOCKET_PATH_BYTES else f"/proc/self/fd/{self._folder}/{SOCKET}"
        self._slow = httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(uds=self._path), base_url="http://child", timeout=PROBE_S
        )

    def __repr__(self) -> str:
        return f"<Upstream {self.child.name} {len(self.exchanges)} open>"

    def request(self, path: str, body: bytes, begin: Begin | None = None) -> Exchange:
        """POST ``body`` (JSON) to ``path``. Raises :class:`Broken` when the child doesn't take connections."""
        head = f"POST {path} HTTP/1.1\r\nHost: child\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        door: socket.socket | None = None
        try:
            door = socket.socket(socket.AF_UNIX, _DOOR)
            door.connect(self._path)  # a Unix socket connects at once or says why not
            exchange = Exchange(self, door, begin)
            exchange.start(head, body)
        except OSError as exc:
            if door is not None:
                door.close()
            self.doubted.set()
            raise Broken(f"the child takes no connection: {exc.strerror}") from exc
        self.exchanges.add(exchange)
        return exchange

    @property
    def unread(self) -> int:
        """Requests that could bring bytes: those whose clients take some."""
        return sum(not each.is_paused for each in self.exchanges)

    async def fate(self) -> Cause | None:
        """A connection broke: why the child ended, or None when it lives on."""
        if not self._closed:
            await self.ends()
        if self.child.returncode is None and not self._closed and self.refuses():
            self.doubted.set()  # it was told to stop, or its socket is gone: its keeper looks after it
            await asyncio.wait((self.obituary,), timeout=LOOKED_AFTER_S)
        if self._closed or self.child.returncode is not None:
            await asyncio.wait((self.obituary,), timeout=CLASSIFY_S)
        return self.obituary.result() if self.obituary.done() else None

    async def ends(self) -> bool:
        """Whether it ends by itself just now; returns when it has, or when it doesn't."""
        for patience_s in (SETTLE_S, CLASSIFY_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self.child.wait()
            if not self.child.exiting():
                break
        return self.child.returncode is not None

    def bury(self, cause: Cause) -> None:
        """Say why it ended. The first word counts."""
        if not self.obituary.done():
            self.obituary.set_result(cause)

    async def slots(self, patience_s: float) -> progress.Slots | progress.Refused | None:
        """A reading of /slots; None when it doesn't answer in time, as between two batches it does."""
        if self.refuses():
            return progress.Refused()
        try:
            reply = await self._slow.get("/slots", timeout=patience_s)
            return progress.read_slots(reply.json())
        except (httpx2.HTTPError, ValueError):
            return None

    def refuses(self) -> bool:
        """Whether it takes no new connection: its listener is closed, or its socket is gone."""
        try:
            with socket.socket(socket.AF_UNIX, _DOOR) as door:
                door.connect(self._path)
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:  # it has more connections waiting than it takes at once, or we have no descriptor left
            return False
        return False

    async def healthy(self) -> bool:
        """Whether /health says 200; False while it loads or doesn't answer."""
        try:
            return (await self._slow.get("/health")).status_code == 200
        except httpx2.HTTPError:
            return False

    async def ask(self, path: str, body: bytes) -> dict[str, Any] | None:
        """POST ``body`` (JSON) to a route that takes no slot; its answer, or None for a refusal or a child that went away."""
        try:
            reply = await self._slow.post(path, content=body, headers={"Content-Type": "application/json"}, timeout=ASK_S)
            found = reply.json() if reply.status_code == 200 else None
        except (httpx2.HTTPError, RuntimeError, ValueError):  # RuntimeError: it was closed
            return None
        return found if isinstance(found, dict) else None

    async def decodes(self, patience_s: float) -> bool:
        """Whether it decodes one token within this time."""
        body = {"prompt": [_TOKEN], "n_predict": 1, "cache_prompt": False}
        try:
            return (await self._slow.post("/completion", json=body, timeout=patience_s)).status_code < 500
        except httpx2.HTTPError:
            return False

    async def warm_up(self, questions: Iterable[Question]) -> int:
        """Have a fresh child answer these. Returns the context of one slot, in tokens.

        Raises :class:`Error` when the child refuses one, with exit code 3 where the question is at fault and asking again is no use,
        else 8; and :class:`httpx2.HTTPError` when it goes away.
        """
        for question in questions:
            reply = await self._slow.post(question.path, json=question.body, timeout=None)
            if reply.status_code != 200:
                raise _refused(self.child.name, question, reply)
        props = await self._slow.get("/props")
        try:
            return int(props.json()["default_generation_settings"]["n_ctx"])
        except (ValueError, KeyError, TypeError) as exc:
            said = f"{self.child.name} doesn't say its context ({props.status_code}): {props.text[:200]}"
            raise Error(said, exit=Exit.CHILD, hint="llmctl logs") from exc

    async def close(self) -> None:
        """Cut every exchange and let go of the socket. Twice is harmless."""
        self._closed = True
        for exchange in list(self.exchanges):
            exchange.abort("its process ended")
        try:
            await self._slow.aclose()
        finally:
            if self._folder >= 0:
                os.close(self._folder)
                self._folder = -1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
