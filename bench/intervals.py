"""What repetitions say of the ratio of two figures: an interval, and how many repetitions would tell a difference. Pure, standard library.

**The unit is the repetition**, never the request: requests of one repetition share the machine's moment, and a thousand of them say less
than five repetitions. A slowdown is a factor, so all of it is reckoned with logarithms.

- Measured in turns (one interleaved run): the log-ratios of pairs, one a repetition. What drifts meets both and cancels.
- Measured apart: Welch's interval of the two mean logs (Welch 1947). What changed *between* two runs no repetition of either shows.

*A disturbed repetition* (somebody else's work) makes a t interval wide and not false, so it costs power. From 10 repetitions on the n // 7
largest and smallest are trimmed, with Winsorized variance (Tukey & McLaughlin 1963; Yuen 1974); below that, trimming costs more than
it saves. *Repetitions that resemble their neighbours* (heat, a trend) say less than their number: the variance grows by (1 + r) / (1 - r)
with r their lag-1 autocorrelation, where that is positive (Bartlett 1935), and apart by 1/n more, by which it is seen too low.

What that comes to: how often two equal subjects were told apart at 99 % confidence, and how often a difference of 10 % was found. 20,000
draws each, one repetition spread by 3 %; "apart" is back to back, "disturbed" one repetition in twenty slowed by 1.3 to 3 times, r the
autocorrelation from one measurement to the next (``tests/test_intervals.py`` repeats a part of it):

    ============  =========================  =========================
                  in turns, n=5    n=10      apart, n=5       n=10
    ============  =========================  =========================
    normal        1.0 %   62 %  0.9 %  97 %  0.4 %   73 %  0.6 %  98 %
    disturbed     0.6 %   37 %  0.6 %  78 %  0.3 %   44 %  0.4 %  81 %
    r = 0.3       1.2 %   77 %  1.4 %  98 %  1.5 %   68 %  1.7 %  90 %
    r = 0.6       1.2 %   93 %  1.1 %  100 % 4.2 %   71 %  4.3 %  75 %
    r = 0.9       0.8 %  100 %  1.0 %  100 % 8.2 %   92 %  9.7 %  81 %
    ============  =========================  =========================

So autocorrelation that is stronger than half is beyond what two runs apart can know of themselves: measure in turns.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Final

LEAST: Final = 3
"""Repetitions; fewer have no interval."""
TRIM_FROM: Final = 10
TRIM_EVERY: Final = 7
STRONGEST: Final = 0.9
"""Of an autocorrelation; a few repetitions may show one of 1."""
POWER: Final = 0.9
"""How probably a difference is to be found."""
ASSURED: Final = 0.8
"""How sure it is to be that the spread is no wider than is reckoned with, when a number of repetitions is announced (Browne 1995)."""
MOST: Final = 10_000
"""Repetitions that anybody would make."""
_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The factor from A to B, and what is known of it."""

    ratio: float
    """B / A: 1.1 is a tenth more."""
    low: float
    high: float
    """Between them it lies, as sure as was asked."""
    confidence: float
    """How sure that is: 0.99."""
    paired: bool
    n: int
    """Repetitions of each; of unequal numbers the smaller."""
    spread: float
    """Of one repetition's log-ratio, so that ``spread / sqrt(n)`` is the standard error."""
    freedom: float
    """Degrees of freedom of that."""
    widened: float
    """By what factor autocorrelation widened it; 1 where there is none."""

    @property
    def excludes_one(self) -> bool:
        """Whether there is a difference."""
        return not self.low <= 1 <= self.high

    @property
    def bound(self) -> float:
        """The greatest difference that it allows: 0.021 is 2.1 %."""
        return max(abs(self.low - 1), abs(self.high - 1))


@dataclass(frozen=True, slots=True)
class _Mean:
    """A trimmed mean."""

    value: float
    variance: float
    """Of the mean."""
    freedom: int
    serial: float
    """By what factor its variance was raised."""


def centre(values: Sequence[float]) -> float:
    """The geometric mean, trimmed as the intervals are: what is shown of repetitions. Raises ValueError for none, and for zeros."""
    return math.exp(_mean([math.log(value) for value in values], 0.0).value)


def paired(a: Sequence[float], b: Sequence[float], confidence: float) -> Interval | None:
    """Of pairs in the order in which they were measured, positive values; None of fewer than :data:`LEAST`."""
    if len(a) < LEAST:
        return None
    mean = _mean([math.log(after / before) for before, after in zip(a, b, strict=True)], 0.0)
    return _interval(mean.value, mean.variance, mean.freedom, confidence, paired=True, n=len(a), serial=mean.serial)


def apart(a: Sequence[float], b: Sequence[float], confidence: float) -> Interval | None:
    """Of two runs, each in its order, positive values; None where one has fewer than :data:`LEAST`."""
    if min(len(a), len(b)) < LEAST:
        return None
    of_a, of_b = (_mean([math.log(value) for value in values], 1 / len(values)) for values in (a, b))
    variance = of_a.variance + of_b.variance
    weights = of_a.variance**2 / of_a.freedom + of_b.variance**2 / of_b.freedom
    freedom = variance**2 / weights if weights else float(min(of_a.freedom, of_b.freedom))
    plain = of_a.variance / of_a.serial + of_b.variance / of_b.serial
    n, serial = min(len(a), len(b)), variance / plain if plain else 1.0
    return _interval(of_b.value - of_a.value, variance, freedom, confidence, paired=False, n=n, serial=serial)


