"""A trace of the ledger's records: which earlier prompt each began with, and how many tokens that is. Pure.

A record says how far its prompt is the same as the likest of those that had ended before it did (``likeness``), in bytes. That makes a
tree, and as prompts are alike in their beginnings, any two of them are alike as far as the least on the way between them says. So a
request's parent is found although it had not ended when the record was made: the one, of those that came earlier, that it shares most with.

Bytes become tokens by what the server told. What it found in its cache is exact, if it is about as much as was to be found; where it is
less, the cache had lost it, and the bytes are translated: the parent's prompt has so many tokens for so many bytes, the template's head
left aside, which is what a prompt that begins like none finds in the cache. Only prompts are compared; where the parent's is all in a later
one and more is found than that, the rest is of the parent's answer, which a dialogue carries on.

Of several choices (``n``) the ledger has the sums alone: such a request counts as one prompt and one answer, as long as all of them.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Final, NamedTuple

from bench.trace import Shape, Trace
from supervisor.record import Record, columns
from supervisor.routes import ROUTES

NEAR: Final = 0.9
"""Of what was to be found: if the cache had so much, that is how much there was."""
NEARLY: Final = 0.8
"""Of what bytes alone let expect: turns have tokens of the template's between them."""
ANSWERED: Final = frozenset(("ok", "cancelled", "truncated", "interrupted"))
"""Statuses of requests that an engine worked at."""
_NAMES: Final = tuple(columns(Record))
_ANSWERS: Final = "(assistant)"
"""The piece of a prompt that is an answer, as ``likeness`` labels it."""


def record(row: Mapping[str, Any]) -> Record:
    """A record of a row as ``accounts.records`` gives it, which has more."""
    return Record(**{name: row[name] for name in _NAMES})


def trace(
    records: Iterable[Record],
    *,
    since_at: float,
    until_at: float,
    recorded_at: float,
    source: str,
    preset: str = "",
    bodies: Mapping[str, dict[str, Any]] | None = None,
) -> Trace:
    """What was admitted from ``since_at`` until ``until_at``, in seconds since 1970, for the preset, or any.

    ``records`` may be more: those before and after tell what is alike. ``bodies`` are texts by id; with them, only the requests whose
    text there is are kept. Left out, and counted by why: what makes no text, what was never answered, what is still in work.
    """
    known = sorted(records, key=lambda each: each.opened_at)
    left_out: Counter[str] = Counter()
    kept: list[Record] = []
    scales = {name: _Scale.of([each for each in known if each.preset == name]) for name in {each.preset for each in known}}
    for each in known:
        if not since_at <= each.opened_at < until_at or preset not in ("", each.preset):
            continue
        if (route := ROUTES.get(each.route)) is not None and not route.decodes:
            continue  # a tokenizer's
        if why := _unfit(each, scales[each.preset]) or (
            "without its text" if bodies is not None and each.id not in bodies else ""
        ):
            left_out[why] += 1
        else:
            kept.append(each)
    kin = _Kin(known, [each.id for each in kept])
    clients: dict[tuple[str | None, str | None], int] = {}
    shapes: list[Shape] = []
    for number, each in enumerate(kept):
        found = kin.parent(number)
        link = _Link()
        if found is not None:
            link = _link(each, kept[found.number], shapes[found.number].prompt_tokens, found, scales[each.preset])
        shapes.append(
            Shape(
                at_s=round(each.opened_at - since_at, 6),
                preset=each.preset,
                route=each.route,
                stream=each.stream,
                batch=each.batch,
                client=clients.setdefault((each.key, each.client), len(clients)),
                prompt_tokens=scales[each.preset].prompt_tokens(each),
                cached_tokens=each.cached_tokens,
                completion_tokens=each.completion_tokens or 0,
                parent=found.number if found is not None and link.shared else None,
                shared_tokens=link.shared,
                answer_tokens=link.answer,
                leaves_s=round((each.total_ms or 0.0) / 1e3, 6) if each.status == "cancelled" else None,
                status=each.status,
                body=bodies[each.id] if bodies is not None else None,
            )
        )
    return Trace(
        requests=tuple(shapes),
        window_s=round(until_at - since_at, 6),
        recorded_at=recorded_at,
        source=source,
        left_out=dict(left_out),
    )


def _unfit(each: Record, scale: _Scale) -> str:
    """Why a request can't be in a trace, as it is counted."""
    route = ROUTES.get(each.route)
    if route is None or not route.decodes or route.kind != "chat":
        return f"of {each.route}"
    if each.status == "open":
        return "in work still"
    if each.status not in ANSWERED or not each.attempts:
        return "never answered"
    if not scale.prompt_tokens(each):
        return "without tokens"
    return ""


