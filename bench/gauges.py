"""What this machine shows while a repetition runs: memory, cores, cards. Read each half second, and at the repetition's two ends.

What is a counter in the kernel or the driver (CPU time, a card's energy) is read at both ends only, and so is exact; a peak or a clock is
what was seen at the looks. A look reads a few files of the server's own processes and asks each card some questions: it walks through no
other process, and what it takes is a gauge itself. What isn't told (no card, no such counter, a container) is absent and never 0.

What cards show is in ``nvml``.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final

import psutil

from bench import nvml
from bench.result import Machine
from supervisor import child, hardware
from supervisor.units import MIB, size

EVERY_S: Final = 0.5
ROOT: Final = Path("/")


@dataclass(frozen=True, slots=True)
class Gauge:
    """Declares one."""

    name: str
    unit: str
    help: str


GAUGES: Final = (
    Gauge("rss_mib", "MiB", "RAM of the server's processes, mapped files included, at its peak; shared pages count for each"),
    Gauge("anonymous_mib", "MiB", "of that what is no file's, at its peak"),
    Gauge("cpu_share", "cores", "used by the server's processes, in the mean"),
    Gauge("generator_cpu_share", "cores", "used by the load generator, which has one at most"),
    Gauge("gauges_cpu_share", "cores", "of that what reading the gauges took"),
    Gauge("others_cpu_share", "cores", "used by neither the server nor the load generator"),
    Gauge("machine_cpu_share", "ratio", "of all cores used by anybody"),
    Gauge("steal_share", "ratio", "of all cores taken by the host of this virtual machine"),
    Gauge("pressure", "ratio", "of the time in which somebody waited for a core (PSI, some)"),
    Gauge("cpu_mhz", "MHz", "clock of the fastest core, in the mean"),
    Gauge("cpu_mhz_min", "MHz", "clock of the fastest core, at its lowest"),
    Gauge("card_mib", "MiB", "used on the server's cards by anybody, at its peak"),
    Gauge("server_card_mib", "MiB", "used on them by the server's processes, at its peak"),
    Gauge("card_busy_share", "ratio", "of the time in which a card computed, in the mean"),
    Gauge("power_w", "W", "taken by the server's cards together, in the mean"),
    Gauge("power_limit_w", "W", "what they may take together"),
    Gauge("energy_j", "J", "taken by the server's cards together, idle power included"),
    Gauge("energy_counted", "1 or 0", "1 if the energy is by the cards' counters, 0 if it is mean power x time"),
    Gauge("sm_mhz", "MHz", "clock of the cards' multiprocessors under load, in the mean"),
    Gauge("sm_mhz_min", "MHz", "clock of the cards' multiprocessors under load, at its lowest"),
    Gauge("mem_mhz", "MHz", "clock of the cards' memory under load, in the mean"),
    Gauge("temp_c", "°C", "of the hottest card, at its peak"),
    Gauge("throttled", "ratio", "of the looks at which a card was slowed down by heat or by its power supply"),
    Gauge("power_capped", "ratio", "of the looks at which a card's clock was held down by its power limit"),
)
BY_NAME: Final[Mapping[str, Gauge]] = MappingProxyType({each.name: each for each in GAUGES})


@dataclass(frozen=True, slots=True)
class _Cores:
    """Counters of the whole machine, in seconds of all cores together (man 5 proc, /proc/stat; psutil.cpu_times)."""

    busy_s: float
    steal_s: float
    all_s: float

    @classmethod
    def read(cls) -> _Cores:
        now = psutil.cpu_times()
        busy_s = now.user + now.nice + now.system + now.irq + now.softirq  # a guest's time is in the user's
        return cls(busy_s, now.steal, busy_s + now.idle + now.iowait + now.steal)


@dataclass(slots=True)
class _Seen:
    """One repetition so far."""

    at_s: float
    cores: _Cores
    own_s: float
    waited_us: int | None
    cards: nvml.Stretch
    before_s: dict[psutil.Process, float] = field(default_factory=dict)
    """CPU time that each of the server's processes had taken before; one that began since had none."""
    after_s: dict[psutil.Process, float] = field(default_factory=dict)
    """The same at the last look at it: one that has ended since keeps it."""
    rss_bytes: int = 0
    anonymous_bytes: int = 0
    cpu_mhz: list[float] = field(default_factory=list)
    cost_s: float = 0.0


