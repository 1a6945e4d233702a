"""The one error class. A message says what is wrong with both values in it; a hint says what to type next.

Whoever meets a foreign exception translates it once, at the boundary, with ``raise Error(...) from exc``; above that line nobody
catches anything but :class:`Error`. The command line prints it as one sentence and a ``try:`` line, the front door as the error body
of the API that was asked (``fault``).
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What a command's exit status means to a script."""

    OK = 0
    USAGE = 2
    CONFIG = 3
    NO_FIT = 4
    ENGINE = 5
    MODEL = 6
    BUSY = 7
    CHILD = 8


class Error(Exception):
    """A failure a person can act on.

    ``message`` is one sentence. ``hint`` is what to do, printed after ``try:``. ``status`` and ``code`` are how the front door
    answers a client that ran into it: the HTTP status and OpenAI's ``error.code``. ``retry_after_s`` and ``retry`` become the headers
    ``retry-after`` and ``x-should-retry``, which both SDKs obey; without them they retry what they think is worth it (408, 409, 429, 5xx).
    ``log`` are the last lines of whoever failed, shown below the sentence.
    """

    def __init__(
        self,
        message: str,
        *,
        exit: Exit,  # noqa: A002  (the word the shell uses)
        hint: str = "",
        status: int = 500,
        code: str = "internal_error",
        retry_after_s: int | None = None,
        retry: bool | None = None,
        log: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.exit = exit
        self.hint = hint
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
        self.retry = retry
        self.log = log

    def __repr__(self) -> str:
        return f"<Error {self.exit.name} {self.message!r}>"
