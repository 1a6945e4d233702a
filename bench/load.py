"""Asks: so many users one request after the other, or each request when it is due, whatever is still in work.

A request that is due while the server is behind is sent all the same: waiting for the server would hide how late it is (coordinated
omission). Only who goes on from an answer has to have it first, as a client does. How late a request was sent is in its sample.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from bench.ask import Answer, Ask, Level
from bench.exchange import Heard, Wires
from bench.sample import Sample

TIMEOUT_S: Final = 600.0
"""Of one request."""
NEAR_S: Final = 0.0015
"""Before a request is due its time is waited for by turns of the loop: libuv's timers count whole milliseconds."""

Answers = Mapping[int, Sequence[str]]
"""What was answered so far, by request: the text of each event."""


class Writing(Protocol):
    """Makes a request's path and body (``prompts.Writer``)."""

    def body(self, ask: Ask, answers: Answers) -> tuple[str, dict[str, Any]]:
        """Of one request; ``answers`` are those that its pieces may name."""


class Load:
    """One repetition's requests to one server."""

    def __init__(
        self,
        target: str,
        wires: Wires,
        writer: Writing,
        *,
        began_s: float,
        timeout_s: float = TIMEOUT_S,
        done: Callable[[Sample], None] = lambda _: None,
    ) -> None:
        """``began_s`` is the run's beginning by ``time.perf_counter``; ``done`` is told each sample as it is there."""
        self._target = target
        self._wires = wires
        self._writer = writer
        self._began_s = began_s
        self._timeout_s = timeout_s
        self._done = done
        self._answers: dict[int, list[str]] = {}

    async def run(self, asks: Sequence[Ask], level: Level, repetition: int) -> list[Sample]:
        """Send all; the samples in the order of their end. Cancelling ends it, and every connection that is in use."""
        self._answers.clear()
        # Texts are made before anything is measured; only what needs an answer has to wait for it.
        ready = {ask.number: self._writer.body(ask, {}) for ask in asks if not any(isinstance(p, Answer) for p in ask.pieces)}
        found: list[Sample] = []
        ended = {ask.number: asyncio.Event() for ask in asks}

        async def send(ask: Ask, due_s: float | None) -> None:
            for piece in ask.pieces:
                if isinstance(piece, Answer):  # nobody goes on from an answer before its end
                    await ended[piece.of].wait()
            path, body = ready.get(ask.number) or self._writer.body(ask, self._answers)
            late_ms = None if due_s is None else (time.perf_counter() - due_s) * 1e3
            heard = Heard()
            self._answers[ask.number] = heard.texts
            try:
                await self._wires.exchange(path, body, heard, timeout_s=self._timeout_s, leaves_s=ask.leaves_s)
            finally:
                ended[ask.number].set()
            found.append(self._sample(ask, heard, level, repetition, late_ms))
            self._done(found[-1])

        async with asyncio.TaskGroup() as group:
            if level.users is not None:
                left = iter(asks)
                for number in range(level.users):
                    group.create_task(_user(left, send), name=f"user {number}")
            else:
                await self._dispatch(asks, send, group)
        return found

    async def _dispatch(self, asks: Sequence[Ask], send: Callable[[Ask, float], Any], group: asyncio.TaskGroup) -> None:
        start_s = time.perf_counter()
        for ask in asks:
            assert ask.at_s is not None
            due_s = start_s + ask.at_s
            await asyncio.sleep(due_s - NEAR_S - time.perf_counter())
            while time.perf_counter() < due_s:  # noqa: ASYNC110  (nothing happens but time)
                await asyncio.sleep(0)
            group.create_task(send(ask, due_s), name=f"request {ask.number}")

    def _sample(self, ask: Ask, heard: Heard, level: Level, repetition: int, late_ms: float | None) -> Sample:
        def since_ms(at_s: float | None) -> float | None:
            return None if at_s is None else (at_s - heard.sent_s) * 1e3

        read = heard.reading
        return Sample(
            target=self._target,
            level=str(level),
            repetition=repetition,
            number=ask.number,
            sent_s=heard.sent_s - self._began_s,
            late_ms=late_ms,
            status=heard.status,
            error=heard.error,
            id=heard.id,
            ttft_ms=since_ms(heard.first_s),
            ttfo_ms=since_ms(heard.output_s),
            last_ms=since_ms(heard.arrivals_s[-1]) if heard.arrivals_s else None,
            e2e_ms=since_ms(heard.ended_s),
            events=len(heard.arrivals_s),
            gaps_ms=heard.gaps_ms,
            prompt_tokens=read.prompt_tokens,
            cached_tokens=read.cached_tokens,
            completion_tokens=read.completion_tokens,
            draft_tokens=read.draft_tokens,
            draft_accepted=read.draft_accepted,
            prefill_tps=read.prefill_tps,
            decode_tps=read.decode_tps,
            finish_reason=read.finish_reason,
            asked_prompt=ask.prompt,
            asked_answer=ask.answer,
            left=heard.left,
        )


async def _user(asks: Iterator[Ask], send: Callable[[Ask, None], Any]) -> None:
    for ask in asks:
        await send(ask, None)
