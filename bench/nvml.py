"""What the cards show while a repetition runs, through NVML, which is open for as long as somebody measures.

A card is the server's if NVML lists one of the server's processes on it. Where NVML lists none of them on any card (a container with pids
of its own, WSL, a server whose pids aren't known) it is each card that had work to do meanwhile.

``supervisor.vram`` asks for what a supervisor must know of its children; this asks for all that decides about a figure. Each question may
be one that a card or a driver doesn't know, and what isn't told is absent.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from supervisor.units import MIB

BUSY_SHARE: Final = 0.1
"""Mean utilization from which on a card is taken for the server's where NVML doesn't say whose it is; a desktop takes less."""
POWER_CAP: Final = 0x4
"""nvmlClocksEventReasonSwPowerCap (nvml.h): the clock is what the power limit allows. Usual under full load, so it has its own gauge."""
THROTTLES: Final = 0x8 | 0x20 | 0x40 | 0x80
"""HwSlowdown, SwThermalSlowdown, HwThermalSlowdown, HwPowerBrakeSlowdown (nvml.h). Idle, a clock that was set, sync boost and a display's
clock are no faults."""


@dataclass(slots=True)
class _Seen:
    """One card in one repetition; what it didn't tell isn't in it."""

    card: Any
    """Its handle."""
    energy_mj: int | None
    """The counter at the beginning."""
    used_bytes: int = 0
    listed: bool = False
    """NVML listed one of the server's processes."""
    server_bytes: int | None = None
    """What those held, at its peak; None while that isn't told."""
    busy: list[float] = field(default_factory=list)
    power_w: list[float] = field(default_factory=list)
    sm_mhz: list[int] = field(default_factory=list)
    """Clocks are those under load: of a card that has had work to do since the look before."""
    mem_mhz: list[int] = field(default_factory=list)
    temp_c: int | None = None
    reasons: list[int] = field(default_factory=list)

    def look(self, pids: Collection[int]) -> None:
        """Ask it; ``pids`` are the server's."""
        import pynvml as nvml

        card = self.card
        if (used := _told(nvml.nvmlDeviceGetMemoryInfo, card)) is not None:
            self.used_bytes = max(self.used_bytes, int(used.used))
        held = _held(card, pids)
        self.listed = self.listed or bool(held)
        if held and (sizes := [each for each in held.values() if each is not None]):
            self.server_bytes = max(self.server_bytes or 0, sum(sizes))
        rates = _told(nvml.nvmlDeviceGetUtilizationRates, card)
        if rates is not None:
            self.busy.append(rates.gpu / 100)
        if (milliwatts := _told(nvml.nvmlDeviceGetPowerUsage, card)) is not None:
            self.power_w.append(milliwatts / 1e3)
        if rates is None or rates.gpu:
            for mhz, clock in ((self.sm_mhz, nvml.NVML_CLOCK_SM), (self.mem_mhz, nvml.NVML_CLOCK_MEM)):
                if (value := _told(nvml.nvmlDeviceGetClockInfo, card, clock)) is not None:
                    mhz.append(int(value))
        if (temp_c := _told(nvml.nvmlDeviceGetTemperature, card, nvml.NVML_TEMPERATURE_GPU)) is not None:
            self.temp_c = max(self.temp_c or 0, int(temp_c))
        # The name before the driver's 535; later ones know it too.
        if (bits := _told(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, card)) is not None:
            self.reasons.append(int(bits))

    def energy_j(self, lasted_s: float) -> tuple[float, bool] | None:
        """What it took, and whether that is by its counter."""
        now_mj = _energy_mj(self.card)
        if now_mj is not None and self.energy_mj is not None and now_mj >= self.energy_mj:
            return (now_mj - self.energy_mj) / 1e3, True
        return (statistics.fmean(self.power_w) * lasted_s, False) if self.power_w else None


