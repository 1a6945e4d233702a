"""One llama-server process: spawn, watch, read its log, stop. Owns nothing else; who wants it and why is the arbiter's.

The child runs in the 0700 run folder and listens on a socket there by a relative name. It has a process group of its own (a Ctrl-C
on our terminal isn't its business), an allow-listed environment, its output in a file (:mod:`~supervisor.logfile`; a pipe that nobody
drains stalls inference) and the death signal of :mod:`~supervisor.launcher`. Its end is noticed through a pidfd, which can't be confused
by a reused pid. What it does meanwhile is read from ``/proc``; once it is reaped nothing is, since the pid may be somebody's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from supervisor import launcher, logfile
from supervisor.argv import SOCKET
from supervisor.errors import Error, Exit
from supervisor.logfile import Log
from supervisor.units import KIB

log = logging.getLogger("llmctl.child")

TERM_S: Final = 5.0
"""After the first SIGTERM. llama-server with its connections closed was seen to need 26-54 ms, on busy cores seconds."""
SECOND_TERM_S: Final = 2.0
"""After the second, at which llama-server exits at once unless a batch is computing."""
KILL_S: Final = 10.0
"""After SIGKILL, which ends whatever isn't in the kernel."""
_TICKS_A_S: Final = os.sysconf("SC_CLK_TCK")
_NS: Final = 1e-9
_EXITING: Final = 0x4
_PROC_BYTES: Final = 64 * KIB
"""One read is one look: status has 1.5 KiB, and a line of hundreds of CPUs in it. Path.read_text takes four times as long."""


class Child:
    """A spawned process. ``await wait()`` gives its exit code; ``await stop()`` ends it, whatever it takes."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], folder: Path, log: Log) -> None:
        self.name = name
        self.pid = process.pid
        self.folder = folder
        self.socket = folder / SOCKET
        self._log = log
        self._waits_ns: dict[int, int] = {}
        """By thread, at the last look."""
        self._waited_ns = 0
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
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)  # what it leaves (of a script, the engine). Its pid is its own until it is polled
        code = self._process.poll()
        if code is None:
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        with contextlib.suppress(OSError):  # its folder may be gone, or be something else by now
            self.socket.unlink()  # llama-server doesn't, and a stale one makes the next bind fail
        with contextlib.suppress(OSError):
            self._log.close()
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
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(self.wait(), KILL_S)
            log.error(
                "%s (pid %d) can't be killed: a driver holds it; only a restart of the machine may end it", self.name, self.pid
            )
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
        return 0 if self._ended.done() else anonymous_bytes(self.pid)

    def resident_bytes(self) -> int:
        """All of its memory that is in RAM now (VmRSS), the mapped model file's pages too. 0 when it is gone."""
        return 0 if self._ended.done() else _status_bytes(self.pid, "VmRSS:")

    def read_bytes(self) -> int:
        """How much of its files it has read or mapped in since its start: how far a load is. 0 when it is gone."""
        return 0 if self._ended.done() else max(_status_bytes(self.pid, "RssFile:"), _read_bytes(self.pid))

    def stopped(self) -> bool:
        """Whether it is stopped by a signal or a debugger (state T or t), so can't do anything until it is continued."""
        return not self._ended.done() and _stat(self.pid)[:1] in (["T"], ["t"])

    def exiting(self) -> bool:
        """Whether its end has begun in the kernel (PF_EXITING, include/linux/sched.h).

        Its connections are closed then, and a card's driver may take a second over the rest.
        """
        fields = [] if self._ended.done() else _stat(self.pid)
        return bool(fields) and (fields[0] in "ZX" or bool(int(fields[6]) & _EXITING))

    def effort_s(self) -> float:
        """For how many seconds its threads computed, or could have and waited for a core, since its start. 0.0 when it is gone.

        It grows while the child works, however busy the machine is, and never falls. On a core: utime and stime of the process, which
        include threads that ended. Waiting: what each thread's run-queue wait gained since the last look (``schedstat``, field 2, ns:
        Documentation/scheduler/sched-stats.rst); of a thread that ended, what it had at the last look. A kernel without
        CONFIG_SCHED_INFO has no such file, and then it is CPU time alone.
        """
        fields = [] if self._ended.done() else _stat(self.pid)
        if not fields:
            return 0.0
        waits_ns = _waits_ns(self.pid)
        for thread, wait_ns in waits_ns.items():
            before_ns = self._waits_ns.get(thread, 0)
            self._waited_ns += wait_ns - before_ns if wait_ns >= before_ns else wait_ns  # less: another thread has its number now
        self._waits_ns = waits_ns
        return (int(fields[11]) + int(fields[12])) / _TICKS_A_S + self._waited_ns * _NS

    @property
    def logged_bytes(self) -> int:
        """How much it has written to its log since its start, also what was trimmed."""
        return self._log.written_bytes

    def trim_log(self) -> int:
        """Move its log on if it is too long (:func:`logfile.trim`); returns the bytes moved. What its head said must be read by then."""
        return self._log.trim()

    def log_tail(self) -> str:
        """The last 16 KiB of what it wrote since this start."""
        return self._log.tail()

    def log_head(self) -> str:
        """The first 1 MiB of what it wrote since this start or the last trim: a load with all that it allocates takes some 40 KiB."""
        return self._log.head()


