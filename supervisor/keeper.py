"""One child's life, start after start: spawn, wait until it is ready, watch it, start it again or give up, as ``lifecycle`` says.

A task of the arbiter's runs :func:`keep` while the child is wanted. Cancelling it is how a child is stopped: the process is gone, and the
state is STOPPED, when the task has ended. It ends by itself when the child is given up, and when it needs a smaller plan: then whoever
wants it up has it planned anew.

After a death, in this order: the connections are cut and the line is closed; the process is reaped; ``causes`` says why, and whoever had a
request in flight hears it; the next plan gives something up if it was for memory. Before the next start the card's memory is seen to be
free.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import httpx2

from supervisor import allocation, causes, child, lifecycle, scene, warmup, watch
from supervisor.allocation import Allocation
from supervisor.catalog import Launch
from supervisor.causes import Cause, Kind, Retry, Scene
from supervisor.child import Child
from supervisor.errors import Error, Exit
from supervisor.lifecycle import Event, State
from supervisor.scene import Before
from supervisor.units import duration
from supervisor.upstream import Upstream
from supervisor.vram import Vram
from supervisor.ward import Ward

log = logging.getLogger("llmctl.keeper")

POLL_S: Final = 0.05
"""Between looks at /health while a child loads. A probe costs 1 ms; a tiny model is ready after 150 ms."""
PATIENT_S: Final = 5.0
PATIENT_POLL_S: Final = 0.25
"""A load that has taken so long is looked at less often, so that the looks aren't all that it does."""
PROGRESS_S: Final = 0.2
"""Between two words on how far a load is."""
RELEASE_S: Final = 10.0
"""How long the memory of a child that died may take to be free again; a CUDA driver was seen to lag."""
RELEASE_POLL_S: Final = 0.1
FAULTS_S: Final = 3600.0
"""An illegal access comes from a driver's or a kernel's fault that may show once in months; twice in an hour something is given up."""
STOPPED: Final = "it was stopped"
"""Why one isn't up that was told to stop."""


@dataclass(slots=True)
class _Life:
    """One process from its start to its end."""

    launch: Launch
    process: Child
    before: Before
    served: int
    """What its line had served before."""
    upstream: Upstream | None = None
    ready_s: float | None = None
    was_draining: bool = False
    problem: Cause | None = None
    """Why it was ended although it lived."""


async def keep(ward: Ward, cards: Vram, children_changed: Callable[[], None]) -> None:
    """Live one child's life, start after start. Ends by cancellation, by giving up, or when it is no longer wanted as it was planned."""
    while True:
        event, useful = await _live(ward, cards, children_changed)
        if useful:
            ward.budget.forgive()
        ward.move(event)
        if event is Event.STEP_DOWN:
            ward.move(Event.GONE)
        if ward.state is State.BACKOFF and not await _back_off(ward, useful=useful):
            break
        if ward.state is not State.STARTING:
            break
        ward.restarts += 1
        ward.loaded = 0.0
    if ward.unavailable is not None:
        ward.line.refuse(ward.unavailable)


async def _back_off(ward: Ward, *, useful: bool) -> bool:
    """Wait as long as the budget says; False when it is spent."""
    now_s = time.monotonic()
    delay_s = ward.budget.ended(now_s, random.random(), useful=useful)
    if delay_s is None:
        log.error("%s is given up: its last starts were of no use", ward.name)
        ward.move(Event.BUDGET_SPENT)
        return False
    log.warning("%s starts again in %s", ward.name, duration(delay_s))
    ward.again_s = now_s + delay_s
    try:
        await asyncio.sleep(delay_s)
    except asyncio.CancelledError:
        ward.move(Event.STOP)
        raise
    finally:
        ward.again_s = None
    ward.move(Event.DELAY_ELAPSED)
    return True


