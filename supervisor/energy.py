"""Which request a card's energy went to. Pure: time is an argument, and so is the card's counter.

A counter says what the whole card took since the look before; of a request only the tokens are known. So between two looks:

- What the card took while nothing was in work is *idle*, and nobody's. In an interval that was busy in part, that is the power of the last
  interval that was wholly idle, for the time that was idle; before there was one, nothing is taken for idle.
- The rest is shared by the tokens that each request made in the interval.
- One that began the interval without a token was in its prefill, and may still be: that counts as if it had decoded all the time, at the
  mean pace of those that were past theirs, or where there are none, of those that made a token. Where nobody made one, time in work is the
  measure. A prefill takes rather more than that; how much more depends on the batch, and isn't told.

Everything that was taken is somebody's or idle: the shares add up to what the counter went on by. A counter that is missing, or goes back
(the driver was loaded anew), gives nothing for that interval and starts anew. What another program does on the card is in it too, since the
counter doesn't tell processes apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, inf


@dataclass(frozen=True, slots=True)
class Shares:
    """What was taken since the look before, in joules."""

    by_request: Mapping[str, float] = field(default_factory=dict)
    """Of each that was in work then, also for a part of it, by its id."""
    idle_j: float = 0.0
    watts: Mapping[str, float] = field(default_factory=dict)
    """Mean power of each card that was looked at, by device."""


@dataclass(slots=True)
class _Stay:
    """One request at one card."""

    id: str
    device: str
    entered_s: float
    tokens: int = 0
    """Made until the last look, or until it left."""
    left_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Look:
    """What a card's counter was at."""

    at_s: float
    energy_mj: int
    idle_w: float | None = None
    """Power in the last interval that was wholly idle."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one stay was in an interval."""

    id: str
    begin_s: float
    end_s: float
    made: int
    in_prefill: bool
    """At the interval's beginning."""

    @property
    def time_s(self) -> float:
        """How long it was in work."""
        return self.end_s - self.begin_s


class Sharing:
    """The requests in work, and the counters as they last were. Holds those in work, and those that left since the last look.

    ``device`` is as a preset names it (``CUDA0``); seconds are of any one clock that doesn't go back.
    """

    def __init__(self) -> None:
        self._inside: dict[str, _Stay] = {}
        self._left: list[tuple[_Stay, int]] = []
        """With the tokens that each had made when it left."""
        self._looks: dict[str, _Look] = {}

    def __repr__(self) -> str:
        return f"<Sharing {len(self._inside)} in work, {list(self._looks)}>"

    def enter(self, request: str, device: str, now_s: float) -> None:
        """An engine on this card has it, and it has made nothing there yet. It may come again, when its engine died."""
        if request in self._inside:
            self.leave(request, 0, now_s)
        self._inside[request] = _Stay(request, device, now_s)

    def leave(self, request: str, tokens: int, now_s: float) -> None:
        """It has ended, with so many tokens made; its last share comes with the next look. Nothing for one that isn't in work."""
        stay = self._inside.pop(request, None)
        if stay is not None and stay.device in self._looks:  # else nothing will be shared
            stay.left_s = now_s
            self._left.append((stay, tokens))

    def forget(self, device: str) -> None:
        """Nothing of ours is on this card any more: nobody is in work there, and what it takes from here on isn't ours."""
        self._looks.pop(device, None)
        self._inside = {request: stay for request, stay in self._inside.items() if stay.device != device}
        self._left = [(stay, tokens) for stay, tokens in self._left if stay.device != device]

    def look(self, now_s: float, energy_mj: Mapping[str, int], tokens: Mapping[str, int]) -> Shares:
        """Share what the cards took since the last look.

        ``energy_mj`` are the counters by device at ``now_s``, in millijoules; a card that is missing starts anew when it is back.
        ``tokens`` are what those in work have made so far at their engine; one that is missing has made no more.
        """
        by_request: dict[str, float] = {}
        idle_j, watts = 0.0, {}
        for device in set(self._looks) - set(energy_mj):
            del self._looks[device]
        for device, counter_mj in energy_mj.items():
            before = self._looks.get(device)
            if before is not None and now_s <= before.at_s:
                continue  # no time has passed: what it took is of the next interval
            if before is None or counter_mj < before.energy_mj:
                self._parts(device, now_s, now_s, tokens)  # of an interval that isn't known
                self._looks[device] = _Look(now_s, counter_mj)
                continue
            parts = self._parts(device, before.at_s, now_s, tokens)
            taken_j, passed_s = (counter_mj - before.energy_mj) / 1e3, now_s - before.at_s
            watts[device] = taken_j / passed_s
            busy_s = _covered_s(parts)
            idle_w = before.idle_w if busy_s else watts[device]
            rest_j = taken_j if not busy_s else min(taken_j, (idle_w or 0.0) * max(0.0, passed_s - busy_s))
            self._looks[device] = _Look(now_s, counter_mj, idle_w)
            idle_j += rest_j
            for part, share in zip(parts, _shared(taken_j - rest_j, parts), strict=True):
                by_request[part.id] = by_request.get(part.id, 0.0) + share
        self._left = [(stay, made) for stay, made in self._left if stay.device in self._looks]
        return Shares(by_request, idle_j, watts)

    def _parts(self, device: str, since_s: float, now_s: float, tokens: Mapping[str, int]) -> list[_Part]:
        """What each request at a card was since the look before. Those that left are done with, and the others' tokens are counted on."""
        gone = [(stay, made) for stay, made in self._left if stay.device == device and stay.entered_s < now_s]
        self._left = [(stay, made) for stay, made in self._left if stay.device != device or stay.entered_s >= now_s]
        here = [stay for stay in self._inside.values() if stay.device == device and stay.entered_s < now_s]
        parts = []
        for stay, made in (*gone, *((stay, tokens.get(stay.id, stay.tokens)) for stay in here)):
            begin_s = max(stay.entered_s, since_s)
            end_s = now_s if stay.left_s is None else min(stay.left_s, now_s)
            parts.append(_Part(stay.id, begin_s, max(begin_s, end_s), max(0, made - stay.tokens), in_prefill=not stay.tokens))
            stay.tokens = max(made, stay.tokens)
        return parts


def _covered_s(parts: Iterable[_Part]) -> float:
    """How long at least one was in work."""
    covered_s, until_s = 0.0, -inf
    for part in sorted(parts, key=lambda part: part.begin_s):
        covered_s += max(0.0, part.end_s - max(part.begin_s, until_s))
        until_s = max(until_s, part.end_s)
    return covered_s


def _pace(parts: Iterable[_Part]) -> float:
    """Tokens per second of those that made any, together; 0 if nobody did."""
    made = [(part.made, part.time_s) for part in parts if part.made]
    time_s = fsum(each for _, each in made)
    return sum(each for each, _ in made) / time_s if time_s else 0.0


def _shared(joules: float, parts: Sequence[_Part]) -> Iterator[float]:
    """What each has of them, in their order."""
    pace = _pace(part for part in parts if not part.in_prefill) or _pace(parts) or 1.0
    weights = [max(part.made, pace * part.time_s) if part.in_prefill else float(part.made) for part in parts]
    if not any(weights):  # all have stalled
        weights = [part.time_s for part in parts]
    total = fsum(weights)
    return (joules * weight / total if total else 0.0 for weight in weights)
