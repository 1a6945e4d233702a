"""What a reply was made of, read off the bytes as they pass. Costs the hot path a count and a search a chunk, and parses JSON at the end.

llama-server puts ``timings`` into the last event of every choice (chat, completions, its own routes), into that of a Responses stream and
into an unstreamed reply's body, Responses' apart. Their sum over choices is what was computed; ``usage`` counts one sequence even when
n > 1, so it is only used where there are no timings, as in all of Anthropic's API: its stream tells the prompt's tokens in the first event
and the answer's in the last but one. Where a reply was cut before either, the events of text that passed are counted, and what is not
known stays None.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from supervisor import pace
from supervisor.routes import Api

NOTED: Final = 1 << 13
"""Times that are kept of an answer: 256 KiB at most."""
_MOST: Final = 1e15
"""No count of tokens, and no milliseconds, are as many."""
_INDEX: Final = re.compile(rb'"index":\s*(\d+)')
_TIMINGS: Final = b'"timings"'  # inside a JSON string its quotes would be escaped: text can't be mistaken for it
_FINISH: Final = b'"finish_reason":"'
_USAGE: Final = b'"usage":{'
_START: Final = b'"type":"message_start"'
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
    prefill_ms: float | None = None
    decode_ms: float | None = None
    gaps: Mapping[int, int] = field(default_factory=dict, compare=False)
    """Between arrivals of text, in the bins of ``pace``."""
    first_s: float | None = field(default=None, compare=False)
    """When the first text came, by the clock that the meter was fed with."""
    sent_bytes: int = field(default=0, compare=False)
    """Of the engine's body."""

    def itl_ms(self, share: float) -> float | None:
        """The gap between arrivals that this share of them doesn't exceed."""
        found = pace.percentile_s(self.gaps, share)
        return None if found is None else found * 1e3


_ROLE: Final = b'"delta":{"role":'  # a chat's first event says who speaks, and no token yet
_PIECE: Final = {Api.RESPONSES: b".delta\ndata: ", Api.ANTHROPIC: b"event: content_block_delta\n"}
"""What the events of text have, and no text: in JSON its line ends are escaped."""
_NO_PIECE: Final = b'"type":"signature_delta"'
_ANTHROPIC_ERROR: Final = b"event: error\n"
_MESSAGE: Final = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":"'


class _Plain(NamedTuple):
    """How an event begins and ends that is a piece of text and nothing else, by llama-server's order of keys (server-task.cpp, to_json_…).

    Whatever tells more (``timings``, ``usage``, progress, probabilities) comes last there, and ends otherwise.
    """

    starts: tuple[bytes, ...]
    ends: tuple[bytes, ...]
    skip: int = 0
    """Bytes of the beginning in which there is a line end."""


_PLAIN: Final[Mapping[Api, _Plain]] = {
    Api.CHAT: _Plain(
        (
            b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":"',
            b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"reasoning_content":"',
        ),
        (b'"object":"chat.completion.chunk"}\n\n',),
    ),
    Api.TEXT: _Plain((b'data: {"choices":[{"text":"',), (b'"}\n\n',)),
    Api.NATIVE: _Plain((b'data: {"index":0,"content":"',), tuple(b"%d}\n\n" % digit for digit in range(10))),
    Api.RESPONSES: _Plain(
        (b"event: response.output_text.delta\ndata: {", b"event: response.reasoning_text.delta\ndata: {"), (b'"}\n\n',), skip=45
    ),
    Api.ANTHROPIC: _Plain(
        tuple(
            _MESSAGE % (index, kind, key)
            for kind, key in ((b"text_delta", b"text"), (b"thinking_delta", b"thinking"), (b"input_json_delta", b"partial_json"))
            for index in (0, 1)
        ),
        (b'"}}\n\n',),
        skip=30,
    ),
}
_NEVER: Final = _Plain((), ())
_LAST: Final[Mapping[Api, bytes]] = {
    Api.CHAT: b"data: [DONE]\n",
    Api.TEXT: b"data: [DONE]\n",
    Api.RESPONSES: b"event: response.completed\n",
    Api.ANTHROPIC: b"event: message_stop\n",
}
"""What only an answer's last event has. llama.cpp's own routes have no such event."""
_SEVERAL: Final[Mapping[Api, _Plain]] = {
    Api.CHAT: _PLAIN[Api.CHAT]._replace(starts=(b'data: {"choices":[{"finish_reason":null,"index":',)),
    Api.TEXT: _PLAIN[Api.TEXT],
    Api.NATIVE: _PLAIN[Api.NATIVE]._replace(starts=(b'data: {"index":',)),
}
"""The same where a request has several sequences: of a chat, the first event of each looks so too."""
_DELTA: Final = b'"delta":"'
_KINDS: Final = 64
"""An API's kinds of events (thoughts, arguments, text) differ: two of the shortest have 28 bytes less than two of the longest."""
_LOGPROBS: Final = b'"logprobs":{'
_NUMBER: Final = b'","index":'
_SPEAKER: Final = b"," + _ROLE


