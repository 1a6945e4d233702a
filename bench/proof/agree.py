"""Whether ``llmctl bench`` and AIPerf see the same: both ask one llmctl for the same, in turns, with texts that it hasn't seen.

AIPerf (NVIDIA's) lives in an environment of its own: ``--aiperf`` names its command, else it is installed into a temporary folder. What is
compared has the same formula on both sides, though not the same name everywhere:

- TTFT: the first event with text − sending, both.
- ITL: AIPerf's is (request latency − TTFT) / (tokens − 1), and its request latency ends with the last event that has text. So it is our
  ITL, not our TPOT, whose end is the answer's.
- latency: for the same reason AIPerf's ``request_latency`` is held against our time to the last event with text. Our E2E goes on to the
  end of the answer, with the events that carry usage and ``[DONE]``.
- tokens/s: tokens of all answers / time, from the first sending to the last text (AIPerf) or to the last answer's end (ours).

Two engines: the fake one, paced, whose times are known, so that it is seen who is right where they differ; and the real one with
``tiny`` on one thread, so that a generator that needs a core takes none from the engine. That one isn't as fast in one run as in the
next: others use the machine, and AIPerf's own processes, which keep about half a core busy while they wait, slow an engine that shares
two cores with them. So each generator is held against what llmctl's ledger has of its own requests, and the two by how far they are from
it; the plain ratio stands beside that, and is no promise. Lengths vary, as with one length all users of a level would be in step, and who
comes a millisecond earlier decided about everybody's wait.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import uvloop

from bench import figures, target
from bench.ask import Ask, Level, schedule
from bench.exchange import Address, Wires
from bench.load import Answers, Load, Writing
from bench.prompts import Writer
from bench.proof import aiperf
from bench.proof.house import House
from bench.proof.promises import Result
from bench.workload import Workload
from supervisor import accounts, engine, paths, preset, render, store
from tests import fakes
from tests.fakes import gguf

WITHIN: Final = 0.05
USERS: Final = (1, 2, 4)
SLOTS: Final = 4
CONTEXT: Final = 1024
"""Tokens of a slot."""
PACE_S: Final = 0.02
PREFILL_S: Final = 0.25
"""Of the paced engine: those of a 4B on a small card, and far above what any generator needs itself."""
BOOKED_S: Final = 10.0
"""Within so long after the last answer the ledger has it."""
SIDES: Final = ("aiperf", "ours")
SPANS: Final = {"paced": ("192-320", "40-72"), "tiny": ("80-144", "24-40")}
"""Tokens of a prompt and of an answer: less on the real engine, since what a shared machine does beside it is evened out by turns, not by
long ones."""


@dataclass(frozen=True, slots=True)
class Said:
    """What is compared, of one run: as a generator says it, or as llmctl's ledger does."""

    ttft_p50_ms: float
    ttft_ms: float
    """Mean, as those below."""
    itl_ms: float
    latency_ms: float
    """To the last event with text."""
    tokens_s: float
    """Of all answers together."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One run of one generator."""

    said: Said
    ledger: Said
    """Of the same requests."""
    cached: float
    """Prompt tokens out of the cache, of a request: a text that was asked before would show here."""
    cpu_s: float
    """Of the generator, from its start to its end."""
    unlike: tuple[str, ...] = ()
    """Where AIPerf's objects aren't as ours."""


WORDS: Final = {
    "ttft_p50_ms": "TTFT p50, ms",
    "ttft_ms": "TTFT mean, ms",
    "itl_ms": "ITL mean, ms",
    "latency_ms": "latency mean, ms",
    "tokens_s": "tokens/s",
}


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine behind llmctl, and what is known of it beforehand."""

    name: str
    url: str
    model: str
    ledger: Path
    is_steady: bool
    """Whether it takes as long each time, whatever else the machine does."""
    fields: Mapping[str, object]
    """For every request's body."""
    truth: Callable[[Sequence[Ask]], Mapping[str, float]]
    """By the names of :class:`Said`, of these requests; at least so much."""


