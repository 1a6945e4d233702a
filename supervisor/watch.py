"""Looks after one running child: does it move, how much memory has it, how much does it write. Its keeper acts on what this finds.

Whether it hangs is ``progress``'s judgement; here are the looks. What a child can't be blamed for at once (its memory has grown, its
socket's name is gone) has it renewed when what is in work has ended; what makes it useless is returned as the cause to end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import Final

from supervisor import causes, scene
from supervisor.catalog import Launch
from supervisor.causes import Cause, Kind, Scene
from supervisor.child import Child
from supervisor.placement import HOST
from supervisor.progress import Hung, Look, Progress, Verdict
from supervisor.symptoms import RELOAD
from supervisor.units import MIB, duration, size
from supervisor.upstream import Upstream
from supervisor.vram import Vram
from supervisor.ward import Ward

log = logging.getLogger("llmctl.watch")

TICK_S: Final = 2.0
"""Between two looks. One costs some 0.1 ms."""
LATE_S: Final = 1.0
"""A look that comes so much later than it was to: llmctl itself wasn't running, and what it saw says nothing of the child."""
DECODE_S: Final = 20.0
"""For one token after a resume, with a card that has to wake up first."""
SAMPLE_S: Final = 10.0
"""Between two looks at its memory."""
LOAD_IDLE_S: Final = 30.0
"""A load in which nothing is computed and nothing read for so long hangs (llama.cpp#15128). A disk that has to spin up takes 10 s."""
GROWTH: Final = 0.25
LEAST_GROWTH: Final = 512 * MIB
"""Own memory beyond the whole plan by a quarter, and by this, is a leak (llama.cpp#21690, #20509, #25953)."""
RENEW_S: Final = 3600.0
"""Not more often than this for its memory: if it is as large again, the plan was wrong, and a restart would mend nothing."""
FLOOD_BYTES_S: Final = 8 * MIB
FLOOD_S: Final = 10.0
"""A log that grows so fast for so long is of an engine in a loop (llama.cpp#28744). A request writes some 2 KiB."""
IDLE_SHARE: Final = 0.02
"""Less of a CPU than this is none in a load: to be asked for /health costs some, and more where the machine is busy."""


async def over(ward: Ward, launch: Launch, upstream: Upstream, cards: Vram) -> Cause | None:
    """Watch it until it has ended (None), or is to be ended (why)."""
    watcher = _Watcher(ward, launch, upstream, cards)
    while upstream.child.returncode is None:
        due_s = time.monotonic() + TICK_S
        await _turn(upstream)
        if upstream.child.returncode is None and (problem := await watcher.look(due_s)) is not None:
            return problem
    return None


