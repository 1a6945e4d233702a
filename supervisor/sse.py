"""Server-sent events: bytes in, one payload per event out; and the few events the front door writes itself.

A parser is fed what the network gives, cut anywhere, and hands back the ``data`` of every event that is complete. Lines end in LF
or CRLF (a bare CR, which the standard also allows, is written by nobody and read as data here). ``event``, ``id`` and ``retry`` lines
and comments are read over: every payload of the engine's says in its JSON what it is (an error of Anthropic's route by having a code).

Every byte is looked at once and copied twice at most, however it was cut: what is no whole line yet waits in one buffer with the place
from which to look on. An event larger than the limit is an error and not a growing buffer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from supervisor.errors import Error, Exit
from supervisor.units import MIB

MAX_EVENT_BYTES = 16 * MIB
"""The largest event seen is a final ``/v1/completions`` chunk with ``verbose``, which repeats the prompt: bounded by the context."""


class Parser:
    """The reader of one stream. After it raised it is of no more use."""

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._buffer = bytearray()  # the line that has no end yet
        self._scanned = 0  # how much of it is known to hold no line end
        self._data: list[bytes] = []  # data lines of the event that has no end yet
        self._data_bytes = 0

    def __repr__(self) -> str:
        return f"<sse.Parser {len(self._data)} lines, {self._data_bytes + len(self._buffer)} bytes of an open event>"

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes; return the payloads of the events they complete, oldest first.

        Raises :class:`Error` for an event above the limit.
        """
        buffer = self._buffer
        buffer += chunk
        events: list[bytes] = []
        start = 0
        end = buffer.find(b"\n", self._scanned)
        while end >= 0:
            stop = end - 1 if end > start and buffer[end - 1] == 0x0D else end
            if stop > start:
                self._line(bytes(memoryview(buffer)[start:stop]))
            elif self._data:
                events.append(self._dispatch())
            start = end + 1
            end = buffer.find(b"\n", start)
        if start:
            del buffer[:start]
        self._scanned = len(buffer)
        self._check(self._data_bytes + self._scanned)
        return events

    def _line(self, line: bytes) -> None:
        if not line.startswith(b"data"):
            return
        if line.startswith(b"data: "):
            value = line[6:]
        elif line.startswith(b"data:"):
            value = line[5:]
        elif line == b"data":
            value = b""
        else:
            return
        self._data.append(value)
        self._data_bytes += len(value) + 1
        self._check(self._data_bytes)

    def _dispatch(self) -> bytes:
        payload = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
        self._data.clear()
        self._data_bytes = 0
        return payload

    def _check(self, event_bytes: int) -> None:
        if event_bytes > self._max_event_bytes:
            raise Error(
                f"the engine sent an event of more than {self._max_event_bytes} bytes ({event_bytes} so far)",
                exit=Exit.CHILD,
                status=502,
                code="upstream_event_too_large",
            )


def comment(text: str = "") -> bytes:
    """Bytes that keep a waiting client's connection alive and that no client takes for an answer. ``text`` is one line."""
    assert "\n" not in text
    assert "\r" not in text
    return f": {text}\n\n".encode() if text else b":\n\n"


def event(payload: Mapping[str, object], *, name: str = "") -> bytes:
    """One event with JSON in it. ``name`` fills the ``event:`` line that Anthropic's and the Responses routes have."""
    data = json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n" if name else b"data: " + data + b"\n\n"
