"""Faults by the hundred, and whether anything promised was broken: ``python -m bench.proof.chaos``, or ``make chaos``.

llmctl runs as it is shipped (``tiny``, four slots), in homes of its own, with ten clients that stream and ten that don't, asking all the
time. Faults fall in an order drawn from a seed: on a child that is idle, loading, answering; on llmctl itself; on the disk; on the
connections. Three in ten come while the last one is being recovered from. The engine is the fake one (``tests/fakes``), which fails on
demand, or the real one, which can be killed, frozen and told to stop.

At the end of each home three accounts are brought together: what every client had, what the ledger says, and what the fake engine says
it did. A promise that was broken is printed with the seed; its home is kept.

The faults that fill a disk want small file systems of their own: the bench starts itself again in a namespace where it may mount them.
Where that isn't allowed they are left out, and it says so.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import uvloop

from bench.proof import chaos_accounts
from bench.proof.chaos_box import BACK_S, CROWD, DEATH_S, LOAD_S, LOOK_S, PRESET, PROBE_S, Box, Findings, Life, Recovery
from bench.proof.chaos_faults import FAULTS, Deck, Fault, fitting
from bench.proof.house import House
from bench.proof.visit import chat
from supervisor import engine, paths, preset, render, store
from tests import fakes
from tests.fakes import gguf

SEED: Final = 5
COUNTS: Final = {"fake": 500, "real": 40}
BOXES: Final = {"fake": 4, "real": 1}
FOLLOWS: Final = 0.2
"""A fault is followed by another one so often, while it is being recovered from, where three in ten of all have come so already."""
BEGINS_S: Final = 60.0
"""A hang is seen after half of it at most; by then its recovery has begun."""
APART_S: Final = 0.4
"""At most, from when a recovery is seen to have begun to the next fault."""
LOADS_S: Final = 20.0
"""Between two starts of the engine alone."""
OVER_S: Final = 0.5
"""What a recovery may take beside a load (issue 5)."""
SHARE: Final = 0.3
INSIDE: Final = "LLMCTL_CHAOS_INSIDE"


@dataclass(slots=True)
class Run:
    """One engine's boxes together."""

    engine: str
    loads_s: list[float] = field(default_factory=list)
    """From the engine's start until it is healthy and warm, without llmctl; seen now and then while the faults fell."""
    findings: list[Findings] = field(default_factory=list)

    def sum(self, name: str) -> Counter[str]:
        """A count over all boxes."""
        total: Counter[str] = Counter()
        for each in self.findings:
            total += getattr(each, name)
        return total

    @property
    def load_s(self) -> float:
        """The median of them."""
        return statistics.median(self.loads_s)

    @property
    def recoveries(self) -> list[Recovery]:
        """Of all boxes."""
        return [each for findings in self.findings for each in findings.recoveries]


async def follow(box: Box, deck: Deck, count: int) -> None:
    """Deal so many faults to a box that is up, and see it recover from each."""
    findings = box.findings
    within = Deck(tuple(fault for fault in deck.faults if fault.within), box.rng)
    dealt = 0
    while dealt < count:
        fault = deck.draw()
        since_s = time.monotonic()
        if not await _gather(box, fault):
            findings.blame("every request ends", f"{box.traffic.flying} under way before {fault.name}, no more and no fewer")
        await _ready(box, fault.after_s)
        hit = await _deal(box, fault)
        dealt += 1
        box.traffic.open.set()
        plain = not fault.later
        while dealt < count and _wants_another(box, dealt) and await _recovering(box, hit):
            await asyncio.sleep(box.rng.random() * APART_S)
            follower = within.draw()
            plain = False
            hit = await _deal(box, follower, after=hit) or hit
            dealt += 1
        if hit is not None and not await _gone(box, hit):
            findings.blame("a child that does nothing is ended", f"{hit} after {fault.name}")
            box.strike(hit, signal.SIGKILL)
        if not await _back(box, fault.name, since_s, plain=plain):
            return
        render.say(f"box {findings.seed}: {dealt}/{count} faults, {len(box.traffic.outcomes)} requests; {fault.name}")


