"""The line before a child: who waits hears of it, is let in, refused, or gives up; and nothing is left of one that leaves."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from supervisor import line as line_module
from supervisor.admission import Ticket
from supervisor.errors import Error, Exit
from supervisor.line import Line
from tests.conftest import WAIT_S


@dataclass(eq=False)
class Visitor:
    """A request's client that counts what befalls it."""

    stalled_for_s: float = 0.0
    words: int = 0
    given_up: int = 0
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    ticket: Ticket = field(default_factory=Ticket)

    def keep_alive(self) -> None:
        self.words += 1
        self.heard.set()

    def stalled_s(self, now_s: float) -> float:
        assert now_s > 0
        return self.stalled_for_s

    def give_up(self) -> None:
        self.given_up += 1
        self.heard.set()


@dataclass
class Stirred:
    """Counts how often the line called."""

    times: int = 0

    def __call__(self) -> None:
        self.times += 1


def made(places: int = 1, *, limit: int = 256, max_wait_s: float = 600.0, stir: Callable[[], None] | None = None) -> Line:
    return Line("tiny", places=places, limit=limit, max_wait_s=max_wait_s, stir=stir or Stirred())


def opened(places: int = 1, **more: int | float | Callable[[], None]) -> Line:
    line = made(places, **more)  # type: ignore[arg-type]
    line.open(places)
    return line


async def turns() -> None:
    """Let everybody who can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await test()

    asyncio.run(bounded())


def nothing_left(line: Line) -> bool:
    return (line.idle, line._grants, line._guests, line.admission.busy) == (True, {}, {}, 0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words come after a millisecond, for those who wait for them."""
    monkeypatch.setattr(line_module, "FIRST_WORD_S", 0.001)
    monkeypatch.setattr(line_module, "WORDS_S", 0.001)


def test_who_finds_a_place_goes_in_without_a_turn_of_the_loop() -> None:
    async def test() -> None:
        line, visitor = opened(), Visitor()
        with pytest.raises(StopIteration):
            line.enter(visitor.ticket, visitor).send(None)
        assert not line.idle
        line.leave(visitor.ticket)
        assert nothing_left(line)

    run(test)


def test_those_who_wait_are_let_in_one_by_one_in_order() -> None:
    async def test() -> None:
        line, order = opened(2), []
        visitors = [Visitor() for _ in range(20)]

        async def visit(number: int) -> None:
            visitor = visitors[number]
            try:
                await line.enter(visitor.ticket, visitor)
                order.append(number)
                assert line.admission.inside <= 2
                await asyncio.sleep(0)
            finally:
                line.leave(visitor.ticket, served=True)

        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(visit(number))
        assert order == list(range(20))
        assert nothing_left(line)
        assert line.admission.service_s is not None

    run(test)


def test_a_closed_line_holds_everybody_until_it_opens() -> None:
    async def test() -> None:
        line, visitors = made(), [Visitor() for _ in range(3)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(line.enter(each.ticket, each)) for each in visitors]
            await turns()
            assert (line.admission.waiting, line.admission.inside, line.idle) == (3, 0, False)
            line.open(2)
            await turns()
            assert [task.done() for task in tasks] == [True, True, False]
            line.close()
            line.leave(visitors[0].ticket)
            line.leave(visitors[1].ticket)
            await turns()
            assert not tasks[2].done()
            line.open(2)
        line.leave(visitors[2].ticket)
        assert nothing_left(line)

    run(test)


def test_a_closed_line_takes_as_many_more_as_have_a_place_when_it_opens() -> None:
    async def test() -> None:
        line, visitors, late = made(2, limit=1), [Visitor() for _ in range(3)], Visitor()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(line.enter(each.ticket, each)) for each in visitors]
            await turns()
            for is_open in (False, True):
                if is_open:
                    line.open(2)
                    await turns()
                with pytest.raises(Error) as caught:
                    await line.enter(late.ticket, late)
                line.leave(late.ticket)
                assert caught.value.code == "queue_full"
            assert [task.done() for task in tasks] == [True, True, False]
            line.leave(visitors[0].ticket)
        for visitor in visitors:
            line.leave(visitor.ticket)
        assert nothing_left(line)

    run(test)


