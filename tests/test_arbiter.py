"""Which children are up: started when asked for, swapped when memory asks for it, ended without cutting anybody; with real processes.

The memory is made up (:class:`~tests.shelf.Shelf`), and so are the plans' bytes; the children are fake engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from supervisor import arbiter as arbiter_module
from supervisor.admission import Ticket
from supervisor.arbiter import Arbiter
from supervisor.catalog import Launch
from supervisor.child import Child
from supervisor.errors import Error, Exit
from supervisor.lifecycle import Owner, State
from supervisor.placement import HOST
from supervisor.units import GIB, MIB
from tests import fakes
from tests.conftest import WAIT_S
from tests.shelf import CARD, Shelf, Visitor, ask, place, run, state, turns

# What befalls one child ends nobody else.


def test_a_full_disk_under_the_run_folder_ends_no_server(shelf: Shelf) -> None:
    shelf.add("a").ordered = ("a",)

    def full(pids: dict[str, int]) -> None:
        shelf.changed(pids)
        raise OSError(errno.ENOSPC, "No space left on device")

    async def test() -> None:
        async with shelf.run() as arbiter:
            arbiter._children_changed = full
            await arbiter.ensure_ready(arbiter.ward("a"))

    run(test)


def broken_binary(root: Path) -> Path:
    broken = root / "llama-server"
    broken.write_text("no program")
    broken.chmod(0o755)
    return broken


def test_a_binary_that_can_not_run_is_given_up_at_once_with_its_cause(shelf: Shelf) -> None:
    shelf.add("a").ordered = ("a",)
    shelf.servers["a"] = broken_binary(shelf.root)

    async def test() -> None:
        async with shelf.run() as arbiter:
            ward = arbiter.ward("a")
            with pytest.raises(Error) as caught:
                await arbiter.ensure_ready(ward)
            assert (caught.value.exit, caught.value.status, caught.value.retry) == (Exit.CHILD, 503, False)
            assert "can't be run" in caught.value.message
            assert (ward.state, ward.restarts) == (State.FAILED, 0)
            assert ward.cause is not None
            assert ward.cause.text == ward.why

    run(test)


def test_a_process_that_can_not_be_made_waits_for_a_better_time(shelf: Shelf) -> None:
    shelf.add("a").ordered = ("a",)
    (shelf.root / "run").write_text("")

    async def test() -> None:
        async with shelf.run() as arbiter:
            ward = await state(arbiter.ward("a"), State.BACKOFF)
            assert ward.cause is not None
            assert "can't be started" in ward.cause.text

    run(test)


def test_what_the_engine_allocated_is_read_back_and_remembered(shelf: Shelf) -> None:
    sizes = {"CPU_Mapped model": 93.80, "CPU KV": 360.0, "CPU compute": 18.57, "CPU output": 0.75}
    shelf.add("a", fake={"allocates": sizes}).add("b").ordered = ("a", "b")

    async def test() -> None:
        async with shelf.run() as arbiter:
            for name in "ab":
                await arbiter.ensure_ready(arbiter.ward(name))
            found = arbiter.ward("a").allocated
            assert found is not None
            assert shelf.seen == [found]  # a log without buffers is nothing to remember
            assert {term: round(count / MIB, 2) for term, count in found.device.items()} == {
                "weights": 93.8,
                "kv": 360.0,
                "compute": 18.57,
            }
            assert {term: round(count / MIB, 2) for term, count in found.host.items()} == {"output": 0.75}

    run(test)


# Started when asked for.


def test_a_request_starts_its_preset_and_is_held_meanwhile(shelf: Shelf) -> None:
    shelf.add("a", fake={"load_s": 0.1})

    async def test() -> None:
        async with shelf.run() as arbiter:
            assert arbiter.wards == {}
            answers = await asyncio.gather(*(ask(arbiter, "a") for _ in range(5)))
            assert answers == ["answered 200"] * 5
            ward = arbiter.ward("a")
            assert (ward.state, ward.wanted, ward.ordered) == (State.READY, Owner.REQUEST, False)
            assert shelf.starts("a") == 1

    run(test)


def test_a_preset_whose_model_is_not_here_is_not_started(shelf: Shelf) -> None:
    shelf.add("a").missing.add("a")

    async def test() -> None:
        async with shelf.run() as arbiter:
            with pytest.raises(Error) as caught:
                arbiter.ward("a")
            assert (caught.value.status, caught.value.code, caught.value.hint) == (503, "model_not_downloaded", "llmctl pull a")
            assert arbiter.wards == {}
            shelf.missing.clear()
            assert await ask(arbiter, "a") == "answered 200"

    run(test)


def test_what_keeps_a_preset_from_being_planned_refuses_those_who_wait_and_the_next_tries_again(shelf: Shelf) -> None:
    shelf.add("a").problems["a"] = Error("a needs 9 GiB", exit=Exit.NO_FIT, hint="llmctl plan a")

    async def test() -> None:
        async with shelf.run() as arbiter:
            told: list[dict[str, Any]] = []
            arbiter.listeners.add(told.append)
            assert await asyncio.gather(ask(arbiter, "a"), ask(arbiter, "a")) == ["refused 503 does_not_fit"] * 2
            assert len(shelf.spare) == 1  # those who were refused are no reason to plan again
            assert [(said["state"], said["cause"]) for said in told] == [("stopped", "a needs 9 GiB")]
            ward = arbiter.ward("a")
            assert (ward.state, ward.why, ward.line.idle) == (State.STOPPED, "a needs 9 GiB", True)
            with pytest.raises(Error, match="a needs 9 GiB"):
                await arbiter.ensure_ready(ward)
            shelf.problems.clear()
            assert await ask(arbiter, "a") == "answered 200"
            assert ward.why is None

    run(test)


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (Error("no engine", exit=Exit.ENGINE, hint="llmctl build"), "cannot_start"),
        (Error("gone", exit=Exit.MODEL, status=503, code="model_not_downloaded"), "model_not_downloaded"),
    ],
)
def test_a_client_hears_what_kept_it_from_starting(shelf: Shelf, problem: Error, code: str) -> None:
    shelf.add("a").problems["a"] = problem

    async def test() -> None:
        async with shelf.run() as arbiter:
            with pytest.raises(Error) as caught:
                async with place(arbiter, "a"):
                    pass
            error = caught.value
            assert (error.message, error.exit, error.status, error.code) == (problem.message, problem.exit, 503, code)
            assert error.retry is False

    run(test)


def test_one_that_is_given_up_refuses_those_who_wait_and_those_who_come(shelf: Shelf) -> None:
    shelf.add("a", fake={"start_exit": 1, "start_log": "unknown model architecture: 'x'", "load_s": 0.05})

    async def test() -> None:
        async with shelf.run() as arbiter:
            assert await asyncio.gather(ask(arbiter, "a"), ask(arbiter, "a")) == ["refused 503 engine_unavailable"] * 2
            assert await ask(arbiter, "a") == "refused 503 engine_unavailable"
            assert (arbiter.ward("a").state, shelf.starts("a")) == (State.FAILED, 1)
            shelf.knobs["a"] = {}
            arbiter.want("a")  # the user may say otherwise
            await arbiter.ensure_ready(arbiter.ward("a"))
            assert await ask(arbiter, "a") == "answered 200"

    run(test)


def test_one_that_came_by_the_check_just_before_it_was_given_up_does_not_wait_in_vain(shelf: Shelf) -> None:
    """Its prompt was being counted meanwhile."""
    shelf.add("a", fake={"start_exit": 1, "start_log": "unknown model architecture: 'x'"}).ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            ward = await state(arbiter.ward("a"), State.FAILED)
            ticket = Ticket()
            with pytest.raises(Error) as caught:
                await ward.line.enter(ticket, Visitor())
            ward.line.leave(ticket)
            assert caught.value.code == "engine_unavailable"
            assert ward.line.idle

    run(test)


def test_a_child_that_died_is_started_again_and_those_who_wait_are_answered(shelf: Shelf) -> None:
    shelf.add("a", slots=1)

    async def test() -> None:
        async with shelf.run() as arbiter:
            ward = arbiter.ward("a")
            ward.budget.first_delay_s = 0.01
            assert await ask(arbiter, "a") == "answered 200"
            async with asyncio.TaskGroup() as group:
                struck = group.create_task(ask(arbiter, "a", stall_after_tokens=1))
                await turns()
                os.kill(shelf.pids["a"], signal.SIGKILL)
                await state(ward, State.BACKOFF, State.STARTING)
                waiting = [group.create_task(ask(arbiter, "a")) for _ in range(3)]
            assert struck.result() == "broken"
            assert [task.result() for task in waiting] == ["answered 200"] * 3
            assert ward.restarts == 1

    run(test)


# Memory.


def test_what_fits_runs_side_by_side(shelf: Shelf) -> None:
    shelf.add("a").add("b")

    async def test() -> None:
        async with shelf.run() as arbiter:
            assert await asyncio.gather(ask(arbiter, "a"), ask(arbiter, "b")) == ["answered 200"] * 2
            assert {ward.state for ward in arbiter.wards.values()} == {State.READY}

    run(test)


def test_the_plan_is_told_what_the_others_would_give(shelf: Shelf) -> None:
    shelf.add("a", 4).add("b", 5).add("c", 1, pin=True)

    async def test() -> None:
        async with shelf.run() as arbiter:
            assert await asyncio.gather(ask(arbiter, "a"), ask(arbiter, "c")) == ["answered 200"] * 2
            await ask(arbiter, "b")
        name, spare = shelf.spare[-1]
        held = 100 * MIB  # a fake engine's own memory counts as taken already
        # a gives all of its 4 GiB, most of it yet to be taken; c's GiB is promised to it
        assert name == "b"
        assert -GIB <= spare[HOST] <= -GIB + 2 * held

    run(test)


def test_an_idle_one_gives_way(shelf: Shelf) -> None:
    shelf.add("a", 6).add("b", 6)

    async def test() -> None:
        async with shelf.run() as arbiter:
            assert [await ask(arbiter, name) for name in "abab"] == ["answered 200"] * 4
            assert (shelf.starts("a"), shelf.starts("b")) == (2, 2)
            assert shelf.most_gib == 6
            assert [arbiter.ward(name).state for name in "ab"] == [State.STOPPED, State.READY]

    run(test)


def test_no_more_give_way_than_are_needed(shelf: Shelf) -> None:
    """Also while the first one is on its way out, which wakes the one that waits for its memory again and again."""
    shelf.add("a", 3, fake={"slow_exit_s": 0.1}).add("b", 3).add("c", 3).add("d", 3)

    async def test() -> None:
        async with shelf.run() as arbiter:
            for name in "abc":
                await ask(arbiter, name)
            await ask(arbiter, "d")
            states = {name: ward.state for name, ward in arbiter.wards.items()}
            assert states == {"a": State.STOPPED, "b": State.READY, "c": State.READY, "d": State.READY}
            assert shelf.most_gib == 9

    run(test)


def test_nobody_gives_way_where_another_one_is_about_to_be_gone(shelf: Shelf) -> None:
    """Also where that one was used last, and would be the last to give way."""
    shelf.add("a", 3).add("b", 3).add("c", 3, fake={"slow_exit_s": 0.3}).add("d", 3)

    async def test() -> None:
        async with shelf.run() as arbiter:
            for name in "abc":
                await ask(arbiter, name)
            arbiter.unload(arbiter.ward("c"))
            await ask(arbiter, "d")
            states = {name: ward.state for name, ward in arbiter.wards.items()}
            assert states == {"a": State.READY, "b": State.READY, "c": State.STOPPED, "d": State.READY}

    run(test)


def test_one_that_answers_gives_way_when_it_has_answered(shelf: Shelf) -> None:
    shelf.add("a", 6).add("b", 6)

    async def test() -> None:
        async with shelf.run() as arbiter, asyncio.TaskGroup() as group:
            async with place(arbiter, "a") as a:
                b = group.create_task(ask(arbiter, "b"))
                await state(a, State.DRAINING)
                late = group.create_task(ask(arbiter, "a"))  # is held, and starts it again afterwards
                await asyncio.sleep(0.02)
                assert not b.done()
                assert (a.child is not None, a.line.admission.waiting) == (True, 1)
            assert await b == "answered 200"
            assert await late == "answered 200"

    run(test)


def test_while_requests_keep_coming_the_other_waits_for_the_hold_and_no_longer(shelf: Shelf) -> None:
    shelf.add("a", 6, hold=1, slots=1).add("b", 6, hold=1)

    async def test() -> None:
        async with shelf.run() as arbiter, asyncio.TaskGroup() as group:
            await ask(arbiter, "a")
            ended = asyncio.Event()

            async def keep_asking() -> None:
                while not ended.is_set():
                    assert await ask(arbiter, "a", pace_s=0.005) == "answered 200"

            for _ in range(3):
                group.create_task(keep_asking())
            await turns()
            drained = asyncio.Event()
            arbiter.listeners.add(lambda said: drained.set() if said["state"] == "draining" else None)
            begun_s = time.monotonic()
            b = group.create_task(ask(arbiter, "b"))
            await drained.wait()
            assert time.monotonic() - begun_s >= 1.0  # the preset's word; how much longer depends on the machine
            assert await b == "answered 200"
            ended.set()

    run(test)


def test_one_that_is_idle_has_nothing_to_hold(shelf: Shelf) -> None:
    shelf.add("a", 6, hold=3600).add("b", 6, hold=3600)

    async def test() -> None:
        async with shelf.run() as arbiter:
            assert [await ask(arbiter, name) for name in "ab"] == ["answered 200"] * 2

    run(test)


def test_it_goes_on_when_nobody_wants_its_memory_any_more(shelf: Shelf) -> None:
    shelf.add("a", 6).add("b", 6)

    async def test() -> None:
        async with shelf.run() as arbiter, asyncio.TaskGroup() as group:
            async with place(arbiter, "a") as a:
                leaving = group.create_task(ask(arbiter, "b"))
                await state(a, State.DRAINING)
                held = group.create_task(ask(arbiter, "a"))
                leaving.cancel()
                assert await held == "answered 200"  # beside the first: it has two slots
                assert a.state is State.READY
            assert (shelf.starts("a"), shelf.starts("b")) == (1, 0)
            assert arbiter.ward("b").state is State.STOPPED

    run(test)


def test_a_pinned_one_does_not_give_way(shelf: Shelf) -> None:
    shelf.add("a", 6, pin=True).add("b", 6)

    async def test() -> None:
        async with shelf.run() as arbiter:
            await ask(arbiter, "a")
            with pytest.raises(Error) as caught:
                async with place(arbiter, "b"):
                    pass
            error = caught.value
            assert (error.message, error.hint) == ("b doesn't fit beside a", "llmctl unload a")
            assert (error.status, error.code, error.retry) == (503, "does_not_fit", False)
            assert arbiter.ward("a").state is State.READY
            arbiter.unload(arbiter.ward("a"))
            assert await ask(arbiter, "b") == "answered 200"

    run(test)


def test_two_that_want_the_same_memory_get_it_one_after_the_other(shelf: Shelf) -> None:
    shelf.add("a", 8).add("b", 8).add("c", 8)

    async def test() -> None:
        async with shelf.run() as arbiter, asyncio.TaskGroup() as group:
            async with place(arbiter, "a") as a:
                tasks = [group.create_task(ask(arbiter, name)) for name in "bcbc"]
                await state(a, State.DRAINING)
                await asyncio.sleep(0.02)
                assert set(shelf.pids) == {"a"}
            assert [await task for task in tasks] == ["answered 200"] * 4
            assert (shelf.most_gib, shelf.starts("b"), shelf.starts("c")) == (8, 1, 1)

    run(test)


def test_a_child_that_dies_while_it_drains_is_not_started_again(shelf: Shelf) -> None:
    shelf.add("a", 6).add("b", 6)

    async def test() -> None:
        async with shelf.run() as arbiter, asyncio.TaskGroup() as group:
            await ask(arbiter, "a")
            struck = group.create_task(ask(arbiter, "a", stall_after_tokens=1))
            await turns()
            b = group.create_task(ask(arbiter, "b"))
            a = await state(arbiter.ward("a"), State.DRAINING)
            os.kill(shelf.pids["a"], signal.SIGKILL)
            assert await struck == "broken"
            assert await b == "answered 200"
            assert (a.state, a.cause, a.gives_way_to, shelf.starts("a")) == (State.STOPPED, None, None, 1)

    run(test)


def on_card(shelf: Shelf, *names: str, gib: float = 6) -> Shelf:
    shelf.memory = {HOST: 64, CARD: 10}
    for name in names:
        shelf.add(name, gib, device=CARD)
    return shelf


def test_a_card_is_a_memory_of_its_own(shelf: Shelf) -> None:
    on_card(shelf, "a", "b").add("c", 50)

    async def test() -> None:
        async with shelf.run() as arbiter:
            assert [await ask(arbiter, name) for name in "acb"] == ["answered 200"] * 3
            assert [arbiter.ward(name).state for name in "abc"] == [State.STOPPED, State.READY, State.READY]

    run(test)


def test_memory_that_comes_back_late_is_waited_for_and_nobody_else_gives_way(shelf: Shelf) -> None:
    """A CUDA driver was seen to lag behind a process's exit."""
    on_card(shelf, "a", "b", "c", gib=3).lag_s = 0.3
    shelf.add("d", 4, device=CARD)

    async def test() -> None:
        async with shelf.run() as arbiter:
            for name in "abcd":
                assert await ask(arbiter, name) == "answered 200"
            states = {name: ward.state for name, ward in arbiter.wards.items()}
            assert states == {"a": State.STOPPED, "b": State.READY, "c": State.READY, "d": State.READY}

    run(test)


