"""The card's memory by process, on recorded answers of NVML."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from supervisor.units import GIB, MIB
from supervisor.vram import Vram

Listing = dict[int, int | None]


class Nvml:
    """What pynvml says on a box whose cards run these processes."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N801  (pynvml's name)
        pass

    def __init__(self, *computing: Listing, drawing: Listing | None = None) -> None:
        self.computing = list(computing)
        self.drawing = drawing or {}
        self.open = 0
        self.fails: dict[str, Exception] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if name in self.fails:
                raise self.fails[name]
            if name == "nvmlInit":
                self.open += 1
                return None
            assert self.open > 0, f"{name} while NVML is closed"
            if name == "nvmlShutdown":
                self.open -= 1
                return None
            answers: dict[str, Callable[..., Any]] = {
                "nvmlDeviceGetCount": lambda: len(self.computing),
                "nvmlDeviceGetHandleByIndex": lambda index: index,
                "nvmlDeviceGetComputeRunningProcesses": lambda card: _processes(self.computing[card]),
                "nvmlDeviceGetGraphicsRunningProcesses": lambda card: _processes(self.drawing if card == 0 else {}),
            }
            return answers[name](*args)

        return call


def _processes(listing: Listing) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in listing.items()]


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Callable[[Nvml], Nvml]:
    def put(nvml: Nvml) -> Nvml:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return put


Put = Callable[[Nvml], Nvml]


def test_each_process_is_told_what_it_holds_on_all_cards(put: Put) -> None:
    nvml = put(Nvml({17: 5 * GIB, 99: GIB}, {17: GIB}, drawing={99: GIB, 5: 200 * MIB}))
    vram = Vram()
    with vram.in_use():
        assert not vram.is_open  # nobody asked yet: the card may sleep
        assert vram.used_bytes([17, 99, 5, 4]) == {17: 6 * GIB, 99: GIB, 5: 200 * MIB}
        assert vram.is_open
        assert nvml.open == 1
        assert vram.used_bytes([]) == {}
        assert nvml.open == 1
    assert nvml.open == 0
    vram.close()
    assert nvml.open == 0


def test_a_dead_childs_memory_is_held_until_the_driver_gave_it_back(put: Put) -> None:
    nvml = put(Nvml({17: 5 * GIB}))
    vram = Vram()
    with vram.in_use():
        assert vram.holds(17) is True
        nvml.computing = [{}]
        assert vram.holds(17) is False


def test_a_process_that_was_never_listed_is_not_known_to_hold_nothing(put: Put) -> None:
    """A container shows the host's pids, or none."""
    put(Nvml({40017: 5 * GIB}))
    vram = Vram()
    with vram.in_use():
        assert vram.used_bytes([17]) == {}
        assert vram.holds(17) is None


def test_who_was_listed_is_forgotten_when_it_is_closed(put: Put) -> None:
    nvml = put(Nvml({17: GIB}))
    vram = Vram()
    with vram.in_use():
        assert vram.holds(17) is True
        vram.close()
        nvml.computing = [{}]
        assert vram.holds(17) is None  # another process may have that pid by now


def test_a_size_that_is_not_told_is_unknown_and_not_nothing(put: Put) -> None:
    """WSL; and one of two cards is enough."""
    put(Nvml({17: None, 18: GIB}, {18: None}))
    vram = Vram()
    with vram.in_use():
        assert vram.used_bytes([17, 18]) == {}
        assert vram.holds(17) is True


def test_a_card_without_graphics_is_asked_what_computes(put: Put) -> None:
    nvml = put(Nvml({17: GIB}))
    nvml.fails = {"nvmlDeviceGetGraphicsRunningProcesses": Nvml.NVMLError_NotSupported("Not Supported")}
    vram = Vram()
    with vram.in_use():
        assert vram.used_bytes([17]) == {17: GIB}


@pytest.mark.parametrize(
    "call",
    [
        *("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"),
        *("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"),
    ],
)
def test_any_failure_means_unknown_and_the_next_question_opens_it_anew(put: Put, call: str) -> None:
    nvml = put(Nvml({17: GIB}))
    nvml.fails = {call: Nvml.NVMLError("GPU is lost")}
    vram = Vram()
    with vram.in_use():
        assert (vram.used_bytes([17]), vram.holds(17), nvml.open) == ({}, None, 0)
        nvml.fails = {}
        assert (vram.used_bytes([17]), vram.holds(17), nvml.open) == ({17: GIB}, True, 1)


def test_a_card_that_is_lost_while_it_is_open_says_nothing(put: Put) -> None:
    nvml = put(Nvml({17: GIB}, {}))
    vram = Vram()
    assert vram.holds(17) is True
    lost = Nvml.NVMLError("GPU is lost")
    nvml.fails = {"nvmlDeviceGetComputeRunningProcesses": lost, "nvmlShutdown": lost}
    assert vram.holds(17) is None
    vram.close()


def test_a_machine_without_a_card_or_without_nvml(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = put(Nvml())
    vram = Vram()
    assert (vram.used_bytes([1]), vram.holds(1), nvml.open) == ({}, None, 0)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert (vram.used_bytes([1]), vram.holds(1)) == ({}, None)


def test_it_is_open_while_any_child_is_on_a_card(put: Put) -> None:
    nvml = put(Nvml({17: GIB, 18: GIB}))
    vram = Vram()
    with vram.in_use():
        with vram.in_use():
            assert vram.used_bytes([17, 18]) == {17: GIB, 18: GIB}
        assert nvml.open == 1
        assert vram.holds(17) is True
    assert (nvml.open, vram.is_open) == (0, False)
    with vram.in_use():
        assert vram.holds(17) is True
    assert nvml.open == 0
