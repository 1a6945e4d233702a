"""One child's life: what it dies of and what follows, whether it hangs, what it takes; with real processes.

The memory is made up (:class:`~tests.shelf.Shelf`); the children are fake engines. What lasts seconds is made shorter, never left out.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from supervisor import arbiter as arbiter_module
from supervisor import child, keeper, progress, rundir, scene, watch
from supervisor.arbiter import Arbiter
from supervisor.argv import SOCKET
from supervisor.causes import Cause, Kind
from supervisor.errors import Error, Exit
from supervisor.lifecycle import Owner, State
from supervisor.upstream import Broken, Upstream
from supervisor.vram import Vram
from supervisor.ward import Ward
from tests import fakes
from tests.conftest import WAIT_S
from tests.shelf import CARD, Shelf, ask, place, run, state, turns, until


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch whose patience is a tenth of the shipped one."""
    monkeypatch.setattr(watch, "TICK_S", 0.1)
    monkeypatch.setattr(watch, "SAMPLE_S", 0.2)
    for name, value in {"QUIET_S": 0.5, "GAP_S": 0.7, "ANSWER_S": 0.5, "STOPPED_S": 0.5, "GAP_BATCHES": 0}.items():
        monkeypatch.setattr(progress, name, value)


async def ready(arbiter: Arbiter, name: str) -> Ward:
    ward = arbiter.ward(name)
    await arbiter.ensure_ready(ward)
    return ward


def pid(ward: Ward) -> int:
    assert ward.child is not None
    return ward.child.pid


async def next_child(ward: Ward, before: int) -> None:
    """Wait until another child than that is ready."""
    while ward.state is not State.READY or ward.child is None or ward.child.pid == before:  # noqa: ASYNC110
        await asyncio.sleep(0.005)


# A death and what follows.


def test_a_killed_child_is_started_again_and_its_cause_stays_to_be_read(shelf: Shelf) -> None:
    shelf.add("a").ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await ready(arbiter, "a")
            before = pid(a)
            os.kill(before, signal.SIGKILL)
            await next_child(a, before)
            assert a.restarts == 1
            assert a.cause is not None
            assert a.cause.kind is Kind.OUTSIDE
            assert "cause" not in a.said()  # which is of now
            assert await ask(arbiter, "a") == "answered 200"

    run(test)


def test_starts_that_serve_are_never_given_up(shelf: Shelf) -> None:
    shelf.add("a").ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await ready(arbiter, "a")
            for _ in range(8):  # more than the budget has
                assert await ask(arbiter, "a") == "answered 200"
                before = pid(a)
                os.kill(before, signal.SIGABRT)
                await next_child(a, before)
            assert a.restarts == 8

    run(test)


def test_a_life_that_served_makes_the_budget_whole_however_it_ends(shelf: Shelf) -> None:
    shelf.add("a").ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await ready(arbiter, "a")
            for _ in range(4):
                a.budget.ended(time.monotonic(), 0.0, useful=False)
            assert await ask(arbiter, "a") == "answered 200"
            before = pid(a)
            arbiter.renew(a, "of a test")  # and not by dying, after which it is asked how long to wait
            await next_child(a, before)
            assert a.budget.ended(time.monotonic(), 0.0, useful=False) == a.budget.first_delay_s / 2

    run(test)


def test_what_dies_at_every_start_is_given_up_with_its_last_lines_and_tried_once_later(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arbiter_module, "REARM_S", 0.3)
    shelf.add("a", fake={"start_exit": -6, "start_log": "GGML_ASSERT(n > 0) failed"}).ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = arbiter.ward("a")
            a.budget.first_delay_s = 0.01
            await state(a, State.FAILED)
            assert shelf.starts("a") == 6
            assert a.unavailable is not None
            assert "GGML_ASSERT(n > 0) failed" in a.unavailable.log
            assert (a.unavailable.status, a.unavailable.retry) == (503, None)
            assert a.why is not None
            await turns()
            assert a.again_s is not None
            await until(lambda: shelf.starts("a") == 7 and a.state is State.FAILED)
            shelf.knobs["a"] = {}
            fakes.tune(shelf.folder("a"))
            await ready_again(arbiter, a)
            assert await ask(arbiter, "a") == "answered 200"
            assert a.budget._on_trial

    async def ready_again(arbiter: Arbiter, a: Ward) -> None:
        await state(a, State.READY)

    run(test)


