"""What to give up after a child ran out of memory with a plan that should have fitted. Pure.

A plan fits by its estimate; a child that dies says that the estimate, or what else used the memory, was not so. So the next plan is
smaller than the one that died, whatever it is planned to take: by the preset's own ``fallback``, one rung a death, since that is the
order in which its owner would give things up. A rung counts only where it lessens the pool that ran out: a smaller prompt cache of the
host mends no card.

Two causes have a ladder of their own, which is said as what is given up like any other. A CUDA graph that finds no room on an 8 GB card
(llama.cpp#22638) needs none of the model given up: without graphs a step is launched kernel by kernel. An illegal memory access is a bug
of one kernel or of the graph that holds it (llama.cpp#16953, #24310, #27430), so what chooses other kernels is tried: no graphs, no draft
to verify, a cache that needs no conversion.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from supervisor.causes import Kind
from supervisor.errors import Error
from supervisor.model import Model
from supervisor.option import OFF
from supervisor.plan import Plan, Step, lessening, stacked
from supervisor.profile import FEWER_LAYERS
from supervisor.value import Value

LEAST_UBATCH: Final = 64
"""Tokens: a ubatch isn't halved to less."""
LAYERS_PART: Final = 0.1
"""Layers leave a card that ran out in lots of at least this part of what the plan takes there, so that few starts are spent on it."""

Replan = Callable[[Sequence[Step]], Plan]
"""The same order with these steps given up first (:func:`supervisor.plan.make`), for the same memory at each call."""
_Pool = Callable[[Plan], int]
_Changes = Mapping[str, Value | Model | None]

_WHY: Final[Mapping[Kind, str]] = {
    Kind.DEVICE_MEMORY: "it ran out of the card's memory",
    Kind.HOST_MEMORY: "it ran out of the machine's memory",
    Kind.GRAPH_MEMORY: "a CUDA graph found no room on the card",
    Kind.ILLEGAL_ACCESS: "an illegal memory access on the card",
}


def after(plan: Plan, kind: Kind, replan: Replan) -> tuple[Step, ...] | None:
    """The steps of the plan to try after a child of ``plan`` ended for ``kind``; None when there is nothing left to give up.

    (1) Out of memory, of the device or the host: the next rung of the fallback that lessens it, then layers, if the fallback ends with
    that. (2) A CUDA graph without room: no graphs, half the ubatch, no MTP, then as (1). (3) An illegal access: no graphs, no
    speculation, a cache of f16 where that fits without anything else given up. Any other kind: None.

    Raises :class:`Error` where what is asked can't run at all any more.
    """
    card = plan.budget.cuda
    if kind not in _WHY or (kind in (Kind.GRAPH_MEMORY, Kind.ILLEGAL_ACCESS) and not card):
        return None
    now = replan(plan.steps)  # the memory may be another's by now: what is short for it is no help against the death
    why = _WHY[kind] if card else _WHY[Kind.HOST_MEMORY]
    if kind is Kind.ILLEGAL_ACCESS:  # (3)
        ways = [_no_graphs(now, why), _no_speculation(now, why), _plain_cache(now, why, replan)]
    elif kind is Kind.GRAPH_MEMORY:  # (2)
        ways = [_no_graphs(now, why), _half_ubatch(now, why)]
        ways += [_no_speculation(now, why)] if now.asked.speculative == "mtp" else []
        ways += [_rungs(now, why, replan, _device)]
    else:  # (1)
        ways = [_rungs(now, why, replan, _device if card and kind is Kind.DEVICE_MEMORY else _host if card else _both)]
    step = next(itertools.chain(*ways), None)
    return None if step is None else stacked(now.steps, step)


def _device(plan: Plan) -> int:
    return plan.device_bytes


def _host(plan: Plan) -> int:
    return plan.host_bytes


def _both(plan: Plan) -> int:
    """Without a card both are the machine's memory."""
    return plan.device_bytes + plan.host_bytes


def _no_graphs(now: Plan, why: str) -> Iterator[Step]:
    if now.asked.cuda_graphs:
        yield Step({"cuda_graphs": False}, why)


def _half_ubatch(now: Plan, why: str) -> Iterator[Step]:
    """Once; a batch stays at least as large. Not where a text is embedded in one ubatch, which would shorten what may be asked."""
    half = int(now.preset.ubatch) // 2
    taken = any("ubatch" in step.changes for step in now.steps)
    if half >= LEAST_UBATCH and now.asked.kind == "chat" and not taken:
        yield Step({"ubatch": half}, why)


def _no_speculation(now: Plan, why: str) -> Iterator[Step]:
    if now.asked.speculative != OFF:
        draft: _Changes = {"draft_model": None} if now.asked.draft_model else {}
        yield Step({"speculative": OFF, **draft}, why)


def _plain_cache(now: Plan, why: str, replan: Replan) -> Iterator[Step]:
    """Such a cache is larger, so it is no step down where something else had to make room for it."""
    wanted: _Changes = {"cache_type_k": "f16", "cache_type_v": "f16"}
    if changes := lessening(now.asked, wanted):
        step = Step(changes, why)
        found = _tried(now, step, replan)
        if found is not None and found.fits and found.steps == (*now.steps, step):
            yield step


def _rungs(now: Plan, why: str, replan: Replan, pool: _Pool) -> Iterator[Step]:
    """The steps that lessen the pool, in the fallback's order, each on top of ``now`` alone."""
    for rung in now.asked.fallback:
        if rung == FEWER_LAYERS:
            yield from _fewer_layers(now, why, replan) if pool is _device else ()
        elif changes := lessening(now.asked, rung.changes):
            step = Step(changes, why)
            found = _tried(now, step, replan)
            if found is not None and pool(found) < pool(now):
                yield step


def _fewer_layers(now: Plan, why: str, replan: Replan) -> Iterator[Step]:
    """The most layers with which the device's bytes fall by :data:`LAYERS_PART`, or none of them; what they take grows with them."""
    most = now.device_bytes * (1 - LAYERS_PART)

    def taken(layers: int) -> float:
        found = _tried(now, Step({"gpu_layers": layers}, why), replan)
        return now.device_bytes if found is None else found.device_bytes

    layers = max(0, bisect.bisect_right(range(now.settings.gpu_layers), most, key=taken) - 1)
    if now.settings.gpu_layers and taken(layers) < now.device_bytes:
        yield Step({"gpu_layers": layers}, why)


def _tried(now: Plan, step: Step, replan: Replan) -> Plan | None:
    """The plan with one step more; None where that can't run (a cache without a kernel)."""
    try:
        return replan(stacked(now.steps, step))
    except Error:
        return None
