"""Host memory: what this machine has and what is free now, within a container's limit where there is one.

The kernel's ``MemAvailable`` knows nothing of control groups, so a process in a container that was given 4 GiB of a 64 GiB machine would
plan 64 and be killed. Every group above this process may hold a limit; the one that leaves least counts. What a group uses includes page
cache that it would give back; ``inactive_file`` of its ``memory.stat`` says how much, as ``kubectl top`` and ``docker stats`` count.

It also tells how often the kernel's OOM killer struck (:func:`oom_kills`): a process that it ended looks like one that anybody killed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.units import KIB

ROOT: Final = Path("/")
NO_LIMIT_BYTES: Final = 1 << 60
"""Version 1 writes "no limit" as the largest page-aligned number, 2^63 - 4096; no machine comes near this."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of RAM; ``limited`` names the container's limit as what decided them."""

    total_bytes: int
    available_bytes: int
    limited: bool = False


def read(root: Path = ROOT) -> Memory:
    """Look now. ``root`` is where ``proc`` and ``sys`` hang (a recorded machine in tests)."""
    fields = dict(_fields(_text(root / "proc/meminfo")))
    machine = Memory(fields.get("MemTotal:", 0) * KIB, fields.get("MemAvailable:", 0) * KIB)
    least = machine
    for folder, names in _groups(root):
        limit, used, cache = names
        limit_bytes = _number(folder / limit)
        if limit_bytes is None or limit_bytes >= min(NO_LIMIT_BYTES, machine.total_bytes):
            continue
        reclaimable = dict(_fields(_text(folder / "memory.stat"))).get(cache, 0)
        free_bytes = max(0, limit_bytes - max(0, (_number(folder / used) or 0) - reclaimable))
        if free_bytes < least.available_bytes:
            least = Memory(limit_bytes, free_bytes, limited=True)
    return least


def oom_kills(root: Path = ROOT) -> int:
    """How many processes the kernel's OOM killer has ended among which a child of ours would count: a counter, to be compared with itself.

    Of the nearest control group that counts (``oom_kill`` of ``memory.events``, in version 1 of ``memory.oom_control``): the kernel adds
    every victim there, also when the whole machine ran out (mm/oom_kill.c, ``__oom_kill_process``), and a child is in our group. Else the
    machine's, of ``/proc/vmstat``, where other containers' victims count too. What a daemon such as earlyoom kills is in neither.
    """
    for folder, names in _groups(root):
        events = dict(_fields(_text(folder / ("memory.events" if names is _V2 else "memory.oom_control"))))
        if "oom_kill" in events:
            return events["oom_kill"]
    return dict(_fields(_text(root / "proc/vmstat"))).get("oom_kill", 0)


_V2: Final = ("memory.max", "memory.current", "inactive_file")
_V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _groups(root: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """The memory groups of this process and all above them, with the file names of their version.

    Inside a container the path of ``/proc/self/cgroup`` may not exist below the mount, which is then the group itself.
    """
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        own = mount / path.strip("/")
        found += [(folder, names) for folder in (own, *own.parents) if folder.is_relative_to(mount)]
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _fields(text: str) -> list[tuple[str, int]]:
    """``name number …`` lines, as in /proc/meminfo and memory.stat."""
    words = (line.split() for line in text.splitlines())
    return [(each[0], int(each[1])) for each in words if len(each) > 1 and each[1].isdigit()]
