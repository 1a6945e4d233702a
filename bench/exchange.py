"""One request and its answer, as a client has it: when each piece of text came, and what the server says of its tokens.

It must not be what is measured: an :class:`asyncio.Protocol` on httptools' parser, one JSON parse an event (pydantic's, in Rust), the
time taken before that. Any API that streams JSON events is read: chat and text completions of any server, Responses, Messages,
llama.cpp's own.

Time begins before the connection is made, where one has to be: that is what a client waits for. A connection is used again as long as the
server leaves it open; one that turns out to be closed when it is asked is no error, and the request is put to a new one, its time begun
anew.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, cast
from urllib.parse import urlsplit

import httptools
from pydantic_core import from_json, to_json

from supervisor import meter
from supervisor.meter import Reading

SAID: Final = 200
"""Characters of what a server says is wrong."""
_DATA: Final = b"data:"


@dataclass(slots=True)
class Heard:
    """What came of one request. Times are of ``time.perf_counter``."""

    sent_s: float = 0.0
    status: int | None = None
    error: str | None = None
    id: str | None = None
    first_s: float | None = None
    """When the first text came."""
    output_s: float | None = None
    """When the first text came that is no thought."""
    ended_s: float | None = None
    """When the answer was whole."""
    left: bool = False
    arrivals_s: list[float] = field(default_factory=list)
    """Of each event with text."""
    texts: list[str] = field(default_factory=list)
    """Of each event that is no thought."""
    reading: Reading = field(default_factory=Reading)
    """The server's figures."""

    @property
    def gaps_ms(self) -> tuple[float, ...]:
        """Between events with text."""
        return tuple((after_s - before_s) * 1e3 for before_s, after_s in pairwise(self.arrivals_s))


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    host: str
    port: int
    tls: bool
    prefix: str
    """Of its paths; mostly empty."""
    key: str = field(default="", repr=False)

    @classmethod
    def of(cls, url: str, key: str = "") -> Address:
        """From ``http://host:port`` without ``/v1``."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        return cls(parts.hostname or "", parts.port or (443 if tls else 80), tls, parts.path.rstrip("/"), key)

    def request(self, path: str, body: Mapping[str, object]) -> bytes:
        """The bytes of a request."""
        data = to_json(body)
        host = f"[{self.host}]" if ":" in self.host else self.host
        head = [
            f"POST {self.prefix}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
            "User-Agent: llmctl-bench",
        ]
        head += [f"Authorization: Bearer {self.key}"] if self.key else []
        return "\r\n".join((*head, "", "")).encode() + data


class _Wire(asyncio.Protocol):
    """A connection. It has one answer at a time."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.gone = False
        self.heard = Heard()
        self.done: asyncio.Future[None] = self.loop.create_future()
        self.done.set_result(None)
        self.answered = False
        """Something of the answer has come."""
        self.stays = False
        """The server leaves the connection open."""

    def ask(self, data: bytes, heard: Heard) -> asyncio.Future[None]:
        """Send; what is given is done when the answer is whole, or won't be."""
        self.heard, self.done = heard, self.loop.create_future()
        self.answered = self.stays = False
        self.choice: object = None
        self.parser = httptools.HttpResponseParser(self)
        self.events = False
        self.rest = b""
        self.finals: dict[str, dict[str, Any]] = {}
        self.transport.write(data)
        return self.done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.now_s = time.perf_counter()
        self.answered = True
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._end(f"no HTTP: {exc}")
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        if not self.done.done():
            self._end("the connection was cut" if self.answered else "the connection was closed unanswered")

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"content-type":
                self.events = value.startswith(b"text/event-stream")
            case b"x-request-id":
                self.heard.id = value.decode("latin-1")[:SAID]

    def on_headers_complete(self) -> None:
        self.heard.status = self.parser.get_status_code()
        self.stays = self.parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        data = self.rest + data
        if not self.events:
            self.rest = data
            return
        *whole, self.rest = data.replace(b"\r\n", b"\n").split(b"\n\n") if b"\r" in data else data.split(b"\n\n")
        for event in whole:
            self._take(event)

    def on_message_complete(self) -> None:
        if not self.events:
            self._take_whole(self.rest)
        elif self.rest.strip():
            self._take(self.rest)
        self._end(None)

    def _take(self, event: bytes) -> None:
        """One event of a stream; its data is in one line, as all these servers write it."""
        at = 0 if event.startswith(_DATA) else event.find(b"\n" + _DATA) + 1
        data = event[at + len(_DATA) :].strip() if event.startswith(_DATA, at) else b""
        if not data.startswith(b"{"):  # a comment, [DONE]
            return
        try:
            told = from_json(data)
        except ValueError:
            return
        heard = self.heard
        if told.get("error"):
            heard.error = _said(told)
        text, thought = _text(told)
        if text:
            heard.arrivals_s.append(self.now_s)
            if heard.first_s is None:
                heard.first_s = self.now_s
            if not thought:
                heard.texts.append(text)
                if heard.output_s is None:
                    heard.output_s = self.now_s
        self._keep(told)

    def _keep(self, told: dict[str, Any]) -> None:
        """The last event that tells something, of each kind."""
        choice = (told.get("choices") or [told])[0]
        if not isinstance(choice, dict):
            return
        self.choice = choice.get("index", self.choice)  # an event without one is of the choice whose event came right before it
        if "timings" in told:
            self.finals[f"timings {self.choice}"] = told
        elif choice.get("finish_reason"):
            self.finals[f"finish {self.choice}"] = told
        elif told.get("usage") or "response" in told or "message" in told or "stop_reason" in (told.get("delta") or ()):
            self.finals[f"usage {told.get('type')}"] = told

    def _take_whole(self, data: bytes) -> None:
        try:
            told = from_json(data) if data else {}
        except ValueError:
            told = {}
        if (self.heard.status or 0) >= 400:
            self.heard.error = f"{self.heard.status} {_said(told)}".strip()
        elif isinstance(told, dict):
            self.finals["whole"] = told

    def _end(self, error: str | None) -> None:
        if self.done.done():
            return
        heard = self.heard
        heard.ended_s = time.perf_counter() if error else self.now_s
        heard.error = heard.error or error
        try:
            heard.reading = meter.reading(list(self.finals.values()))
        except (TypeError, AttributeError, ValueError):  # a server that speaks otherwise: what came is known all the same
            heard.reading = Reading()
        self.done.set_result(None)


