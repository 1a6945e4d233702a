"""One llmctl in a home of its own, under traffic: what lives and dies there, and what it says of itself.

Whether a child lives is asked of the kernel (a pidfd each), what state it is in of ``/llmctl/events``. So the times of deaths and
recoveries are those of the things themselves, whoever killed them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from bench.proof.chaos_traffic import End, Traffic
from bench.proof.house import House, Told
from bench.proof.visit import Address, visit
from tests import fakes

PRESET: Final = "tiny"
CLIENTS: Final = 10
"""Of each kind, streams and unstreamed requests."""
CROWD: Final = 8
"""So many of each kind are under way when a fault falls that is to fall among them."""
LOOK_S: Final = 0.01
DEATH_S: Final = 180.0
"""What was hit is gone by then: a hang is noticed after half a minute, a load that gets nowhere after one."""
BACK_S: Final = 240.0
"""And then it serves again: the longest back-off and a load lie before it."""
PROBE_S: Final = 60.0
PACE_S: Final = 0.02
"""From one of the fake engine's tokens to the next: an answer takes half a second."""
WORDS: Final = (8, 24)
REAL_WORDS: Final = (4, 10)
"""The shortest and the longest answer. The real engine makes about two tokens of one."""
LOAD_S: Final = 0.2
"""Of the fake engine."""
DISK_BYTES: Final = 48 << 20
"""Of the small file systems that are filled."""


@dataclass(slots=True)
class Life:
    """One child, from when it was first seen to its end, on CLOCK_MONOTONIC, in seconds."""

    pid: int
    seen_s: float
    ended_s: float | None = None


@dataclass(frozen=True, slots=True)
class Recovery:
    """From a fault until it serves again."""

    fault: str
    plain: bool
    """Nothing was asked of it but to start again: no other fault came meanwhile, and none of what happened waits by design."""
    died_s: float
    ready_s: float
    backoff_s: float
    """Waited on purpose, in between."""
    load_s: float
    """From the last child's start, as first seen, until it was ready."""

    @property
    def took_s(self) -> float:
        """From death to serving."""
        return self.ready_s - self.died_s


@dataclass(slots=True)
class Findings:
    """What one box came to."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    within: Counter[str] = field(default_factory=Counter)
    """Of those, the ones that came during another's recovery."""
    crowds: list[tuple[int, int]] = field(default_factory=list)
    """Streams and other requests under way at each fault that was to fall among them."""
    recoveries: list[Recovery] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)
    records: Counter[str] = field(default_factory=Counter)
    tasks: Counter[str] = field(default_factory=Counter)
    """How the fake engine's tasks ended."""
    gave_up: int = 0
    """Times that the preset was FAILED, and had to be asked for anew."""
    broken: Counter[str] = field(default_factory=Counter)
    """Promises that weren't kept, by name."""
    details: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def blame(self, promise: str, said: str, count: int = 1) -> None:
        """Note that a promise wasn't kept."""
        self.broken[promise] += count
        self.details.append(f"seed {self.seed}, {promise}: {said}")


