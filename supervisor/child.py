"""One llama-server process: spawn, watch, read its log, stop. Owns nothing else; who wants it and why is the arbiter's.

The child runs in the 0700 run folder and listens on a socket there by a relative name. It has a process group of its own (a Ctrl-C
on our terminal isn't its business), an allow-listed environment, its output in a file (a pipe that nobody drains stalls inference)
and the death signal of :mod:`~supervisor.launcher`. Its end is noticed through a pidfd, which can't be confused by a reused pid.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from supervisor import launcher
from supervisor.argv import SOCKET
from supervisor.errors import Error, Exit
from supervisor.units import KIB, MIB

TERM_S: Final = 5.0
"""After the first SIGTERM. llama-server with its connections closed was seen to need 26-54 ms, on busy cores seconds."""
SECOND_TERM_S: Final = 2.0
"""After the second, at which llama-server exits at once unless a batch is computing."""
HEAD_BYTES: Final = MIB
TAIL_BYTES: Final = 16 * 1024
KEEP_LOGS: Final = 5
"""Log files kept a preset: this start's and four before."""


class Child:
    """A spawned process. ``await wait()`` gives its exit code; ``await stop()`` ends it, whatever it takes."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], folder: Path, log: Path) -> None:
        self.name = name
        self.pid = process.pid
        self.folder = folder
        self.socket = folder / SOCKET
        self.log = log
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._reap)

    def __repr__(self) -> str:
        state = f"ended {self.returncode}" if self._ended.done() else "alive"
        return f"<Child {self.name} pid={self.pid} {state}>"

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._ended.result() if self._ended.done() else None

    def _reap(self) -> None:
        code = self._process.poll()
        if code is None:
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        with contextlib.suppress(FileNotFoundError):
            self.socket.unlink()  # llama-server doesn't, and a stale one makes the next bind fail
        self._ended.set_result(code)

    async def wait(self) -> int:
        """The exit code, once the process is gone and reaped. Cancelling it does nothing to the process."""
        return await asyncio.shield(self._ended)

    async def stop(self, term_s: float = TERM_S) -> int:
        """TERM, TERM again, KILL, each with a bound; returns the exit code. Close its connections first: it waits for them.

        If cancelled, kills at once and waits, so that no process is left behind.
        """
        try:
            for number, patience_s in ((signal.SIGTERM, term_s), (signal.SIGTERM, SECOND_TERM_S)):
                self._signal(number)
                with contextlib.suppress(TimeoutError):
                    return await asyncio.wait_for(self.wait(), patience_s)
            self._signal(signal.SIGKILL)
            return await self.wait()
        except asyncio.CancelledError:
            self._signal(signal.SIGKILL)
            await self.wait()
            raise

    def kill(self) -> None:
        """End it now. It is gone when :meth:`wait` returns."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def anonymous_bytes(self) -> int:
        """Memory of its own that it holds now (RssAnon); a mapped file's pages are the page cache's. 0 when it is gone."""
        return anonymous_bytes(self.pid)

    def read_bytes(self) -> int:
        """How much of its files it has read or mapped in since its start: how far a load is. 0 when it is gone."""
        return max(_status_bytes(self.pid, "RssFile:"), _read_bytes(self.pid))

    def log_tail(self) -> str:
        """The last 16 KiB of what it wrote since this start."""
        return tail(self.log)

    def log_head(self) -> str:
        """The first 1 MiB of what it wrote since this start: a load with all that it allocates takes some 40 KiB."""
        try:
            with self.log.open("rb") as file:
                return file.read(HEAD_BYTES).decode(errors="replace")
        except OSError:
            return ""


def spawn(name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> Child:
    """Start ``command`` in ``folder`` with its output in ``log``; older logs are kept as ``.1`` … ``.4``.

    Must be called on the main thread, whose end is the end of the process: the death signal fires with the spawning thread.
    Raises :class:`Error` (exit code 8) when the process can't be made.
    """
    assert threading.current_thread() is threading.main_thread(), "a child's death signal is bound to the thread that spawned it"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / SOCKET).unlink(missing_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        _rotate(log)
        with log.open("ab") as output:
            process = subprocess.Popen(
                launcher.command(*command),
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
    except OSError as exc:
        raise _cannot(name, exc) from exc
    try:
        return Child(name, process, folder, log)
    except OSError as exc:  # no descriptor left to watch it by
        process.kill()
        process.wait()
        raise _cannot(name, exc) from exc


def tail(log: Path, most_bytes: int = TAIL_BYTES) -> str:
    """The end of a log file; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def anonymous_bytes(pid: int) -> int:
    """``RssAnon`` of a process; 0 when it is gone."""
    return _status_bytes(pid, "RssAnon:")


def _status_bytes(pid: int, name: str) -> int:
    """A size of /proc/PID/status, which are in kB (man 5 proc)."""
    return next((int(line.split()[1]) * KIB for line in _proc(pid, "status") if line.startswith(name)), 0)


def _read_bytes(pid: int) -> int:
    return next((int(line.split()[1]) for line in _proc(pid, "io") if line.startswith("rchar:")), 0)


def _proc(pid: int, file: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def _cannot(name: str, exc: OSError) -> Error:
    return Error(f"the process of {name} can't be started: {exc}", exit=Exit.CHILD, hint="llmctl logs")


def _rotate(log: Path) -> None:
    for number in range(KEEP_LOGS - 1, 0, -1):
        older = log if number == 1 else log.with_name(f"{log.name}.{number - 1}")
        if older.exists():
            older.replace(log.with_name(f"{log.name}.{number}"))
