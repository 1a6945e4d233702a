"""A recorded hour, replayed: ``python -m bench.proof.replay``, or ``make bench-replay``.

Two llmctl in homes of their own, one after the other, with ``tiny`` on the real engine. The first serves an hour's traffic, pressed into
three minutes: a day's curve of dialogues that carry their answers, agents with long beginnings of their own, and single questions, from
people who think before they go on. Its ledger's records become a trace, without a text. The second is asked what the trace says, by the
load generator of ``llmctl bench replay``. Then the two are laid side by side, request by request.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvloop

from bench import figures, tap, target, text, trace
from bench.ask import Level
from bench.exchange import Address, Heard, Wires
from bench.load import Load
from bench.prompts import Writer
from bench.proof.house import House
from bench.proof.promises import Result
from bench.sample import Sample
from bench.trace import Trace
from supervisor import engine, paths, preset, render, store

SEED: Final = 7
HOUR_S: Final = 3600.0
LATE_MS: Final = 5.0
"""Arrivals are to be so near, 99 of 100."""
HITS: Final = 0.01
"""And what is found in the cache."""
PATH: Final = "/v1/chat/completions"
NAME: Final = "tiny"
THINKS_S: Final = (60, 300)
"""A person, between an answer and the next question."""
TIMEOUT_S: Final = 120.0
THREADS: Final = 1
SLOTS: Final = 2


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked."""

    press: float
    """The hour passes so many times faster."""
    dialogues: int
    agents: int
    singles: int


FULL = Size(press=20, dialogues=16, agents=6, singles=40)
QUICK = Size(press=20, dialogues=6, agents=3, singles=12)


class People:
    """Those who ask, on a day's curve: few, then many, then few."""

    def __init__(self, wires: Wires, size: Size, seed: int) -> None:
        self._wires = wires
        self._size = size
        self._draw = random.Random(seed)
        self._systems = [f"You are helper {name}. {self._said(each)}" for name, each in (("one", 300), ("two", 200))]
        self.failed = 0
        self.sent = 0

    async def ask(self) -> None:
        """All of it, an hour's worth."""
        size = self._size
        async with asyncio.TaskGroup() as group:
            for _ in range(size.dialogues):
                group.create_task(self._dialogue(self._arrival(), self._draw.randint(2, 6), None))
            for number in range(size.agents):
                group.create_task(self._dialogue(self._arrival(), self._draw.randint(3, 8), self._systems[number % 2]))
            for _ in range(size.singles):
                group.create_task(self._dialogue(self._arrival(), 1, None))

    def _arrival(self) -> float:
        """Seconds into the pressed hour."""
        while True:
            at = self._draw.random()
            if self._draw.random() < 0.15 + 0.85 * math.sin(math.pi * at) ** 2:
                return at * HOUR_S * 0.9 / self._size.press

    async def _dialogue(self, at_s: float, turns: int, system: str | None) -> None:
        draw = random.Random(self._draw.random())
        await asyncio.sleep(at_s)
        messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        for _ in range(turns):
            messages.append({"role": "user", "content": self._said(draw.randint(6, 40), draw)})
            heard = Heard()
            body = {"model": NAME, "messages": messages, "stream": True, "max_tokens": draw.randint(4, 16)}
            self.sent += 1
            await self._wires.exchange(PATH, body, heard, timeout_s=TIMEOUT_S, leaves_s=None)
            if heard.error is not None:
                self.failed += 1
                return
            messages = [*messages, {"role": "assistant", "content": "".join(heard.texts)}]
            await asyncio.sleep(draw.uniform(*THINKS_S) / self._size.press)

    def _said(self, words: int, draw: random.Random | None = None) -> str:
        found = (draw or self._draw).choices(text.WORDS, k=words)
        return f"{' '.join(found).capitalize()}?"


def house(root: Path) -> House:
    """A home with the real engine and ``tiny``."""
    outer = paths.home()
    found = House(root, engine.locate(outer).server)
    model = store.pull(outer, preset.load(NAME, outer).model, lambda *_: None)
    found.add(NAME, model, context=4096 * SLOTS, slots=SLOTS, threads=THREADS, cache_ram=256, checkpoints=1)
    return found


async def record(folder: Path, size: Size) -> tuple[Trace, int]:
    """Serve the hour and make a trace of it; and how many requests failed."""
    serving = house(folder / "recorded")
    with serving.up(NAME) as (host, port):
        wires = Wires(Address.of(f"http://{host}:{port}"))
        since_at = time.time()
        people = People(wires, size, SEED)
        await people.ask()
        wires.close()
        until_at = time.time()
    path = folder / "hour.jsonl"
    trace.write(tap.recorded(serving.home.ledger, since_at, until_at), path)
    return trace.read(path), people.failed


async def replay(folder: Path, made: Trace) -> tuple[list[Sample], Trace]:
    """Ask a fresh llmctl the same; what the generator saw, and a trace of what that llmctl did."""
    serving = house(folder / "replayed")
    asks = made.asks()
    with serving.up(NAME) as (host, port):
        found = await target.find(f"http://{host}:{port}", model=NAME, home=serving.home)
        writer = await Writer.of(found, "chat", render.say)
        wires = Wires(Address.of(found.url))
        since_at = time.time()
        samples = await Load(NAME, wires, writer, began_s=time.perf_counter()).run(asks, Level(name="replay"), 0)
        wires.close()
        until_at = time.time()
    return sorted(samples, key=lambda each: each.number), tap.recorded(serving.home.ledger, since_at, until_at)


