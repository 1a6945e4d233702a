"""Who may go to a child now, who waits, who is turned away. Pure: the proxy holds the futures, this holds the order.

A child has as many places as slots. A request costs as many places as the sequences it asks for. Never more is sent upstream than
there are places, because a request that llama-server itself defers gets no byte and notices no disconnect. Beyond the places a
bounded queue waits in the order of arrival; one that costs more than is free blocks those behind it, so a large one is not starved.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

QUEUE_LIMIT: Final = 256
"""Requests that may wait for one child. At 4 slots and 2 s a reply the last one would wait two minutes."""


class Offer(Enum):
    """The answer to a request that asks to go upstream."""

    ADMITTED = auto()
    QUEUED = auto()
    SHED = auto()


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A request's place in the queue. ``cost`` is the number of sequences it decodes."""

    cost: int = 1


@dataclass(slots=True)
class Admission:
    """The places and the queue of one child."""

    places: int
    limit: int = QUEUE_LIMIT
    _inside: set[Ticket] = field(default_factory=set)
    _queue: deque[Ticket] = field(default_factory=deque)

    def __repr__(self) -> str:
        return f"<Admission {self.busy}/{self.places} busy, {self.waiting} waiting>"

    @property
    def busy(self) -> int:
        """Places taken, at most ``places``."""
        return min(self.places, sum(ticket.cost for ticket in self._inside))

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def offer(self, ticket: Ticket) -> Offer:
        """Ask for a place."""
        if not self._queue and self._fits(ticket):
            self._inside.add(ticket)
            return Offer.ADMITTED
        if len(self._queue) >= self.limit:
            return Offer.SHED
        self._queue.append(ticket)
        return Offer.QUEUED

    def release(self, ticket: Ticket) -> list[Ticket]:
        """Give a place back, or leave the queue; returns the tickets that are admitted by it, in order. Twice is harmless."""
        if ticket in self._inside:
            self._inside.remove(ticket)
        elif ticket in self._queue:
            self._queue.remove(ticket)
        admitted = []
        while self._queue and self._fits(self._queue[0]):
            head = self._queue.popleft()
            self._inside.add(head)
            admitted.append(head)
        return admitted

    def _fits(self, ticket: Ticket) -> bool:
        # A ticket that costs more than there are places goes alone: the child then says what is wrong with it.
        return not self._inside or self.busy + ticket.cost <= self.places
