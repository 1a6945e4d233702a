"""Chat and text completions put together: OpenAI's ``choices``.

With n > 1 the engine's own reply has the usage and timings of choice 0 alone; a stream sends them once a choice, behind its last chunk.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

from supervisor.assemble import Assembler


@dataclass(slots=True)
class _ToolCall:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def reply(self) -> dict[str, object]:
        reply: dict[str, object] = {
            "type": "function",
            "function": {"name": self.name, "arguments": "".join(self.arguments)},
        }
        if self.id:
            reply["id"] = self.id
        return reply


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: dict[int, _ToolCall] = field(default_factory=dict)
    finish_reason: str | None = None
    usage: object = None
    timings: object = None

    def take_delta(self, delta: dict[str, Any]) -> None:
        # The first chunk's content is null, and a name comes whole each time it changes, not in pieces.
        self.text.append(delta.get("content") or "")
        self.reasoning.append(delta.get("reasoning_content") or "")
        for piece in delta.get("tool_calls") or ():
            call = self.tool_calls.setdefault(piece["index"], _ToolCall())
            call.id = piece.get("id") or call.id
            function = piece.get("function") or {}
            call.name = function.get("name") or call.name
            call.arguments.append(function.get("arguments") or "")

    def chat_reply(self, index: int) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": "".join(self.text)}
        if reasoning := "".join(self.reasoning):
            message["reasoning_content"] = reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.reply() for _, call in sorted(self.tool_calls.items())]
        return {"finish_reason": self.finish_reason, "index": index, "message": message}

    def text_reply(self, index: int) -> dict[str, object]:
        return {"text": "".join(self.text), "index": index, "logprobs": None, "finish_reason": self.finish_reason}


class _Choices(Assembler):
    """What both have in common: events with choices, an end of its own, usage behind each choice."""

    def __init__(self) -> None:
        super().__init__()
        self._choices: dict[int, _Choice] = {}
        self._last = _Choice()  # whose chunk came last: a chat's usage follows its choice and names none
        self._chunk: dict[str, Any] = {}
        self._ended = False

    @property
    def done(self) -> bool:
        """After ``[DONE]``."""
        return self._ended and bool(self._choices)

    def feed(self, payload: bytes) -> None:
        """Take one event's payload, or the word that ends the stream."""
        if payload == b"[DONE]":
            self._events += 1
            self._ended = True
        else:
            super().feed(payload)

    def _take(self, event: dict[str, Any]) -> None:
        self._chunk = event
        for part in event["choices"]:
            choice = self._last = self._choices.setdefault(part["index"], _Choice())
            choice.finish_reason = part["finish_reason"]
            self._take_part(choice, part)
        self._last.usage = event.get("usage")
        self._last.timings = event.get("timings")

    @abstractmethod
    def _take_part(self, choice: _Choice, part: dict[str, Any]) -> None: ...

    def _whole(self, noun: str, choices: list[dict[str, object]]) -> dict[str, Any]:
        first = min(self._choices.items())[1]
        reply: dict[str, Any] = {
            "choices": choices,
            "created": self._chunk["created"],
            "model": self._chunk["model"],
            "system_fingerprint": self._chunk["system_fingerprint"],
            "object": noun,
            "usage": first.usage,
            "id": self._chunk["id"],
        }
        if first.timings is not None:
            reply["timings"] = first.timings
        return reply


class Chat(_Choices):
    """A chat completion."""

    def _take_part(self, choice: _Choice, part: dict[str, Any]) -> None:
        choice.take_delta(part["delta"])

    def _reply(self) -> dict[str, Any]:
        return self._whole("chat.completion", [choice.chat_reply(index) for index, choice in sorted(self._choices.items())])


class Text(_Choices):
    """A text completion."""

    def _take_part(self, choice: _Choice, part: dict[str, Any]) -> None:
        choice.text.append(part["text"])

    def _reply(self) -> dict[str, Any]:
        return self._whole("text_completion", [choice.text_reply(index) for index, choice in sorted(self._choices.items())])
