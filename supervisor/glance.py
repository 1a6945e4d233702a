"""One look at a running llmctl: what ``/llmctl/top`` answers, read, and what two answers say together. Pure.

The answer has counters that only go on; a rate is what a counter went on by, over the time between the two looks by llmctl's own clock. A
counter that went back is another one, and says nothing until the look after. Tokens of answers are counted as they are made, those of
prompts when their requests end, so that their rate comes in jumps. :class:`History` keeps a minute of a rate, for a picture and a mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, Self

from supervisor.units import duration

ON_CPU: Final = "CPU"
"""What a plan that has no card calls its device (``budget.make``)."""
SPAN_S: Final = 60.0
"""How much a picture shows."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens since llmctl started, or per second."""

    prompt: float
    completion: float


@dataclass(frozen=True, slots=True)
class Preset:
    """One preset."""

    name: str
    state: str
    """Of :class:`~supervisor.lifecycle.State`."""
    told: str
    """The same with what comes of it."""
    busy: int
    slots: int
    waiting: int
    restarts: int
    has_card: bool
    card_mib: int | None
    host_mib: int | None
    """Its own; the file of the model, which it shares with the page cache, is only in the plan."""
    planned_mib: int | None
    """Of the card, or of the machine where it has none."""
    problem: str | None
    """Why it is down, and what to try."""
    tokens: Tokens

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Self:
        """From what ``/llmctl/status`` has of a preset, and ``tokens``."""
        memory, lives = said["memory"], said["pid"] is not None
        has_card = memory is not None and has_a_card(memory)
        return cls(
            name=said["name"],
            state=said["state"],
            told=_told(said),
            busy=said["slots"]["busy"],
            slots=said["slots"]["total"],
            waiting=said["waiting"],
            restarts=said["restarts"],
            has_card=has_card,
            card_mib=said["used_mib"]["card"] if lives and has_card else None,
            host_mib=said["used_mib"]["host"] if lives else None,
            planned_mib=planned_mib(memory) if lives and memory is not None else None,
            problem=_problem(said) if not lives else None,
            tokens=Tokens(said["tokens"]["prompt"], said["tokens"]["completion"]),
        )


def _told(said: Mapping[str, Any]) -> str:
    parts = [str(said["state"])]
    if said["loaded"]:
        parts.append(f"{said['loaded']:.0%} read")
    if said["try_again_s"] is not None:
        parts.append(f"again in {duration(said['try_again_s'])}")
    return ", ".join([*parts, "held"] if said["held"] else parts)


def has_a_card(memory: Mapping[str, Any]) -> bool:
    """Whether what ``/llmctl/status`` has as a preset's ``memory`` is of a card."""
    return bool(memory["device"] != ON_CPU)


def planned_mib(memory: Mapping[str, Any]) -> int:
    """MiB of the plan, in whole: of the card, or of the machine where it has none."""
    planned: Mapping[str, Mapping[str, float]] = memory["planned_mib"]
    return round(sum(planned["device"].values()) + (0 if has_a_card(memory) else sum(planned["host"].values())))


def _problem(said: Mapping[str, Any]) -> str | None:
    if said["cause"] is None:
        return None
    return f"{said['name']} is down: {said['cause']}" + (f" (try: {said['try']})" if said["try"] else "")


@dataclass(frozen=True, slots=True)
class Work:
    """One request that has no end yet."""

    id: str
    preset: str
    route: str
    phase: str
    """``waits``, ``prefill`` or ``decode``."""
    age_s: float
    tokens: int
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Glance:
    """What llmctl said of itself at one moment."""

    at_s: float
    """By the monotonic clock."""
    pid: int
    address: str
    engine: str
    version: str
    power_w: float | None
    """Of the cards."""
    cpu_s: float
    """Of processors that llmctl itself has taken."""
    records_lost: int
    presets: tuple[Preset, ...]
    in_work: tuple[Work, ...]
    """Oldest first."""

    @classmethod
    def read(cls, answer: Mapping[str, Any]) -> Self:
        """From the answer of ``/llmctl/top``."""
        work = (Work(**{name: each[name] for name in Work.__slots__}) for each in answer["in_work"])
        return cls(
            at_s=answer["at_s"],
            pid=answer["pid"],
            address=answer["address"],
            engine=answer["engine"],
            version=answer["version"],
            power_w=answer["power_w"],
            cpu_s=answer["cpu_s"],
            records_lost=answer["records_lost"],
            presets=tuple(Preset.read(each) for each in answer["presets"]),
            in_work=tuple(sorted(work, key=lambda each: -each.age_s)),
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """What two looks say together."""

    over_s: float
    cpu_share: float
    """Of one core, that llmctl itself took."""
    by_preset: Mapping[str, Tokens]
    """Tokens per second, without those whose counters began anew."""

    @property
    def all(self) -> Tokens:
        """Of all presets together."""
        each = self.by_preset.values()
        return Tokens(sum(one.prompt for one in each), sum(one.completion for one in each))

    @classmethod
    def between(cls, before: Glance, now: Glance) -> Self | None:
        """None when both aren't of the same llmctl, or at the same moment. A preset that is new was at 0 before."""
        over_s = now.at_s - before.at_s
        if now.pid != before.pid or over_s <= 0:
            return None
        counted = {preset.name: preset.tokens for preset in before.presets}
        found = {}
        for preset in now.presets:
            was, has = counted.get(preset.name, Tokens(0, 0)), preset.tokens
            if has.prompt >= was.prompt and has.completion >= was.completion:
                found[preset.name] = Tokens((has.prompt - was.prompt) / over_s, (has.completion - was.completion) / over_s)
        return cls(over_s, max(0.0, (now.cpu_s - before.cpu_s) / over_s), found)


@dataclass(slots=True)
class History:
    """The last :data:`SPAN_S` of a rate: what it was, on the mean, from one look to the next."""

    _kept: deque[tuple[float, float, float]] = field(default_factory=deque)
    """Begin, end and rate of each interval, oldest first."""

    def add(self, at_s: float, over_s: float, rate: float) -> None:
        """The rate of the ``over_s`` seconds that ended at ``at_s``, which only grows."""
        self._kept.append((at_s - over_s, at_s, rate))
        while self._kept[0][1] <= at_s - SPAN_S:
            self._kept.popleft()

    @property
    def mean(self) -> float | None:
        """Over what it keeps."""
        return self._mean(-inf, inf)

    def spread(self, width: int) -> Sequence[float | None]:
        """The mean rate in each of ``width`` equal parts of the span that ends with the last look; None where nobody looked."""
        if not self._kept:
            return [None] * width
        step_s = SPAN_S / width
        first_s = self._kept[-1][1] - SPAN_S
        return [self._mean(first_s + at * step_s, first_s + (at + 1) * step_s) for at in range(width)]

    def _mean(self, from_s: float, to_s: float) -> float | None:
        shares = [(min(end, to_s) - max(begin, from_s), rate) for begin, end, rate in self._kept]
        seen = [(share, rate) for share, rate in shares if share > 0]
        total = sum(share for share, _ in seen)
        return sum(share * rate for share, rate in seen) / total if total > 1e-6 else None
