"""The recorded plans: every shipped preset, each pair of context and mode, on the machines that people have.

``python -m tests.plans`` writes ``tests/data/plans.txt`` anew; ``tests/test_plan.py`` holds the planner to it. A change of the file is
to be read line by line: it is what users will see change.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from supervisor import budget, headers, paths, plan, preset
from supervisor.hardware import Hardware
from supervisor.plan import Plan
from supervisor.units import GIB, MIB

FILE: Final = Path(__file__).parent / "data" / "plans.txt"
NOWHERE: Final = paths.home({"LLMCTL_HOME": "/nonexistent"})
FLAGS: Final = frozenset({"avx2", "fma", "f16c", "bmi2"})


def machine(total_gib: float, free_gib: float, cores: int = 8) -> Hardware:
    return Hardware("cpu", FLAGS, "AMD 25 33", cores, int(total_gib * GIB), int(free_gib * GIB), (), "", "no driver")


CARDS: Final = {
    "RTX 3070 headless": ("rtx3070", None),
    "RTX 3070 desktop": ("rtx3070", 7100 * MIB),
    "RTX 3070 busy desktop": ("rtx3070", 6300 * MIB),
    "6 GB": ("rtx2060", None),
    "12 GB": ("rtx3060", None),
}
BOXES: Final = {"8 GB RAM": machine(8, 6.5, 4), "16 GB RAM": machine(16, 14)}


def plans(name: str) -> Iterator[tuple[str, Plan]]:
    """Every pair of a shipped preset, on every machine that it is for."""
    found, _ = preset.check(preset.find(name, NOWHERE))
    assert found is not None
    for context, mode in preset.pairs(found):
        asked = preset.load(name, NOWHERE, context=context or None, mode=mode or None)
        known = {model: headers.find(NOWHERE, model) for model in asked.models}
        pair = " ".join(filter(None, (name, context, mode)))
        if asked.device == budget.CPU:
            for box, hardware in BOXES.items():
                yield f"{pair} | {box}", plan.make(asked, known, budget.make("none", hardware))
        else:
            for card, (gpu, vram) in CARDS.items():
                yield f"{pair} | {card}", plan.make(asked, known, budget.make("CUDA0", BOXES["16 GB RAM"], gpu=gpu, vram=vram))


def line(where: str, found: Plan) -> str:
    chosen = found.preset
    kv = chosen.cache_type_k
    batches = f"b{chosen.batch} ub{chosen.ubatch} cp{chosen.checkpoints}"
    parts = [
        where,
        "fits" if found.fits else f"lacks {(found.device_lacks + found.host_lacks) / MIB:.0f}",
        f"{found.device_bytes / MIB:.0f} of {found.budget.free_bytes / MIB:.0f} MiB, host {found.host_bytes / MIB:.0f}",
        f"{chosen.model.file} {chosen.context} x{chosen.slots} {kv} {chosen.speculative} {batches}",
        "; ".join(found.given_up) or "nothing given up",
    ]
    return " | ".join(parts)


def lines() -> Iterator[str]:
    shipped = sorted(path.stem for path in paths.data_folder("presets").glob("*.yaml"))
    return (line(where, found) for name in shipped for where, found in plans(name))


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n")
