"""Thousands of requests of every API, and whether each record says of its own what the engine says that it did.

The engine is the fake one (``tests/fakes``): of every completion that it began it writes down what it made for whom, and how that ended.
A request has a name, which is the X-Request-Id of its record and the ``user`` in the engine's journal. So what a record must say follows
from three accounts that know nothing of each other: what was asked for, what the client had in the end, and what the engine did, once or
several times. Every field of every record is compared, and then the sums that ``llmctl usage`` tells.

Those who leave do so where it is known what they had: the engine falls silent after so many tokens, and its client goes when it has read
them. One that didn't ask for events goes a while later. Those that are cut are cut by the engine: it breaks off a connection, or it dies
with all that it has in work.

One thing isn't looked for: a body that passes as the engine made it (``logprobs``) with several choices tells the first one's figures
alone (tests/test_meter.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.proof.house import House
from bench.proof.visit import Address, Answer, visit
from tests import fakes
from tests.fakes import gguf

AT_ONCE: Final = 48
SLOTS: Final = 32
CONTEXT: Final = 512
"""Tokens of a slot. The fake counts a word as one."""
TOKENS: Final = 10
WORDS: Final = 24
"""The longest answer, and the longest prompt."""
PACE_S: Final = 0.004
"""From one token to the next, of half of the requests."""
LEFT, CUT, FAILED, REFUSED = 0.20, 0.05, 0.02, 0.02
"""Parts of the requests."""
SILENT_S: Final = 1.0
"""After this the client of one reply leaves: the engine has said what it was to say long before."""
HEARD_S: Final = 0.3
"""And so long after it was said llmctl has read it, however busy the machine is."""
DYING_S: Final = 0.5
"""So long a process that is ending still takes connections: the kernel does that in its place."""
CLOSED_S: Final = 20.0
"""Within so long after the last answer every record is closed."""
DRAFTS: Final = (4, 3)
"""Guessed a step, and right."""
PRESETS: Final = ("plain", "guessing")

PIECE: Final = {
    "/v1/chat/completions": b'"delta":{"content":"',
    "/v1/responses": b"event: response.output_text.delta\n",
    "/v1/messages": b"event: content_block_delta\n",
}
"""What one token's event has in it and no other event. Of the other APIs every event is one, and nothing comes before."""
TIMED: Final = ("/v1/chat/completions", "/v1/completions", "/completion", "/infill", "/v1/responses")
"""Their streams end in the engine's timings; Anthropic's doesn't, and so tells no drafts."""
SEVERAL: Final = ("/v1/chat/completions", "/v1/completions", "/completion")
PATHS: Final = (*TIMED, "/v1/messages")
COMPARED: Final = (
    *("status", "preset", "route", "stream", "attempts", "wasted_tokens", "prompt_tokens", "cached_tokens", "completion_tokens"),
    *("counted", "draft_tokens", "draft_accepted", "http_status"),
)
SUMS: Final = ("prompt_tokens", "cached_tokens", "completion_tokens", "wasted_tokens", "draft_tokens", "draft_accepted")


@dataclass(frozen=True, slots=True)
class Request:
    """One request, and what is to befall it."""

    name: str
    path: str
    preset: str
    stream: bool
    body: bytes
    sequences: int = 1
    passed: bool = False
    """Its answer can't be put together from events."""
    leave_after: int | None = None
    """Its client goes when it has read so many tokens of all sequences together."""
    fate: str = "ok"
    """What was planned; a death of the engine may come first."""

    async def send(self, address: Address) -> Answer:
        """Send it and take what comes."""
        return await visit(
            address,
            self.path,
            self.body,
            headers={"X-Request-Id": self.name},
            event=PIECE.get(self.path, b"data: "),
            **({} if self.leave_after is None else self._leaving()),
        )

    def _leaving(self) -> dict[str, Any]:
        return {"leave_after": self.leave_after} if self.stream else {"leave_s": SILENT_S}


def requests(rng: random.Random, prefix: str = "r") -> Iterator[Request]:
    """Requests without an end."""
    for number in itertools.count():
        yield _request(rng, f"{prefix}{number:06}")


