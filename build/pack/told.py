"""What ``measure.py`` saw, in the words of its result. Sizes are MiB, to a hundredth."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from supervisor.engine import Engine
from supervisor.estimate import Estimate
from supervisor.hardware import Hardware
from supervisor.trial import Case, Measured

MIB = 1024 * 1024
UNNAMED = ("context", "margin")
"""Terms of a plan that no line of the engine's log stands for."""


def of_machine(machine: Hardware) -> dict[str, Any]:
    """The machine, for the result."""
    return {
        "cpu": machine.cpu_name,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_mib": mib(machine.total_bytes),
        "cards": [{"name": card.name, "arch": card.arch, "total_mib": mib(card.total_bytes)} for card in machine.cards],
        "no_card": machine.no_card,
        "driver": machine.driver,
    }


def of_engine(engine: Engine, *, built: bool, seconds: float) -> dict[str, Any]:
    """The engine, for the result. ``seconds`` is what building took, 0 where none was."""
    told = {name: getattr(engine, name) for name in ("build", "commit", "variant", "compiler", "cuda", "arch", "fa_pairs")}
    return told | {"built": built, "seconds": seconds}


def of_case(case: Case, plan: Estimate, found: Measured) -> dict[str, Any]:
    """A case, for the result.

    ``buffers`` compares all that the engine's log names: on the card, or without one in RAM. ``card`` compares what the driver says that
    the process holds there with all that was planned for it but the margin; None without a card. The difference of the two is what the
    log doesn't name (context, libraries, pools), for which the plan has ``context`` and its margin.
    """
    said = found.allocation
    beside = {} if said.cuda else said.host
    buffers = sum(count for term, count in plan.device.items() if term not in UNNAMED) + sum(
        plan.host.get(term, 0) for term in beside
    )
    whole = sum(count for term, count in plan.device.items() if term != "margin")
    return {
        "case": case.name,
        "model": case.model,
        "mtp": case.mtp,
        "slots": case.slots,
        "context": case.context,
        "unified": case.unified,
        "kv": case.kv,
        "ubatch": case.ubatch,
        "planned": {"device": terms(plan.device), "host": terms(plan.host)},
        "measured": {"device": terms(said.device), "host": terms(said.host)},
        "buffers": compared(buffers, sum(said.device.values()) + sum(beside.values())),
        "card": None if found.card_bytes is None else compared(whole, found.card_bytes),
        "anonymous_mib": mib(found.anonymous_bytes),
        "ready_s": round(found.ready_s, 1),
    }


def line(row: Mapping[str, Any]) -> str:
    """What was seen, for a person."""
    seen = row["card"] or row["buffers"]
    return f"{row['case']}: {seen['planned_mib']} MiB planned, {seen['measured_mib']} measured, {seen['error_percent']:+} %"


def compared(planned: int, measured: int) -> dict[str, float]:
    """Two sums, and by how much the first is too high; negative where it is too low."""
    error = 100.0 * (planned - measured) / measured if measured else 0.0
    return {"planned_mib": mib(planned), "measured_mib": mib(measured), "error_percent": round(error, 2) + 0.0}


def terms(found: Mapping[str, int]) -> dict[str, float]:
    """Bytes a term as MiB."""
    return {term: mib(count) for term, count in found.items()}


def mib(count_bytes: float) -> float:
    """Bytes as MiB, to a hundredth."""
    return round(count_bytes / MIB, 2)