async def _live(ward: Ward, cards: Vram, children_changed: Callable[[], None]) -> tuple[Event, bool]:
    """One process from its start to its end: the event that it is, and whether it was of use. Leaves nothing of it."""
    launch = ward.launch
    assert launch is not None
    with cards.in_use(launch.preset.device) if launch.plan.budget.cuda else contextlib.nullcontext():
        try:
            await _released(ward, cards)
            before = scene.begin(launch.plan.budget.cuda)
            process = child.spawn(ward.name, launch.command, launch.environment, launch.folder, launch.log)
        except (Error, OSError) as exc:  # no process or descriptor left: that may pass
            ward.cause = Cause(str(exc))
            return Event.EXITED_TRANSIENT, False
        except asyncio.CancelledError:
            _gone(ward)
            raise
        life = _Life(launch, process, before, ward.line.admission.served)
        try:
            code = await _run(ward, life, cards, children_changed)
            return await _conclude(ward, life, code)
        finally:
            if life.upstream is not None:
                life.upstream.bury(_stopped(ward))  # if nobody knew better


async def _run(ward: Ward, life: _Life, cards: Vram, children_changed: Callable[[], None]) -> int:
    """From a process to its exit code; nothing of it is left then."""
    process, ward.child = life.process, life.process
    try:
        children_changed()
        async with Upstream(process) as upstream:
            life.upstream = upstream
            await _serve(ward, life, upstream, cards)
    except OSError as exc:
        life.problem = Cause(f"it can't be reached: {exc}")
    except asyncio.CancelledError:
        if ward.line.admission.served > life.served:
            ward.budget.forgive()
        _stop(ward)
        raise
    finally:
        ward.upstream = None
        ward.line.close()
        try:
            if life.problem is not None and life.problem.kind in (Kind.HANG, Kind.OUTSIDE):
                process.kill()  # it wouldn't hear anything else
            code = await process.stop()
        finally:
            ward.child, ward.died_pid, ward.ended_s = None, process.pid, time.monotonic()
            ward.own_bytes = ward.card_bytes = None
            children_changed()
        if ward.state is State.STOPPING and life.problem is None:
            ward.move(Event.GONE)
    return code


async def _serve(ward: Ward, life: _Life, upstream: Upstream, cards: Vram) -> None:
    """Until it has ended, or must."""
    life.problem = await _start(ward, life.launch, upstream)
    _heed_cancellation()
    if ward.upstream is None:
        return
    life.ready_s = time.monotonic()
    life.problem = await watch.over(ward, life.launch, upstream, cards)
    _heed_cancellation()
    life.was_draining = ward.state is State.DRAINING
    if life.problem is not None:
        ward.upstream = None
        ward.line.close()
        ward.move(Event.UNHEALTHY)


def _stop(ward: Ward) -> None:
    """It ends because its keeper was told to."""
    ward.cause = _stopped(ward)
    ward.line.close()
    ward.move(Event.STOP)


def _gone(ward: Ward) -> None:
    """The same, where there is no process any more, or not yet."""
    _stop(ward)
    ward.move(Event.GONE)


def _stopped(ward: Ward) -> Cause:
    return Cause(STOPPED, hint=f"llmctl switch {ward.name}", kind=Kind.OUTSIDE)


async def _conclude(ward: Ward, life: _Life, code: int) -> tuple[Event, bool]:
    """What its end means, once nothing of it is left."""
    try:
        _heed_cancellation()
        before, process = ward.cause, life.process
        seen = await asyncio.to_thread(scene.of, life.before) if life.before.cuda else scene.of(life.before)
        ward.cause = cause = life.problem or causes.of_exit(code, process.log_tail(), seen)
        if life.upstream is not None:
            life.upstream.bury(cause)
        log.error("%s (pid %d): %s", ward.name, process.pid, "\n  ".join((cause.text, *cause.lines)))
        well = life.ready_s is not None and time.monotonic() - life.ready_s >= lifecycle.RAN_WELL_S
        useful = well or seen.slept or ward.line.admission.served > life.served
        if life.was_draining and life.problem is not None:
            return Event.GONE, useful
        again = before is not None and before.kind is Kind.ILLEGAL_ACCESS and time.monotonic() - ward.died_s < FAULTS_S
        ward.died_s = time.monotonic()
        if cause.kind is not Kind.ILLEGAL_ACCESS or again:
            gave_up = await asyncio.to_thread(_step_down, ward.name, life.launch, cause.kind)
            if gave_up:
                log.warning("%s gives up: %s", ward.name, gave_up)
                return Event.STEP_DOWN, useful
    except asyncio.CancelledError:
        _gone(ward)
        raise
    if cause.retry is not Retry.SOON:
        return Event.EXITED_PERMANENT, useful
    if life.problem is not None and ward.state is State.STARTING:
        return Event.READY_TIMEOUT, useful
    return (Event.EXITED_WELL if well else Event.EXITED_TRANSIENT), useful