def test_memory_that_comes_back_late_goes_to_the_one_that_others_ended_for(shelf: Shelf) -> None:
    """And not to those who wait at the one that ended, else its traffic could keep the other out for good."""
    on_card(shelf, "a", "b")

    async def test() -> None:
        async with shelf.run() as arbiter, asyncio.TaskGroup() as group:
            order: list[str] = []
            arbiter.listeners.add(lambda said: order.append(said["preset"]) if said["state"] == "ready" else None)
            async with place(arbiter, "a") as a:
                shelf.first_seen_by = "a"
                b = group.create_task(ask(arbiter, "b"))
                await state(a, State.DRAINING)
                held = group.create_task(ask(arbiter, "a"))
                await turns()
            assert await b == "answered 200"
            shelf.first_seen_by = ""
            assert await held == "answered 200"
            assert order == ["a", "b", "a"]

    run(test)


def test_memory_of_one_that_died_that_comes_back_late_is_waited_for(shelf: Shelf) -> None:
    on_card(shelf, "a", "b").lag_s = 0.3

    async def test() -> None:
        async with shelf.run() as arbiter:
            await ask(arbiter, "a")
            os.kill(shelf.pids["a"], signal.SIGKILL)
            await state(arbiter.ward("a"), State.BACKOFF)
            assert await ask(arbiter, "b") == "answered 200"
            assert [arbiter.ward(name).state for name in "ab"] == [State.STOPPED, State.READY]

    run(test)


