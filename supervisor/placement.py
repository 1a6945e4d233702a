"""Which children may be in memory together, and which one gives way for whom. Pure: bytes, and time, are arguments.

What counts are the bytes of the plans, in every pool of memory (the host's, each card's), never a number of models. A child that runs
has a right to all that was planned for it, whether it has taken it already or not; so what a new one may use is what is free now, less
what the running ones have yet to take.

A preset that is asked for and doesn't fit beside what runs, in this order (:func:`choose`):

(1) It fits: it starts beside them.
(2) It would fit were some others gone: those give way; idle ones first, then those that nobody ordered by name, then the longest unused.
    No more of them than are needed.
(3) One that has to give way and is busy may go on for its ``hold``, and then takes no new request, so that endless traffic for it
    doesn't keep the other waiting. What it has in work is not cut.
(4) Others are just being loaded or stopped: it is looked at again when they are. Where those that are being stopped are enough, nobody
    else gives way.
(5) Else it can't run beside what may not give way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from supervisor.plan import Plan

HOST = "host"
"""The pool that the CPU's models, and the host's part of the others, are in."""

Pools = Mapping[str, int]
"""Bytes by pool."""


def needs(plan: Plan) -> Pools:
    """What a plan takes of each pool. On the CPU the device is the host."""
    if not plan.budget.cuda:
        return {HOST: plan.device_bytes + plan.host_bytes}
    return {plan.preset.device: plan.device_bytes, HOST: plan.host_bytes}


@dataclass(frozen=True, slots=True)
class Running:
    """A child that has memory, or is about to."""

    name: str
    planned: Pools
    held: Pools
    """What it has taken already; more than planned counts as planned."""
    yields: bool = True
    """It may give way for this one."""
    settled: bool = True
    """It isn't just loading, nor giving way to another one."""
    leaving: bool = False
    """Its end has begun, or its memory is not free again yet."""
    busy: bool = False
    ordered: bool = False
    """The user asked for it by name."""
    used_s: float = 0.0
    """When it was last used."""
    due_s: float = 0.0
    """Until when it may go on while it is busy."""

    def outstanding(self, pool: str) -> int:
        """What it has yet to take."""
        return max(0, self.planned.get(pool, 0) - self.held.get(pool, 0))


@dataclass(frozen=True, slots=True)
class Start:
    """It fits: start it now."""


@dataclass(frozen=True, slots=True)
class GiveWay:
    """These take no more requests, and end when they are idle."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Look again at this time, or when something changed."""

    until_s: float | None = None


@dataclass(frozen=True, slots=True)
class Never:
    """It doesn't fit beside these, and they don't give way."""

    beside: tuple[str, ...]


Choice = Start | GiveWay | Wait | Never


def spare(running: Sequence[Running]) -> dict[str, int]:
    """What a new plan may count on beside what is free now (negative: less than that), were all gone that may give way."""
    found: dict[str, int] = {}
    for each in running:
        for pool, planned in each.planned.items():
            found[pool] = found.get(pool, 0) - each.outstanding(pool) + (planned if each.yields else 0)
    return found


def choose(need: Pools, free: Pools, running: Sequence[Running], now_s: float) -> Choice:
    """What is to happen for a preset that needs this; ``free`` is read off the machine now."""
    if _fits(need, free, running, ()):  # (1)
        return Start()
    leaving = [each for each in running if each.leaving]
    if _fits(need, free, running, leaving):  # (4)
        return Wait()
    going: list[Running] = []
    for each in sorted((each for each in running if each.yields and each.settled and not each.leaving), key=_order):  # (2)
        going.append(each)
        if _fits(need, free, running, [*leaving, *going]):
            break
    else:
        if any(each.leaving or not each.settled for each in running):  # (4)
            return Wait()
        return Never(tuple(each.name for each in running if not each.yields))  # (5)
    for each in going[-2::-1]:  # those that had rather stay first
        without = [other for other in going if other is not each]
        if _fits(need, free, running, [*leaving, *without]):
            going = without
    late = [each.due_s for each in going if each.busy and each.due_s > now_s]
    if late:  # (3)
        return Wait(max(late))
    return GiveWay(tuple(each.name for each in going))


def _order(each: Running) -> tuple[bool, bool, float]:
    return each.busy, each.ordered, each.used_s


def _fits(need: Pools, free: Pools, running: Sequence[Running], gone: Sequence[Running]) -> bool:
    for pool, count in need.items():
        room = free.get(pool, 0) - sum(each.outstanding(pool) for each in running)
        room += sum(each.planned.get(pool, 0) for each in gone)
        if count > room:
            return False
    return True
