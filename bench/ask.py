"""What is asked for in one repetition: each request's lengths, what it shares with others, and when it is due. Pure, and drawn from a seed.

A prompt is a sequence of pieces. A piece of words is the beginning of an endless text that its seed stands for: two prompts with the same
seed in the same place begin alike, as far as the shorter of the two goes. So whatever shares a prefix is told by equal pieces. A piece of
an answer is what an earlier request of the same repetition was answered.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final, Literal

from bench.workload import Api, Workload

OPEN: Final = 8
"""Where requests come at a rate, there are as many as of so many users."""

Arrivals = Literal["poisson", "constant"]
ARRIVALS: Final[tuple[Arrivals, ...]] = ("poisson", "constant")


@dataclass(frozen=True, slots=True)
class Words:
    """Fresh text."""

    seed: str
    upto: int
    """The position in the prompt, in tokens and with all that a template adds, at which it ends."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an earlier request was answered, as a turn of its own."""

    of: int
    """Its number."""
    tokens: int
    """So much of it."""


Piece = Words | Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request to be sent."""

    number: int
    """In its repetition, from 0 on."""
    prompt: int
    """Tokens of the whole prompt, as the server counts it."""
    answer: int
    """Tokens."""
    pieces: tuple[Piece, ...]
    """The last of them is of words, and ends where the prompt does."""
    instruction: str = ""
    """What the prompt ends with."""
    api: Api = "chat"
    at_s: float | None = None
    """When it is due, from the repetition's beginning; None is as soon as a user is free."""
    leaves_s: float | None = None
    """Its client closes the connection so long after sending it."""
    preset: str = ""
    """The model to ask for; empty is the target's."""
    stream: bool = True
    body: dict[str, object] | None = field(default=None, hash=False)
    """A body that was recorded with its text; then the pieces are none."""
    path: str = ""
    """Where that body goes."""


@dataclass(frozen=True, slots=True)
class Level:
    """How much is asked at once: so many users, each with one request in work, or so many requests a second, whatever is still in work."""

    users: int | None = None
    rate: float | None = None
    """Requests a second."""
    arrivals: Arrivals = "poisson"
    name: str = ""
    """Where neither says it: a replay, a test of llama-bench's."""

    def __str__(self) -> str:
        if self.name:
            return self.name
        if self.users is not None:
            return f"{self.users} user{'s' * (self.users > 1)}"
        return f"{self.rate:g}/s"

    @property
    def key(self) -> tuple[float, float, str, str]:
        """What makes two levels the same."""
        return (self.users or 0, self.rate or 0.0, "" if self.rate is None else self.arrivals, self.name)


def schedule(workload: Workload, level: Level, seed: int, salt: str, repetition: int) -> tuple[Ask, ...]:
    """One repetition's requests, in the order in which they are begun.

    Lengths and arrival times come from the seed alone and are the same in each repetition, so that repetitions differ in what the server
    does and not in what it is asked. Texts are new in each, and in each run by its ``salt``: a server may have seen the last run's.
    Repetition -1 is a warm-up: one request a user.
    """
    draw = random.Random(f"{seed} {workload.work} {level.key}")
    users = level.users or OPEN
    count = workload.requests * users
    at_s = 0.0
    asks = []
    for number in range(count if repetition >= 0 else level.users or 1):
        prompt, answer = (draw.randint(span.least, span.most) for span in (workload.prompt_span, workload.answer_span))
        asks.append(
            Ask(
                number=number,
                prompt=prompt,
                answer=answer,
                pieces=_pieces(workload, f"{salt} {seed} {level} {repetition}", number, prompt),
                instruction=workload.ask[number % len(workload.ask)] if workload.ask else "",
                api=workload.api,
                at_s=None if level.rate is None else at_s,
            )
        )
        if level.rate is not None:
            at_s += draw.expovariate(level.rate) if level.arrivals == "poisson" else 1 / level.rate
    return tuple(asks)


def _pieces(workload: Workload, seed: str, number: int, prompt: int) -> tuple[Words, ...]:
    own = Words(f"{seed} {number}", prompt)
    return (Words(f"{seed} shared", workload.shared), own) if workload.shared else (own,)
