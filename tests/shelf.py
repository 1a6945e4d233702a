"""An arbiter with fake engines, in a test's own process: the memory is made up (:class:`Shelf`), and so are the plans' bytes."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop

from supervisor import argv, budget, cards, engine, headers, plan, preset
from supervisor.admission import Ticket
from supervisor.allocation import Allocation
from supervisor.arbiter import Arbiter
from supervisor.catalog import Launch
from supervisor.causes import Kind
from supervisor.errors import Error
from supervisor.estimate import Estimate
from supervisor.lifecycle import State
from supervisor.option import Speculation
from supervisor.placement import HOST
from supervisor.plan import Plan
from supervisor.preset import Preset
from supervisor.units import GIB
from supervisor.upstream import Broken
from supervisor.ward import Ward
from tests import fakes
from tests.conftest import WAIT_S
from tests.fakes import gguf
from tests.plans import NOWHERE, machine

CARD = "CUDA0"
FLAGS = Path(__file__).parent / "data" / "llama-server-help.txt"


@functools.cache
def planned() -> Plan:
    """``tiny`` on the CPU of some machine."""
    asked = preset.load("tiny", NOWHERE)
    return plan.make(asked, {asked.model: headers.find(NOWHERE, asked.model)}, budget.make("none", machine(16, 12)))


@dataclass
class Shelf:
    """A catalog of presets on the fake engine, and a machine with so many GiB in each pool of memory.

    A child takes what was planned for it when it is ready; the host's it never takes, so that there only the plans count.
    """

    root: Path
    memory: dict[str, float] = field(default_factory=lambda: {HOST: 10})
    ordered: tuple[str, ...] = ()
    presets: dict[str, Preset] = field(default_factory=dict)
    knobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    servers: dict[str, Path] = field(default_factory=dict)
    """Another binary than the fake."""
    problems: dict[str, Error] = field(default_factory=dict)
    """What keeps a preset from being planned; with a method after its name, from being planned with that."""
    no_guesses: set[str] = field(default_factory=set)
    """Who has given up guessing ahead."""
    missing: set[str] = field(default_factory=set)
    """Whose model isn't here."""
    lag_s: float = 0.0
    """For how long the card's memory isn't back after a child's end."""
    first_seen_by: str = ""
    """Or it is back when this preset looks for the second time, just before any other one looks."""
    looks: int = 0
    spare: list[tuple[str, Mapping[str, int]]] = field(default_factory=list)
    """What was to be spared at each planning."""
    seen: list[Allocation] = field(default_factory=list)
    arbiter: Arbiter | None = None
    ended: dict[str, float] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    spawned: int = 0
    smaller: dict[str, list[float]] = field(default_factory=dict)
    """GiB of the plans to step down to when memory runs out, one after the other."""
    asked_down: list[tuple[str, Kind]] = field(default_factory=list)
    forgot: list[str] = field(default_factory=list)
    """Whose step-downs were to be forgotten."""
    most_gib: float = 0.0
    """Most memory that was planned for children alive at the same time."""

    def add(self, name: str, gib: float = 4, *, fake: dict[str, Any] | None = None, **options: Any) -> Shelf:
        """A preset; ``fake`` are its engine's knobs, the rest its options."""
        options = {"hold": 0, "slots": 2} | options
        self.presets[name] = dataclasses.replace(planned().preset, name=name, **options)
        self.sizes[name] = gib
        self.knobs[name] = {"tokens": 2} | (fake or {})
        return self

    def here(self, name: str) -> bool:
        return name not in self.missing

    def launch(self, name: str, spare: Mapping[str, int], method: Speculation | None = None) -> Launch:
        """On a thread, as the real one."""
        self.spare.append((name, spare))
        if problem := self.problems.get(name) or self.problems.get(f"{name} {method}"):
            raise problem
        asked, size = self.presets[name], int(self.sizes[name] * GIB)
        chosen = asked = asked.drafting(method) if method else asked
        if name in self.no_guesses:
            chosen = dataclasses.replace(asked, speculative="off")
        where = planned().budget
        if chosen.device == CARD:
            where = dataclasses.replace(where, device="card", card=cards.named("rtx3070"))
        found = dataclasses.replace(
            planned(), asked=chosen, preset=chosen, estimate=Estimate({"weights": size}, {}, 0), budget=where
        )
        installed = fakes.install(self.folder(name), **self.knobs[name])
        words = argv.render(chosen, self.servers.get(name, installed), gguf.minimal(self.root / f"{name}.gguf"), flags=_flags())
        folder = self.root / "run" / name
        env = argv.environment(os.environ, folder)
        step_down = functools.partial(self.step_down, name)
        log = self.root / f"{name}.log"
        return Launch(found, words, env, folder, log, self.seen.append, step_down, method=asked.speculative)

    def refresh(self) -> None:
        """On a thread, as the real one; the presets here are always as they are."""

    def forget(self, name: str) -> None:
        self.forgot.append(name)

    def step_down(self, name: str, kind: Kind) -> str | None:
        """On a thread, as the real one: the next launch takes less, and its engine is healthy."""
        self.asked_down.append((name, kind))
        memory = (Kind.DEVICE_MEMORY, Kind.HOST_MEMORY, Kind.GRAPH_MEMORY, Kind.ILLEGAL_ACCESS)
        if kind not in memory or not self.smaller.get(name):
            return None
        self.sizes[name] = self.smaller[name].pop(0)
        return f"{self.sizes[name]} GiB"

    def free(self, launch: Launch) -> Mapping[str, int]:
        """On a thread, as the real one."""
        found = {pool: int(gib * GIB) for pool, gib in self.memory.items()}
        now_s = time.monotonic()
        self.looks += launch.preset.name == self.first_seen_by
        for name in self.presets:
            if self.presets[name].device == CARD and CARD in found:
                ward = self.arbiter.wards.get(name) if self.arbiter else None
                late = now_s - self.ended.get(name, -1e9) < self.lag_s
                late = late or (bool(self.first_seen_by) and name in self.ended and self.looks < 2)
                if late or (ward is not None and ward.upstream is not None):
                    found[CARD] -= int(self.sizes[name] * GIB)
        return found

    def changed(self, pids: dict[str, int]) -> None:
        """Hears which children live."""
        for name in self.pids.keys() - pids.keys():
            self.ended[name] = time.monotonic()
            self.looks = 0
        self.spawned += len(pids.keys() - self.pids.keys())
        self.pids = dict(pids)
        self.most_gib = max(self.most_gib, sum(self.sizes[name] for name in pids))

    def folder(self, name: str) -> Path:
        return self.root / name / "engine"

    def starts(self, name: str) -> int:
        return len(fakes.events(self.folder(name), "start"))

    @asynccontextmanager
    async def run(self) -> AsyncIterator[Arbiter]:
        """An arbiter of these, and nothing left of it afterwards."""
        before = asyncio.all_tasks()
        self.arbiter = arbiter = Arbiter(self, children_changed=self.changed)  # type: ignore[arg-type]
        pids: set[int] = set()
        arbiter.listeners.add(lambda _: pids.update(self.pids.values()))
        try:
            async with asyncio.timeout(WAIT_S), arbiter.run():
                yield arbiter
        finally:
            assert self.pids == {}
            assert not any(psutil.pid_exists(pid) for pid in pids)
            assert asyncio.all_tasks() <= before
            assert all(ward.keeper is None and ward.bringer is None and ward.upstream is None for ward in arbiter.wards.values())


