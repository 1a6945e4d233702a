"""The gauges on a real process that works and holds memory, and on made-up answers of NVML."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from bench import gauges
from bench.gauges import Gauges
from supervisor.hardware import Card, Hardware
from supervisor.units import GIB, MIB
from tests.conftest import WAIT_S, until

HELD_MIB = 48
TICKS_S = 0.02
"""/proc counts user's and system's time in ticks of 10 ms each."""
NEVER_S = 3600.0
"""Between looks: only the one at the end is made."""
WORKER = f"""
import subprocess, sys, time
held = bytearray({HELD_MIB} << 20)
if sys.argv[1:]:
    below = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=sys.stdout)
print("ready", flush=True)
for line in sys.stdin:
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    print("done", flush=True)
"""


class Worker:
    """Holds memory; burns 0.3 s of a core each time it is asked to. With ``below``, it has a child that holds as much."""

    def __init__(self, below: bool = False) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, *([WORKER] if below else [])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(1 + below):
            self.says("ready")

    def says(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def burn(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.says("done")

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.end()


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine's own cards do is no test's affair."""
    monkeypatch.setitem(sys.modules, "pynvml", None)


def bounded(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), WAIT_S))


def seen(*pids: int, during: Callable[[], object] = lambda: None, **more: Any) -> dict[str, float]:
    """One repetition."""
    found: dict[str, float] = {}

    async def test() -> None:
        async with Gauges(pids, os.getpid(), **{"every_s": NEVER_S, **more}) as watching:
            watching.mark()
            during()
            found.update(watching.take())

    bounded(test)
    return found


def test_what_a_server_holds_and_works(worker: Worker) -> None:
    async def test() -> None:
        async with Gauges([worker.process.pid], os.getpid(), every_s=NEVER_S) as watching:
            began_s = time.perf_counter()
            watching.mark()
            worker.burn()
            worked = watching.take()
            worked_s = worked["cpu_share"] * (time.perf_counter() - began_s)
            watching.mark()
            await asyncio.sleep(0.05)  # it waits for its next line
            rested = watching.take()
        assert HELD_MIB < worked["anonymous_mib"] < worked["rss_mib"] < HELD_MIB + 32
        assert worked_s >= 0.3 - TICKS_S
        assert worked["cpu_share"] > rested["cpu_share"]
        assert 0 < worked["machine_cpu_share"] <= 1
        assert worked["generator_cpu_share"] >= worked["gauges_cpu_share"] >= 0
        assert 0 <= worked["others_cpu_share"] <= worked["machine_cpu_share"] * psutil.cpu_count()
        assert set(worked) <= set(gauges.BY_NAME)
        assert not any("card" in name or name == "energy_j" for name in worked)

    bounded(test)


def test_a_servers_children_count() -> None:
    """A child that began before, and one that has ended within the repetition."""
    top = Worker(below=True)
    try:
        found = seen(top.process.pid)
        assert 2 * HELD_MIB < found["anonymous_mib"] < 2 * HELD_MIB + 64
    finally:
        top.end()


def test_who_began_and_ended_meanwhile_has_worked_all_the_same(worker: Worker) -> None:
    """We are the server here: the worker is our child."""
    made: list[Worker] = []

    async def test() -> None:
        async with Gauges([os.getpid()], worker.process.pid, every_s=NEVER_S) as watching:
            began_s = time.perf_counter()
            watching.mark()
            made.append(Worker())
            made[0].burn()
            watching._look(watching._seen)  # type: ignore[arg-type]
            used_s = 0.3
            made[0].end()
            now = watching._seen
            assert now is not None
            ended = [cpu_s for process, cpu_s in now.after_s.items() if process.pid == made[0].process.pid]
            assert ended[0] >= used_s - TICKS_S
            found = watching.take()
            assert found["cpu_share"] * (time.perf_counter() - began_s) >= used_s - TICKS_S
            assert [cpu_s for process, cpu_s in now.after_s.items() if process.pid == made[0].process.pid] == ended

    bounded(test)


def test_a_server_that_nobody_knows_the_process_of(worker: Worker) -> None:
    found = seen(during=worker.burn)
    assert {"generator_cpu_share", "machine_cpu_share"} <= set(found)
    assert not {"rss_mib", "anonymous_mib", "cpu_share", "others_cpu_share"} & set(found)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(WAIT_S)
    assert "rss_mib" not in seen(gone.pid)


def test_a_peak_between_the_ends_is_seen() -> None:
    """The thread looks on its own."""

    async def test() -> None:
        worker = Worker()
        try:
            async with Gauges([worker.process.pid], os.getpid(), every_s=0.002) as watching:
                watching.mark()
                now = watching._seen
                assert now is not None
                until(lambda: now.rss_bytes > HELD_MIB * MIB)
                worker.end()
                found = watching.take()
        finally:
            if worker.process.poll() is None:
                worker.end()
        assert found["rss_mib"] > HELD_MIB
        assert found["gauges_cpu_share"] > 0

    bounded(test)


