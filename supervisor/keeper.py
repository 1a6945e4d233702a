"""One child's life, start after start: spawn, wait until it is ready, watch it, start it again or give up, as ``lifecycle`` says.

A task of the arbiter's runs :func:`keep` while the child is wanted. Cancelling it is how a child is stopped: the process is gone, and the
state is STOPPED, when the task has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable
from typing import Final

import httpx2

from supervisor import allocation, child, lifecycle, warmup
from supervisor.allocation import Allocation
from supervisor.catalog import Launch
from supervisor.child import Child
from supervisor.errors import Error, Exit
from supervisor.lifecycle import Cause, Event, State
from supervisor.units import duration
from supervisor.upstream import Upstream
from supervisor.ward import Ward

log = logging.getLogger("llmctl.keeper")

POLL_S: Final = 0.05
"""Between looks at /health while a child loads. A probe costs 1 ms; a tiny model is ready after 150 ms."""
PROGRESS_S: Final = 0.2
"""Between two words on how far a load is."""


async def keep(ward: Ward, children_changed: Callable[[], None]) -> None:
    """Live one child's life, start after start. Ends by cancellation, by giving up, or when it is no longer wanted."""
    while True:
        event, served = await _live(ward, children_changed)
        if served:
            ward.budget.forgive()
        ward.move(event)
        if ward.state is State.BACKOFF and not await _back_off(ward):
            break
        if ward.state in (State.FAILED, State.STOPPED):
            break
        ward.restarts += 1
        ward.loaded = 0.0
    if ward.unavailable is not None:
        ward.line.refuse(ward.unavailable)


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


async def _live(ward: Ward, children_changed: Callable[[], None]) -> tuple[Event, bool]:
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
        children_changed()
        async with Upstream(process) as upstream:
            problem = await _start(ward, launch, upstream)
            _heed_cancellation()
            if ward.state is State.READY:
                ready_at = time.monotonic()
                await process.wait()
    except OSError as exc:
        problem = Cause(f"it can't be reached: {exc}", permanent=False)
    except asyncio.CancelledError:
        ward.cause = Cause("it was stopped", permanent=False, hint=f"llmctl switch {ward.name}")
        ward.line.close()
        ward.move(Event.STOP)
        raise
    finally:
        ward.upstream = None
        ward.line.close()
        try:
            code = await process.stop()
        finally:
            ward.child, ward.ended_s = None, time.monotonic()
            children_changed()
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
    ward.ready_s, ward.ended_s = time.monotonic(), -math.inf
    ward.move(Event.WARM)
    ward.line.open(launch.preset.slots)
    return None


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
