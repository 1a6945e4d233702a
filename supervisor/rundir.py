"""The run folder: one llmctl a home, described so that ``status`` and ``down`` find it, and swept when its owner was killed.

The lock is a ``flock`` on the folder itself: it vanishes with the process, and there is no lock file to go stale. The description,
``instance.json``, names the owner and its children by pid *and* start time, since a pid alone may be somebody else's by now. A child's
environment names its folder here as its home; by that those are found that it moved out of the reach of the death signal, and those
that were started a moment before the kill, so never noted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from supervisor.errors import Error, Exit

INSTANCE: Final = "instance.json"
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

log = logging.getLogger("llmctl.rundir")


@dataclass(frozen=True, slots=True)
class Process:
    """A process that can't be mistaken for a later one with the same pid."""

    pid: int
    started: str
    """This boot's id and the start time in ticks since it: what a step of the wall clock doesn't touch."""

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has this pid now. Raises ProcessLookupError."""
        started, _ = _stat(pid)
        return cls(pid, started)

    def alive(self) -> bool:
        """Whether it still runs; a zombie counts as gone."""
        try:
            started, state = _stat(self.pid)
        except ProcessLookupError:
            return False
        return started == self.started and state not in "ZX"

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it is still itself."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _stat(pid: int) -> tuple[str, str]:
    """When a process started, and its state (man 5 proc: fields 22 and 3 of stat, behind the name, which may hold anything)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError) as exc:
        raise ProcessLookupError(f"there is no process {pid}") from exc
    return f"{BOOT_ID.read_text().strip()}:{fields[19]}", fields[0]


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

    def __init__(self, folder: Path, instance: Instance, handle: int) -> None:
        self.folder = folder
        self.instance = instance
        self._handle = handle
        self._is_told = True

    def child_folder(self, name: str) -> Path:
        """The folder in which the child called ``name`` runs. Raises :class:`Error` (exit code 3) for a name that isn't of one below it."""
        if not _is_child(name):
            raise Error(f"{name!r} can't be the name of what runs", exit=Exit.CONFIG, hint="rename the preset's file")
        return self.folder / name

    def note_children(self, pids: Mapping[str, int]) -> None:
        """Say which children live, by preset, so that a successor finds those that outlive a kill, and the folders of all."""
        alive = []
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                alive.append(Process.of(pid))
        presets = tuple(dict.fromkeys((*self.instance.presets, *pids)))
        self.describe(children=tuple(alive), presets=presets)

    def describe(self, **changes: Any) -> None:  # noqa: ANN401
        """Change the description; the file is replaced whole.

        Where it can't be written (a full disk, the folder gone) the old one stays, and :meth:`mend` tries again: what runs goes on.
        """
        self.instance = replace(self.instance, **changes)
        part = self.folder / f"{INSTANCE}.part"
        try:
            part.write_text(json.dumps(asdict(self.instance)))
            part.replace(self.folder / INSTANCE)
        except OSError as exc:
            with contextlib.suppress(OSError):
                part.unlink()
            if self._is_told:
                log.warning("%s can't be written: %s; llmctl status and down may not find what runs", part, exc.strerror)
            self._is_told = False
        else:
            self._is_told = True

    def mend(self) -> bool:
        """Make the folder again, lock and describe it, if it was removed or replaced under us; whether it had to be.

        The children's sockets went with it, so those can't be reached any more. To be called now and then: nothing wrong costs three
        looks at the file system. Raises :class:`Error` (exit code 7) when it can't be made, or another llmctl has the new one.
        """
        if self.is_ours():
            if not self._is_told or not (self.folder / INSTANCE).exists():
                self.describe()
            return False
        handle = _open(self.folder)
        found = _parse(self.folder)
        if found and found.process != self.instance.process:
            _clean(self.folder, found)  # of one that came between, and was killed
        self._handle, before = handle, self._handle
        os.close(before)
        log.warning("the run folder %s was gone and is made again", self.folder)
        self.describe()
        return True

    def is_ours(self) -> bool:
        """Whether the folder under the name is still the one that is locked."""
        try:
            return os.path.samestat(self.folder.lstat(), os.fstat(self._handle))
        except OSError:
            return False

    def close(self) -> None:
        """Remove what is ours and give up the lock; twice is harmless."""
        try:
            if self.is_ours():
                sweep(self.folder)
        finally:
            if self._handle >= 0:
                os.close(self._handle)
            self._handle = -1


