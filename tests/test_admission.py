"""Admission keeps its promises under any order of arrivals and departures: compared, step by step, with an oracle in plain words."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from supervisor.admission import BATCH_TURN, RETRY_MOST_S, RETRY_UNKNOWN_S, Admission, Offer, Ticket


def takes(ticket: Ticket) -> int:
    """One that has to be alone takes a place even if it decodes nothing."""
    return 1 if ticket.alone and ticket.cost == 0 else ticket.cost


@dataclass
class Oracle:
    """The same promise in the plainest words: people before a room, and a doorman who looks at all of them each time."""

    places: int
    limit: int
    opened: bool = True
    inside: list[Ticket] = field(default_factory=list)
    line: list[Ticket] = field(default_factory=list)
    leaving: Ticket | None = None
    since: dict[tuple[bool, str], int] = field(default_factory=dict)
    number: int = 0
    streak: int = 0

    def room(self, ticket: Ticket) -> bool:
        placed = [each for each in self.inside if takes(each)]
        used = sum(takes(each) for each in placed)
        if takes(ticket) and placed and any(each.alone for each in [*placed, ticket]):
            return False
        return not takes(ticket) or not used or used + takes(ticket) <= self.places

    def come(self, ticket: Ticket) -> Offer:
        paying = [each for each in self.line if takes(each)]
        if self.opened and self.room(ticket) and not (takes(ticket) and paying):
            self.inside.append(ticket)
            return Offer.ADMITTED
        if len(self.line) >= self.limit:
            return Offer.SHED
        if takes(ticket):
            self.number += 1
            if not any((each.batch, each.party) == (ticket.batch, ticket.party) for each in paying):
                self.since[ticket.batch, ticket.party] = self.number
        self.line.append(ticket)
        return Offer.QUEUED

    def held(self, party: str) -> int:
        there = self.inside + ([self.leaving] if self.leaving else [])
        return sum(takes(each) for each in there if each.party == party)

    def chosen(self) -> Ticket | None:
        """Whose turn it is: class, then party, then arrival."""
        paying = [each for each in self.line if takes(each)]
        classes = {each.batch for each in paying}
        if not classes:
            return None
        batch = classes == {True} or (True in classes and self.streak == BATCH_TURN - 1)
        of_class = [each for each in paying if each.batch is batch]
        party = min({each.party for each in of_class}, key=lambda name: (self.held(name), self.since[batch, name]))
        return next(each for each in of_class if each.party == party)

    def fill(self) -> list[Ticket]:
        if not self.opened:
            return []
        entered = [each for each in self.line if not takes(each)]
        while True:
            self.line = [each for each in self.line if each not in entered]
            self.inside += [each for each in entered if each not in self.inside]
            ticket = self.chosen()
            if ticket is None or not self.room(ticket):
                return entered
            waits = any(each.batch and takes(each) for each in self.line)
            self.streak = self.streak + 1 if waits and not ticket.batch else 0
            self.number += 1
            self.since[ticket.batch, ticket.party] = self.number
            entered.append(ticket)

    def go(self, ticket: Ticket) -> list[Ticket]:
        self.leaving = ticket if ticket in self.inside else None
        self.inside = [each for each in self.inside if each is not ticket]
        self.line = [each for each in self.line if each is not ticket]
        entered = self.fill()
        self.leaving = None
        return entered


@pytest.mark.parametrize("seed", range(60))
def test_any_history_goes_as_the_oracle_says(seed: int) -> None:
    """Releases are of those inside, of those waiting (a client left), and of strangers and the already released."""
    draw = random.Random(seed)
    places, limit, parties = draw.randint(1, 6), draw.choice([0, 1, 8, 30]), "abcde"[: draw.randint(1, 5)]
    real, oracle = Admission(places, limit), Oracle(places, limit)
    batches, suspects = draw.random(), draw.choice([0.0, 0.1, 0.5, 1.0])
    seen: list[Ticket] = []
    for step in range(500):
        chance = draw.random()
        if chance < 0.03:
            oracle.opened = real.opened = not real.opened
            assert real.admit(float(step)) == oracle.fill()
        elif chance < 0.55:
            cost = draw.choice([0, 1, 1, 1, 2, 3, places, places + 2])
            ticket = Ticket(cost, draw.choice(parties), batch=draw.random() < batches, alone=draw.random() < suspects)
            assert real.offer(ticket, float(step)) is oracle.come(ticket)
            seen.append(ticket)
        elif seen:
            known = oracle.inside + oracle.line if draw.random() < 0.8 else seen
            if known:
                ticket = draw.choice(known)
                assert real.release(ticket, float(step), served=draw.random() < 0.5) == oracle.go(ticket)
        placed = [ticket for ticket in oracle.inside if takes(ticket)]
        used = [takes(ticket) for ticket in placed]
        assert len(placed) == 1 or not any(ticket.alone for ticket in placed)  # never another one beside one that has to be alone
        assert sum(used) <= places or len(used) == 1  # never more than places, but a single one that is larger
        assert real.busy == min(places, sum(used))
        assert (real.inside, real.waiting) == (len(oracle.inside), len(oracle.line))
        assert real.waiting <= limit
        assert used or not real.opened or not real.waiting  # nobody waits before an empty room
    oracle.opened = real.opened = True
    assert real.admit(0.0) == oracle.fill()
    while oracle.inside:
        assert real.release(oracle.inside[0], 0.0) == oracle.go(oracle.inside[0])
    assert (real.busy, real.inside, real.waiting, real._held) == (0, 0, 0, {})
    assert [(each.queues, each.since) for each in real._classes] == [({}, {})] * 2


def admit_all(admission: Admission, *tickets: Ticket) -> list[Offer]:
    return [admission.offer(ticket, 0.0) for ticket in tickets]


def test_one_partys_requests_are_admitted_in_the_order_of_their_arrival() -> None:
    admission = Admission(1, 256)
    tickets = [Ticket() for _ in range(50)]
    assert admit_all(admission, *tickets) == [Offer.ADMITTED] + [Offer.QUEUED] * 49
    order = [tickets[0]]
    for _ in range(49):
        order += admission.release(order[-1], 0.0)
    assert order == tickets
    assert admission.release(order[-1], 0.0) == []


def test_a_large_one_is_not_starved_by_small_ones_behind_it() -> None:
    admission = Admission(2, 256)
    first, second, large, small = Ticket(), Ticket(), Ticket(2), Ticket()
    admit_all(admission, first, second, large, small)
    assert admission.release(first, 0.0) == []  # one place is free, and the small one would fit
    assert admission.release(second, 0.0) == [large]
    assert admission.release(large, 0.0) == [small]


def test_a_large_one_that_leaves_the_queue_lets_those_behind_it_go() -> None:
    admission = Admission(2, 256)
    first, large, small = Ticket(), Ticket(2), Ticket()
    admit_all(admission, first, large, small)
    assert admission.release(large, 0.0) == [small]


def test_one_that_costs_more_than_there_is_goes_alone() -> None:
    admission = Admission(2, 256)
    huge, small = Ticket(1000), Ticket()
    assert admit_all(admission, huge, small) == [Offer.ADMITTED, Offer.QUEUED]
    assert admission.busy == 2
    assert admission.release(huge, 0.0) == [small]
    assert admission.offer(Ticket(1000), 0.0) is Offer.QUEUED


def test_at_the_limit_it_sheds_and_forgets() -> None:
    admission = Admission(1, 1)
    first, second, third = Ticket(), Ticket(), Ticket()
    assert admit_all(admission, first, second, third) == [Offer.ADMITTED, Offer.QUEUED, Offer.SHED]
    assert admission.release(third, 0.0) == []
    assert admission.release(first, 0.0) == [second]
    assert admission.release(second, 0.0) == []


def test_a_double_release_gives_no_second_place() -> None:
    admission = Admission(1, 256)
    first, second, third = Ticket(), Ticket(), Ticket()
    admit_all(admission, first, second, third)
    assert admission.release(first, 0.0) == [second]
    assert admission.release(first, 0.0) == []
    assert (admission.busy, admission.waiting) == (1, 1)


def test_equal_tickets_are_still_two() -> None:
    assert Ticket(1) != Ticket(1)


# What costs nothing.


def test_what_decodes_nothing_needs_no_place() -> None:
    admission = Admission(1, 0)
    tickets = [Ticket(), Ticket(0), Ticket(0), Ticket()]
    assert admit_all(admission, *tickets) == [Offer.ADMITTED, Offer.ADMITTED, Offer.ADMITTED, Offer.SHED]
    assert (admission.busy, admission.inside) == (1, 3)


def test_what_decodes_nothing_waits_for_the_child_only() -> None:
    """And not behind those that wait for a place in it."""
    admission = Admission(1, 256, opened=False)
    first, large, free = Ticket(party="a"), Ticket(7, "b"), Ticket(0, "a")
    assert admit_all(admission, first, large, free) == [Offer.QUEUED] * 3
    admission.opened = True
    assert admission.admit(0.0) == [free, first]
    assert admission.release(free, 0.0) == []
    assert admission.release(first, 0.0) == [large]


def test_one_that_decodes_nothing_leaves_the_queue() -> None:
    admission = Admission(1, 1, opened=False)
    free = Ticket(0)
    assert admit_all(admission, free, Ticket(0)) == [Offer.QUEUED, Offer.SHED]
    assert admission.release(free, 0.0) == []
    assert admission.waiting == 0


# Who has to be alone.


def test_one_that_has_to_be_alone_waits_until_all_have_gone_and_those_behind_it_wait_for_it() -> None:
    admission = Admission(4, 256)
    first, second, suspect, other, behind = Ticket(), Ticket(), Ticket(alone=True), Ticket(alone=True), Ticket()
    assert admit_all(admission, first, second, suspect, behind, other) == [Offer.ADMITTED] * 2 + [Offer.QUEUED] * 3
    assert admission.release(first, 0.0) == []
    assert admission.release(second, 0.0) == [suspect]
    assert admission.offer(Ticket(), 0.0) is Offer.QUEUED  # three places are free
    assert admission.release(suspect, 0.0) == [behind]
    assert admission.release(behind, 0.0) == [other]


def test_one_that_has_to_be_alone_goes_at_once_into_an_empty_room() -> None:
    admission = Admission(4, 256)
    assert admit_all(admission, Ticket(alone=True), Ticket(), Ticket(0)) == [Offer.ADMITTED, Offer.QUEUED, Offer.ADMITTED]
    assert (admission.busy, admission.inside, admission.waiting) == (1, 2, 1)


def test_one_that_has_to_be_alone_takes_a_place_even_if_it_decodes_nothing() -> None:
    admission = Admission(2, 256)
    first, suspect = Ticket(), Ticket(0, alone=True)
    assert admit_all(admission, first, suspect) == [Offer.ADMITTED, Offer.QUEUED]
    assert admission.release(first, 0.0) == [suspect]
    assert admission.offer(Ticket(), 0.0) is Offer.QUEUED


def test_one_that_has_to_be_alone_and_leaves_the_queue_lets_those_behind_it_go() -> None:
    admission = Admission(2, 256)
    first, suspect, behind = Ticket(), Ticket(alone=True), Ticket()
    admit_all(admission, first, suspect, behind)
    assert admission.release(suspect, 0.0) == [behind]


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_starved_where_some_have_to_be_alone(seed: int) -> None:
    """With endless traffic of all sorts each one gets in before many more than came before it have."""
    draw = random.Random(seed)
    places = draw.randint(1, 5)
    admission = Admission(places, 20)
    inside: list[Ticket] = []
    entered: list[Ticket] = []
    before: dict[Ticket, int] = {}
    for _ in range(2000):
        ticket = Ticket(draw.randint(1, places), draw.choice("abc"), batch=draw.random() < 0.3, alone=draw.random() < 0.3)
        offer = admission.offer(ticket, 0.0)
        if offer is not Offer.SHED:
            before[ticket] = len(entered)
        news = [ticket] if offer is Offer.ADMITTED else []
        if inside and draw.random() < 0.9:
            news += admission.release(inside.pop(draw.randrange(len(inside))), 0.0)
        inside += news
        entered += news
        assert len(inside) == 1 or not any(each.alone for each in inside)
    overtaken = [at - before[ticket] for at, ticket in enumerate(entered)]
    assert any(each.alone for each in entered)
    there = set(entered)
    overtaken += [len(entered) - before[ticket] for ticket in before if ticket not in there]
    assert max(overtaken) <= 20 * 3 * BATCH_TURN  # behind all that may wait, of one party among three, in batch


# Open and closed.


def test_a_closed_one_lets_nobody_in_and_those_inside_go() -> None:
    admission = Admission(2, 256)
    inside, waiting = Ticket(), Ticket()
    admission.offer(inside, 0.0)
    admission.opened = False
    assert admission.offer(waiting, 0.0) is Offer.QUEUED
    assert admission.release(inside, 0.0) == []
    assert admission.admit(0.0) == []
    assert (admission.inside, admission.waiting) == (0, 1)
    admission.opened = True
    assert admission.admit(0.0) == [waiting]


def test_it_opens_with_as_many_places_as_the_child_has() -> None:
    """A plan may have given up slots."""
    admission = Admission(4, 256, opened=False)
    tickets = [Ticket() for _ in range(6)]
    admit_all(admission, *tickets)
    admission.places, admission.opened = 2, True
    assert admission.admit(0.0) == tickets[:2]


def test_it_opens_with_fewer_places_than_are_still_held() -> None:
    admission = Admission(2, 256)
    first, second, third = Ticket(), Ticket(), Ticket()
    admit_all(admission, first, second, third)
    admission.places = 1
    assert admission.busy == 1
    assert admission.release(first, 0.0) == []
    assert admission.release(second, 0.0) == [third]


# Fairness.


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("waiting", [50, 200])
def test_who_asks_for_one_answer_waits_for_one_release_behind_a_greedy_party(slots: int, waiting: int) -> None:
    admission = Admission(slots, 256)
    inside: deque[Ticket] = deque()
    for _ in range(waiting):
        ticket = Ticket(party="greedy")
        if admission.offer(ticket, 0.0) is Offer.ADMITTED:
            inside.append(ticket)
    assert len(inside) == slots
    for _ in range(30):
        mine = Ticket(party="one at a time")
        assert admission.offer(mine, 0.0) is Offer.QUEUED
        assert admission.release(inside.popleft(), 0.0) == [mine]
        done = admission.release(mine, 0.0)  # what it gives back goes to the greedy one
        assert [ticket.party for ticket in done] == ["greedy"]
        inside += done


def test_two_greedy_parties_get_every_other_turn() -> None:
    admission = Admission(1, 256)
    last = Ticket(party="a")
    admit_all(admission, last, *(Ticket(party=party) for party in "a" * 20 + "b" * 20))
    turns = ""
    for _ in range(20):
        (last,) = admission.release(last, 0.0)
        turns += last.party
    assert turns == "ba" * 10


@pytest.mark.parametrize("slots", [1, 4])
def test_endless_newcomers_do_not_keep_an_old_party_out(slots: int) -> None:
    """Each of them a party of its own that was never served; the old one waits for those that were there at its last turn."""
    admission = Admission(slots, 256)
    inside = deque(Ticket(party=f"before {number}") for number in range(slots - 1))
    inside.appendleft(Ticket(party="old"))
    admit_all(admission, *inside, *(Ticket(party="old") for _ in range(5)))
    served: list[str] = []
    bounds = [0]
    for number in range(100):
        admission.offer(Ticket(party=f"new {number}"), 0.0)
        entered = admission.release(inside.popleft(), 0.0)
        inside += entered
        for ticket in entered:
            served.append(ticket.party)
            if ticket.party == "old":
                bounds.append(admission.waiting)
    waits = [at for at, party in enumerate(served) if party == "old"]
    assert len(waits) == 5
    gaps = [after - before for before, after in zip([-1, *waits], waits, strict=False)]
    assert all(gap <= slots + 1 + bound for gap, bound in zip(gaps, bounds, strict=False))


def test_of_parties_that_hold_the_same_the_one_longest_without_a_turn_is_next() -> None:
    admission = Admission(1, 256)
    last = Ticket(party="x")
    admit_all(admission, last, *(Ticket(party=party) for party in "cabcab"))
    turns = ""
    for _ in range(6):
        (last,) = admission.release(last, 0.0)
        turns += last.party
    assert turns == "cabcab"


# Classes.


def test_batch_gets_every_eighth_turn_while_it_waits() -> None:
    admission = Admission(1, 256)
    last = Ticket(party="x")
    admit_all(admission, last, *(Ticket(batch=True) for _ in range(3)), *(Ticket() for _ in range(40)))
    turns = ""
    for _ in range(30):
        (last,) = admission.release(last, 0.0)
        turns += "b" if last.batch else "i"
    assert turns == ("i" * (BATCH_TURN - 1) + "b") * 3 + "i" * 6


def test_batch_goes_at_once_where_nobody_else_waits() -> None:
    admission = Admission(1, 256)
    first, batch = Ticket(), Ticket(batch=True)
    admit_all(admission, first, batch)
    assert admission.release(first, 0.0) == [batch]


def test_turns_before_a_batch_request_came_do_not_count_for_it() -> None:
    admission = Admission(1, 256)
    last = Ticket()
    admit_all(admission, last, *(Ticket() for _ in range(40)))
    for _ in range(20):
        (last,) = admission.release(last, 0.0)
    admission.offer(Ticket(batch=True), 0.0)
    turns = ""
    for _ in range(BATCH_TURN):
        (last,) = admission.release(last, 0.0)
        turns += "b" if last.batch else "i"
    assert turns == "i" * (BATCH_TURN - 1) + "b"


def test_a_party_takes_turns_within_each_class() -> None:
    admission = Admission(1, 256)
    last = Ticket(party="x")
    admit_all(admission, last, *(Ticket(party=party, batch=True) for party in "aab"))
    turns = ""
    for _ in range(3):
        (last,) = admission.release(last, 0.0)
        turns += last.party
    assert turns == "aba"


# Retry-After.


def test_before_anything_was_measured_retry_after_is_a_guess() -> None:
    assert Admission(4, 256).retry_after_s() == RETRY_UNKNOWN_S


def test_retry_after_is_the_time_in_which_those_ahead_are_served() -> None:
    admission = Admission(2, 256)
    first = Ticket()
    admission.offer(first, 100.0)
    admission.release(first, 104.0, served=True)
    assert admission.service_s == 4.0
    admit_all(admission, *(Ticket() for _ in range(5)))  # two in work, three waiting, two at a time
    assert admission.retry_after_s() == 10
    admission.offer(Ticket(4), 0.0)
    assert admission.retry_after_s() == 18


def test_retry_after_is_at_least_a_second_and_at_most_what_the_sdks_obey() -> None:
    admission = Admission(1, 256)
    first = Ticket()
    admission.offer(first, 0.0)
    admission.release(first, 0.01, served=True)
    assert admission.retry_after_s() == 1
    second = Ticket()
    admission.offer(second, 0.0)
    admission.release(second, 10_000.0, served=True)
    admission.offer(Ticket(), 0.0)
    assert admission.retry_after_s() == RETRY_MOST_S


def test_only_whole_answers_that_held_a_place_are_measured() -> None:
    admission = Admission(1, 256)
    for ticket, served in ((Ticket(), False), (Ticket(0), True)):
        admission.offer(ticket, 0.0)
        admission.release(ticket, 100.0, served=served)
    inside, waited = Ticket(), Ticket()
    admit_all(admission, inside, waited)
    admission.release(waited, 100.0, served=True)  # it left the queue
    assert admission.service_s is None


def test_those_who_have_to_be_alone_count_as_all_places() -> None:
    admission = Admission(4, 256)
    first, suspect = Ticket(), Ticket(alone=True)
    admission.offer(first, 0.0)
    admission.release(first, 4.0, served=True)
    admit_all(admission, suspect, Ticket(), Ticket(alone=True))  # one after the other
    assert admission.retry_after_s() == 9
    admission.release(suspect, 0.0)
    assert admission.retry_after_s() == 5


def test_one_that_had_to_be_alone_counts_no_more_when_it_has_gone() -> None:
    admission = Admission(4, 256, service_s=4.0)
    suspect = Ticket(alone=True)
    admission.offer(suspect, 0.0)
    assert admission.retry_after_s() == 4
    admission.release(suspect, 0.0)
    assert admission.retry_after_s() == 1


def test_answers_that_held_a_place_to_their_end_are_counted() -> None:
    admission = Admission(1, 256)
    whole, cut, free, waits = Ticket(), Ticket(), Ticket(0), Ticket()
    for ticket, served in ((whole, True), (whole, True), (cut, False), (free, True)):
        if ticket is not whole or not admission.served:
            admission.offer(ticket, 0.0)
        admission.release(ticket, 1.0, served=served)
    admit_all(admission, cut, waits)
    admission.release(waits, 1.0, served=True)  # it left the queue
    assert admission.served == 1


def test_the_measured_time_follows_the_last_answers() -> None:
    admission = Admission(1, 256)
    for held_s in (10.0, *(1.0,) * 20):
        ticket = Ticket()
        admission.offer(ticket, 0.0)
        admission.release(ticket, held_s, served=True)
    assert admission.service_s == pytest.approx(1.0 + 9.0 * 0.8**20)


def test_it_shows_what_it_holds() -> None:
    admission = Admission(2, 3)
    admit_all(admission, *(Ticket() for _ in range(4)))
    assert repr(admission) == "<Admission 2/2 busy, 2 waiting>"
    admission.opened = False
    assert repr(admission) == "<Admission 2/2 busy, 2 waiting, closed>"