class Box:
    """See the module."""

    def __init__(self, folder: Path, server: Path, model: Path, seed: int, *, fake: bool, options: tuple[str, ...] = ()) -> None:
        self.folder, self.server, self.model = folder, server, model
        self.house = House(folder / "home", server)
        self.rng = random.Random(seed)
        self.findings = Findings(seed)
        self.options = options
        """More words for ``llmctl up``."""
        self.fake = fake
        self.traffic = Traffic(PRESET, lambda: self.address, self.rng, f"c{seed}", PACE_S, WORDS if fake else REAL_WORDS)
        self.lives: list[Life] = []
        self.struck: list[Life] = []
        self.told: list[Told] = []
        self.kills_s: list[float] = []
        self.disks: list[Path] = []
        self.killed: set[int] = set()
        """The llmctl that were killed."""
        self.address: Address | None = None
        self.pid = 0
        """Of llmctl."""
        self._token = ""
        self.listener: asyncio.Task[None] | None = None
        self._described = 0
        self._started: set[int] = set()
        self._journal_read = 0

    def log(self, said: str) -> None:
        """Into the box's own diary."""
        with contextlib.suppress(FileNotFoundError), (self.folder / "diary").open("a") as file:  # it was broken off
            file.write(f"{time.monotonic():.3f} {said}\n")

    # What lives.

    @property
    def state(self) -> str:
        """The preset's, as it was last told."""
        return self.told[-1].state if self.told else "stopped"

    @property
    def ready_for_s(self) -> float:
        """How long it has been ready."""
        return time.monotonic() - self.told[-1].at_s if self.state == "ready" else 0.0

    @property
    def child(self) -> Life | None:
        """The child that lives now."""
        return next((life for life in reversed(self.lives) if life.ended_s is None), None)

    def died_since(self, since_s: float) -> list[Life]:
        """Children whose end came after a moment."""
        return [life for life in self.lives if life.ended_s is not None and life.ended_s >= since_s]

    async def until(self, told: Callable[[], Any], timeout_s: float) -> Any:  # noqa: ANN401
        """What ``told`` says, once that is true; None after so long."""
        end_s = time.monotonic() + timeout_s
        while not (answer := told()):
            if time.monotonic() > end_s:
                return None
            await asyncio.sleep(LOOK_S)
        return answer

    async def living(self, timeout_s: float = DEATH_S) -> Life | None:
        """The child, once there is one that nobody has killed yet. Where the preset was given up, it is asked for anew."""

        def fresh() -> Life | None:
            return self.child if self.child not in self.struck else None

        until_s = time.monotonic() + timeout_s
        while True:
            await self.until(lambda: fresh() or self.state == "failed", until_s - time.monotonic())
            if self.state != "failed" or time.monotonic() > until_s:
                return fresh()
            await self.ask_anew()

    async def ask_anew(self) -> None:
        """Have it tried again after it was given up: too many starts in a row served nothing."""
        self.findings.gave_up += 1
        self.log("it was given up: asked anew")
        await self.post("/llmctl/switch")
        await self.until(lambda: self.state != "failed", PROBE_S)

    def strike(self, life: Life, number: signal.Signals) -> None:
        """Send a child a signal. These three are its end, though that may take a while: a large one dies for 0.1 s."""
        self.log(f"{number.name} to child {life.pid}")
        if number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT):
            self.struck.append(life)
        if life.ended_s is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(life.pid, number)

    def tune(self, **knobs: Any) -> None:  # noqa: ANN401
        """What the fake engine's next start is like; as ever, where nothing is said."""
        fakes.tune(self.server.parent, **{"load_s": LOAD_S, **knobs})

    def has_started(self, life: Life) -> bool:
        """Whether the fake engine has read its knobs by now, or is gone."""
        with (self.server.parent / fakes.JOURNAL).open() as file:
            file.seek(self._journal_read)
            while (line := file.readline()).endswith("\n"):
                self._journal_read = file.tell()
                if '"event": "start"' in line:
                    self._started.add(int(json.loads(line)["pid"]))
        return life.pid in self._started or life.ended_s is not None

    # llmctl itself.

    async def command(self, *words: str) -> str:
        """Run a command of llmctl's."""
        return await asyncio.to_thread(self.house.llmctl, *words)

    async def up(self) -> None:
        """Have it serve. What goes wrong is blamed on it, and tried again."""
        words = ("up", PRESET, "--model", str(self.model), *self.options, "--port", "0", "--detach", "--json")
        for _ in range(3):
            try:
                await self.command(*words)
            except (RuntimeError, subprocess.TimeoutExpired) as problem:
                self.log(f"up: {problem}")
                self.findings.blame("llmctl comes up again", str(problem)[:500])
            else:
                return

    async def post(self, path: str) -> bool:
        """One of its own routes, for the preset; whether it took it."""
        if self.address is None:
            return False
        try:
            headers = {"Authorization": f"Bearer {self._token}"}
            answer = await visit(self.address, path, {"preset": PRESET}, headers=headers, longest_s=PROBE_S)
        except (OSError, TimeoutError) as problem:
            self.log(f"{path}: {problem!r}")
            return False
        return answer.status == 202

    async def probe(self) -> bool:
        """Whether a request is answered."""
        outcome = await self.traffic.send(self.traffic.new(stream=True))
        return outcome is not None and outcome.end is End.OK

    # Watching.

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Watch it, and run its traffic, until the block ends."""
        async with asyncio.TaskGroup() as group:
            self.listener = group.create_task(self._listen(), name="listen")
            tasks = [self.listener, group.create_task(self._look(), name="look")]
            for number in range(2 * CLIENTS):
                tasks.append(group.create_task(self.traffic.client(stream=number % 2 == 0), name="client"))
            yield
            for task in tasks:
                task.cancel()

    async def _look(self) -> None:
        """Follow the run folder's description: where llmctl listens, and which children it has."""
        file = self.house.home.run / "instance.json"
        while True:
            with contextlib.suppress(OSError, ValueError, KeyError):
                if (stamp := file.stat().st_mtime_ns) != self._described:
                    found = json.loads(file.read_text())
                    self._described = stamp
                    self._read(found)
            await asyncio.sleep(LOOK_S)

    def _read(self, found: dict[str, Any]) -> None:
        pid = int(found["process"]["pid"])
        if found["address"] and pid not in self.killed:
            host, _, port = found["address"].removeprefix("http://").rpartition(":")
            self.address, self.pid, self._token = (host, int(port)), pid, found["token"]
        known = {life.pid for life in self.lives}
        for each in found["children"]:
            if int(each["pid"]) not in known:
                self._meet(int(each["pid"]))

    def _meet(self, pid: int) -> None:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:  # it came and went: its owner hasn't said so yet
            return
        life = Life(pid, time.monotonic())
        self.lives.append(life)
        self.log(f"child {pid}")
        loop = asyncio.get_running_loop()

        def gone() -> None:
            life.ended_s = time.monotonic()
            loop.remove_reader(handle)
            os.close(handle)
            self.log(f"child {pid} is gone")

        loop.add_reader(handle, gone)

    async def _listen(self) -> None:
        """Its events, from each llmctl there is, one after the other."""
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                if self.address is not None and not isinstance(self.address, str):
                    reader, writer = await asyncio.open_connection(*self.address)
                    try:
                        head = f"GET /llmctl/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self._token}\r\n\r\n"
                        writer.write(head.encode())
                        while line := await reader.readline():
                            if line.startswith(b"data: "):
                                said = json.loads(line[6:])
                                self.log(f"{said}")
                                if said["preset"] == PRESET:
                                    self.told.append(Told(time.monotonic(), said["preset"], said["state"]))
                    finally:
                        writer.close()
            await asyncio.sleep(LOOK_S)

    async def kill(self) -> None:
        """Kill llmctl itself, and have another one in the same home."""
        before, address = self.pid, self.address
        self.kills_s.append(time.monotonic())
        self.address = None
        self.killed.add(before)
        os.kill(before, signal.SIGKILL)
        self.told.append(Told(time.monotonic(), PRESET, "stopped"))
        self.log(f"killed llmctl {before} at {address}")
        await self.until(lambda: not psutil.pid_exists(before), PROBE_S)
        await self.up()
        await self.until(lambda: self.address, PROBE_S)
        orphans = [life for life in self.lives if life.ended_s is None and life.seen_s < self.kills_s[-1]]
        if orphans:
            self.findings.blame("no orphan", f"{orphans} live on after llmctl {before} was killed and another is up")

    # A disk that is full.

    def mount(self) -> None:
        """Put the home and its logs on small file systems of their own. Needs a mount namespace."""
        for folder in (self.house.root, self.house.home.logs):
            folder.mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)], check=True)
            self.disks.append(folder)

    @contextlib.contextmanager
    def full(self, folder: Path) -> Iterator[None]:
        """No byte more can be written there while the block runs."""
        filler = folder / "filler"
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))
        self.log(f"{folder} is full")
        try:
            yield
        finally:
            filler.unlink()
            self.log(f"{folder} has room again")

    def sweep(self) -> None:
        """Leave nothing running, and give the small file systems back; the folder, too, where nothing was found."""
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            self.house.llmctl("down", "--now")  # it runs still where the bench was broken off
        if self.findings.broken and self.disks:
            shutil.copytree(self.house.root, self.folder / "kept", ignore_dangling_symlinks=True, dirs_exist_ok=True)
        for folder in reversed(self.disks):
            subprocess.run(["umount", str(folder)], check=False)
        if not self.findings.broken:
            shutil.rmtree(self.folder, ignore_errors=True)
