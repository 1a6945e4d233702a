"""Host memory within a container's limit, on recorded machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor import memory
from supervisor.memory import Memory
from supervisor.units import GIB, MIB

MEMINFO = "MemTotal:       33554432 kB\nMemFree:  1048576 kB\nMemAvailable:   25165824 kB\nHugePages_Total:  0\n"
WHOLE = Memory(32 * GIB, 24 * GIB)


def machine(root: Path, cgroup: str = "", **files: str) -> Path:
    """A root folder with /proc and these files under /sys/fs/cgroup; two underscores are a slash."""
    contents = {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup}
    contents |= {f"sys/fs/cgroup/{name.replace('__', '/')}": text for name, text in files.items()}
    for name, text in contents.items():
        path = root / name.replace("-", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(folder: str, limit: str, used: int = 0, inactive: int = 0) -> dict[str, str]:
    return {
        f"{folder}memory.max": f"{limit}\n",
        f"{folder}memory.current": f"{used}\n",
        f"{folder}memory.stat": f"anon 5\ninactive_file {inactive}\n",
    }


def test_without_a_limit_it_is_the_kernels_figure(tmp_path: Path) -> None:
    assert memory.read(machine(tmp_path)) == WHOLE
    assert memory.read(machine(tmp_path, "0::/user.slice\n", **v2("user.slice/", "max"))) == WHOLE


def test_a_groups_limit_counts_less_what_it_uses_but_for_its_cache(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/box\n", **v2("box/", str(8 * GIB), used=3 * GIB, inactive=1 * GIB))
    assert memory.read(root) == Memory(8 * GIB, 6 * GIB, limited=True)


def test_the_limit_of_a_group_above_counts_too(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/outer/inner\n", **v2("outer/inner/", "max"), **v2("outer/", str(2 * GIB), used=512 * MIB))
    assert memory.read(root) == Memory(2 * GIB, 1536 * MIB, limited=True)


def test_in_a_container_the_mount_is_the_group_itself(tmp_path: Path) -> None:
    """The path in /proc/self/cgroup is the host's, and nothing lies there."""
    root = machine(tmp_path, "0::/docker/4f2a\n", **v2("", str(4 * GIB), used=1 * GIB))
    assert memory.read(root) == Memory(4 * GIB, 3 * GIB, limited=True)


@pytest.mark.parametrize(("limit", "limited"), [(str(4 * GIB), True), ("9223372036854771712", False)])
def test_version_1(tmp_path: Path, limit: str, limited: bool) -> None:
    folder = "memory/box/"
    files = {
        f"{folder}memory.limit_in_bytes": limit,
        f"{folder}memory.usage_in_bytes": str(GIB),
        f"{folder}memory.stat": f"total_inactive_file {GIB // 2}\n",
    }
    root = machine(tmp_path, "4:memory,hugetlb:/box\n1:cpu:/\n", **files)
    assert memory.read(root) == (Memory(4 * GIB, 3 * GIB + GIB // 2, limited=True) if limited else WHOLE)


def test_a_group_that_uses_more_than_its_limit_leaves_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/box\n", **v2("box/", str(GIB), used=2 * GIB))
    assert memory.read(root) == Memory(GIB, 0, limited=True)


VMSTAT = "nr_free_pages 8\noom_kill 3\npgfault 9\n"
V2_EVENTS = "low 0\nhigh 0\nmax 12\noom 1\noom_kill {}\noom_group_kill 0\n"
V1_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "kills"),
    [
        ("", {}, 3),
        ("0::/\n", {}, 3),  # the root group of version 2 has no memory.events
        ("0::/user.slice\n", {"user.slice/memory.events": V2_EVENTS.format(2)}, 2),  # others' victims don't count
        ("0::/a/b\n", {"a/memory.events": V2_EVENTS.format(5)}, 5),  # the nearest that counts its memory
        ("0::/a/b\n", {"a/memory.events": V2_EVENTS.format(5), "a/b/memory.events": V2_EVENTS.format(0)}, 0),
        ("0::/docker/4f2a\n", {"memory.events": V2_EVENTS.format(4)}, 4),  # in a container the mount is the group
        ("4:memory:/box\n0::/\n", {"memory/box/memory.oom_control": V1_CONTROL.format(1)}, 1),
        ("4:memory:/box\n", {"memory/box/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"}, 3),  # before Linux 4.13
    ],
)
def test_the_kernels_victims_are_counted_where_a_child_would_be_one(
    tmp_path: Path, cgroup: str, files: dict[str, str], kills: int
) -> None:
    root = machine(tmp_path, cgroup, **files)
    (root / "proc/vmstat").write_text(VMSTAT)
    assert memory.oom_kills(root) == kills


def test_this_machine() -> None:
    here = memory.read()
    assert 0 < here.available_bytes <= here.total_bytes
    assert memory.oom_kills() >= 0
