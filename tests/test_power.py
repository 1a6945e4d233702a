"""The cards are looked at while a child is on one. NVML's answers are made up here."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest

from supervisor import power
from supervisor.power import Power
from supervisor.vram import Vram
from tests.conftest import WAIT_S
from tests.test_vram import Nvml

ENERGY = "nvmlDeviceGetTotalEnergyConsumption"


class Clock:
    """Seconds that go by as a test says."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def monotonic(self) -> float:
        return self.now_s


class Box:
    """A box with one card, its requests, and what was credited to them."""

    def __init__(self, nvml: Nvml) -> None:
        self.nvml = nvml
        self.clock = Clock()
        self.cards = Vram()
        self.tokens: dict[str, int] = {}
        self.credited: dict[str, float] = {}
        self.idle_j = 0.0
        self.told = asyncio.Event()
        """Something was credited."""
        self.power = Power(self.cards, self.credit, lambda: self.tokens)

    def credit(self, by_request: Mapping[str, float], idle_j: float) -> None:
        for request, joules in by_request.items():
            self.credited[request] = self.credited.get(request, 0.0) + joules
        self.idle_j += idle_j
        self.told.set()

    def takes(self, joules: float, seconds: float) -> None:
        assert isinstance(self.nvml.energy_mj[0], int)
        self.nvml.energy_mj[0] += round(joules * 1e3)
        self.clock.now_s += seconds

    async def looks(self, count: int, call: str = ENERGY) -> None:
        """Until there were so many more."""
        enough = self.nvml.asked.count(call) + count
        for _ in range(int(WAIT_S * 1e3)):
            if self.nvml.asked.count(call) >= enough:
                return
            await asyncio.sleep(0.001)
        raise AssertionError(f"{call} wasn't asked {enough} times")


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Box:
    box = Box(Nvml({}, energy_mj=[4_000_000]))
    monkeypatch.setitem(sys.modules, "pynvml", box.nvml)
    monkeypatch.setattr(power, "time", box.clock)
    return box


def bounded(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), WAIT_S))


def test_power_now_and_who_it_went_to(box: Box) -> None:
    async def test() -> None:
        with box.cards.in_use("CUDA0"):
            assert await box.power.sample()
            assert box.power.watts is None  # one look says nothing yet
            box.takes(40, seconds=2)
            await box.power.sample()
            assert (box.power.watts, box.idle_j, box.credited) == (20, 40, {})
            box.power.enter("a", "CUDA0")
            box.power.enter("b", "CUDA0")
            box.tokens = {"a": 30, "b": 10}
            box.takes(100, seconds=1)
            box.power.leave("b", 10)
            await box.power.sample()
            assert (box.power.watts, box.idle_j, box.credited) == (100, 40, {"a": 60, "b": 40})
        assert box.power.watts is None

    bounded(test)


def test_what_the_last_second_took_is_told_before_the_card_is_closed(box: Box) -> None:
    async def test() -> None:
        with box.cards.in_use("CUDA0"):
            await box.power.sample()
            box.power.enter("a", "CUDA0")
            box.takes(30, seconds=0.5)
            box.power.leave("a", 10)
        assert box.nvml.open == 0
        assert (box.credited, box.idle_j) == ({"a": 30}, 0)
        box.takes(5000, seconds=600)  # not ours
        with box.cards.in_use("CUDA0"):
            await box.power.sample()
            box.takes(7, seconds=1)
            await box.power.sample()
            assert (box.credited, box.idle_j) == ({"a": 30}, 7)

    bounded(test)


def test_a_child_s_end_opens_no_card(box: Box) -> None:
    async def test() -> None:
        with box.cards.in_use("CUDA0"):
            pass
        assert (box.nvml.asked, box.credited, box.idle_j) == ([], {}, 0)

    bounded(test)


