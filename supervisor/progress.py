"""Whether a child that has requests in work gets on with them, or hangs. Pure: looks go in, with their time; a verdict comes out.

llama-server's ``/health`` is answered by a thread of its own and never sees a hang; a long prefill brings no byte
for minutes. So a child is judged by what moves: bytes first, then the counters of ``/slots``, then its CPU time. ``/slots`` is answered by
the main loop between two batches (tools/server/server-context.cpp:2500 at b11312), so silence there may be a long batch only. And a poll
wakes every request that waits for a result, which then looks later whether its client has left (server-queue.cpp:462): the fewer the
better, and never less than :data:`GAP_S` apart.

In this order:

(1) llmctl itself wasn't running for a while, or the machine slept: nothing was seen, so everything starts over.
(2) The process is stopped (SIGSTOP) for :data:`STOPPED_S`: somebody outside did that. So it is also when nothing is in work, and the time
    it stood still counts for nothing else.
(3) Nothing is in work: never a hang.
(4) Something was heard: it moves; starts over.
(5) Quiet for :data:`QUIET_S`: ask ``/slots``; again three batches later, at least :data:`GAP_S`.
(6) It takes no connection: a SIGTERM from outside closed its listener, and it now waits for its clients for ever.
(7) It answers now, with other counters than the last time or for the first time: it moves; the next poll is compared with this one.
(8) Two polls without an answer, or with the same counters; but its threads work, and that means something (see below): a long batch, or
    a long prompt that is being tokenized. Not for ever: after ``busy_s`` it is a wedge that spins.
(9) Else it hangs.

CPU time means something on a CPU engine. Under CUDA one core spins while the card works or hangs (llama.cpp issues 26487, 27687), so there
it counts only where ``/slots`` says that no slot is in work: what works then is a request that isn't the main loop's yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from supervisor.units import duration

QUIET_S: Final = 5.0
"""A child that sends nothing for so long is asked; one that decodes sends many times a second."""
GAP_S: Final = 10.0
"""Between two polls at least: ``/slots`` asked every 50 ms kept a cancelled slot busy for over a minute."""
GAP_BATCHES: Final = 3
"""And as many batches, so that the counters of a child that moves have changed."""
ANSWER_S: Final = 3.0
"""To wait for ``/slots``; it answers within milliseconds between two batches."""
ANSWER_BATCHES: Final = 2
"""And on CUDA as many batches, so that no answer says that the main loop doesn't turn; on a CPU the CPU time says it."""
STOPPED_S: Final = 5.0
"""A debugger, or a snapshot of the machine, stops a process for less."""
SHARE: Final = 0.005
"""Of a core's time, below which a child does nothing. One that computes has a thread that runs, or waits to, all the time, and hundredths
of it still where its model comes from a slow disk. One that hangs isn't quite at 0: its HTTP threads wake once a second for each request
(server-queue.cpp:462), and a clock tick is 10 ms, a thousandth of :data:`GAP_S`. Where the machine is so busy that these wakings wait long,
a hang is found as late as a spinning one."""
BUSY_S: Final = 600.0
BUSY_BATCHES: Final = 100
"""So long, and for so many batches, a child may work without a sign. The longest first batch that was measured took 13 s (2,048 tokens on
one thread); a machine with other work may need a hundred times what was expected."""
LOOK_S: Final = 2.0
"""Looks come at least so often; then :attr:`Progress.longest_s` holds."""

Slots = tuple[tuple[int, int, int, int], ...]
"""One reading of ``/slots``; of each slot: whether it is in work, its task, the prompt tokens processed, the tokens decoded."""


@dataclass(frozen=True, slots=True)
class Look:
    """What is seen of a child, without asking it."""

    at_s: float
    in_work: int
    """Requests that could bring bytes; one whose client doesn't read can't."""
    heard: int
    """Bytes and events that came from the child since its start. A client's coming and going is better none: clients that give up and
    try again would keep a child that hangs alive."""
    effort_s: float
    """CPU time of the child since its start, and the time its threads waited for a CPU, so that a starved one counts as working."""
    stopped: bool = False
    """The state of its process is T."""
    lagged: bool = False
    """llmctl itself wasn't running for a while since the last look: its loop was late, or the machine slept."""


class Verdict(Enum):
    """What follows from a look, if it doesn't hang."""

    FINE = auto()
    ASK = auto()
    """Ask ``/slots`` now, wait :attr:`Progress.answer_s` at most, and call :meth:`Progress.told`."""


@dataclass(frozen=True, slots=True)
class Hung:
    """It hangs: it has to be killed."""

    text: str
    """What was seen, to be read after "it"."""
    outside: bool = False
    """Somebody outside did it; no request has to do with it."""


@dataclass(frozen=True, slots=True)
class Refused:
    """In the place of ``/slots``: the child takes no connection (ECONNREFUSED, or its socket is gone)."""