@dataclass(frozen=True, slots=True)
class Stretch:
    """All cards in one repetition."""

    cards: tuple[_Seen, ...]

    def look(self, pids: Collection[int]) -> None:
        """Ask each now; ``pids`` are the server's processes."""
        for card in self.cards:
            card.look(pids)

    def told(self, lasted_s: float) -> Iterator[tuple[str, float]]:
        """What was seen of the server's cards, after so long: names and values of ``gauges.GAUGES``."""
        busy = [each for each in self.cards if each.busy and statistics.fmean(each.busy) >= BUSY_SHARE]
        mine = [each for each in self.cards if each.listed] or busy
        if not mine:
            return
        if all(each.used_bytes for each in mine):
            yield "card_mib", sum(each.used_bytes for each in mine) / MIB
        held = [each.server_bytes for each in mine if each.server_bytes is not None]
        if len(held) == len(mine):
            yield "server_card_mib", sum(held) / MIB
        yield from _mean("card_busy_share", [each.busy for each in mine])
        yield from _energy(mine, lasted_s)
        yield from _mean("sm_mhz", [each.sm_mhz for each in mine])
        if sm_mhz := [mhz for each in mine for mhz in each.sm_mhz]:
            yield "sm_mhz_min", min(sm_mhz)
        yield from _mean("mem_mhz", [each.mem_mhz for each in mine])
        if temps := [each.temp_c for each in mine if each.temp_c is not None]:
            yield "temp_c", max(temps)
        for name, bits in (("throttled", THROTTLES), ("power_capped", POWER_CAP)):
            if shares := [sum(bool(each & bits) for each in its.reasons) / len(its.reasons) for its in mine if its.reasons]:
                yield name, max(shares)


class Cards:
    """The cards of this machine, between :meth:`open` and :meth:`close`; none where NVML can't be asked."""

    def __init__(self) -> None:
        self._handles: tuple[Any, ...] = ()

    def open(self) -> None:
        """May take a second: the driver wakes the cards."""
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        count = _told(pynvml.nvmlDeviceGetCount) or 0
        handles = (_told(pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(count))
        self._handles = tuple(each for each in handles if each is not None)
        if not self._handles:
            _told(pynvml.nvmlShutdown)

    def close(self) -> None:
        """Let them sleep; twice is harmless."""
        if self._handles:
            import pynvml

            self._handles = ()
            _told(pynvml.nvmlShutdown)

    def begin(self) -> Stretch:
        """A repetition begins."""
        return Stretch(tuple(_Seen(each, _energy_mj(each)) for each in self._handles))


def _energy(cards: list[_Seen], lasted_s: float) -> Iterator[tuple[str, float]]:
    """Power and energy of all together, where each tells."""
    import pynvml

    took = [found for each in cards if (found := each.energy_j(lasted_s)) is not None]
    if len(took) == len(cards) and lasted_s > 0:
        energy_j = sum(joules for joules, _ in took)
        yield "power_w", energy_j / lasted_s
        yield "energy_j", energy_j
        yield "energy_counted", float(all(counted for _, counted in took))
    limits = [found for each in cards if (found := _told(pynvml.nvmlDeviceGetEnforcedPowerLimit, each.card)) is not None]
    if len(limits) == len(cards):
        yield "power_limit_w", sum(limits) / 1e3


def _mean(name: str, values: list[list[float]] | list[list[int]]) -> Iterator[tuple[str, float]]:
    """Of each card's mean, of those that tell."""
    if means := [statistics.fmean(each) for each in values if each]:
        yield name, statistics.fmean(means)


def _held(card: Any, pids: Collection[int]) -> dict[int, int | None]:  # noqa: ANN401  (an NVML handle)
    """Bytes of those processes that are on a card, None where the driver lists a process without its size."""
    import pynvml

    listed = dict[int, int | None]()
    for ask in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        for process in _told(ask, card) or ():
            if process.pid in pids and listed.get(process.pid) is None:  # one that computes and draws is in both lists
                listed[process.pid] = process.usedGpuMemory
    return listed


def _energy_mj(card: Any) -> int | None:  # noqa: ANN401
    """Since the driver was loaded; for Volta and newer (nvmlDeviceGetTotalEnergyConsumption)."""
    import pynvml

    found = _told(pynvml.nvmlDeviceGetTotalEnergyConsumption, card)
    return None if found is None else int(found)


def _told(ask: Callable[..., Any], *about: Any) -> Any:  # noqa: ANN401
    """An answer; None where a card or its driver doesn't know the question."""
    import pynvml

    try:
        return ask(*about)
    except pynvml.NVMLError:
        return None
