"""What the ledger and the meter promise, beside what was seen: ``python -m bench.proof.metering``, or ``make bench-metering``.

It starts its own llmctl in a folder of its own, at loopback, with the fake engine (``tests/fakes``).

- **account** (``bench/proof/metering_account.py``): requests of every API, of which a fifth are left by their clients and a twentieth are
  cut, while the engine dies now and then. Each has one record, every figure of which is the engine's own; the sums are, too.
- **kill**: ``kill -9`` of llmctl at any moment under such traffic. Every request whose client had read the last byte 250 ms before has its
  record, whole; after the next start none is open, and none has two.
- **disk**: the kernel refuses llmctl every write, as a full disk does, while requests are answered. They are, and when there is room again
  no record is missing. Then so many that no more are kept in memory: what is lost is counted, to the last one.
- **cost**: in this process, on the loop's thread, what the meter takes for a chunk that the real engine sent (tests/data), and what the
  ledger, the meter and the ids take for a request; over many rounds, in turns with the same loop without them. CPU time of the thread:
  so the ledger's own thread, whose share is told beside, isn't in it.
- **usage**: the command over a million records, as a process from its start to its end.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import os
import random
import resource
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import uvloop

from bench.proof import metering_account as mixture
from bench.proof.house import House
from bench.proof.metering_account import Request
from bench.proof.promises import Result
from bench.proof.visit import Answer, chat, visit
from supervisor import accounts, gate, logs, record, render, reply, schema
from supervisor.ledger import PENDING_LIMIT, Ledger
from supervisor.meter import Meter
from supervisor.record import Record
from supervisor.routes import Api
from supervisor.row import Measured, Row
from tests import fakes
from tests.fakes import gguf

SEED: Final = 6
OLD_S: Final = 0.25
"""A finished record that is older is on disk (issue 6)."""
CHUNK_S: Final = 1e-6
REQUEST_S: Final = 60e-6
USAGE_S: Final = 1.0
CLIENTS: Final = 24
"""Of the traffic in which llmctl is killed."""
UP_S: Final = (0.3, 2.0)
"""How long it runs before."""
ROOM_S: Final = 10.0
"""Records that waited in memory are on disk so long after there is room again."""
AFRESH: Final = 200
"""Requests between two turns of the loop, at most as many as come at once."""
RECORDED: Final = Path(__file__).resolve().parents[2] / "tests" / "data" / "assembly"
STREAMS: Final = {
    "reasoning": (Api.CHAT, 1),
    "n": (Api.CHAT, 2),
    "text_n": (Api.TEXT, 2),
    "message": (Api.ANTHROPIC, 1),
    "response": (Api.RESPONSES, 1),
    "native": (Api.NATIVE, 1),
}
"""Recorded streams of the real engine, with their sequences: one of each shape of events."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    requests: int
    deaths: int
    """Of the engine, meanwhile."""
    kills: int
    full: int
    """Requests while the disk is full."""
    flood: int
    """Requests beyond what is kept in memory; 0 leaves it out."""
    rounds: int
    rows: int


FULL = Size(requests=10_000, deaths=20, kills=25, full=500, flood=1_000, rounds=400, rows=1_000_000)
QUICK = Size(requests=1_000, deaths=3, kills=4, full=200, flood=0, rounds=100, rows=100_000)

Measure = Callable[[Path, Size, Result], Awaitable[None]]


# 1. Account.


async def account(folder: Path, size: Size, result: Result) -> None:
    """Every record, and the sums."""
    found = await mixture.run(folder, size.requests, SEED, size.deaths)
    fates = found.fates
    befell = (
        f"{fates['left'] / found.sent:.0%} left, {fates['cut'] / found.sent:.0%} cut, {found.deaths - 2} deaths of the engine"
    )
    values = ((each.name, getattr(found, each.name)) for each in fields(found))
    result.seen["account"] = {name: dict(value) if isinstance(value, Counter) else value for name, value in values}
    columns = ["status", *("requests", *mixture.SUMS)]
    result.tables.append(
        (
            "The engine's own counts, by what the client had",
            columns,
            [[status, *sums.values()] for status, sums in found.sums.items()],
        )
    )
    names = [*found.missing, *found.surplus]
    result.add(
        "account",
        f"{found.sent:,} requests over {len(mixture.PATHS)} routes ({befell}): records",
        "one each",
        f"{found.statuses.total():,}; {len(found.missing)} missing, {len(found.surplus)} too many" + first(names),
        not names,
    )
    result.add(
        "account",
        f"{len(mixture.COMPARED)} fields of each beside the engine's journal ({found.replayed} put to a second engine, {found.unread} that "
        f"a dying engine hadn't read, {found.early} whose client went in the middle)",
        "equal",
        f"{len(found.wrong)} records differ" + first(found.wrong),
        not found.wrong,
    )
    result.add(
        "account",
        f"sums of usage --json by status and preset: requests, {', '.join(mixture.SUMS)}",
        "equal",
        f"{len(found.wrong_sums)} differ" + first(found.wrong_sums),
        not found.wrong_sums,
    )