class Meter:
    """Reads one streamed reply. Feed it the body's bytes as they come, cut anywhere, and the time."""

    __slots__ = (
        *(
            "_choice",
            "_ends",
            "_finals",
            "_index_at",
            "_last",
            "_note",
            "_pair",
            "_piece",
            "_rest",
            "_several",
            "_skip",
            "_starts",
        ),
        *("_times_s", "done", "events", "failed", "first_s", "sent_bytes"),
    )

    def __init__(self, api: Api = Api.CHAT, *, sequences: int = 1) -> None:
        """``sequences`` are decoded for the request."""
        self.events = 0
        """Of text; about as many tokens."""
        self.sent_bytes = 0
        self.failed = False
        """The engine ended the stream with an error event."""
        self.done = False
        """The answer's last event has passed; only the end of the reply is still to come."""
        self.first_s: float | None = None
        """When the first text came."""
        self._times_s: deque[float] = deque(maxlen=NOTED)
        self._note = self._times_s.append
        self._pair = 0
        """Two events of text are at least so long together, once it is known."""
        self._piece = _PIECE.get(api)
        self._last = _LAST.get(api)
        self._starts, self._ends, self._skip = (_PLAIN if sequences == 1 else _SEVERAL).get(api, _NEVER)
        self._rest = b""
        self._choice = b""
        self._finals: dict[bytes, bytes] = {}
        self._index_at = len(self._starts[0]) if self._starts and self._starts[0].endswith(b'"index":') else 0
        """Where an event says which sequence it is of; 0 where that is behind its text."""
        self._several: dict[bytes, int] | None = {} if sequences > 1 else None
        """Events a sequence, where there are several."""

    @property
    def mid_event(self) -> bool:
        """Whether the last bytes were a part of an event."""
        return bool(self._rest)

    @property
    def gaps(self) -> Mapping[int, int]:
        """Between the last arrivals of text; bins of ``pace``."""
        return pace.bins(self._times_s) if self._several is None else {}

    def passing(self, write: Callable[[bytes], object], now_s: Callable[[], float]) -> Callable[[bytes], None]:
        """What hands a stream's bytes on to ``write`` and reads them: the hot path, which is :meth:`feed` without most of it."""
        starts, ends, pair = self._starts, self._ends, 0
        feed, note = self.feed, self._note

        def pass_on(data: bytes) -> None:
            nonlocal pair
            write(data)
            size = len(data)
            if size < pair and data.startswith(starts) and data.endswith(ends) and not self._rest:
                self.events += 1
                self.sent_bytes += size
                note(now_s())
                return
            feed(data, now_s())
            pair = self._pair

        return pass_on

    def feed(self, data: bytes, now_s: float) -> None:
        """Take the next bytes of the body."""
        size = len(data)
        self.sent_bytes += size
        if (
            not self._rest
            and data.startswith(self._starts)
            and data.endswith(self._ends)
            and data.find(b"\n", self._skip) == size - 2
        ):
            if self._several is not None:
                at = self._index_at or data.find(_NUMBER) + len(_NUMBER)
                index = data[at : data.find(b",", at)]
                if data.startswith(_SPEAKER, at + len(index)):
                    return
                self._several[index] = self._several.get(index, 0) + 1
            self.events += 1
            self._arrived(now_s)
            if not self._pair:
                self._weigh(data)
            return
        self._take(data, now_s)

    def _take(self, data: bytes, now_s: float) -> None:
        """What is no single piece of text."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if data[-2:] != b"\n\n":
            cut = data.rfind(b"\n\n") + 2
            self._rest = data[cut:] if cut >= 2 else data
            data = data[:cut] if cut >= 2 else b""
        if self._several is not None:
            events = self._count(data)
        elif self._piece is None:
            events = data.count(_EVENT) + data.startswith(_EVENT[1:]) - data.count(_ROLE) - data.count(_ERROR)
        else:
            events = data.count(self._piece) - data.count(_NO_PIECE)
        if _TIMINGS in data or _FINISH in data or _USAGE in data:
            self._keep(data)
        if _ERROR in data or _ANTHROPIC_ERROR in data:
            self.failed = True
        if self._last is not None and self._last in data:
            self.done = True
        if events:
            self.events += events
            self._arrived(now_s)

    def _arrived(self, now_s: float) -> None:
        if self.first_s is None:
            self.first_s = now_s
        self._note(now_s)

    def _weigh(self, data: bytes) -> None:
        """Learn how long an event without its text is. Not from one with an escape, whose text's end can't be told; nor from logprobs."""
        if self._several is None and b"\\" not in data and _LOGPROBS not in data:
            begin = next((len(each) for each in self._starts if each.endswith(b'":"') and data.startswith(each)), 0)
            if not begin and _DELTA in data:
                begin = data.find(_DELTA) + len(_DELTA)
            if begin:
                self._pair = 2 * (len(data) - (data.find(b'"', begin) - begin)) - _KINDS

    def _count(self, data: bytes) -> int:
        """Count the events of each sequence."""
        assert self._several is not None
        found = 0
        for event in data.split(b"\n\n"):
            if (index := _INDEX.search(event)) and _ROLE not in event:
                self._several[index[1]] = self._several.get(index[1], 0) + 1
                found += 1
        return found

    def _keep(self, data: bytes) -> None:
        """Keep the last telling event of each choice; with ``timings_per_token`` every event is one. Anthropic's has two, head and end.

        A usage event (``"choices":[]``) has no index: it is of the choice whose event came right before it.
        """
        for event in data.split(b"\n\n"):
            if _TIMINGS in event or _FINISH in event or _USAGE in event:
                if index := _INDEX.search(event):
                    self._choice = index[1]
                kind = b"t" if _TIMINGS in event else b"f" if _FINISH in event else b"s" if _START in event else b"u"
                self._finals[kind + self._choice] = event.partition(b"data: ")[2]

    def read(self) -> Reading:
        """The figures so far."""
        passed: dict[str, Any] = {"gaps": self.gaps, "first_s": self.first_s, "sent_bytes": self.sent_bytes}
        bodies = [body for text in self._finals.values() if (body := json_object(text)) is not None]
        unended = None
        if self._several is not None and any(key.startswith(b"t") for key in self._finals):
            unended = sum(count for index, count in self._several.items() if b"t" + index not in self._finals)
        try:
            return reading(bodies, counted=self.events, unended=unended, **passed)
        except (TypeError, AttributeError, ValueError):  # an engine that speaks otherwise: what passed is known all the same
            return Reading(completion_tokens=self.events, counted=True, **passed)


def json_object(text: bytes) -> dict[str, Any] | None:
    """The JSON object that ``text`` is; None if it isn't one."""
    value = _json(text)
    return value if isinstance(value, dict) else None


