"""What clients ask while faults fall, what each of them has in the end, and what its record may then say.

Every request knows its whole answer beforehand: numbers behind its own name. The fake engine is told to say them (``fake``), the real one
is held to them by a grammar. So a hole, a repetition or another client's words show in any answer, whole or cut.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from bench.proof.visit import Address, Answer, visit

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
"""Those who leave in bursts ask here, so that the records of the others can be counted apart."""
PATIENCE_S: Final = 400.0
"""A request without an end by then is stuck. A load that is never healthy and the longest back-off may lie before it."""
AGAIN_S: Final = 0.05
"""After a refusal, before a client's next request."""
NEAR_S: Final = 0.25
"""What a kill of llmctl may cost the ledger: younger rows may be missing, or not closed yet."""
DYING_S: Final = 0.1
"""So long after its kill a process may still take connections: the kernel does that in its place."""
LEAVES: Final = 12
"""One stream of so many is left by its client in the middle."""


class End(Enum):
    """How a request ended for its client."""

    OK = "ok"
    """Whole: every word, once, in order, and the end that HTTP and the API have."""
    TOLD = "told"
    """An error in its API's shape; in a stream an error event, and then a cut connection."""
    CUT = "cut"
    """The connection was lost without a word: only when llmctl itself is killed."""
    LEFT = "left"
    """The client went."""
    LIE = "clean lie"
    """It ended cleanly and lacks something, or says that it failed."""
    GARBLED = "garbled"
    """What came is not the beginning of its answer."""
    MUTE = "mute"
    """An HTTP error without an envelope."""
    STUCK = "stuck"
    """It never ended."""


BAD: Final = (End.LIE, End.GARBLED, End.MUTE, End.STUCK)


@dataclass(frozen=True, slots=True)
class Request:
    """One request, and the answer that it must get."""

    name: str
    stream: bool
    words: int
    pace_s: float
    route: str = CHAT
    leave_after: int | None = None
    """Its client goes after so many events."""
    leave_s: float | None = None
    """Its client goes after so many seconds."""
    fake: Mapping[str, object] = field(default_factory=dict)
    """What else the fake engine is to do."""

    @property
    def answer(self) -> str:
        """Its whole text."""
        return " ".join((self.name, *map(str, range(self.words - 1))))

    def body(self, model: str) -> dict[str, object]:
        """What is sent."""
        asked = {"messages": [{"role": "user", "content": self.name}]} if self.route == CHAT else {"prompt": self.name}
        fake = {"text": self.answer, "tokens": self.words, "pace_s": self.pace_s, **self.fake}
        grammar = f'root ::= "{self.answer}"'
        return {"model": model, "stream": self.stream, "user": self.name, "grammar": grammar, "fake": fake, **asked}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a client has of its request."""

    request: Request
    end: End
    asked_s: float
    ended_s: float
    status: int = 0
    code: str = ""
    said: str = ""
    """As much of the text as came."""

    @property
    def silent(self) -> bool:
        """Nothing of the answer had come, so it could have been put to the engine again."""
        return not self.said

    def statuses(self, kills_s: Iterable[float]) -> frozenset[str]:
        """What its record may say; the empty word stands for none. ``kills_s`` are llmctl's own deaths."""
        refused = self.status in (400, 429, 503)
        found = {
            End.OK: {"ok"},
            End.TOLD: {"refused" if refused else "error"}
            if self.status != 200
            else {"error", "truncated", "refused", "interrupted"},
            End.LEFT: {"cancelled", "ok", "error", "truncated", "refused"},
            End.CUT: {"cancelled"},
        }.get(self.end, {"ok", "error", "truncated", "interrupted", "refused"})
        if self.end is End.LEFT and not self.status:
            found.add("")  # it may have gone before anybody read it
        for kill_s in kills_s:
            if self.asked_s - DYING_S <= kill_s <= self.ended_s + NEAR_S:
                found |= {"interrupted"} | ({"ok", "error", "truncated", "refused"} if self.end is End.CUT else set())
                if kill_s - self.asked_s <= NEAR_S:
                    found.add("")
        return frozenset(found)


def judge(request: Request, answer: Answer) -> Outcome:
    """What the client has."""
    said, code, ended = _streamed(answer.body) if request.stream else _whole(answer.body)
    if request.route == CHAT or request.stream:
        said = said.strip()
    wrong = not request.answer.startswith(said)
    left = not answer.whole and not code and (request.leave_after is not None or request.leave_s is not None)
    end = End.GARBLED if wrong else End.LEFT if left else _end(request, answer, said, code, ended=ended)
    return Outcome(request, end, answer.asked_s, answer.ended_s, answer.status, code, said)