def test_a_request_s_own_preset_is_tried_again_by_a_request_only(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arbiter_module, "REARM_S", 0.2)
    shelf.add("a", fake={"start_exit": -6, "fail_starts": 6})

    async def test() -> None:
        async with shelf.run() as arbiter:
            arbiter.ward("a").budget.first_delay_s = 0.01
            assert (await ask(arbiter, "a")).startswith("refused 503")
            a = await state(arbiter.ward("a"), State.STOPPED)
            await asyncio.sleep(0.1)
            assert shelf.starts("a") == 6
            assert a.unavailable is None
            assert await ask(arbiter, "a") == "answered 200"

    run(test)


def test_what_is_given_up_for_good_is_tried_again_when_its_files_change(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arbiter_module, "REREAD_S", 0.05)
    shelf.add("a", fake={"start_exit": 1, "start_log": "error: invalid argument: --bogus", "fail_starts": 1}).ordered = ("a",)
    stale: list[bool] = []
    monkeypatch.setattr("supervisor.catalog.Launch.is_stale", lambda _: bool(stale))

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await state(arbiter.ward("a"), State.FAILED)
            await asyncio.sleep(0.2)
            assert (shelf.starts("a"), a.again_s) == (1, None)
            assert a.unavailable is not None
            assert a.unavailable.retry is False
            stale.append(True)
            await state(a, State.READY)

    run(test)


# Less memory than was planned.


@pytest.mark.parametrize(
    "fake",
    [
        {"oom_at_load": True, "fail_starts": 1},
        {"die_warming": True, "die_log": fakes.CUDA_OOM, "die_exit": -6, "fail_only": [1]},
    ],
    ids=["at load", "at warm-up"],
)
def test_out_of_memory_gives_something_up_and_waits_for_nothing(shelf: Shelf, fake: dict[str, Any]) -> None:
    shelf.add("a", fake=fake).ordered = ("a",)
    shelf.smaller["a"] = [3]

    async def test() -> None:
        async with shelf.run() as arbiter:
            told: list[str] = []
            arbiter.listeners.add(lambda said: told.append(said["state"]))
            a = await ready(arbiter, "a")
            assert [kind for _, kind in shelf.asked_down] == [Kind.DEVICE_MEMORY]
            states = [state for state, _ in itertools.groupby(told)]  # a load tells how far it is
            assert states == ["starting", "stopping", "stopped", "starting", "ready"]
            assert a.launch is not None
            assert a.launch.needs["host"] == 3 << 30
            assert a.cause is not None
            assert "memory ran out" in a.cause.text
            assert a.wanted is Owner.USER

    run(test)


def test_out_of_memory_with_nothing_left_to_give_up_waits_for_memory(shelf: Shelf) -> None:
    shelf.add("a", fake={"oom_at_load": True, "fail_starts": 3}).ordered = ("a",)
    shelf.smaller["a"] = [3]

    async def test() -> None:
        async with shelf.run() as arbiter:
            arbiter.ward("a").budget.first_delay_s = 0.01
            a = await ready(arbiter, "a")
            assert (len(shelf.asked_down), a.restarts) == (3, 2)

    run(test)


def test_out_of_memory_while_it_runs_gives_something_up(shelf: Shelf) -> None:
    shelf.add("a").ordered = ("a",)
    shelf.smaller["a"] = [3]

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await ready(arbiter, "a")
            assert await ask(arbiter, "a", die_after_tokens=1, die_log="CUDA error: out of memory") == "broken"
            await until(lambda: shelf.asked_down and a.state is State.READY)
            assert shelf.sizes["a"] == 3

    run(test)