def test_memory_that_never_comes_back_is_a_refusal(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arbiter_module, "RELEASE_S", 0.2)
    on_card(shelf, "a", "b").lag_s = 1e6

    async def test() -> None:
        async with shelf.run() as arbiter:
            assert await ask(arbiter, "a") == "answered 200"
            assert await ask(arbiter, "b") == "refused 503 does_not_fit"
            assert arbiter.ward("b").why == "b doesn't fit beside what else uses the memory"
            shelf.lag_s = 0.0
            assert await ask(arbiter, "b") == "answered 200"

    run(test)


# The user's word.


def test_what_up_was_given_is_started_without_a_request(shelf: Shelf) -> None:
    shelf.add("a", 4).add("b", 4).ordered = ("a", "b")

    async def test() -> None:
        async with shelf.run() as arbiter:
            for name in "ab":
                await arbiter.ensure_ready(arbiter.ward(name))
                assert (arbiter.ward(name).ordered, arbiter.ward(name).wanted) == (True, Owner.USER)

    run(test)


def test_two_that_the_user_wants_do_not_give_way_to_each_other(shelf: Shelf) -> None:
    shelf.add("a", 6).add("b", 6).ordered = ("a", "b")

    async def test() -> None:
        async with shelf.run() as arbiter:
            results = await asyncio.gather(*(arbiter.ensure_ready(arbiter.ward(name)) for name in "ab"), return_exceptions=True)
            assert sorted(str(each) for each in results if each is not None) in (
                ["b doesn't fit beside a"],
                ["a doesn't fit beside b"],
            )

    run(test)


