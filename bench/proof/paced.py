"""Paced streams and what they cost: the load generator under ``bench/proof/proxy.py``.

It must not be what is measured, so it is one :class:`asyncio.Protocol` per stream on uvloop that counts events and notes the time in
``data_received``, and parses nothing. CPU time of others comes from ``schedstat``, which counts nanoseconds; the 10 ms ticks of
``/proc/PID/stat`` would round a turn away.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

EVENT = b"data: "
END = b"0\r\n\r\n"
OPEN_S = 0.001
"""After opening a connection: its acceptance is over, and isn't timed with the request."""
SETTLE_S = 0.4
"""From the first request until the window opens: all streams run, and what starting them costs is over."""
ANSWER_S = 10.0
"""A request that isn't answered by then breaks the run."""


@dataclass(frozen=True, slots=True)
class Target:
    """Something that streams chat completions: where it listens, and the processes it consists of now."""

    name: str
    address: str | tuple[str, int]
    """A Unix socket's path, or a host and port."""
    pids: Callable[[], Iterable[int]]

    @property
    def closes(self) -> bool:
        """The engine itself, on its Unix socket, closes after every stream, whatever its header promises."""
        return isinstance(self.address, str)

    def __repr__(self) -> str:
        return f"<Target {self.name} {self.address}>"


@dataclass(frozen=True, slots=True)
class Load:
    """So many streams at once, each of so many events a second."""

    streams: int
    rate: int

    def __str__(self) -> str:
        return f"{self.streams} × {self.rate}"

    def window_s(self, chunks: int) -> float:
        """How long it takes until so many events have passed."""
        return chunks / (self.streams * self.rate)


@dataclass(frozen=True, slots=True)
class Cost:
    """One target under one load for one turn."""

    chunks: int
    cpu_us: float
    """Per event, of all processes of the target."""
    client_us: float
    """Per event, of this process."""
    gap_p99_ms: float
    """Of the times between one event and the next of a stream, as the client sees them."""


class Stream(asyncio.Protocol):
    """One request and its streamed reply."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.head = b""
        self.events = 0
        self.gaps: list[float] = []
        self.asked_at = self.last = 0.0
        self.loop = asyncio.get_running_loop()
        self.first: asyncio.Future[float] = self.loop.create_future()
        self.done: asyncio.Future[None] = self.loop.create_future()
        self.gone: asyncio.Future[None] = self.loop.create_future()

    def ask(self, request: bytes) -> None:
        """Send a request; ``first`` becomes the seconds until its first event, ``done`` is set when the reply is whole."""
        if self.first.done():
            self.first, self.done = self.loop.create_future(), self.loop.create_future()
        self.asked_at = time.monotonic()
        self.transport.write(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Note when, count, nothing else. Events that come together are a gap and then none."""
        now = time.monotonic()
        if count := data.count(EVENT):
            self.events += count
            self.gaps.append(now - self.last)
            self.last = now
            if count > 1:
                self.gaps.extend([0.0] * (count - 1))
            if not self.first.done():
                self.first.set_result(now - self.asked_at)
        elif not self.events:
            self.head += data
        if data.endswith(END) and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the waits; a stream that ended before its first event has failed, and its head says how."""
        if not self.first.done():
            self.first.set_exception(RuntimeError(f"no event, but: {self.head[:300].decode(errors='replace')!r}"))
        for future in (self.done, self.gone):
            if not future.done():
                future.set_result(None)

    async def close(self) -> None:
        """Leave, and wait until the socket is closed."""
        self.transport.abort()
        await self.gone


async def connect(target: Target) -> Stream:
    """A connection on which nothing was asked yet."""
    loop = asyncio.get_running_loop()
    if isinstance(target.address, str):
        _, stream = await loop.create_unix_connection(Stream, target.address)
    else:
        _, stream = await loop.create_connection(Stream, *target.address)
    return stream


def request(model: str, *, pace_s: float = 0.0, tokens: int = 1) -> bytes:
    """A streamed chat request. Its field ``fake`` sets the fake engine's pace; everyone in between passes it on."""
    fake = {"pace_s": pace_s, "tokens": tokens}
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "Go on."}], "stream": True, "fake": fake}
    ).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    return head.format(len(body)).encode() + body


async def first_bytes(target: Target, request_bytes: bytes, at_once: int, rounds: int) -> list[float]:
    """Seconds from sending a request to its first event, of ``rounds`` times ``at_once`` simultaneous ones.

    They go over open connections, each used again unless the target closes it, and every reply is read to its end before the next round.
    """
    streams: list[Stream] = []
    waits = []
    try:
        for _ in range(rounds):
            streams = [stream for stream in streams if not stream.gone.done()]
            if len(streams) < at_once:
                streams += [await connect(target) for _ in range(at_once - len(streams))]
                await asyncio.sleep(OPEN_S)
            for stream in streams:
                stream.ask(request_bytes)
            async with asyncio.timeout(ANSWER_S):
                for stream in streams:
                    waits.append(await stream.first)
                    await (stream.gone if target.closes else stream.done)
    finally:
        for stream in streams:
            await stream.close()
    return waits


async def measure(target: Target, load: Load, model: str, chunks: int) -> Cost:
    """Run a load until about ``chunks`` events have passed. Streams start evenly over one pace, so they aren't in step."""
    pace_s = 1 / load.rate
    streams = [await connect(target) for _ in range(load.streams)]
    started = time.monotonic()
    for number, stream in enumerate(streams):
        await asyncio.sleep(started + number * pace_s / load.streams - time.monotonic())
        stream.ask(request(model, pace_s=pace_s, tokens=1_000_000))
    try:
        async with asyncio.timeout(ANSWER_S):
            for stream in streams:
                await stream.first
        await asyncio.sleep(started + SETTLE_S - time.monotonic())
        for stream in streams:
            stream.gaps.clear()
        pids = list(target.pids())
        before, events, client = cpu_s(pids), sum(stream.events for stream in streams), time.process_time()
        await asyncio.sleep(load.window_s(chunks))
        spent, passed, client = (
            cpu_s(pids) - before,
            sum(stream.events for stream in streams) - events,
            time.process_time() - client,
        )
        gaps = [gap for stream in streams for gap in stream.gaps]
        if any(stream.gone.done() for stream in streams):
            raise RuntimeError(f"{target.name} dropped a stream under {load}")
    finally:
        for stream in streams:
            await stream.close()
    return Cost(passed, spent / passed * 1e6, client / passed * 1e6, quantile(gaps, 0.99) * 1e3)


def cpu_s(pids: Iterable[int]) -> float:
    """Seconds of CPU that all threads of these processes have used."""
    total_ns = 0
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            total_ns += int((thread / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def quantile(values: Sequence[float], at: float) -> float:
    """The value that a share ``at`` of the values doesn't exceed."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * at), len(ordered) - 1)]
