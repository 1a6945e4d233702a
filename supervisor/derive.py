"""The numbers that a preset leaves to the machine: threads, the batch, how many checkpoints. Pure.

A number that is written down is left alone.
"""

from __future__ import annotations

import math
from typing import Final

from supervisor import cards, estimate, sampling
from supervisor.architecture import Architecture
from supervisor.budget import REFERENCE, Budget
from supervisor.estimate import Settings
from supervisor.gguf import Header
from supervisor.option import AUTO
from supervisor.preset import Preset
from supervisor.units import MIB

BATCH_S: Final = 1.0
"""A cancelled request is let go between batches, so a batch should take about so long."""
UBATCH: Final = 512
"""llama.cpp's own default, and no more than the batch: the engine would lower it to that by itself (src/llama-context.cpp)."""
LEAST_BATCH: Final = 64
"""Of SmolLM2's prefill on one thread, batches of 32 tokens cost a fifth more CPU time than those of 128, and 64 a twentieth."""
MOST_BATCH: Final = 2048
"""llama.cpp's own default; more gains nothing measurable and delays a cancel."""
MOST_CHECKPOINTS: Final = 32
"""llama.cpp's own default; a small model's budget would hold hundreds, each of which costs a search."""
CORE_FLOPS: Final = 33e9
"""Of one CPU core in prefill: SmolLM2 (106 M weights outside the embedding) took 13.1 s for 2,048 tokens on one thread of a server core."""
CARD_EFFICIENCY: Final = 1.6
"""Prefill over the FP32 rate (2 × cores × clock), by the integer tensor cores: Qwen3.5-9B Q4_K_M (6.92 G weights outside the embedding and
the output) does 2,374 tokens/s on an RTX 3070 (20.3 TFLOP/s)."""


def complete(preset: Preset, shape: Architecture, header: Header, budget: Budget) -> tuple[Preset, tuple[str, ...]]:
    """The preset with numbers for everything that is ``auto`` or its sampling chain's, and a sentence for each that it worked out."""
    found: dict[str, object] = dict(sampling.resolve(preset, shape.family))
    reasons: list[str] = []
    threads = preset.threads
    if threads == AUTO:
        threads, why = _threads(budget)
        found["threads"] = threads
        reasons.append(f"threads {threads}: {why}")
    batch, ubatch = preset.batch, preset.ubatch
    if batch == AUTO:
        rate = prefill_tps(header, budget, int(threads))
        written = None if ubatch == AUTO else int(ubatch)
        batch, why = _batch(rate, written) if preset.kind == "chat" else _whole(written)
        found["batch"] = batch
        reasons.append(f"batch {batch}: {why}")
    if ubatch == AUTO:
        found["ubatch"] = min(UBATCH, int(batch)) if preset.kind == "chat" else int(batch)
    if preset.checkpoints == AUTO:
        each = estimate.checkpoint_bytes(shape, settle(preset.change({**found, "checkpoints": 1}, "derived"), shape, budget))
        room = preset.checkpoint_budget * MIB // each if each else 0
        count = found["checkpoints"] = min(MOST_CHECKPOINTS, max(1, room))
        size = f"one takes {each / MIB:.0f} MiB, and {preset.checkpoint_budget} are for those of a slot"
        reasons.append(
            f"checkpoints {count}: {size}" if each else "checkpoints 1: this model can cut its cache anywhere and makes none"
        )
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
        ubatch=int(preset.ubatch),
        cache_type_k=preset.cache_type_k,
        cache_type_v=preset.cache_type_v,
        flash_attention=preset.flash_attention != "off",
        gpu_layers=layers if budget.cuda else 0,
        speculative=preset.speculative,
        draft_length=preset.draft_length,
        checkpoints=int(preset.checkpoints),
        cache_ram_mib=preset.cache_ram,
        embeds=preset.kind != "chat",
        cuda=budget.cuda,
        cpu_flags=budget.machine.cpu_flags & estimate.REPACK_FLAGS,
    )


def _threads(budget: Budget) -> tuple[int, str]:
    machine = budget.machine
    if machine.laptop and not budget.cuda:
        return max(1, machine.cores // 2), f"half of this laptop's {machine.cores} physical cores, which get hot together"
    return machine.cores, "one a physical core of this machine"


def _batch(tokens_per_s: float, ubatch: int | None) -> tuple[int, str]:
    """The largest power of two that is prefilled within :data:`BATCH_S`, but no less than a ``ubatch`` that is written down; and why."""
    least = max(LEAST_BATCH, ubatch or 0)
    batch = least
    while batch * 2 <= min(MOST_BATCH, tokens_per_s * BATCH_S):
        batch *= 2
    why = (
        f"{batch / tokens_per_s:.2g} s at the {_rounded(tokens_per_s):,} tokens/s of prefill to expect, which a cancel waits for"
    )
    if batch == MOST_BATCH:
        return batch, f"the most, llama.cpp's default; {why}"
    return batch, f"the least; {why}" if batch == least else why


def _whole(ubatch: int | None) -> tuple[int, str]:
    return ubatch or UBATCH, "a text is embedded in one computed batch, and the engine would lower it to that"


def _rounded(rate: float) -> int:
    """To one digit: it is a guess."""
    digits = len(str(int(rate))) - 1
    return int(round(rate, -digits))


def prefill_tps(header: Header, budget: Budget, threads: int) -> float:
    """Tokens a second of prefill to expect, roughly: two operations a weight, at the rate of the card or of so many CPU threads.

    The embedding is a lookup and isn't counted. A card whose cores nobody knows counts as the reference card.
    """
    weights = sum(math.prod(tensor.shape) for tensor in header.tensors if not tensor.name.startswith(("token_embd", "output.")))
    card = budget.card
    if card is None:
        flops = CORE_FLOPS * threads
    else:
        known = card if card.cores and card.clock_mhz else cards.named(REFERENCE)
        flops = CARD_EFFICIENCY * 2 * known.cores * known.clock_mhz * 1e6
    return flops / (2 * max(1, weights))