def _request(rng: random.Random, name: str) -> Request:
    path, preset, stream = rng.choice(PATHS), rng.choice(PRESETS), rng.random() < 0.6
    draw = rng.random()
    if draw < REFUSED:
        bad = rng.choice([b'{"model": "plain", ', b"[]", json.dumps({"model": "nobody", "messages": []}).encode()])
        return Request(name, path, "", False, bad, fate="refused")
    body, sequences = _body(rng, name, path, preset)
    passed = not stream and path in (*SEVERAL, "/infill") and sequences == 1 and rng.random() < 0.2
    if passed:
        body |= {"return_tokens": True} if path in ("/completion", "/infill") else {"logprobs": 1}
    if stream:
        body |= {"stream": True}
        if path in ("/v1/chat/completions", "/v1/completions") and rng.random() < 0.5:
            body |= {"stream_options": {"include_usage": True}}
    tokens = rng.randint(1, TOKENS)
    fake: dict[str, Any] = {"tokens": tokens, "cached": rng.randint(0, WORDS), "pace_s": rng.choice((0.0, PACE_S))}
    length = min(tokens, body.get("max_tokens", tokens))
    after = rng.randint(0, length - 1)
    leave_after, fate = None, "ok"
    if draw < REFUSED + LEFT:
        fate, leave_after = "left", after * sequences
        fake |= {"stall_after_tokens": after} if not passed else {"prefill_s": 30.0}  # its engine says nothing before all is made
    elif draw < REFUSED + LEFT + CUT:
        fate = "cut"
        fake |= {"cut_after_tokens": after} if not passed else {"malformed": True}
    elif draw < REFUSED + LEFT + CUT + FAILED:
        fate = "failed"
        fake |= {"error_status": 500} if passed or rng.random() < 0.3 else {"error_after_tokens": after}
    sent = json.dumps(body | {"fake": fake}).encode()
    return Request(name, path, preset, stream, sent, sequences, passed, leave_after, fate)


def _body(rng: random.Random, name: str, path: str, preset: str) -> tuple[dict[str, Any], int]:
    """What is asked, and of how many sequences."""
    prompts, choices = 1, 1
    body: dict[str, Any] = {"model": preset, "user": name}
    said = " ".join("word" for _ in range(rng.randint(1, WORDS)))
    if path in ("/v1/chat/completions", "/v1/messages"):
        body |= {"messages": [{"role": "user", "content": said}]}
    elif path == "/v1/responses":
        body |= {"input": said}
    elif path == "/infill":
        body |= {"input_prefix": said, "input_suffix": "return"}
    else:
        prompts = rng.choice((1, 1, 2, 3))
        body |= {"prompt": said if prompts == 1 else [f"{said} {each}" for each in "abc"[:prompts]]}
    if path == "/v1/messages" or rng.random() < 0.3:
        body |= {"max_tokens": rng.randint(1, 2 * TOKENS)}
    if path in ("/v1/chat/completions", "/v1/completions") and rng.random() < 0.3:
        choices = body["n"] = rng.choice((2, 3))
    return body, prompts * choices


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one engine did for one request, by its own journal. Tokens of all sequences together."""

    how: str
    """``done``, ``error``, ``cut``, ``malformed``; ``gone``, its client left; ``lost``, the engine ended."""
    prompt: int
    cached: int
    completion: int
    drafted: int
    accepted: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Attempt:
        """From a line of the journal."""
        made = row["made"]
        how = {"client_closed": "gone", "lost": "lost"}.get(row["event"]) or row["how"]
        drafts = made.get("draft_n", 0), made.get("draft_n_accepted", 0)
        return cls(how, made["prompt"], made["cached"], made["completion"], *drafts)


@dataclass(slots=True)
class Journal:
    """Reads on in the fake engines' journal."""

    folder: Path
    attempts: dict[str, list[Attempt]] = field(default_factory=dict)
    """Of each request's name, in order."""
    living: dict[int, str] = field(default_factory=dict)
    """Presets of the engines that have loaded, by pid."""
    deaths_s: list[float] = field(default_factory=list)
    stalled_s: dict[str, float] = field(default_factory=dict)
    """When the engine fell silent, by the request's name; the last time where there were several."""
    _aliases: dict[int, str] = field(default_factory=dict)
    _read: int = 0

    def read(self) -> None:
        """What has come."""
        with (self.folder / fakes.JOURNAL).open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                if b'"event": "request"' not in line:
                    self._take(json.loads(line))

    def _take(self, row: dict[str, Any]) -> None:
        if row["event"] == "start":
            self._aliases[row["pid"]] = row["argv"][row["argv"].index("--alias") + 1]
        elif row["event"] == "loaded":
            self.living[row["pid"]] = self._aliases[row["pid"]]
        elif row["event"] == "exit":
            self.living.pop(row["pid"], None)
            self.deaths_s.append(row["t"])
        elif row["event"] == "stalled":
            self.stalled_s[row["user"]] = row["t"]
        elif row["event"] in ("finished", "client_closed", "lost") and row["user"]:
            self.attempts.setdefault(row["user"], []).append(Attempt.of(row))