async def _released(ward: Ward, cards: Vram) -> None:
    """Wait until the driver has what its last process had of a card's memory, as far as it says so."""
    pid, ward.died_pid = ward.died_pid, None
    if pid is None or ward.launch is None or not ward.launch.plan.budget.cuda:
        return
    until_s = time.monotonic() + RELEASE_S
    while await asyncio.to_thread(cards.holds, pid) and time.monotonic() < until_s:  # noqa: ASYNC110 the driver tells nobody
        await asyncio.sleep(RELEASE_POLL_S)


async def _start(ward: Ward, launch: Launch, upstream: Upstream) -> Cause | None:
    """Wait until the child is healthy and warm, and publish it. Returns what kept it from that while it lives; an exit isn't one."""
    limit_s = launch.load_limit_s
    process = upstream.child
    load = watch.Load(process)
    try:
        async with asyncio.timeout(limit_s):
            began_s = told_s = time.monotonic()
            while not await upstream.healthy():
                if process.returncode is not None:
                    return None
                if time.monotonic() - told_s >= PROGRESS_S:
                    told_s = time.monotonic()
                    if (stalled := load.stopped(told_s) or load.stalled(told_s)) is not None:
                        return stalled
                    ward.loaded = min(1.0, process.read_bytes() / max(1, launch.plan.header.file_bytes))
                    ward.tell()
                await asyncio.sleep(POLL_S if time.monotonic() - began_s < PATIENT_S else PATIENT_POLL_S)
            if (stopped := await _warm(ward, launch, upstream, load)) is not None:
                return stopped
            ward.allocated = await asyncio.to_thread(_read_back, launch, process)
    except TimeoutError:
        return Cause(f"it was not ready after {duration(limit_s)}")
    except Error as exc:
        retry = Retry.NEVER if exc.exit is Exit.CONFIG else Retry.SOON
        memory = causes.of_memory(process.log_tail(), Scene(cuda=launch.plan.budget.cuda))
        return memory or Cause(exc.message, retry=retry, hint=exc.hint)
    except httpx2.HTTPError:
        # It closes its connections as it exits, and its exit says why. One that stays is stopped, and that is the cause.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), POLL_S * 20)
            return None
        return Cause("it broke off its warm-up")
    if launch.plan.budget.cuda and ward.allocated is not None and not ward.allocated.cuda:
        return Cause("it came up without its card", retry=Retry.LATER, hint="llmctl build", kind=Kind.NO_CARD)
    ward.upstream = upstream
    ward.ready_s, ward.ended_s = time.monotonic(), -float("inf")
    ward.move(Event.WARM)
    ward.line.open(launch.preset.slots)
    return None


async def _warm(ward: Ward, launch: Launch, upstream: Upstream, load: watch.Load) -> Cause | None:
    """Have it warm, and its context known. Returns why it can't be, if it is stopped meanwhile; raises as :meth:`Upstream.warm_up`."""
    failed: Error | httpx2.HTTPError | None = None

    async def warm() -> None:
        nonlocal failed
        try:
            ward.slot_context = await upstream.warm_up(warmup.questions(launch.preset))
        except (Error, httpx2.HTTPError) as exc:
            failed = exc

    async with asyncio.TaskGroup() as group:
        warming = group.create_task(warm(), name="warm up")
        while not (await asyncio.wait((warming,), timeout=PROGRESS_S))[0]:
            if (stopped := load.stopped(time.monotonic())) is not None:
                warming.cancel()
                return stopped
    if failed is not None:
        raise failed
    return None


def _step_down(name: str, launch: Launch, kind: Kind) -> str | None:
    """What the next launch gives up. One that can't be planned gives up nothing, and is tried as it was."""
    try:
        return launch.step_down(kind)
    except (Error, OSError) as exc:
        log.warning("no smaller plan of %s can be made: %s", name, exc)
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
