"""The numbers that a preset leaves to the machine: threads, the batch, how many checkpoints. Pure.

Each is said with its reason, and a number that is written down is left alone.
"""

from __future__ import annotations

import math
from typing import Final

from supervisor import cards, estimate, sampling
from supervisor.architecture import Architecture
from supervisor.budget import Budget
from supervisor.estimate import Settings
from supervisor.gguf import Header
from supervisor.preset import AUTO, Preset
from supervisor.units import MIB

BATCH_S: Final = 1.0
"""A cancelled request is let go between batches, so a batch should take about so long."""
LEAST_BATCH: Final = 32
MOST_BATCH: Final = 2048
"""llama.cpp's own default; more gains nothing measurable and delays a cancel."""
MOST_CHECKPOINTS: Final = 32
"""llama.cpp's own default; a small model's budget would hold hundreds, each of which costs a search."""
CORE_FLOPS: Final = 33e9
"""Of one CPU core in prefill: SmolLM2 (106 M weights outside the embedding) took 13.1 s for 2,048 tokens on one thread of a server core."""
CARD_EFFICIENCY: Final = 2.0
"""Prefill over the FP32 rate (2 × cores × clock), by the integer tensor cores: Qwen3.5-9B Q4_K_M does 2,374 tokens/s on an RTX 3070."""


def complete(preset: Preset, shape: Architecture, header: Header, budget: Budget) -> tuple[Preset, tuple[str, ...]]:
    """The preset with numbers for everything that is ``auto``, and a sentence for each."""
    found: dict[str, object] = dict(sampling.resolve(preset, shape.family))
    reasons: list[str] = []
    threads = preset.threads
    if threads == AUTO:
        threads, why = _threads(preset, budget)
        found["threads"] = threads
        reasons.append(f"threads {threads}: {why}")
    batch = preset.batch
    if batch == AUTO and preset.kind != "chat":
        batch = found["batch"] = preset.ubatch  # a text is embedded whole, and the engine lowers the batch to this by itself
    elif batch == AUTO:
        rate = prefill_tps(header, budget, int(threads))
        batch = _batch(rate)
        found["batch"] = batch
        seconds = int(batch) / rate
        reasons.append(f"batch {batch}: about {seconds:.1f} s of prefill at {rate:,.0f} tokens/s, which a cancel may wait for")
    if preset.ubatch > int(batch):
        found["ubatch"] = batch
        reasons.append(f"ubatch {batch}: no more than the batch")
    if preset.checkpoints == AUTO:
        each = estimate.checkpoint_bytes(shape, settle(preset.change({**found, "checkpoints": 1}, "derived"), shape, budget))
        count = min(MOST_CHECKPOINTS, max(1, preset.checkpoint_budget * MIB // each)) if each else 1
        found["checkpoints"] = count
        why = f"{each / MIB:.0f} MiB each, of {preset.checkpoint_budget} MiB a slot" if each else "this model needs none"
        reasons.append(f"checkpoints {count}: {why}")
    return preset.change(found, "derived"), tuple(reasons)


def settle(preset: Preset, shape: Architecture, budget: Budget) -> Settings:
    """What of a complete preset decides memory."""
    every = shape.offloadable
    layers = every if preset.gpu_layers == "all" else min(every, int(preset.gpu_layers))
    return Settings(
        context=preset.context,
        slots=preset.slots,
        unified=preset.unified,
        batch=int(preset.batch),
        ubatch=preset.ubatch,
        cache_type_k=preset.cache_type_k,
        cache_type_v=preset.cache_type_v,
        flash_attention=preset.flash_attention != "off",
        gpu_layers=layers if budget.cuda else 0,
        speculative=preset.speculative,
        draft_length=preset.draft_length,
        checkpoints=int(preset.checkpoints),
        cache_ram_mib=preset.cache_ram,
        cuda=budget.cuda,
        cpu_flags=budget.machine.cpu_flags & estimate.REPACK_FLAGS,
    )


def _threads(preset: Preset, budget: Budget) -> tuple[int, str]:
    machine = budget.machine
    if machine.laptop and not budget.cuda:
        return max(1, machine.cores // 2), f"half of the laptop's {machine.cores} physical cores, which get hot together"
    return machine.cores, "one a physical core"


def _batch(tokens_per_s: float) -> int:
    """The largest power of two that is prefilled within :data:`BATCH_S`."""
    batch = LEAST_BATCH
    while batch < MOST_BATCH and batch * 2 <= tokens_per_s * BATCH_S:
        batch *= 2
    return batch


def prefill_tps(header: Header, budget: Budget, threads: int) -> float:
    """Tokens a second of prefill to expect, roughly: two operations a weight, at the rate of the card or of so many CPU threads.

    The embedding is a lookup and isn't counted. A card whose cores nobody knows counts as the reference card, an RTX 3070.
    """
    weights = sum(math.prod(tensor.shape) for tensor in header.tensors if not tensor.name.startswith(("token_embd", "output.")))
    card = budget.card
    if card is None:
        flops = CORE_FLOPS * threads
    else:
        known = card if card.cores and card.clock_mhz else cards.named("rtx3070")
        flops = CARD_EFFICIENCY * 2 * known.cores * known.clock_mhz * 1e6
    return flops / (2 * max(1, weights))
