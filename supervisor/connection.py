"""One client's connection: uvicorn's HTTP/1.1 protocol, plus what a proxy needs of it.

What is added, and why it must be here: ASGI's ``send`` never says that the client has left, its ``receive`` hides it behind a
pipelined request, and both cost a task switch per chunk. So a request's task is cancelled when its connection is lost; the body of a
stream is written to the transport directly; the client's full buffer pauses whatever feeds it; heads are limited in size and time.

uvicorn's internals are used on purpose, its version range is pinned, and ``tests/test_connection.py`` is the contract on them.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Iterable
from email.utils import formatdate
from time import time
from typing import Any, Final, Protocol

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from supervisor.gate import whereabouts
from supervisor.units import KIB

KEY: Final = "llmctl.connection"
"""Where a request's ASGI scope holds its :class:`Connection`."""
HEAD_LIMIT: Final = 32 * KIB
HEAD_S: Final = 10.0
KEEP_ALIVE_S: Final = 75
"""nginx's default: longer than what clients' pools keep, so that they close first and no request meets a closing connection."""


class Source(Protocol):
    """What feeds a client and can be told to wait."""

    def pause(self) -> None:
        """The client can't take more."""

    def resume(self) -> None:
        """It can again."""

    def abort(self) -> None:
        """It has left."""