def first(said: Sequence[str]) -> str:
    """One of them, to look at."""
    return f"; {said[0][:300]}" if said else ""


# 2. Kill.


@dataclass(slots=True)
class Killed:
    """What came of one kill."""

    old: int = 0
    """Requests that had ended long enough before."""
    young: int = 0
    lost: int = 0
    """Of the old ones, those without a whole record."""
    young_lost: int = 0
    open: int = 0
    twice: int = 0
    interrupted: int = 0
    age_s: float = 0.0
    """Of the oldest answer, as its client saw its end, that left no whole record."""


async def kill(folder: Path, size: Size, result: Result) -> None:
    """Kill it at any moment, and see what the next start finds."""
    server = fakes.install(folder / "engine", drafts={"ngram-mod": mixture.DRAFTS})
    house = at_home(folder, server)
    rng = random.Random(SEED)
    found: list[Killed] = []
    try:
        for number in range(size.kills):
            found.append(await _one_kill(house, rng, f"k{number}x"))
    finally:
        house.llmctl("down", "--now")
    result.seen["kill"] = [asdict(each) for each in found]
    old, young = sum(each.old for each in found), sum(each.young for each in found)
    lost, oldest_s = sum(each.lost for each in found), max(each.age_s for each in found)
    result.add(
        "kill",
        f"{len(found)} times kill -9: answers that ended {OLD_S * 1e3:.0f} ms before, by their clients' clocks",
        "none without its whole record",
        f"{lost} of {old:,}; of {young} younger ones {sum(each.young_lost for each in found)}, the oldest {oldest_s * 1e3:.0f} ms",
        not lost and old > 0,
    )
    still, twice = sum(each.open for each in found), sum(each.twice for each in found)
    result.add(
        "kill",
        "after the next start",
        "no record is open, no request has two",
        f"{still} open, {twice} with two; {sum(each.interrupted for each in found)} interrupted",
        not still and not twice,
    )


def at_home(folder: Path, server: Path) -> House:
    """Presets for the mixture."""
    house = House(folder / "home", server)
    slots, context = mixture.SLOTS, mixture.CONTEXT
    model = gguf.minimal(folder / "m.gguf", llama__context_length=context * slots)
    for name, how in zip(mixture.PRESETS, ("off", "ngram"), strict=True):
        house.add(name, model, context=slots * context, slots=slots, cache_ram=0, speculative=how)
    return house


async def _one_kill(house: House, rng: random.Random, prefix: str) -> Killed:
    first, *also = mixture.PRESETS
    words = [word for name in also for word in ("--also", name)]
    told = json.loads(await asyncio.to_thread(house.llmctl, "up", first, *words, "--port", "0", "--detach", "--json"))
    host, _, port = told["address"].removeprefix("http://").rpartition(":")
    pid = owner(house)
    ended: list[tuple[Request, Answer]] = []
    waiting = mixture.requests(rng, prefix)

    async def client() -> None:
        with suppress(OSError):  # nobody listens any more
            for request in waiting:
                ended.append((request, await request.send((host, int(port)))))

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client(), name="client")
        await asyncio.sleep(rng.uniform(*UP_S))
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        had = list(ended)
    # The next start is the next round's; here the file is opened as it opens it.
    Ledger(house.home.ledger).shut()
    found = Killed()
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in accounts.records(house.home.ledger, None):
        found.open += row["status"] == "open"
        if (row["client_id"] or "").startswith(prefix):
            found.interrupted += row["status"] == "interrupted"
            rows.setdefault(row["client_id"], []).append(row)
    found.twice = sum(len(each) > 1 for each in rows.values())
    for request, answer in had:
        if not answer.ok or answer.left:
            continue
        age_s = killed_s - answer.ended_s
        whole = any(row["status"] == "ok" and row["completion_tokens"] is not None for row in rows.get(request.name, []))
        found.old += age_s >= OLD_S
        found.young += age_s < OLD_S
        found.lost += age_s >= OLD_S and not whole
        found.young_lost += age_s < OLD_S and not whole
        if not whole:
            found.age_s = max(found.age_s, age_s)
    return found


