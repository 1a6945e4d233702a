"""Requests to an llmctl that runs, and two presets that don't fit together: what the tests of swaps and of orders share.

The two don't fit because each has a prompt cache of more than half of what is free. Those are the plan's bytes, the same that decide on a
real box; the fake engine allocates none of them.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2

from supervisor import memory
from supervisor.units import MIB
from tests import console, fakes
from tests.conftest import WAIT_S, Box, Client, until

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
TOO_OLD = {"start_exit": 1, "start_log": "llama_model_load: error loading model: unknown model architecture: 'new'"}
"""A start that fails, and would again."""

Boxes = Callable[..., Box]


def crowd() -> int:
    """MiB of a prompt cache of which two don't fit, and one does."""
    return memory.read().available_bytes * 6 // 10 // MIB


def up(box: Box, *options: str) -> Client:
    """``tiny`` with these options."""
    return box.up(*(word for option in options for word in ("--set", option)))


def crowded(box: Box, *options: str, **others: Any) -> Client:
    """``tiny`` and, beside it in name only, ``other``."""
    size = crowd()
    box.preset("other", **{"cache_ram": size, "hold": 0} | others)
    return up(box, f"cache_ram={size}", *(options or ("hold=0",)))


def ask(client: Client, model: str, path: str = CHAT, **fields: Any) -> httpx2.Response:
    with client.http as http:
        return http.post(path, json={"model": model, "messages": HELLO} | fields)


def said(reply: httpx2.Response) -> tuple[int, str]:
    """Status and code of a refusal."""
    return reply.status_code, reply.json()["error"]["code"]


class Streaming:
    """A stream that is in work, read on a thread of its own."""

    def __init__(self, pool: ThreadPoolExecutor, client: Client, model: str, path: str = CHAT, **fields: Any) -> None:
        self.got = b""
        self.status = 0
        self.clean = False
        body = {"model": model, "messages": HELLO, "stream": True} | fields
        self.done: Future[None] = pool.submit(self._read, client, path, body)

    def _read(self, client: Client, path: str, body: dict[str, Any]) -> None:
        try:
            with client.http as http, http.stream("POST", path, json=body) as reply:
                self.status = reply.status_code
                for piece in reply.iter_raw():
                    self.got += piece
                self.clean = True
        except httpx2.RemoteProtocolError:
            pass

    def whole(self) -> bytes:
        """All of it; it must have come to a clean end."""
        self.done.result(WAIT_S)
        assert (self.status, self.clean) == (200, True), self.got
        assert self.got.endswith(b"data: [DONE]\n\n")
        return self.got

    def last(self) -> tuple[str, dict[str, Any]]:
        """Name and payload of the last event of one that was cut."""
        self.done.result(WAIT_S)
        assert (self.status, self.clean) == (200, False), self.got
        *names, data = self.got.decode().split("\n\n")[-2].split("\n")
        return "".join(names), json.loads(data.removeprefix("data: "))


def starts(box: Box) -> list[str]:
    """Which presets' children were started, in order."""
    return [event["argv"][event["argv"].index("--alias") + 1] for event in fakes.events(box.engine.parent, "start")]


def command(box: Box, *words: str) -> subprocess.CompletedProcess[str]:
    return console.llmctl({"LLMCTL_HOME": str(box.root), "LLMCTL_ENGINE": str(box.engine)}, *words)


@contextmanager
def endless(client: Client, model: str, threads: int = 3) -> Iterator[list[float]]:
    """Traffic without a pause; yields when each answer came. All of them must be good ones."""
    over = threading.Event()
    came: list[float] = []
    wrong: list[object] = []

    def run() -> None:
        while not over.is_set():
            reply = ask(client, model, fake={"tokens": 4, "pace_s": 0.02})
            if reply.status_code != 200:
                wrong.append(reply.text)
            came.append(time.monotonic())

    workers = [threading.Thread(target=run) for _ in range(threads)]
    for each in workers:
        each.start()
    try:
        until(lambda: len(came) > threads)
        yield came
    finally:
        over.set()
        for each in workers:
            each.join(WAIT_S)
    assert wrong == []