@dataclass(frozen=True, slots=True)
class With:
    """Bodies with more fields."""

    writer: Writing
    fields: Mapping[str, object]

    def body(self, ask: Ask, answers: Answers) -> tuple[str, dict[str, Any]]:
        """Of one request."""
        path, body = self.writer.body(ask, answers)
        return path, {**body, **self.fields}


@dataclass(frozen=True, slots=True)
class Turn:
    """Requests of one turn at one level, those of its warm-up first."""

    level: Level
    warm_up: Sequence[Ask]
    asks: Sequence[Ask]

    @classmethod
    def of(cls, workload: Workload, level: Level, salt: str) -> Turn:
        """Lengths are the same in each turn, texts new by the salt."""
        return cls(level, *(schedule(workload, level, 0, salt, repetition) for repetition in (-1, 0)))


async def ours(subject: Subject, writer: Writing, turn: Turn) -> Seen:
    """By ``llmctl bench``'s generator. Raises RuntimeError where a request failed."""
    began_at, began_s, cpu_s = time.time(), time.perf_counter(), time.process_time()
    wires = Wires(Address.of(subject.url))
    load = Load("llmctl", wires, writer, began_s=began_s)
    try:
        await load.run(turn.warm_up, turn.level, -1)
        samples = await load.run(turn.asks, turn.level, 0)
    finally:
        wires.close()
    if failed := [each for each in samples if not each.ok]:
        raise RuntimeError(f"{len(failed)} of {len(samples)} requests failed, one by: {failed[0].error}")
    cpu_s = time.process_time() - cpu_s
    spreads = figures.of_requests(samples)
    said = Said(
        spreads["time_to_first_token"].p50,
        spreads["time_to_first_token"].avg,
        spreads["inter_token_latency"].avg,
        statistics.fmean(each.last_ms for each in samples if each.last_ms is not None),
        figures.of_repetition(samples, {})["output_token_throughput"],
    )
    return Seen(
        said, booked(subject.ledger, began_at, turn), statistics.fmean(each.cached_tokens or 0 for each in samples), cpu_s
    )


def booked(ledger: Path, since_at: float, turn: Turn) -> Said:
    """What llmctl has of a turn's requests. Raises RuntimeError where that isn't one record of each, ended well."""
    count = len(turn.warm_up) + len(turn.asks)
    until_s = time.monotonic() + BOOKED_S
    while True:
        rows = [row for row in accounts.records(ledger, 2 * count) if row["opened_at"] >= since_at and row["stream"]]
        if len(rows) == count and all(row["status"] == "ok" for row in rows):
            break
        if time.monotonic() > until_s:
            raise RuntimeError(f"{count} requests left the records {[row['status'] for row in rows]}")
        time.sleep(0.1)
    rows = rows[len(turn.warm_up) :]
    lasted_s = max(row["closed_at"] for row in rows) - min(row["opened_at"] for row in rows)
    return Said(
        statistics.median(row["ttft_ms"] for row in rows),
        statistics.fmean(row["ttft_ms"] for row in rows),
        # The first token comes out of the prefill (supervisor.meter).
        statistics.fmean(row["decode_ms"] / (row["completion_tokens"] - 1) for row in rows),
        statistics.fmean(row["total_ms"] for row in rows),
        sum(row["completion_tokens"] for row in rows) / lasted_s,
    )


def aiperfs(command: Path, folder: Path, subject: Subject, writer: Writing, turn: Turn) -> Seen:
    """By AIPerf. Raises RuntimeError where it or a request failed."""
    warm_up, bodies = ([writer.body(ask, {})[1] for ask in asks] for asks in (turn.warm_up, turn.asks))
    began_at = time.time()
    export = aiperf.run(command, folder, subject.url, subject.model, turn.level.users or 1, warm_up, bodies)
    said = Said(
        export.value("time_to_first_token", "p50"),
        export.value("time_to_first_token"),
        export.value("inter_token_latency"),
        export.value("request_latency"),
        export.value("output_token_throughput"),
    )
    ledger = booked(subject.ledger, began_at, turn)
    return Seen(said, ledger, export.value("usage_prompt_cache_read_tokens"), export.cpu_s, export.unlike())


