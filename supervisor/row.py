"""One request's record in the making: what the proxy learns of it as it goes, and the :class:`~supervisor.record.Record` that it becomes.

What its reply was made of is found out when it has ended, from what :class:`~supervisor.meter.Meter` kept: that parses JSON, and is done on
the ledger's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from supervisor.likeness import Parting
from supervisor.meter import Reading
from supervisor.record import Record, Run, Status


class Measured(NamedTuple):
    """What is found out about a request when it has ended."""

    reading: Reading
    parting: Parting | None = None


Measure = Callable[[], Measured]


@dataclass(slots=True)
class Row:
    """An open record. Its owner, the proxy, sets what it learns and hands it to the ledger once."""

    id: str
    opened_at: float
    opened_s: float
    """The same by the monotonic clock."""
    route: str
    preset: str
    stream: bool = False
    batch: bool = False
    key: str | None = None
    client: str | None = None
    client_id: str | None = None
    status: Status = "error"
    http_status: int | None = None
    error: str | None = None
    attempts: int = 0
    wasted_tokens: int = 0
    ahead: int | None = None
    queue_s: float | None = None
    load_s: float | None = None
    up_s: float | None = None
    run: Run | None = None
    energy_j: float | None = None
    dropped_turns: int | None = None
    closed_at: float | None = None
    """Set by the ledger; from there on nobody changes it."""
    closed_s: float = 0.0

    def opened(self) -> Record:
        """The record of a request that is in work."""
        return Record(**{name: getattr(self, name) for name in _WHILE_OPEN})

    def closed(self, measured: Measured) -> Record:
        """The record of one that has ended."""
        reading, parting = measured
        return Record(
            **{name: getattr(self, name) for name in _OF_ROW},
            **{name: _storable(name, getattr(reading, name)) for name in _OF_READING},
            **({name: getattr(parting, name) for name in _OF_PARTING} if parting is not None else {}),
            counted=reading.counted,
            wasted_tokens=self.wasted_tokens if self.attempts else None,
            queue_ms=_ms(self.queue_s),
            load_ms=_ms(self.load_s),
            up_ms=_ms(self.up_s),
            ttft_ms=_ms(None if reading.first_s is None else reading.first_s - self.opened_s),
            total_ms=_ms(self.closed_s - self.opened_s),
            itl_p50_ms=reading.itl_ms(0.5),
            itl_p99_ms=reading.itl_ms(0.99),
            bytes=reading.sent_bytes,
        )


_WHILE_OPEN: Final = ("id", "client_id", "opened_at", "key", "preset", "route", "stream", "batch", "client")
_OF_ROW: Final = (
    *_WHILE_OPEN,
    *("closed_at", "status", "http_status", "error", "attempts", "ahead", "energy_j", "dropped_turns"),
)
_OF_READING: Final = (
    *("prefill_ms", "decode_ms", "prompt_tokens", "cached_tokens", "completion_tokens", "prefill_tps", "decode_tps"),
    *("draft_tokens", "draft_accepted", "finish_reason"),
)
_OF_PARTING: Final = ("prompt_chars", "shared_chars", "shared_with", "parted_in")


_WORD: Final = 32
"""Characters of a finish reason: the longest of llama.cpp's has 13."""


_MOST: Final = 1e12
"""Tokens, milliseconds, tokens a second: more are none."""


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _storable(name: str, value: object) -> Any:  # noqa: ANN401
    """What was read off a reply, or None for what can't be so: engines may speak otherwise, and sums must hold it a million times."""
    if name == "finish_reason":
        return value[:_WORD].encode("utf-8", "replace").decode() if isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST:
        return None
    return value if name.endswith(("_ms", "_tps")) or value == int(value) else None
