"""A run: every subject at every level, in turns, a warm-up first.

A repetition goes through all levels, and at each level through all subjects, in an order that turns round from one repetition to the
next. So what the machine does meanwhile (heat, other people's work) meets all of them alike, and two subjects can be compared pair by
pair.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import supervisor
from bench import flags, gauges, result
from bench.ask import Ask, Level, schedule
from bench.exchange import Address, Wires
from bench.load import TIMEOUT_S, Answers, Load
from bench.prompts import Writer
from bench.result import Manifest, Point, Result, Subject
from bench.sample import Sample
from bench.target import Target
from bench.trace import Trace
from bench.workload import Api, Workload
from supervisor.errors import Error, Exit
from supervisor.units import Progress

WARM_UP: Final = -1


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be measured."""

    workload: Workload
    targets: tuple[Target, ...]
    levels: tuple[Level, ...]
    seed: int
    salt: str
    timeout_s: float = TIMEOUT_S
    replayed: Trace | None = None
    """What is asked, in the place of the workload's; it has no warm-up, since what it recorded had none."""
    speed: float = 1.0
    """Of a replay."""

    def repetition(self, level: Level, number: int) -> tuple[Ask, ...]:
        """Its requests."""
        if self.replayed is None:
            return schedule(self.workload, level, self.seed, self.salt, number)
        return self.replayed.asks(self.speed, f"{self.salt} {number}") if number >= 0 else ()

    def requests(self) -> int:
        """How many there will be in all."""
        numbers = range(WARM_UP, self.workload.repetitions)
        return len(self.targets) * sum(len(self.repetition(level, number)) for level in self.levels for number in numbers)


class _Writers:
    """Makes the requests of a run: one writer for each model and API."""

    def __init__(self, made: Mapping[tuple[str, Api], Writer]) -> None:
        self._made = made

    @classmethod
    async def of(cls, target: Target, order: Order, say: Callable[[str], None]) -> _Writers:
        """Those that the order's requests to this server need."""
        kinds = {("", order.workload.api)}
        if order.replayed is not None:
            kinds = {(each.preset, each.api) for each in order.replayed.requests if each.body is None} or kinds
        made = {}
        for preset, api in sorted(kinds):
            made[preset, api] = await Writer.of(replace(target, model=preset or target.model), api, say, order.workload.ask)
        return cls(made)

    def body(self, ask: Ask, answers: Answers) -> tuple[str, dict[str, Any]]:
        """Of one request."""
        writer = next(iter(self._made.values())) if ask.body is not None else self._made[ask.preset, ask.api]
        return writer.body(ask, answers)


@dataclass(slots=True)
class _Seat:
    """A subject while it is measured."""

    target: Target
    writer: _Writers
    wires: Wires
    gauges: gauges.Gauges


@dataclass(slots=True)
class _Cell:
    """A subject at a level."""

    samples: list[Sample] = field(default_factory=list)
    began_s: dict[int, float] = field(default_factory=dict)
    gauges: dict[int, Mapping[str, float]] = field(default_factory=dict)


class Run:
    """A run under way. What was measured whole so far is in :meth:`result`, also when it is cancelled."""

    def __init__(self, order: Order, *, progress: Progress, say: Callable[[str], None]) -> None:
        self.order = order
        self.created_at = time.time()
        self._progress = progress
        self._say = say
        self._began_s = time.perf_counter()
        self._cpu_s = time.thread_time()
        self._sent = 0
        self._total = order.requests()
        self._cells = {(target.name, level): _Cell() for target in order.targets for level in order.levels}
        self._whole = False

    async def measure(self) -> None:
        """All of it. Raises :class:`Error` (exit code 8) when a subject answers nothing of its warm-up."""
        order = self.order
        async with contextlib.AsyncExitStack() as stack:
            seats = [await stack.enter_async_context(self._seated(target)) for target in order.targets]
            self._began_s, self._cpu_s = time.perf_counter(), time.thread_time()
            for number in range(WARM_UP, order.workload.repetitions):
                for level in order.levels:
                    turn = number % len(seats)
                    for seat in (*seats[turn:], *seats[:turn]):
                        await self._repeat(seat, level, number)
        self._whole = True

    @contextlib.asynccontextmanager
    async def _seated(self, target: Target) -> AsyncIterator[_Seat]:
        writer = await _Writers.of(target, self.order, self._say)
        wires = Wires(Address.of(target.url, target.key))
        async with gauges.Gauges(target.pids, os.getpid()) as watching:
            try:
                yield _Seat(target, writer, wires, watching)
            finally:
                wires.close()

    async def _repeat(self, seat: _Seat, level: Level, number: int) -> None:
        asks = self.order.repetition(level, number)
        if not asks:
            return
        load = Load(
            *(seat.target.name, seat.wires, seat.writer),
            began_s=self._began_s,
            timeout_s=self.order.timeout_s,
            done=self._count,
        )
        began_s = time.perf_counter() - self._began_s
        seat.gauges.mark()
        found = await load.run(asks, level, number)
        seen = seat.gauges.take()
        if number == WARM_UP:
            if not any(each.ok for each in found):
                raise _unanswered(seat.target, found)
            return
        cell = self._cells[seat.target.name, level]
        cell.samples += found
        cell.began_s[number] = began_s
        cell.gauges[number] = seen

    def _count(self, _: Sample) -> None:
        self._sent += 1
        self._progress("measuring", self._sent, self._total)

    @property
    def samples(self) -> list[Sample]:
        """Of all repetitions that were measured whole, without warm-ups, in the order of their sending."""
        return sorted((sample for cell in self._cells.values() for sample in cell.samples), key=lambda each: each.sent_s)

    def result(self) -> Result:
        """What was measured."""
        order = self.order
        events = sum(each.events for each in self.samples)
        spent_s = time.thread_time() - self._cpu_s
        lasted_s = time.perf_counter() - self._began_s
        return Result(
            manifest=Manifest(
                created_at=round(self.created_at, 3),
                llmctl=supervisor.__version__,
                workload=order.workload,
                seed=order.seed,
                salt=order.salt,
                subjects=tuple(_subject(target) for target in order.targets),
                machine=gauges.machine(),
                replayed=order.replayed.digest if order.replayed else "",
                generator={
                    "cpu_share": round(spent_s / lasted_s, 4) if lasted_s else 0.0,
                    **({"us_an_event": round(spent_s / events * 1e6, 2)} if events else {}),
                },
            ),
            points=tuple(self._point(target.name, level) for target in order.targets for level in order.levels),
            cut_short=not self._whole,
        )

    def _point(self, target: str, level: Level) -> Point:
        cell, workload = self._cells[target, level], self.order.workload
        made = result.point(target, level, cell.samples, workload.limits, began_s=cell.began_s, gauges=cell.gauges)
        return replace(
            made, flags=flags.of_point(workload, cell.samples, made.repetitions, replayed=self.order.replayed is not None)
        )


def _subject(target: Target) -> Subject:
    return replace(target.subject, name=target.name)


def _unanswered(target: Target, found: Sequence[Sample]) -> Error:
    reasons = [each.error or "no reason told" for each in found]
    return Error(
        f"{target.name} at {target.url} answered none of {len(found)} requests: {max(set(reasons), key=reasons.count)}",
        exit=Exit.CHILD,
        hint=f"llmctl logs {target.subject.preset}" if target.subject.preset else f"curl {target.url}/v1/models",
    )
