"""The machine, on recorded values."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from supervisor import hardware

RYZEN = "\n\n".join(
    f"processor\t: {cpu}\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 33\nmodel name\t: AMD Ryzen 7 5800X\nphysical id\t: 0\n"
    f"core id\t\t: {cpu % 8}\ncpu cores\t: 8\nflags\t\t: fpu sse4_2 avx avx2 fma f16c bmi2"
    for cpu in range(16)
)
ARM = "\n\n".join(
    f"processor\t: {cpu}\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd dotprod\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c"
    for cpu in range(4)
)


def test_hyperthreads_count_once() -> None:
    assert hardware.physical_cores(RYZEN) == 8
    assert hardware.physical_cores(RYZEN, {0, 8}) == 1
    assert hardware.physical_cores(RYZEN, {0, 1, 2}) == 3
    assert hardware.physical_cores(RYZEN.replace("physical id\t: 0", "physical id\t: 1", 1)) == 9
    assert hardware.physical_cores(ARM) == 4
    assert hardware.physical_cores("") == 1


def test_flags_and_model() -> None:
    assert hardware.cpu_flags(RYZEN) == {"fpu", "sse4_2", "avx", "avx2", "fma", "f16c", "bmi2"}
    assert hardware.cpu_flags(ARM) == {"fp", "asimd", "dotprod"}
    assert hardware.cpu_model(RYZEN) == "AuthenticAMD 25 33"
    assert hardware.cpu_field(RYZEN, "model name") == "AMD Ryzen 7 5800X"
    assert hardware.cpu_model(ARM) == "0x41 0xd0c"


class Nvml:
    """What pynvml says on a box with one RTX 3070."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM = 1

    def __init__(self, fails_at: str = "", bytes_not_str: bool = False) -> None:
        self.fails_at = fails_at
        self.encode = bytes_not_str
        self.open = 0

    def __getattr__(self, name: str) -> object:
        def call(*args: object) -> object:
            if name == self.fails_at:
                raise Nvml.NVMLError("Driver/library version mismatch")
            self.open += {"nvmlInit": 1, "nvmlShutdown": -1}.get(name, 0)
            text = {
                "nvmlSystemGetDriverVersion": "580.95.05",
                "nvmlDeviceGetName": "NVIDIA GeForce RTX 3070",
                "nvmlDeviceGetUUID": "GPU-1",
            }
            if name in text:
                return text[name].encode() if self.encode else text[name]
            values = {
                "nvmlDeviceGetCount": 1,
                "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=8 << 30, free=7 << 30),
                "nvmlDeviceGetCudaComputeCapability": (8, 6),
                "nvmlDeviceGetNumGpuCores": 5888,
                "nvmlDeviceGetMaxClockInfo": 2100,
            }
            return values.get(name)

        return call


@pytest.mark.parametrize("bytes_not_str", [False, True])
def test_a_card(monkeypatch: pytest.MonkeyPatch, bytes_not_str: bool) -> None:
    nvml = Nvml(bytes_not_str=bytes_not_str)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = hardware.nvidia_cards()
    assert found.cards == (hardware.Card(0, "NVIDIA GeForce RTX 3070", "GPU-1", "86", 8 << 30, 7 << 30, 5888, 2100),)
    assert (found.driver, found.no_card, nvml.open) == ("580.95.05", "", 0)
    assert repr(found.cards[0]) == "<Card 0 NVIDIA GeForce RTX 3070 sm_86 7.0 GiB of 8.0 GiB free>"


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo"])
def test_any_failure_means_no_card(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    nvml = Nvml(fails_at=call)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert hardware.nvidia_cards() == hardware.Cards(no_card="Driver/library version mismatch")
    assert nvml.open == 0


@pytest.mark.parametrize("call", ["nvmlDeviceGetNumGpuCores", "nvmlDeviceGetMaxClockInfo"])
def test_an_old_driver_says_less(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(fails_at=call))
    (card,) = hardware.nvidia_cards().cards
    assert 0 in (card.cores, card.clock_mhz)
    assert card.free_bytes == 7 << 30


@pytest.mark.parametrize(("chassis", "laptop"), [("10\n", True), ("31\n", True), ("3\n", False), ("", False), ("desk", False)])
def test_a_laptop_is_known_by_its_chassis(chassis: str, laptop: bool) -> None:
    assert hardware.is_laptop(chassis) is laptop


def test_this_machine() -> None:
    here = hardware.detect()
    assert here.cores >= 1
    assert here.total_bytes > here.available_bytes > 0
    assert here.cards or here.no_card


@pytest.mark.parametrize(("driver", "major"), [("580.95.05", 580), ("", 0)])
def test_driver_major(driver: str, major: int) -> None:
    machine = hardware.Hardware("", frozenset(), "", 1, 2, 1, (), driver, "")
    assert machine.driver_major == major
