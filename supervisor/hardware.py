"""The machine we run on: its cores, its CPU's instruction sets, its memory, its NVIDIA cards.

Read once with :func:`detect`; a value of :class:`Hardware` then travels inward. The text of ``/proc/cpuinfo`` and NVML's answers are
parsed by functions that take them as values, so that recorded machines can be tested. Any failure of NVML (no driver, no card, a driver
that was upgraded under the running kernel) means: no card. Why is kept in ``no_card``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor import memory
from supervisor.units import size

CPUINFO = Path("/proc/cpuinfo")
CHASSIS = Path("/sys/class/dmi/id/chassis_type")


@dataclass(frozen=True, slots=True)
class Card:
    """One NVIDIA card, as NVML tells it."""

    index: int
    name: str
    uuid: str
    arch: str
    """Compute capability without the dot: ``86``."""
    total_bytes: int
    free_bytes: int
    cores: int = 0
    """CUDA cores; 0 where the driver doesn't say."""
    clock_mhz: int = 0
    """The highest clock of the multiprocessors; 0 where the driver doesn't say."""

    def __repr__(self) -> str:
        return f"<Card {self.index} {self.name} sm_{self.arch} {size(self.free_bytes)} of {size(self.total_bytes)} free>"


@dataclass(frozen=True, slots=True)
class Cards:
    """The cards, the driver's version, and where there are none, why."""

    cards: tuple[Card, ...] = ()
    driver: str = ""
    """``580.95.05``; empty without a driver."""
    no_card: str = ""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What this machine is."""

    cpu_name: str
    cpu_flags: frozenset[str]
    cpu_model: str
    """Vendor, family and model: what ``-march=native`` tunes for besides the flags."""
    cores: int
    """Physical cores this process may run on."""
    total_bytes: int
    available_bytes: int
    """RAM, within a container's limit: :mod:`~supervisor.memory`."""
    cards: tuple[Card, ...]
    driver: str
    no_card: str
    laptop: bool = False
    limited: bool = False
    """Whether a container's limit decides the memory."""

    @property
    def driver_major(self) -> int:
        """``580`` of ``580.95.05``; 0 without a driver."""
        head = self.driver.split(".")[0]
        return int(head) if head.isdigit() else 0


def detect(*, cards: bool = True) -> Hardware:
    """Look at this machine now; memory figures are of this moment. Without ``cards``, NVML is left alone and none are listed."""
    text = CPUINFO.read_text()
    ram = memory.read()
    found = nvidia_cards() if cards else Cards(no_card="not looked for")
    return Hardware(
        cpu_name=cpu_field(text, "model name") or "unknown CPU",
        cpu_flags=cpu_flags(text),
        cpu_model=cpu_model(text),
        cores=physical_cores(text, os.sched_getaffinity(0)),
        total_bytes=ram.total_bytes,
        available_bytes=ram.available_bytes,
        cards=found.cards,
        driver=found.driver,
        no_card=found.no_card,
        laptop=is_laptop(_chassis()),
        limited=ram.limited,
    )


LAPTOP_CHASSIS: Final = frozenset({8, 9, 10, 11, 14, 30, 31, 32})
"""Portable, laptop, notebook, hand-held, sub-notebook, tablet, convertible, detachable (SMBIOS 3.7, table 17)."""


def is_laptop(chassis: str) -> bool:
    """Whether this SMBIOS chassis type, as the kernel shows it, is a machine that runs hot on all of its cores."""
    return chassis.strip().isdigit() and int(chassis) in LAPTOP_CHASSIS


def _chassis() -> str:
    try:
        return CHASSIS.read_text()
    except OSError:  # a virtual machine or an Arm board without SMBIOS
        return ""


def cpu_field(cpuinfo: str, name: str) -> str:
    """The first value of a field of ``/proc/cpuinfo``; empty if it isn't there."""
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return ""


def cpu_flags(cpuinfo: str | None = None) -> frozenset[str]:
    """The instruction sets of the CPU, in the kernel's words (``avx2``, ``avx512f``; on Arm ``asimd``)."""
    text = CPUINFO.read_text() if cpuinfo is None else cpuinfo
    return frozenset((cpu_field(text, "flags") or cpu_field(text, "Features")).split())


def cpu_model(cpuinfo: str) -> str:
    """``AuthenticAMD 25 1``: vendor, family and model (on Arm, implementer and part)."""
    names = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    return " ".join(value for name in names if (value := cpu_field(cpuinfo, name)))


def physical_cores(cpuinfo: str | None = None, allowed: Iterable[int] | None = None) -> int:
    """Physical cores among the allowed logical CPUs: two hyperthreads count once. At least 1.

    Without a text, this machine's, among the CPUs that this process may run on; with one and without ``allowed``, all in it.
    """
    if cpuinfo is None:
        cpuinfo, allowed = CPUINFO.read_text(), os.sched_getaffinity(0) if allowed is None else allowed
    wanted = None if allowed is None else frozenset(allowed)
    cores = set()
    for block in cpuinfo.split("\n\n"):
        number = cpu_field(block, "processor")
        if number.isdigit() and (wanted is None or int(number) in wanted):
            core = cpu_field(block, "core id")
            cores.add((cpu_field(block, "physical id"), core) if core else ("", f"cpu{number}"))
    return max(1, len(cores))


def nvidia_cards() -> Cards:
    """The NVIDIA cards of this machine, through NVML, which is opened and closed again."""
    try:
        import pynvml
    except ImportError as exc:
        return Cards(no_card=str(exc))
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as exc:
        return Cards(no_card=str(exc))
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        cards = tuple(_card(index) for index in range(pynvml.nvmlDeviceGetCount()))
        return Cards(cards, driver, "" if cards else "the driver sees no card")
    except pynvml.NVMLError as exc:
        return Cards(no_card=str(exc))
    finally:
        pynvml.nvmlShutdown()


def _card(index: int) -> Card:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    vram = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Card(
        index=index,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        arch=f"{major}{minor}",
        total_bytes=int(vram.total),
        free_bytes=int(vram.free),
        cores=_maybe(lambda: pynvml.nvmlDeviceGetNumGpuCores(handle)),
        clock_mhz=_maybe(lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)),
    )


def _maybe(ask: Callable[[], int]) -> int:
    """A figure that old drivers and some laptops don't give."""
    import pynvml

    try:
        return int(ask())
    except pynvml.NVMLError:
        return 0


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