@functools.cache
def _flags() -> frozenset[str]:
    return engine.parse_help(FLAGS.read_text())


class Visitor:
    """A request's client, which bears everything."""

    def keep_alive(self) -> None: ...
    def stalled_s(self, now_s: float) -> float:
        return 0.0

    def give_up(self) -> None: ...


@asynccontextmanager
async def place(arbiter: Arbiter, name: str) -> AsyncIterator[Ward]:
    """A place at a ready child, as a request gets it."""
    ward, ticket = arbiter.ward(name), Ticket()
    arbiter.check(ward)
    try:
        while True:
            await ward.line.enter(ticket, Visitor())
            if ward.upstream is not None:
                break
            ward.line.leave(ticket)
        yield ward
    finally:
        ward.line.leave(ticket, served=True)


async def ask(arbiter: Arbiter, name: str, prompt: str = "Hello", **knobs: Any) -> str:
    """A whole request to a child: what came of it. ``knobs`` change the engine's answer."""
    try:
        async with place(arbiter, name) as ward:
            assert ward.upstream is not None
            messages = [{"role": "user", "content": prompt}]
            body = json.dumps({"messages": messages, "stream": True, "fake": knobs}).encode()
            exchange = ward.upstream.request("/v1/chat/completions", body)
            try:
                status = await exchange.head()
                exchange.pipe(lambda _: None)
                await exchange.ended()
            finally:
                exchange.abort()
            return f"answered {status}"
    except Broken:
        return "broken"
    except Error as error:
        return f"refused {error.status} {error.code}"


async def state(ward: Ward, *states: State) -> Ward:
    """Wait until it is in one of these states."""
    while ward.state not in states:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    return ward


async def until(told: Callable[[], object]) -> None:
    """Wait until it says something true."""
    while not told():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    """On the loop that serves."""
    uvloop.run(test())  # type: ignore[arg-type]