def owner(house: House) -> int:
    """The pid of the llmctl that runs there."""
    return int(json.loads((house.home.run / "instance.json").read_text())["process"]["pid"])


# 3. A disk that is full.


async def disk(folder: Path, size: Size, result: Result) -> None:
    """Refuse llmctl every write, and let it write again."""
    house = at_home(folder, fakes.install(folder / "engine", tokens=2))
    with house.up(mixture.PRESETS[0]) as address:
        pid = owner(house)
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        ask = functools.partial(visit, address, "/v1/chat/completions")
        sent = (f"d{number}" for number in itertools.count())

        async def crowd(count: int, body: object) -> int:
            """How many of so many requests were answered whole, a few at a time."""
            left = iter(range(count))
            answered = 0

            async def client() -> None:
                nonlocal answered
                for _ in left:
                    answer = await ask(body, headers={"X-Request-Id": next(sent)})  # type: ignore[arg-type]
                    answered += answer.whole

            await asyncio.gather(*(client() for _ in range(CLIENTS)))
            return answered

        async def rows(count: int) -> int:
            """Records that are closed, once there are so many."""
            until_s = time.monotonic() + ROOM_S
            while True:
                done = closed(house.home.ledger)
                if done >= count or time.monotonic() > until_s:
                    return done
                await asyncio.sleep(0.05)

        body = chat(mixture.PRESETS[0])
        await crowd(10, body)
        before = await rows(10)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, most))
        answered = await crowd(size.full, body)
        await asyncio.sleep(2 * OLD_S)
        meanwhile = closed(house.home.ledger) - before
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))
        room_s = time.monotonic()
        after = await rows(before + size.full) - before
        took_s = time.monotonic() - room_s
        result.seen["disk"] = {"answered": answered, "meanwhile": meanwhile, "after": after, "took_s": took_s}
        result.add(
            "disk",
            f"{size.full} requests while it is full ({meanwhile} records could be written)",
            "all answered; all records when there is room",
            f"{answered} answered, {after} records {took_s:.1f} s later",
            answered == after == size.full and meanwhile < size.full,
        )
        if not size.flood:
            return
        count = PENDING_LIMIT + size.flood
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, most))
        await crowd(count, b"[]")  # refused as it is read: as cheap as a record gets
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))
        kept = await rows(before + size.full + PENDING_LIMIT) - before - size.full
        usage = json.loads(await asyncio.to_thread(house.llmctl, "usage", "--json"))["lost"]
        status = json.loads(await asyncio.to_thread(house.llmctl, "status", "--json"))
        said = [usage, *(value for key, value in flat(status) if "lost" in key)]
        result.seen["disk"] |= {"flood": count, "kept": kept, "lost": said}
        result.add(
            "disk",
            f"{count:,} requests while it is full, and {PENDING_LIMIT:,} are kept in memory",
            f"kept and counted as lost: {count:,}, in usage and in status",
            f"{kept:,} kept, {' and '.join(map(str, said))} said to be lost",
            len(said) > 1 and {kept + each for each in said} == {count},
        )


def closed(file: Path) -> int:
    """Records that have an end."""
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        return int(connection.execute("SELECT count(*) FROM requests WHERE status != 'open'").fetchone()[0])


def flat(value: object, key: str = "") -> Iterable[tuple[str, Any]]:
    """Every leaf of a JSON value, with its key."""
    if isinstance(value, dict):
        for name, inside in value.items():
            yield from flat(inside, name)
    elif isinstance(value, list):
        for inside in value:
            yield from flat(inside, key)
    else:
        yield key, value


# 4. Cost.


