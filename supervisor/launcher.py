"""Starts a child so that it can't outlive its parent: ``python -I -S launcher.py PARENT_PID PROGRAM ARGS…``.

Linux can send a process a signal when the thread that made it ends (``PR_SET_PDEATHSIG``, kept across exec). It has two holes. It
fires at the end of the *thread*, so :mod:`~supervisor.child` spawns from the main thread only. And it doesn't fire for a parent
that was dead before it was set, so the parent is looked at afterwards. This runs in a process of its own and not between fork and
exec of a threaded one, where Python code may deadlock. Imports nothing of llmctl's and little of Python's: about 15 ms.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def command(*program: str) -> list[str]:
    """The argument vector that starts ``program`` as a child of this process that dies with the calling thread."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *program]


def main() -> None:
    """Set the death signal, see that the parent still lives, become the program."""
    parent, program, *arguments = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"error: prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):
        sys.exit("error: the parent ended before its child began")
    try:
        os.execv(program, [program, *arguments])
    except OSError as exc:
        sys.exit(f"error: {program} can't be started: {exc.strerror}")


if __name__ == "__main__":
    main()