@dataclass(frozen=True, slots=True)
class _Scale:
    """How a preset's bytes become tokens."""

    head: int
    """Tokens of its template before the first text."""
    a_byte: float
    """Tokens a byte."""

    @classmethod
    def of(cls, records: Sequence[Record]) -> _Scale:
        """By those where both are known."""
        heads = [each.cached_tokens for each in records if each.shared_chars == 0 and each.cached_tokens]
        head = int(statistics.median_low(heads)) if heads else 0
        rates = [
            (each.prompt_tokens - head) / each.prompt_chars
            for each in records
            if each.prompt_tokens and each.prompt_chars and each.prompt_tokens > head
        ]
        return cls(head, statistics.median(rates) if rates else 0.0)

    def prompt_tokens(self, each: Record) -> int:
        """Of a request that may have ended before its engine had said; 0 where nothing tells."""
        if each.prompt_tokens:
            return each.prompt_tokens
        return round(self.head + self.a_byte * each.prompt_chars) if each.prompt_chars and self.a_byte else 0


def _part(chars: int, tokens: int, of_chars: int | None, head: int) -> int:
    """Tokens of so many bytes of a prompt; all of it where nobody knows how long it is."""
    return round(head + (tokens - head) * min(1.0, chars / of_chars)) if of_chars and tokens > head else tokens


class _Found(NamedTuple):
    """The likest of earlier requests."""

    number: int
    chars: int
    """That are the same."""


class _Link(NamedTuple):
    """What of a parent is in a prompt, in tokens."""

    shared: int = 0
    answer: int = 0


class _Kin:
    """How far prompts are alike, by the records' tree."""

    def __init__(self, records: Sequence[Record], kept: Sequence[str]) -> None:
        self._kept = kept
        self._numbers = {name: number for number, name in enumerate(kept)}
        self._order = {each.id: number for number, each in enumerate(records)}
        self._near: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for each in records:
            if each.shared_with is not None and each.shared_chars:
                self._near[each.id].append((each.shared_with, each.shared_chars))
                self._near[each.shared_with].append((each.id, each.shared_chars))

    def parent(self, number: int) -> _Found | None:
        """Of those that were admitted before it: the likest, of equals the latest that is found."""
        begin = self._kept[number]
        edge: list[tuple[int, int, str]] = []
        seen = {begin}
        self._reach(edge, begin, None)
        while edge:
            least, _, name = heappop(edge)
            if name in seen:
                continue
            seen.add(name)
            other = self._numbers.get(name)
            if other is not None and other < number:
                return _Found(other, -least)
            self._reach(edge, name, -least)
        return None

    def _reach(self, edge: list[tuple[int, int, str]], name: str, chars: int | None) -> None:
        for other, shared in self._near[name]:
            heappush(edge, (-min(shared, chars if chars is not None else shared), -self._order.get(other, -1), other))


def _link(each: Record, parent: Record, parent_tokens: int, found: _Found, scale: _Scale) -> _Link:
    """What of the parent is in this prompt."""
    own = scale.prompt_tokens(each)
    cached = each.cached_tokens or 0
    if each.dropped_turns or parent.dropped_turns:  # what was compared isn't what the engine had
        return _Link(min(cached, parent_tokens, own))
    whole = found.chars == parent.prompt_chars
    head = cached if 0 < cached < scale.head else scale.head  # it has the template's head if so much was found at all
    within = [(parent_tokens, parent.prompt_chars), (own, each.prompt_chars)]
    shared = min(own, parent_tokens, *(_part(found.chars, tokens, chars, head) for tokens, chars in within if not whole))
    if cached == own - 1 and shared >= cached:  # one token is always computed (tools/server/server-context.cpp:3384)
        return _Link(shared)
    if not whole or own <= parent_tokens:
        near = NEAR if whole else NEARLY
        return _Link(min(cached, parent_tokens, own) if cached >= near * shared else shared)
    # An answer can only be in what was asked after it. Its last token is never in the cache: it is made, and not looked at any more.
    made = max(0, (parent.completion_tokens or 0) - 1)
    carries = parent.closed_at is not None and parent.closed_at <= each.opened_at
    room = min(made, own - shared) if carries else 0
    if cached > shared:
        return _Link(shared, min(cached - shared, room))
    if cached >= NEAR * shared:
        return _Link(cached)
    follows = each.shared_with == parent.id and (each.parted_in or "").endswith(_ANSWERS)
    return _Link(shared, room if follows else 0)
