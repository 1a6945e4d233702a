"""What befalls a child ends nobody else: a full disk, a binary that can't run, a folder that can't be made."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from supervisor import argv, budget, engine, headers, plan, preset
from supervisor.allocation import Allocation
from supervisor.arbiter import Arbiter, Launch
from supervisor.errors import Error, Exit
from supervisor.lifecycle import State
from supervisor.units import MIB
from tests import fakes
from tests.conftest import WAIT_S
from tests.fakes import gguf
from tests.plans import NOWHERE, machine


def launch(
    root: Path, *, server: Path | None = None, folder: Path | None = None, seen: list[Allocation] | None = None, **knobs: Any
) -> Launch:
    """A launch of ``tiny`` on the fake engine; what it allocated goes to ``seen``."""
    asked = preset.load("tiny", NOWHERE)
    where = budget.make("none", machine(16, 12))
    found = plan.make(asked, {asked.model: headers.find(NOWHERE, asked.model)}, where)
    installed = fakes.install(root / "engine", tokens=2, **knobs)
    flags = engine.parse_help(Path(__file__).parent.joinpath("data", "llama-server-help.txt").read_text())
    words = argv.render(found.preset, server or installed, gguf.minimal(root / "m.gguf"), flags=flags)
    folder = folder or root / "run" / "tiny"
    remember = [] if seen is None else seen
    return Launch(found, words, argv.environment(os.environ, folder), folder, root / "tiny.log", remember.append)


def keep(one: Launch, told: Callable[[list[int]], None], reached: State) -> tuple[State, str, Sequence[int]]:
    """Keep the child until its state is ``reached``: that state, the cause, and how often it was started again."""

    async def live() -> tuple[State, str, Sequence[int]]:
        arbiter = Arbiter([one], children_changed=told)
        ward = arbiter.ward("tiny")
        async with asyncio.timeout(WAIT_S), arbiter.run():
            while ward.state is not reached:
                await ward.change()
            return ward.state, ward.cause.text if ward.cause else "", [ward.restarts]

    return asyncio.run(live())


def quiet(pids: list[int]) -> None:
    """Hear of the children and do nothing."""


def test_a_full_disk_under_the_run_folder_ends_no_server(tmp_path: Path) -> None:
    def full(pids: list[int]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert keep(launch(tmp_path), full, State.READY)[0] is State.READY


def test_a_binary_that_can_not_run_is_given_up_at_once_with_its_cause(tmp_path: Path) -> None:
    broken = tmp_path / "llama-server"
    broken.write_text("no program")
    broken.chmod(0o755)
    _, cause, restarts = keep(launch(tmp_path, server=broken), quiet, State.FAILED)
    assert "can't be run" in cause
    assert restarts == [0]


def test_a_process_that_can_not_be_made_waits_for_a_better_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _, cause, _ = keep(launch(tmp_path, folder=tmp_path / "file" / "tiny"), quiet, State.BACKOFF)
    assert "can't be started" in cause


def test_a_request_for_one_that_was_given_up_gets_the_cause(tmp_path: Path) -> None:
    broken = tmp_path / "llama-server"
    broken.write_text("no program")
    broken.chmod(0o755)

    async def live() -> None:
        arbiter = Arbiter([launch(tmp_path, server=broken)], children_changed=quiet)
        async with asyncio.timeout(WAIT_S), arbiter.run():
            await arbiter.ensure_ready(arbiter.ward("tiny"))

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(live())
    error = raised.value.exceptions[0]
    assert isinstance(error, Error)
    assert (error.exit, error.status) == (Exit.CHILD, 503)
    assert "can't be run" in error.message


def test_what_the_engine_allocated_is_read_back_and_remembered(tmp_path: Path) -> None:
    seen: list[Allocation] = []
    sizes = {"CPU_Mapped model": 93.80, "CPU KV": 360.0, "CPU compute": 18.57, "CPU output": 0.75}
    one = launch(tmp_path, seen=seen, allocates=sizes)

    async def live() -> Allocation | None:
        arbiter = Arbiter([one], children_changed=quiet)
        ward = arbiter.ward("tiny")
        async with asyncio.timeout(WAIT_S), arbiter.run():
            while ward.state is not State.READY:
                await ward.change()
            return ward.allocated

    found = asyncio.run(live())
    assert found is not None
    assert seen == [found]
    assert {term: round(count / MIB, 2) for term, count in found.device.items()} == {
        "weights": 93.8,
        "kv": 360.0,
        "compute": 18.57,
    }
    assert {term: round(count / MIB, 2) for term, count in found.host.items()} == {"output": 0.75}


def test_a_log_without_buffers_is_nothing_to_remember(tmp_path: Path) -> None:
    seen: list[Allocation] = []
    assert keep(launch(tmp_path, seen=seen), quiet, State.READY)[0] is State.READY
    assert seen == []
