"""llmctl's own routes: is it well, what can it serve, what runs, and what is to run. They name presets, never a path or a flag."""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from supervisor import __version__, live, openapi, routing, sse
from supervisor.arbiter import Arbiter
from supervisor.errors import Error, Exit
from supervisor.ledger import Ledger
from supervisor.lifecycle import State
from supervisor.metrics import Live, Metrics
from supervisor.preset import Preset
from supervisor.proxy import Proxy
from supervisor.row import Row
from supervisor.units import KIB, MIB

EVENTS_KEPT: Final = 256
"""For a reader of events that doesn't keep up; then the oldest are left out."""
TEXTS_KEPT_BYTES: Final = 64 * MIB
"""Of bodies, for one who listens and doesn't keep up; then the newest are left out, and how many is told."""
BEAT_S: Final = 15.0
"""A comment as often as this while nothing happens, so that a reader's leaving is noticed."""
BODY_LIMIT: Final = 4 * KIB


class Control:
    """The routes' functions. ``token`` is the run folder's, so that only its owner uses ``/llmctl/…``."""

    def __init__(
        self,
        arbiter: Arbiter,
        ledger: Ledger,
        proxy: Proxy,
        metrics: Metrics,
        *,
        engine: str,
        address: str,
        token: str,
    ) -> None:
        self._arbiter = arbiter
        self._ledger = ledger
        self._proxy = proxy
        self._metrics = metrics
        self._engine = engine
        self._address = address
        self._token = token
        self._since = int(time.time())
        self._enders: set[Callable[[], None]] = set()
        """What ends each stream of events and of texts."""

    async def health(self, _: Request) -> Response:
        """200 when what ``up`` was given can answer or be started, else 503 and the states."""
        wards = self._arbiter.wards.values()
        states = {ward.name: ward.state.value for ward in wards}
        ordered = [ward for ward in wards if ward.ordered]  # not what some client asked for
        sick = any(
            ward.state in (State.FAILED, State.BACKOFF) or ward.ready_s is None or ward.problem is not None for ward in ordered
        )
        return JSONResponse({"status": "unavailable" if sick else "ok", "presets": states}, 503 if sick else 200)

    async def models(self, _: Request) -> Response:
        """OpenAI's list: what can be asked for here without a download."""
        await asyncio.to_thread(self._arbiter.catalog.refresh)
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._servable()]})

    async def model(self, request: Request) -> Response:
        """One of them, by its name or an alias."""
        asked = request.path_params["model"]
        await asyncio.to_thread(self._arbiter.catalog.refresh)
        found = next((name for name, each in self._servable().items() if asked == name or asked in each.aliases), None)
        if found is None:
            raise routing.unknown(asked, list(self._servable().values()))
        return JSONResponse(self._model(found))

    def _servable(self) -> dict[str, Preset]:
        catalog = self._arbiter.catalog
        found = {name: preset for name, preset in catalog.presets.items() if catalog.here(name)}
        return {**found, **{ward.name: ward.preset for ward in self._arbiter.wards.values() if ward.upstream is not None}}

    def _model(self, name: str) -> dict[str, Any]:
        ward = self._arbiter.wards.get(name)
        preset = ward.preset if ward else self._arbiter.catalog.presets[name]
        context = (ward.slot_context if ward else None) or preset.slot_context
        return {
            "id": name,
            "object": "model",
            "created": self._since,
            "owned_by": "llmctl",
            "state": (ward.state if ward else State.STOPPED).value,
            "meta": {
                "about": preset.about,
                "kind": preset.kind,
                "aliases": list(preset.aliases),
                "file": preset.model.file,
                "n_ctx": context,
                "slots": preset.slots,
                "max_tokens": preset.most_tokens,
            },
        }

    async def status(self, request: Request) -> Response:
        """What ``llmctl status --json`` prints."""
        self._let_in(request)
        return JSONResponse(
            {
                "address": self._address,
                "pid": os.getpid(),
                "version": __version__,
                "engine": self._engine,
                "records_lost": self._ledger.lost,
                "presets": [live.describe(ward) for ward in self._arbiter.wards.values()],
            }
        )

    async def top(self, request: Request) -> Response:
        """What ``llmctl top`` draws: the same, what is in work, and counters that move while answers are made."""
        self._let_in(request)
        scrape = self._metrics.scrape(self._live())
        tokens = scrape.tokens()
        now_s = time.monotonic()
        return JSONResponse(
            {
                "at_s": now_s,
                "address": self._address,
                "pid": os.getpid(),
                "version": __version__,
                "engine": self._engine,
                "presets": [live.describe(ward) | {"tokens": tokens[ward.name]} for ward in self._arbiter.wards.values()],
                "in_work": live.in_work(self._proxy.in_work.values(), now_s),
                "power_w": self._proxy.power.watts,
                "cpu_s": time.process_time(),
                "records_lost": self._ledger.lost,
            }
        )

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        scrape = self._metrics.scrape(self._live())  # nothing is awaited between the moment and its counters
        body, kind = await asyncio.to_thread(scrape.render, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": kind})

    def _live(self) -> Live:
        answers = self._proxy.in_work.values()
        return live.for_metrics(self._arbiter.wards, answers, power_w=self._proxy.power.watts, lost=self._ledger.lost)

    async def openapi(self, request: Request) -> Response:
        """The description of these routes."""
        self._let_in(request)
        return JSONResponse(openapi.describe(self._address))

    async def events(self, request: Request) -> Response:
        """Changes of state and the progress of loads as server-sent events; the present states first."""
        self._let_in(request)
        waiting: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(EVENTS_KEPT)

        def take(said: dict[str, Any]) -> None:
            _put(waiting, said)

        async def stream() -> AsyncIterator[bytes]:
            end = functools.partial(_put, waiting, None)
            self._arbiter.listeners.add(take)
            self._enders.add(end)
            try:
                for ward in self._arbiter.wards.values():
                    take(ward.said())
                while True:
                    try:
                        async with asyncio.timeout(BEAT_S):
                            said = await waiting.get()
                    except TimeoutError:
                        yield sse.comment()
                    else:
                        if said is None:
                            return
                        yield sse.event(said)
            finally:
                self._arbiter.listeners.discard(take)
                self._enders.discard(end)

        return _streamed(request, stream)

    async def texts(self, request: Request) -> Response:
        """Each request that is admitted from now on, with its body, as server-sent events: ``llmctl bench record --texts`` listens.

        The bodies are in memory until they are read, and nowhere else. Headers, and the keys in them, are in none.
        """
        self._let_in(request)

        async def stream() -> AsyncIterator[bytes]:
            heard = _Texts()
            self._proxy.hearers.add(heard.take)
            self._enders.add(heard.end)
            try:
                yield sse.comment("listening")  # what is sent from here on is told
                while (said := await heard.next()) is not None:
                    yield said
            finally:
                self._proxy.hearers.discard(heard.take)
                self._enders.discard(heard.end)

        return _streamed(request, stream)

    def end_events(self) -> None:
        """As llmctl stops: who reads events has read them all, and isn't waited for."""
        for end in tuple(self._enders):
            end()

    async def switch(self, request: Request) -> Response:
        """Have this preset up in the place of those that were ordered before: 202, and events say how it goes."""
        ward = self._arbiter.ward(await self._named(request))
        self._arbiter.want(ward.name)
        return JSONResponse({"preset": ward.name, "state": ward.state.value}, 202)

    async def unload(self, request: Request) -> Response:
        """Stop this preset's child when what it has in work has ended: 202. The next request starts it again."""
        name = await self._named(request)
        ward = self._arbiter.wards.get(name)
        if ward is not None:
            self._arbiter.unload(ward)
        return JSONResponse({"preset": name, "state": (ward.state if ward else State.STOPPED).value}, 202)

    async def restart(self, request: Request) -> Response:
        """Start this preset's child anew when what it has in work has ended; without a preset, all that run or were to: 202."""
        named = await self._maybe_named(request)
        found = self._arbiter.restart(*(self._arbiter.ward(name) for name in named))
        return JSONResponse({"presets": [{"preset": ward.name, "state": ward.state.value} for ward in found]}, 202)

    async def drain(self, request: Request) -> Response:
        """Stop this preset's child when what it has in work has ended, and hold its requests; without a preset, all: 202."""
        named = await self._maybe_named(request)
        wards = tuple(self._arbiter.ward(name) for name in named)
        self._arbiter.drain(*wards)
        told = wards or self._arbiter.wards.values()
        return JSONResponse({"presets": [{"preset": ward.name, "state": ward.state.value} for ward in told]}, 202)

    async def _maybe_named(self, request: Request) -> tuple[str, ...]:
        """The preset in the body, or none for a body that is ``{}`` or empty."""
        self._let_in(request)
        body = await _body(request)
        return (await self._preset(_preset_in(body)),) if body.strip() not in (b"", b"{}") else ()

    async def _named(self, request: Request) -> str:
        """The preset in the body, which is one that there is, or runs still: ``{"preset": NAME}``. Raises :class:`Error`."""
        self._let_in(request)
        return await self._preset(_preset_in(await _body(request)))

    async def _preset(self, name: str) -> str:
        """The name, if it is a preset's. Raises :class:`Error`."""
        catalog = self._arbiter.catalog
        if name not in catalog.presets:
            await asyncio.to_thread(catalog.refresh)
        if name in catalog.faults:
            raise catalog.faults[name]
        if name not in catalog.presets and name not in self._arbiter.wards:
            known = ", ".join(catalog.presets)
            said = f"there is no preset {name[:100]!r}; there are: {known}"
            raise Error(said, exit=Exit.CONFIG, hint="llmctl presets", status=404, code="preset_not_found")
        return name

    def _let_in(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            raise Error(
                "this route needs the admin right of this start",
                exit=Exit.USAGE,
                hint="llmctl status",
                status=401,
                code="invalid_api_key",
            )


class _Text(NamedTuple):
    """A request that was admitted."""

    id: str
    path: str
    at_s: float
    body: bytes

    @property
    def size_bytes(self) -> int:
        """That it takes of the memory, about."""
        return len(self.body) + KIB

    def event(self) -> bytes:
        """For who listens; what was admitted is JSON. Parsing it takes as long as it is, so it is done on a thread."""
        said = {"id": self.id, "path": self.path, "at_s": self.at_s, "body": json.loads(self.body)}
        return b"data: " + json.dumps(said).encode() + b"\n\n"  # in ASCII: some clients take U+2028 for the end of a line


class _Texts:
    """What one who listens has not read yet."""

    def __init__(self) -> None:
        self._waiting: deque[_Text] = deque()
        self._bytes = self._dropped = 0
        self._ended = False
        self._news = asyncio.Event()

    def take(self, row: Row, body: bytes) -> None:
        """One more, if there is room."""
        text = _Text(row.id, row.route, row.opened_at, body)
        if self._bytes + text.size_bytes > TEXTS_KEPT_BYTES:
            self._dropped += 1
        else:
            self._bytes += text.size_bytes
            self._waiting.append(text)
        self._news.set()

    def end(self) -> None:
        """No more come."""
        self._ended = True
        self._news.set()

    async def next(self) -> bytes | None:
        """What to send next: a request, how many were left out, or a comment while nothing comes; None at the end."""
        if not (self._waiting or self._dropped or self._ended):
            self._news.clear()
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._news.wait()
            except TimeoutError:
                return sse.comment()
        if self._waiting:
            text = self._waiting.popleft()
            self._bytes -= text.size_bytes
            return await asyncio.to_thread(text.event)
        if self._dropped:
            count, self._dropped = self._dropped, 0
            return sse.event({"dropped": count})
        return None


def _streamed(request: Request, stream: Callable[[], AsyncIterator[bytes]]) -> Response:
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    if request.method == "HEAD":
        return Response(media_type="text/event-stream", headers=headers)  # else it would end with the client only
    return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)


def _put(waiting: asyncio.Queue[dict[str, Any] | None], said: dict[str, Any] | None) -> None:
    """The oldest is left out where there is no room."""
    if waiting.full():
        waiting.get_nowait()
    waiting.put_nowait(said)


async def _body(request: Request) -> bytes:
    held = b""
    async for part in request.stream():
        held += part
        if len(held) > BODY_LIMIT:
            raise Error(f"this body may have {BODY_LIMIT} bytes", exit=Exit.USAGE, status=413, code="body_too_large")
    return held


def _preset_in(body: bytes) -> str:
    try:
        found = json.loads(body)["preset"]
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
    if not isinstance(found, str):
        raise Error(
            "the body names no preset",
            exit=Exit.USAGE,
            hint='{"preset": "tiny"}',
            status=400,
            code="invalid_request_error",
        )
    return found
