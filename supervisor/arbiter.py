"""The children and what is wanted of them. The only writer of their state; everybody else waits in a child's line.

Two kinds of tasks, all in :meth:`Arbiter.run`, and the children end with them:

- A *bringer* lives while a preset is asked for that doesn't run: it plans it, makes room as ``placement`` says, and starts it. It undoes
  what it asked of others when nobody waits any more.
- A *keeper* lives while a child is wanted: start, wait until it is ready, watch it, start it again or give up, as ``lifecycle`` says.
  Cancelling it is how a child is stopped.

Nothing is awaited between a state's check and its change. Whoever waits for a change waits for the pulse, and looks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx2

from supervisor import allocation, child, lifecycle, placement, warmup
from supervisor.allocation import Allocation
from supervisor.catalog import Catalog, Launch, not_here
from supervisor.child import Child
from supervisor.errors import Error, Exit
from supervisor.lifecycle import Cause, Event, Owner, State
from supervisor.line import Line
from supervisor.units import duration
from supervisor.upstream import Upstream
from supervisor.ward import Ward

log = logging.getLogger("llmctl.arbiter")

POLL_S: Final = 0.05
"""Between looks at /health while a child loads. A probe costs 1 ms; a tiny model is ready after 150 ms."""
PROGRESS_S: Final = 0.2
"""Between two words on how far a load is."""
RELEASE_S: Final = 5.0
"""How long the memory of a child that ended may take to be free again. Here it is free with its exit; a CUDA driver was seen to lag."""

Listener = Callable[[dict[str, Any]], None]


class Arbiter:
    """Keeps the children. ``async with arbiter.run():`` starts those that ``up`` was given; leaving the block ends all."""

    def __init__(self, catalog: Catalog, *, children_changed: Callable[[dict[str, int]], None]) -> None:
        """``children_changed`` is told the pids that live by name, each time that changes, so that a successor can find orphans."""
        self.catalog = catalog
        self.wards: dict[str, Ward] = {}
        self.listeners: set[Listener] = set()
        self._children_changed = children_changed
        self._group: asyncio.TaskGroup | None = None
        self._pulse = asyncio.Event()
        for name in catalog.ordered:
            self.ward(name).ordered = True

    def __repr__(self) -> str:
        return f"<Arbiter {list(self.wards.values())}>"

    def ward(self, name: str) -> Ward:
        """The ward of a preset in the catalog, made when it is first asked for.

        Raises :class:`Error` (HTTP 503) when its model was never fetched: no request starts a download.
        """
        if name not in self.wards:
            if not self.catalog.here(name):
                raise not_here(name, self.catalog.presets[name].model.file)
            asked = self.catalog.presets[name]
            line = Line(
                name, places=asked.slots, limit=asked.queue, max_wait_s=asked.max_wait, stir=lambda: self._stir(self.wards[name])
            )
            self.wards[name] = Ward(name, asked, line, self._tell)
        return self.wards[name]

    def check(self, ward: Ward) -> None:
        """Raise :class:`Error` (HTTP 503) when a request for it would wait in vain."""
        if ward.state is State.FAILED and ward.cause is not None:
            raise _unavailable(ward.name, ward.cause)

    async def ensure_ready(self, ward: Ward) -> None:
        """Return when it is ready. Raises :class:`Error` with the cause when it won't be."""
        while ward.state is not State.READY:
            if ward.problem is not None:
                raise ward.problem
            if ward.state is State.FAILED and ward.cause is not None:
                raise _unavailable(ward.name, ward.cause)
            await self._changed()

    def want(self, *names: str) -> None:
        """The user wants these up, and nothing else for its own sake: others may give way, and needn't."""
        for ward in self.wards.values():
            ward.wanted = ward.wanted and Owner.REQUEST
        for name in names:
            ward = self.ward(name)
            ward.ordered, ward.wanted, ward.problem = True, Owner.USER, None
            if ward.state is State.FAILED:
                ward.cause = None
                ward.move(Event.STOP)
                ward.budget.forgive()
            self._stir(ward)

    def unload(self, ward: Ward) -> None:
        """Stop its child once what is in work has ended, whoever wants it; the next request starts it again."""
        ward.wanted, ward.ordered = None, False
        if ward.state is State.FAILED:
            ward.move(Event.STOP)
        elif ward.keeper is not None:
            ward.gives_way_to = ward
            self._retire(ward)
        self._beat()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Keep the children while the block runs; at its end every one is stopped and reaped."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            expiring = group.create_task(self._expire(), name="expire")
            self.want(*self.catalog.ordered)
            try:
                yield
            finally:
                self._group = None
                expiring.cancel()
                for ward in self.wards.values():
                    for task in (ward.bringer, ward.keeper):
                        if task is not None:
                            task.cancel()

    # Who is up

    def _stir(self, ward: Ward) -> None:
        """Somebody began to wait for it while it can't answer, or the last one inside has left."""
        if ward.state is State.FAILED and ward.cause is not None:
            ward.line.refuse(_unavailable(ward.name, ward.cause))
        if ward.gives_way_to is not None:
            self._retire(ward)
        if ward.is_asked_for and ward.state is State.STOPPED and ward.bringer is None and self._group is not None:
            ward.bringer = self._group.create_task(self._bring(ward), name=f"bring up {ward.name}")
            ward.bringer.add_done_callback(lambda _: self._brought(ward))
        if ward.state is not State.READY or ward.gives_way_to is not None or self._is_bringing:
            self._beat()

    @property
    def _is_bringing(self) -> bool:
        return any(ward.bringer is not None for ward in self.wards.values())

    def _brought(self, ward: Ward) -> None:
        ward.bringer = None
        self._stir(ward)

    async def _bring(self, ward: Ward) -> None:
        """Make room for it and start it."""
        ward.asked_s = time.monotonic()
        try:
            await self._place(ward)
        except Error as error:
            log.warning("%s can't be started: %s", ward.name, error.message)
            ward.problem = _cannot_start(error)
            ward.wanted = None
            ward.line.refuse(ward.problem)
            ward.tell()
        finally:
            ward.makes_room_for = None
            for other in self.wards.values():
                if other.gives_way_to is ward:
                    self._resume(other)

    async def _place(self, ward: Ward) -> None:
        """Look until it fits and starts, or nobody asks any more. Raises :class:`Error` when it can't be."""
        launch = await self._launch(ward)
        replanned = False
        while ward.is_asked_for:
            up = [each.upstream for each in self.wards.values()]
            free = await asyncio.to_thread(self.catalog.free, launch)
            if up != [each.upstream for each in self.wards.values()]:
                continue  # one took or freed its memory just then, and what is free doesn't go with what each holds
            now_s = time.monotonic()
            late = [each for each in self.wards.values() if each.launch is not None and now_s - each.ended_s < RELEASE_S]
            running = [*self._running(ward), *map(_lingering, late)]
            choice = placement.choose(launch.needs, free, running, now_s)
            if isinstance(choice, placement.Start):
                self._begin(ward, launch)
                return
            if isinstance(choice, placement.GiveWay):
                ward.makes_room_for = launch
                self._give_way(choice.names, ward)
                await self._changed()
            elif late:
                await self._changed(now_s + POLL_S)
            elif isinstance(choice, placement.Wait):
                await self._changed(choice.until_s)
            elif replanned:
                raise _no_room(ward, choice.beside)
            else:
                launch, replanned = await self._launch(ward), True

    async def _launch(self, ward: Ward) -> Launch:
        running = self._running(ward)
        try:
            return await asyncio.to_thread(self.catalog.launch, ward.name, placement.spare(running))
        except Error as error:
            staying = tuple(each.name for each in running if not each.yields)
            if error.exit is not Exit.NO_FIT or not staying:
                raise
            raise _no_room(ward, staying, error.message) from error

    def _running(self, beside: Ward) -> list[placement.Running]:
        """What has memory, or a right to it."""
        found = [ward.running(beside) for ward in self.wards.values() if ward is not beside]
        busy = {ward.gives_way_to for ward in self.wards.values()}
        for ward in self.wards.values():
            # Those that ended for it must not take their memory back before it could.
            if ward.makes_room_for is not None and ward not in busy and ward.asked_s < beside.asked_s:
                yields = ward.yields_to(beside)
                found.append(placement.Running(ward.name, ward.makes_room_for.needs, {}, yields=yields, settled=False))
        return [each for each in found if each is not None]

    def _give_way(self, names: tuple[str, ...], to: Ward) -> None:
        for name in names:
            ward = self.wards[name]
            if ward.gives_way_to is None:
                log.info("%s gives way to %s", name, to.name)
            ward.gives_way_to = to
            self._retire(ward)

    def _retire(self, ward: Ward) -> None:
        """Let it end: now if it has nothing in work, else when that has ended (:meth:`_stir`); its line is closed."""
        if ward.stopping:
            return
        if ward.state is not State.DRAINING:
            ward.wanted = None  # whoever asks from here on wants it again
        if ward.state is State.READY:
            ward.move(Event.DRAIN)
            ward.line.close()
        if not ward.line.admission.inside and ward.keeper is not None:
            ward.keeper.cancel("it gives way")

    def _resume(self, ward: Ward) -> None:
        """Nobody wants its memory any more."""
        ward.gives_way_to = None
        if ward.state is State.DRAINING and not ward.stopping and ward.launch is not None:
            ward.move(Event.RESUME)
            ward.line.open(ward.launch.preset.slots)

    def _begin(self, ward: Ward, launch: Launch) -> None:
        assert self._group is not None
        for each in self.wards.values():
            each.ended_s = -math.inf  # what it freed is there
        ward.launch, ward.problem, ward.cause = launch, None, None
        ward.wanted = ward.wanted or Owner.REQUEST
        ward.loaded = 0.0
        ward.move(Event.START)
        ward.keeper = self._group.create_task(self._keep(ward), name=f"keep {ward.name}")
        ward.keeper.add_done_callback(lambda _: self._kept(ward))

    def _kept(self, ward: Ward) -> None:
        """Its keeper has ended: it was stopped, or given up."""
        ward.keeper = None
        ward.gives_way_to = None
        ward.ended_s = time.monotonic()
        while ward.state not in (State.STOPPED, State.FAILED):  # it was cancelled before its first step, or while its child ended
            ward.move(Event.GONE if ward.state is State.STOPPING else Event.STOP)
        if ward.state is State.STOPPED:
            ward.cause = None
        self._beat()
        self._stir(ward)

    async def _expire(self) -> None:
        """Unload what nobody has asked for as long as its ``ttl`` says."""
        while True:
            now_s = time.monotonic()
            next_s = math.inf
            for ward in self.wards.values():
                ttl = ward.preset.ttl_s
                if ward.state is not State.READY or ttl is None:
                    continue
                since_s = max(ward.line.idle_since_s, ward.ready_s or 0.0) if ward.line.idle else now_s
                if ward.line.idle and now_s - since_s >= ttl:
                    log.info("%s is unloaded: nobody asked for it for %s", ward.name, duration(now_s - since_s))
                    self._retire(ward)
                else:
                    next_s = min(next_s, since_s + ttl)
            await self._changed(None if next_s == math.inf else next_s)

    # One child

    async def _keep(self, ward: Ward) -> None:
        """Live one child's life, start after start. Ends by cancellation, by giving up, or when it is no longer wanted."""
        while True:
            event, served = await self._live(ward)
            if served:
                ward.budget.forgive()
            ward.move(event)
            if ward.state is State.BACKOFF and not await self._back_off(ward):
                break
            if ward.state in (State.FAILED, State.STOPPED):
                break
            ward.restarts += 1
            ward.loaded = 0.0
        if ward.state is State.FAILED and ward.cause is not None:
            ward.line.refuse(_unavailable(ward.name, ward.cause))

    @staticmethod
    async def _back_off(ward: Ward) -> bool:
        """Wait as long as the budget says; False when it is spent."""
        delay_s = ward.budget.failed(time.monotonic(), random.random())
        if delay_s is None:
            ward.move(Event.BUDGET_SPENT)
            return False
        log.warning("%s starts again in %s", ward.name, duration(delay_s))
        try:
            await asyncio.sleep(delay_s)
        except asyncio.CancelledError:
            ward.move(Event.STOP)
            raise
        ward.move(Event.DELAY_ELAPSED)
        return True

    async def _live(self, ward: Ward) -> tuple[Event, bool]:
        """One process from its start to its end: the event that it is, and whether it served well. Leaves nothing of it."""
        launch = ward.launch
        assert launch is not None
        try:
            process = child.spawn(ward.name, launch.command, launch.environment, launch.folder, launch.log)
        except Error as exc:  # a full disk, no process or descriptor left: that may pass
            ward.cause = Cause(exc.message, permanent=False)
            return Event.EXITED_TRANSIENT, False
        ward.child = process
        ready_at = math.inf
        problem: Cause | None = None
        try:
            self._tell_children()
            async with Upstream(process) as upstream:
                problem = await self._start(ward, launch, upstream)
                _heed_cancellation()
                if ward.state is State.READY:
                    ready_at = time.monotonic()
                    await process.wait()
        except OSError as exc:
            problem = Cause(f"it can't be reached: {exc}", permanent=False)
        except asyncio.CancelledError:
            ward.cause = Cause("it is being stopped", permanent=False)
            ward.line.close()
            ward.move(Event.STOP)
            raise
        finally:
            ward.upstream = None
            ward.line.close()
            try:
                code = await process.stop()
            finally:
                ward.child = None
                self._tell_children()
            if ward.state is State.STOPPING:
                ward.move(Event.GONE)
        _heed_cancellation()
        well = time.monotonic() - ready_at >= lifecycle.RAN_WELL_S
        ward.cause = problem or lifecycle.cause(code, process.log_tail())
        log.error("%s (pid %d): %s", ward.name, process.pid, ward.cause.text)
        if ward.cause.permanent:
            return Event.EXITED_PERMANENT, well
        if problem is not None and ward.state is State.STARTING:
            return Event.READY_TIMEOUT, False
        return (Event.EXITED_WELL if well else Event.EXITED_TRANSIENT), well

    @staticmethod
    async def _start(ward: Ward, launch: Launch, upstream: Upstream) -> Cause | None:
        """Wait until the child is healthy and warm, and publish it. Returns what kept it from that while it lives; an exit isn't one."""
        limit_s = launch.load_limit_s
        process = upstream.child
        try:
            async with asyncio.timeout(limit_s):
                told_s = time.monotonic()
                while not await upstream.healthy():
                    if process.returncode is not None:
                        return None
                    if time.monotonic() - told_s >= PROGRESS_S:
                        told_s = time.monotonic()
                        ward.loaded = min(1.0, process.read_bytes() / max(1, launch.plan.header.file_bytes))
                        ward.tell()
                    await asyncio.sleep(POLL_S)
                ward.slot_context = await upstream.warm_up(warmup.questions(launch.preset))
                ward.allocated = await asyncio.to_thread(_read_back, launch, process)
        except TimeoutError:
            return Cause(f"it was not ready after {duration(limit_s)}", permanent=False)
        except Error as exc:
            return Cause(exc.message, permanent=exc.exit is Exit.CONFIG, hint=exc.hint)
        except httpx2.HTTPError:
            # It closes its connections as it exits, and its exit says why. One that stays is stopped, and that is the cause.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), POLL_S * 20)
                return None
            return Cause("it broke off its warm-up", permanent=False)
        ward.upstream = upstream
        ward.ready_s = time.monotonic()
        ward.move(Event.WARM)
        ward.line.open(launch.preset.slots)
        return None

    # Who is told

    def _beat(self) -> None:
        """Wake whoever waits for a change."""
        self._pulse.set()
        self._pulse = asyncio.Event()

    async def _changed(self, until_s: float | None = None) -> None:
        """Return at the next change, or at that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                await self._pulse.wait()

    def _tell(self, said: dict[str, Any]) -> None:
        self._beat()
        for listener in self.listeners:
            listener(said)

    def _tell_children(self) -> None:
        try:
            self._children_changed({ward.name: ward.child.pid for ward in self.wards.values() if ward.child is not None})
        except OSError as exc:  # a full disk costs a successor the list of orphans, and nobody a running server
            log.warning("the run folder can't be written: %s", exc)

    def kill(self) -> None:
        """End every child now; whoever stops one sees it gone."""
        for ward in self.wards.values():
            if ward.child is not None:
                ward.child.kill()


def _lingering(ward: Ward) -> placement.Running:
    """One that has just ended: what it had of a card may not be free again yet; the host's memory is."""
    assert ward.launch is not None
    needs = {pool: count for pool, count in ward.launch.needs.items() if pool != placement.HOST}
    return placement.Running(ward.name, needs, needs, leaving=True)