def _wants_another(box: Box, dealt: int) -> bool:
    return sum(box.findings.within.values()) < SHARE * (dealt + 1) or box.rng.random() < FOLLOWS


async def _gather(box: Box, fault: Fault) -> bool:
    """Wait for the crowd, or for nobody."""
    flying = box.traffic.flying
    if fault.idle:
        box.traffic.open.clear()
        return bool(await box.until(lambda: not sum(flying.values()), BACK_S))
    return bool(await box.until(lambda: min(flying.values()) >= CROWD, PROBE_S))


async def _recovering(box: Box, hit: Life | None) -> bool:
    """Whether a recovery is under way, once one has begun; not where none is to come, or it is over already."""
    if hit is not None:
        await box.until(lambda: box.state != "ready" or hit.ended_s is not None, BEGINS_S)
    return _under_way(box, hit)


def _under_way(box: Box, hit: Life | None) -> bool:
    ended_s = hit.ended_s if hit is not None else None
    return box.state != "ready" or (ended_s is not None and box.told[-1].at_s <= ended_s)  # llmctl hasn't said so yet


async def _ready(box: Box, for_s: float) -> None:
    await box.until(lambda: box.ready_for_s >= for_s, DEATH_S)


async def _gone(box: Box, life: Life) -> bool:
    return bool(await box.until(lambda: life.ended_s is not None, DEATH_S))


async def _deal(box: Box, fault: Fault, after: Life | None = None) -> Life | None:
    findings = box.findings
    if not fault.idle:
        await _gather(box, fault)
        findings.crowds.append((box.traffic.flying[True], box.traffic.flying[False]))
    findings.faults[fault.name] += 1
    findings.within[fault.name] += _under_way(box, after)
    box.log(f"fault: {fault.name}; {box.traffic.flying} under way, {box.state}")
    return await fault.strike(box)


async def _back(box: Box, name: str, since_s: float, *, plain: bool) -> bool:
    """Wait until it serves again, and note how long that took; False where it doesn't."""
    findings = box.findings

    def back() -> bool:
        life = box.child
        return box.state == "ready" and life is not None and box.told[-1].at_s > max((each.ended_s or 0) for each in box.lives)

    until_s = time.monotonic() + BACK_S
    while not await box.until(lambda: back() or box.state == "failed", until_s - time.monotonic()) or not back():
        if time.monotonic() > until_s:
            findings.blame("it serves again", f"not after {name}: {box.told[-3:]}")
            return False
        await box.ask_anew()
    if not await box.probe() and not await box.probe():
        findings.blame("it serves again", f"ready after {name}, and two requests weren't answered")
    died = box.died_since(since_s)
    if died:
        died_s = max(life.ended_s or 0.0 for life in died)
        ready_s = next((told.at_s for told in box.told if told.state == "ready" and told.at_s >= died_s), died_s)
        life = box.child
        load_s = ready_s - life.seen_s if life is not None and life.seen_s < ready_s else 0.0
        findings.recoveries.append(Recovery(name, plain, died_s, ready_s, _backoff_s(box, died_s, ready_s), load_s))
    return True


def _backoff_s(box: Box, from_s: float, to_s: float) -> float:
    """How much of a span it waited on purpose."""
    told = [each for each in box.told if each.at_s <= to_s]
    spans = zip(told, [*told[1:], None], strict=True)
    return sum(
        max(0.0, (min(after.at_s, to_s) if after else to_s) - max(each.at_s, from_s))
        for each, after in spans
        if each.state == "backoff"
    )


async def one(box: Box, deck: Deck, count: int) -> Findings:
    """One box from its first start to its reckoning."""
    begun_s = time.monotonic()
    async with box.watched():
        await box.up()
        if await box.until(lambda: box.state == "ready", BACK_S):
            box.traffic.open.set()
            await follow(box, deck, count)
        await chaos_accounts.settle(box)
    box.findings.seconds = time.monotonic() - begun_s
    return box.findings