async def cost(folder: Path, size: Size, result: Result) -> None:
    """What it takes on the loop's thread."""
    seen = result.seen["cost"] = {}
    ends_s: dict[str, float] = {}
    for name, (api, sequences) in STREAMS.items():
        chunks = pieces(RECORDED / f"{name}.sse")
        texts = [chunk for chunk in chunks if is_text(chunk, api)]
        about = api.value + f", {sequences} sequences" * (sequences > 1)
        make = functools.partial(Meter, api, sequences=sequences)
        seen[f"chunk of {about}"] = each_s = per_chunk(texts, make, size.rounds)
        ends_s[about] = per_chunk(chunks, make, size.rounds) * len(chunks) - each_s * len(texts)
        result.add(
            "cost",
            f"the meter, a chunk of text of {about}, {sum(map(len, texts)) // len(texts)} bytes, 10th percentile of {size.rounds} rounds",
            f"≤ {CHUNK_S * 1e6:.0f} µs" if sequences == 1 else "told only",  # they are few, and looked at one by one
            f"{each_s * 1e6:.2f} µs",
            sequences > 1 or each_s <= CHUNK_S,
        )
    path_s, writer_s = await per_request(folder, (RECORDED / "reasoning.sse").read_bytes(), max(20, size.rounds // 4))
    seen |= {"request": path_s, "ends": ends_s, "writer": writer_s}
    whole_s = path_s + max(ends_s.values())
    result.add(
        "cost",
        "ledger, meter and ids, a request, with the events that begin and end its answer, on the loop's thread",
        f"≤ {REQUEST_S * 1e6:.0f} µs",
        f"{whole_s * 1e6:.1f} µs, {(whole_s - path_s) * 1e6:.1f} of it for those events; beside it, the ledger's own thread takes "
        f"{writer_s * 1e6:.0f} a record",
        whole_s <= REQUEST_S,
    )


def pieces(recorded: Path) -> list[bytes]:
    """A recorded stream's events, as they come: a chunk each."""
    return [event + b"\n\n" for event in recorded.read_bytes().split(b"\n\n") if event]


def is_text(chunk: bytes, api: Api) -> bool:
    """Whether it is one of the many in the middle of an answer."""
    found = Meter(api)
    found.feed(chunk, 1.0)
    return found.events == 1 and not found.read().finish_reason and b'"timings"' not in chunk


def per_chunk(chunks: Sequence[bytes], make: Callable[[], Meter], rounds: int) -> float:
    """Seconds that the meter adds to a chunk, clock and all: the rounds with it less those without."""
    many = -(-500 // len(chunks))
    took: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * rounds):
        metered = number % 2 == 0
        taken_s = 0.0
        for _ in range(many):
            way = make().passing(len, time.monotonic) if metered else bare
            begun_s = time.thread_time()
            for data in chunks:
                way(data)
            taken_s += time.thread_time() - begun_s
        took[metered].append(taken_s / many / len(chunks))
    return undisturbed(took[True]) - undisturbed(took[False])


def undisturbed(took: Sequence[float]) -> float:
    """The tenth percentile: what takes longer was disturbed by something else, and says nothing of the code (timeit's own advice)."""
    return statistics.quantiles(took, n=10)[0]


def bare(data: bytes) -> None:
    """What takes a chunk where there is no meter."""
    len(data)


async def per_request(folder: Path, stream: bytes, rounds: int) -> tuple[float, float]:
    """Seconds a request on the loop's thread, and on the ledger's. What the proxy does for a record, and nothing else of it."""
    loop = asyncio.get_running_loop()
    book = Ledger(folder / "ledger.sqlite")
    book.soon = loop.call_soon
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"x-request-id", b"somebody's-0001")]
    made = record.Run(model="m.gguf", engine="b1", context=4096, slots=4, speculative="off")
    work: dict[str, Row] = {}

    def one() -> None:
        where = gate.whereabouts("127.0.0.1")
        row = book.open("/v1/chat/completions", client=where, client_id=gate.request_id(headers))
        logs.request.set(row.id)
        meter = Meter(Api.CHAT)
        row.preset, row.stream, row.batch = "tiny", True, False
        work[row.id] = row
        reply.request_id(row)
        row.ahead = 0
        now_s = time.monotonic()
        row.load_s, row.queue_s = 0.0, time.monotonic() - now_s
        row.attempts += 1
        row.up_s, row.run, row.http_status, row.status = now_s, made, 200, "ok"
        meter.feed(stream, now_s)  # taken off again below: it is counted by the chunk
        work.pop(row.id, None)
        book.close(row, functools.partial(_measured, meter))

    def bare() -> None:
        Meter(Api.CHAT).feed(stream, time.monotonic())

    took: dict[bool, list[float]] = {False: [], True: []}
    cpu_s, main_s = time.process_time(), time.thread_time()
    for number in range(2 * rounds):
        recorded = number % 2 == 0
        way = one if recorded else bare
        begun_s = time.thread_time()
        for _ in range(AFRESH):
            way()
        await asyncio.sleep(0)  # what the ledger put off is done in this turn
        await asyncio.sleep(0)
        took[recorded].append((time.thread_time() - begun_s) / AFRESH)
        await asyncio.sleep(0.01)
    await asyncio.to_thread(book.shut)
    writer_s = (time.process_time() - cpu_s) - (time.thread_time() - main_s)
    # The Meter itself is in both, so it is added again: making one is part of a request's cost.
    begun_s = time.thread_time()
    for _ in range(AFRESH):
        Meter(Api.CHAT)
    meter_s = (time.thread_time() - begun_s) / AFRESH
    return undisturbed(took[True]) - undisturbed(took[False]) + meter_s, writer_s / (rounds * AFRESH)