async def _turn(upstream: Upstream) -> None:
    """Until the next look, the child's end, or a doubt."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(TICK_S), asyncio.TaskGroup() as group:
            waits = [group.create_task(each, name="watch") for each in (upstream.child.wait(), upstream.doubted.wait())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for each in waits:
                each.cancel()


@dataclass(slots=True)
class _Watcher:
    ward: Ward
    launch: Launch
    upstream: Upstream
    cards: Vram
    progress: Progress = field(init=False)
    suspended_s: float = field(default_factory=scene.suspended_s)
    sampled_s: float = -float("inf")
    logged_bytes: int = 0
    grew: bool = False
    """Its log did, since the last look."""
    flooded_s: float = 0.0
    looked_s: float = field(default_factory=time.monotonic)

    @property
    def scene(self) -> Scene:
        """Of a machine on which nothing else happened."""
        return Scene(cuda=self.launch.plan.budget.cuda)

    def __post_init__(self) -> None:
        self.progress = Progress(cuda=self.launch.plan.budget.cuda, batch_s=self.launch.batch_s)

    async def look(self, due_s: float) -> Cause | None:
        """One look at everything."""
        now_s = time.monotonic()
        suspended_s = scene.suspended_s()
        slept = suspended_s - self.suspended_s > LATE_S
        self.suspended_s = suspended_s
        if slept:
            log.info("%s: the machine slept", self.ward.name)
            if self.launch.plan.budget.cuda and not self.upstream.exchanges and not await self.upstream.decodes(DECODE_S):
                return Cause("it doesn't decode since the machine slept", kind=Kind.NO_CARD, hint=RELOAD)
        doubted = self.upstream.doubted.is_set()
        self.upstream.doubted.clear()
        if not self.upstream.child.socket.exists():  # it is made anew with the next child
            self.ward.renew("its socket is gone")
        elif doubted and self.upstream.refuses():
            if self.upstream.child.exiting():  # of something else: its exit will say of what
                await self.upstream.ends()
            if self.upstream.child.returncode is None:
                return Cause("it takes no connections any more; somebody told it to stop", kind=Kind.OUTSIDE)
        moved = await self._moves(lagged=slept or now_s - due_s > LATE_S)
        if moved is not None:
            return moved
        if (flood := await self._flood(now_s)) is not None:
            return flood
        if self.grew and (problem := causes.of_memory(self.upstream.child.log_tail(), self.scene)) is not None:
            return problem
        if now_s - self.sampled_s >= SAMPLE_S:
            self.sampled_s = now_s
            await self._weigh(now_s)
        return None

    async def _moves(self, *, lagged: bool) -> Cause | None:
        verdict = self.progress.look(self._seen(lagged=lagged))
        if verdict is Verdict.ASK:
            asked_s = time.monotonic()
            slots = await self.upstream.slots(self.progress.answer_s)
            if self.upstream.child.returncode is not None:
                return None
            late = time.monotonic() - asked_s > self.progress.answer_s + LATE_S
            verdict = self.progress.told(self._seen(lagged=late), slots)
        return _hang(verdict)

    def _seen(self, *, lagged: bool) -> Look:
        process = self.upstream.child
        return Look(
            at_s=time.monotonic(),
            in_work=self.upstream.unread,
            heard=self.upstream.heard,
            effort_s=process.effort_s() if self.upstream.exchanges else 0.0,
            stopped=process.stopped(),
            lagged=lagged,
        )

    async def _flood(self, now_s: float) -> Cause | None:
        """What it writes is kept within bounds, and must not be all that it does."""
        process = self.upstream.child
        await asyncio.to_thread(process.trim_log)
        grew, dt_s = process.logged_bytes - self.logged_bytes, now_s - self.looked_s
        self.logged_bytes, self.looked_s, self.grew = process.logged_bytes, now_s, grew > 0
        self.flooded_s = self.flooded_s + dt_s if grew > FLOOD_BYTES_S * dt_s else 0.0
        if self.flooded_s < FLOOD_S:
            return None
        return Cause(f"it wrote {size(int(grew / dt_s))} of log a second for {duration(self.flooded_s)}", kind=Kind.HANG)

    async def _weigh(self, now_s: float) -> None:
        """Look at its memory; more than was planned by far is a leak, and it is renewed."""
        process, ward = self.upstream.child, self.ward
        ward.own_bytes = process.anonymous_bytes()
        planned = self.launch.needs
        said = ""
        if ward.own_bytes > (limit := planned[HOST] + max(LEAST_GROWTH, int(planned[HOST] * GROWTH))):
            said = f"it has {size(ward.own_bytes)} of its own, and {size(limit)} is the most for its plan"
        if self.launch.plan.budget.cuda:
            ward.card_bytes = (await asyncio.to_thread(self.cards.used_bytes, (process.pid,))).get(process.pid)
            limit = planned[self.launch.preset.device]  # with its margin
            if ward.card_bytes is not None and ward.card_bytes > limit:
                said = f"it has {size(ward.card_bytes)} of the card, and {size(limit)} was planned"
        if said and now_s - ward.weighed_s >= RENEW_S:
            ward.weighed_s = now_s
            ward.renew(said)


def _hang(verdict: Verdict | Hung) -> Cause | None:
    if not isinstance(verdict, Hung):
        return None
    return Cause(f"it {verdict.text}", kind=Kind.OUTSIDE if verdict.outside else Kind.HANG)


class Load:
    """Whether a child that loads does anything."""

    def __init__(self, process: Child) -> None:
        self._process = process
        self._since_s = time.monotonic()
        self._effort_s = 0.0
        self._read_bytes = 0
        self._progress = Progress(cuda=False, batch_s=0.0)

    def __repr__(self) -> str:
        return f"<Load of {self._process!r}>"

    def stopped(self, now_s: float) -> Cause | None:
        """Why it is to be ended, if somebody outside has stopped it."""
        seen = Look(at_s=now_s, in_work=0, heard=0, effort_s=0.0, stopped=self._process.stopped())
        return _hang(self._progress.look(seen))

    def stalled(self, now_s: float) -> Cause | None:
        """Why it is to be ended, if it has neither computed nor read anything for :data:`LOAD_IDLE_S`."""
        waited_s = now_s - self._since_s
        if waited_s < 1.0:
            return None
        effort_s, read_bytes = self._process.effort_s(), self._process.read_bytes()
        if read_bytes > self._read_bytes or effort_s - self._effort_s > waited_s * IDLE_SHARE:
            self._since_s, self._effort_s, self._read_bytes = now_s, effort_s, read_bytes
            return None
        if waited_s < LOAD_IDLE_S:
            return None
        return Cause(f"it neither computed nor read anything for {duration(waited_s)} while it loaded", kind=Kind.HANG)
