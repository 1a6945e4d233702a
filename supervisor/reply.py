"""How an answer goes back to a client: streamed, assembled or passed whole; and the shape of everything that is no answer.

Upstream is always asked to stream, because llama-server notices that an unstreamed client has left only at the end; for a client that
asked for one reply it is assembled. A stream's bytes reach the client as they came.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from starlette.types import Send

from supervisor import assemble, sse
from supervisor.connection import Connection
from supervisor.errors import Error
from supervisor.ledger import Row
from supervisor.meter import Meter, Reading, json_object, reading
from supervisor.units import MIB
from supervisor.upstream import Broken, Consume, Exchange

log = logging.getLogger("llmctl.reply")

REPLY_LIMIT: Final = 64 * MIB
"""An unstreamed reply that has to be held whole (logprobs of a long answer)."""

_STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx in front holds events back otherwise
)


class Reply(ABC):
    """How one request's answer goes back; a kind of answer is a subclass."""

    def __init__(self, client: Connection, send: Send, row: Row) -> None:
        self.client = client
        self.send = send
        self.row = row
        self.meter = Meter()
        self.begun = False
        """The client has had the head of an answer: an error can only be an event now, or a cut."""

    async def forward(self, exchange: Exchange) -> None:
        """Take the engine's reply to the client and set the row's status. Raises :class:`Broken` when the child goes away."""
        status = await exchange.head()
        if status == 200:
            await self._take(exchange)
        else:
            await self._refused(exchange, status)

    @abstractmethod
    async def _take(self, exchange: Exchange) -> None:
        """Take the body of a reply of status 200."""

    def measure(self) -> Reading:
        """What the answer was made of. The ledger's thread asks for it, since it parses JSON."""
        return self.meter.read()

    def asked(self, body: bytes) -> bytes:
        """The body to send upstream for this kind of answer."""
        return body

    def begin(self, exchange: Exchange, status: int) -> Consume | None:
        """What takes the body from the first byte on; None to hold it until :meth:`forward` asks for it."""
        return None

    def fail(self, problem: Error) -> None:
        """The answer won't be whole. Raises ``problem`` if none of it was sent yet; else it becomes an event, and the connection is cut."""
        log.warning("%s: %s", self.row.id, problem.message)
        if not self.begun:
            raise problem
        if not self.client.gone:
            # The error event, and then no final chunk: returning without one makes uvicorn cut the connection.
            cut = b"\n\n" if self.meter.mid_event else b""
            self.client.write_chunk(cut + sse.error_event(envelope(problem)["error"]))

    async def _refused(self, exchange: Exchange, status: int) -> None:
        """Pass the engine's own refusal on, with its source."""
        raw = await _whole(exchange)
        self.row.status = "error"
        await respond(self.send, status, _with_source(raw, status))


class Streamed(Reply):
    """Events to a client that asked for them, byte for byte."""

    def begin(self, exchange: Exchange, status: int) -> Consume | None:
        """Begin the answer in the very turn of the loop that brought the engine's."""
        if status != 200:
            return None
        self.client.begin_chunked(_STREAM_HEADERS, exchange)
        self.begun = True
        write, feed = self.client.write_chunk, self.meter.feed

        def pass_on(data: bytes) -> None:
            write(data)
            feed(data)

        return pass_on

    async def _take(self, exchange: Exchange) -> None:
        self.client.flush_head()
        await exchange.ended()
        if self.meter.failed:
            self.row.status = "error"  # its event has passed; no clean end follows it
            return
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})
        self.row.status = "ok"


class _Assembled(Reply):
    """One reply, put together from the engine's events."""

    route: ClassVar[assemble.Route]

    def asked(self, body: bytes) -> bytes:
        return assemble.request_body(body)

    async def _take(self, exchange: Exchange) -> None:
        parser, assembler = sse.Parser(), assemble.Assembler(self.route)
        problem: Error | None = None

        def take(data: bytes) -> None:
            nonlocal problem
            self.meter.feed(data)
            try:
                for payload in parser.feed(data):
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
            self.row.status = "error"
            await respond(self.send, _status_of(assembler.error), {"error": assembler.error | {"source": "engine"}})
            return
        await respond(self.send, 200, assembler.result())
        self.row.status = "ok"


class AssembledChat(_Assembled):
    """A chat's reply."""

    route = "/v1/chat/completions"


class AssembledText(_Assembled):
    """A text completion's reply."""

    route = "/v1/completions"


class Passed(Reply):
    """A reply that can't be assembled: the engine's own, held whole and passed as it is."""

    _raw = b""

    async def _take(self, exchange: Exchange) -> None:
        self._raw = await _whole(exchange)
        await respond(self.send, 200, self._raw)
        self.row.status = "ok"

    def measure(self) -> Reading:
        """An unstreamed body is one telling event."""
        found = json_object(self._raw)
        return reading([found] if found is not None else [], sent_bytes=len(self._raw))


async def respond(send: Send, status: int, content: bytes | Mapping[str, object]) -> None:
    """Send a whole JSON reply."""
    if isinstance(content, bytes):
        body = content
    else:
        body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def refuse(client: Connection, send: Send, error: Error) -> None:
    """Send an error of ours."""
    client.forget_body()
    await respond(send, error.status, envelope(error))


def envelope(error: Error) -> dict[str, Any]:
    """OpenAI's error body, with who speaks and what to try."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    inside = {"message": error.message, "type": kind, "param": None, "code": error.code, "source": "llmctl"}
    return {"error": inside | ({"try": error.hint} if error.hint else {})}


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


def _status_of(inside: dict[str, Any]) -> int:
    code = inside.get("code")
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _with_source(raw: bytes, status: int) -> dict[str, Any]:
    """The engine's error body in our envelope; one that is no JSON becomes its message."""
    inside = (json_object(raw) or {}).get("error")
    if not isinstance(inside, dict):
        inside = {
            "message": raw.decode(errors="replace")[:500] or f"the engine said {status}",
            "type": "server_error",
            "code": status,
        }
    return {"error": inside | {"source": "engine"}}


Kind = type[Reply]
