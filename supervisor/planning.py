"""What the commands that plan have in common: the options by which a preset may differ from its file, and how a plan is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from supervisor import render
from supervisor.plan import Plan
from supervisor.units import MIB

Command = TypeVar("Command", bound=Callable[..., Any])

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
    "drafted": "what a first draft adds to them",
    "checkpoints": "states to return to, at most",
    "prompt_cache": "prompts of idle slots, at most",
    "process": "the engine itself",
}
"""The terms of an estimate in words; :mod:`~supervisor.estimate` says what each is made of."""
BAR: Final = 40
"""Characters that all of the memory takes in the picture."""


def choices(function: Command) -> Command:
    """The options by which every command that plans lets a preset differ from its file."""
    for option in reversed(
        (
            click.option("--context", metavar="short|medium|long|N", help="Tokens of context, or one of the preset's sizes."),
            click.option("--mode", metavar="NAME", help="One of the preset's modes: latency, throughput."),
            click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override an option; may be repeated."),
            click.option("--model", type=click.Path(path_type=Path), help="Another GGUF file in the place of the preset's."),
        )
    ):
        function = option(function)
    return function


def as_dict(plan: Plan, argv: tuple[str, ...]) -> dict[str, Any]:
    """``plan --json``; scripts rely on these names (README, Scripts)."""
    return {
        "preset": plan.preset.name,
        "fits": plan.fits,
        "lacking_mib": _mib(plan.lacking_bytes),
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
    chosen, where = plan.preset, plan.budget
    slots = (
        f"{chosen.slots} slots sharing"
        if chosen.unified and chosen.slots > 1
        else f"{chosen.slots} slot{'s' * (chosen.slots > 1)},"
    )
    kv = chosen.cache_type_k + (f"/{chosen.cache_type_v}" if chosen.cache_type_v != chosen.cache_type_k else "")
    draft = {"off": "", "ngram": ", ngram drafts", "mtp": f", MTP drafts of {chosen.draft_length}"}.get(
        chosen.speculative, f", a draft model's drafts of {chosen.draft_length}"
    )
    render.out(f"{chosen.name}: {chosen.model.file}, {slots} {chosen.context:,} tokens, {kv} KV{draft}")
    render.out(f"on {where.device} ({where.source})\n")
    whole = max(where.free_bytes, plan.device_bytes)
    free, host_free = f"of {_mib(where.free_bytes):,.0f} MiB free", f"of {_mib(where.host_free_bytes):,.0f} MiB free"
    rows: list[tuple[object, ...]] = []
    at = 0
    for term, count in plan.estimate.device.items():
        if count:
            rows.append((round(count / MIB), term, _bar(at, count, whole), TERMS[term]))
            at += count
    rows.append((round(at / MIB), "total", _bar(0, at, whole, where.free_bytes), free))
    render.columns([("MiB", where.device, "", ""), *rows])
    render.out("")
    rows = [(round(count / MIB), term, TERMS[term]) for term, count in plan.estimate.host.items() if count >= MIB / 2]
    render.columns([("MiB", "host", ""), *rows, (round(plan.host_bytes / MIB), "total", host_free)])
    render.out("")
    origins = [
        f"{name} {chosen.values()[name]} ({origin})"
        for name, origin in chosen.origins.items()
        if origin not in ("default", "file", "derived", "fallback")
    ]
    for sentence in (*(f"given up: {each}" for each in plan.given_up), *plan.reasons):
        render.out(sentence)
    if origins:
        render.out(f"over the preset's file: {', '.join(origins)}")
    spare = f", {_mib(where.free_bytes - plan.device_bytes):,.0f} MiB to spare" if where.cuda else ""
    render.out(f"\nit fits{spare}" if plan.fits else f"\nit does not fit: {_mib(plan.lacking_bytes):,.0f} MiB too much")


def _bar(start: int, count: int, whole: int, free: int = 0) -> str:
    """A term's place among the bytes that there are; what is left free of the ``free`` ones is light."""
    left, right = (round(BAR * edge / whole) for edge in (start, start + count))
    return " " * left + "█" * max(1, right - left) + "░" * (round(BAR * free / whole) - right)


def _mib(count_bytes: float) -> float:
    return round(count_bytes / MIB, 2)
