"""Who may go to a child now, who waits, who is turned away. Pure: time is an argument, ``line`` holds the futures.

A child has as many places as slots. A request costs as many places as the sequences it decodes; one that decodes nothing costs none,
and waits only while the child can't answer.
Never more is sent upstream than there are places, because a request that llama-server itself defers gets no byte and notices no
disconnect. While the child can't answer the queue is closed: everybody waits.

Who is next:

(1) Of two classes, ``interactive`` goes before ``batch``; but where a batch request waits, every :data:`BATCH_TURN`-th turn is its.
(2) Within a class, the party (a key, or an address) that holds the fewest places, where one that is just being given back still counts
    for whom it served; among equals, the one whose last turn, or else arrival, is longest ago. So who asks for one answer doesn't stand
    behind the fifty of somebody else, and a row of newcomers doesn't keep those out who were there before.
(3) A party's own requests go in the order of their arrival.
(4) The next one that costs more than is free blocks those behind it, so that a large one isn't starved.
(5) One that has to be alone (``suspects``) takes its turn like all others, and then waits until every place is free; while it is inside
    nobody else gets a place. It takes one itself even if it decodes nothing, since what it may kill is the child.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

BATCH_TURN: Final = 8
"""One place in so many goes to the batch class while it waits, so that it isn't starved."""
SMOOTHING: Final = 0.2
"""Weight of the last answer in the mean time that one holds its places."""
RETRY_UNKNOWN_S: Final = 5
"""Retry-After before any answer was measured."""
RETRY_MOST_S: Final = 60
"""OpenAI's and Anthropic's SDKs obey a Retry-After up to a minute, and go by their own clock beyond it."""


class Offer(Enum):
    """The answer to a request that asks to go upstream."""

    ADMITTED = auto()
    QUEUED = auto()
    SHED = auto()


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's place in the queue."""

    cost: int = 1
    """Sequences it decodes; 0 for a request that needs no slot."""
    party: str = ""
    """Whose it is: requests of one party take turns with those of others."""
    batch: bool = False
    alone: bool = False
    """Nobody else may have a place beside it. Not to be changed while it is inside or waits."""

    @property
    def takes(self) -> int:
        """Places it takes."""
        return max(1, self.cost) if self.alone else self.cost


@dataclass(slots=True)
class _Class:
    """The waiting tickets of one class, by party."""

    waiting: int = 0
    queues: dict[str, deque[Ticket]] = field(default_factory=dict)
    since: dict[str, int] = field(default_factory=dict)
    """Number of a waiting party's last turn, or of its arrival."""

    def push(self, ticket: Ticket, number: int) -> None:
        if ticket.party not in self.queues:
            self.queues[ticket.party] = deque()
            self.since[ticket.party] = number
        self.queues[ticket.party].append(ticket)
        self.waiting += 1

    def head(self, held: Mapping[str, int]) -> Ticket | None:
        if not self.queues:
            return None
        party = min(self.queues, key=lambda each: (held.get(each, 0), self.since[each]))  # (2)
        return self.queues[party][0]  # (3)

    def remove(self, ticket: Ticket, turn: int | None = None) -> bool:
        """Take a ticket out; ``turn`` is the number of the turn it got. Whether it was there."""
        queue = self.queues.get(ticket.party)
        if queue is None or ticket not in queue:
            return False
        queue.remove(ticket)
        self.waiting -= 1
        if turn is not None:
            self.since[ticket.party] = turn
        if not queue:
            del self.queues[ticket.party], self.since[ticket.party]
        return True