def expected(request: Request, answer: Answer, attempts: Sequence[Attempt]) -> dict[str, Any]:
    """What its record must say."""
    last = attempts[-1] if attempts else None
    failed = _said_error(request, answer)
    began = last is not None and last.completion > 0 and request.stream
    """The client has had something of the answer."""
    if request.fate == "refused":
        status = "refused"
    elif answer.left and not (answer.status == 200 and b'"engine_died"' in answer.body):  # else it was told first
        status = "cancelled"
    elif answer.ok:
        status = "ok"
    elif answer.status == 200:
        status = "error" if failed or not began else "truncated"
    else:
        status = "refused" if answer.status in (400, 429, 503) else "error"
    delivers = status in ("ok", "cancelled", "truncated") or (status == "error" and (began or failed))
    lost = attempts[:-1] if delivers else attempts
    figures = _figures(request, last, status) if last is not None and delivers else {}
    undelivered = {"lost", "cut"} if request.stream or request.passed else {"lost", "cut", "error"}
    return {
        "status": status,
        "preset": request.preset,
        "route": request.path,
        "stream": request.stream,
        "attempts": len(attempts),
        "wasted_tokens": sum(each.completion for each in lost if each.how in undelivered) if attempts else None,
        "prompt_tokens": None,
        "cached_tokens": None,
        "completion_tokens": None,
        "counted": False,
        "draft_tokens": None,
        "draft_accepted": None,
        "http_status": answer.status,
    } | figures


def _said_error(request: Request, answer: Answer) -> bool:
    """Whether a stream ended in an event of the engine's own error."""
    return request.fate == "failed" and answer.status == 200 and b"Compute error." in answer.body


def _figures(request: Request, last: Attempt, status: str) -> dict[str, Any]:
    """Of an answer that the client has had, or a part of it."""
    is_whole = status == "ok"
    if request.passed and not is_whole:
        return {}  # nothing of it had come
    knows_prompt = is_whole or (request.path == "/v1/messages" and last.completion > 0)  # its first event says it
    found: dict[str, Any] = {"completion_tokens": last.completion, "counted": not is_whole}
    if knows_prompt:
        found |= {"prompt_tokens": last.prompt, "cached_tokens": last.cached}
    if is_whole and request.path in TIMED and last.drafted:
        found |= {"draft_tokens": last.drafted, "draft_accepted": last.accepted}
    return found


@dataclass(slots=True)
class Account:
    """What came of all requests."""

    sent: int = 0
    fates: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    """Of the records."""
    missing: list[str] = field(default_factory=list)
    surplus: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """A field of a record that isn't so, in words."""
    wrong_sums: list[str] = field(default_factory=list)
    sums: dict[str, dict[str, int]] = field(default_factory=dict)
    """The engine's own, by status."""
    deaths: int = 0
    replayed: int = 0
    unread: int = 0
    """Put to an engine that died before it had read them: its journal knows nothing of them."""
    early: int = 0
    """Whose client had gone before llmctl can have read all that the engine made."""
    seconds: float = 0.0

    @property
    def kept(self) -> bool:
        """Whether all is as it must be."""
        return not (self.missing or self.surplus or self.wrong or self.wrong_sums)


async def run(folder: Path, count: int, seed: int, deaths: int) -> Account:
    """Send so many requests, have the engine die so often meanwhile, and reckon."""
    server = fakes.install(folder / "engine", drafts={"ngram-mod": DRAFTS})
    model = gguf.minimal(folder / "m.gguf", llama__context_length=CONTEXT * SLOTS)
    house = House(folder / "home", server)
    for name, how in zip(PRESETS, ("off", "ngram"), strict=True):
        house.add(name, model, context=SLOTS * CONTEXT, slots=SLOTS, cache_ram=0, speculative=how)
    rng = random.Random(seed)
    journal, answers = Journal(server.parent), dict[str, tuple[Request, Answer]]()
    loop = asyncio.get_running_loop()
    with house.up(*PRESETS) as address:
        begun_s = loop.time()
        waiting = itertools.islice(requests(rng), count)

        async def client() -> None:
            for request in waiting:
                answers[request.name] = request, await request.send(address)

        async def reaper() -> None:
            for number in range(deaths):
                while len(answers) < count * (number + 1) // (deaths + 1):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                journal.read()
                with contextlib.suppress(ProcessLookupError, IndexError):
                    os.kill(rng.choice(list(journal.living)), signal.SIGUSR2)

        async with asyncio.TaskGroup() as group:
            for task in (*(client() for _ in range(AT_ONCE)), reaper()):
                group.create_task(task, name="client")
        account = Account(count, seconds=loop.time() - begun_s)
        rows = await closed(house, count)
        told = {
            status: {
                row["preset"]: row
                for row in json.loads(await asyncio.to_thread(house.llmctl, "usage", "--status", status, "--json"))["rows"]
            }
            for status in sorted({row["status"] for row in rows})
        }
    journal.read()
    _compare_sums(account, _compare(account, answers, journal, rows), told)
    return account