def test_pressure_and_clocks_as_the_kernel_writes_them(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    for cpu in cpus:
        place = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        place.mkdir(parents=True)
        (place / "scaling_cur_freq").write_text("2200000\n")
    fastest = tmp_path / f"sys/devices/system/cpu/cpu{cpus[-1]}/cpufreq/scaling_cur_freq"
    fastest.write_text("4400000\n")
    psi = tmp_path / "proc/pressure/cpu"
    psi.parent.mkdir(parents=True)
    psi.write_text("some avg10=1.00 avg60=0.07 avg300=0.21 total=1000000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")

    def waits() -> None:
        psi.write_text("some avg10=1.00 avg60=0.07 avg300=0.21 total=1000400\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")

    found = seen(during=waits, root=tmp_path)
    assert (found["cpu_mhz"], found["cpu_mhz_min"]) == (4400, 4400)
    assert found["pressure"] > 0
    assert not {"pressure", "cpu_mhz"} & set(seen(root=tmp_path / "nothing"))


def test_each_gauge_is_declared_once() -> None:
    assert len(gauges.BY_NAME) == len(gauges.GAUGES)
    assert all(each.unit and each.help for each in gauges.GAUGES)


class Nvml:
    """What pynvml says on a box with cards; a figure that is missing isn't supported."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *cards: dict[str, Any], fails_at: str = "") -> None:
        self.cards = cards
        self.fails_at = fails_at
        self.open = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if name == self.fails_at:
                raise Nvml.NVMLError("Driver/library version mismatch")
            self.open += {"nvmlInit": 1, "nvmlShutdown": -1}.get(name, 0)
            if name in ("nvmlInit", "nvmlShutdown"):
                return None
            assert self.open > 0, f"{name} while NVML is closed"
            if name == "nvmlDeviceGetCount":
                return len(self.cards)
            if name == "nvmlDeviceGetHandleByIndex":
                return args[0]
            told = self.cards[args[0]].get(name.removeprefix("nvmlDeviceGet") + "".join(map(str, args[1:])))
            if told is None:
                raise Nvml.NVMLError("Not Supported")
            return told.pop(0) if isinstance(told, Answers) and len(told) > 1 else told[0] if isinstance(told, Answers) else told

        return call


class Answers(list[Any]):
    """One after the other; the last stays."""


def card(*processes: tuple[int, int | None], gpu: int = 95, **more: Any) -> dict[str, Any]:
    """A 3070 under load."""
    return {
        "MemoryInfo": SimpleNamespace(total=8 * GIB, used=5 * GIB, free=3 * GIB),
        "ComputeRunningProcesses": [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in processes],
        "UtilizationRates": SimpleNamespace(gpu=gpu, memory=40),
        "PowerUsage": 220_500,
        "EnforcedPowerLimit": 240_000,
        "TotalEnergyConsumption": Answers([7_000_000, 7_012_500]),
        "ClockInfo1": 1755,
        "ClockInfo2": 6800,
        "Temperature0": 71,
        "CurrentClocksThrottleReasons": 0,
    } | more


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Callable[[Nvml], Nvml]:
    def put(nvml: Nvml) -> Nvml:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return put


Put = Callable[[Nvml], Nvml]
OURS = os.getppid()
"""Stands for the server where only its number counts."""
OF_CARDS = frozenset(each.name for each in gauges.GAUGES[list(gauges.BY_NAME).index("card_mib") :])


def on_cards(found: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if name in OF_CARDS}


def test_a_card(put: Put) -> None:
    nvml = put(Nvml(card((OURS, 4 * GIB), (77777, GIB))))
    found = on_cards(seen(OURS))
    assert nvml.open == 0
    assert found.pop("power_w") > 0
    assert found == {
        "card_mib": 5120,
        "server_card_mib": 4096,
        "card_busy_share": 0.95,
        "power_limit_w": 240,
        "energy_j": 12.5,
        "energy_counted": 1,
        "sm_mhz": 1755,
        "sm_mhz_min": 1755,
        "mem_mhz": 6800,
        "temp_c": 71,
        "throttled": 0,
        "power_capped": 0,
    }


@pytest.mark.parametrize(
    ("question", "missing"),
    [
        ("MemoryInfo", {"card_mib"}),
        ("EnforcedPowerLimit", {"power_limit_w"}),
        ("ClockInfo1", {"sm_mhz", "sm_mhz_min"}),
        ("ClockInfo2", {"mem_mhz"}),
        ("Temperature0", {"temp_c"}),
        ("CurrentClocksThrottleReasons", {"throttled", "power_capped"}),
        ("UtilizationRates", {"card_busy_share"}),
    ],
)
def test_what_a_card_doesn_t_tell_is_absent(put: Put, question: str, missing: set[str]) -> None:
    put(Nvml(card((OURS, GIB), **{question: None})))
    assert OF_CARDS - set(on_cards(seen(OURS))) == missing


def test_without_a_counter_energy_is_power_and_time(put: Put) -> None:
    put(Nvml(card((OURS, GIB), TotalEnergyConsumption=None)))
    found = seen(OURS)
    assert (found["power_w"], found["energy_counted"]) == (pytest.approx(220.5), 0)
    put(Nvml(card((OURS, GIB), TotalEnergyConsumption=Answers([7_000_000, 1000]))))  # the driver was loaded anew
    assert seen(OURS)["energy_counted"] == 0
    put(Nvml(card((OURS, GIB), TotalEnergyConsumption=None, PowerUsage=None)))
    assert not {"power_w", "energy_j", "energy_counted"} & set(seen(OURS))


def test_a_size_that_the_driver_doesn_t_tell(put: Put) -> None:
    put(Nvml(card((OURS, None))))
    assert OF_CARDS - set(seen(OURS)) == {"server_card_mib"}


def test_only_the_server_s_cards_count(put: Put) -> None:
    put(Nvml(card((99999, GIB), ClockInfo1=300), card((OURS, GIB)), card((OURS, 2 * GIB), ClockInfo1=1655)))
    found = seen(OURS)
    assert (found["card_mib"], found["server_card_mib"], found["energy_j"]) == (10240, 3072, 25)
    assert (found["sm_mhz"], found["sm_mhz_min"]) == (1705, 1655)


@pytest.mark.parametrize("pids", [(OURS,), ()])
def test_where_no_process_is_told_the_cards_that_worked_count(put: Put, pids: tuple[int, ...]) -> None:
    """A container shows the host's pids, or none."""
    put(Nvml(card((99999, GIB), gpu=4), card((88888, GIB), gpu=40)))
    found = seen(*pids)
    assert (found["card_mib"], found["card_busy_share"]) == (5120, 0.4)
    put(Nvml(card(gpu=4)))
    assert on_cards(seen(*pids)) == {}  # a server on the CPU, or on another machine


def test_reasons_for_a_low_clock(put: Put) -> None:
    """Looks at the ends and between: here three."""
    put(Nvml(card((OURS, GIB), CurrentClocksThrottleReasons=Answers([0x4, 0x4 | 0x20, 0x1, 0x2]))))

    async def test() -> None:
        async with Gauges([OURS], os.getpid(), every_s=NEVER_S) as watching:
            watching.mark()
            for _ in range(3):
                watching._look(watching._seen)  # type: ignore[arg-type]
            found = watching.take()
        assert (found["throttled"], found["power_capped"]) == (0.25, 0.5)

    bounded(test)


def test_an_idle_card_s_clock_is_no_clock_under_load(put: Put) -> None:
    put(Nvml(card((OURS, GIB), UtilizationRates=Answers([_rates(0), _rates(90)]), ClockInfo1=Answers([1700]))))

    async def test() -> None:
        async with Gauges([OURS], os.getpid(), every_s=NEVER_S) as watching:
            watching.mark()
            for _ in range(2):
                watching._look(watching._seen)  # type: ignore[arg-type]
            assert watching._seen is not None
            assert watching._seen.cards.cards[0].sm_mhz == [1700]

    bounded(test)


def _rates(gpu: int) -> SimpleNamespace:
    return SimpleNamespace(gpu=gpu, memory=0)


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"])
def test_a_driver_that_fails_means_no_card(put: Put, call: str) -> None:
    nvml = put(Nvml(card((OURS, GIB)), fails_at=call))
    assert on_cards(seen(OURS)) == {}
    assert nvml.open == 0


class TestMachine:
    BOX = Hardware(
        *("AMD Ryzen 7 5800X", frozenset({"avx2"}), "AuthenticAMD 25 33", 8, 32 * GIB, 20 * GIB),
        cards=(
            Card(0, "NVIDIA GeForce RTX 3070", "GPU-1", "86", 8 * GIB, 7 * GIB, 5888, 2100),
            Card(1, "Old", "GPU-2", "61", GIB, GIB),
        ),
        driver="580.95.05",
        no_card="",
    )

    def test_one_with_cards(self, tmp_path: Path) -> None:
        for number, word in enumerate(("performance", "performance")):
            place = tmp_path / f"sys/devices/system/cpu/cpufreq/policy{number}"
            place.mkdir(parents=True)
            (place / "scaling_governor").write_text(word + "\n")
        found = gauges.machine(self.BOX, root=tmp_path)
        assert (found.cpu, found.cores, found.memory_mib) == ("AMD Ryzen 7 5800X", 8, 32768)
        assert found.cards == ("NVIDIA GeForce RTX 3070, 8.0 GiB, 2100 MHz", "Old, 1.0 GiB")
        assert (found.driver, found.governor, found.kernel) == ("580.95.05", "performance", os.uname().release)

    def test_its_identity_is_the_same_each_time_and_tells_nothing(self, tmp_path: Path) -> None:
        without = gauges.machine(self.BOX, root=tmp_path).host
        (tmp_path / "etc").mkdir()
        (tmp_path / "etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n")
        host = gauges.machine(self.BOX, root=tmp_path).host
        assert host == gauges.machine(self.BOX, root=tmp_path).host != without
        assert len(host) == 16
        assert host not in "0123456789abcdef0123456789abcdef"

    def test_this_one(self) -> None:
        found = gauges.machine()
        assert found.cores >= 1
        assert found.memory_mib > 0
        assert found == gauges.machine()
