"""What is done to a box: each fault, whether it falls among requests or on an idle child, and what of it waits by design.

A fault returns the child whose end it means, if it means one's; the end may come later, as where a child hangs and llmctl has to notice.
The fake engine's next start is changed by its knobs, which are put back as soon as that start has read them.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from bench.proof.chaos_box import DEATH_S, LOAD_S, PROBE_S, Box, Life
from supervisor.lifecycle import RAN_WELL_S

BURST: Final = 100
"""Clients that leave at once."""
BURST_S: Final = 1.5
"""And within so long."""
LATE_S: Final = (1.5, 4.0)
FULL_S: Final = (0.5, 3.0)
SLOW_EXIT_S: Final = 1.0

Strike = Callable[[Box], Awaitable[Life | None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is done."""

    name: str
    strike: Strike
    often: int
    """Cards of it in a deck."""
    real: bool = False
    """The real engine can have it."""
    idle: bool = False
    """It falls when nothing is under way."""
    later: bool = False
    """Part of its recovery waits by design: a load that is slow, a hang that has to be seen, a start that failed before."""
    after_s: float = 0.0
    """It comes when the child has been ready for so long."""
    within: bool = False
    """It may come during another's recovery."""
    disk: bool = False
    """It needs the small file systems."""


async def _hit(box: Box, number: signal.Signals) -> Life | None:
    life = await box.living()
    if life is not None:
        box.strike(life, number)
    return life


async def kill(box: Box) -> Life | None:
    """SIGKILL."""
    return await _hit(box, signal.SIGKILL)


async def freeze(box: Box) -> Life | None:
    """SIGSTOP: it lives, and does nothing."""
    return await _hit(box, signal.SIGSTOP)


async def wedge(box: Box) -> Life | None:
    """Its main loop turns no more; ``/health`` is well."""
    return await _hit(box, signal.SIGUSR1)


async def terminate(box: Box) -> Life | None:
    """SIGTERM from outside: it takes no more connections and waits for those it has."""
    return await _hit(box, signal.SIGTERM)


async def crash(box: Box) -> Life | None:
    """SIGSEGV or SIGABRT."""
    return await _hit(box, box.rng.choice((signal.SIGSEGV, signal.SIGABRT)))


async def _next_start(box: Box, **knobs: Any) -> Life | None:  # noqa: ANN401
    """Kill the child, and have the next start be so; the child of that start."""
    box.tune(**knobs)
    await kill(box)
    after = await box.living()
    if after is not None:
        await box.until(lambda: box.has_started(after), PROBE_S)
    box.tune()
    return after


async def kill_loading(box: Box) -> Life | None:
    """Kill the child, and the next one while it loads."""
    if box.fake:
        after = await _next_start(box, load_s=LOAD_S + 0.5)
    else:
        await kill(box)
        after = await box.living()
    await asyncio.sleep(box.rng.random() * 0.4)
    if after is not None:
        box.strike(after, signal.SIGKILL)
    return after


async def never_healthy(box: Box) -> Life | None:
    """The next start answers, and never that it is well."""
    return await _next_start(box, never_healthy=True)


async def late(box: Box) -> Life | None:
    """The next load takes much longer. It isn't to end."""
    await _next_start(box, load_s=box.rng.uniform(*LATE_S))
    return None


async def no_memory(box: Box) -> Life | None:
    """The next load finds no memory."""
    return await _next_start(box, oom_at_load=True)


async def bad_start(box: Box) -> Life | None:
    """The next start exits for no reason that anybody knows."""
    return await _next_start(box, start_exit=1, start_log="something is wrong")


async def dies_warming(box: Box) -> Life | None:
    """The next child dies of its warm-up."""
    return await _next_start(box, die_warming=True)


async def out_of_memory(box: Box) -> Life | None:
    """In the middle of an answer it says that memory ran out, and aborts."""
    life = await box.living()
    log = "CUDA error: out of memory\n  current device: 0, in function alloc at ggml-cuda.cu:512"
    request = box.traffic.new(stream=True, fake={"die_after_tokens": 2, "die_log": log})
    await box.traffic.send(request)
    return life


async def poison(box: Box) -> Life | None:
    """A request that kills whoever answers it; unstreamed, so it could be put to the next child again."""
    life = await box.living()
    await box.traffic.send(box.traffic.new(stream=False, fake={"die_after_tokens": 2}))
    return life


async def slow_exit(box: Box) -> Life | None:
    """A child that holds its socket for a while when it is told to go, among requests."""
    await _told("/llmctl/restart", box, slow_exit_s=SLOW_EXIT_S)
    return await _told("/llmctl/unload", box)


