"""What repetitions say keeps the confidence that it states, and the number of repetitions that is announced is enough."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from bench import intervals
from bench.intervals import Interval

Kind = Callable[[list[float], list[float], float], Interval | None]
SPREAD = 0.03


def series(draw: random.Random, count: int, *, alike: float = 0.0, disturbed: float = 0.0) -> list[float]:
    """Logs of measurements one after the other: ``alike`` is their autocorrelation, ``disturbed`` the share that is slowed."""
    found, at = [], draw.gauss(0, SPREAD)
    for _ in range(count):
        found.append(at + (math.log(draw.uniform(1.3, 3)) if draw.random() < disturbed else 0.0))
        at = alike * at + draw.gauss(0, SPREAD * math.sqrt(1 - alike**2))
    return found


def both(kind: Kind, logs: list[float], change: float, confidence: float) -> Interval:
    """The interval of two subjects: in turns as ``run`` measures them (who is first turns round), or one after the other."""
    count = len(logs) // 2
    a, b = logs[:count], logs[count:]
    if kind is intervals.paired:
        turns = [(logs[2 * k], logs[2 * k + 1])[:: 1 if k % 2 else -1] for k in range(count)]
        a, b = [one for one, _ in turns], [other for _, other in turns]
    found = kind([math.exp(one) for one in a], [math.exp(other) * (1 + change) for other in b], confidence)
    assert found is not None
    return found


def told_apart(
    kind: Kind, count: int, confidence: float, *, change: float = 0.0, alike: float = 0.0, disturbed: float = 0.0
) -> float:
    draw, draws = random.Random(7), 400
    found = [
        both(kind, series(draw, 2 * count, alike=alike, disturbed=disturbed), change, confidence).excludes_one
        for _ in range(draws)
    ]
    return sum(found) / draws


@pytest.mark.parametrize(
    ("share", "freedom", "t"),
    # Abramowitz & Stegun, table 26.10
    [
        *((0.75, 1, 1.000), (0.95, 5, 2.015), (0.975, 2, 4.303), (0.975, 9, 2.262), (0.995, 4, 4.604), (0.995, 30, 2.750)),
        *((0.9995, 2, 31.598), (0.9995, 9, 4.781), (0.995, 120, 2.617)),
    ],
)
def test_students_t(share: float, freedom: int, t: float) -> None:
    assert intervals.t_quantile(share, freedom) == pytest.approx(t, abs=0.0011)


@pytest.mark.parametrize(
    ("freedom", "shift", "power"),
    [
        (2, 6, 0.308056),
        (4, 3, 0.245571),
        (4, 6, 0.816564),
        (9, 3, 0.452506),
        (40, 3, 0.617725),
    ],  # SciPy 1.17, nct.sf(t.ppf(0.995))
)
def test_the_power_of_a_t_interval(freedom: int, shift: float, power: float) -> None:
    assert intervals.power(shift, freedom, 0.99) == pytest.approx(power, abs=1e-6)


def test_welchs_interval_of_two_runs() -> None:
    """By hand: of the logs, means 0 and log 1.2, variances of the means 0.01 / 3 and 0.04 / 3, and 2.94 degrees of freedom."""
    a = [
        math.exp(each) for each in (0.0, -0.1, 0.1)
    ]  # in an order that shows no autocorrelation: each differs from the one before
    b = [1.2 * math.exp(each) for each in (0.0, -0.2, 0.2)]
    found = intervals.apart(a, b, 0.95)
    assert found is not None
    assert found.ratio == pytest.approx(1.2)
    assert found.freedom == pytest.approx(0.05**2 / (0.01**2 / 2 + 0.04**2 / 2))
    assert found.widened == pytest.approx(1.0)
    reach = intervals.t_quantile(0.975, found.freedom) * math.sqrt(0.05 / 3)
    assert math.log(found.high / 1.2) == pytest.approx(reach)
    assert math.log(1.2 / found.low) == pytest.approx(reach)


def test_pairs_cancel_what_meets_both() -> None:
    a = [100.0, 140.0, 70.0, 220.0, 90.0]
    found = intervals.paired(
        a, [value * (1.1 + wobble) for value, wobble in zip(a, (0, 0.001, -0.001, 0, 0.001), strict=True)], 0.99
    )
    assert found is not None
    assert found.excludes_one
    assert found.ratio == pytest.approx(1.1, rel=1e-3)
    unpaired = intervals.apart(a, [value * 1.1 for value in a], 0.99)
    assert unpaired is not None
    assert not unpaired.excludes_one


def test_fewer_than_three_repetitions_have_no_interval() -> None:
    assert intervals.paired([1, 2], [1, 2], 0.9) is None
    assert intervals.apart([1, 2], [1, 2, 3, 4], 0.9) is None


def test_equal_measurements_have_an_interval_without_width() -> None:
    for kind in (intervals.paired, intervals.apart):
        found = kind([5.0] * 4, [5.0] * 4, 0.99)
        assert found is not None
        assert (found.low, found.high, found.excludes_one) == (1, 1, False)
        assert intervals.needed(found, 0.03) == intervals.LEAST


@pytest.mark.parametrize("kind", [intervals.paired, intervals.apart])
@pytest.mark.parametrize(
    ("count", "disturbed", "alike"), [(5, 0.0, 0.0), (10, 0.0, 0.0), (5, 0.05, 0.0), (10, 0.05, 0.0), (10, 0.0, 0.3)]
)
def test_equals_are_told_apart_no_oftener_than_is_stated(kind: Kind, count: int, disturbed: float, alike: float) -> None:
    """At 95 %, of 400 draws with a fixed seed; 3 standard errors of chance are let pass."""
    share = told_apart(kind, count, 0.95, disturbed=disturbed, alike=alike)
    assert share < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)


def test_drift_that_two_runs_apart_cannot_know_of_cancels_in_turns() -> None:
    assert told_apart(intervals.apart, 10, 0.95, alike=0.9) > 0.1
    assert told_apart(intervals.paired, 10, 0.95, alike=0.9) < 0.083


def test_a_trend_widens_the_interval() -> None:
    steady = intervals.apart([1.0, 1.04, 1.01, 1.03, 1.02], [1.0, 1.04, 1.01, 1.03, 1.02], 0.99)
    trending = intervals.apart([1.0, 1.01, 1.02, 1.03, 1.04], [1.0, 1.01, 1.02, 1.03, 1.04], 0.99)
    assert steady is not None
    assert trending is not None
    assert steady.widened == 1
    assert trending.widened > 1.4
    assert trending.bound > steady.bound


def test_one_disturbed_repetition_makes_no_difference_and_hides_none_among_ten() -> None:
    quiet = [100.0, 101.0, 99.5, 100.4, 98.9, 100.7, 99.2, 100.1, 101.2, 99.8]
    disturbed = [*quiet[:4], 290.0, *quiet[5:]]
    for kind in (intervals.paired, intervals.apart):
        for count in (5, 10):
            found = kind(quiet[:count], disturbed[:count], 0.99)
            assert found is not None
            assert not found.excludes_one
        found = kind(quiet, [value * 1.1 for value in disturbed], 0.99)
        assert found is not None
        assert found.excludes_one
        assert found.ratio == pytest.approx(1.1, rel=0.01)


def test_the_centre_is_a_geometric_mean_without_the_outermost_of_many() -> None:
    assert intervals.centre([1.0, 4.0]) == pytest.approx(2.0)
    assert intervals.centre([10.0] * 9 + [1000.0]) == pytest.approx(10.0)
    assert [intervals.trimmed(count) for count in (3, 9, 10, 13, 14, 21)] == [0, 0, 1, 1, 2, 3]


def test_fewer_repetitions_tell_a_greater_change_and_more_a_lesser() -> None:
    a = [100.0, 104.0, 97.0, 101.0, 99.0]
    found = intervals.paired(a, [101.0, 99.0, 100.0, 104.0, 98.0], 0.99)
    assert found is not None
    needs = [intervals.needed(found, change) for change in (0.3, 0.1, 0.03, 0.01)]
    assert all(need is not None for need in needs)
    assert needs == sorted(needs, key=lambda need: need or 0)
    assert len(set(needs)) == 4
    assert intervals.needed(found, 0.00001) is None


@pytest.mark.parametrize("kind", [intervals.paired, intervals.apart])
def test_a_slowdown_of_a_tenth_is_found_with_the_number_announced(kind: Kind) -> None:
    """Each time a pilot of five says how many, and so many are made: at least 90 % find it, less 2 standard errors of chance."""
    draw, pilots, found = random.Random(3), 200, 0
    for _ in range(pilots):
        count = intervals.needed(both(kind, series(draw, 10), 0.1, 0.99), 0.1)
        assert count is not None
        seen = both(kind, series(draw, 2 * count), 0.1, 0.99)
        found += seen.excludes_one and seen.ratio > 1
    assert found / pilots > 0.9 - 2 * math.sqrt(0.9 * 0.1 / pilots)
