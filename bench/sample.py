"""What was seen of one request by the one who sent it: a line of the per-request JSONL. Unknown is None, never 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request. Times are milliseconds from its sending, by this machine's monotonic clock."""

    target: str
    """Whom it was sent to, by the name it has in the run."""
    level: str
    """``4 users``, ``2/s``."""
    repetition: int
    """From 0 on; -1 was a warm-up, and counts nowhere."""
    number: int
    """In its repetition."""
    sent_s: float
    """When it was sent, from the run's beginning."""
    late_ms: float | None = None
    """How much later than it was due; None where it was due as soon as its user was free."""
    status: int | None = None
    """HTTP status; None where no head came."""
    error: str | None = None
    """What went wrong, in a few words."""
    id: str | None = None
    """The answer's ``x-request-id``: ``llmctl why`` explains it."""
    ttft_ms: float | None = None
    """To the first event with text, a thought's too."""
    ttfo_ms: float | None = None
    """To the first event with text that is no thought."""
    last_ms: float | None = None
    """To the last event with text."""
    e2e_ms: float | None = None
    """To the end of the answer."""
    events: int = 0
    """Events with text."""
    gaps_ms: tuple[float, ...] = ()
    """Between arrivals of text; those that came together are a gap of 0."""
    prompt_tokens: int | None = None
    """Figures of tokens are the server's."""
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    draft_tokens: int | None = None
    draft_accepted: int | None = None
    prefill_tps: float | None = None
    """By the server's own clock, where it tells."""
    decode_tps: float | None = None
    """By the server's own clock: each token after the first."""
    finish_reason: str | None = None
    asked_prompt: int | None = None
    """Tokens that were meant."""
    asked_answer: int | None = None
    left: bool = False
    """The client was to leave before the end, and did."""

    @property
    def ok(self) -> bool:
        """Whether it was answered to its end."""
        return self.error is None and self.e2e_ms is not None and not self.left

    @property
    def ends_s(self) -> float | None:
        """When it had ended, from the run's beginning."""
        return None if self.e2e_ms is None else self.sent_s + self.e2e_ms / 1e3

    def as_dict(self) -> dict[str, Any]:
        """A line."""
        return {each.name: _plain(getattr(self, each.name)) for each in dataclasses.fields(self)}

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Sample:
        """From :meth:`as_dict`; fields that aren't known are left out. Raises TypeError for what lacks one that has to be there."""
        known = {each.name for each in dataclasses.fields(cls)}
        values: dict[str, Any] = {name: value for name, value in told.items() if name in known}
        return cls(**{**values, "gaps_ms": tuple(told.get("gaps_ms", ()))})


def _plain(value: object) -> object:
    if isinstance(value, float):
        return round(value, 4)
    return [round(each, 3) for each in value] if isinstance(value, tuple) else value