@dataclass(frozen=True, slots=True)
class Pair:
    """One turn: what both said."""

    aiperf: Seen
    ours: Seen

    def plain(self, what: str) -> float:
        """Ours over AIPerf's."""
        return float(getattr(self.ours.said, what) / getattr(self.aiperf.said, what))

    def by_ledger(self, what: str) -> float:
        """The same, each as a multiple of what the ledger has of its own requests."""
        booked = getattr(self.ours.ledger, what) / getattr(self.aiperf.ledger, what)
        return self.plain(what) / float(booked)


async def _writer(subject: Subject, workload: Workload) -> With:
    found = await target.find(subject.url, model=subject.model)
    return With(await Writer.of(found, workload.api, render.say), subject.fields)


def measure(subject: Subject, command: Path, folder: Path, workload: Workload, turns: int, result: Result) -> None:
    """All levels, in turns; who is first changes from one to the next."""
    writer = uvloop.run(_writer(subject, workload))
    levels = [Level(users=users) for users in USERS]
    pairs: dict[Level, list[Pair]] = {level: [] for level in levels}
    salt = secrets.token_hex(4)
    with render.progress() as progress:
        for number in range(turns):
            for at, level in enumerate(levels):
                progress(f"{subject.name}, turns", number * len(levels) + at, turns * len(levels))
                seen: dict[str, Seen] = {}
                for who in ("aiperf", "ours") if number % 2 == 0 else ("ours", "aiperf"):
                    turn = Turn.of(workload, level, f"{salt} {who} {number}")
                    if who == "ours":
                        seen[who] = uvloop.run(ours(subject, writer, turn))
                    else:
                        place = folder / f"{subject.name.replace(' ', '-')}-{number}-{level.users}"
                        seen[who] = aiperfs(command, place, subject, writer, turn)
                pairs[level].append(Pair(**seen))
    found = {line for each in pairs.values() for pair in each for line in pair.aiperf.unlike}
    seen_of = "the same" if not found else "; ".join(sorted(found))
    result.add(subject.name, "AIPerf's metric objects, made by bench.figures of AIPerf's records", "the same", seen_of, not found)
    truths = {level: subject.truth(Turn.of(workload, level, "").asks) for level in levels}
    _report(subject, pairs, truths, result)


def _report(
    subject: Subject, pairs: Mapping[Level, Sequence[Pair]], truths: Mapping[Level, Mapping[str, float]], result: Result
) -> None:
    rows: list[list[str | float | None]] = []
    for level, found in pairs.items():
        for what, words in WORDS.items():
            cells = [
                _median((getattr(getattr(pair, who), by) for pair in found), what) for who in SIDES for by in ("said", "ledger")
            ]
            plain, by_ledger = ([one(pair, what) for pair in found] for one in (Pair.plain, Pair.by_ledger))
            shown = [f"{statistics.median(each):.3f} ({min(each):.3f}–{max(each):.3f})" for each in (plain, by_ledger)]
            rows.append([str(level), words, truths[level].get(what), *cells, *shown])
            ratio = statistics.median(plain if subject.is_steady else by_ledger)
            how = "" if subject.is_steady else ", by the ledger"
            seen, kept = f"{ratio - 1:+.1%}", abs(ratio - 1) <= WITHIN
            if not subject.is_steady:
                seen += f" (plain {statistics.median(plain) - 1:+.0%})"
            result.add(subject.name, f"{words}: ours against AIPerf's{how}, {level}", f"within {WITHIN:.0%}", seen, kept)
        for what, words in (("cached", "cached tokens"), ("cpu_s", "generator's CPU, s")):
            mine = [_median((getattr(pair, who) for pair in found), what) for who in SIDES]
            rows.append([str(level), words, None, mine[0], None, mine[1], None, None, None])
    columns = ["level", "what", "truth", "AIPerf", "ledger", "ours", "ledger", "ours / AIPerf", "by the ledger"]
    rounded = [[round(cell, 2) if isinstance(cell, float) else cell for cell in row] for row in rows]
    turns = len(next(iter(pairs.values())))
    title = f"{subject.name}: medians of {turns} turns; ledger: llmctl's own of the same requests; ratios: of a turn (low–high)"
    result.tables.append((title, columns, rounded))
    result.seen[subject.name] = {str(level): [asdict(pair) for pair in found] for level, found in pairs.items()}


