"""What the commands that plan have in common: the options by which a preset may differ from its file, and how a plan is shown."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import click

from supervisor import render
from supervisor.order import Order
from supervisor.plan import Plan
from supervisor.preset import Preset
from supervisor.units import MIB

TERMS: Final = {
    "weights": "the model",
    "kv": "KV cache",
    "state": "recurrent state",
    "compute": "buffers of one computed batch",
    "scratch": "f16 copy of one layer's quantised KV cache",
    "draft": "KV cache and buffers of what drafts",
    "context": "CUDA's own",
    "margin": "kept free for what grows while it runs",
    "embedding": "the embedding, which is looked up there",
    "layers": "layers that the CPU computes, with their cache",
    "repacked": "weights in the CPU's own order",
    "output": "logits",
    "grown": "what the first use adds to them",
    "checkpoints": "states to return to, at most",
    "prompt_cache": "prompts of idle slots, at most",
    "process": "the engine itself",
}
"""The terms of an estimate in words; :mod:`~supervisor.estimate` says what each is made of."""
BAR: Final = 40
"""Characters that all of the memory takes in the picture."""


def ordered(function: Callable[..., None]) -> Callable[..., None]:
    """Take a PRESET and how it is to differ from its file off the command line; ``function`` gets them as an ``order``."""

    @click.argument("name", metavar="PRESET")
    @click.option(
        "--context",
        metavar="short|medium|long|N",
        help="One of the preset's sizes, or so many tokens (16384, 128k), in the smallest size that holds them.",
    )
    @click.option("--mode", metavar="NAME", help="One of the preset's modes: latency, throughput.")
    @click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override an option (llmctl show PRESET lists them); may be repeated.",
    )
    @click.option("--model", type=click.Path(path_type=Path), help="Another GGUF file in the place of the preset's.")
    @functools.wraps(function)
    def with_order(
        name: str, context: str | None, mode: str | None, overrides: tuple[str, ...], model: Path | None, **rest: object
    ) -> None:
        function(order=Order(name, context=context, mode=mode, overrides=overrides, model=model), **rest)

    return with_order


def as_dict(plan: Plan, argv: tuple[str, ...]) -> dict[str, Any]:
    """``plan --json``; scripts rely on these names."""
    return {
        "preset": plan.preset.name,
        "fits": plan.fits,
        "lacking_mib": {"device": _mib(plan.device_lacks), "host": _mib(plan.host_lacks)},
        "device": {
            "name": plan.budget.device,
            "total_mib": _mib(plan.device_bytes),
            "free_mib": _mib(plan.budget.free_bytes),
            "terms": {term: _mib(count) for term, count in plan.estimate.device.items()},
        },
        "host": {
            "total_mib": _mib(plan.host_bytes),
            "free_mib": _mib(plan.budget.host_free_bytes),
            "terms": {term: _mib(count) for term, count in plan.estimate.host.items()},
        },
        "argv": list(argv),
        "given_up": list(plan.given_up),
        "reasons": list(plan.reasons),
        "options": {name: {"value": value, "from": plan.preset.origins[name]} for name, value in plan.preset.values().items()},
    }


def show(plan: Plan) -> None:
    """The plan as a person reads it: what is asked, what each term takes, what was given up and why a number is what it is."""
    render.out(f"{title(plan.preset)}\non {plan.budget.device} ({plan.budget.source})\n")
    device, host = plan.budget, plan.host_bytes
    free, host_free = f"of {_mib(device.free_bytes):,.0f} MiB free", f"of {_mib(device.host_free_bytes):,.0f} MiB free"
    whole = max(device.free_bytes, plan.device_bytes)
    rows: list[tuple[object, ...]] = []
    at = 0
    for term, count in plan.estimate.device.items():
        if count:
            rows.append((round(count / MIB), term, _bar(at, count, whole), TERMS[term]))
            at += count
    rows.append((round(at / MIB), "total", _bar(0, at, whole, device.free_bytes), free if device.cuda else ""))
    render.columns([("MiB", device.device, "", ""), *rows])
    render.out("")
    rows = [(round(count / MIB), term, TERMS[term]) for term, count in plan.estimate.host.items() if count >= MIB / 2]
    rows.append((round(host / MIB), "total", host_free if device.cuda else ""))
    if not device.cuda:
        rows.append((round((at + host) / MIB), "both", free))
    render.columns([("MiB", "host" if device.cuda else "beside it", ""), *rows])
    render.out("")
    for sentence in (*(f"given up: {each}" for each in plan.given_up), *plan.reasons, *origins(plan.preset)):
        render.out(sentence)
    spare = device.free_bytes - at - (0 if device.cuda else host)
    render.out(f"\nit fits, {_mib(spare):,.0f} MiB to spare" if plan.fits else f"\nit does not fit: it needs {plan.shortage}")


def title(chosen: Preset) -> str:
    """``turbo_4b: Qwen3.5-4B-Q4_K_M.gguf, 2 slots of 32,768 tokens, q8_0 KV, MTP drafts of 2``."""
    if chosen.slots == 1:
        slots = f"1 slot of {chosen.context:,} tokens"
    elif chosen.unified:
        slots = f"{chosen.slots} slots that share {chosen.context:,} tokens"
    else:
        slots = f"{chosen.slots} slots of {chosen.slot_context:,} tokens"
    kv = chosen.cache_type_k + (f"/{chosen.cache_type_v}" if chosen.cache_type_v != chosen.cache_type_k else "")
    length = f"drafts of {chosen.draft_length}"
    draft = {"off": "", "mtp": f", MTP {length}", "ngram": ", ngram drafts", "draft": f", {length} by another model"}
    return f"{chosen.name}: {chosen.model.file}, {slots}, {kv} KV{draft[chosen.speculative]}"


def origins(chosen: Preset) -> Iterator[str]:
    """A line for each that overrules the preset's file, the strongest first: ``by --set: slots 2``."""
    values = chosen.values()
    for origin in ("--set", "--model", "--context", f"context {chosen.context_name}", f"mode {chosen.mode_name}"):
        names = [name for name, found in chosen.origins.items() if found == origin]
        if names:
            yield f"by {origin}: {', '.join(f'{name} {values[name]}' for name in names)}"


def _bar(start: int, count: int, whole: int, free: int = 0) -> str:
    """A term's place among the bytes that there are; what is left free of the ``free`` ones is light."""
    left, right = (round(BAR * edge / whole) for edge in (start, start + count))
    return " " * left + "█" * max(1, right - left) + "░" * (round(BAR * free / whole) - right)


def _mib(count_bytes: float) -> float:
    return round(count_bytes / MIB, 2)
