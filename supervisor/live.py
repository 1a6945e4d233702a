"""What is so at this moment, as ``status``, ``top`` and ``/metrics`` tell it: each preset, and what is in work."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import psutil

from supervisor.lifecycle import State
from supervisor.metrics import Live, LivePreset
from supervisor.reply import Reply
from supervisor.units import MIB
from supervisor.ward import Ward


def describe(ward: Ward) -> dict[str, Any]:
    """One preset as ``status --json`` shows it; scripts rely on these names."""
    admission = ward.line.admission
    return {
        "name": ward.name,
        "state": ward.state.value,
        "pid": ward.child.pid if ward.child else None,
        "slots": {"busy": admission.busy, "total": admission.places},
        "waiting": admission.waiting,
        "restarts": ward.restarts,
        "cause": ward.why,
        "log": list(ward.cause.lines) if ward.cause is not None else [],
        "try": ward.hint,
        "died_s_ago": None if ward.died_s == -math.inf else round(time.monotonic() - ward.died_s, 1),
        "try_again_s": None if ward.again_s is None else round(max(0.0, ward.again_s - time.monotonic()), 1),
        "held": ward.held,
        "wanted_by": ward.wanted.value if ward.wanted else None,
        "stopped_by": ward.unwanted.value if ward.unwanted else None,
        "used_mib": {"host": _whole_mib(ward.own_bytes), "card": _whole_mib(ward.card_bytes)},
        "loaded": ward.loaded if ward.state is State.STARTING else None,
        "speculative": ward.guessing,
        "pinned": ward.preset.pin,
        "memory": _memory(ward),
    }


def _memory(ward: Ward) -> dict[str, Any] | None:
    """MiB a term: what the plan said, and what the engine said at its last start, None for what its log doesn't name."""
    if ward.launch is None:
        return None
    plan, seen = ward.launch.plan, ward.allocated
    return {
        "device": plan.budget.device,
        "planned_mib": {"device": _mib(plan.predicted.device), "host": _mib(plan.predicted.host)},
        "allocated_mib": {"device": _mib(seen.device), "host": _mib(seen.host)} if seen else None,
        "given_up": list(plan.given_up),
    }


def _whole_mib(count: int | None) -> int | None:
    return None if count is None else round(count / MIB)


def _mib(terms: Mapping[str, int]) -> dict[str, float]:
    return {term: round(count / MIB, 2) for term, count in terms.items()}


def phase(answer: Reply) -> str:
    """``waits`` for an engine or a place there, ``prefill``, or ``decode`` once it has text."""
    if not answer.exchanging:
        return "waits"
    return "decode" if answer.meter.events else "prefill"


def in_work(answers: Iterable[Reply], now_s: float) -> list[dict[str, Any]]:
    """Requests that have no end yet, the oldest first; ``now_s`` is by the monotonic clock."""
    found = []
    for answer in answers:
        row, made, first_s = answer.row, answer.meter.events, answer.meter.first_s
        since_s = now_s - first_s if first_s is not None else 0.0
        found.append(
            {
                "id": row.id,
                "preset": row.preset,
                "route": row.route,
                "phase": phase(answer),
                "age_s": round(now_s - row.opened_s, 3),
                "tokens": made,
                "tokens_per_s": round((made - 1) / since_s, 2) if made > 1 and since_s > 0 else None,
            }
        )
    return found


def for_metrics(wards: Mapping[str, Ward], answers: Iterable[Reply], *, power_w: float | None, lost: int) -> Live:
    """The moment of a scrape."""
    made: Counter[str] = Counter()
    for answer in answers:
        made[answer.row.preset] += answer.meter.events
    return Live(
        presets={
            name: LivePreset(
                state=ward.state,
                slots=ward.line.admission.places if ward.upstream is not None else 0,
                busy=ward.line.admission.busy,
                waiting=ward.line.admission.waiting,
                restarts=ward.restarts,
                made_tokens=made[name],
                host_bytes=ward.own_bytes,
                card_bytes=ward.card_bytes,
            )
            for name, ward in wards.items()
        },
        power_w=power_w,
        lost=lost,
        cpu_s=time.process_time(),
        rss_bytes=psutil.Process().memory_info().rss,
    )