def test_a_switch_takes_the_place_of_what_was_ordered_before_and_cuts_nobody(shelf: Shelf) -> None:
    shelf.add("a", 6, hold=3600).add("b", 6).ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            async with place(arbiter, "a") as a:
                arbiter.want("b")
                await state(a, State.DRAINING)  # the hold is for requests, not for the user
                assert a.wanted is None
            b = arbiter.ward("b")
            await arbiter.ensure_ready(b)
            assert (a.state, a.wanted, b.wanted) == (State.STOPPED, None, Owner.USER)
            assert await ask(arbiter, "a") == "answered 200"  # a request may have it back

    run(test)


def test_a_switch_that_is_taken_back_before_it_came_to_anything(shelf: Shelf) -> None:
    shelf.add("a", 6).add("b", 6).ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            async with place(arbiter, "a") as a:
                arbiter.want("b")
                await state(a, State.DRAINING)
                arbiter.want("a")
                await state(a, State.READY)
            assert await ask(arbiter, "a") == "answered 200"
            assert (shelf.starts("a"), shelf.starts("b")) == (1, 0)

    run(test)


def test_a_switch_to_one_that_is_giving_way_has_it_up_again_afterwards(shelf: Shelf) -> None:
    shelf.add("a", 6).add("b", 6)

    async def test() -> None:
        async with shelf.run() as arbiter, asyncio.TaskGroup() as group:
            async with place(arbiter, "a") as a:
                b = group.create_task(ask(arbiter, "b"))
                await state(a, State.DRAINING)
                arbiter.want("a")
            assert await b == "answered 200"
            await arbiter.ensure_ready(a)
            assert (a.wanted, shelf.starts("a")) == (Owner.USER, 2)

    run(test)


