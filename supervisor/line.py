"""The line before one child: what ``admission`` decides, with a future for each who waits.

Who waits is woken every few seconds, and keeps its client alive by it (:meth:`Guest.keep_alive`). It looks after those inside, too: a
client that takes no byte of its answer for :data:`STALL_S` while others wait for its place loses it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from supervisor.admission import Admission, Offer, Ticket
from supervisor.errors import Error, Exit
from supervisor.units import duration

FIRST_WORD_S: Final = 5.0
"""A client that waits hears nothing for so long; by then most have their answer, and a refusal could still have its status."""
WORDS_S: Final = 5.0
"""Then it hears something this often: proxies and clients give up a silent connection after 30 or 60 s."""
STALL_S: Final = 60.0


class Guest(Protocol):
    """A request's client, as the line needs it."""

    def keep_alive(self) -> None:
        """Say something that is no answer."""

    def stalled_s(self, now_s: float) -> float:
        """For how long it has taken no byte although there are some for it."""

    def give_up(self) -> None:
        """It loses its place."""


class Line:
    """The places and the queue of one child, closed until the child is ready."""

    def __init__(self, name: str, *, places: int, limit: int, max_wait_s: float, stir: Callable[[], None]) -> None:
        """``stir`` is called when somebody begins to wait at a closed line, and when the last one inside has left."""
        self.admission = Admission(places, limit + places, opened=False)
        self._limit = limit
        self.max_wait_s = max_wait_s
        self.idle_since_s = asyncio.get_running_loop().time()
        self._name = name
        self._stir = stir
        self._loop = asyncio.get_running_loop()
        self._closed_since_s: float | None = time.monotonic()
        self._closed_s = 0.0
        self._grants: dict[Ticket, asyncio.Future[None]] = {}
        self._guests: dict[Ticket, Guest] = {}

    def __repr__(self) -> str:
        return f"<Line {self._name} {self.admission!r}>"

    @property
    def idle(self) -> bool:
        """Nobody is in work or waits."""
        return not (self.admission.inside or self.admission.waiting)

    def closed_s(self) -> float:
        """For how long it was closed since it was made, all together: the difference of two looks is what a wait owes to the engine."""
        since_s = self._closed_since_s
        return self._closed_s + (0.0 if since_s is None else time.monotonic() - since_s)

    async def enter(self, ticket: Ticket, guest: Guest) -> None:
        """Wait for a place. Whoever calls it calls :meth:`leave`, whatever comes of it.

        Raises :class:`Error`: HTTP 429 when the queue is full or the wait takes too long, and what :meth:`refuse` says.
        """
        now_s = self._loop.time()
        offer = self.admission.offer(ticket, now_s)
        self._guests[ticket] = guest
        if offer is Offer.ADMITTED:
            return
        if offer is Offer.SHED:
            raise self._full()
        self._grants[ticket] = grant = self._loop.create_future()
        if not self.admission.opened:
            self._stir()
        give_up_s, word_s = now_s + self.max_wait_s, now_s + FIRST_WORD_S
        while not grant.done():
            await asyncio.wait((grant,), timeout=min(give_up_s, word_s) - self._loop.time())
            now_s = self._loop.time()
            if grant.done():
                break
            if now_s >= give_up_s:
                raise self._late()
            if now_s >= word_s:
                guest.keep_alive()
                self._shake(now_s)
                word_s = now_s + WORDS_S
        grant.result()
        del self._grants[ticket]

    def leave(self, ticket: Ticket, *, served: bool = False) -> None:
        """Give the place, or the one in the queue, back, and let in who comes next. Twice is harmless."""
        self._guests.pop(ticket, None)
        if (grant := self._grants.pop(ticket, None)) is not None:
            grant.cancel()
        now_s = self._loop.time()
        self._grant(self.admission.release(ticket, now_s, served=served))
        if not self.admission.inside:
            if not self.admission.waiting:
                self.idle_since_s = now_s
            self._stir()

    def open(self, places: int) -> None:
        """The child can answer: let in as many as it has slots."""
        self.admission.places, self.admission.limit, self.admission.opened = places, self._limit, True
        self._closed_s, self._closed_since_s = self.closed_s(), None
        self._grant(self.admission.admit(self._loop.time()))

    def bound(self, *, limit: int, max_wait_s: float) -> None:
        """From here on so many may wait for so long; those who wait already keep their word."""
        self.admission.limit += limit - self._limit
        self._limit, self.max_wait_s = limit, max_wait_s

    def close(self) -> None:
        """The child takes no more: who comes now waits. So many more than the limit may as have a place as soon as it opens."""
        self.admission.limit = self._limit + self.admission.places
        self.admission.opened = False
        if self._closed_since_s is None:
            self._closed_since_s = time.monotonic()

    def refuse(self, problem: Error) -> None:
        """Turn away all who wait; the line is closed. From now on they don't count as waiting."""
        for ticket, grant in self._grants.items():
            if not grant.done():
                grant.set_exception(problem)
                self.admission.release(ticket, self._loop.time())

    def _grant(self, admitted: Iterable[Ticket]) -> None:
        for ticket in admitted:
            grant = self._grants[ticket]
            if not grant.done():  # its client may be leaving in this very turn: then it gives the place back itself
                grant.set_result(None)

    def _shake(self, now_s: float) -> None:
        """Take the place from those inside whose clients have stopped reading."""
        for ticket, guest in list(self._guests.items()):
            if ticket not in self._grants and guest.stalled_s(now_s) >= STALL_S:
                guest.give_up()

    def _full(self) -> Error:
        admission = self.admission
        return self._busy(
            f"{self._name} has {admission.inside} requests in work and {admission.waiting} waiting, the most it takes",
            "queue_full",
        )

    def _late(self) -> Error:
        return self._busy(f"{self._name} had no place for this request within {duration(self.max_wait_s)}", "queue_timeout")

    def _busy(self, said: str, code: str) -> Error:
        after_s = self.admission.retry_after_s()
        return Error(
            said,
            exit=Exit.BUSY,
            hint=f"send it again in {after_s} s",
            status=429,
            code=code,
            retry_after_s=after_s,
        )