async def unload(box: Box) -> Life | None:
    """Unloaded among requests: those that wait have it started again."""
    return await _told("/llmctl/unload", box)


async def restart(box: Box) -> Life | None:
    """Started anew among requests, because somebody said so."""
    return await _told("/llmctl/restart", box)


async def _told(path: str, box: Box, **knobs: Any) -> Life | None:  # noqa: ANN401
    """Have llmctl end the child; another one is started, with these knobs."""
    await box.until(lambda: box.state == "ready", DEATH_S)
    before = await box.living()
    if box.fake:
        box.tune(**knobs)
    if before is None or not await box.post(path):
        return None
    await box.until(lambda: before.ended_s is not None, DEATH_S)
    after = await box.living(PROBE_S)
    if box.fake and after is not None:
        await box.until(lambda: box.has_started(after), PROBE_S)
        box.tune()
    return before


async def kill_llmctl(box: Box) -> Life | None:
    """SIGKILL to llmctl itself; then it is started again in the same home."""
    life = box.child
    await box.kill()
    return life


async def leave(box: Box) -> Life | None:
    """Many clients come at once and go at moments of their own."""
    await box.traffic.burst(BURST, BURST_S)
    return None


async def full_logs(box: Box) -> Life | None:
    """The disk of the logs is full while a child dies and another one is to start."""
    with box.full(box.house.home.logs):
        life = await kill(box)
        await asyncio.sleep(box.rng.uniform(*FULL_S))
    return life


async def full_home(box: Box) -> Life | None:
    """The disk of everything but the logs is full meanwhile: the records' and the run folder's."""
    with box.full(box.house.root):
        life = await kill(box)
        await asyncio.sleep(box.rng.uniform(*FULL_S))
    return life


async def no_run_folder(box: Box) -> Life | None:
    """Somebody cleans up: the run folder is gone, and then the child dies."""
    life = await box.living()
    shutil.rmtree(box.house.home.run, ignore_errors=True)
    if life is not None:
        box.strike(life, signal.SIGKILL)
    return life


FAULTS: Final = (
    Fault("kill -9 mid-stream", kill, 6, real=True, within=True),
    Fault("kill -9 after a minute", kill, 1, real=True, after_s=RAN_WELL_S),
    Fault("kill -9 idle", kill, 3, real=True, idle=True),
    Fault("kill -9 while loading", kill_loading, 3, real=True, later=True, within=True),
    Fault("SIGSEGV or SIGABRT", crash, 2, real=True, within=True),
    Fault("SIGSTOP", freeze, 2, real=True, later=True),
    Fault("wedged main loop", wedge, 1, later=True),
    Fault("SIGTERM from outside", terminate, 2, real=True, later=True),
    Fault("kill -9 of llmctl", kill_llmctl, 3, real=True, later=True, within=True),
    Fault("out of memory, abort", out_of_memory, 2, within=True),
    Fault("out of memory at load", no_memory, 1, later=True, within=True),
    Fault("exit at load", bad_start, 1, later=True, within=True),
    Fault("death at warm-up", dies_warming, 1, later=True, within=True),
    Fault("poison", poison, 1, later=True),
    Fault("never healthy", never_healthy, 1, later=True),
    Fault("health late", late, 3, later=True, within=True),
    Fault("unload", unload, 1, real=True, later=True),
    Fault("restart", restart, 1, real=True, later=True),
    Fault("slow exit", slow_exit, 2, later=True),
    Fault("clients leave", leave, 3, real=True, later=True, within=True),
    Fault("logs' disk full", full_logs, 1, later=True, within=True, disk=True),
    Fault("run folder gone", no_run_folder, 1, later=True),
    Fault("home's disk full", full_home, 1, later=True, disk=True),
)


class Deck:
    """Faults in an order of chance, so that each comes as often as it should."""

    def __init__(self, faults: tuple[Fault, ...], rng: random.Random) -> None:
        self.faults, self.rng = faults, rng
        self.cards: list[Fault] = []

    def draw(self) -> Fault:
        """The next one."""
        if not self.cards:
            self.cards = [fault for fault in self.faults for _ in range(fault.often)]
            self.rng.shuffle(self.cards)
        return self.cards.pop()


def fitting(*, fake: bool, disks: bool) -> tuple[Fault, ...]:
    """The faults that an engine can have here."""
    return tuple(fault for fault in FAULTS if (fake or fault.real) and (disks or not fault.disk))
