"""Every joule is somebody's or idle. The counters here are made up; what they stand for is in the comments."""

from __future__ import annotations

import random
from collections.abc import Mapping
from math import fsum

import pytest

from supervisor.energy import Shares, Sharing

CARD = "CUDA0"


class Box:
    """One card, whose counter goes on as a test says."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.sharing = Sharing()
        self.now_s = now_s
        self.counter_mj = 4_000_000
        self.look()

    def look(self, joules: float = 0.0, after_s: float = 0.0, **tokens: int) -> Shares:
        self.counter_mj += round(joules * 1e3)
        self.now_s += after_s
        return self.sharing.look(self.now_s, {CARD: self.counter_mj}, tokens)

    def enter(self, request: str, after_s: float = 0.0) -> None:
        self.sharing.enter(request, CARD, self.now_s + after_s)

    def leave(self, request: str, tokens: int, after_s: float = 0.0) -> None:
        self.sharing.leave(request, tokens, self.now_s + after_s)


def near(**joules: float) -> object:
    return pytest.approx(joules)


def test_what_is_taken_while_nothing_is_in_work_is_idle() -> None:
    shares = Box().look(20, after_s=1)
    assert (shares.by_request, shares.idle_j, shares.watts) == ({}, 20, {CARD: 20})


def test_the_first_look_shares_nothing() -> None:
    box = Sharing()
    box.enter("a", CARD, 0.0)
    assert box.look(1.0, {CARD: 9_000_000}, {"a": 5}) == Shares()


def test_requests_share_by_the_tokens_that_they_made_since() -> None:
    box = Box()
    box.enter("a")
    box.enter("b")
    box.look(100, after_s=1, a=10, b=40)
    shares = box.look(100, after_s=1, a=40, b=50)
    assert shares.by_request == near(a=75, b=25)
    assert shares.idle_j == 0


def test_one_in_its_prefill_counts_as_if_it_decoded_at_the_others_pace() -> None:
    box = Box()
    box.enter("a")
    box.look(100, after_s=1, a=50)
    box.enter("b", after_s=0.5)
    assert box.look(90, after_s=1, a=100).by_request == near(a=60, b=30)
    # Its first token came late in this interval: most of it was prefill yet.
    assert box.look(100, after_s=1, a=150, b=1).by_request == near(a=50, b=50)
    assert box.look(100, after_s=1, a=200, b=51).by_request == near(a=50, b=50)


def test_one_that_has_stalled_after_its_first_token_has_no_share() -> None:
    box = Box()
    box.enter("a")
    box.enter("b")
    box.look(100, after_s=1, a=10, b=10)
    assert box.look(100, after_s=1, a=20, b=10).by_request == near(a=100, b=0)


@pytest.mark.parametrize("before", [0, 10])
def test_where_nobody_makes_a_token_time_in_work_is_the_measure(before: int) -> None:
    """All in their prefill, or all stalled."""
    box = Box()
    box.enter("a")
    box.enter("b")
    box.look(100, after_s=1, a=before, b=before)
    box.leave("b", before, after_s=0.25)
    assert box.look(100, after_s=1, a=before).by_request == near(a=80, b=20)


def test_whoever_left_since_has_its_share_too_and_none_later() -> None:
    box = Box()
    box.enter("a")
    box.look(100, after_s=1, a=30)
    box.leave("a", 50, after_s=0.5)
    assert box.look(60, after_s=1).by_request == near(a=60)
    assert box.look(60, after_s=1).by_request == {}


def test_the_idle_part_of_an_interval_has_the_power_of_the_last_idle_one() -> None:
    box = Box()
    assert box.look(20, after_s=1).idle_j == 20
    box.enter("a", after_s=0.5)
    shares = box.look(120, after_s=1)
    assert shares.by_request == near(a=110)
    assert shares.idle_j == pytest.approx(10)
    assert box.look(120, after_s=1).idle_j == 0


def test_no_more_is_idle_than_was_taken() -> None:
    box = Box()
    box.look(100, after_s=1)  # it was loading
    box.enter("a", after_s=0.9)
    shares = box.look(30, after_s=1)
    assert (shares.by_request, shares.idle_j) == ({"a": 0}, 30)


def test_before_any_idle_interval_a_busy_one_is_all_the_requests() -> None:
    box = Box()
    box.enter("a", after_s=0.5)
    assert box.look(100, after_s=1).by_request == near(a=100)


def test_time_in_work_is_counted_once_where_requests_overlap_or_touch() -> None:
    box = Box()
    box.look(20, after_s=1)
    box.enter("a")
    box.enter("b", after_s=0.1)
    box.leave("b", 0, after_s=0.3)
    box.leave("a", 0, after_s=0.5)
    box.enter("c", after_s=0.5)
    box.leave("c", 0, after_s=0.75)
    assert box.look(105, after_s=1).idle_j == pytest.approx(5)


@pytest.mark.parametrize("gap", ["missing", "back"])
def test_a_counter_that_is_missing_or_goes_back_starts_anew(gap: str) -> None:
    box = Box()
    box.look(20, after_s=1)
    box.enter("a")
    if gap == "missing":
        assert box.sharing.look(box.now_s + 0.5, {}, {"a": 5}) == Shares()
    else:
        box.counter_mj = 0  # the driver was loaded anew
    assert box.look(30, after_s=1, a=10) == Shares()
    box.enter("b", after_s=0.5)
    # What it took when it was idle before that isn't known any more.
    shares = box.look(90, after_s=1, a=20)
    assert (shares.by_request, shares.idle_j) == (near(a=60, b=30), 0)


def test_a_look_at_the_same_time_leaves_all_to_the_next_one() -> None:
    box = Box()
    box.enter("a")
    box.look(10, after_s=1, a=10)
    box.leave("a", 15)
    box.enter("b")
    assert box.look(10) == Shares()
    assert fsum(box.look(10, after_s=1).by_request.values()) == 20


def test_one_that_came_after_the_counter_was_read_is_of_the_next_interval() -> None:
    """The counter is read on a thread; requests come and go meanwhile."""
    box = Box()
    box.enter("a")
    box.enter("late", after_s=1.01)
    box.enter("short", after_s=1.01)
    box.leave("short", 2, after_s=1.02)
    assert box.look(100, after_s=1, a=10, late=1).by_request == near(a=100)
    assert set(box.look(100, after_s=1, a=20, late=11).by_request) == {"a", "late", "short"}


def test_a_request_that_comes_again_has_both_its_parts() -> None:
    """Its engine died and it was put to the next: it counts from nothing there."""
    box = Box()
    box.enter("a")
    box.enter("b")
    box.look(100, after_s=1, a=30, b=30)
    box.enter("a", after_s=0.5)
    shares = box.look(100, after_s=1, a=0, b=60)
    assert shares.by_request == near(a=100 * 15 / 45, b=100 * 30 / 45)
    assert box.look(100, after_s=1, a=30, b=90).by_request == near(a=50, b=50)
    box.enter("c")
    box.enter("c", after_s=0.6)  # that one died in its prefill
    assert box.look(100, after_s=1, a=60, b=120, c=0).by_request == near(a=100 / 3, b=100 / 3, c=100 / 3)


def test_each_card_is_shared_among_its_own() -> None:
    sharing = Sharing()
    sharing.look(0.0, {"CUDA0": 0, "CUDA1": 0}, {})
    sharing.enter("a", "CUDA0", 0.0)
    shares = sharing.look(2.0, {"CUDA0": 200_000, "CUDA1": 30_000}, {"a": 5})
    assert (shares.by_request, shares.idle_j) == ({"a": 200}, 30)
    assert shares.watts == {"CUDA0": 100, "CUDA1": 15}


def test_a_card_that_is_left_has_nobody_in_work_and_starts_anew() -> None:
    box = Box()
    box.enter("a")
    box.sharing.forget(CARD)
    box.leave("a", 10, after_s=0.5)
    assert box.look(50, after_s=60) == Shares()
    shares = box.look(20, after_s=1)
    assert (shares.by_request, shares.idle_j) == ({}, 20)


def test_without_a_counter_nothing_is_kept_of_those_that_left() -> None:
    """An old card: nobody will ever ask for their shares."""
    sharing = Sharing()
    for number in range(1000):
        sharing.enter(str(number), CARD, float(number))
        sharing.leave(str(number), 10, number + 0.5)
    sharing.leave("never came", 10, 5000.0)
    assert not sharing._inside
    assert not sharing._left
    sharing.look(6000.0, {CARD: 5}, {})
    sharing.enter("a", CARD, 6000.5)
    sharing.leave("a", 1, 6000.6)
    sharing.look(6001.0, {}, {})
    assert not sharing._left


class History:
    """A random history of two cards and their requests, with what must come of it beside it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sharing = Sharing()
        self.now_s = self.random.choice([0.0, 1e6])
        self.counters = {"CUDA0": 10**11, "CUDA1": 7}  # one has run for years
        self.before: dict[str, int] = {}
        self.looked_s: dict[str, float] = {}
        self.tokens: dict[str, int] = {}
        self.present: set[str] = set()
        """Who was in work at some time since the last look."""
        self.came = 0

    def step(self) -> None:
        self.now_s += self.random.choice([0.0, 1e-6, 0.01, 0.3, 1.0])
        act = self.random.randrange(5)
        if act == 0:
            self.came += 1
            request = f"r{self.random.randrange(6)}" if self.random.random() < 0.3 else f"n{self.came}"
            self.sharing.enter(request, self.random.choice(["CUDA0", "CUDA1"]), self.now_s)
            self.tokens[request] = 0
            self.present.add(request)
        elif act == 1 and self.tokens:
            request = self.random.choice(sorted(self.tokens))
            self.sharing.leave(request, self.tokens.pop(request), self.now_s)
        else:
            for request in self.tokens:
                self.tokens[request] += self.random.choice([0, 0, 1, 50])

    def look(self) -> tuple[Shares, float]:
        """The shares, and the joules that they must add up to."""
        seen: dict[str, int] = {}
        for device in self.counters:
            self.counters[device] += self.random.choice([0, 1, 37, 250_000])
            if self.random.random() < 0.05:
                self.counters[device] = self.random.randrange(10)
            if self.random.random() > 0.1:
                seen[device] = self.counters[device]
        shares = self.sharing.look(self.now_s, seen, self._told())
        taken = []
        for device in list(self.before):
            if device not in seen:
                del self.before[device]
        for device, counter_mj in seen.items():
            before = self.before.get(device)
            if before is not None and self.now_s <= self.looked_s[device]:
                continue
            if before is not None and counter_mj >= before:
                taken.append((counter_mj - before) / 1e3)
            self.before[device], self.looked_s[device] = counter_mj, self.now_s
        return shares, fsum(taken)

    def _told(self) -> Mapping[str, int]:
        return {request: made for request, made in self.tokens.items() if self.random.random() > 0.1}


@pytest.mark.parametrize("seed", range(60))
def test_over_any_history_the_shares_and_what_is_idle_are_what_was_taken(seed: int) -> None:
    history = History(seed)
    shared = 0
    for _ in range(200):
        for _ in range(history.random.randrange(8)):
            history.step()
        looked_s = history.looked_s.copy()
        shares, taken_j = history.look()
        assert fsum([*shares.by_request.values(), shares.idle_j]) == pytest.approx(taken_j, abs=1e-9)
        assert all(share >= 0 for share in shares.by_request.values())
        assert shares.idle_j >= 0
        assert set(shares.by_request) <= history.present
        assert len(history.sharing._inside) == len(history.tokens)
        if history.looked_s != looked_s:
            shared += bool(shares.by_request)
            if history.now_s > max(looked_s.values(), default=0.0):
                history.present = {stay.id for stay, _ in history.sharing._left} | set(history.tokens)
    assert shared > 5