def spawn(name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> Child:
    """Start ``command`` in ``folder`` with its output in ``log``; older logs are kept as ``.1`` … ``.4``.

    A log that can't be written is kept in memory. Must be called on the main thread, whose end is the end of the process: the death
    signal fires with the spawning thread. Raises :class:`Error` (exit code 8) when the process can't be made.
    """
    assert threading.current_thread() is threading.main_thread(), "a child's death signal is bound to the thread that spawned it"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / SOCKET).unlink(missing_ok=True)
        output = logfile.start(name, log)
    except OSError as exc:
        raise _cannot(name, exc) from exc
    try:
        process = subprocess.Popen(
            launcher.command(*command),
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output.descriptor,
            stderr=output.descriptor,
            start_new_session=True,
        )
    except OSError as exc:
        output.close()
        raise _cannot(name, exc) from exc
    try:
        return Child(name, process, folder, output)
    except OSError as exc:  # no descriptor left to watch it by
        process.kill()
        process.wait()
        output.close()
        raise _cannot(name, exc) from exc


def anonymous_bytes(pid: int) -> int:
    """``RssAnon`` of a process; 0 when it is gone."""
    return _status_bytes(pid, "RssAnon:")


def _status_bytes(pid: int, name: str) -> int:
    """A size of /proc/PID/status, which are in kB (man 5 proc)."""
    return next((int(line.split()[1]) * KIB for line in _proc(pid, "status") if line.startswith(name)), 0)


def _read_bytes(pid: int) -> int:
    return next((int(line.split()[1]) for line in _proc(pid, "io") if line.startswith("rchar:")), 0)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state (the third) on, behind the name, which may hold anything; none when it is gone."""
    return " ".join(_proc(pid, "stat")).rpartition(")")[2].split()


def _waits_ns(pid: int) -> dict[int, int]:
    """How long each thread of a process has waited for a core, though it could have run."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return {}
    found = ((int(thread), _proc(pid, f"task/{thread}/schedstat")) for thread in threads)
    return {thread: int(lines[0].split()[1]) for thread, lines in found if lines}


def _proc(pid: int, file: str) -> list[str]:
    try:
        descriptor = os.open(f"/proc/{pid}/{file}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # it is gone, or isn't ours
        return []
    try:
        return os.read(descriptor, _PROC_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
    finally:
        os.close(descriptor)


def _cannot(name: str, exc: OSError) -> Error:
    return Error(f"the process of {name} can't be started: {exc}", exit=Exit.CHILD, hint="llmctl logs")