def _measured(meter: Meter) -> Measured:
    return Measured(meter.read())


# 5. Usage.

COMMANDS: Final = (
    ("usage",),
    ("usage", "--by", "day", "--by", "key", "--by", "preset", "--by", "model", "--json"),
    ("usage", "--since", "7d", "--status", "ok"),
    ("usage", "--records"),
    ("usage", "--records", "--preset", "preset3", "--since", "7d"),
)


async def usage(folder: Path, size: Size, result: Result) -> None:
    """The command over many records."""
    house = House(folder / "home", Path("/bin/false"))
    house.home.ledger.parent.mkdir(parents=True)
    begun_s = time.monotonic()
    fill(house.home.ledger, size.rows)
    result.seen["usage"] = {"rows": size.rows, "filled_s": time.monotonic() - begun_s, "bytes": house.home.ledger.stat().st_size}
    for words in COMMANDS:
        took_s = []
        for _ in range(5):
            begun_s = time.monotonic()
            await asyncio.to_thread(house.llmctl, *words)
            took_s.append(time.monotonic() - begun_s)
        median_s = statistics.median(took_s)
        result.seen["usage"][" ".join(words)] = took_s
        result.add(
            "usage",
            f"llmctl {' '.join(words)}, over {size.rows:,} records, median of {len(took_s)}",
            f"≤ {USAGE_S:.0f} s",
            f"{median_s:.2f} s",
            median_s <= USAGE_S,
        )


def fill(file: Path, rows: int) -> None:
    """Write a ledger of so many records, of 90 days, five presets and three keys."""
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        schema.prepare(connection, None)
        run = {"model": "m.gguf", "model_sha256": "", "engine": "b1", "context": 4096, "slots": 4, "speculative": "off"}
        names = ", ".join(schema.RUN_FIELDS)
        connection.execute(f"INSERT INTO runs ({names}) VALUES ({', '.join(f':{name}' for name in schema.RUN_FIELDS)})", run)
        begun_at = time.time() - 90 * 86_400
        said = {
            "run": "1",
            "id": "printf('req_%011x%08x', n, n)",
            "opened_at": f"{begun_at} + n * {90 * 86_400 / rows}",
            "closed_at": f"{begun_at} + n * {90 * 86_400 / rows} + 1",
            "key": "CASE n % 4 WHEN 0 THEN NULL ELSE 'key' || n % 4 END",
            "preset": "'preset' || n % 5",
            "route": "'/v1/chat/completions'",
            "client": "'loopback'",
            "status": "CASE WHEN n % 20 = 0 THEN 'cancelled' ELSE 'ok' END",
            "finish_reason": "'stop'",
        }
        for name in schema.FIELDS:
            kind = record.sql_type(Record, name).partition(" ")[0]
            said.setdefault(name, {"TEXT": "NULL", "INTEGER": "n % 1000", "REAL": "n % 1000 / 7.0"}[kind])
        numbers = f"WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {rows})"
        connection.execute("BEGIN")
        connection.execute(f"INSERT INTO requests ({', '.join(said)}) {numbers} SELECT {', '.join(said.values())} FROM numbers")
        connection.execute(schema.SUM_CLOSED)
        connection.execute("COMMIT")


# All of them.

PARTS: Final[dict[str, Measure]] = {"account": account, "kill": kill, "disk": disk, "cost": cost, "usage": usage}


async def run(names: Iterable[str], size: Size, folder: Path) -> Result:
    """Measure these parts."""
    result = Result()
    for name in names:
        render.say(f"{name} …")
        scratch = folder / name
        scratch.mkdir()
        try:
            await PARTS[name](scratch, size, result)
        except (TimeoutError, RuntimeError, OSError, sqlite3.Error, subprocess.TimeoutExpired, ExceptionGroup) as broken:
            result.add(name, "the rest of it", "is measured", f"broke off: {broken!r}", False)  # the others are still worth it
    return result


def main() -> int:
    """Parse, measure, print; 1 where a promise wasn't kept."""
    parser = argparse.ArgumentParser(
        prog="bench.proof.metering", description="What ledger and meter promise, beside what was seen."
    )
    parser.add_argument("--quick", action="store_true", help="fewer of each, for a look")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="this part; may be repeated")
    parser.add_argument("--json", action="store_true", help="print everything that was measured")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    size = QUICK if args.quick else FULL
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="bench-metering-") as folder:
        result = uvloop.run(run(args.only or PARTS, size, Path(folder)))
    return result.show(as_json=args.json, load_average=load_average, size=asdict(size))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
