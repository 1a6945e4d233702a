"""Whether the ruler can be trusted: ``python -m bench.proof.trust``, or ``make bench-trust``.

- **tie**: the same server, measured again and again on the real engine; each result is compared with the next one, and in further runs the
  server stands on both sides and is measured in turns. Whoever finds a difference there is wrong.
- **slower**: two fake engines, of which one needs a tenth longer for each token, while the machine's moods (made up, by repetition)
spread both.
  Few repetitions don't tell them apart, and say how many would: so many are made, and they have to.
- **cost**: what the load generator itself takes, with 64 streams of 50 tokens a second.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any, Final

import uvloop

from bench import compare, target, workload
from bench.ask import Ask, Level
from bench.compare import Comparison
from bench.load import Answers, Writing
from bench.proof.house import House
from bench.proof.promises import Result
from bench.result import Result as Measured
from bench.run import Order, Run
from bench.sides import Side
from bench.target import Target
from bench.workload import Workload
from supervisor import engine, paths, preset, render, store
from tests import fakes
from tests.fakes import gguf

NAME: Final = "tiny"
TIES: Final = 0.95
SLOWER: Final = 1.1
TELL: Final = 0.1
PACE_S: Final = 0.005
MOODS: Final = 0.06
"""Spread of one repetition: what this project's own machine does to itself on a bad day."""
PILOT: Final = 6
"""Repetitions at first."""
SHORT: Final = Workload(name="short", prompt="48-64", answer="24", ask=("Go on.",), requests=1, repetitions=5)
STREAMS: Final = 64
RATE: Final = 50


async def run(made: Run) -> Measured:
    """Measure one."""
    await made.measure()
    return made.result()


def order(work: Workload, level: Level, *targets: Target) -> Order:
    """A run of one level."""
    return Order(work, targets, (level,), seed=0, salt=secrets.token_hex(4))


def quiet(what: str, done: int, total: int) -> None:
    """No bar for each of a hundred runs."""


def measured(asked: Order) -> Measured:
    """A run's result."""
    return uvloop.run(run(Run(asked, progress=quiet, say=quiet_say)))


def quiet_say(_: str) -> None:
    """What a writer finds worth a word is said once, by the command."""


def is_tie(found: Comparison) -> bool:
    """Whether nothing was told apart, and there was something to tell."""
    return all(row.verdict == "tie" for row in found.rows) and bool(found.rows)


def apart(a: Measured, b: Measured) -> Comparison:
    """Of two runs of one server."""
    return compare.compare(*(Side(each, each.manifest.subjects[0], name) for each, name in ((a, "a"), (b, "b"))))


def tie(result: Result, subject: Target, count: int) -> None:
    """A against A, ``count`` times apart and as often in turns."""
    level = Level(users=2)
    with render.progress() as progress:
        runs = []
        for number in range(2 * count):
            runs.append(measured(order(SHORT, level, subject)))
            progress("runs apart", number + 1, 2 * count)
        twins = []
        for number in range(count):
            twins.append(measured(order(SHORT, level, subject, replace(subject, name="again"))))
            progress("runs in turns", number + 1, count)
    kinds = {
        "apart": [apart(runs[number], runs[number + 1]) for number in range(0, 2 * count, 2)],
        "in turns": [compare.within(each, "run")[0] for each in twins],
    }
    for kind, found in kinds.items():
        ties = sum(map(is_tie, found))
        bounds = [row.interval.bound for each in found for row in each.rows if row.interval is not None]
        spreads = [row.interval.spread for each in found for row in each.rows if row.interval is not None]
        result.add(
            "tie",
            f"{count} comparisons of A with A, {kind}",
            f"≥ {TIES:.0%} called a tie",
            f"{ties} ({ties / count:.1%}); a repetition's spread {statistics.median(spreads):.1%}, bound {statistics.median(bounds):.1%}",
            ties / count >= TIES,
        )
        result.seen[f"tie {kind}"] = [each.as_dict() for each in found]


class Timed:
    """A writer whose requests tell the fake engine its pace."""

    def __init__(self, plain: Writing, pace_s: float) -> None:
        self._plain = plain
        self._pace_s = pace_s

    def body(self, ask: Ask, answers: Answers) -> tuple[str, dict[str, Any]]:
        """As it is, with the pace."""
        path, body = self._plain.body(ask, answers)
        return path, {**body, "fake": {"pace_s": self._pace_s, "prefill_s": 4 * self._pace_s, "tokens": 1_000_000}}


class Moody(Run):
    """A run on paced fakes, each repetition of which the machine has another mood."""

    def __init__(self, asked: Order, pace_s: Mapping[str, float], draw: random.Random | None) -> None:
        super().__init__(asked, progress=quiet, say=quiet_say)
        self._pace_s = pace_s
        self._draw = draw

    async def _repeat(self, seat: Any, level: Level, number: int) -> None:  # noqa: ANN401
        plain = seat.writer
        mood = exp(self._draw.gauss(0.0, MOODS)) if self._draw is not None else 1.0
        seat.writer = Timed(plain, self._pace_s[seat.target.name] * mood)
        try:
            await super()._repeat(seat, level, number)
        finally:
            seat.writer = plain


