"""Requests of every kind over every route, many at a time: whether each has exactly one record, and that of what befell it.

A case says what a client sends, which HTTP status it may get, and what its record must then say. What is compared is the number of
records of each kind (preset, route, streamed or not, status) with the number of requests that should have left one. The routes are
those of ``supervisor.routes``: a new one without a body here breaks the run.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple

from bench.proof.house import House
from bench.proof.visit import Address, Answer, visit
from supervisor import accounts
from supervisor.routes import ROUTES, Api, Route
from tests import fakes
from tests.fakes import gguf

AT_ONCE: Final = 32
CONTEXT: Final = 1024
"""Tokens of a slot. The fake counts a word as one."""
CLOSED_S: Final = 10.0
"""Within so long after the last answer every record is closed."""

TALK: Final = [{"role": "user", "content": "Hello!"}]
BODIES: Final[Mapping[str, dict[str, object]]] = {
    "/v1/chat/completions": {"messages": TALK},
    "/v1/chat/completions/input_tokens": {"messages": TALK},
    "/v1/completions": {"prompt": "Once upon a time"},
    "/v1/responses": {"input": "Hello!"},
    "/v1/responses/input_tokens": {"input": "Hello!"},
    "/v1/messages": {"messages": TALK, "max_tokens": 16},
    "/v1/messages/count_tokens": {"messages": TALK},
    "/completion": {"prompt": "Once upon a time"},
    "/infill": {"input_prefix": "def ", "input_suffix": "return"},
    "/v1/embeddings": {"input": "Hello!"},
    "/v1/rerank": {"query": "Hello", "documents": ["Hello!", "Bye!"]},
    "/tokenize": {"content": "Hello!"},
    "/detokenize": {"tokens": [1, 2]},
    "/apply-template": {"messages": TALK},
}
"""A valid request of each route, but for its model."""
LONG: Final = "word " * (CONTEXT + 100)
ENDLESS: Final[Mapping[str, object]] = {"tokens": 100_000, "pace_s": 0.01}
"""An answer whose client leaves before it ends."""
BATCH: Final = {"X-Request-Class": "batch"}


class Kind(NamedTuple):
    """What a record says, as far as it is compared."""

    preset: str
    route: str
    stream: bool
    status: str


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of request."""

    about: str
    route: str
    body: bytes
    expected: Mapping[int, str]
    """The record's status by HTTP's."""
    preset: str = ""
    """Whose the record is; none for a request that was refused before it had one."""
    stream: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    leave_after: int | None = None

    def kind(self, answer: Answer) -> Kind | None:
        """The record that it must have left; None for an answer that it mustn't have got."""
        if self.leave_after is not None:
            return None if answer.whole else Kind(self.preset, self.route, self.stream, "cancelled")
        status = self.expected.get(answer.status)
        failed_late = answer.status == 200 and status in ("error", "truncated")
        if status is None or answer.whole is failed_late:
            return None
        return Kind(self.preset, self.route, self.stream, status)


def cases() -> Iterator[Case]:
    """Every kind of request on every route."""
    for path, route in ROUTES.items():
        name = {"embedding": "embed", "rerank": "rank"}.get(route.kind or "", "chat")
        body: dict[str, object] = {"model": name, **BODIES[path]}
        valid = Case("valid", path, json.dumps(body).encode(), {200: "ok"}, name)
        yield valid
        yield replace(valid, about="batch", headers=BATCH)
        yield replace(valid, about="with a key", headers={"Authorization": "Bearer somebody"})
        early = replace(valid, expected={400: "refused"}, preset="")
        yield replace(early, about="invalid JSON", body=b'{"model": "chat", ')
        yield replace(early, about="no object", body=b"[]")
        yield replace(early, about="unknown class", preset=name, headers={"X-Request-Class": "urgent"})
        yield replace(early, about="unknown model", body=_json(body, model="nobody"), expected={404: "refused"})
        if route.kind is not None:
            yield replace(early, about="another kind", body=_json(body, model="embed" if name == "chat" else "chat"))
        if route.count:
            yield replace(valid, about="too long", body=_json(body, **_long(route)), expected={400: "refused"})
        if route.api is not Api.WHOLE:
            yield from _answers(valid, body)