async def measure(
    folder: Path, kind: str, count: int, seed: int, boxes: int, faults: Sequence[Fault] = FAULTS, *, disks: bool = False
) -> Run:
    """So many faults, over so many boxes with seeds that follow each other. ``disks``: small file systems may be mounted."""
    made = [_box(folder / f"box{seed + number}", kind, seed + number) for number in range(boxes)]
    if disks:
        for box in made:
            box.mount()
    run = Run(kind)
    fit = {fault.name for fault in fitting(fake=kind == "fake", disks=disks)}
    chosen = tuple(fault for fault in faults if fault.name in fit)
    try:
        async with asyncio.TaskGroup() as around:
            loading = around.create_task(_load(folder / "alone", made[0], run.loads_s), name="load")
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(box, Deck(chosen, box.rng), -(-count // boxes)), name="box") for box in made]
            await _once(run.loads_s)
            loading.cancel()
        run.findings = [task.result() for task in tasks]
    finally:
        for box in made:
            box.sweep()
    return run


async def _load(folder: Path, beside: Box, loads_s: list[float]) -> None:
    """Start the same engine without llmctl, now and then."""
    server = fakes.install(folder / "engine", load_s=LOAD_S) if beside.fake else beside.server
    house, asked = House(folder / "home", server), chat(PRESET, max_tokens=4)
    while True:
        loads_s.append((await house.alone(PRESET, asked, "--model", str(beside.model), *beside.options)).load_s)
        await asyncio.sleep(LOADS_S)


async def _once(loads_s: list[float]) -> None:
    while not loads_s:  # noqa: ASYNC110 a short run may be over by then
        await asyncio.sleep(LOOK_S)


def _box(folder: Path, kind: str, seed: int) -> Box:
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "fake":
        server = fakes.install(folder / "engine", load_s=LOAD_S)
        return Box(folder, server, gguf.minimal(folder / "m.gguf"), seed, fake=True)
    home = paths.home()
    model = store.pull(home, preset.load(PRESET, home).model, lambda *_: None)
    return Box(folder, engine.locate(home).server, model, seed, fake=False, options=("--set", "threads=1"))


PROMISES: Final = (
    "no orphan",
    "no stuck slot",
    "every request ends",
    "one record a request",
    "every record is closed",
    "no clean end of a cut answer",
    "no connection is lost without a word",
    "an error has its envelope",
    "what had no answer yet outlives a child",
    "every task of the engine ends",
    "a child that does nothing is ended",
    "it serves again",
    "llmctl comes up again",
    "down takes it down",
)


def lines(run: Run, count: int) -> list[list[str]]:
    """What was promised, what was seen, and whether it was kept."""
    faults, within = sum(run.sum("faults").values()), sum(run.sum("within").values())
    crowds = [crowd for each in run.findings for crowd in each.crowds]
    least = [min((crowd[kind] for crowd in crowds), default=0) for kind in (0, 1)]
    plain = [each for each in run.recoveries if each.plain]
    over, waited, load = (
        (statistics.median(getattr(each, name) for each in plain) if plain else 0.0) for name in ("took_s", "backoff_s", "load_s")
    )
    over -= run.load_s
    rows = [
        ["faults", f"at least {count}", str(faults), faults >= count],
        [
            "of them during another's recovery",
            f"{SHARE:.0%}",
            f"{within / max(1, faults):.0%}",
            within >= SHARE * faults or faults < 100,
        ],
        ["under way at each, streams and others", f"{CROWD} and {CROWD}", f"{least[0]} and {least[1]}", min(least) >= CROWD],
        [
            "from death to serving, beyond the load alone, median",
            f"{OVER_S} s",
            f"{over:.2f} s, {waited:.2f} s of it back-off ({len(plain)} plain ones; load {run.load_s:.2f} s alone, {load:.2f} s here)",
            over <= OVER_S,
        ],
    ]
    broken = run.sum("broken")
    rows += [[name, "0 times not so", str(broken[name]), not broken[name]] for name in PROMISES]
    return [[str(name), str(promised), str(seen), "yes" if kept else "NO"] for name, promised, seen, kept in rows]


def show(run: Run, count: int) -> None:
    """Print it."""
    faults, within = run.sum("faults"), run.sum("within")
    rows = []
    for name in sorted(faults):
        mine = [each for each in run.recoveries if each.fault == name]
        took = sorted(each.took_s for each in mine)
        shown = (f"{statistics.median(took):.2f}", f"{took[math.ceil(0.95 * len(took)) - 1]:.2f}") if took else ("", "")
        waited = statistics.median(each.backoff_s for each in mine) if mine else 0.0
        rows.append([name, faults[name], within[name], *shown, f"{waited:.2f}" if took else ""])
    render.table(
        [
            "fault",
            "times",
            "during another's recovery",
            "from death to serving: median, s",
            "p95, s",
            "of it back-off, median, s",
        ],
        rows,
        title=f"{run.engine} engine",
    )
    for title, name in (("requests", "ends"), ("told", "told"), ("records", "records"), ("the engine's tasks", "tasks")):
        counts = run.sum(name)
        if counts:
            render.out(f"{title}: {', '.join(f'{count:,} {what}' for what, count in sorted(counts.items()))}")
    render.out(f"given up and asked for anew: {sum(each.gave_up for each in run.findings)}")
    render.out(f"seconds: {', '.join(f'{each.seconds:.0f}' for each in run.findings)}\n")
    render.table(["promise", "promised", "seen", "kept"], lines(run, count))
    for each in run.findings:
        for detail in each.details[:20]:
            render.out(f"  {detail}")


def _inside(argv: Sequence[str]) -> bool:
    """Whether file systems may be mounted; starts this program again where they may, in a namespace of its own."""
    if os.environ.get(INSIDE):
        return True
    unshare = shutil.which("unshare")
    words = [unshare or "", "--user", "--map-root-user", "--mount"]
    trial = [*words, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    if unshare is not None and subprocess.run(trial, capture_output=True, check=False).returncode == 0:
        os.environ[INSIDE] = "1"
        os.execv(unshare, [*words, sys.executable, "-m", "bench.proof.chaos", *argv])
    return False


def main() -> int:
    """Parse, run, print; 1 where a promise wasn't kept."""
    parser = argparse.ArgumentParser(
        prog="bench.proof.chaos", description="Faults by the hundred, and whether anything promised was broken."
    )
    parser.add_argument("--engine", choices=["fake", "real", "both"], default="both")
    parser.add_argument("--faults", type=int, help=f"how many, of each engine; {COUNTS['fake']} and {COUNTS['real']}")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--boxes", type=int, help=f"homes at a time; {BOXES['fake']} and {BOXES['real']}")
    parser.add_argument("--only", action="append", metavar="FAULT", help="this fault; may be repeated")
    parser.add_argument("--folder", type=Path, help="where the homes lie; else a temporary one")
    parser.add_argument("--json", action="store_true", help="print everything that was counted")
    args = parser.parse_args()
    names = [fault.name for fault in FAULTS]
    if unknown := set(args.only or ()) - set(names):
        parser.error(f"there is no fault {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    disks = _inside(sys.argv[1:])
    if not disks:
        render.say("no small file systems can be mounted here: the faults of a full disk are left out")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    chosen = tuple(fault for fault in FAULTS if fault.name in (args.only or names))
    kept, said = True, {}
    for kind in ("fake", "real") if args.engine == "both" else (args.engine,):
        count, boxes = args.faults or COUNTS[kind], args.boxes or BOXES[kind]
        run = uvloop.run(measure(folder / kind, kind, count, args.seed, boxes, chosen, disks=disks))
        said[kind] = asdict(run)
        if not args.json:
            show(run, count)
        kept = kept and all(row[-1] == "yes" for row in lines(run, count))
    if args.json:
        render.as_json(said)
    if kept:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        render.say(f"what was found lies in {folder}")
    return int(not kept)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