def test_an_allocation_that_fails_in_a_decode_ends_nothing_by_itself_and_is_noticed(shelf: Shelf, quick: None) -> None:
    shelf.add("a").ordered = ("a",)
    shelf.smaller["a"] = [3]

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await ready(arbiter, "a")
            before = pid(a)
            assert a.launch is not None
            with a.launch.log.open("a") as log:
                log.write(f"{fakes.CUDA_OOM}\n")
            await next_child(a, before)
            assert shelf.sizes["a"] == 3

    run(test)


def test_one_illegal_access_is_borne_and_a_second_one_gives_something_up(shelf: Shelf) -> None:
    shelf.add("a").ordered = ("a",)
    shelf.smaller["a"] = [3]

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await ready(arbiter, "a")
            for count in (0, 1):
                before = pid(a)
                assert await ask(arbiter, "a", die_after_tokens=1) == "broken"
                await next_child(a, before)
                assert len(shelf.asked_down) == count

    run(test)


def test_the_user_who_asks_anew_gets_what_was_given_up(shelf: Shelf) -> None:
    shelf.add("a").add("b")

    async def test() -> None:
        async with shelf.run() as arbiter:
            arbiter.want("a")
            await ready(arbiter, "a")
            arbiter.restart(arbiter.ward("a"))
            assert await ask(arbiter, "b") == "answered 200"
            assert shelf.forgot == ["a", "a"]  # and not b, which a request asked for

    run(test)


# The card.