def _end(request: Request, answer: Answer, said: str, code: str, *, ended: bool) -> End:
    if answer.status not in (0, 200):
        return End.TOLD if code and answer.whole else End.MUTE
    if code:
        return End.LIE if answer.whole else End.TOLD
    if not answer.whole:
        return End.CUT
    return End.OK if said == request.answer and ended else End.LIE


def _streamed(body: bytes) -> tuple[str, str, bool]:
    """The text, the code of an error, and whether it has its API's end. A last event that was cut off counts for nothing."""
    said, code, ended = "", "", False
    if body[:1] == b"{":
        return _whole(body)
    *events, _ = body.split(b"\n\n")
    for event in events:
        payload = event.removeprefix(b"data: ")
        if payload == b"[DONE]":
            ended = True
        elif payload[:1] == b"{":
            found = json.loads(payload)
            code = code or _code(found)
            said += "".join(_text(choice) for choice in found.get("choices", []))
    return said, code, ended


def _whole(body: bytes) -> tuple[str, str, bool]:
    try:
        found = json.loads(body)
    except ValueError:
        return "", "", False
    return "".join(_text(choice) for choice in found.get("choices", [])), _code(found), True


def _text(choice: Mapping[str, Any]) -> str:
    said = choice.get("delta") or choice.get("message") or {}
    return str(choice.get("text") or said.get("content") or "")


def _code(found: Mapping[str, Any]) -> str:
    return str(found["error"].get("code") or found["error"].get("type") or "?") if "error" in found else ""


def unmatched(due: Sequence[frozenset[str]], seen: Counter[str]) -> list[str]:
    """Where requests and records can't be brought together one to one, in words; by Hall's theorem, over every set of statuses.

    ``due`` has for each request what its record may say, the empty word where there may be none.
    """
    kinds = Counter(due)
    statuses = sorted({status for each in kinds for status in each if status} | set(seen))
    found = []
    for size in range(1, len(statuses) + 1):
        for some in map(frozenset, itertools.combinations(statuses, size)):
            records = sum(seen[status] for status in some)
            least = sum(count for each, count in kinds.items() if each <= some)
            most = sum(count for each, count in kinds.items() if each & some)
            if records < least:
                found.append(f"{records} records say {' or '.join(sorted(some))}, and {least} requests must have one")
            if records > most:
                found.append(f"{records} records say {' or '.join(sorted(some))}, and only {most} requests may have one")
    return found


class Traffic:
    """Clients that ask without end while :attr:`open` is set, half of them for streams."""

    def __init__(
        self,
        model: str,
        address: Callable[[], Address | None],
        rng: random.Random,
        prefix: str,
        pace_s: float,
        words: tuple[int, int],
    ) -> None:
        self.model, self.address, self.rng, self.prefix, self.pace_s, self.words = model, address, rng, prefix, pace_s, words
        self.outcomes: list[Outcome] = []
        self.open = asyncio.Event()
        self.flying = {True: 0, False: 0}
        """Requests under way, streams and others."""
        self.sent = 0

    def new(self, *, stream: bool, **more: Any) -> Request:  # noqa: ANN401
        """A request of its own name."""
        self.sent += 1
        return Request(f"{self.prefix}x{self.sent}", stream, self.rng.randint(*self.words), self.pace_s, **more)

    async def client(self, *, stream: bool) -> None:
        """Ask, one after another, for ever."""
        while True:
            await self.open.wait()
            leaves = stream and self.rng.random() * LEAVES < 1
            request = self.new(stream=stream, leave_after=self.rng.randint(2, 6) if leaves else None)
            outcome = await self.send(request)
            if outcome is None or outcome.end is not End.OK:
                await asyncio.sleep(AGAIN_S)

    async def send(self, request: Request) -> Outcome | None:
        """Send one and note what came of it; None where nobody listened, so that nothing was sent."""
        address = self.address()
        if address is None:
            return None
        begun_s = time.monotonic()
        self.flying[request.stream] += 1
        try:
            answer = await visit(
                address,
                request.route,
                request.body(self.model),
                leave_after=request.leave_after,
                leave_s=request.leave_s,
                longest_s=PATIENCE_S,
            )
            outcome = judge(request, answer)
        except TimeoutError:
            outcome = Outcome(request, End.STUCK, begun_s, time.monotonic())
        except OSError:
            return None
        finally:
            self.flying[request.stream] -= 1
        self.outcomes.append(outcome)
        return outcome

    async def burst(self, count: int, longest_s: float) -> None:
        """So many clients at once, each of which goes at a moment of its own."""
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                leave_s = self.rng.random() ** 2 * longest_s
                group.create_task(self.send(self.new(stream=self.rng.random() < 0.5, route=TEXT, leave_s=leave_s)))

    def count(self) -> Counter[End]:
        """Outcomes by kind."""
        return Counter(outcome.end for outcome in self.outcomes)
