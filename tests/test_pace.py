"""Percentiles off bins are never below the true one, and at most one bin above it, however many gaps there are."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from supervisor import pace
from supervisor.meter import Meter

SHARES = (0.0, 0.5, 0.9, 0.99, 1.0)


def binned(gaps_s: list[float]) -> dict[int, int]:
    """As the meter bins them."""
    found = Meter()
    now_s = 1.0
    event = b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":"x"}}],"object":"chat.completion.chunk"}\n\n'
    found.feed(event, now_s)
    for gap_s in gaps_s:
        now_s += gap_s
        found.feed(event, now_s)
    return found.gaps


@pytest.mark.parametrize("seed", range(20))
def test_a_percentile_is_within_a_bin_of_the_true_one(seed: int) -> None:
    drawn = random.Random(seed)
    gaps_s = [math.exp(drawn.uniform(math.log(1e-4), math.log(100))) for _ in range(drawn.choice((1, 2, 7, 500)))]
    counts = binned(gaps_s)
    assert sum(counts.values()) == len(gaps_s)
    for share in SHARES:
        true_s = sorted(gaps_s)[max(0, math.ceil(share * len(gaps_s)) - 1)]
        found_s = pace.percentile_s(counts, share)
        assert found_s is not None
        assert true_s * (1 - 1e-4) <= found_s <= true_s * 2 ** (1 / pace.A_DOUBLING) * (1 + 1e-4)


def test_without_gaps_there_is_none() -> None:
    assert pace.percentile_s({}, 0.5) is None


def test_a_clock_that_stands_still_and_a_week_have_bins_of_their_own() -> None:
    counts = Counter(binned([0.0, 7 * 86_400.0]))
    assert min(counts) >= 0
    assert len(counts) == 2
    assert len(range(min(counts), max(counts))) < 500  # so many numbers are the most that a request can fill


def test_a_bin_begins_where_the_one_before_it_ends() -> None:
    assert pace.upper_s(pace.OFFSET - 1) == 1.0
    assert pace.upper_s(pace.OFFSET + pace.A_DOUBLING - 1) == 2.0