def lay(result: Result, made: Trace, samples: Sequence[Sample], again: Trace) -> None:
    """Side by side."""
    late = sorted(each.late_ms or 0.0 for each in samples)
    offsets = [(other.at_s - one.at_s) * 1e3 for one, other in zip(made.requests, again.requests, strict=False)]
    typical = statistics.median(offsets)
    moved = sorted(abs(each - typical) for each in offsets)
    for what, values in (("sent after they were due", late), ("admitted, against the others", moved)):
        p50, p99 = figures.percentile(values, 50), figures.percentile(values, 99)
        result.add(
            "arrivals",
            f"{len(values)} requests: {what}, p99",
            f"≤ {LATE_MS:.0f} ms",
            f"{p99:.2f} ms; p50 {p50:.2f}, most {values[-1]:.2f}",
            p99 <= LATE_MS,
        )
    pairs = [(shape, sample) for shape, sample in zip(made.requests, samples, strict=True)]
    before, after = (
        sum(shape.cached_tokens or 0 for shape, _ in pairs),
        sum(sample.cached_tokens or 0 for _, sample in pairs),
    )
    differ = [(shape, sample) for shape, sample in pairs if shape.cached_tokens != sample.cached_tokens]
    off = after / before - 1 if before else math.inf
    share = before / made.prompt_tokens, after / max(1, sum(sample.prompt_tokens or 0 for _, sample in pairs))
    result.add(
        "hits",
        "prompt tokens that came out of the cache",
        f"within {HITS:.0%} of {before:,}",
        f"{after:,} ({off:+.2%}): {share[0]:.2%} of all recorded, {share[1]:.2%} of all replayed; {len(differ)} requests differ",
        abs(off) <= HITS,
    )
    prompts = sum(sample.prompt_tokens or 0 for _, sample in pairs)
    unlike = sum(shape.prompt_tokens != sample.prompt_tokens for shape, sample in pairs)
    result.add(
        "lengths",
        "prompt tokens in all",
        f"within {HITS:.0%} of {made.prompt_tokens:,}",
        f"{prompts:,}; {unlike} requests differ",
        abs(prompts / made.prompt_tokens - 1) <= HITS,
    )
    unlike = sum(shape.completion_tokens != sample.completion_tokens for shape, sample in pairs)
    result.add("lengths", "answers' tokens", "equal", f"{unlike} requests differ", unlike == 0)
    bad = [sample.error for sample in samples if not sample.ok]
    result.add("replay", "requests that failed", "none", f"{len(bad)}{f': {bad[0]}' if bad else ''}", not bad)
    rows = [
        (
            sample.number,
            shape.parent,
            shape.shared_tokens,
            shape.answer_tokens,
            f"{shape.prompt_tokens} {sample.prompt_tokens}",
            f"{shape.cached_tokens} {sample.cached_tokens}",
        )
        for shape, sample in itertools.islice(differ, 30)
    ]
    columns = ("request", "parent", "shared", "of its answer", "prompt, then and now", "cached, then and now")
    result.tables.append(("Requests that found another number of tokens in the cache (the first 30)", columns, rows))
    result.seen["requests"] = [
        {**shape.as_dict(), "replayed": sample.as_dict(), "at_again_s": other.at_s}
        for (shape, sample), other in zip(pairs, again.requests, strict=False)
    ]


async def measure(folder: Path, size: Size, result: Result, given: Path | None) -> None:
    """All of it."""
    failed = 0
    if given is None:
        made, failed = await record(folder, size)
    else:
        made = trace.read(given)
    result.seen["trace"] = {"told": made.told(), "left_out": made.told_left_out(), "digest": made.digest, "failed": failed}
    render.say(f"{made.told()}; {sum(each.parent is not None for each in made.requests)} begin like one before them")
    result.add(
        "record", "requests of the hour", "all in the trace", f"{len(made.requests)} {made.told_left_out()}", not made.left_out
    )
    samples, again = await replay(folder, made)
    lay(result, made, samples, again)


def main() -> int:
    """Parse, measure, print; 1 where a promise wasn't kept."""
    parser = argparse.ArgumentParser(prog="bench.proof.replay", description="A recorded hour, replayed.")
    parser.add_argument("--quick", action="store_true", help="fewer people, for a look")
    parser.add_argument("--trace", type=Path, help="replay this one")
    parser.add_argument("--keep", type=Path, help="keep both homes and the trace in this folder")
    parser.add_argument("--json", action="store_true", help="print everything that was measured")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    result, load = Result(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="llmctl-replay-") as folder:
        uvloop.run(measure(args.keep or Path(folder), QUICK if args.quick else FULL, result, args.trace))
    return result.show(as_json=args.json, load_average=load, size="quick" if args.quick else "full")


if __name__ == "__main__":
    sys.exit(main())
