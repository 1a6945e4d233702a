"""Gaps between arrivals, in logarithmic bins: percentiles of however many there are, in a few hundred numbers.

There are :data:`A_DOUBLING` bins a doubling, so a percentile read off them is at most 9 % too long, and never too short. A bin's number is
``log2(gap) × A_DOUBLING + OFFSET``, which is at least 0 from a nanosecond on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import log2
from typing import Final

A_DOUBLING: Final = 8
OFFSET: Final = 240
"""30 doublings below a second: 0.93 ns."""
LEAST_S: Final = 1e-9
"""Added to a gap, so that it has a logarithm: a clock may stand still between two looks."""


def bins(times_s: Iterable[float]) -> Counter[int]:
    """How many of the gaps between these times fall into each bin."""
    return Counter([int(log2(at_s - before_s + LEAST_S) * A_DOUBLING + OFFSET) for before_s, at_s in pairwise(times_s)])


def upper_s(number: int) -> float:
    """The upper bound of a bin, in seconds; its lower bound is that of the bin before it."""
    return float(2.0 ** ((number + 1 - OFFSET) / A_DOUBLING))


def percentile_s(gaps: Mapping[int, int], share: float) -> float | None:
    """The gap, in seconds, that this share of them (0 to 1) doesn't exceed; None where there are none."""
    rank = share * sum(gaps.values())
    seen = 0
    for number in sorted(gaps):
        seen += gaps[number]
        if seen >= rank:
            return upper_s(number)
    return None
