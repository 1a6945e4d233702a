"""The whole terminal and its keyboard, for a command that draws until the person leaves it.

What it takes it gives back, however it ends: the alternate screen, the cursor, the mode of the keyboard. Signals about the terminal come
through a pipe, since a handler runs in the middle of anything: a new size has the picture drawn again, Ctrl-Z gives the terminal back and
stops. Ctrl-C stays KeyboardInterrupt, so that it is heard at once while llmctl is slow to answer; so do the others that end a process, as
SystemExit.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable
from typing import Any, Final, NoReturn, Self

from rich.console import Console, ConsoleDimensions, RenderableType
from rich.live import Live

TOLD: Final = (signal.SIGWINCH, signal.SIGTSTP)
FATAL: Final = (signal.SIGTERM, signal.SIGHUP)
READ_BYTES: Final = 64

Picture = Callable[[int, int], RenderableType]
"""For so many columns and lines."""


class Screen:
    """To be entered on the main thread, where stdout is a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._keys = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._mode: list[Any] = []
        self._told = -1
        self._picture: Picture = lambda *_: ""
        self._left = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as left:
            self._told, tell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            left.callback(os.close, self._told)
            left.callback(os.close, tell)
            left.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(tell, warn_on_full_buffer=False))
            for number in TOLD:
                left.callback(signal.signal, number, signal.signal(number, lambda *_: None))
            for number in FATAL:
                left.callback(signal.signal, number, signal.signal(number, _end))
            # Who started it may have it ignored (a job that a script put into the background): here is a keyboard, and Ctrl-C is meant.
            left.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
            left.callback(self._give_back)
            self._take()
            self._left = left.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    def show(self, picture: Picture) -> None:
        """Draw this, for the size that the terminal has now."""
        self._picture = picture
        with contextlib.suppress(OSError):  # without one it has the size that it had
            size = os.get_terminal_size(sys.stdout.fileno())
            if all(size):
                self._console.size = ConsoleDimensions(*size)
        self._live.update(picture(*self._console.size), refresh=True)

    def wait(self, until_s: float) -> bool:
        """Until a moment of the monotonic clock; False as soon as the person leaves by ``q``."""
        while (left_s := until_s - time.monotonic()) > 0:
            ready, _, _ = select.select([self._told] if self._keys is None else [self._told, self._keys], [], [], left_s)
            if self._told in ready:
                if signal.SIGTSTP in os.read(self._told, READ_BYTES):
                    self._pause()
                self.show(self._picture)
            if self._keys in ready and _leaves(os.read(self._keys, READ_BYTES)):
                return False
        return True

    def _take(self) -> None:
        if self._keys is not None:
            self._mode = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys, termios.TCSANOW)
        self._live.start()

    def _give_back(self) -> None:
        self._live.stop()
        if self._mode and self._keys is not None:
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self._keys, termios.TCSANOW, self._mode)

    def _pause(self) -> None:
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()


def _leaves(typed: bytes) -> bool:
    """Whether ``q`` is among what was typed, and not within an arrow key's sequence; nothing at all is a terminal that is gone."""
    return not typed or (not typed.startswith(b"\x1b") and b"q" in typed.lower())


def _end(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)
