"""The card's memory by process, through NVML, for as long as something of ours runs on a card.

The total of a card can't tell whose memory it is, and what a dead child held is given back by the driver some time after its end. NVML
lists the processes of each card by pid. It may not: the Windows driver below WSL tells no sizes, a container with pids of its own may be
shown the host's or none, a card may be lost. What it doesn't tell is unknown here and never 0, and nothing raises.

NVML keeps a card awake while it is open. So the first question opens it, and :meth:`Vram.close` is for when no child is on a card.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class Vram:
    """Who holds memory of the cards. For any thread."""

    def __init__(self) -> None:
        self._cards: tuple[Any, ...] = ()
        self._users = 0
        self._lock = threading.Lock()
        self._seen: set[int] = set()
        """Those that NVML has listed: it shows us pids as we know them."""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A child is on a card while the block runs. After the last of them the cards may sleep."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
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

    def close(self) -> None:
        """Let the cards sleep. The next question opens NVML again; twice is harmless."""
        with self._lock:
            self._seen.clear()
            self._shut()

    def _shut(self) -> None:
        if self._cards:
            import pynvml

            self._cards = ()
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError:
                return  # the driver is gone, and what was open with it

    def _listed(self) -> dict[int, int | None] | None:
        """Bytes by pid, None for one whose size isn't told; None altogether where a card doesn't answer."""
        if not self._cards and not self._open():
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