def test_unloading_a_busy_one_ends_it_when_it_has_answered(shelf: Shelf) -> None:
    shelf.add("a").ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            async with place(arbiter, "a") as a:
                arbiter.unload(a)
                assert a.state is State.DRAINING
                arbiter.unload(a)  # twice is harmless
            await state(a, State.STOPPED)
            await turns()
            assert (a.wanted, a.cause, a.gives_way_to, shelf.starts("a")) == (None, None, None, 1)
            assert await ask(arbiter, "a") == "answered 200"
            assert shelf.starts("a") == 2

    run(test)


def test_unloading_a_busy_one_holds_those_who_come_and_starts_it_again_for_them(shelf: Shelf) -> None:
    shelf.add("a")

    async def test() -> None:
        async with shelf.run() as arbiter, asyncio.TaskGroup() as group:
            async with place(arbiter, "a") as a:
                arbiter.unload(a)
                held = group.create_task(ask(arbiter, "a"))
                await turns()
            assert await held == "answered 200"
            assert shelf.starts("a") == 2

    run(test)


def test_an_unload_stands_although_the_one_it_gave_way_to_is_given_up(shelf: Shelf) -> None:
    shelf.add("a", 6).add("b", 6)

    async def test() -> None:
        async with shelf.run() as arbiter, asyncio.TaskGroup() as group:
            async with place(arbiter, "a") as a:
                b = group.create_task(ask(arbiter, "b"))
                await state(a, State.DRAINING)
                arbiter.unload(a)
                b.cancel()
                await asyncio.sleep(0.02)
                assert a.state is State.DRAINING
            await state(a, State.STOPPED)

    run(test)


