"""One request and its answer as a client sees them, with the times: the load generator under ``bench/proof/door.py``.

A connection each, an :class:`asyncio.Protocol` that parses the framing and nothing else, so that thousands of requests cost the machine
little beside what is measured.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import httptools

LONGEST_S: Final = 120.0
"""A request without an answer by then breaks the run."""
EVENT: Final = b"data: "
LEAVE_S: Final = 0.02
"""A client that leaves before any answer does so after this: its request is out."""

Address = str | tuple[str, int]
"""A Unix socket's path, or a host and port."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. Times are CLOCK_MONOTONIC's, in seconds."""

    status: int
    """0 where the connection ended before a head came, or the client had left by then."""
    body: bytes
    whole: bool
    """It ended as HTTP says it should. A stream that was broken off didn't."""
    asked_s: float
    first_s: float
    """Its first event, or first byte where there are no events; comments don't count."""
    ended_s: float
    left: bool = False
    """Its client went before it had ended."""

    @property
    def waited_s(self) -> float:
        """From the request to the first of the answer."""
        return self.first_s - self.asked_s

    @property
    def took_s(self) -> float:
        """From the first of the answer to its last."""
        return self.ended_s - self.first_s

    @property
    def ok(self) -> bool:
        """A whole answer, and none of an error."""
        return self.status == 200 and self.whole


class _Client(asyncio.Protocol):
    """Sends one request, takes its answer, closes."""

    transport: asyncio.Transport

    def __init__(self, request: bytes, leave_after: int | None, leave_s: float | None, event: bytes) -> None:
        self.request, self.leave_after, self.leave_s, self.event = request, leave_after, leave_s, event
        self.parser: Any = httptools.HttpResponseParser(self)
        self.status, self.body, self.whole, self.events = 0, bytearray(), False, 0
        self.streams = self.left = False
        self.asked_s = self.first_s = 0.0
        self.ended: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.asked_s = time.monotonic()
        self.transport.write(self.request)
        leave_s = LEAVE_S if self.leave_after == 0 else self.leave_s
        if leave_s is not None:
            asyncio.get_running_loop().call_later(leave_s, self.leave)

    def leave(self) -> None:
        """Go, unless the answer has ended."""
        if not (self.whole or self.ended.done()):
            self.left = True
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.streams = self.streams or (name.lower() == b"content-type" and value.startswith(b"text/event-stream"))

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        seen = max(0, len(self.body) - len(self.event) + 1)  # a piece may end inside the word that is counted
        self.body += body
        if self.streams:
            self.events += self.body.count(self.event, seen)
        if not self.first_s and (self.events or not self.streams):
            self.first_s = time.monotonic()
        if self.leave_after is not None and self.events >= self.leave_after:
            self.leave()

    def on_message_complete(self) -> None:
        self.whole = True
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            now_s = time.monotonic()
            times_s = (self.asked_s, self.first_s or now_s, now_s)
            self.ended.set_result(Answer(self.status, bytes(self.body), self.whole, *times_s, self.left))


async def visit(
    address: Address,
    path: str,
    body: Mapping[str, object] | bytes | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    leave_after: int | None = None,
    leave_s: float | None = None,
    event: bytes = EVENT,
    longest_s: float = LONGEST_S,
) -> Answer:
    """Send one request, GET where there is no ``body``.

    With ``leave_after`` the client goes after so many events (``event`` is what each of them has), with ``leave_s`` after so long,
    whatever has come by then.
    Raises TimeoutError when it takes longer than ``longest_s``, OSError when nobody listens.
    """
    sent = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(sent)}"]
    lines += ["Content-Type: application/json"] if body is not None else []
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    request = "\r\n".join((*lines, "", "")).encode() + sent
    loop = asyncio.get_running_loop()

    def client() -> _Client:
        return _Client(request, leave_after, leave_s, event)

    if isinstance(address, str):
        transport, protocol = await loop.create_unix_connection(client, address)
    else:
        transport, protocol = await loop.create_connection(client, *address)
    try:
        return await asyncio.wait_for(protocol.ended, longest_s)
    finally:
        transport.abort()


def chat(model: str, said: str = "Tell me a story.", **fields: object) -> dict[str, object]:
    """The body of a streamed chat."""
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": said}], **fields}
