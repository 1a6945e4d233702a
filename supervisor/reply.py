"""How an answer goes back to a client: streamed, assembled or passed whole; and the shape of everything that is no answer.

Upstream is always asked to stream, because llama-server notices that an unstreamed client has left only at the end; for a client that
asked for one reply it is assembled. A stream's bytes reach the client as they came; one head that the engine leaves out is put before them.

A streamed answer that waits can be kept alive: the client then has a head of status 200 and comments, which are no answer. From there on
a failure, the engine's refusal too, is its API's error event and a connection that is cut, never a clean end.
"""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Final

from starlette.types import Send

from supervisor import fault, messages, meter, sse
from supervisor.ask import Ask, fields
from supervisor.assemble import Assembler, must_pass_unstreamed, request_body
from supervisor.choices import Chat, Text
from supervisor.connection import Connection
from supervisor.errors import Error
from supervisor.fault import Fault
from supervisor.messages import Messages
from supervisor.meter import Meter, Reading
from supervisor.native import Native
from supervisor.responses import Responses
from supervisor.routes import Api, Route, is_anthropic
from supervisor.row import Row
from supervisor.units import MIB
from supervisor.upstream import Broken, Consume, Exchange

log = logging.getLogger("llmctl.reply")

REPLY_LIMIT: Final = 64 * MIB
"""An unstreamed reply that has to be held whole (logprobs of a long answer)."""

REQUEST_ID: Final = b"x-request-id"
ENGINE_ERROR: Final = "engine_500"
"""The code in the record of an error event that passed as it came."""

_STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx in front holds events back otherwise
)

ASSEMBLERS: Final[Mapping[Api, type[Assembler]]] = {
    Api.CHAT: Chat,
    Api.TEXT: Text,
    Api.RESPONSES: Responses,
    Api.ANTHROPIC: Messages,
    Api.NATIVE: Native,
}

Headers = tuple[tuple[bytes, bytes], ...]


class Reply(ABC):
    """How one request's answer goes back; a kind of answer is a subclass."""

    def __init__(self, client: Connection, send: Send, row: Row, route: Route, *, sequences: int = 1) -> None:
        """``sequences`` are decoded for it."""
        self.client = client
        self.send = send
        self.row = row
        self.route = route
        self.headers: Headers = request_id(row)
        """Of ours, on whatever the client gets."""
        self.model: str | None = None
        """The preset's name, for a reply whose head the engine leaves out."""
        self.sequences = sequences
        self.meter = Meter(route.api, sequences=sequences)
        self.begun = False
        """The client has had the head of an answer, perhaps only comments: an error can only be an event now, or a cut."""
        self.exchanging = False
        """An engine has it."""
        self.answered = False
        """A byte of the engine's answer went to the client: the request can't be put to the engine again."""

    async def forward(self, exchange: Exchange) -> None:
        """Take the engine's reply to the client and set the row's status. Raises :class:`Broken` when the child goes away."""
        status = await exchange.head()
        if status == 200:
            await self._take(exchange)
            return
        await self._refuse(fault.of_reply(await _whole(exchange), status))

    @abstractmethod
    async def _take(self, exchange: Exchange) -> None:
        """Take the body of a reply of status 200."""

    def measure(self) -> Reading:
        """What the answer was made of. The ledger's thread asks for it, since it parses JSON."""
        return self.meter.read()

    def waste(self) -> None:
        """What the engine made of it so far is not delivered: it is made again, or never."""
        self.row.wasted_tokens += self.meter.events
        self.meter = Meter(self.route.api, sequences=self.sequences)

    def asked(self, body: bytes) -> bytes:
        """The body to send upstream for this kind of answer."""
        return body

    def begin(self, exchange: Exchange, status: int) -> Consume | None:
        """What takes the body from the first byte on; None to hold it until :meth:`forward` asks for it."""
        return None

    def keep_alive(self) -> None:
        """Tell a client that waits for a stream that it isn't forgotten. Nothing for other kinds: their head says how it went."""
        return

    def fail(self, problem: Error) -> None:
        """The answer won't be whole. Raises ``problem`` if no head went out yet; else it becomes an event, and the connection is cut."""
        # What a client did wrong, or is refused for the time being, is in its answer and its record: a flood of it isn't one in the log.
        log.log(logging.WARNING if problem.status in (500, 502) else logging.DEBUG, "%s", problem.message)
        self.row.error = problem.code
        if not self.begun:
            raise problem
        self._cut(fault.of(problem))

    def _mended(self, first: bytes) -> bytes:
        """The first bytes of a stream, and before them what the engine leaves out (see ``messages``)."""
        lacks = self.route.api is Api.ANTHROPIC and messages.lacks_head(first)
        return messages.head(self.row.id, self.model) + first if lacks else first

    async def _refuse(self, said: Fault) -> None:
        """Hand the engine's refusal on, in the way that is still open."""
        self.row.status, self.row.error = "error", error_code(said)
        if self.begun:
            self._cut(said)
        else:
            await self._respond(said.status, said.body(self.route.path))

    def _cut(self, said: Fault) -> None:
        """The end of an answer that is on its way. A whole one just lacks its rest, which makes uvicorn cut the connection."""
        return

    async def _respond(self, status: int, content: bytes | Mapping[str, object] | list[Any]) -> None:
        """Send a whole JSON reply with our headers."""
        self.begun = True
        self.answered = self.answered or status == 200
        self.row.http_status = status
        await respond(self.send, status, content, self.headers)