@pytest.mark.parametrize("when", ["at once", "starting", "back off", "given up", "stopped"])
def test_unloading_in_every_state(shelf: Shelf, when: str) -> None:
    faults = {"back off": {"start_exit": 1}, "given up": {"start_exit": 1, "start_log": "unknown model architecture: 'x'"}}
    shelf.add("a", fake=faults.get(when, {"load_s": 600})).ordered = () if when == "stopped" else ("a",)
    reached = {"back off": State.BACKOFF, "given up": State.FAILED, "stopped": State.STOPPED}

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = arbiter.ward("a")
            if when == "at once":  # in the very turn in which it begins: its keeper hasn't had a step
                begun = asyncio.Event()

                def unload(said: dict[str, Any]) -> None:
                    if said["state"] == "starting" and not begun.is_set():
                        asyncio.get_running_loop().call_soon(arbiter.unload, a)
                        begun.set()

                arbiter.listeners.add(unload)
                await begun.wait()
                await turns()
                assert (a.state, shelf.spawned) == (State.STOPPED, 0)
            else:
                await state(a, reached.get(when, State.STARTING))
            arbiter.unload(a)
            await state(a, State.STOPPED)
            await turns()
            assert (a.wanted, a.keeper, a.gives_way_to) == (None, None, None)
            shelf.knobs["a"] = {}
            assert await ask(arbiter, "a") == "answered 200"

    run(test)


