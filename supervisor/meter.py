"""What a reply was made of, read off the bytes as they pass. Costs the hot path a count and a search a chunk, and parses JSON at the end.

llama-server puts ``timings`` into the last event of every choice (chat, completions, native) and into an unstreamed reply's body.
Their sum over choices is what was computed; ``usage`` counts one sequence even when n > 1, so it is only used where there are no
timings. Where a reply was cut before either, the events that passed are counted, and what is not known stays None.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

_INDEX: Final = re.compile(rb'"index":\s*(\d+)')
_TIMINGS: Final = b'"timings"'  # inside a JSON string its quotes would be escaped: text can't be mistaken for it
_FINISH: Final = b'"finish_reason":"'
_USAGE: Final = b'"usage":{'
_ERROR: Final = b'data: {"error":'
_EVENT: Final = b"\ndata: {"  # with its line's beginning: text may say "data: {", but its line ends are escaped


@dataclass(frozen=True, slots=True)
class Reading:
    """The figures of one reply. Tokens are sums over its choices; None is "not known", never 0."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    prefill_tps: float | None = None
    decode_tps: float | None = None
    draft_tokens: int | None = None
    draft_accepted: int | None = None
    finish_reason: str | None = None
    counted: bool = False
    """``completion_tokens`` is the number of events that passed, because the reply has no final timings."""
    sent_bytes: int = field(default=0, compare=False)
    """Of the engine's body."""


_ROLE: Final = b'"delta":{"role":'  # a chat's first event says who speaks, and no token yet
_PLAIN_START: Final = (
    b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":"',
    b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"reasoning_content":"',
)
_PLAIN_END: Final = b'"object":"chat.completion.chunk"}\n\n'
"""An event between these is a token and nothing else: in llama-server's key order ``timings`` and ``usage`` would follow ``object``."""


class Meter:
    """Reads one streamed reply. Feed it the body's bytes as they come, cut anywhere."""

    __slots__ = ("_choice", "_finals", "_rest", "events", "failed", "sent_bytes")

    def __init__(self) -> None:
        self.events = 0
        self.sent_bytes = 0
        self.failed = False
        """The engine ended the stream with an error event."""
        self._rest = b""
        self._choice = b""
        self._finals: dict[bytes, bytes] = {}

    @property
    def mid_event(self) -> bool:
        """Whether the last bytes were a part of an event."""
        return bool(self._rest)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        self.sent_bytes += len(data)
        if not self._rest and data.startswith(_PLAIN_START) and data.endswith(_PLAIN_END) and data.count(b"\n") == 2:
            self.events += 1
            return
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if data[-2:] != b"\n\n":
            cut = data.rfind(b"\n\n") + 2
            self._rest = data[cut:] if cut >= 2 else data
            data = data[:cut] if cut >= 2 else b""
        self.events += data.count(_EVENT) + data.startswith(_EVENT[1:]) - data.count(_ROLE)
        if _TIMINGS in data or _FINISH in data or _USAGE in data:
            self._keep(data)
        if _ERROR in data:
            self.failed = True

    def _keep(self, data: bytes) -> None:
        """Keep the last telling event of each choice; with ``timings_per_token`` every event is one.

        A usage event (``"choices":[]``) has no index: it is of the choice whose event came right before it.
        """
        for event in data.split(b"\n\n"):
            if _TIMINGS in event or _FINISH in event or _USAGE in event:
                if index := _INDEX.search(event):
                    self._choice = index[1]
                kind = b"t" if _TIMINGS in event else b"f" if _FINISH in event else b"u"
                self._finals[kind + self._choice] = event.partition(b"data: ")[2]

    def read(self) -> Reading:
        """The figures so far."""
        bodies = [body for text in self._finals.values() if (body := json_object(text)) is not None]
        return reading(bodies, counted=self.events, sent_bytes=self.sent_bytes)


def json_object(text: bytes) -> dict[str, Any] | None:
    """The JSON object that ``text`` is; None if it isn't one."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def reading(bodies: list[dict[str, Any]], *, counted: int | None = None, sent_bytes: int = 0) -> Reading:
    """The figures of a reply whose telling events, or whole bodies, are ``bodies``; ``counted`` events serve where they say nothing."""
    timings = [body["timings"] for body in bodies if isinstance(body.get("timings"), dict)]
    usages = [body["usage"] for body in bodies if isinstance(body.get("usage"), dict)]
    reasons = [choice.get("finish_reason") for body in bodies for choice in body.get("choices") or []]
    reason = next((str(found) for found in reversed(reasons) if found), None)
    if timings:
        prompt_ms, predicted_ms = _total(timings, "prompt_ms"), _total(timings, "predicted_ms")
        computed, predicted = _total(timings, "prompt_n"), _total(timings, "predicted_n")
        cached = _total(timings, "cache_n")
        drafted = any("draft_n" in each for each in timings)
        return Reading(
            prompt_tokens=int(cached + computed),
            cached_tokens=int(cached),
            completion_tokens=int(predicted),
            prefill_tps=computed / prompt_ms * 1e3 if prompt_ms else None,
            # The first token comes out of the prefill: n - 1 steps in predicted_ms (llama.cpp counts likewise).
            decode_tps=(predicted - len(timings)) / predicted_ms * 1e3 if predicted_ms and predicted > len(timings) else None,
            draft_tokens=int(_total(timings, "draft_n")) if drafted else None,
            draft_accepted=int(_total(timings, "draft_n_accepted")) if drafted else None,
            finish_reason=reason,
            sent_bytes=sent_bytes,
        )
    if usages:
        details = usages[-1].get("prompt_tokens_details") or {}
        return Reading(
            prompt_tokens=usages[-1].get("prompt_tokens"),
            cached_tokens=details.get("cached_tokens"),
            completion_tokens=usages[-1].get("completion_tokens"),
            finish_reason=reason,
            sent_bytes=sent_bytes,
        )
    return Reading(completion_tokens=counted, finish_reason=reason, counted=counted is not None, sent_bytes=sent_bytes)


def _total(timings: list[dict[str, Any]], key: str) -> float:
    return sum(float(each.get(key) or 0) for each in timings)