class Connection(HttpToolsProtocol):
    """A client's connection. The proxy gets it from the scope under :data:`KEY`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        turn_away: Callable[[str, str], None] = lambda code, client: None,
    ) -> None:
        """``turn_away`` counts a request that can't even be read, by a code and where its client is."""
        super().__init__(config, server_state, app_state, _loop)
        self._turn_away = turn_away
        self.source: Source | None = None
        """What feeds the reply; paused while the client's buffer is full."""
        self.gone = False
        """The client has left."""
        self.was_cut = False
        """llmctl has ended its request."""
        self._stalled: tuple[float, int] | None = None
        """While the client's buffer is full: when it took something last, and the bytes that waited then."""
        self._task: asyncio.Task[None] | None = None
        self._unsent_head = b""
        self._head_bytes = self._unparsed_bytes = 0
        self._in_head = False
        self._plain_left = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Connection {self.client} {'gone' if self.gone else 'open'}>"

    @property
    def whereabouts(self) -> str | None:
        """Where the client is (:func:`~supervisor.gate.whereabouts`)."""
        return whereabouts(self.client[0]) if self.client else None

    def whole_body(self) -> bytes | None:
        """The request's body if all of it is here already, as it mostly is; spares the waiting for it."""
        cycle = self.cycle
        if cycle.more_body:
            return None
        self.watch()
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    def watch(self) -> None:
        """Read on, now that the body is here: uvicorn stops at 64 KiB of it, and a client's leaving would never be seen."""
        self.flow.resume_reading()

    def cut(self) -> None:
        """End the request in work, because llmctl stops: its task learns it as a cancellation with :attr:`was_cut` set."""
        self.was_cut = True
        self._cancel("llmctl stops")

    def forget_body(self) -> None:
        """Close after this reply if the request's body isn't whole: what comes of it would be taken for the next request."""
        if self.cycle.more_body:
            self.cycle.keep_alive = False

    def begin_chunked(self, headers: Iterable[tuple[bytes, bytes]], source: Source | None = None) -> None:
        """Begin a reply of status 200 without a length, fed by ``source``, which may be known later (:meth:`feed_from`).

        Its head goes out with the first chunk, or with :meth:`flush_head`. The end goes through ASGI's ``send`` again, an empty body; a
        reply that may not end well just returns.
        """
        cycle = self.cycle
        assert not cycle.response_started
        cycle.response_started = cycle.chunked_encoding = True
        lines = [b"%b: %b\r\n" % pair for pair in (*self.server_state.default_headers, *headers)]
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        self._unsent_head = b"".join((STATUS_LINE[200], *lines, b"transfer-encoding: chunked\r\n\r\n"))
        if source is not None:
            self.feed_from(source)

    def feed_from(self, source: Source) -> None:
        """From here on ``source`` feeds the reply, and is told to wait while the client can't take more."""
        self.source = source
        if self.flow.write_paused:
            source.pause()

    def stalled_s(self, now_s: float) -> float:
        """For how long the client has taken no byte although some wait for it; a buffer that isn't full counts as taken."""
        if self._stalled is None:
            return 0.0
        since_s, waited = self._stalled
        waits = self.transport.get_write_buffer_size()
        if waits < waited:
            since_s = now_s
        self._stalled = since_s, waits
        return now_s - since_s

    def give_up(self) -> None:
        """Close at once: who doesn't read can't be told why."""
        self.transport.abort()

    def flush_head(self) -> None:
        """Send the head that waits for its first chunk, if it still does."""
        if self._unsent_head:
            head, self._unsent_head = self._unsent_head, b""
            self.transport.write(head)

    def write_chunk(self, data: bytes) -> None:
        """Write a piece of a body that was begun without a length. Not awaited: back-pressure goes through ``source``."""
        if self._unsent_head:
            head, self._unsent_head = self._unsent_head, b""
            self.transport.write(b"%b%x\r\n%b\r\n" % (head, len(data), data))
        else:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the loop."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left, or we closed: its request, if one is in work, is cancelled."""
        self.gone = True
        if self.source is not None:
            self.source.abort()  # now, and not when the cancelled task runs: a closed transport takes no chunk
        self._head_is_in()
        super().connection_lost(exc)
        self._cancel("the client has left")

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        self._unset_keepalive_if_required()
        try:
            if self._plain_left:
                self._take_plain(data)
            else:
                self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            # Java's HttpClient offers h2c with every request. We don't take it, so what follows is this request's body, as if not asked.
            self._take_plain(data[exc.args[0] :])
        except httptools.HttpParserError:
            self._refuse(400, "this is not HTTP/1.1", "bad_http")
            return
        if self.transport.is_closing():
            return
        if self._in_head:
            # The parser tells of a header when it is whole: one that never ends is only seen here.
            self._unparsed_bytes += len(data)
            if self._unparsed_bytes > HEAD_LIMIT:
                self._refuse_head()
            elif self._head_timer is None:
                self._await_head()
        elif self.cycle is not None and self.cycle.response_complete and self.timeout_keep_alive_task is None:
            # What came was no request (a blank line, the rest of a refused body): the connection is as idle as before.
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _take_plain(self, data: bytes) -> None:
        """Body bytes of a request whose upgrade we don't take: the parser has stopped, so their length is ours to count."""
        piece = data[: self._plain_left]
        self._plain_left -= len(piece)
        if piece:
            self.on_body(piece)
        if not self._plain_left:
            self.on_message_complete()

    def pause_writing(self) -> None:
        """The client's buffer is full."""
        super().pause_writing()
        self._stalled = self.loop.time(), self.transport.get_write_buffer_size()
        if self.source is not None:
            self.source.pause()

    def resume_writing(self) -> None:
        """It has room again."""
        super().resume_writing()
        self._stalled = None
        if self.source is not None:
            self.source.resume()

    # httptools callbacks

    def on_message_begin(self) -> None:
        """A request begins. One that comes before the last was answered closes the connection: it would hide the client's leaving."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
        super().on_message_begin()
        self._head_bytes = self._unparsed_bytes = 0
        self._in_head = True
        self.scope[KEY] = self  # type: ignore[typeddict-unknown-key]

    def on_url(self, url: bytes) -> None:
        """A piece of the request's target."""
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        super().on_header(name, value)
        self._count_head(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        """The head is whole: the request's task starts, unless it is being refused."""
        self._in_head = False
        self._head_is_in()
        if self.transport.is_closing():
            return
        self._renew_date()
        super().on_headers_complete()
        if self.parser.should_upgrade():
            length = dict(self.headers).get(b"content-length", b"0")
            self._plain_left = int(length) if length.isdigit() else 0
            self.cycle.keep_alive = False  # the parser is at its end

    def on_message_complete(self) -> None:
        """The request is whole; a parser that stopped at an offer to upgrade says so before the body."""
        if not self._plain_left:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """The reply is written."""
        self.source = None
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._task = task = self.loop.create_task(cycle.run_asgi(app), name="request")  # in server_state.tasks, drained by serve
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _cancel(self, why: str) -> None:
        """End the request's task; one that came in this very turn of the loop begins first, so that it has a record."""
        task = self._task
        if task is None or task.done():
            return
        if inspect.getcoroutinestate(task.get_coro()) == inspect.CORO_CREATED:  # type: ignore[arg-type]
            self.loop.call_soon(task.cancel, why)
        else:
            task.cancel(why)

    def _count_head(self, count: int) -> None:
        self._head_bytes += count
        if self._head_bytes > HEAD_LIMIT and not self.transport.is_closing():
            self._refuse_head()

    def _refuse_head(self) -> None:
        self._refuse(431, f"a request's head may have {HEAD_LIMIT} bytes", "head_too_large")

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._refuse, 408, f"a request's head must be here within {HEAD_S:.0f} s")

    def _head_is_in(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, message: str, code: str = "") -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if code:  # a connection on which nothing came was no request
            self._turn_away(code, self.whereabouts or "unknown")
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": status, "source": "llmctl"}
        body = json.dumps({"error": error}).encode()
        length = str(len(body)).encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
        self.transport.write(b"".join((STATUS_LINE[status], head, length, b"\r\n\r\n", body)))
        self.transport.close()

    def _renew_date(self) -> None:
        """The Date header, made once a second and only while requests come: an idle llmctl wakes for nothing."""
        now = int(time())
        if self.server_state.__dict__.get("dated") != now:
            self.server_state.__dict__["dated"] = now
            self.server_state.default_headers = [(b"date", formatdate(now, usegmt=True).encode())]
