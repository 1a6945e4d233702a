"""A dialogue that is longer than its context, with its oldest exchanges left out: ``truncate: oldest``. Pure.

A request's body is a list of turns on three routes: chat completions and Anthropic's messages (``messages``), Responses (``input``). The
list is cut where a user speaks, so what goes is whole exchanges: a user's message with everything up to the next one. Hence

(1) system and developer messages stay, wherever they stand, and so does what is no turn at all (``system``, ``instructions``, tools);
(2) the last exchange stays: everything from the last message of the user on;
(3) a tool call and its results go together, or stay together. A message that carries results is no message of the user's
    (Anthropic's have the role ``user``), and where a result comes later than the next of those, there is no cut between;
(4) after the system messages, what remains begins with the user: some templates refuse an assistant that speaks first.

How many exchanges have to go is the engine's to say: its template and tokenizer count. :class:`Search` says what to count next.

Nothing is serialised anew: what goes is cut out of the body's text, and the rest stays as it was written, with its numbers' digits and its
strings' escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Self

from supervisor.routes import Api

_ANSWER: Final = 4
"""Turns are left out for an answer of a quarter of the context at most: few answers take all they may, and what is left out is lost."""
_LISTS: Final[Mapping[Api, str]] = MappingProxyType({Api.CHAT: "messages", Api.ANTHROPIC: "messages", Api.RESPONSES: "input"})
_SYSTEM: Final = ("system", "developer")
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_DECODER: Final = json.JSONDecoder(parse_int=lambda _: None, parse_float=lambda _: None, parse_constant=lambda _: None)
"""Says where a value ends. No number is made: some have more digits than ``int`` takes, and none is looked at."""


def room(context: int, asked: int | None) -> int:
    """The longest prompt, in tokens, that leaves room for an answer in a slot of ``context`` tokens.

    The answer gets what was ``asked`` for (None or -1: unlimited), but no more than a quarter of the context, and at least one token:
    the engine refuses a prompt that fills its slot (tools/server/server-context.cpp:3186).
    """
    most = context // _ANSWER
    answer = most if asked is None or asked < 0 else min(asked, most)
    return context - max(1, answer)


@dataclass(frozen=True, slots=True)
class Turns:
    """The list of turns in a body, and where it may be cut."""

    text: str
    """The body."""
    spans: tuple[tuple[int, int], ...]
    """Of each turn: where its JSON begins in the text, and where it has ended."""
    system: tuple[int, ...]
    """Numbers of the turns that stay in any case."""
    cuts: tuple[int, ...]
    """Number of the turn that what remains begins with, for one group left out, for two …"""

    @classmethod
    def of(cls, api: Api, body: bytes) -> Self | None:
        """The turns of a body that ``ask`` has parsed; None where it has no list of them.

        It is parsed once more, as a whole, and 1 MB takes 14 ms: ask only where the prompt is known to be too long.
        """
        if api not in _LISTS:
            return None
        text = body.decode()
        at = dict(_members(text)).get(_LISTS[api])  # of two equal keys the last counts, for the engine too (ask)
        if at is None or text[at] != "[":
            return None
        found = list(_items(text, at))
        values = [value for value, _, _ in found]
        return cls(
            text,
            spans=tuple((start, end) for _, start, end in found),
            system=tuple(number for number, value in enumerate(values) if _is_system(value)),
            cuts=tuple(_cuts(values)),
        )

    def __repr__(self) -> str:
        return f"<Turns {len(self.spans)} in {len(self.text):,} characters, {self.groups} groups may go>"

    @property
    def groups(self) -> int:
        """How many can be left out: exchanges, and what an assistant said before the first of them."""
        return len(self.cuts)

    def left_out(self, groups: int) -> int:
        """How many turns are missing where so many of the oldest groups are left out."""
        return self.cuts[groups - 1] - len(self._kept(groups)) if groups else 0

    def without(self, groups: int) -> bytes:
        """The body with so many of the oldest groups left out, from 0 (the body as it was) to :attr:`groups`."""
        if not groups:
            return self.text.encode()
        (begin, _), (rest, _) = self.spans[0], self.spans[self.cuts[groups - 1]]
        kept = (self.text[slice(*self.spans[number])] + "," for number in self._kept(groups))
        return "".join((self.text[:begin], *kept, self.text[rest:])).encode()

    def _kept(self, groups: int) -> Sequence[int]:
        """The system's turns before the cut."""
        return [number for number in self.system if number < self.cuts[groups - 1]]