async def closed(house: House, count: int) -> list[dict[str, Any]]:
    """The records, once there are as many as there were requests and none is open; as they are after :data:`CLOSED_S`."""
    until_s = asyncio.get_running_loop().time() + CLOSED_S
    while True:
        said = await asyncio.to_thread(house.llmctl, "usage", "--records", "--json", "--limit", str(10 * count))
        rows = [json.loads(line) for line in said.splitlines()]
        done = sum(row["status"] != "open" for row in rows)
        if done == len(rows) >= count or asyncio.get_running_loop().time() > until_s:
            return rows
        await asyncio.sleep(0.1)


def _compare(
    account: Account, answers: Mapping[str, tuple[Request, Answer]], journal: Journal, rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Each record with what it must say; returns that."""
    all_due: list[dict[str, Any]] = []
    found: dict[str | None, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["client_id"], []).append(row)
        account.statuses[row["status"]] += 1
    account.deaths = len(journal.deaths_s)
    for name, (request, answer) in answers.items():
        account.fates[request.fate] += 1
        mine = found.pop(name, [])
        attempts = journal.attempts.get(name, [])
        due = expected(request, answer, attempts)
        all_due.append(due)
        if len(mine) != 1:
            (account.surplus if mine else account.missing).append(f"{name}: {len(mine)} records")
            continue
        row = mine[0]
        if answer.left and attempts and attempts[-1].how == "lost" and row["completion_tokens"] == 0:
            # Its client went while it waited for the next engine: what the last one made is waste already.
            due["wasted_tokens"] += due["completion_tokens"]
            due |= {"completion_tokens": 0, "prompt_tokens": None, "cached_tokens": None}
        if answer.left and not request.stream and due["completion_tokens"]:
            early = answer.ended_s - journal.stalled_s.get(name, answer.ended_s) < HEARD_S
            if early and 0 <= row["completion_tokens"] < due["completion_tokens"]:
                account.early += 1  # a death held it up: it was still being answered when its client went
                due["completion_tokens"] = row["completion_tokens"]
                if not row["completion_tokens"]:  # nor had the head come, in which a message's prompt is told
                    due |= {"prompt_tokens": None, "cached_tokens": None}
        if due["attempts"] != row["attempts"] and _may_be_unread(answer, journal, row["attempts"] - due["attempts"]):
            account.unread += 1
            due["attempts"] = row["attempts"]
            due["wasted_tokens"] = due["wasted_tokens"] or 0
            if answer.left and not attempts:
                due |= {"completion_tokens": 0, "counted": True}
        if answer.left and not answer.status:
            due["http_status"] = row["http_status"]  # the engine may have begun when its client was about to go
        account.replayed += len(attempts) > 1
        wrong = {each: (due[each], row[each]) for each in COMPARED if due[each] != row[each]}
        if wrong:
            seen = f"client: {answer.status}{' whole' * answer.whole}{' left' * answer.left} {answer.body[-120:]!r}"
            account.wrong.append(
                f"{name}: "
                + ", ".join(f"{each} is {row_has!r}, not {must!r}" for each, (must, row_has) in wrong.items())
                + f"; {request.fate}, {request.path}{' stream' * request.stream}, {seen}; {attempts}; {request.body.decode()}"
            )
    account.surplus += [f"{name}: {len(many)} records of no request" for name, many in found.items()]
    return all_due


def _may_be_unread(answer: Answer, journal: Journal, more: int) -> bool:
    """Whether so many engines can have died with the request unread in their sockets."""
    return 0 < more <= sum(answer.asked_s - DYING_S <= at_s <= answer.ended_s + DYING_S for at_s in journal.deaths_s)


def _compare_sums(
    account: Account, all_due: Sequence[Mapping[str, Any]], told: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> None:
    """What ``usage`` says with the engine's own sums, by status and preset."""
    due: dict[tuple[str, str], Counter[str]] = {}
    for must in all_due:
        sums = due.setdefault((must["status"], must["preset"]), Counter())
        sums["requests"] += 1
        for each in SUMS:
            sums[each] += must[each] or 0
    seen = {(status, preset): row for status, by in told.items() for preset, row in by.items()}
    for what in sorted(due.keys() | seen.keys()):
        for each in ("requests", *SUMS):
            must_be, is_now = due.get(what, Counter())[each], (seen.get(what) or {}).get(each) or 0
            if must_be != is_now:
                account.wrong_sums.append(f"{each} of {what[1] or 'no preset'}, {what[0]}: {is_now:,}, not {must_be:,}")
    for (status, _), sums in due.items():
        mine = account.sums.setdefault(status, dict.fromkeys(("requests", *SUMS), 0))
        for each in mine:
            mine[each] += sums[each]