def read_slots(body: object) -> Slots | None:
    """The counters of ``/slots``' parsed JSON; None for what isn't such a body. A slot without a task yet has 0."""
    if not isinstance(body, list) or not body:
        return None
    slots = []
    for slot in body:
        if not isinstance(slot, dict) or not isinstance(slot.get("is_processing"), bool):
            return None
        following = slot.get("next_token")
        token = following[0] if isinstance(following, list) and following else None
        decoded = token.get("n_decoded") if isinstance(token, dict) else 0
        counters = (slot.get("id_task"), slot.get("n_prompt_tokens_processed"), decoded)
        task, processed, generated = (each if isinstance(each, int) else 0 for each in counters)
        slots.append((int(slot["is_processing"]), task, processed, generated))
    return tuple(slots)


@dataclass(frozen=True, slots=True)
class _Poll:
    """When ``/slots`` was last asked since the child last moved."""

    at_s: float
    effort_s: float
    slots: Slots | None
    """The last that it answered since."""


class Progress:
    """One child's, from READY until it ends."""

    def __init__(self, *, cuda: bool, batch_s: float) -> None:
        """``batch_s`` is what a whole batch of the prompt is expected to take."""
        self._cuda = cuda
        self.gap_s = max(GAP_S, GAP_BATCHES * batch_s)
        """Between two polls that are compared."""
        self.answer_s = max(ANSWER_S, ANSWER_BATCHES * batch_s) if cuda else ANSWER_S
        """How long to wait for ``/slots``."""
        self.busy_s = max(BUSY_S, BUSY_BATCHES * batch_s)
        """How long it may work without a sign; a spinning one is found at the first poll after that."""
        self._heard: int | None = None
        self._moved_s = 0.0
        self._asked_s = float("-inf")
        """When ``/slots`` was last asked, or answered."""
        self._waits = False
        """For an answer of ``/slots``."""
        self._poll: _Poll | None = None
        self._stopped_s: float | None = None

    def __repr__(self) -> str:
        asked = ", waits for /slots" if self._waits else ", asked once" if self._poll else ""
        return f"<Progress moved at {self._moved_s:.1f} s{asked}>"

    @property
    def longest_s(self) -> float:
        """Seconds within which a child that has stopped moving is found, if llmctl never lags and looks every :data:`LOOK_S`.

        At worst it moved for the last time just after it answered: the next poll sees that, the one after that does not. The CPU engine
        that spins is found after :attr:`busy_s`.
        """
        return 2 * self.gap_s + 3 * (self.answer_s + LOOK_S)

    def look(self, look: Look) -> Verdict | Hung:
        """Judge by one look. Looks come in the order of their time, every :data:`LOOK_S` or oftener."""
        if look.lagged:  # (1)
            self._stopped_s = None
            return self._start_over(look)
        if look.stopped:  # (2)
            self._start_over(look)
            if self._stopped_s is None:
                self._stopped_s = look.at_s
            for_s = look.at_s - self._stopped_s
            return (
                Hung(f"was stopped from outside (SIGSTOP) for {duration(for_s)}", outside=True)
                if for_s >= STOPPED_S
                else Verdict.FINE
            )
        self._stopped_s = None
        if not look.in_work or look.heard != self._heard:  # (3) (4)
            return self._start_over(look)
        wait_s = self.gap_s if self._poll or self._waits else GAP_S
        if look.at_s < max(self._moved_s + QUIET_S, self._asked_s + wait_s):
            return Verdict.FINE
        self._waits, self._asked_s = True, look.at_s  # (5)
        return Verdict.ASK

    def told(self, look: Look, slots: Slots | Refused | None) -> Verdict | Hung:
        """Judge by what ``/slots`` said after an ASK, or None if it said nothing in time; ``look`` is what is seen now."""
        if not self._waits or look.lagged or look.stopped or not look.in_work or look.heard != self._heard:
            return self.look(look) if self._waits else Verdict.FINE
        self._waits, self._asked_s = False, look.at_s
        quiet = f"sent nothing for {duration(look.at_s - self._moved_s)}"
        if isinstance(slots, Refused):  # (6)
            return Hung(f"{quiet} and takes no connection: something sent it a stop signal", outside=True)
        before = self._poll
        self._poll = _Poll(look.at_s, look.effort_s, slots if slots is not None or before is None else before.slots)
        if before is None:
            return Verdict.FINE
        if slots is not None and slots != before.slots:  # (7)
            self._moved_s = look.at_s
            return Verdict.FINE
        seen = "/slots doesn't answer" if slots is None else "the counters of /slots stand still"
        if self._works(before, look, slots):  # (8)
            if look.at_s - self._moved_s < self.busy_s:
                return Verdict.FINE
            return Hung(f"{quiet}, {seen}, and it computes all the time")
        return Hung(f"{quiet}, and {seen}")  # (9)

    def _start_over(self, look: Look) -> Verdict:
        self._heard, self._moved_s, self._waits, self._poll = look.heard, look.at_s, False, None
        return Verdict.FINE

    def _works(self, before: _Poll, look: Look, slots: Slots | None) -> bool:
        """Its threads ran, or waited to, since ``before``. Less than then means that one of them has ended, so it ran."""
        if self._cuda and (slots is None or any(processing for processing, *_ in slots)):
            return False
        return abs(look.effort_s - before.effort_s) >= SHARE * (look.at_s - before.at_s)
