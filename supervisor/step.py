"""One decode step: what it has to read, and what it may cost where tokens are guessed. Pure.

A step of one token for each of some streams reads every weight once, the keys and values of each stream so far, and each stream's
recurrent state, which it also writes. On a card that is nearly all it does, so that the memory's bandwidth bounds it from above (Williams
et al., 2009, "Roofline"). What a step writes to the cache, and activations, are a thousandth of that and left out.

Where n tokens are guessed, a step is a round: the model checks n + 1 positions at once and keeps the guesses up to the first wrong one, and
one token of its own. If each guess is right with the probability p, given that those before it were, a round makes 1 + p + … + pⁿ tokens
(Leviathan et al., 2023, "Fast Inference from Transformers via Speculative Decoding", equation 1). It pays where it makes more tokens than
steps without guessing in the time of a round.
"""

from __future__ import annotations

from typing import Final

from supervisor.estimate import Estimate, Settings

_HALVINGS: Final = 40
"""Of the interval from 0 to 1, for a probability: more than a float has digits to show."""


def read_bytes(plan: Estimate, settings: Settings, depth: float, streams: int = 1) -> float:
    """Bytes that a step moves, with ``depth`` tokens before it in each of the streams.

    ``plan`` is that of ``settings``, all layers on the card and without a draft. Models with a sliding window read less at depth.
    """
    kv = plan.device.get("kv", 0) / (settings.cells * settings.streams)
    state = plan.device.get("state", 0) / (settings.slots * settings.state_rows)
    return plan.device["weights"] + streams * (kv * depth + 2 * state)


def tokens_a_round(acceptance: float, drafted: int) -> float:
    """Made by a round on the mean, from 1 to ``drafted + 1``."""
    return sum(acceptance**number for number in range(drafted + 1))


def break_even(cost: float, drafted: int) -> float | None:
    """The acceptance of each guess at which a round that takes ``cost`` times a plain step pays; 0 where it always does, None if never."""
    if cost <= 1.0:
        return 0.0
    if cost >= drafted + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if tokens_a_round(middle, drafted) >= cost else (middle, high)
    return high
