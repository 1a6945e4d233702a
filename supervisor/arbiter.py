"""The children and what is wanted of them. The only writer of their state; everybody else asks :meth:`Arbiter.ensure_ready`.

One task keeps one child: start, wait until it is ready, watch it, start it again or give up, as ``lifecycle`` says. Nothing is awaited
between a state's check and its change. The tasks live in :meth:`Arbiter.run`, and the children end with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx2

from supervisor import allocation, child, lifecycle, warmup
from supervisor.admission import Admission
from supervisor.allocation import Allocation
from supervisor.child import Child
from supervisor.errors import Error, Exit
from supervisor.lifecycle import Cause, Event, Restarts, State
from supervisor.plan import Plan
from supervisor.preset import Preset
from supervisor.units import MIB, duration
from supervisor.upstream import Upstream

log = logging.getLogger("llmctl.arbiter")

POLL_S: Final = 0.05
"""Between looks at /health while a child loads. A probe costs 1 ms; a tiny model is ready after 150 ms."""
LOAD_BASE_S: Final = 60.0
LOAD_RATE_BYTES_S: Final = 20 * MIB
"""A load is given up after the base plus the file's size at this rate: a slow USB disk, cold (llama.cpp#15128: hangs during load)."""


@dataclass(frozen=True, slots=True)
class Launch:
    """All that is needed to start one child."""

    plan: Plan
    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    log: Path
    remember: Callable[[Allocation], None]
    """Gets what the engine allocated, on a thread, once it is ready."""

    @property
    def preset(self) -> Preset:
        """What runs."""
        return self.plan.preset

    @property
    def load_limit_s(self) -> float:
        """After this long a load is a hang."""
        return LOAD_BASE_S + self.plan.header.file_bytes / LOAD_RATE_BYTES_S


@dataclass(slots=True, eq=False)
class Ward:
    """One child as the arbiter keeps it. Others read it for display only."""

    launch: Launch
    admission: Admission
    state: State = State.STOPPED
    cause: Cause | None = None
    restarts: int = 0
    child: Child | None = None
    upstream: Upstream | None = None
    slot_context: int | None = None
    """Tokens one request may use, as the engine says; known once it was ready."""
    allocated: Allocation | None = None
    """What the engine allocated at its last start, by its log."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __repr__(self) -> str:
        pid = self.child.pid if self.child else None
        return f"<Ward {self.name} {self.state.name} pid={pid} slots={self.admission.busy}/{self.admission.places}>"

    @property
    def name(self) -> str:
        """The preset's name."""
        return self.launch.preset.name

    def move(self, event: Event) -> None:
        """Take one edge of the table, and wake whoever waits for a change."""
        before, self.state = self.state, lifecycle.step(self.state, event)
        log.info("%s %s -> %s (%s)", self.name, before.value, self.state.value, event.value)
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self) -> None:
        """Return after the next change of state."""
        await self._changed.wait()


