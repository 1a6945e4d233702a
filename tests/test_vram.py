"""The card's memory by process, on recorded answers of NVML, and its energy, on made-up ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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

    class NVMLError_FunctionNotFound(NVMLError):  # noqa: N801  (an old driver's answer)
        pass

    def __init__(
        self, *computing: Listing, drawing: Listing | None = None, energy_mj: Sequence[int | Exception] | None = None
    ) -> None:
        """``energy_mj``: each card's counter, or what it raises."""
        self.computing = list(computing)
        self.energy_mj: list[int | Exception] = list(energy_mj or ())
        self.asked: list[str] = []
        """Every call, by name."""
        self.drawing = drawing or {}
        self.open = 0
        self.fails: dict[str, Exception] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.asked.append(name)
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
                "nvmlDeviceGetTotalEnergyConsumption": lambda card: _counter(self.energy_mj[card]),
            }
            return answers[name](*args)

        return call


def _processes(listing: Listing) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in listing.items()]


def _counter(answer: int | Exception) -> int:
    if isinstance(answer, Exception):
        raise answer
    return answer


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
    with vram.in_use("CUDA0"):
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
    with vram.in_use("CUDA0"):
        assert vram.holds(17) is True
        nvml.computing = [{}]
        assert vram.holds(17) is False


def test_a_process_that_was_never_listed_is_not_known_to_hold_nothing(put: Put) -> None:
    """A container shows the host's pids, or none."""
    put(Nvml({40017: 5 * GIB}))
    vram = Vram()
    with vram.in_use("CUDA0"):
        assert vram.used_bytes([17]) == {}
        assert vram.holds(17) is None


def test_who_was_listed_is_forgotten_when_it_is_closed(put: Put) -> None:
    nvml = put(Nvml({17: GIB}))
    vram = Vram()
    with vram.in_use("CUDA0"):
        assert vram.holds(17) is True
        vram.close()
        nvml.computing = [{}]
        assert vram.holds(17) is None  # another process may have that pid by now


def test_a_size_that_is_not_told_is_unknown_and_not_nothing(put: Put) -> None:
    """WSL; and one of two cards is enough."""
    put(Nvml({17: None, 18: GIB}, {18: None}))
    vram = Vram()
    with vram.in_use("CUDA0"):
        assert vram.used_bytes([17, 18]) == {}
        assert vram.holds(17) is True


def test_a_card_without_graphics_is_asked_what_computes(put: Put) -> None:
    nvml = put(Nvml({17: GIB}))
    nvml.fails = {"nvmlDeviceGetGraphicsRunningProcesses": Nvml.NVMLError_NotSupported("Not Supported")}
    vram = Vram()
    with vram.in_use("CUDA0"):
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
    with vram.in_use("CUDA0"):
        assert (vram.used_bytes([17]), vram.holds(17), nvml.open) == ({}, None, 0)
        nvml.fails = {}
        assert (vram.used_bytes([17]), vram.holds(17), nvml.open) == ({17: GIB}, True, 1)


def test_a_card_that_is_lost_while_it_is_open_says_nothing(put: Put) -> None:
    nvml = put(Nvml({17: GIB}, {}))
    vram = Vram()
    with vram.in_use("CUDA0"):
        assert vram.holds(17) is True
        lost = Nvml.NVMLError("GPU is lost")
        nvml.fails = {"nvmlDeviceGetComputeRunningProcesses": lost, "nvmlShutdown": lost}
        assert vram.holds(17) is None
        vram.close()