def test_what_a_thread_read_before_a_child_s_end_is_not_shared_after_it(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    read, go_on = threading.Event(), threading.Event()
    ask = box.cards.energy_mj

    def slowly() -> dict[str, int] | None:
        answer = ask()
        if threading.current_thread() is not threading.main_thread():
            read.set()
            assert go_on.wait(WAIT_S)
        return answer

    async def test() -> None:
        with box.cards.in_use("CUDA0"):
            await box.power.sample()
            monkeypatch.setattr(box.cards, "energy_mj", slowly)
            late = asyncio.ensure_future(box.power.sample())  # noqa: TID251
            await asyncio.to_thread(read.wait, WAIT_S)
            box.takes(30, seconds=1)
        assert box.idle_j == 30
        go_on.set()
        assert await late  # nothing says that the card doesn't tell
        assert (box.idle_j, box.power.watts) == (30, None)
        with box.cards.in_use("CUDA0"):
            box.takes(500, seconds=9)
            await box.power.sample()
            assert box.idle_j == 30

    bounded(test)


def test_it_looks_only_while_a_child_is_on_a_card(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "LOOK_S", 0.001)

    async def test() -> None:
        async with asyncio.TaskGroup() as group:
            tending = group.create_task(box.power.tend())
            await asyncio.sleep(0.02)
            assert box.nvml.asked == []
            for _ in range(2):
                with box.cards.in_use("CUDA0"):
                    await box.looks(3)
                    box.told.clear()
                    box.takes(5, seconds=1)
                    for _ in range(int(WAIT_S * 1e3)):
                        if box.told.is_set():
                            break
                        box.takes(0, seconds=1)  # a look may have had the counter of before and the time of after
                        await asyncio.sleep(0.001)
                asked = len(box.nvml.asked)
                await asyncio.sleep(0.02)
                assert (box.nvml.open, len(box.nvml.asked)) == (0, asked)
            tending.cancel()
        assert box.idle_j == 10

    bounded(test)


@pytest.mark.parametrize("call", ["nvmlInit", ENERGY])
def test_cards_that_tell_nothing_are_asked_seldom(box: Box, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """No driver; a card that is lost."""
    monkeypatch.setattr(power, "LOOK_S", 0.001)
    monkeypatch.setattr(power, "AGAIN_S", WAIT_S * 10)
    box.nvml.fails = {call: Nvml.NVMLError("no")}

    async def test() -> None:
        async with asyncio.TaskGroup() as group:
            tending = group.create_task(box.power.tend())
            with box.cards.in_use("CUDA0"):
                await box.looks(1, call)
                await asyncio.sleep(0.02)
                assert (box.nvml.asked.count(call), box.power.watts) == (1, None)
            tending.cancel()
        assert (box.credited, box.idle_j) == ({}, 0)

    bounded(test)


def test_a_card_without_a_counter_has_no_figures(box: Box) -> None:
    box.nvml.energy_mj = [Nvml.NVMLError_NotSupported("Not Supported")]

    async def test() -> None:
        with box.cards.in_use("CUDA0"):
            for _ in range(3):
                box.power.enter("a", "CUDA0")
                assert not await box.power.sample()
                box.power.leave("a", 10)
            assert box.power.watts is None
        assert (box.credited, box.idle_j, box.nvml.asked.count(ENERGY)) == ({}, 0, 1)

    bounded(test)


def test_a_machine_without_nvml_has_no_figures(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)

    async def test() -> None:
        with box.cards.in_use("CUDA0"):
            assert not await box.power.sample()
            box.power.enter("a", "CUDA0")
            assert not await box.power.sample()
            box.power.leave("a", 3)
            assert (box.power.watts, box.credited, box.idle_j) == (None, {}, 0)

    bounded(test)


def test_a_card_that_is_lost_between_two_looks_starts_anew(box: Box) -> None:
    async def test() -> None:
        with box.cards.in_use("CUDA0"):
            await box.power.sample()
            box.takes(20, seconds=1)
            box.nvml.fails = {ENERGY: Nvml.NVMLError("GPU is lost")}
            assert not await box.power.sample()
            box.nvml.fails = {}
            box.takes(20, seconds=1)
            assert await box.power.sample()
            assert (box.idle_j, box.power.watts) == (0, None)
            box.takes(20, seconds=1)
            await box.power.sample()
            assert (box.idle_j, box.power.watts) == (20, 20)

    bounded(test)
