"""How soon the engine is free of a client that left: ``python -m bench.proof.leaving``, or ``make bench-leaving``.

A client streams a chat, reads a few events and closes its connection in the middle of the answer.

- **upstream closed**: until the engine's side of the connection is gone, as the fake engine's journal tells (one clock for all processes).
- **slot released**: until the real engine's log says ``stop processing``, read off the growing file every millisecond. Nothing is asked
  of the engine meanwhile: polling ``/slots`` keeps a cancelled request alive.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from supervisor import engine, paths, preset, render, store
from tests import fakes
from tests.fakes import gguf

ROUNDS: Final = 20
START_S: Final = 60.0
POLL_S: Final = 0.001


@contextmanager
def llmctl(home: Path, server: Path, model: Path) -> Iterator[tuple[str, int]]:
    """A running llmctl's host and port; it is stopped at the end."""
    env = os.environ | {"LLMCTL_HOME": str(home), "LLMCTL_ENGINE": str(server)}
    words = [sys.executable, "-m", "supervisor"]
    up = [*words, "up", "tiny", "--detach", "--json", "--port", "0", "--model", str(model)]
    try:
        told = subprocess.run(up, env=env, check=True, capture_output=True, text=True, timeout=START_S)
        host, _, port = json.loads(told.stdout)["address"].removeprefix("http://").rpartition(":")
        yield host, int(port)
    finally:
        subprocess.run([*words, "down", "--now"], env=env, check=True, capture_output=True)


def leave(address: tuple[str, int], events: int) -> float:
    """Stream a chat, close after so many events; the monotonic time at which the connection was closed."""
    fields = {"model": "tiny", "stream": True, "max_tokens": 2000, "ignore_eos": True}
    body = json.dumps(fields | {"messages": [{"role": "user", "content": "Tell me a story."}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(address, timeout=START_S) as door:
        door.sendall(head.encode() + body)
        seen = 0
        while seen < events:
            seen += door.recv(65536).count(b"data: ")
    return time.monotonic()


def upstream_closed(folder: Path) -> list[float]:
    """Seconds until the fake saw its connection go."""
    server = fakes.install(folder / "engine", tokens=100_000, pace_s=0.01)
    found = []
    with llmctl(folder / "home", server, gguf.minimal(folder / "m.gguf")) as address:
        for number in range(1, ROUNDS + 1):
            left_at = leave(address, 5)
            found.append(float(fakes.wait_event(folder / "engine", "client_closed", count=number)["t"]) - left_at)
    return found


def slot_released(folder: Path, home: paths.Home) -> list[float]:
    """Seconds until the real engine released the slot."""
    built = engine.locate(home)
    model = store.pull(home, preset.load("tiny", home).model, lambda *_: None)
    found = []
    with llmctl(folder / "home", built.server, model) as address:
        log = paths.home({"LLMCTL_HOME": str(folder / "home")}).logs / "tiny.log"
        for _ in range(ROUNDS):
            before = log.read_bytes().count(b"stop processing")
            left_at = leave(address, 5)
            while log.read_bytes().count(b"stop processing") == before:
                time.sleep(POLL_S)
                if time.monotonic() - left_at > START_S:
                    raise TimeoutError("the slot was never released")
            found.append(time.monotonic() - left_at)
    return found


def main() -> None:
    """Measure both and print a table."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, told in (
            ("upstream closed", upstream_closed(Path(scratch, "fake"))),
            ("slot released", slot_released(Path(scratch, "real"), paths.home())),
        ):
            rows.append((name, round(statistics.median(told) * 1e3, 1), round(max(told) * 1e3, 1), len(told)))
    render.table(("after the client left", "median ms", "max ms", "times"), rows)


if __name__ == "__main__":
    main()