@dataclass(slots=True)
class Admission:
    """The places and the queue of one child."""

    places: int
    limit: int
    """Requests that may wait."""
    opened: bool = True
    """Whether the child can answer."""
    service_s: float | None = None
    """Mean time that an answer holds its place; None before the first."""
    served: int = 0
    """Answers that held a place to their end."""
    _inside: dict[Ticket, float] = field(default_factory=dict)
    """Since when, in seconds."""
    _taken: int = 0
    _alone: bool = False
    """Whether the one that has the places has to be alone."""
    _held: dict[str, int] = field(default_factory=dict)
    """Places a party holds."""
    _classes: tuple[_Class, _Class] = field(default_factory=lambda: (_Class(), _Class()))
    _free: list[Ticket] = field(default_factory=list)
    """Those that wait and cost nothing."""
    _number: int = 0
    """Of the last arrival or turn."""
    _streak: int = 0
    """Interactive turns in a row while a batch one waited."""

    def __repr__(self) -> str:
        return f"<Admission {self.busy}/{self.places} busy, {self.waiting} waiting{'' if self.opened else ', closed'}>"

    @property
    def busy(self) -> int:
        """Places taken, at most ``places``."""
        return min(self.places, self._taken)

    @property
    def inside(self) -> int:
        """Requests in work, also those that take no place."""
        return len(self._inside)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._free) + sum(each.waiting for each in self._classes)

    def offer(self, ticket: Ticket, now_s: float) -> Offer:
        """Ask for a place."""
        if self.opened and (not ticket.takes or (not self.waiting and self._fits(ticket))):
            self._enter(ticket, now_s)
            return Offer.ADMITTED
        if self.waiting >= self.limit:
            return Offer.SHED
        if not ticket.takes:
            self._free.append(ticket)
            return Offer.QUEUED
        self._number += 1
        self._classes[ticket.batch].push(ticket, self._number)
        return Offer.QUEUED

    def release(self, ticket: Ticket, now_s: float, *, served: bool = False) -> list[Ticket]:
        """Give a place back, or leave the queue; returns the tickets that are admitted by it, in order. Twice is harmless.

        ``served`` says that it held its place for a whole answer, which measures the service rate.
        """
        since_s = self._inside.pop(ticket, None)
        if since_s is None:
            if ticket in self._free:
                self._free.remove(ticket)
            self._classes[ticket.batch].remove(ticket)
            return self.admit(now_s)
        self._taken -= ticket.takes
        self._alone = self._alone and not ticket.alone
        if served and ticket.takes:
            self.served += 1
            held_s = now_s - since_s
            self.service_s = held_s if self.service_s is None else self.service_s + SMOOTHING * (held_s - self.service_s)
        admitted = self.admit(now_s)
        held = self._held.pop(ticket.party, 0) - ticket.takes
        if held > 0:
            self._held[ticket.party] = held
        return admitted

    def admit(self, now_s: float) -> list[Ticket]:
        """Let in whoever can go now, in order."""
        if not self.opened:
            return []
        admitted, self._free = self._free, []
        for free in admitted:
            self._enter(free, now_s)
        while (ticket := self._next()) is not None and self._fits(ticket):  # (4)
            _, batch = self._classes
            self._streak = 0 if ticket.batch or not batch.waiting else self._streak + 1
            self._number += 1
            self._classes[ticket.batch].remove(ticket, self._number)
            self._enter(ticket, now_s)
            admitted.append(ticket)
        return admitted

    def retry_after_s(self) -> int:
        """Whole seconds in which those who wait now will have been served, at the measured rate; 1 to :data:`RETRY_MOST_S`."""
        if self.service_s is None:
            return RETRY_UNKNOWN_S
        waiting = (ticket for each in self._classes for queue in each.queues.values() for ticket in queue)
        ahead = self.places if self._alone else self._taken
        ahead += sum(max(self.places, ticket.takes) if ticket.alone else ticket.takes for ticket in waiting)
        return max(1, min(RETRY_MOST_S, math.ceil(ahead * self.service_s / self.places)))

    def _next(self) -> Ticket | None:
        interactive, batch = (each.head(self._held) for each in self._classes)
        if interactive is None or batch is None:
            return interactive or batch
        return batch if self._streak >= BATCH_TURN - 1 else interactive  # (1)

    def _enter(self, ticket: Ticket, now_s: float) -> None:
        self._inside[ticket] = now_s
        if ticket.takes:
            self._taken += ticket.takes
            self._alone = ticket.alone
            self._held[ticket.party] = self._held.get(ticket.party, 0) + ticket.takes

    def _fits(self, ticket: Ticket) -> bool:
        # A ticket that costs more than there are places goes alone: the child then says what is wrong with it.
        if not self._taken:
            return True
        return not (self._alone or ticket.alone) and self._taken + ticket.takes <= self.places  # (5)