def _heed_cancellation() -> None:
    """Be cancelled if that was asked for: Python 3.11's wait_for loses a cancellation that comes with the result (gh-86296)."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _read_back(launch: Launch, process: Child) -> Allocation | None:
    """What the engine says it allocated; kept for the next plan. None where its log says nothing of it."""
    found = allocation.parse(process.log_head())
    if found is not None:
        launch.remember(found)
    return found


def _unavailable(name: str, cause: Cause) -> Error:
    return Error(
        f"{name} is not running: {cause.text}",
        exit=Exit.CHILD,
        hint=cause.hint,
        status=503,
        code="engine_unavailable",
        retry=False if cause.permanent else None,
    )


def _cannot_start(error: Error) -> Error:
    """The same for a client: 503, and what it is; asking again is of no use until something else changes."""
    code = "does_not_fit" if error.exit is Exit.NO_FIT else error.code if error.status == 503 else "cannot_start"
    return Error(error.message, exit=error.exit, hint=error.hint, status=503, code=code, retry=False)


def _no_room(ward: Ward, beside: tuple[str, ...], lacking: str = "") -> Error:
    said = lacking + "," if lacking else f"{ward.name} doesn't fit"
    return Error(
        f"{said} beside {' and '.join(beside) or 'what else uses the memory'}",
        exit=Exit.NO_FIT,
        hint=f"llmctl unload {beside[0]}" if beside else f"llmctl plan {ward.name}",
    )