@dataclass(slots=True)
class Search:
    """Finds the fewest groups to leave out, by bisection, since every count is a request to the engine.

    ::

        search = Search(turns.groups, room)
        while (groups := search.next) is not None:
            search.tell(await count(turns.without(groups)))
        groups = search.found

    It is known before that the whole is too long. Of n groups, at most ⌈log₂(n + 1)⌉ counts are made.
    """

    groups: int
    room: int
    """Tokens: see :func:`room`."""
    _short: int = field(init=False)
    """The fewest that were seen to be enough; one more than there are, as long as none were."""
    _long: int = field(init=False, default=0)
    """The most that were seen not to be."""

    def __post_init__(self) -> None:
        self._short = self.groups + 1

    @property
    def next(self) -> int | None:
        """With how many left out the prompt has to be counted now; None at the end."""
        return (self._long + self._short) // 2 if self._short - self._long > 1 else None

    def tell(self, tokens: int) -> None:
        """Take the count that :attr:`next` asked for."""
        asked = self.next
        assert asked is not None
        if tokens <= self.room:
            self._short = asked
        else:
            self._long = asked

    @property
    def found(self) -> int | None:
        """The fewest groups whose absence is enough; None where the last exchange alone is too long."""
        assert self.next is None
        return self._short if self._short <= self.groups else None


def _space(text: str, at: int) -> int:
    """Where the next token begins."""
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _members(text: str) -> Iterator[tuple[str, int]]:
    """Each key of the object that the text is, and where its value begins."""
    at = _space(text, 0) + 1
    while text[at := _space(text, at)] != "}":
        key, at = _DECODER.raw_decode(text, at)
        start = _space(text, _space(text, at) + 1)
        yield key, start
        _, at = _DECODER.raw_decode(text, start)
        at = _comma(text, at)


def _items(text: str, at: int) -> Iterator[tuple[object, int, int]]:
    """Each value of the list that begins there, where it begins and where it has ended."""
    at += 1
    while text[at := _space(text, at)] != "]":
        value, end = _DECODER.raw_decode(text, at)
        yield value, at, end
        at = _comma(text, end)


def _comma(text: str, at: int) -> int:
    """Behind the comma, if there is one."""
    at = _space(text, at)
    return at + (text[at] == ",")


def _cuts(turns: Sequence[object]) -> Iterator[int]:
    """Where what remains may begin: with a message of the user's, which isn't the first turn, and doesn't part a result from its call."""
    until = _held(turns)
    spoken = False
    reach = 0
    for number, turn in enumerate(turns):
        if spoken and reach < number and _is_users(turn):
            yield number
        spoken = spoken or not _is_system(turn)
        reach = max(reach, until.get(number, 0))


def _held(turns: Sequence[object]) -> Mapping[int, int]:
    """Number of a turn with a tool call → number of the last turn with a result of it."""
    called: dict[str | None, int] = {}
    until: dict[int, int] = {}
    for number, turn in enumerate(turns):
        for call in _results(turn):
            if call in called:
                until[called[call]] = number
        for call in _calls(turn):
            called[call] = called[None] = number  # a result that names no call is of the last
    return until


def _is_system(turn: object) -> bool:
    return isinstance(turn, dict) and turn.get("role") in _SYSTEM


def _is_users(turn: object) -> bool:
    """Whether an exchange begins with it."""
    return isinstance(turn, dict) and turn.get("role") == "user" and not any(True for _ in _results(turn))


def _calls(turn: object) -> Iterator[str | None]:
    """The ids of the tool calls in a turn, in whichever of the three shapes; None for one without."""
    if not isinstance(turn, dict):
        return
    if isinstance(calls := turn.get("tool_calls"), list):
        yield from (_id(call, "id") for call in calls)
    if turn.get("function_call"):  # what tool_calls was before
        yield None
    yield from (_id(block, "id") for block in _blocks(turn, "tool_use"))
    if _type(turn).endswith("_call"):
        yield _id(turn, "call_id")


def _results(turn: object) -> Iterator[str | None]:
    """The ids of the calls whose results a turn brings, likewise."""
    if not isinstance(turn, dict):
        return
    if turn.get("role") in ("tool", "function"):
        yield _id(turn, "tool_call_id")
    yield from (_id(block, "tool_use_id") for block in _blocks(turn, "tool_result"))
    if _type(turn).endswith("_call_output"):
        yield _id(turn, "call_id")


def _blocks(turn: Mapping[str, object], kind: str) -> Iterator[object]:
    """Anthropic's blocks of a kind."""
    content = turn.get("content")
    yield from (block for block in (content if isinstance(content, list) else ()) if _type(block) == kind)


def _type(value: object) -> str:
    found = value.get("type") if isinstance(value, dict) else None
    return found if isinstance(found, str) else ""


def _id(value: object, key: str) -> str | None:
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, str) else None