@contextmanager
def claim(folder: Path, presets: tuple[str, ...], token: str) -> Iterator[RunDir]:
    """Become the one llmctl of this home until the block ends; then nothing is left in the folder.

    What a killed predecessor left (processes, sockets) is removed first. Raises :class:`Error` (exit code 7) that names the
    holder when another llmctl has it.
    """
    owned = RunDir(folder, Instance(Process.of(os.getpid()), "", presets, token), _open(folder))
    try:
        sweep(folder)
        owned.describe()
        yield owned
    finally:
        owned.close()


def _open(folder: Path) -> int:
    """A descriptor of the folder, made if need be, that holds its lock. Raises :class:`Error` (exit code 7) when another has it."""
    _make(folder)
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as exc:  # removed again, or no descriptor is left
        raise Error(f"the run folder {folder} can't be opened: {exc.strerror}", exit=Exit.BUSY, hint="set LLMCTL_HOME") from exc
    if not _lock(handle):
        os.close(handle)
        raise busy(folder, _parse(folder))
    return handle


def busy(folder: Path, holder: Instance | None) -> Error:
    """The :class:`Error` (exit code 7) for a home that has its llmctl already."""
    if holder is None:
        return Error(f"another llmctl has the run folder {folder}", exit=Exit.BUSY, hint="llmctl down")
    at = f" at {holder.address}" if holder.address else ""
    said = f"llmctl (pid {holder.process.pid}) already serves {', '.join(holder.presets)}{at}"
    return Error(said, exit=Exit.BUSY, hint="llmctl down")


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
    """End the children that the description names and those that live here, remove it and their folders. Only for the holder of the lock.

    Whatever else lies in the folder isn't ours and stays. Returns whether there was a description.
    """
    found = _parse(folder)
    for pid in _living_in(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _clean(folder, found)
    return found is not None


def _clean(folder: Path, found: Instance | None) -> None:
    for child in found.children if found else ():
        child.signal(signal.SIGKILL)
    for name in found.presets if found else ():
        if _is_child(name) and not (folder / name).is_symlink():
            shutil.rmtree(folder / name, ignore_errors=True)
    for name in (INSTANCE, f"{INSTANCE}.part"):
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def _living_in(folder: Path) -> list[int]:
    """The user's processes whose home and configuration folder are both one child's folder here, as ``argv.environment`` sets them."""
    found = []
    below = os.fsencode(folder) + b"/"
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            if entry.stat().st_uid != os.getuid():
                continue
            variables = dict(word.partition(b"=")[::2] for word in Path(entry.path, "environ").read_bytes().split(b"\0"))
        except OSError:  # it has ended, or may not be looked at
            continue
        home = variables.get(b"HOME", b"")
        if home == variables.get(b"XDG_CONFIG_HOME") and home.startswith(below) and _is_child(os.fsdecode(home[len(below) :])):
            found.append(int(entry.name))
    return found


def _is_child(name: str) -> bool:
    """Whether ``name`` is one folder below the run folder, and none of its own files: what else it might reach is not ours to remove."""
    return Path(name).name == name and name not in ("", ".", "..", INSTANCE, f"{INSTANCE}.part")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as exc:
        raise Error(f"the run folder {folder} can't be made: {exc.strerror}", exit=Exit.BUSY, hint="set LLMCTL_HOME") from exc
    if folder.is_symlink():
        raise Error(f"the run folder {folder} is a link", exit=Exit.BUSY, hint="set LLMCTL_HOME")
    if status.st_uid != os.getuid():
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
            presets=tuple(map(str, raw["presets"])),
            token=str(raw["token"]),
            children=tuple(_process(each) for each in raw["children"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _process(raw: Mapping[str, Any]) -> Process:
    found = Process(int(raw["pid"]), str(raw["started"]))
    if found.pid <= 0:
        raise ValueError("to kill, such a pid is a whole group")
    return found
