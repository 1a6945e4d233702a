"""Admission keeps its promises under any order of arrivals and departures: compared, step by step, with an oracle of ten lines."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from supervisor.admission import Admission, Offer, Ticket


@dataclass
class Oracle:
    """The same promise in the plainest words: a line of people before a room."""

    places: int
    limit: int
    inside: list[Ticket] = field(default_factory=list)
    line: list[Ticket] = field(default_factory=list)

    def room(self, ticket: Ticket) -> bool:
        used = sum(each.cost for each in self.inside)
        return used + ticket.cost <= self.places or not self.inside

    def come(self, ticket: Ticket) -> Offer:
        if not self.line and self.room(ticket):
            self.inside.append(ticket)
            return Offer.ADMITTED
        if len(self.line) == self.limit:
            return Offer.SHED
        self.line.append(ticket)
        return Offer.QUEUED

    def go(self, ticket: Ticket) -> list[Ticket]:
        self.inside = [each for each in self.inside if each is not ticket]
        self.line = [each for each in self.line if each is not ticket]
        entered = []
        while self.line and self.room(self.line[0]):
            entered.append(self.line.pop(0))
            self.inside.append(entered[-1])
        return entered


@pytest.mark.parametrize("seed", range(40))
def test_any_history_goes_as_the_oracle_says(seed: int) -> None:
    """Releases are of those inside, of those waiting (a client left), and of strangers and the already released."""
    draw = random.Random(seed)
    places, limit = draw.randint(1, 6), draw.randint(0, 8)
    real, oracle = Admission(places, limit), Oracle(places, limit)
    seen: list[Ticket] = []
    for _ in range(400):
        if draw.random() < 0.55:
            ticket = Ticket(draw.choice([1, 1, 1, 2, 3, places, places + 2]))
            assert real.offer(ticket) is oracle.come(ticket)
            seen.append(ticket)
        elif seen:
            known = oracle.inside + oracle.line if draw.random() < 0.8 else seen
            if known:
                ticket = draw.choice(known)
                assert real.release(ticket) == oracle.go(ticket)
        used = [ticket.cost for ticket in oracle.inside]
        assert sum(used) <= places or len(used) == 1  # never more than places, but a single one that is larger
        assert real.busy == min(places, sum(used))
        assert real.waiting == len(oracle.line) <= limit
        assert not (oracle.line and oracle.room(oracle.line[0]))  # nobody waits who could go
    while oracle.inside:
        assert real.release(oracle.inside[0]) == oracle.go(oracle.inside[0])
    assert (real.busy, real.waiting) == (0, 0)


def test_those_who_wait_are_admitted_in_the_order_of_their_arrival() -> None:
    admission = Admission(1)
    tickets = [Ticket() for _ in range(50)]
    assert [admission.offer(ticket) for ticket in tickets] == [Offer.ADMITTED] + [Offer.QUEUED] * 49
    order = [tickets[0]]
    for _ in range(49):
        order += admission.release(order[-1])
    assert order == tickets
    assert admission.release(order[-1]) == []


def test_a_large_one_is_not_starved_by_small_ones_behind_it() -> None:
    admission = Admission(2)
    first, second, large, small = Ticket(), Ticket(), Ticket(2), Ticket()
    for ticket in (first, second, large, small):
        admission.offer(ticket)
    assert admission.release(first) == []  # one place is free, and the small one would fit
    assert admission.release(second) == [large]
    assert admission.release(large) == [small]


def test_a_large_one_that_leaves_the_queue_lets_those_behind_it_go() -> None:
    admission = Admission(2)
    first, large, small = Ticket(), Ticket(2), Ticket()
    for ticket in (first, large, small):
        admission.offer(ticket)
    assert admission.release(large) == [small]


def test_one_that_costs_more_than_there_is_goes_alone() -> None:
    admission = Admission(2)
    huge, small = Ticket(1000), Ticket()
    assert admission.offer(huge) is Offer.ADMITTED
    assert admission.busy == 2
    assert admission.offer(small) is Offer.QUEUED
    assert admission.release(huge) == [small]
    assert admission.offer(Ticket(1000)) is Offer.QUEUED


def test_at_the_limit_it_sheds_and_forgets() -> None:
    admission = Admission(1, limit=1)
    first, second, third = Ticket(), Ticket(), Ticket()
    assert [admission.offer(ticket) for ticket in (first, second, third)] == [Offer.ADMITTED, Offer.QUEUED, Offer.SHED]
    assert admission.release(third) == []
    assert admission.release(first) == [second]
    assert admission.release(second) == []


def test_a_double_release_gives_no_second_place() -> None:
    admission = Admission(1)
    first, second, third = Ticket(), Ticket(), Ticket()
    for ticket in (first, second, third):
        admission.offer(ticket)
    assert admission.release(first) == [second]
    assert admission.release(first) == []
    assert (admission.busy, admission.waiting) == (1, 1)


def test_equal_tickets_are_still_two() -> None:
    assert Ticket(1) != Ticket(1)


def test_it_shows_what_it_holds() -> None:
    admission = Admission(2, limit=3)
    for _ in range(4):
        admission.offer(Ticket())
    assert repr(admission) == "<Admission 2/2 busy, 2 waiting>"
