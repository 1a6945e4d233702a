"""What a child writes: a file that stays bounded while it runs, with a few older ones beside it, or memory where no file can be had.

Who writes has the file open for appending and is never asked to reopen it, so a log that grew too long is copied to ``.1`` and emptied in
place (logrotate calls that copytruncate); what is written between the two is lost, a few lines at most. The logs of one preset so
take :data:`LOG_LIMIT` × :data:`KEEP_LOGS` of the disk, and what is written between two looks.

A full disk is no reason not to serve: a child whose log can't be written gets an anonymous file in memory, emptied at the same size. Its
end is what tells why a child died, so that much of an emptied or closed log is kept.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
from pathlib import Path
from typing import Final

from supervisor.units import MIB

LOG_LIMIT = 16 * MIB
"""A log that is larger is moved on. A load writes some 40 KiB, a request 1 KiB."""
KEEP_LOGS: Final = 5
"""Log files kept a preset: this start's, and four that are older or were full."""
HEAD_BYTES: Final = MIB
TAIL_BYTES: Final = 16 * 1024
ROOM_BYTES: Final = MIB
"""A disk with less free counts as full: a start would fit, and its end not."""

_APPENDING: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC

log = logging.getLogger("llmctl.logfile")


class Log:
    """The open log of one start. Its descriptor is ours until :meth:`close`, after which the end is still told. For any thread."""

    def __init__(self, path: Path | None, descriptor: int) -> None:
        self.path = path
        """None for an anonymous file in memory."""
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._trimmed_bytes = 0
        self._older = b""
        """The end of what was moved on."""

    @property
    def descriptor(self) -> int:
        """What the child writes to."""
        return self._descriptor

    @property
    def written_bytes(self) -> int:
        """How much was written since the start, also what was moved on."""
        with self._lock:
            return self._trimmed_bytes + self._size()

    def tail(self, most_bytes: int = TAIL_BYTES) -> str:
        """The last ``most_bytes`` since the start; after a trim or the close, 16 KiB of what was before it at most."""
        with self._lock:
            return self._end(most_bytes).decode(errors="replace")

    def head(self) -> str:
        """The first 1 MiB since the start or the last trim; after the close, of its file, if it has one."""
        with self._lock, contextlib.suppress(OSError):
            if self._descriptor >= 0:
                return os.pread(self._descriptor, HEAD_BYTES, 0).decode(errors="replace")
            if self.path:
                with self.path.open("rb") as file:
                    return file.read(HEAD_BYTES).decode(errors="replace")
        return ""

    def trim(self) -> int:
        """As :func:`trim`. Whoever wants the head must have read it."""
        with self._lock:
            if self._descriptor < 0 or self._size() <= LOG_LIMIT:
                return 0
            self._older = self._end(TAIL_BYTES)
            gone = trim(self.path, self._descriptor)
            self._trimmed_bytes += gone
            return gone

    def close(self) -> None:
        """Let go of the file, once its writer is gone. Twice is harmless."""
        with self._lock:
            if self._descriptor < 0:
                return
            self._older = self._end(TAIL_BYTES)
            self._trimmed_bytes += self._size()
            os.close(self._descriptor)
            self._descriptor = -1

    def _size(self) -> int:
        return os.fstat(self._descriptor).st_size if self._descriptor >= 0 else 0

    def _end(self, most_bytes: int) -> bytes:
        recent = b""
        with contextlib.suppress(OSError):
            if self._descriptor >= 0:
                recent = os.pread(self._descriptor, most_bytes, max(0, self._size() - most_bytes))
        return (self._older + recent)[-most_bytes:]


def start(name: str, path: Path) -> Log:
    """An empty log for a child called ``name``; those of earlier starts move on to ``.1`` … ``.4``.

    In memory, with a warning, where the folder can't be made or the disk is full. Raises OSError when that can't be had either.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not trim(path):  # one that its last start left too long is on its way already
            _move_on(path, 0)
        descriptor = os.open(path, _APPENDING, 0o666)
        try:
            _try(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        return Log(path, descriptor)
    except OSError as exc:
        log.warning("the log of %s is kept in memory: %s can't be written: %s", name, path, exc.strerror)
    descriptor = os.memfd_create(f"{name}.log")
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)  # it is emptied while it is written to
    return Log(None, descriptor)


def tail(path: Path, most_bytes: int = TAIL_BYTES) -> str:
    """The end of a log file; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def trim(path: Path | None, descriptor: int | None = None) -> int:
    """Copy a log that is larger than :data:`LOG_LIMIT` to ``.1`` and empty it; returns how many bytes that were, 0 if it isn't.

    The file's writer must append. ``descriptor`` is the open file, by default ``path`` is opened; without a path there is no copy, and
    where none can be written (space is what is short then) the file is emptied all the same. Never raises.
    """
    if descriptor is not None:
        return _trim(path, descriptor)
    assert path is not None
    try:
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return 0
    try:
        return _trim(path, own)
    finally:
        os.close(own)


def _trim(path: Path | None, descriptor: int) -> int:
    try:
        size = os.fstat(descriptor).st_size
        if size <= LOG_LIMIT:
            return 0
        if path is not None:
            try:
                _copy(descriptor, size, path)
            except OSError as exc:
                log.warning("%s is emptied without a copy: %s", path, exc.strerror)
        size = os.fstat(descriptor).st_size
        os.ftruncate(descriptor, 0)
    except OSError as exc:
        log.warning("%s can't be emptied: %s", path, exc.strerror)
        return 0
    return size


def _copy(descriptor: int, size: int, path: Path) -> None:
    """The last :data:`LOG_LIMIT` of ``size`` bytes, and what is written meanwhile."""
    _move_on(path, 1)  # first: the oldest's room is free then
    older = _aged(path, 1)
    at, end = max(0, size - LOG_LIMIT), size + LOG_LIMIT  # a flood may write as fast as this copies
    try:
        with older.open("wb") as file:
            while at < end and (sent := os.sendfile(file.fileno(), descriptor, at, MIB)):
                at += sent
    except OSError:
        older.unlink(missing_ok=True)
        raise


def _try(descriptor: int) -> None:
    """Raise OSError where a log would soon be cut: no room on the disk, or none for this user, or not a file."""
    disk = os.fstatvfs(descriptor)
    if disk.f_blocks and disk.f_bavail * disk.f_frsize < ROOM_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.write(descriptor, b"\n")
    os.ftruncate(descriptor, 0)


def _move_on(path: Path, youngest: int) -> None:
    """Each log from ``youngest`` on (0 is the newest) takes the next number; the oldest is gone."""
    for number in range(KEEP_LOGS - 2, youngest - 1, -1):
        if _aged(path, number).is_file():
            _aged(path, number).replace(_aged(path, number + 1))


def _aged(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path
