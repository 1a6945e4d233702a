"""Whether guessing ahead pays, by the guesses that were right, and what is tried in its place where it doesn't. Pure: time is an argument.

A preset has a list of ways to guess (:func:`~supervisor.option.methods`: its ``speculative``, its ``speculative_next``, off). Of the one
that runs, every request says how many tokens were guessed and how many of them were right. More than :data:`GOOD` of them right: it stays.
Fewer than :data:`BAD` for long enough: the next of the list. Between the two it goes on watching.

*Long enough* is evidence and time both. The tokens of one request say much the same (a poem's are all hard, a quotation's all easy), so
requests are what counts, not tokens: none weighs more than :data:`LOT` tokens, small ones make a lot together, and a verdict takes
:data:`LOTS` lots. A lot weighs one to two times :data:`LOT`, so they say as much as at least 8/9 of them would that weigh the same
(Kish: (Σw)²/Σw²). By Hoeffding's inequality a method of whose guesses 60 % are right shows fewer than 30 % at one look with a probability
below exp(-2 · 64 · 8/9 · 0.3²) = 4e-5, however unlike each other the requests are. And they have to stay below :data:`LONG_S`,
so that one job of a hundred requests decides nothing.

Even so it may have been an odd day: after :data:`AGAIN_S` with a later method the first one is tried again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Final

from supervisor.option import OFF, Speculation
from supervisor.plan import Plan, lessening
from supervisor.profile import Rung
from supervisor.units import duration

GOOD: Final = 0.60
BAD: Final = 0.30
"""Parts of the guessed tokens."""
LOT: Final = 100
"""Tokens: the most that one request counts for."""
LOTS: Final = 64
"""The recent ones, and as many as it takes."""
LONG_S: Final = 600.0
AGAIN_S: Final = 86_400.0
QUIET_S: Final = 20.0
"""Nobody in work or waiting for so long is an idle moment: a change costs a load, and what the engine had cached."""


class Verdict(Enum):
    """What is to become of the method that runs."""

    STAY = "stay"
    NEXT = "next"
    FIRST = "first"
    """The preset's own is to be tried again."""


class Acceptance:
    """The recent guesses of one method, in lots of about the same weight."""

    __slots__ = ("_below_s", "_lots", "_open", "_shown", "_told_s")

    def __init__(self) -> None:
        self._lots: deque[tuple[float, float]] = deque(maxlen=LOTS)
        """Tokens that were guessed, and those of them that were right."""
        self._open = (0.0, 0.0)
        self._shown: float | None = None
        self._below_s: float | None = None
        """Since when the lots, all there, say that it is bad."""
        self._told_s = 0.0
        """When the last lot was full."""

    def __repr__(self) -> str:
        return f"<Acceptance {self.share} of {len(self._lots)} lots>"

    def learn(self, now_s: float, draft_tokens: int, draft_accepted: int) -> None:
        """A request has ended for which so many tokens were guessed, of which so many were right."""
        if draft_tokens <= 0:
            return
        weight = min(draft_tokens, LOT)
        right = weight * min(max(draft_accepted, 0), draft_tokens) / draft_tokens
        self._open = (self._open[0] + weight, self._open[1] + right)
        if self._open[0] >= LOT:
            self._lots.append(self._open)
            self._open = (0.0, 0.0)
            self._judge(now_s)

    def _judge(self, now_s: float) -> None:
        self._told_s = now_s
        share = self.window
        if share is None or share >= BAD:
            self._below_s = None
        elif self._below_s is None:
            self._below_s = now_s
        if share is not None and share > GOOD:
            self._lots.clear()  # what speaks against it has to come after this
            self._shown = share

    @property
    def window(self) -> float | None:
        """The part that was right of the last :data:`LOTS` lots; None until there are so many."""
        return _share([*self._lots]) if len(self._lots) == LOTS else None

    @property
    def share(self) -> float | None:
        """The part that was right of what is known of late, for people; None where nothing is."""
        return self._shown if self._shown is not None and not self._lots else _share([*self._lots, self._open])

    @property
    def is_bad(self) -> bool:
        """Whether it has been below :data:`BAD` for long enough."""
        return self._below_s is not None and self._told_s - self._below_s >= LONG_S


def _share(lots: Sequence[tuple[float, float]]) -> float | None:
    tokens = sum(weight for weight, _ in lots)
    return sum(right for _, right in lots) / tokens if tokens else None


class Watch:
    """Where one preset is in its list, and what speaks against it."""

    def __init__(self, methods: Sequence[Speculation]) -> None:
        """``methods`` is the preset's list, of :func:`supervisor.option.methods`."""
        self._methods = tuple(methods)
        self._at = 0
        self._since_s = 0.0
        """Since when it has been a later one than the first."""
        self._acceptance = Acceptance()
        self.why: str | None = None
        """Why it isn't the first one."""
        self.obstacle: str | None = None
        """Why it could not be changed, the last time."""

    def __repr__(self) -> str:
        return f"<Watch {self.method} of {', '.join(self._methods)}, {self._acceptance!r}>"

    @property
    def method(self) -> Speculation:
        """The one that is to run."""
        return self._methods[self._at]

    @property
    def acceptance(self) -> float | None:
        """The part of its guesses that was right of late; None where none are known."""
        return self._acceptance.share

    def learn(self, now_s: float, draft_tokens: int, draft_accepted: int) -> None:
        """A request has ended for which :attr:`method` guessed so many tokens, of which so many were right."""
        self._acceptance.learn(now_s, draft_tokens, draft_accepted)

    @property
    def due_s(self) -> float:
        """When :meth:`verdict` ceases to be STAY if nothing more is learnt: -inf is now, inf is never."""
        if self._acceptance.is_bad and self.method != OFF:
            return -float("inf")
        return self._since_s + AGAIN_S if self._at else float("inf")

    def verdict(self, now_s: float) -> Verdict:
        """What is to become of :attr:`method`, at an idle moment."""
        if self._at and now_s - self._since_s >= AGAIN_S:
            return Verdict.FIRST
        return Verdict.NEXT if self._acceptance.is_bad and self.method != OFF else Verdict.STAY

    def candidates(self, now_s: float) -> tuple[Speculation, ...]:
        """What it is to be changed to: the first of these that can run. None where it stays."""
        verdict = self.verdict(now_s)
        if verdict is Verdict.STAY:
            return ()
        return self._methods[:1] if verdict is Verdict.FIRST else self._methods[self._at + 1 :]

    def take(self, method: Speculation, now_s: float) -> str:
        """It is this one of the list from now on. Returns why, for people."""
        if method == self._methods[0]:
            told = f"it is {duration(now_s - self._since_s)} since {method} was given up" if self._at else "it is asked for anew"
            self.why = None
        else:
            told = self.why = f"{self.acceptance or 0.0:.0%} of what {self.method} guessed was right"
        self._at, self._since_s = self._methods.index(method), now_s
        self._acceptance, self.obstacle = Acceptance(), None
        return told

    def stay(self, obstacle: str, now_s: float) -> bool:
        """It can't be changed: what speaks against it has to come anew. Returns whether this obstacle is new."""
        is_new, self.obstacle = obstacle != self.obstacle, obstacle
        self._acceptance, self._since_s = Acceptance(), now_s
        return is_new


def price(before: Plan, after: Plan) -> str:
    """What ``after`` gives up that ``before`` has, beside its way to guess, in words; empty where nothing."""
    names = {name for step in after.steps for name in step.changes} - {"speculative", "draft_model"}
    return str(Rung(lessening(before.asked, {name: getattr(after.asked, name) for name in sorted(names)})))  # type: ignore[arg-type]