def _answers(valid: Case, body: dict[str, object]) -> Iterator[Case]:
    """Of a route whose answers can be streamed."""

    def streamed(about: str, http: int, status: str, **fake: object) -> Case:
        sent = _json(body, stream=True, fake=fake)
        return replace(valid, about=about, body=sent, stream=True, expected={http: status})

    def unstreamed(about: str, http: int, status: str, **fake: object) -> Case:
        return replace(valid, about=f"{about}, unstreamed", body=_json(body, fake=fake), expected={http: status})

    yield streamed("streamed", 200, "ok")
    yield replace(streamed("streamed, batch", 200, "ok"), headers=BATCH)
    yield replace(streamed("left in mid-stream", 0, "cancelled", **ENDLESS), leave_after=3)
    yield replace(streamed("left before the first event", 0, "cancelled", prefill_s=10.0), leave_after=0)
    yield replace(unstreamed("left", 0, "cancelled", **ENDLESS), leave_after=0)
    yield streamed("an error of the engine", 500, "error", error_status=500)
    yield unstreamed("an error of the engine", 500, "error", error_status=500)
    yield streamed("an error in mid-stream", 200, "error", error_after_tokens=3)
    yield unstreamed("an error in mid-stream", 500, "error", error_after_tokens=3)
    yield streamed("cut in mid-stream", 200, "truncated", cut_after_tokens=3)
    yield unstreamed("cut in mid-stream", 502, "error", cut_after_tokens=3)
    crowded = _json(body, model="narrow", fake={"pace_s": 0.01})
    for _ in range(3):
        yield replace(valid, about="at a full queue", preset="narrow", body=crowded, expected={200: "ok", 429: "refused"})


def _json(body: Mapping[str, object], **fields: object) -> bytes:
    return json.dumps({**body, **fields}).encode()


def _long(route: Route) -> dict[str, object]:
    """A prompt that is longer than a slot."""
    if route.api in (Api.CHAT, Api.ANTHROPIC):
        return {"messages": [{"role": "user", "content": LONG}]}
    return {"input" if route.api is Api.RESPONSES else "prompt": LONG}


@dataclass(slots=True)
class Outcome:
    """What came of all requests."""

    sent: Counter[str] = field(default_factory=Counter)
    """By case."""
    due: Counter[Kind] = field(default_factory=Counter)
    """Records that there must be."""
    seen: Counter[Kind] = field(default_factory=Counter)
    """Records that there are."""
    unexpected: list[str] = field(default_factory=list)
    """Answers that a case mustn't get."""

    @property
    def missing(self) -> Counter[Kind]:
        """Records that there are too few of."""
        return self.due - self.seen

    @property
    def surplus(self) -> Counter[Kind]:
        """Records that there are too many of."""
        return self.seen - self.due

    def table(self) -> tuple[list[str], list[list[str | int]]]:
        """Columns and rows: records by route and status."""
        statuses = sorted({kind.status for kind in self.seen})
        rows: list[list[str | int]] = []
        for path in ROUTES:
            counts = [
                sum(count for kind, count in self.seen.items() if (kind.route, kind.status) == (path, each)) for each in statuses
            ]
            rows.append([path, *counts, sum(counts)])
        rows.append(["all", *(sum(int(row[column]) for row in rows) for column in range(1, len(statuses) + 2))])
        return ["route", *statuses, "records"], rows


async def measure(folder: Path, count: int, seed: int) -> Outcome:
    """Send so many requests and compare them with the ledger."""
    server = fakes.install(folder / "engine")
    model = gguf.minimal(folder / "m.gguf")
    house = House(folder / "home", server)
    house.add("chat", model, context=8 * CONTEXT, slots=8, cache_ram=0)
    house.add("narrow", model, context=CONTEXT, slots=1, cache_ram=0, queue=1)
    house.add("embed", model, kind="embedding", pooling="mean", context=8 * CONTEXT, slots=8, cache_ram=0)
    house.add("rank", model, kind="rerank", context=8 * CONTEXT, slots=8, cache_ram=0)
    rows = list(itertools.islice(itertools.cycle(cases()), count))
    random.Random(seed).shuffle(rows)
    outcome = Outcome()
    with house.up("chat", "narrow", "embed", "rank") as address:
        waiting = iter(rows)

        async def client() -> None:
            for case in waiting:
                await _one(address, case, outcome)

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(client())
        outcome.seen = await _closed(house.home.ledger, count)
    return outcome


async def _one(address: Address, case: Case, outcome: Outcome) -> None:
    answer = await visit(address, case.route, case.body, headers=case.headers, leave_after=case.leave_after)
    outcome.sent[f"{case.route}: {case.about}"] += 1
    kind = case.kind(answer)
    if kind is None:
        said = answer.body[-200:].decode(errors="replace")
        outcome.unexpected.append(f"{case.route}: {case.about}: {answer.status}{' whole' * answer.whole}: {said}")
    else:
        outcome.due[kind] += 1


async def _closed(file: Path, count: int) -> Counter[Kind]:
    """What the records say, once there are as many as there were requests and none is open."""
    until = asyncio.get_running_loop().time() + CLOSED_S
    while True:
        found = [Kind(row["preset"], row["route"], row["stream"], row["status"]) for row in accounts.records(file, 2 * count)]
        closed = sum(kind.status != "open" for kind in found)
        if closed == len(found) >= count or asyncio.get_running_loop().time() > until:
            return Counter(found)
        await asyncio.sleep(0.1)
