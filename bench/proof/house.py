"""llmctl in a home of its own, with presets of the bench's, and the engine without llmctl to compare it with."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.proof.visit import Address, visit
from supervisor import argv, hardware, paths, preset, warmup
from supervisor.errors import Error
from supervisor.running import Running
from supervisor.units import MIB

START_S: Final = 60.0
POLL_S: Final = 0.005
HALF: Final = 0.6
"""Of the free memory: one preset that asks for so much fits alone, two don't."""


def half_mib() -> int:
    """What two presets may not both take of this machine, in MiB.

    It is asked for as ``cache_ram``, which a plan counts in full and the engine takes only as prompts come to fill it. So the presets
    don't fit together by their plans, and no memory is taken from a machine that others use.
    """
    return int(hardware.detect(cards=False).available_bytes * HALF) // MIB


@dataclass(frozen=True, slots=True)
class Told:
    """A preset reached a state."""

    at_s: float
    preset: str
    state: str


@dataclass(frozen=True, slots=True)
class House:
    """A home, its engine, and llmctl while it runs there."""

    root: Path
    server: Path

    @property
    def home(self) -> paths.Home:
        """Its folders."""
        return paths.home({"LLMCTL_HOME": str(self.root)})

    def add(self, name: str, model: Path, **options: object) -> None:
        """Write a preset."""
        self.home.presets.mkdir(parents=True, exist_ok=True)
        chosen = {"model": {"path": str(model)}, **options}
        (self.home.presets / f"{name}.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in chosen.items()))

    def llmctl(self, *words: str) -> str:
        """What a command prints. Raises RuntimeError with its error."""
        env = os.environ | {"LLMCTL_HOME": str(self.root), "LLMCTL_ENGINE": str(self.server)}
        done = subprocess.run(
            [sys.executable, "-m", "supervisor", *words], env=env, capture_output=True, text=True, timeout=START_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"llmctl {' '.join(words)} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    @contextmanager
    def up(self, first: str, *also: str) -> Iterator[Address]:
        """Serve; the address. It is stopped at the end."""
        words = [word for name in also for word in ("--also", name)]
        try:
            told = json.loads(self.llmctl("up", first, *words, "--port", "0", "--detach", "--json"))
            host, _, port = told["address"].removeprefix("http://").rpartition(":")
            yield host, int(port)
        finally:
            self.llmctl("down", "--now")

    @contextmanager
    def told(self) -> Iterator[list[Told]]:
        """What ``/llmctl/events`` says while the block runs, as it comes."""
        told: list[Told] = []

        def listen() -> None:
            with contextlib.suppress(Error), Running.of(self.home).events() as events:
                for event in events:
                    told.append(Told(time.monotonic(), event["preset"], event["state"]))

        threading.Thread(target=listen, name="events", daemon=True).start()  # it ends with llmctl
        yield told

    async def alone(self, name: str, body: Mapping[str, object], *options: str) -> Alone:
        """Start a preset's engine without llmctl, by the command line that llmctl would use, ask it once and stop it.

        ``options`` are words for ``llmctl plan``.
        """
        words = json.loads(await asyncio.to_thread(self.llmctl, "plan", name, *options, "--json"))["argv"]
        folder = self.root / "alone"
        folder.mkdir(parents=True, exist_ok=True)
        sock = folder / argv.SOCKET
        sock.unlink(missing_ok=True)
        log = folder / "log"
        chosen = preset.load(name, self.home)
        begun_s = time.monotonic()
        with log.open("wb") as out:
            env = argv.environment(os.environ, folder, chosen)
            engine = subprocess.Popen(words, cwd=folder, env=env, stdout=out, stderr=out)  # noqa: ASYNC220 nothing else is to run now
        try:
            while not await _healthy(str(sock)):
                if engine.poll() is not None or time.monotonic() - begun_s > START_S:
                    raise RuntimeError(f"the engine doesn't start; its log ends:\n{log.read_text()[-2000:]}")
                await asyncio.sleep(POLL_S)
            healthy_s = time.monotonic()
            for question in warmup.questions(chosen):
                await visit(str(sock), question.path, question.body)
            warm_s = time.monotonic()
            answer = await visit(str(sock), "/v1/chat/completions", body)
            stopped_s = time.monotonic()
            engine.terminate()
            await asyncio.to_thread(engine.wait, START_S)
            return Alone(healthy_s - begun_s, warm_s - healthy_s, answer.waited_s, time.monotonic() - stopped_s)
        finally:
            engine.kill()
            engine.wait()


@dataclass(frozen=True, slots=True)
class Alone:
    """What an engine takes when nothing is in front of it, in seconds."""

    healthy_s: float
    """From its start until ``/health`` says 200."""
    warm_s: float
    """For the warm-up's questions."""
    first_s: float
    """From a request to its first event."""
    stop_s: float
    """From SIGTERM, idle, to its end."""

    @property
    def load_s(self) -> float:
        """Until it may be called ready."""
        return self.healthy_s + self.warm_s


async def _healthy(sock: str) -> bool:
    try:
        return (await visit(sock, "/health")).status == 200
    except OSError:
        return False
