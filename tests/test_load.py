"""Requests are sent when they are due: by users one after the other, or at their times, whatever is still in work."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from bench.ask import Answer, Ask, Level, Words
from bench.load import Load
from bench.sample import Sample
from tests.test_exchange import END, HEAD, chunk, server


class Writer:
    """A body that says which request it is, and what it was given of answers."""

    def body(self, ask: Ask, answers: Mapping[int, Sequence[str]]) -> tuple[str, dict[str, Any]]:
        given = {piece.of: list(answers.get(piece.of, ())) for piece in ask.pieces if isinstance(piece, Answer)}
        return "/v1/chat/completions", {"number": ask.number, "given": given}


class Server:
    """Answers two words after a while, and notes how many it had at once."""

    def __init__(self, takes_s: float = 0.05) -> None:
        self.takes_s = takes_s
        self.now = self.most = 0
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, body: bytes, writer: asyncio.StreamWriter) -> None:
        self.bodies.append(json.loads(body))
        self.now += 1
        self.most = max(self.most, self.now)
        writer.write(HEAD + chunk("a"))
        await asyncio.sleep(self.takes_s)
        self.now -= 1
        timings = {"cache_n": 1, "prompt_n": 2, "prompt_ms": 1.0, "predicted_n": 2, "predicted_ms": 1.0}
        writer.write(chunk("b", timings=timings) + END)


def ask(number: int, *pieces: Answer, **more: Any) -> Ask:
    return Ask(number=number, prompt=3, answer=2, pieces=(*pieces, Words("x", 3)), **more)


def run(answer: Server, asks: Sequence[Ask], level: Level) -> list[Sample]:
    async def go() -> list[Sample]:
        async with server(answer) as wires:
            return await Load("t", wires, Writer(), began_s=time.perf_counter()).run(asks, level, 0)

    return asyncio.run(go())


def test_users_ask_one_after_the_other() -> None:
    answer = Server()
    found = run(answer, [ask(number) for number in range(9)], Level(users=3))
    assert answer.most == 3
    assert sorted(sample.number for sample in found) == list(range(9))
    assert all(sample.ok and sample.late_ms is None for sample in found)
    first = found[0]
    assert (first.prompt_tokens, first.cached_tokens, first.completion_tokens, first.events) == (3, 1, 2, 2)
    assert (first.target, first.level, first.repetition, first.asked_answer) == ("t", "3 users", 0, 2)
    assert first.ttft_ms is not None
    assert first.last_ms is not None
    assert len(first.gaps_ms) == 1
    assert first.ttft_ms < first.last_ms


def test_requests_come_at_their_time_also_to_a_server_that_is_behind() -> None:
    """It needs half a second for each, and all are there at once."""
    answer = Server(takes_s=0.5)
    asks = [ask(number, at_s=number * 0.02) for number in range(10)]
    found = run(answer, asks, Level(rate=50.0))
    assert answer.most == 10
    by_number = sorted(found, key=lambda sample: sample.number)
    began_s = by_number[0].sent_s
    for sample in by_number:
        assert sample.late_ms is not None
        assert sample.sent_s - began_s == pytest.approx(
            sample.number * 0.02 + (sample.late_ms - (by_number[0].late_ms or 0)) / 1e3, abs=1e-3
        )


def test_a_prompt_is_given_what_was_answered_before_it() -> None:
    answer = Server()
    run(answer, [ask(0), ask(1, Answer(0, 2))], Level(users=1))
    assert answer.bodies[1]["given"] == {"0": ["a", "b"]}


def test_who_goes_on_from_an_answer_waits_for_its_end_and_is_late() -> None:
    answer = Server(takes_s=0.4)
    found = run(answer, [ask(0, at_s=0.0), ask(1, Answer(0, 2), at_s=0.01), ask(2, at_s=0.02)], Level(rate=1.0))
    assert [body["number"] for body in answer.bodies] == [0, 2, 1]
    assert answer.bodies[2]["given"] == {"0": ["a", "b"]}
    late_ms = {sample.number: sample.late_ms or 0.0 for sample in found}
    assert late_ms[1] > 300


def test_cancelling_leaves_no_connection() -> None:
    async def go() -> None:
        left = asyncio.Event()
        async with server(Server(takes_s=600), left) as wires:
            load = Load("t", wires, Writer(), began_s=time.perf_counter())
            task = asyncio.get_running_loop().create_task(load.run([ask(0)], Level(users=1), 0))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(go())