def test_it_calls_when_somebody_begins_to_wait_at_a_closed_line_and_when_the_last_one_inside_has_left() -> None:
    async def test() -> None:
        stirred = Stirred()
        line, first, second = made(2, stir=stirred), Visitor(), Visitor()
        async with asyncio.TaskGroup() as group:
            group.create_task(line.enter(first.ticket, first))
            await turns()
            assert stirred.times == 1
            line.open(2)
            await line.enter(second.ticket, second)
        assert stirred.times == 1
        line.leave(first.ticket)
        assert stirred.times == 1
        line.leave(second.ticket)
        assert stirred.times == 2

    run(test)


def test_it_calls_when_the_last_one_inside_has_left_a_closed_line_at_which_others_wait() -> None:
    """Else a child that is to give way would never be seen to be idle."""

    async def test() -> None:
        stirred = Stirred()
        line, inside, waiting = opened(stir=stirred), Visitor(), Visitor()
        await line.enter(inside.ticket, inside)
        line.close()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(line.enter(waiting.ticket, waiting))
            await turns()
            before = stirred.times
            line.leave(inside.ticket)
            assert stirred.times == before + 1
            line.open(1)
            await task
        line.leave(waiting.ticket)
        assert nothing_left(line)

    run(test)


def test_what_the_call_does_may_refuse_the_one_that_just_came() -> None:
    async def test() -> None:
        problem = Error("it is broken", exit=Exit.CHILD, status=503)
        line = made(stir=lambda: line.refuse(problem))
        visitor = Visitor()
        with pytest.raises(Error, match="it is broken"):
            await line.enter(visitor.ticket, visitor)
        line.leave(visitor.ticket)
        assert nothing_left(line)

    run(test)


def test_the_time_since_which_nobody_is_there() -> None:
    async def test() -> None:
        line, visitor = opened(), Visitor()
        before_s = line.idle_since_s
        await line.enter(visitor.ticket, visitor)
        await asyncio.sleep(0.002)
        line.leave(visitor.ticket)
        assert line.idle_since_s > before_s

    run(test)


# Refusals.


def test_a_full_queue_is_a_429_with_the_time_after_which_to_come_again() -> None:
    async def test() -> None:
        line, inside, waiting, late = opened(limit=1), Visitor(), Visitor(), Visitor()
        await line.enter(inside.ticket, inside)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(line.enter(waiting.ticket, waiting))
            await turns()
            with pytest.raises(Error) as caught:
                await line.enter(late.ticket, late)
            line.leave(late.ticket)
            assert (line.admission.inside, line.admission.waiting) == (1, 1)
            line.leave(inside.ticket)
            await task
        line.leave(waiting.ticket)
        assert nothing_left(line)
        error = caught.value
        assert (error.exit, error.status, error.code, error.retry_after_s) == (Exit.BUSY, 429, "queue_full", 5)
        assert error.message == "tiny has 1 requests in work and 1 waiting, the most it takes"
        assert error.hint == "send it again in 5 s"

    run(test)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_wait_that_takes_too_long_is_a_429_too(*, is_open: bool) -> None:
    async def test() -> None:
        line, inside, late = made(max_wait_s=0.003), Visitor(), Visitor()
        if is_open:
            line.open(1)
            await line.enter(inside.ticket, inside)
        with pytest.raises(Error) as caught:
            await line.enter(late.ticket, late)
        line.leave(late.ticket)
        line.leave(inside.ticket)
        assert nothing_left(line)
        error = caught.value
        assert (error.exit, error.status, error.code, error.retry_after_s) == (Exit.BUSY, 429, "queue_timeout", 5)

    run(test)


