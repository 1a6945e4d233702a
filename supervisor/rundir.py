"""The run folder: one llmctl a home, described so that ``status`` and ``down`` find it, and swept when its owner was killed.

The lock is a ``flock`` on the folder itself: it vanishes with the process, and there is no lock file to go stale. The description,
``instance.json``, names the owner and its children by pid *and* start time, since a pid alone may be somebody else's by now.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import psutil

from supervisor.errors import Error, Exit

INSTANCE: Final = "instance.json"
SAME_START_S: Final = 0.05
"""Two readings of one process's start time differ by less (the kernel counts in ticks of 10 ms)."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process that can't be mistaken for a later one with the same pid."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has this pid now. Raises psutil.NoSuchProcess."""
        return cls(pid, psutil.Process(pid).create_time())

    def alive(self) -> bool:
        """Whether it still runs; a zombie counts as gone."""
        try:
            now = psutil.Process(self.pid)
            return abs(now.create_time() - self.started) < SAME_START_S and now.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it is still itself."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass(frozen=True, slots=True)
class Instance:
    """The running llmctl of a home, as its run folder tells it."""

    process: Process
    address: str
    presets: tuple[str, ...]
    token: str
    """Lets the holder of this file, so this user, use ``/llmctl/…``; new at each start."""
    children: tuple[Process, ...] = field(default=())


class RunDir:
    """The claimed run folder. Its owner alone writes there."""

    def __init__(self, folder: Path, instance: Instance) -> None:
        self.folder = folder
        self.instance = instance

    def child_folder(self, name: str) -> Path:
        """The folder in which the child called ``name`` runs."""
        return self.folder / name

    def note_children(self, pids: Iterable[int]) -> None:
        """Say which children live, so that a successor finds those that outlive a kill."""
        alive = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                alive.append(Process.of(pid))
        self.describe(children=tuple(alive))

    def describe(self, **changes: Any) -> None:  # noqa: ANN401
        """Change the description; the file is replaced whole."""
        self.instance = replace(self.instance, **changes)
        part = self.folder / f"{INSTANCE}.part"
        part.write_text(json.dumps(asdict(self.instance)))
        part.replace(self.folder / INSTANCE)


@contextmanager
def claim(folder: Path, presets: tuple[str, ...], token: str) -> Iterator[RunDir]:
    """Become the one llmctl of this home until the block ends; then nothing is left in the folder.

    What a killed predecessor left (processes, sockets) is removed first. Raises :class:`Error` (exit code 7) that names the
    holder when another llmctl has it.
    """
    _make(folder)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not _lock(handle):
            raise busy(folder, _parse(folder))
        sweep(folder)
        owned = RunDir(folder, Instance(Process.of(os.getpid()), "", presets, token))
        owned.describe()
        try:
            yield owned
        finally:
            sweep(folder)
    finally:
        os.close(handle)


def busy(folder: Path, holder: Instance | None) -> Error:
    """The :class:`Error` (exit code 7) for a home that has its llmctl already."""
    who = f"llmctl (pid {holder.process.pid}) serves {', '.join(holder.presets)}" if holder else "another llmctl has it"
    return Error(f"the run folder {folder} is taken: {who}", exit=Exit.BUSY, hint="llmctl down")


def read(folder: Path) -> Instance | None:
    """The llmctl that runs now, or None; a description whose process is gone counts as none."""
    found = _parse(folder)
    return found if found and found.process.alive() else None


def clear(folder: Path) -> bool:
    """Sweep what a killed llmctl left, unless one runs; whether there was anything."""
    if not folder.is_dir():
        return False
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return _lock(handle) and sweep(folder)
    finally:
        os.close(handle)


def sweep(folder: Path) -> bool:
    """End the children that the description names, then empty the folder. Only for the holder of the lock."""
    found = _parse(folder)
    for child in found.children if found else ():
        child.signal(signal.SIGKILL)
    entries = list(folder.iterdir())
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    return bool(entries)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as exc:
        raise Error(f"the run folder {folder} can't be made: {exc.strerror}", exit=Exit.BUSY, hint="set LLMCTL_HOME") from exc
    if status.st_uid != os.getuid() or not folder.is_dir():
        raise Error(f"the run folder {folder} belongs to uid {status.st_uid}, not to you", exit=Exit.BUSY, hint="set LLMCTL_HOME")
    folder.chmod(0o700)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _parse(folder: Path) -> Instance | None:
    try:
        raw: Mapping[str, Any] = json.loads((folder / INSTANCE).read_text())
        return Instance(
            process=_process(raw["process"]),
            address=str(raw["address"]),
            presets=tuple(raw["presets"]),
            token=str(raw["token"]),
            children=tuple(_process(each) for each in raw["children"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _process(raw: Mapping[str, Any]) -> Process:
    found = Process(int(raw["pid"]), float(raw["started"]))
    if found.pid <= 0:
        raise ValueError("to kill, such a pid is a whole group")
    return found