class Streamed(Reply):
    """Events to a client that asked for them, byte for byte."""

    def begin(self, exchange: Exchange, status: int) -> Consume | None:
        """Begin the answer in the very turn of the loop that brought the engine's."""
        if status != 200:
            return None
        if self.begun:
            self.client.feed_from(exchange)
        else:
            self._begin(exchange)
        write, feed = self.client.write_chunk, self.meter.feed
        pass_on = self.meter.passing(write, time.monotonic)

        def pass_first(data: bytes) -> None:
            self.answered = True
            exchange.pipe(pass_on)
            write(self._mended(data))
            feed(data, time.monotonic())

        return pass_first

    def keep_alive(self) -> None:
        """The head, if it isn't out yet, and a comment."""
        if self.client.gone:
            return
        if not self.begun:
            self._begin(None)
        self.client.write_chunk(sse.comment())

    def _begin(self, source: Exchange | None) -> None:
        self.client.begin_chunked((*_STREAM_HEADERS, *self.headers), source)
        self.begun = True
        self.row.http_status = 200

    async def _take(self, exchange: Exchange) -> None:
        self.client.flush_head()
        await exchange.ended()
        if self.meter.failed:
            self.row.status, self.row.error = "error", ENGINE_ERROR  # its event has passed; no clean end follows it
            return
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})
        self.row.status = "ok"

    def _cut(self, said: Fault) -> None:
        """The error event, and then no final chunk: returning without one makes uvicorn cut the connection."""
        if self.client.gone:
            return
        name, payload = said.event(self.route.api)
        self.client.write_chunk((b"\n\n" if self.meter.mid_event else b"") + sse.event(payload, name=name))


class Assembled(Reply):
    """One reply, put together from the engine's events."""

    def asked(self, body: bytes) -> bytes:
        """The request as a streaming one."""
        return request_body(self.route.api, body)

    async def _take(self, exchange: Exchange) -> None:
        parser, assembler = sse.Parser(), ASSEMBLERS[self.route.api]()
        problem: Error | None = None

        def take(data: bytes) -> None:
            nonlocal problem
            mended = data if self.meter.sent_bytes else self._mended(data)
            self.meter.feed(data, time.monotonic())
            try:
                for payload in parser.feed(mended):
                    assembler.feed(payload)
            except Error as exc:
                problem = exc
                exchange.abort()

        exchange.pipe(take)
        try:
            await exchange.ended()
        except Broken:
            if problem is not None:
                raise problem from None
            raise
        if assembler.error is not None:
            self.waste()
            await self._refuse(fault.of_event(assembler.error))
            return
        await self._respond(200, assembler.result())
        self.row.status = "ok"


class Passed(Reply):
    """A reply that can't be assembled: the engine's own, held whole and passed as it is."""

    _raw = b""

    async def _take(self, exchange: Exchange) -> None:
        self._raw = await _whole(exchange)
        await self._respond(200, self._raw)
        self.row.status = "ok"

    def measure(self) -> Reading:
        """Read off the body."""
        return meter.whole(self._raw)


def choose(route: Route, ask: Ask, body: bytes) -> type[Reply]:
    """The kind of answer to a request."""
    if route.api is Api.WHOLE:
        return Passed
    if ask.streams:
        return Streamed
    return Passed if must_pass_unstreamed(route.api, fields(body)) else Assembled


async def respond(
    send: Send, status: int, content: bytes | Mapping[str, object] | list[Any], headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Send a whole JSON reply."""
    if isinstance(content, bytes):
        body = content
    else:
        body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    always = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*always, *headers]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def refuse(client: Connection, send: Send, error: Error, path: str, headers: Headers = ()) -> None:
    """Send an error of ours, in the shape of the API that ``path`` is of."""
    client.forget_body()
    await respond(send, error.status, envelope(error, path), (*retry_headers(error), *headers))


def request_id(row: Row) -> Headers:
    """The header by which a client can ask ``llmctl why``: the id that it came with, or ours. Anthropic's SDK has its own name for it."""
    named = (row.client_id or row.id).encode()
    return ((REQUEST_ID, named), (b"request-id", named)) if is_anthropic(row.route) else ((REQUEST_ID, named),)


def error_code(said: Fault) -> str:
    """An error in one word, for the record: llmctl's code, or the status that the engine's stands for. Never the engine's sentence."""
    return said.code if isinstance(said.code, str) else f"engine_{said.status}"


def envelope(error: Error, path: str) -> dict[str, Any]:
    """The error body of the API that ``path`` is of, with who speaks and what to try."""
    return fault.of(error).body(path)


def retry_headers(error: Error) -> Headers:
    """What tells an SDK whether to try again, and when."""
    after = () if error.retry_after_s is None else ((b"retry-after", b"%d" % error.retry_after_s),)
    again = () if error.retry is None else ((b"x-should-retry", b"true" if error.retry else b"false"),)
    return (*after, *again)


async def _whole(exchange: Exchange) -> bytes:
    parts: list[bytes] = []
    held = 0

    def take(data: bytes) -> None:
        nonlocal held
        held += len(data)
        parts.append(data)
        if held > REPLY_LIMIT:
            exchange.abort()

    exchange.pipe(take)
    await exchange.ended()
    return b"".join(parts)
