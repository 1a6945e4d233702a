"""Numbers with units, as people read them."""

from __future__ import annotations

import pytest

from supervisor import units


@pytest.mark.parametrize(
    ("count_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (98_362_432, "93.8 MiB"),
        (units.GIB, "1.0 GiB"),
        (2.5 * units.GIB, "2.5 GiB"),
        (5000 * units.GIB, "5000.0 GiB"),
    ],
)
def test_a_size_has_the_largest_unit_that_leaves_one_before_the_point(count_bytes: float, text: str) -> None:
    assert units.size(count_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (4.2, "4.2 s"),
        (10, "10 s"),
        (59.2, "59 s"),
        (75, "1 min 15 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (7260, "2 h 1 min"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(9.96, "10 s"), (59.7, "1 min 0 s"), (3599.7, "1 h 0 min")])
def test_rounding_carries_into_the_next_unit(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text