def test_those_who_are_refused_hear_why_and_count_no_more() -> None:
    async def test() -> None:
        problem = Error("it is broken", exit=Exit.CHILD, status=503)
        line, visitors = made(), [Visitor() for _ in range(3)]
        refused: list[Error] = []

        async def visit(visitor: Visitor) -> None:
            try:
                await line.enter(visitor.ticket, visitor)
            except Error as error:
                refused.append(error)
            finally:
                line.leave(visitor.ticket)

        async with asyncio.TaskGroup() as group:
            for visitor in visitors:
                group.create_task(visit(visitor))
            await turns()
            line.refuse(problem)
            assert line.admission.waiting == 0
        assert refused == [problem] * 3
        assert nothing_left(line)

    run(test)


def test_refusing_spares_those_inside_and_those_who_come_later() -> None:
    async def test() -> None:
        line, inside, later = opened(), Visitor(), Visitor()
        await line.enter(inside.ticket, inside)
        line.close()
        line.refuse(Error("it is broken", exit=Exit.CHILD, status=503))
        assert line.admission.inside == 1
        async with asyncio.TaskGroup() as group:
            task = group.create_task(line.enter(later.ticket, later))
            await turns()
            line.leave(inside.ticket)
            line.open(1)
            await task
        line.leave(later.ticket)
        assert nothing_left(line)

    run(test)


# While one waits.


def test_who_waits_hears_a_word_again_and_again_and_then_gets_in() -> None:
    async def test() -> None:
        line, inside, waiting = opened(), Visitor(), Visitor()
        await line.enter(inside.ticket, inside)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(line.enter(waiting.ticket, waiting))
            for _ in range(3):
                waiting.heard.clear()
                await waiting.heard.wait()
            assert not task.done()
            line.leave(inside.ticket)
            await task
        assert (inside.words, waiting.words >= 3) == (0, True)
        line.leave(waiting.ticket)

    run(test)


def test_before_the_first_word_there_is_time_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "FIRST_WORD_S", 600.0)

    async def test() -> None:
        line, inside, waiting = opened(), Visitor(), Visitor()
        await line.enter(inside.ticket, inside)
        async with asyncio.TaskGroup() as group:
            group.create_task(line.enter(waiting.ticket, waiting))
            await asyncio.sleep(0.005)
            line.leave(inside.ticket)
        assert waiting.words == 0
        line.leave(waiting.ticket)

    run(test)


def test_a_client_that_takes_nothing_loses_its_place_while_others_wait() -> None:
    async def test() -> None:
        line = opened(2)
        stalled, reading, waiting = Visitor(stalled_for_s=line_module.STALL_S), Visitor(stalled_for_s=59.9), Visitor()
        await line.enter(stalled.ticket, stalled)
        await line.enter(reading.ticket, reading)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(line.enter(waiting.ticket, waiting))
            await stalled.heard.wait()
            line.leave(stalled.ticket)  # as its request does when it is given up
            await task
        assert (stalled.given_up > 0, reading.given_up, waiting.given_up) == (True, 0, 0)
        line.leave(reading.ticket)
        line.leave(waiting.ticket)
        assert nothing_left(line)

    run(test)


def test_a_client_that_takes_nothing_keeps_its_place_where_nobody_wants_it() -> None:
    async def test() -> None:
        line, stalled = opened(2), Visitor(stalled_for_s=1e6)
        await line.enter(stalled.ticket, stalled)
        await asyncio.sleep(0.005)
        assert stalled.given_up == 0
        line.leave(stalled.ticket)

    run(test)


def test_one_who_waits_is_not_told_to_give_up_its_place() -> None:
    async def test() -> None:
        line, waiting, other = made(), Visitor(stalled_for_s=1e6), Visitor()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(line.enter(each.ticket, each)) for each in (waiting, other)]
            await other.heard.wait()
            line.open(2)
            await asyncio.gather(*tasks)
        assert waiting.given_up == 0
        line.leave(waiting.ticket)
        line.leave(other.ticket)

    run(test)


