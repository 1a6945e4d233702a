"""Logging of an llmctl that serves: one line a state change on stderr, as text or as JSON, with the request that it was about.

What is being worked at is a context variable, so that nobody passes an id along: asyncio copies the context into each task and
``to_thread`` into its thread. The proxy says which request its task is; a task that outlives the request that had it made (a child's
keeper) is begun in a context of its own, :func:`about`.

No line holds a prompt, an answer or a key: messages are made of names, numbers and an engine's last words.
"""

from __future__ import annotations

import contextvars
import json
import logging
import sys
from contextvars import Context, ContextVar
from datetime import datetime
from typing import Any, Final, Literal, get_args

Format = Literal["text", "json"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)

request: Final[ContextVar[str]] = ContextVar("request", default="")
"""Id of the request that is in work here."""
preset: Final[ContextVar[str]] = ContextVar("preset", default="")
"""Name of the preset that this is about."""

_QUIET: Final = ("httpx2", "httpcore2", "uvicorn.error", "asyncio")
"""Their INFO is a line a request or a connection."""
_TOLD: Final = "without completing response"
"""uvicorn's, of a stream that can't be whole: ``reply`` has said why (uvicorn/protocols/http/httptools_impl.py)."""


def to_stderr(written: Format = "text") -> None:
    """Have everything from INFO on written to stderr; what other libraries say from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Text() if written == "text" else Json())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(lambda record: _TOLD not in record.getMessage())


def about(name: str, *, asked_by: str = "") -> Context:
    """A context for a task of a preset's own: a copy of this one, with the preset, and without the request that is in work here.

    >>> group.create_task(keep(ward), context=logs.about(ward.name))
    """
    found = contextvars.copy_context()
    found.run(preset.set, name)
    found.run(request.set, asked_by)
    return found


class Text(logging.Formatter):
    """``2026-07-01 12:00:00,123 tiny ready -> stopping (drained) [req_…]``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's name)
        """The id stands at the end of the first line: a child's last words follow on lines of their own."""
        head, newline, rest = super().formatMessage(record).partition("\n")
        named = request.get()
        return f"{head} [{named}]{newline}{rest}" if named else head + newline + rest


class Json(logging.Formatter):
    """One object a line: time (ISO 8601, ms, with the offset), level, logger, message; request, preset and exception where there are."""

    def format(self, record: logging.LogRecord) -> str:
        """ASCII, whatever stderr can encode: what isn't is escaped, also halves of a surrogate pair."""
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        known = {"request": request.get(), "preset": preset.get()}
        said |= {name: value for name, value in known.items() if value}
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said)