def _text(told: Mapping[str, Any]) -> tuple[str, bool]:
    """What an event has of the answer, and whether that is a thought."""
    choices = told.get("choices")
    if isinstance(choices, list):
        if not choices or not isinstance(choices[0], dict):
            return "", False
        delta = choices[0].get("delta")
        if not isinstance(delta, dict):
            return choices[0].get("text") or "", False
        if text := delta.get("content"):
            return text, False
        if text := delta.get("reasoning_content") or delta.get("reasoning"):
            return text, True
        return ("call", False) if delta.get("tool_calls") else ("", False)
    kind, delta = str(told.get("type", "")), told.get("delta")
    if isinstance(delta, str):  # Responses
        return delta, "reasoning" in kind
    if isinstance(delta, dict):  # Messages
        thought = delta.get("thinking") or ""
        return delta.get("text") or thought or delta.get("partial_json") or "", bool(thought)
    return (told["content"], False) if isinstance(told.get("content"), str) else ("", False)


def _said(told: object) -> str:
    """A server's error, in a line."""
    error = told.get("error", told) if isinstance(told, dict) else told
    said = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(said or "").split())[:SAID]


class Wires:
    """Connections to one server."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._idle: list[_Wire] = []
        self._tls = ssl.create_default_context() if address.tls else None

    async def exchange(
        self, path: str, body: Mapping[str, object], heard: Heard, *, timeout_s: float, leaves_s: float | None
    ) -> None:
        """Send a request and hear its answer out into ``heard``, which is filled as it comes. Whatever goes wrong is in there.

        ``leaves_s`` after sending the connection is closed, whatever has come. Cancelling closes it, too.
        """
        data = self.address.request(path, body)
        for fresh in (False, True):
            heard.sent_s, heard.error = time.perf_counter(), None
            wire = None if fresh else self._take_idle()
            known = wire is not None
            try:
                async with asyncio.timeout(timeout_s):
                    wire = wire or await self._connect()
                    await _hear(wire, data, heard, leaves_s)
            except TimeoutError:
                heard.error, heard.ended_s = f"no whole answer within {timeout_s:g} s", time.perf_counter()
            except OSError as exc:
                heard.error, heard.ended_s = f"no connection: {exc.strerror or exc}", time.perf_counter()
            finally:
                if wire is not None and not wire.gone:
                    if wire.done.done() and wire.stays and not heard.left:
                        self._idle.append(wire)
                    else:
                        wire.transport.abort()
            if not (known and wire is not None and wire.gone and not wire.answered and not heard.left):
                return

    def _take_idle(self) -> _Wire | None:
        while self._idle:
            if not (wire := self._idle.pop()).gone:
                return wire
        return None

    async def _connect(self) -> _Wire:
        loop = asyncio.get_running_loop()
        _, wire = await loop.create_connection(_Wire, self.address.host, self.address.port, ssl=self._tls)
        return wire

    def close(self) -> None:
        """End what is idle."""
        for wire in self._idle:
            wire.transport.abort()
        self._idle.clear()


async def _hear(wire: _Wire, data: bytes, heard: Heard, leaves_s: float | None) -> None:
    done = wire.ask(data, heard)
    if leaves_s is None:
        await done
        return
    await asyncio.wait((done,), timeout=max(0.0, heard.sent_s + leaves_s - time.perf_counter()))
    if not done.done():
        heard.left = True
        wire.transport.abort()
        await done
        heard.error = None
