"""The card's memory by process and its energy, through NVML, for as long as something of ours runs on a card.

The total of a card can't tell whose memory it is, and what a dead child held is given back by the driver some time after its end. NVML
lists the processes of each card by pid. It may not: the Windows driver below WSL tells no sizes, a container with pids of its own may be
shown the host's or none, a card may be lost. What it doesn't tell is unknown here and never 0, and nothing raises.

A card's energy counter goes on from when the driver was loaded. Cards before Volta have none, and old drivers don't know the question:
they are asked once for as long as NVML is open.

NVML keeps a card awake while it is open. So the first question opens it, :meth:`Vram.close` is for when no child is on a card, and a
question that comes when none is any more finds it closed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class Vram:
    """Who holds memory of the cards, and what they take. Questions are for any thread, :meth:`in_use` is for the loop's."""

    def __init__(self) -> None:
        self.used = asyncio.Event()
        """Set while a child is on a card."""
        self.leaving: Callable[[str], None] | None = None
        """Told a card's device when its last child has ended, while it can still be asked."""
        self._children: dict[str, int] = {}
        """How many are on each card, by device; a card that has none isn't in it."""
        self._cards: tuple[Any, ...] = ()
        self._no_energy: set[str] = set()
        """Cards that have no energy counter."""
        self._lock = threading.Lock()
        self._seen: set[int] = set()
        """Those that NVML has listed: it shows us pids as we know them."""

    @contextmanager
    def in_use(self, device: str) -> Iterator[None]:
        """A child is on this card (``CUDA0``) while the block runs. After the last of them the cards may sleep."""
        self._children[device] = self._children.get(device, 0) + 1
        self.used.set()
        try:
            yield
        finally:
            self._end(device)

    def _end(self, device: str) -> None:
        try:
            if self._children[device] == 1 and self.leaving is not None:
                self.leaving(device)
        finally:
            self._children[device] -= 1
            if not self._children[device]:
                del self._children[device]
            if not self._children:
                self.used.clear()
                self.close()

    @property
    def is_open(self) -> bool:
        """Whether NVML is held open."""
        return bool(self._cards)

    def used_bytes(self, pids: Iterable[int]) -> dict[int, int]:
        """What each process holds on all cards together. A process is missing where that isn't known, or it holds nothing."""
        with self._lock:
            listed = self._listed() or {}
        return {pid: held for pid in pids if (held := listed.get(pid)) is not None}

    def holds(self, pid: int) -> bool | None:
        """Whether a process, perhaps a dead one, still holds memory; None if NVML doesn't say, or never listed it."""
        with self._lock:
            listed = self._listed()
            if listed is None:
                return None
            return pid in listed or (False if pid in self._seen else None)

    def energy_mj(self) -> dict[str, int] | None:
        """Energy counters of the cards that children are on, by device, in mJ since the driver was loaded; None where none tells.

        NVML: nvmlDeviceGetTotalEnergyConsumption, for Volta and newer. A card's device is CUDA and its number, as in ``catalog.free``.
        """
        with self._lock:
            if not self._ready():
                return None
            import pynvml

            found: dict[str, int] = {}
            try:
                for index, card in enumerate(self._cards):
                    device = f"CUDA{index}"
                    if device not in self._children or device in self._no_energy:
                        continue
                    try:
                        found[device] = int(pynvml.nvmlDeviceGetTotalEnergyConsumption(card))
                    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
                        self._no_energy.add(device)
            except pynvml.NVMLError:
                self._shut()
                return None
        return found or None

    def close(self) -> None:
        """Let the cards sleep. The next question opens NVML again; twice is harmless."""
        with self._lock:
            self._seen.clear()
            self._shut()

    def _ready(self) -> bool:
        """Whether the cards can be asked. Who asks late must not wake them: a thread may be slower than its child."""
        return bool(self._cards) or (bool(self._children) and self._open())

    def _shut(self) -> None:
        self._no_energy.clear()
        if self._cards:
            import pynvml

            self._cards = ()
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError:
                return  # the driver is gone, and what was open with it

    def _listed(self) -> dict[int, int | None] | None:
        """Bytes by pid, None for one whose size isn't told; None altogether where a card doesn't answer."""
        if not self._ready():
            return None
        import pynvml

        listed: dict[int, int | None] = {}
        try:
            for card in self._cards:
                for pid, held in _of_card(card).items():
                    before = listed.get(pid, 0)
                    listed[pid] = None if held is None or before is None else before + held
        except pynvml.NVMLError:
            self._shut()  # a driver that was replaced answers only who opens it anew
            return None
        self._seen.update(listed)
        return listed

    def _open(self) -> bool:
        try:
            import pynvml
        except ImportError:
            return False
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return False
        try:
            self._cards = tuple(pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount()))
        except pynvml.NVMLError:
            self._cards = ()
        if not self._cards:
            pynvml.nvmlShutdown()
        return bool(self._cards)


def _of_card(card: Any) -> dict[int, int | None]:  # noqa: ANN401  (an NVML handle)
    """Bytes by pid on one card. A process that computes and draws is in both lists, with the same size."""
    import pynvml

    listed = {process.pid: process.usedGpuMemory for process in pynvml.nvmlDeviceGetComputeRunningProcesses(card)}
    for process in _maybe(lambda: pynvml.nvmlDeviceGetGraphicsRunningProcesses(card)):
        if listed.get(process.pid) is None:
            listed[process.pid] = process.usedGpuMemory
    return {int(pid): None if held is None else int(held) for pid, held in listed.items()}


def _maybe(ask: Callable[[], list[Any]]) -> list[Any]:
    """A list that a card without graphics may not give."""
    import pynvml

    try:
        return ask()
    except pynvml.NVMLError_NotSupported:
        return []