class Gauges:
    """Reads them on a thread while its ``async with`` block runs, between :meth:`mark` and :meth:`take`. NVML is open as long."""

    def __init__(self, pids: Sequence[int], own_pid: int, *, every_s: float = EVERY_S, root: Path = ROOT) -> None:
        """``pids`` are the server's; their children count too. ``root`` is where ``sys`` hangs (a recorded machine in tests)."""
        self._pids = tuple(pids)
        self._own = psutil.Process(own_pid)
        self._every_s = every_s
        self._root = root
        self._clocks = tuple(_clocks(root))
        self._processes: dict[int, psutil.Process] = {}
        self._cards = nvml.Cards()
        self._seen: _Seen | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gauges", daemon=True)

    async def __aenter__(self) -> Gauges:
        await asyncio.to_thread(self._cards.open)
        self._thread.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, where: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()  # within a look
        self._cards.close()

    def mark(self) -> None:
        """A repetition begins now."""
        with self._lock:
            cards = self._cards.begin()
            now = _Seen(time.perf_counter(), _Cores.read(), self._own_s(), _waited_us(self._root), cards)
            now.before_s = {each: cpu_s for each in self._family() if (cpu_s := _cpu_s(each)) is not None}
            now.after_s = dict(now.before_s)
            self._seen = now

    def take(self) -> dict[str, float]:
        """It ends now: what was seen since :meth:`mark`, by name (:data:`GAUGES`). A mark is taken once."""
        with self._lock:
            seen, self._seen = self._seen, None
            assert seen is not None, "take follows mark"
            self._look(seen)
            lasted_s = time.perf_counter() - seen.at_s
            return {name: round(value, 4) for name, value in (*self._of_host(seen, lasted_s), *seen.cards.told(lasted_s))}

    def _watch(self) -> None:
        while not self._ended.wait(self._every_s):
            with self._lock:
                if self._seen is not None:
                    self._look(self._seen)

    def _look(self, seen: _Seen) -> None:
        began_s = time.thread_time()
        rss_bytes = anonymous_bytes = 0
        pids = set[int]()
        for process in self._family():
            if (cpu_s := _cpu_s(process)) is not None:
                seen.after_s[process] = cpu_s
                rss_bytes += _resident_bytes(process)
                anonymous_bytes += child.anonymous_bytes(process.pid)
                pids.add(process.pid)
        seen.rss_bytes = max(seen.rss_bytes, rss_bytes)
        seen.anonymous_bytes = max(seen.anonymous_bytes, anonymous_bytes)
        if clocks := [value for path in self._clocks if (value := _number(path)) is not None]:
            seen.cpu_mhz.append(max(clocks) / 1e3)
        seen.cards.look(pids)
        seen.cost_s += time.thread_time() - began_s

    def _own_s(self) -> float:
        """CPU time of the load generator; /proc counts in ticks of 10 ms, our own clock doesn't."""
        return time.process_time() if self._own.pid == os.getpid() else _cpu_s(self._own) or 0.0

    def _family(self) -> list[psutil.Process]:
        """The server's processes and all below them, as the kernel lists them (``/proc/PID/task/TID/children``)."""
        pids = [pid for pid in self._pids if pid != self._own.pid]
        for pid in pids:
            pids += [each for each in _children(pid) if each not in pids and each != self._own.pid]  # the loop goes on over these
        known, self._processes = self._processes, {}
        for pid in pids:
            try:
                self._processes[pid] = known.get(pid) or psutil.Process(pid)
            except psutil.Error:
                continue
        return list(self._processes.values())

    def _of_host(self, seen: _Seen, lasted_s: float) -> Iterator[tuple[str, float]]:
        now, count = _Cores.read(), psutil.cpu_count() or 1
        own = (self._own_s() - seen.own_s) / lasted_s
        server = sum(max(0.0, after_s - seen.before_s.get(each, 0.0)) for each, after_s in seen.after_s.items()) / lasted_s
        if seen.rss_bytes:
            yield "rss_mib", seen.rss_bytes / MIB
            yield "anonymous_mib", seen.anonymous_bytes / MIB
            yield "cpu_share", server
        yield "generator_cpu_share", own
        yield "gauges_cpu_share", seen.cost_s / lasted_s
        if (all_s := now.all_s - seen.cores.all_s) > 0:
            busy = (now.busy_s - seen.cores.busy_s) / all_s
            if seen.rss_bytes:  # else what is the server's can't be told from what is others'
                yield "others_cpu_share", max(0.0, busy * count - server - own)
            yield "machine_cpu_share", busy
            yield "steal_share", max(0.0, now.steal_s - seen.cores.steal_s) / all_s
        waited_us = _waited_us(self._root)
        if waited_us is not None and seen.waited_us is not None:
            yield "pressure", (waited_us - seen.waited_us) / 1e6 / lasted_s
        if seen.cpu_mhz:
            yield "cpu_mhz", statistics.fmean(seen.cpu_mhz)
            yield "cpu_mhz_min", min(seen.cpu_mhz)


