"""What the machine says about a child's end: recorded kernel logs, and this machine's own counters."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from supervisor import hardware, memory, scene
from supervisor.causes import Scene

FELL_OFF = "4,1290,5678901234,-;NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
KMSG = [
    "6,338,1286996,-;EXT4-fs (vda): mounted filesystem r/w without journal. Quota mode: none.\n",
    "4,1201,5670000000,-;NVRM: Xid (PCI:0000:01:00): 31, pid=4211, name=llama-server, Ch 00000008, intr 00000000. MMU Fault\n",
    " SUBSYSTEM=pci\n",
    "6,1289,5678901111,c;pcieport 0000:00:01.1: AER: Uncorrected (Fatal) error received\n",
    FELL_OFF,
    "12,1291,5678909999,-;NVRM: Xid (PCI:0000:01:00): 13, typed by a program\n",
    "",
    "x",
]


def test_xids_are_read_off_the_kernels_log() -> None:
    assert scene.xids(KMSG) == (31, 79)
    assert scene.xids(KMSG, after=1201) == (79,)
    assert scene.xids(KMSG, after=1290) == ()
    assert scene.xids([]) == ()
    assert scene.xids(["4,7,9,-;NVRM: Xid (0000:01:00): 62, 0000(0000)\n"]) == (62,)  # drivers before 4xx


def test_an_end_on_a_card_asks_nvml_and_the_kernels_log(monkeypatch: pytest.MonkeyPatch) -> None:
    log = KMSG[:2]
    monkeypatch.setattr(scene, "_records", lambda: iter(log))
    monkeypatch.setattr(hardware, "nvidia_cards", lambda: hardware.Cards(no_card="GPU is lost"))
    before = scene.begin(cuda=True)
    assert before.kernel_log == 1201
    assert scene.of(before) == Scene(cuda=True, no_card="GPU is lost")  # the fault before its start isn't its own
    log.append(FELL_OFF)
    assert scene.of(before).xids == (79,)


def test_an_end_on_the_cpu_leaves_the_card_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(hardware, "nvidia_cards", lambda: asked.append("nvml"))
    monkeypatch.setattr(scene, "_records", lambda: asked.append("kmsg"))
    assert scene.of(scene.begin(cuda=False)) == Scene()
    assert asked == []


def test_what_the_oom_killer_did_before_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = [4]
    monkeypatch.setattr(memory, "oom_kills", lambda: kills[0])
    before = scene.begin(cuda=False)
    assert scene.of(before).oom_kills == 0
    kills[0] = 6
    assert scene.of(before).oom_kills == 2
    kills[0] = 0  # we were moved to another group
    assert scene.of(before).oom_kills == 0


@pytest.mark.parametrize(("suspended_s", "slept"), [(0.0, False), (0.9, False), (1.1, True), (30_000.0, True)])
def test_a_suspend_is_the_difference_of_two_clocks(monkeypatch: pytest.MonkeyPatch, suspended_s: float, slept: bool) -> None:
    clocks = {time.CLOCK_BOOTTIME: 5000.0, time.CLOCK_MONOTONIC: 4000.0}
    monkeypatch.setattr(time, "clock_gettime", clocks.__getitem__)
    before = scene.begin(cuda=False)
    assert before.suspended_s == scene.suspended_s() == 1000.0
    clocks[time.CLOCK_BOOTTIME] += 60.0 + suspended_s
    clocks[time.CLOCK_MONOTONIC] += 60.0
    assert scene.of(before).slept is slept


def test_this_machine() -> None:
    assert scene.suspended_s() > -0.1
    found = scene.of(scene.begin(cuda=True))
    assert (found.cuda, found.oom_kills, found.slept) == (True, 0, False)
    assert bool(found.no_card) is not bool(hardware.nvidia_cards().cards)


def test_a_log_that_may_not_be_read_says_nothing(tmp_path: Path) -> None:
    assert list(scene._records(tmp_path / "kmsg")) == []
    (tmp_path / "kmsg").touch()
    assert list(scene._records(tmp_path / "kmsg")) == []


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="this user may not read the kernel's log")
def test_the_kernels_log_is_read_to_its_end_and_not_waited_for() -> None:
    numbers = [scene._sequence(record) for record in scene._records()]
    assert numbers == sorted(numbers)
    assert numbers[:1] != [-1]