def _mean(logs: Sequence[float], unseen: float) -> _Mean:
    """``unseen`` is by how much autocorrelation is seen too low."""
    count = len(logs)
    ordered, cut = sorted(logs), trimmed(count)
    kept = ordered[cut : count - cut]
    if len(kept) < 2:
        return _Mean(fmean(kept), 0.0, 1, 1.0)
    winsorized = [min(max(value, kept[0]), kept[-1]) for value in logs]
    middle = fmean(winsorized)
    off = [value - middle for value in winsorized]
    squares = math.fsum(each * each for each in off)
    alike = math.fsum(one * other for one, other in itertools.pairwise(off)) / squares if squares else 0.0
    alike = min(max(alike + unseen, 0.0), STRONGEST) if squares else 0.0
    serial = (1 + alike) / (1 - alike)
    return _Mean(fmean(kept), serial * squares / (len(kept) * (len(kept) - 1)), len(kept) - 1, serial)


def trimmed(count: int) -> int:
    """How many of so many repetitions are left out at either end."""
    return count // TRIM_EVERY if count >= TRIM_FROM else 0


def _interval(
    middle: float, variance: float, freedom: float, confidence: float, *, paired: bool, n: int, serial: float
) -> Interval:
    error = math.sqrt(variance)
    reach = t_quantile((1 + confidence) / 2, freedom) * error
    return Interval(
        ratio=math.exp(middle),
        low=math.exp(middle - reach),
        high=math.exp(middle + reach),
        confidence=confidence,
        paired=paired,
        n=n,
        spread=error * math.sqrt(n),
        freedom=freedom,
        widened=math.sqrt(serial),
    )


def needed(seen: Interval, change: float) -> int | None:
    """How many repetitions of each would tell a difference of ``change``: 0.1 is 10 % more; None for more than :data:`MOST`.

    With a probability of :data:`POWER`, at the interval's confidence and by the spread that it saw. One seen in a few repetitions may be
    too small by luck, so it is reckoned with the one that it doesn't exceed with a probability of :data:`ASSURED`. By the plain one the
    number does in 76 to 85 % of cases, by this one in 91 to 94 (simulated: pilots of 3, 5 and 10 repetitions, 3 to 6 % spread, 10 % to be
    found). Where one repetition in twenty is disturbed it does in 68 to 82 %: a pilot without such a one can't know of them.
    """
    sure = _chi_squared_quantile(1 - ASSURED, seen.freedom)
    spread = seen.spread * math.sqrt(seen.freedom / sure)
    size = abs(math.log1p(change))
    if not size:
        return None

    def found(count: int) -> float:
        freedom = (count - 2 * trimmed(count) - 1) * (1 if seen.paired else 2)
        return power(size / spread * math.sqrt(count), freedom, seen.confidence) if spread else 1.0

    low, high = LEAST - 1, LEAST
    while found(high) < POWER:
        if high == MOST:
            return None
        low, high = high, min(2 * high, MOST)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) >= POWER else (middle, high)
    return high


def power(shift: float, freedom: float, confidence: float) -> float:
    """The probability that a t interval excludes 0, when the mean lies ``shift`` standard errors above it: noncentral t, ``freedom`` ≥ 2.

    T = (Z + shift) / W with W² = χ²/ν, so P(T > c) = ∫ f(w) Φ(shift - c·w) dw over W's density f, by Simpson's rule; the other tail is
    left out, as it is no find.
    """
    critical, steps = t_quantile((1 + confidence) / 2, freedom), 160
    log_scale = math.log(2) + freedom / 2 * math.log(freedom / 2) - math.lgamma(freedom / 2)
    reach = 9 / math.sqrt(2 * freedom)  # W's standard deviation is about 1 / sqrt(2ν)
    start, end = max(0.0, 1 - reach), 1 + reach

    def at(w: float) -> float:
        if not w:
            return 0.0
        return math.exp(log_scale + (freedom - 1) * math.log(w) - freedom * w * w / 2) * _NORMAL.cdf(shift - critical * w)

    width = (end - start) / steps
    return width / 3 * math.fsum(at(start + width * k) * (1 if k in (0, steps) else 4 if k % 2 else 2) for k in range(steps + 1))


@functools.lru_cache(maxsize=4096)
def t_quantile(share: float, freedom: float) -> float:
    """Student's t that ``share`` of the distribution doesn't exceed, 0.5 ≤ share < 1; bisection on :func:`t_cdf`."""
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < share:
        low, high = high, high * 2
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def t_cdf(t: float, freedom: float) -> float:
    """Student's distribution for t ≥ 0: 1 - I(ν / (ν + t²); ν/2, 1/2) / 2 (Abramowitz & Stegun 26.7.1)."""
    return 1 - _beta(freedom / (freedom + t * t), freedom / 2, 0.5) / 2


def _beta(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function, by its continued fraction (Abramowitz & Stegun 26.5.8; Lentz's method)."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):  # it converges fast on the other side
        return 1 - _beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    fraction = d
    for m in range(1, 500):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return front * fraction


def _chi_squared_quantile(share: float, freedom: float) -> float:
    """By Wilson & Hilferty (1931); within 2 % from 2 degrees on where it is used."""
    part = 2 / (9 * freedom)
    return freedom * max(1 - part + _NORMAL.inv_cdf(share) * math.sqrt(part), 0.05) ** 3
