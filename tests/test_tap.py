"""What a running llmctl is asked becomes a trace: with texts while somebody listens, and without any out of its ledger."""

from __future__ import annotations

import asyncio
import json
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bench import tap, trace
from bench.tap import Heard
from supervisor import rundir
from supervisor.errors import Error, Exit
from tests.conftest import WAIT_S, Box, Client

Boxes = Callable[..., Box]


def chat(*said: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(said)]
    return {"model": "tiny", "messages": messages, "stream": True, "max_tokens": 3, **fields}


def nothing(*_: object) -> None:
    """No progress to show."""


def hear(client: Client, ask: Callable[[httpx2.Client], None]) -> Heard:
    """What is told while ``ask`` asks, until llmctl stops."""
    found = rundir.read(client.box.home.run)
    assert found is not None
    heard: list[Heard] = []
    begun = threading.Event()
    listening = threading.Thread(target=lambda: heard.append(asyncio.run(tap.listen(found, 2 * WAIT_S, lambda *_: begun.set()))))
    listening.start()
    assert begun.wait(WAIT_S)
    with client.http as http:
        ask(http)
    client.stop()
    listening.join(WAIT_S)
    return heard[0]


def test_what_is_heard_becomes_a_trace_with_its_texts(fake_box: Boxes, tmp_path: Path) -> None:
    client = fake_box(tokens=3).up()
    bodies = [chat("one"), chat("one", "says", "two"), {"model": "tiny", "prompt": "three", "max_tokens": 2}]

    def ask(http: httpx2.Client) -> None:
        for body in bodies:
            path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
            assert http.post(path, json=body, headers={"Authorization": "Bearer sk-secret"}).status_code == 200
        assert http.post("/v1/chat/completions", json=chat("no", model="nobody")).status_code == 404

    heard = hear(client, ask)
    assert heard.ended
    assert list(heard.bodies.values()) == bodies
    made = tap.trace(client.box.home.ledger, heard, wait_s=30.0, progress=nothing)
    assert [each.body for each in made.requests] == bodies
    assert {each.route for each in made.requests} == {"/v1/chat/completions", "/v1/completions"}
    assert [each.completion_tokens for each in made.requests] == [3, 3, 2]
    assert made.texts
    path = tmp_path / "trace.jsonl"
    trace.write(made, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "sk-secret" not in path.read_text()
    assert trace.read(path) == made


def test_a_ledger_s_window_is_a_trace_without_a_text(fake_box: Boxes, tmp_path: Path) -> None:
    client = fake_box(tokens=3).up()
    since_at = time.time()
    with client.http as http:
        for body in (chat("a question of some length"), chat("a question of some length", "says", "and another")):
            assert http.post("/v1/chat/completions", json=body).status_code == 200
    client.box.closed_records(2)
    made = tap.recorded(client.box.home.ledger, since_at, time.time(), "tiny")
    assert [each.parent for each in made.requests] == [None, 0]
    path = tmp_path / "trace.jsonl"
    trace.write(made, path)
    assert "question" not in path.read_text()
    assert json.loads(path.read_text().splitlines()[0])["texts"] is False
    assert tap.recorded(client.box.home.ledger, since_at, time.time(), "other").requests == ()


def test_listening_ends_when_its_time_is_over(fake_box: Boxes) -> None:
    client = fake_box(tokens=3).up()
    found = rundir.read(client.box.home.run)
    assert found is not None
    heard = asyncio.run(tap.listen(found, 0.3, nothing))
    assert (heard.bodies, heard.ended) == ({}, False)
    assert heard.until_at > heard.since_at


def test_ctrl_c_keeps_what_was_heard(fake_box: Boxes) -> None:
    client = fake_box(tokens=3).up()
    found = rundir.read(client.box.home.run)
    assert found is not None

    async def stopped() -> Heard:
        async with asyncio.TaskGroup() as group:
            begun = asyncio.Event()
            listening = group.create_task(tap.listen(found, WAIT_S, lambda *_: begun.set()), name="listening")
            await begun.wait()
            listening.cancel()
        return listening.result()

    assert asyncio.run(stopped()).ended is False


def test_one_that_does_not_answer_is_named(fake_box: Boxes) -> None:
    client = fake_box(tokens=3).up()
    found = rundir.read(client.box.home.run)
    assert found is not None
    client.stop()
    with pytest.raises(Error, match="doesn't answer at") as caught:
        asyncio.run(tap.listen(found, 5.0, nothing))
    assert caught.value.exit is Exit.BUSY


def test_what_was_dropped_is_known() -> None:
    heard = Heard(0.0)
    heard.take({"id": "a", "path": "/v1/completions", "at_s": 1.0, "body": {"prompt": "x"}})
    heard.take({"dropped": 3})
    heard.take({"dropped": 1})
    assert (list(heard.bodies), heard.dropped) == (["a"], 4)