# Leaving.


@pytest.mark.parametrize("phase", ["waiting", "woken", "inside", "refused", "closed", "let in after a close"])
def test_whoever_is_cancelled_leaves_nothing(phase: str) -> None:
    async def test() -> None:
        line, inside, leaving, next_one = opened(), Visitor(), Visitor(), Visitor()
        if phase != "inside":
            await line.enter(inside.ticket, inside)
        if phase == "closed":
            line.close()

        async def visit(visitor: Visitor) -> None:
            try:
                await line.enter(visitor.ticket, visitor)
                await asyncio.Event().wait()
            finally:
                line.leave(visitor.ticket)

        async with asyncio.TaskGroup() as group:
            one = group.create_task(visit(leaving))
            await turns()
            other = group.create_task(line.enter(next_one.ticket, next_one))
            await turns()
            if phase == "woken":  # the place is its, and it hasn't heard yet
                line.leave(inside.ticket)
                assert not other.done()
            elif phase == "refused":
                line.close()
                line.refuse(Error("it is broken", exit=Exit.CHILD, status=503))
                other.cancel()
            elif phase == "let in after a close":
                line.close()
                line.leave(inside.ticket)
                line.open(1)
                line.close()
            one.cancel()
            await turns()
            assert one.done()
            line.leave(inside.ticket)
            line.open(1)
            with pytest.raises(asyncio.CancelledError) if phase == "refused" else contextlib.nullcontext():
                await other
        line.leave(next_one.ticket)
        line.leave(next_one.ticket)
        assert nothing_left(line)

    run(test)


@pytest.mark.parametrize("seed", range(20))
def test_any_history_ends_with_everybody_served_refused_or_gone(seed: int) -> None:
    """Arrivals, cancellations at any turn, closings, openings and refusals."""

    async def test() -> None:
        draw = random.Random(seed)
        places = draw.randint(1, 4)
        line = made(places, limit=draw.choice([2, 10, 100]))
        ends = {"served": 0, "refused": 0, "cancelled": 0}
        tasks: list[asyncio.Task[None]] = []

        async def visit() -> None:
            visitor = Visitor(ticket=Ticket(draw.choice([0, 1, 1, 2, 9]), draw.choice("abc"), batch=draw.random() < 0.3))
            served = False
            try:
                await line.enter(visitor.ticket, visitor)
                for _ in range(draw.randint(0, 5)):
                    await asyncio.sleep(0)
                served = True
                ends["served"] += 1
            except Error:
                ends["refused"] += 1
            except asyncio.CancelledError:
                ends["cancelled"] += 1
                raise
            finally:
                line.leave(visitor.ticket, served=served)

        async with asyncio.TaskGroup() as group:
            started = 0
            for _ in range(400):
                chance = draw.random()
                if chance < 0.5:
                    tasks.append(group.create_task(visit()))
                    started += 1
                elif chance < 0.65 and tasks:
                    draw.choice(tasks).cancel()
                elif chance < 0.7:
                    line.close()
                elif chance < 0.8:
                    line.open(draw.randint(1, 4))
                elif chance < 0.83 and not line.admission.opened:
                    line.refuse(Error("it is broken", exit=Exit.CHILD, status=503))
                else:
                    await asyncio.sleep(0)
            await turns()
            line.open(places)
        assert ends["served"] > 20
        unstarted = started - sum(ends.values())
        assert unstarted == sum(task.cancelled() for task in tasks) - ends["cancelled"]
        assert nothing_left(line)

    run(test)


def test_it_shows_where_it_is() -> None:
    async def test() -> None:
        assert repr(made(2)) == "<Line tiny <Admission 0/2 busy, 0 waiting, closed>>"

    run(test)