def test_the_next_start_waits_until_the_driver_has_the_memory_back(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.add("a", device=CARD).ordered = ("a",)
    shelf.memory[CARD] = 8
    held: dict[int, int] = {}

    def holds(_: Vram, pid: int) -> bool:
        held[pid] = held.get(pid, 0) + 1
        return held[pid] < 4

    monkeypatch.setattr(Vram, "holds", holds)
    monkeypatch.setattr(keeper, "RELEASE_POLL_S", 0.01)

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await ready(arbiter, "a")
            before = pid(a)
            os.kill(before, signal.SIGKILL)
            await next_child(a, before)
            assert held == {before: 4}

    run(test)


def test_one_that_came_up_without_its_card_is_a_failure(shelf: Shelf) -> None:
    shelf.add("a", device=CARD, fake={"allocates": {"CPU_Mapped model": 93.8, "CPU KV": 360.0}}).ordered = ("a",)
    shelf.memory[CARD] = 8

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await state(arbiter.ward("a"), State.FAILED)
            assert a.cause is not None
            assert a.cause.kind is Kind.NO_CARD
            assert a.unavailable is not None
            assert "without its card" in a.unavailable.message
            await turns()
            assert a.again_s is not None  # the driver may be mended

    run(test)


def test_after_the_machine_slept_an_idle_card_is_asked_for_a_token(
    shelf: Shelf, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = [0.0]
    monkeypatch.setattr(scene, "suspended_s", lambda: slept[0])
    monkeypatch.setattr(watch, "DECODE_S", 0.5)
    shelf.add("a", device=CARD, fake={"healthy_requests": 2, "headers_only": True, "prefill_s": 600}).ordered = ("a",)
    shelf.memory[CARD] = 8

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await ready(arbiter, "a")
            before = pid(a)
            slept[0] += 3600
            await until(lambda: len(fakes.events(shelf.folder("a"), "request", path="/completion")) == 2)
            await asyncio.sleep(0.3)
            assert pid(a) == before
            slept[0] += 3600
            await next_child(a, before)
            assert a.cause is not None
            assert (a.cause.kind, a.cause.blames_request) == (Kind.NO_CARD, False)
            assert "since the machine slept" in a.cause.text

    run(test)


# Hangs.


@pytest.mark.parametrize("slots", [False, True], ids=["its counters stand still", "and it doesn't answer"])
def test_a_silent_stream_of_an_idle_engine_is_a_hang(shelf: Shelf, quick: None, slots: bool) -> None:
    shelf.add("a", fake={"slots_never_answer": slots}).ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await ready(arbiter, "a")
            before = pid(a)
            assert await ask(arbiter, "a", stall_after_tokens=1) == "broken"
            await next_child(a, before)
            assert a.cause is not None
            assert a.cause.kind is Kind.HANG
            assert a.cause.blames_request

    run(test)


@pytest.mark.parametrize("busy", [False, True])
def test_a_stopped_process_is_ended_also_when_nobody_asks(shelf: Shelf, quick: None, busy: bool) -> None:
    shelf.add("a").ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter, asyncio.TaskGroup() as group:
            a = await ready(arbiter, "a")
            before = pid(a)
            asking = group.create_task(ask(arbiter, "a", pace_s=0.02, tokens=100_000)) if busy else None
            await until(lambda: not busy or fakes.events(shelf.folder("a"), "first_byte"))
            os.kill(before, signal.SIGSTOP)
            await next_child(a, before)
            assert asking is None or await asking == "broken"
            assert a.cause is not None
            assert not a.cause.blames_request

    run(test)


def test_what_computes_in_silence_is_no_hang(shelf: Shelf, quick: None) -> None:
    """A long first batch: no byte, no counter moves, /slots is silent; but it burns CPU."""
    shelf.add("a", fake={"slots_never_answer": True}).ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await ready(arbiter, "a")
            before = pid(a)
            assert await ask(arbiter, "a", prefill_s=4.0, spin=True) == "answered 200"
            assert pid(a) == before

    run(test)


def test_a_prompt_whose_counters_move_is_no_hang(shelf: Shelf, quick: None) -> None:
    shelf.add("a").ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await ready(arbiter, "a")
            before = pid(a)
            assert await ask(arbiter, "a", "word " * 500, prefill_s=4.0, prefill_steps=100) == "answered 200"
            assert pid(a) == before

    run(test)


def test_when_llmctl_itself_did_not_run_nobody_is_blamed(shelf: Shelf, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop lags all the time: no look says anything."""
    monkeypatch.setattr(watch, "LATE_S", -1e9)
    shelf.add("a").ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await ready(arbiter, "a")
            before = pid(a)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(4):
                    await ask(arbiter, "a", stall_after_tokens=1)
            assert pid(a) == before

    run(test)


def test_a_load_that_does_nothing_is_given_up_early(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOAD_IDLE_S", 2.0)
    monkeypatch.setattr(keeper, "PATIENT_S", 0.0)
    shelf.add("a", fake={"never_healthy": True, "fail_only": [1]}).ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await ready(arbiter, "a")
            assert a.cause is not None
            assert "neither computed nor read" in a.cause.text

    run(test)


@pytest.mark.parametrize("fake", [{"load_s": 1.0}, {"prefill_s": 1.0}], ids=["while it loads", "while it warms up"])
def test_a_process_that_is_stopped_before_it_is_ready_is_ended(shelf: Shelf, quick: None, fake: dict[str, Any]) -> None:
    shelf.add("a", fake=fake).ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await state(arbiter.ward("a"), State.STARTING)
            before = pid(a)
            await until(lambda: fakes.events(shelf.folder("a"), "request" if "prefill_s" in fake else "start"))
            os.kill(before, signal.SIGSTOP)
            await next_child(a, before)
            assert a.cause is not None
            assert (a.cause.kind, "SIGSTOP" in a.cause.text) == (Kind.OUTSIDE, True)

    run(test)


def test_an_engine_that_was_told_to_stop_is_replaced_as_soon_as_somebody_comes(shelf: Shelf) -> None:
    """A SIGTERM from outside closes its listener, and it waits for its clients for ever."""
    shelf.add("a").ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter, asyncio.TaskGroup() as group:
            a = await ready(arbiter, "a")
            before = pid(a)
            stuck = group.create_task(ask(arbiter, "a", pace_s=0.02, tokens=100_000))
            await until(lambda: fakes.events(shelf.folder("a"), "first_byte"))
            os.kill(before, signal.SIGTERM)
            fakes.wait_event(shelf.folder("a"), "signal")
            began_s = time.monotonic()
            assert await ask(arbiter, "a") == "broken"  # the proxy would try again
            await next_child(a, before)
            assert time.monotonic() - began_s < progress.QUIET_S  # nobody waited for silence
            assert await stuck == "broken"
            assert a.cause is not None
            assert a.cause.kind is Kind.OUTSIDE

    run(test)


# Renewed when idle.


def test_a_child_whose_socket_is_gone_is_renewed_when_its_requests_have_ended(shelf: Shelf, quick: None) -> None:
    shelf.add("a").ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter, asyncio.TaskGroup() as group:
            a = await ready(arbiter, "a")
            before = pid(a)
            running = group.create_task(ask(arbiter, "a", pace_s=0.02, tokens=50))
            await until(lambda: fakes.events(shelf.folder("a"), "first_byte"))
            assert a.child is not None
            a.child.socket.unlink()
            assert await ask(arbiter, "a") == "broken"
            await state(a, State.DRAINING)
            assert await running == "answered 200"
            await next_child(a, before)

    run(test)


def test_a_child_that_grew_is_renewed_once_when_it_is_idle(shelf: Shelf, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LEAST_GROWTH", 20 << 20)
    shelf.add("a", 0.02, fake={"grow_mib": 100}).ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await ready(arbiter, "a")
            before = pid(a)
            assert await ask(arbiter, "a") == "answered 200"
            await next_child(a, before)
            before = pid(a)
            assert await ask(arbiter, "a") == "answered 200"
            await until(lambda: a.own_bytes is not None and a.own_bytes > 100 << 20)
            await asyncio.sleep(0.5)
            assert pid(a) == before  # the plan is wrong, and another child would mend nothing

    run(test)


def test_a_flood_of_log_ends_it(shelf: Shelf, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "FLOOD_S", 0.5)
    shelf.add("a", fake={"flood_bytes_s": 50_000_000}).ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await ready(arbiter, "a")
            before = pid(a)
            await next_child(a, before)
            assert a.cause is not None
            assert "of log a second" in a.cause.text

    run(test)


# What the user does.


def test_restart_ends_nobody_s_request_and_keeps_those_that_come(shelf: Shelf) -> None:
    shelf.add("a").ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter, asyncio.TaskGroup() as group:
            a = await ready(arbiter, "a")
            before = pid(a)
            running = group.create_task(ask(arbiter, "a", pace_s=0.02, tokens=50))
            await until(lambda: fakes.events(shelf.folder("a"), "first_byte"))
            assert arbiter.restart() == (a,)
            late = group.create_task(ask(arbiter, "a"))
            assert await running == await late == "answered 200"
            assert pid(a) != before
            assert (a.restarts, a.wanted) == (0, Owner.USER)

    run(test)


def test_restart_brings_back_what_only_a_request_had_asked_for(shelf: Shelf) -> None:
    shelf.add("a")

    async def test() -> None:
        async with shelf.run() as arbiter:
            assert await ask(arbiter, "a") == "answered 200"
            a = arbiter.ward("a")
            before = pid(a)
            arbiter.restart()
            await next_child(a, before)
            assert a.wanted is Owner.REQUEST

    run(test)


@pytest.mark.parametrize("all_of_them", [False, True])
def test_drain_holds_requests_until_restart(shelf: Shelf, all_of_them: bool) -> None:
    shelf.add("a").add("b").ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter, asyncio.TaskGroup() as group:
            a = await ready(arbiter, "a")
            arbiter.drain(*(() if all_of_them else (a,)))
            await state(a, State.STOPPED)
            held = [group.create_task(ask(arbiter, name)) for name in "ab"]
            if all_of_them:
                await asyncio.sleep(0.3)
                assert not held[1].done()
            else:
                assert await held[1] == "answered 200"
            assert not held[0].done()
            assert shelf.starts("a") == 1
            arbiter.restart()
            for each in held:
                assert await each == "answered 200"

    run(test)


def test_drain_ends_also_one_that_is_being_ended_for_its_silence(shelf: Shelf, quick: None) -> None:
    """Else it would be started again, and held up for ever."""
    shelf.add("a").ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter, asyncio.TaskGroup() as group:
            a = await ready(arbiter, "a")
            asking = group.create_task(ask(arbiter, "a", stall_after_tokens=1))
            await state(a, State.STOPPING)
            arbiter.drain(a)
            await state(a, State.STOPPED)
            assert await asking == "broken"
            await turns()
            assert (a.keeper, shelf.starts("a")) == (None, 1)

    run(test)


def test_what_was_up_and_finds_no_room_any_more_is_tried_again_later(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arbiter_module, "REARM_S", 0.3)
    shelf.add("a", 6).ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await ready(arbiter, "a")
            shelf.memory["host"] = 5  # something else grew
            arbiter.renew(a, "of a test")
            await until(lambda: a.problem)
            assert a.state is State.STOPPED
            shelf.memory["host"] = 10
            await state(a, State.READY)
            assert a.wanted is Owner.USER

    run(test)


def test_what_found_no_way_to_start_is_tried_again_when_its_files_change_and_stays_the_user_s(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arbiter_module, "REREAD_S", 0.05)
    shelf.add("a").ordered = ("a",)
    stale: list[bool] = []
    monkeypatch.setattr("supervisor.catalog.Launch.is_stale", lambda _: bool(stale))

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await ready(arbiter, "a")
            shelf.problems["a"] = Error("its model is not on this machine", exit=Exit.MODEL)
            arbiter.renew(a, "of a test")
            await until(lambda: a.problem)
            del shelf.problems["a"]
            await asyncio.sleep(0.2)
            assert a.state is State.STOPPED
            stale.append(True)
            await state(a, State.READY)
            stale.clear()
            assert a.wanted is Owner.USER
            shelf.problems["a"] = Error("its model is not on this machine", exit=Exit.MODEL)
            arbiter.renew(a, "of a test")
            await until(lambda: a.problem)
            del shelf.problems["a"]
            assert await ask(arbiter, "a") == "answered 200"
            assert a.wanted is Owner.USER  # whoever brought it back

    run(test)


def test_a_preset_that_changed_is_renewed_only_for_another_command_line_that_fits(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arbiter_module, "REREAD_S", 0.05)
    shelf.add("a", 4).add("b", 4).ordered = ("a", "b")

    def edit(**changes: Any) -> None:
        shelf.presets = {**shelf.presets, "a": dataclasses.replace(shelf.presets["a"], **changes)}

    async def test() -> None:
        async with shelf.run() as arbiter:
            a, b = await ready(arbiter, "a"), await ready(arbiter, "b")
            before = pid(a), pid(b)
            edit(queue=7)
            await until(lambda: a.line.admission.limit == 7)
            assert a.preset.queue == 7
            shelf.problems["a"] = Error("it needs 99 GiB too much", exit=Exit.NO_FIT)
            edit(slots=8)
            await until(lambda: "goes on as it was" in caplog.text)
            assert (pid(a), pid(b)) == before
            del shelf.problems["a"]
            edit(slots=3)
            await next_child(a, before[0])
            assert (a.preset.slots, pid(b)) == (3, before[1])

    run(test)


def test_restart_brings_back_what_was_switched_to_and_not_what_gave_way_to_it(shelf: Shelf) -> None:
    shelf.add("a", 6).add("b", 6).ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            await ready(arbiter, "a")
            arbiter.want("b")
            b = await ready(arbiter, "b")
            before = pid(b)
            assert arbiter.restart() == (b,)
            await next_child(b, before)
            assert (b.wanted, arbiter.ward("a").state) == (Owner.USER, State.STOPPED)

    run(test)


def test_restart_after_a_drain_of_all_brings_back_what_ran_then(shelf: Shelf) -> None:
    """And not whatever somebody has asked for at some time, which would take the others' memory."""
    shelf.add("a", 6).add("b", 6).ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            assert await ask(arbiter, "b") == "answered 200"
            assert await ask(arbiter, "a") == "answered 200"
            a, b = arbiter.ward("a"), arbiter.ward("b")
            arbiter.drain()
            await state(a, State.STOPPED)
            assert arbiter.restart() == (a,)
            await ready(arbiter, "a")
            assert (b.held, shelf.starts("b")) == (False, 1)
            assert await ask(arbiter, "b") == "answered 200"

    run(test)


# What only seldom comes together.


def test_one_whose_smaller_plan_cannot_be_made_ends_nobody_else(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.add("a", fake={"oom_at_load": True, "fail_starts": 1}).add("b").ordered = ("b",)

    def step_down(name: str, kind: Kind) -> str | None:
        raise Error("there is no kernel for such a cache", exit=Exit.CONFIG)

    monkeypatch.setattr(shelf, "step_down", step_down)

    async def test() -> None:
        async with shelf.run() as arbiter:
            b = await ready(arbiter, "b")
            before = pid(b)
            arbiter.ward("a").budget.first_delay_s = 0.01
            assert await ask(arbiter, "a") == "answered 200"
            assert pid(b) == before

    run(test)


def test_a_machine_without_descriptors_ends_nothing_that_runs(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arbiter_module, "REREAD_S", 0.05)
    shelf.add("a").add("b").ordered = ("a",)
    looks: list[int] = []

    def refresh() -> None:
        looks.append(1)
        if len(looks) < 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(shelf, "refresh", refresh)

    async def test() -> None:
        async with shelf.run() as arbiter:
            await ready(arbiter, "a")
            shelf.problems["b"] = OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # type: ignore[assignment]
            assert await ask(arbiter, "b") == "refused 503 cannot_start"
            del shelf.problems["b"]
            await until(lambda: len(looks) > 3)
            for name in "ab":
                assert await ask(arbiter, name) == "answered 200"

    run(test)


def test_a_child_whose_folder_is_something_else_by_now_is_seen_to_end(shelf: Shelf) -> None:
    shelf.add("a").ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await ready(arbiter, "a")
            assert a.child is not None
            folder = a.child.folder
            folder.rename(folder.with_name("away"))
            folder.write_text("")
            os.kill(pid(a), signal.SIGKILL)
            await state(a, State.BACKOFF)
            folder.unlink()
            await state(a, State.READY)

    run(test)


def test_an_engine_that_outlives_the_script_that_started_it_is_ended(shelf: Shelf) -> None:
    shelf.add("a").ordered = ("a",)
    script = shelf.servers["a"] = shelf.root / "engine.sh"
    script.write_text(f'#!/bin/sh\n"{fakes.install(shelf.folder("a"))}" "$@"\nexit $?\n')
    script.chmod(0o755)

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await ready(arbiter, "a")
            engine = rundir.Process.of(fakes.events(shelf.folder("a"), "start")[0]["pid"])
            before = pid(a)
            assert engine.pid != before
            os.kill(before, signal.SIGKILL)
            await next_child(a, before)
            await until(lambda: not engine.alive())

    run(test)


def test_who_needs_no_memory_any_more_does_not_open_the_line_of_a_dead_child(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A died while it gave way to B, and what that means is still being worked out: a request let in then would go round for ever."""
    shelf.add("a", 6).add("b", 6).ordered = ("a",)
    known = threading.Event()

    def step_down(name: str, kind: Kind) -> str | None:
        known.wait(WAIT_S)
        return None

    monkeypatch.setattr(shelf, "step_down", step_down)

    async def test() -> None:
        async with shelf.run() as arbiter, asyncio.TaskGroup() as group:
            a = await ready(arbiter, "a")

            async def inside() -> None:
                async with place(arbiter, "a"):
                    await until(known.is_set)

            group.create_task(inside())
            await until(lambda: a.line.admission.inside)
            asking = group.create_task(ask(arbiter, "b"))
            await state(a, State.DRAINING)
            os.kill(pid(a), signal.SIGSEGV)
            await until(lambda: a.child is None)
            asking.cancel()
            await until(lambda: a.gives_way_to is None)
            assert not a.line.admission.opened
            known.set()
            assert await ask(arbiter, "a") == "answered 200"

    run(test)


def test_drain_does_not_wait_for_those_who_are_still_at_the_child_before(shelf: Shelf) -> None:
    """Else it is up and open before they have left, and traffic that never pauses keeps it up."""
    shelf.add("a", fake={"load_s": 0.3}).ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await ready(arbiter, "a")
            async with place(arbiter, "a"):
                os.kill(pid(a), signal.SIGKILL)
                await state(a, State.STARTING)
                arbiter.drain(a)
                await state(a, State.STOPPED, State.READY)
                assert a.state is State.STOPPED

    run(test)


def test_a_preset_that_changes_while_it_waits_for_room_starts_as_it_is_now(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arbiter_module, "REREAD_S", 0.05)
    shelf.add("a", 6).add("b", 6).ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter, asyncio.TaskGroup() as group:
            a = await ready(arbiter, "a")
            running = group.create_task(ask(arbiter, "a", pace_s=0.02, tokens=50))
            await until(lambda: fakes.events(shelf.folder("a"), "first_byte"))
            late = group.create_task(ask(arbiter, "b"))
            await state(a, State.DRAINING)
            shelf.presets = {**shelf.presets, "b": dataclasses.replace(shelf.presets["b"], slots=3)}
            await until(lambda: arbiter.ward("b").asked.slots == 3)
            assert not running.done()
            assert await late == "answered 200"
            assert arbiter.ward("b").preset.slots == 3

    run(test)


def test_a_question_to_a_child_that_was_closed_has_no_answer(shelf: Shelf) -> None:
    shelf.add("a").ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = await ready(arbiter, "a")
            upstream, before = a.upstream, pid(a)
            assert upstream is not None
            os.kill(before, signal.SIGKILL)
            await next_child(a, before)
            assert await upstream.ask("/tokenize", b"{}") is None

    run(test)


DYING = """
import ctypes, os, platform, socket, threading, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(%r)
listener.listen()
open("listens", "w").close()
door, _ = listener.accept()
door.recv(1)
threading.Thread(target=lambda: (time.sleep(1.5), os._exit(3))).start()
door.close(), listener.close()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit: of this thread only
"""
"""Its connections are closed and its end has begun, and takes longer than is waited for one that lives: as with a card's driver."""


def test_a_child_that_takes_long_to_end_is_waited_for(tmp_path: Path) -> None:
    async def test() -> None:
        process = child.spawn("a", (sys.executable, "-c", DYING % SOCKET), os.environ, tmp_path, tmp_path / "log")
        await until((tmp_path / "listens").exists)
        async with Upstream(process) as upstream:
            assert not process.exiting()
            exchange = upstream.request("/", b"{}")
            with pytest.raises(Broken):
                await exchange.head()
            await until(process.exiting)
            assert process.returncode is None
            upstream.bury(Cause("of a test"))
            assert await upstream.fate() == Cause("of a test")
            assert process.returncode == 3

    run(test)
