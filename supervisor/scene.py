"""What the machine says about a child's end: its exit code and log don't know that the kernel chose it, or the card fell off.

:func:`begin` notes the counters at its start, :func:`of` says at its end what moved. The kernel's log is compared by sequence number and
not by time: its stamps are of the scheduler's clock, which nobody corrects, and after days of uptime are seconds away from any other.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor import hardware, memory
from supervisor.causes import Scene

KMSG: Final = Path("/dev/kmsg")
RECORD_BYTES: Final = 16 * 1024
"""A read gives one record and fails if that is longer: 8 KiB with all its parts (CONSOLE_EXT_LOG_MAX, kernel/printk/printk.c up to 6.2)."""
SLEPT_S: Final = 1.0
"""The two clocks are read one after the other; a suspend takes longer than the busiest machine's pause between the two."""
_XID: Final = re.compile(r"NVRM: Xid \([^)]*\): (\d+)")


@dataclass(frozen=True, slots=True)
class Before:
    """The machine when a child started."""

    cuda: bool
    oom_kills: int
    suspended_s: float
    kernel_log: int
    """Sequence number of the newest record; -1 where it can't be read or wasn't."""


def begin(cuda: bool) -> Before:
    """Look now, at the start of a child; ``cuda`` for one on a card. Reads the kernel's log for that, some milliseconds."""
    newest = max((_sequence(record) for record in _records()), default=-1) if cuda else -1
    return Before(cuda, memory.oom_kills(), suspended_s(), newest)


def of(before: Before) -> Scene:
    """What happened since. For a child on a card this opens NVML, and the driver may take its time: not on a loop."""
    return Scene(
        cuda=before.cuda,
        no_card=hardware.nvidia_cards().no_card if before.cuda else "",
        xids=xids(_records(), before.kernel_log) if before.cuda else (),
        oom_kills=max(0, memory.oom_kills() - before.oom_kills),
        slept=suspended_s() - before.suspended_s > SLEPT_S,
    )


def suspended_s() -> float:
    """For how many seconds the machine was suspended since it booted: what CLOCK_BOOTTIME counts and CLOCK_MONOTONIC doesn't."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


def xids(records: Iterable[str], after: int = -1) -> tuple[int, ...]:
    """The NVIDIA driver's error numbers in records of ``/dev/kmsg`` that are newer than sequence number ``after``, oldest first.

    A record is ``4,1234,5678901,-;NVRM: Xid (PCI:0000:01:00): 79, …``: priority, sequence number, µs since boot, flags
    (Documentation/ABI/testing/dev-kmsg). A priority above 7 was written by a program and not by the kernel.
    """
    found = []
    for record in records:
        priority, _, _ = record.partition(",")
        match = _XID.search(record)
        if match and priority.isdigit() and int(priority) <= 7 and _sequence(record) > after:
            found.append(int(match[1]))
    return tuple(found)


def _sequence(record: str) -> int:
    word = record.split(",", 2)[1:2]
    return int(word[0]) if word and word[0].isdigit() else -1


def _records(path: Path = KMSG) -> Iterator[str]:
    """What the kernel's log holds now; nothing where this user may not read it, or a container has none."""
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return
        stack.callback(os.close, descriptor)
        while True:
            try:
                record = os.read(descriptor, RECORD_BYTES)
            except BrokenPipeError:
                continue  # it was overwritten before it was read; the next is the oldest that is left
            except OSError:
                return  # EAGAIN: that was the newest
            if not record:
                return
            yield record.decode(errors="replace")