def _median(values: Iterable[object], what: str) -> float:
    return float(statistics.median(getattr(each, what) for each in values))


# The two engines.


@contextmanager
def paced(folder: Path) -> Iterator[Subject]:
    """Over the fake engine, at a known pace."""
    house = House(folder / "home", fakes.install(folder / "engine"))
    house.add("paced", gguf.minimal(folder / "m.gguf"), context=SLOTS * CONTEXT, slots=SLOTS, cache_ram=0)

    def truth(asks: Sequence[Ask]) -> Mapping[str, float]:
        gaps = statistics.fmean(ask.answer - 1 for ask in asks)
        prefill_ms, pace_ms = PREFILL_S * 1e3, PACE_S * 1e3
        return {"ttft_p50_ms": prefill_ms, "ttft_ms": prefill_ms, "itl_ms": pace_ms, "latency_ms": prefill_ms + gaps * pace_ms}

    fields = {"fake": {"prefill_s": PREFILL_S, "pace_s": PACE_S, "tokens": CONTEXT}}
    with house.up("paced") as address:
        yield Subject("paced engine", f"http://{address[0]}:{address[1]}", "paced", house.home.ledger, True, fields, truth)


@contextmanager
def tiny(folder: Path) -> Iterator[Subject]:
    """Over the outer home's engine and model."""
    home = paths.home()
    model = store.pull(home, preset.load("tiny", home).model, lambda *_: None)
    house = House(folder / "home", engine.locate(home).server)
    house.add("tiny", model, context=SLOTS * CONTEXT, slots=SLOTS, threads=1, cache_ram=0)
    with house.up("tiny") as address:
        yield Subject("tiny", f"http://{address[0]}:{address[1]}", "tiny", house.home.ledger, False, {}, lambda _: {})


SUBJECTS: Final = {"paced": paced, "tiny": tiny}


def main() -> int:
    """Parse, measure, print; 1 where they differ by more."""
    parser = argparse.ArgumentParser(
        prog="bench.proof.agree", description="AIPerf and llmctl bench, asking the same llmctl in turns."
    )
    parser.add_argument("--aiperf", type=Path, help="its command; without it, AIPerf is installed into a temporary folder")
    parser.add_argument("--turns", type=int, default=5, help="of both, at each level")
    parser.add_argument("--requests", type=int, default=6, help="of each user in a turn")
    parser.add_argument("--only", action="append", choices=list(SUBJECTS), help="this engine; may be repeated")
    parser.add_argument("--json", action="store_true", help="print everything that was measured")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    load_average = os.getloadavg()[0]
    result = Result()
    with tempfile.TemporaryDirectory(prefix="bench-agree-") as name:
        folder = Path(name)
        command = (args.aiperf or aiperf.installed(folder / "aiperf")).absolute()
        for subject in args.only or SUBJECTS:
            place = folder / subject
            place.mkdir()
            prompt, answer = SPANS[subject]
            workload = Workload(name=subject, prompt=prompt, answer=answer, requests=args.requests)
            with SUBJECTS[subject](place) as chosen:
                measure(chosen, command, place, workload, args.turns, result)
    return result.show(
        as_json=args.json, load_average=load_average, aiperf=aiperf.PINNED, requests=args.requests, turns=args.turns
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