def test_an_idle_one_is_unloaded_after_its_ttl(shelf: Shelf) -> None:
    shelf.add("a", ttl=1, slots=1).add("b")

    async def test() -> None:
        async with shelf.run() as arbiter:
            assert [await ask(arbiter, name) for name in "ab"] == ["answered 200"] * 2
            a, b = arbiter.ward("a"), arbiter.ward("b")
            async with place(arbiter, "a"):
                await asyncio.sleep(1.2)
                assert a.state is State.READY
            left_s = time.monotonic()
            await state(a, State.STOPPED)
            assert time.monotonic() - left_s >= 0.9  # the loop's clock counts whole milliseconds
            assert b.state is State.READY
            assert await ask(arbiter, "a") == "answered 200"

    run(test)


# Races.


def test_a_child_that_ends_just_as_it_is_unloaded(shelf: Shelf) -> None:
    """Whatever comes first, nothing of it stays, and the next request gets a new one."""
    shelf.add("a")

    async def test() -> None:
        draw = random.Random(1)
        async with shelf.run() as arbiter:
            for _ in range(8):
                assert await ask(arbiter, "a") == "answered 200"
                a = arbiter.ward("a")
                ended = a.child
                assert ended is not None
                os.kill(shelf.pids["a"], signal.SIGKILL)
                if draw.random() < 0.6:
                    await ended.wait()
                    await turns(draw.randint(0, 4))
                arbiter.unload(a)
                await state(a, State.STOPPED)
                a.budget.forgive()

    run(test)