def machine(found: hardware.Hardware | None = None, *, root: Path = ROOT) -> Machine:
    """The machine for a manifest; ``found`` is what was detected of it already."""
    found = found or hardware.detect()
    policies = sorted(root.glob("sys/devices/system/cpu/cpufreq/policy*/scaling_governor"))
    return Machine(
        host=_host(found, _text(root / "etc/machine-id").strip()),
        cpu=found.cpu_name,
        cores=found.cores,
        memory_mib=found.total_bytes // MIB,
        kernel=os.uname().release,
        cards=tuple(_card(each) for each in found.cards),
        driver=found.driver,
        governor=", ".join(sorted({_text(path).strip() for path in policies})),
    )


def _card(card: hardware.Card) -> str:
    clock = f", {card.clock_mhz} MHz" if card.clock_mhz else ""
    return f"{card.name}, {size(card.total_bytes)}{clock}"


def _host(found: hardware.Hardware, machine_id: str) -> str:
    """The id itself isn't to be shown to others, a keyed digest of it may be (man 5 machine-id). A container has none."""
    told = machine_id or f"{found.cpu_name} {found.cores} {found.total_bytes} {' '.join(each.uuid for each in found.cards)}"
    return hmac.new(told.encode(), b"llmctl bench", hashlib.sha256).hexdigest()[:16]


def _cpu_s(process: psutil.Process) -> float | None:
    """CPU time of all threads of a process, those that have ended too; None when it is gone."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _children(pid: int) -> Iterator[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        yield from map(int, _text(Path(f"/proc/{pid}/task/{thread}/children")).split())


def _waited_us(root: Path) -> int | None:
    """The counter of /proc/pressure/cpu: microseconds in which some task waited for a core (Documentation/accounting/psi.rst)."""
    for line in _text(root / "proc/pressure/cpu").splitlines():
        if line.startswith("some "):
            return int(line.rpartition("total=")[2])
    return None


def _clocks(root: Path) -> Iterator[Path]:
    """Where the clock of each core that we may run on stands, in kHz (Documentation/admin-guide/pm/cpufreq.rst)."""
    for cpu in sorted(os.sched_getaffinity(0)):
        path = root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq"
        if path.exists():
            yield path


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