def _json(text: bytes) -> Any:  # noqa: ANN401
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def whole(text: bytes) -> Reading:
    """The figures of an unstreamed reply, whose body is one telling event, or an array of them (several sequences of one request)."""
    value = _json(text)
    bodies = [body for body in (value if isinstance(value, list) else [value]) if isinstance(body, dict)]
    return reading(bodies, sent_bytes=len(text))


def reading(
    bodies: list[dict[str, Any]],
    *,
    counted: int | None = None,
    unended: int | None = None,
    **passed: Any,  # noqa: ANN401
) -> Reading:
    """The figures of a reply whose telling events, or whole bodies, are ``bodies``; ``passed`` are fields of the Reading.

    ``counted`` events serve where they say nothing, ``unended`` are those of sequences that were cut while others had ended.
    """
    timings = [body["timings"] for body in bodies if isinstance(body.get("timings"), dict)]
    reason = next((str(found) for body in reversed(bodies) for found in _reasons(body) if found), None)
    predicted = _total(timings, "predicted_n")
    if predicted is not None:
        prompt_ms, predicted_ms = _total(timings, "prompt_ms"), _total(timings, "predicted_ms")
        computed, cached = _total(timings, "prompt_n"), _total(timings, "cache_n")
        drafted = [each for each in timings if "draft_n" in each]
        return Reading(
            prompt_tokens=None if unended or computed is None or cached is None else int(cached + computed),
            cached_tokens=None if unended or cached is None else int(cached),
            completion_tokens=int(predicted) + (unended or 0),
            prefill_tps=computed / prompt_ms * 1e3 if prompt_ms and computed is not None else None,
            # The first token comes out of the prefill: n - 1 steps in predicted_ms (llama.cpp counts likewise).
            decode_tps=(predicted - len(timings)) / predicted_ms * 1e3 if predicted_ms and predicted > len(timings) else None,
            draft_tokens=_whole(_total(drafted, "draft_n")),
            draft_accepted=_whole(_total(drafted, "draft_n_accepted")),
            finish_reason=None if unended else reason,
            counted=bool(unended),
            prefill_ms=prompt_ms,
            decode_ms=predicted_ms,
            **passed,
        )
    usage = _Usage.of(bodies)
    return Reading(
        prompt_tokens=usage.prompt,
        cached_tokens=usage.cached,
        completion_tokens=usage.completion if usage.completion is not None or usage.whole else counted,
        finish_reason=reason,
        counted=counted is not None and usage.completion is None and not usage.whole,
        **passed,
    )