def test_a_cancellation_that_comes_with_the_end_of_the_child_is_heeded(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11's wait_for, in which the child's end is awaited, then swallows it (gh-86296)."""
    shelf.add("a", fake={"start_exit": 1}).ordered = ("a",)
    stop = Child.stop

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = arbiter.ward("a")
            a.budget.first_delay_s = 0.01

            async def stop_and_swallow(self: Child) -> int:
                code = await stop(self)
                arbiter.unload(a)
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
                return code

            monkeypatch.setattr(Child, "stop", stop_and_swallow)
            await state(a, State.STARTING)
            await state(a, State.STOPPED)
            await turns()
            assert (a.keeper, a.restarts, shelf.starts("a")) == (None, 0, 1)

    run(test)


def test_a_start_that_takes_too_long_is_unloaded_while_it_is_being_stopped(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launch, "load_limit_s", 1.0)
    shelf.add("a", fake={"health_never_answers": True, "slow_exit_s": 600.0}).ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            a = arbiter.ward("a")
            a.budget.most = 10**6  # where a second isn't enough to come as far as that
            while not fakes.events(shelf.folder("a"), "signal"):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            assert a.state is State.STARTING  # SIGTERM was sent, and it takes its time
            arbiter.unload(a)
            await state(a, State.STOPPED)
            await turns()
            assert (a.child, a.keeper) == (None, None)
            shelf.knobs["a"] = {}
            monkeypatch.setattr(Launch, "load_limit_s", WAIT_S)
            assert await ask(arbiter, "a") == "answered 200"

    run(test)


@pytest.mark.parametrize("seed", range(4))
def test_its_end_at_any_instant_leaves_nothing(shelf: Shelf, seed: int) -> None:
    """:meth:`Shelf.run` looks."""
    draw = random.Random(seed)
    shelf.add("a", 6).add("b", 6, fake={"load_s": 0.05}).add("c", 2).ordered = ("c",)

    async def test() -> None:
        async def ask_on(arbiter: Arbiter, name: str) -> None:
            while True:
                await ask(arbiter, name)

        async def serve() -> None:
            async with shelf.run() as arbiter, asyncio.TaskGroup() as group:
                for name in "abc":
                    group.create_task(ask_on(arbiter, name))

        async with asyncio.TaskGroup() as group:
            task = group.create_task(serve())
            await asyncio.sleep(draw.random() * 1.5)
            task.cancel()
            if draw.random() < 0.5:
                await turns(draw.randint(0, 50))
                task.cancel()

    run(test)


async def walk(shelf: Shelf, draw: random.Random, steps: int) -> dict[str, int]:
    """Requests, leavings, unloads, switches and kills at random; how the requests ended."""
    ends: dict[str, int] = {}
    tasks: list[asyncio.Task[None]] = []

    async def visit(arbiter: Arbiter, name: str) -> None:
        end = "cancelled"
        try:
            end = await ask(arbiter, name, tokens=draw.randint(1, 5), pace_s=draw.choice([0, 0.001, 0.01]))
        finally:
            ends[end] = ends.get(end, 0) + 1

    async with shelf.run() as arbiter:
        async with asyncio.TaskGroup() as group:
            for _ in range(steps):
                chance, name = draw.random(), draw.choice("abc")
                ward = arbiter.ward(name)
                ward.budget.first_delay_s = 0.01
                ward.budget.most = 10**6
                if chance < 0.6:
                    tasks.append(group.create_task(visit(arbiter, name)))
                elif chance < 0.7:
                    draw.choice(tasks).cancel() if tasks else None
                elif chance < 0.75:
                    arbiter.unload(ward)
                elif chance < 0.8:
                    arbiter.want(name)
                elif chance < 0.84 and name in shelf.pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(shelf.pids[name], signal.SIGKILL)  # SIGTERM would hang it until its clients have left
                await (turns(draw.randint(0, 20)) if draw.random() < 0.7 else asyncio.sleep(draw.random() * 0.06))
            # all are answered without anything else happening
        for ward in arbiter.wards.values():
            assert ward.line.idle
            assert (ward.line._grants, ward.line._guests) == ({}, {})
        # What can run, runs; and what is up is up for good.
        assert await asyncio.gather(*(ask(arbiter, name) for name in "abc")) == ["answered 200"] * 3
    started = len(tasks)
    never_began = sum(task.cancelled() for task in tasks) - ends.get("cancelled", 0)
    assert sum(ends.values()) + never_began == started
    assert set(ends) <= {"answered 200", "broken", "cancelled"}
    return ends


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("kind", ["host", "card that lags"])
def test_whatever_happens_every_request_comes_to_an_end(shelf: Shelf, seed: int, kind: str) -> None:
    shelf.add("a", 5, hold=1).add("b", 5).add("c", 3, slots=1)
    if kind != "host":
        shelf.memory = {HOST: 64, CARD: 10}
        for name in "abc":
            shelf.presets[name] = dataclasses.replace(shelf.presets[name], device=CARD)
        shelf.lag_s = 0.1
    run(lambda: _walk(shelf, seed, 80))
    assert shelf.most_gib <= 10


async def _walk(shelf: Shelf, seed: int, steps: int) -> None:
    ends = await walk(shelf, random.Random(seed), steps)
    assert ends["answered 200"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 108))
def test_whatever_happens_for_longer(shelf: Shelf, seed: int) -> None:
    shelf.memory = {HOST: 64, CARD: 10}
    draw = random.Random(seed)
    for name in "abc":
        shelf.add(name, draw.choice([3, 5, 6, 9]), device=CARD, hold=draw.choice([0, 1]), slots=draw.randint(1, 3))
    shelf.lag_s = draw.choice([0.0, 0.2])
    run(lambda: _walk(shelf, seed, 400))
    assert shelf.most_gib <= 10