def slower(result: Result, one: Target, other: Target, trials: int) -> None:
    """A tenth slower, in so many trials."""
    pace_s = {one.name: PACE_S, other.name: PACE_S * SLOWER}
    draw = random.Random(7)
    found, soon, announced, changes = 0, 0, [], []
    with render.progress() as progress:
        for trial in range(trials):
            pilot = moody(one, other, pace_s, draw, PILOT)
            soon += pilot.worse
            count = max((needs or 0 for row in pilot.rows for needs in row.to_tell.values()), default=PILOT)
            announced.append(count)
            again = moody(one, other, pace_s, draw, count)
            found += all(row.verdict == "worse" for row in again.rows)
            changes += [abs(row.change) for row in again.rows if row.figure.tag == "inter_token_latency"]
            progress("trials", trial + 1, trials)
    result.add(
        "slower",
        f"a token takes 10 % longer, moods of {MOODS:.0%} a repetition: found in every figure with the repetitions announced",
        "≥ 90 %",
        f"{found} of {trials}, with {min(announced)} to {max(announced)} repetitions (median {statistics.median(announced):g}); "
        f"the first {PILOT} told {soon}; seen: {statistics.median(changes):.1%} slower",
        found >= 0.9 * trials,
    )
    result.seen["slower"] = {"announced": announced, "found": found, "changes": changes}


def moody(one: Target, other: Target, pace_s: Mapping[str, float], draw: random.Random, repetitions: int) -> Comparison:
    """Both in turns."""
    work = replace(SHORT, repetitions=repetitions)
    found = uvloop.run(run(Moody(order(work, Level(users=2), one, other), pace_s, draw)))
    (told,) = compare.within(found, "run", tell=TELL)
    return replace(told, rows=tuple(replace(row, to_tell={TELL: row.to_tell[TELL]} if row.to_tell else {}) for row in told.rows))


def cost(result: Result, subject: Target) -> None:
    """64 streams at their pace."""
    work = workload.changed(SHORT, answer="200", requests=1, repetitions=3)
    asked = order(work, Level(users=STREAMS), subject)
    found = uvloop.run(run(Moody(asked, {subject.name: 1 / RATE}, None)))
    told = found.manifest.generator
    point = found.points[0]
    gap = point.metrics["inter_chunk_latency"]
    result.add(
        "cost",
        f"the load generator with {STREAMS} streams of {RATE} tokens/s",
        "printed",
        f"{told['us_an_event']:.1f} µs an event, {told['cpu_share']:.1%} of a core; gaps p50 {gap['p50']:.2f} ms, p99 {gap['p99']:.2f}, "
        f"of {1e3 / RATE:.0f}",
        point.counts.error == 0,
    )
    result.seen["cost"] = {"generator": dict(told), "gaps": dict(gap)}


@contextlib.contextmanager
def real(folder: Path) -> Iterator[Target]:
    """``tiny`` on the real engine, one thread: two cores are shared with who asks."""
    outer = paths.home()
    house = House(folder, engine.locate(outer).server)
    house.add(NAME, store.pull(outer, preset.load(NAME, outer).model, lambda *_: None), context=4096, slots=2, threads=1)
    with house.up(NAME) as (host, port):
        yield uvloop.run(target.find(f"http://{host}:{port}", model=NAME, home=house.home))


@contextlib.contextmanager
def fake(folder: Path, name: str) -> Iterator[Target]:
    """A paced fake behind llmctl."""
    folder.mkdir(parents=True)
    house = House(folder / "home", fakes.install(folder / "engine", tokens=1_000_000))
    house.add(NAME, gguf.minimal(folder / "m.gguf"), context=4096 * STREAMS, slots=STREAMS)
    with house.up(NAME) as (host, port):
        yield replace(uvloop.run(target.find(f"http://{host}:{port}", model=NAME, home=house.home)), name=name)


PARTS: Final = ("tie", "slower", "cost")


def main() -> int:
    """Parse, measure, print; 1 where a promise wasn't kept."""
    parser = argparse.ArgumentParser(
        prog="bench.proof.trust", description="Whether llmctl bench and llmctl compare can be trusted."
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)} [default: all]")
    parser.add_argument("--ties", type=int, default=60, help="comparisons of A with A")
    parser.add_argument("--trials", type=int, default=12, help="of the slower one")
    parser.add_argument("--json", action="store_true", help="print everything that was measured")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    result, load, parts = Result(), os.getloadavg()[0], args.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(unknown)}")
    with tempfile.TemporaryDirectory(prefix="llmctl-trust-") as name:
        folder = Path(name)
        if "tie" in parts:
            with real(folder / "real") as subject:
                tie(result, subject, args.ties)
        if "slower" in parts:
            with fake(folder / "one", "one") as one, fake(folder / "other", "other") as other:
                slower(result, one, other, args.trials)
        if "cost" in parts:
            with fake(folder / "cost", "fake") as subject:
                cost(result, subject)
    return result.show(as_json=args.json, load_average=load)


if __name__ == "__main__":
    sys.exit(main())