def test_a_machine_without_a_card_or_without_nvml(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = put(Nvml())
    vram = Vram()
    with vram.in_use("CUDA0"):
        assert (vram.used_bytes([1]), vram.holds(1), vram.energy_mj(), nvml.open) == ({}, None, None, 0)
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert (vram.used_bytes([1]), vram.holds(1), vram.energy_mj()) == ({}, None, None)


def test_it_is_open_while_any_child_is_on_a_card(put: Put) -> None:
    nvml = put(Nvml({17: GIB, 18: GIB}))
    vram = Vram()
    with vram.in_use("CUDA0"):
        with vram.in_use("CUDA0"):
            assert vram.used_bytes([17, 18]) == {17: GIB, 18: GIB}
        assert nvml.open == 1
        assert vram.holds(17) is True
    assert (nvml.open, vram.is_open) == (0, False)
    with vram.in_use("CUDA0"):
        assert vram.holds(17) is True
    assert nvml.open == 0


def test_a_question_that_comes_when_no_child_is_on_a_card_wakes_none(put: Put) -> None:
    """A thread that asks for a watcher may be slower than the child's end."""
    nvml = put(Nvml({17: GIB}, energy_mj=[5000]))
    vram = Vram()
    with vram.in_use("CUDA0"):
        assert vram.holds(17) is True
    nvml.asked.clear()
    assert (vram.used_bytes([17]), vram.holds(17), vram.energy_mj()) == ({}, None, None)
    assert nvml.asked == []


def test_energy_is_told_of_the_cards_that_children_are_on(put: Put) -> None:
    nvml = put(Nvml({17: GIB}, {18: GIB}, {}, energy_mj=[5000, 7000, 9000]))
    vram = Vram()
    with vram.in_use("CUDA2"):
        assert vram.energy_mj() == {"CUDA2": 9000}
        with vram.in_use("CUDA1"), vram.in_use("CUDA2"):
            nvml.energy_mj[1] = 7004
            assert vram.energy_mj() == {"CUDA1": 7004, "CUDA2": 9000}
        assert vram.energy_mj() == {"CUDA2": 9000}
    with vram.in_use("CUDA7"):
        assert vram.energy_mj() is None


@pytest.mark.parametrize("kind", [Nvml.NVMLError_NotSupported, Nvml.NVMLError_FunctionNotFound])
def test_a_card_without_a_counter_is_asked_once_for_as_long_as_it_is_open(put: Put, kind: type[Exception]) -> None:
    nvml = put(Nvml({}, {}, energy_mj=[kind("no"), 7000]))
    vram = Vram()
    with vram.in_use("CUDA1"), vram.in_use("CUDA0"):
        for _ in range(3):
            assert vram.energy_mj() == {"CUDA1": 7000}
        assert nvml.asked.count("nvmlDeviceGetTotalEnergyConsumption") == 4
    nvml.energy_mj[0] = 5000  # another driver
    with vram.in_use("CUDA0"):
        assert vram.energy_mj() == {"CUDA0": 5000}


def test_where_no_card_has_a_counter_nothing_is_known_and_memory_still_is(put: Put) -> None:
    nvml = put(Nvml({17: GIB}, energy_mj=[Nvml.NVMLError_NotSupported("Not Supported")]))
    vram = Vram()
    with vram.in_use("CUDA0"):
        assert [vram.energy_mj(), vram.energy_mj(), vram.used_bytes([17])] == [None, None, {17: GIB}]
        assert nvml.open == 1


def test_a_card_that_fails_to_tell_its_energy_is_opened_anew(put: Put) -> None:
    nvml = put(Nvml({17: GIB}, energy_mj=[Nvml.NVMLError("GPU is lost")]))
    vram = Vram()
    with vram.in_use("CUDA0"):
        assert (vram.energy_mj(), nvml.open) == (None, 0)
        nvml.energy_mj = [5000]
        assert (vram.energy_mj(), nvml.open) == ({"CUDA0": 5000}, 1)


def test_a_cards_last_child_is_told_of_while_the_card_can_be_asked(put: Put) -> None:
    put(Nvml({}, {}, energy_mj=[5000, 7000]))
    vram = Vram()
    told: list[tuple[str, dict[str, int] | None]] = []
    vram.leaving = lambda device: told.append((device, vram.energy_mj()))
    assert not vram.used.is_set()
    with vram.in_use("CUDA0"):
        with vram.in_use("CUDA0"), vram.in_use("CUDA1"):
            assert vram.used.is_set()
        assert told == [("CUDA1", {"CUDA0": 5000, "CUDA1": 7000})]
    assert told[1:] == [("CUDA0", {"CUDA0": 5000})]
    assert not vram.used.is_set()
    assert not vram.is_open


def test_who_is_told_of_the_end_and_fails_keeps_no_card_awake(put: Put) -> None:
    nvml = put(Nvml({}, energy_mj=[5000]))
    vram = Vram()

    def fail(device: str) -> None:
        raise ValueError(device)

    vram.leaving = fail
    with pytest.raises(ValueError, match="CUDA0"), vram.in_use("CUDA0"):
        vram.energy_mj()
    assert (nvml.open, vram.used.is_set()) == (0, False)