@dataclass(slots=True)
class _Usage:
    """What the ``usage`` objects of a reply say, in any API's names. Later ones win."""

    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None
    whole: bool = False
    """One of them was the reply's last word."""

    @classmethod
    def of(cls, bodies: list[dict[str, Any]]) -> _Usage:
        found = cls()
        for body in bodies:
            for outer, is_head in ((body.get("message"), True), (body.get("response"), False), (body, False)):
                usage = outer.get("usage") if isinstance(outer, dict) else None
                if isinstance(usage, dict):
                    found._take(usage, is_head=is_head)
        return found

    def _take(self, usage: dict[str, Any], *, is_head: bool) -> None:
        cached = usage.get("cache_read_input_tokens")  # Anthropic's input_tokens are those that were not cached
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
        if prompt is not None:
            self.prompt = prompt + (cached or 0)
            self.cached = details.get("cached_tokens") if cached is None else cached
        if not is_head:  # a head has no more than a 0 there
            self.completion = usage.get("completion_tokens", usage.get("output_tokens"))
            self.whole = True


def _reasons(body: dict[str, Any]) -> Iterator[object]:
    """Why it ended, in the words of its API: ``length`` or ``stop``, ``max_tokens`` or ``end_turn``, ``limit`` or ``eos``."""
    for choice in reversed(body.get("choices") or []):
        yield choice.get("finish_reason") if isinstance(choice, dict) else None
    delta = body.get("delta")
    yield delta.get("stop_reason") if isinstance(delta, dict) else body.get("stop_reason")
    yield body.get("stop_type")


def _total(timings: list[dict[str, Any]], key: str) -> float | None:
    """The sum over sequences; None where there are none, or one doesn't say it."""
    values = [each.get(key) for each in timings]
    known = [
        float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _MOST
    ]
    return sum(known) if known and len(known) == len(values) else None


def _whole(count: float | None) -> int | None:
    return None if count is None else int(count)