class Arbiter:
    """Keeps the children. ``async with arbiter.run():`` starts them; leaving the block ends them."""

    def __init__(self, launches: Sequence[Launch], *, children_changed: Callable[[list[int]], None]) -> None:
        """``children_changed`` is told the pids that live, each time that changes, so that a successor can find orphans."""
        self.wards = {launch.preset.name: Ward(launch, Admission(launch.preset.slots)) for launch in launches}
        self._children_changed = children_changed

    def __repr__(self) -> str:
        return f"<Arbiter {list(self.wards.values())}>"

    def ward(self, name: str | None) -> Ward:
        """The ward a client's ``model`` names. Raises :class:`Error` (HTTP 404) that names those there are."""
        if name is not None and name in self.wards:
            return self.wards[name]
        known = ", ".join(self.wards)
        said = f"the model {name!r} does not exist" if name is not None else "the request names no model"
        raise Error(
            f"{said}; there is: {known}",
            exit=Exit.USAGE,
            hint=f'"model": "{next(iter(self.wards))}"',
            status=404 if name is not None else 400,
            code="model_not_found" if name is not None else "missing_model",
        )

    async def ensure_ready(self, ward: Ward) -> Upstream:
        """The face of a child that is ready, when it is. Raises :class:`Error` (HTTP 503) with the cause when it won't be."""
        while True:
            if ward.state is State.READY and ward.upstream is not None:
                return ward.upstream
            if ward.state in (State.FAILED, State.STOPPING, State.STOPPED) and ward.cause is not None:
                raise _unavailable(ward.name, ward.cause)
            await ward.change()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Keep the children while the block runs; at its end every one is stopped and reaped."""
        async with asyncio.TaskGroup() as group:
            keepers = [group.create_task(self._keep(ward), name=f"keep {ward.name}") for ward in self.wards.values()]
            try:
                yield
            finally:
                for keeper in keepers:
                    keeper.cancel()

    async def _keep(self, ward: Ward) -> None:
        """Live one child's life, start after start. Ends by cancellation, or by giving up."""
        restarts = Restarts()
        ward.move(Event.START)
        while True:
            event, served = await self._live(ward)
            if served:
                restarts.forgive()
            ward.move(event)
            if ward.state is State.BACKOFF and not await self._back_off(ward, restarts):
                return
            if ward.state is State.FAILED:
                return
            ward.restarts += 1

    @staticmethod
    async def _back_off(ward: Ward, restarts: Restarts) -> bool:
        """Wait as long as the budget says; False when it is spent."""
        delay_s = restarts.failed(time.monotonic(), random.random())
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
        try:
            process = child.spawn(launch.preset.name, launch.command, launch.environment, launch.folder, launch.log)
        except Error as exc:  # a full disk, no process or descriptor left: that may pass
            ward.cause = Cause(exc.message, permanent=False)
            return Event.EXITED_TRANSIENT, False
        ward.child = process
        ready_at = math.inf
        problem: Cause | None = None
        try:
            self._tell()
            async with Upstream(process) as upstream:
                problem = await self._start(ward, upstream)
                _heed_cancellation()
                if ward.state is State.READY:
                    ready_at = time.monotonic()
                    await process.wait()
        except OSError as exc:
            problem = Cause(f"it can't be reached: {exc}", permanent=False)
        except asyncio.CancelledError:
            ward.cause = Cause("it is being stopped", permanent=False)
            ward.move(Event.STOP)
            raise
        finally:
            ward.upstream = None
            code = await process.stop()
            ward.child = None
            self._tell()
            if ward.state is State.STOPPING:
                ward.move(Event.GONE)
        well = time.monotonic() - ready_at >= lifecycle.RAN_WELL_S
        ward.cause = problem or lifecycle.cause(code, process.log_tail())
        log.error("%s (pid %d): %s", ward.name, process.pid, ward.cause.text)
        if ward.cause.permanent:
            return Event.EXITED_PERMANENT, well
        if problem is not None and ward.state is State.STARTING:
            return Event.READY_TIMEOUT, False
        return (Event.EXITED_WELL if well else Event.EXITED_TRANSIENT), well

    @staticmethod
    async def _start(ward: Ward, upstream: Upstream) -> Cause | None:
        """Wait until the child is healthy and warm, and publish it. Returns what kept it from that while it lives; an exit isn't one."""
        limit_s = ward.launch.load_limit_s
        process = upstream.child
        try:
            async with asyncio.timeout(limit_s):
                while not await upstream.healthy():
                    if process.returncode is not None:
                        return None
                    await asyncio.sleep(POLL_S)
                ward.slot_context = await upstream.warm_up(warmup.questions(ward.launch.preset))
                ward.allocated = await asyncio.to_thread(_read_back, ward.launch, process)
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
        ward.move(Event.WARM)
        return None

    def _tell(self) -> None:
        try:
            self._children_changed([ward.child.pid for ward in self.wards.values() if ward.child is not None])
        except OSError as exc:  # a full disk costs a successor the list of orphans, and nobody a running server
            log.warning("the run folder can't be written: %s", exc)

    def kill(self) -> None:
        """End every child now; whoever stops one sees it gone."""
        for ward in self.wards.values():
            if ward.child is not None:
                ward.child.kill()


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
    return Error(f"{name} is not running: {cause.text}", exit=Exit.CHILD, hint=cause.hint, status=503, code="engine_unavailable")
