"""Anthropic's Messages put together, as ``to_json_anthropic`` has them (tools/server/server-task.cpp at b11312): thinking, text, tools.

Blocks are told by their kind and not by their index, which the engine counts anew in the last event: a text whose end comes with it
is begun a second time. A tool's input is the JSON that its pieces make, and empty where they make none.

The engine sends the event with the reply's head together with the first token, and never if that is a part of a glyph: for an answer
that begins with an emoji (``n_decoded == 1`` in server-task.cpp:1326, and server-context.cpp:1829 sends no event for half a glyph).
SDKs give up on such a stream, so :func:`head` is put before it; its prompt's tokens are not known then, and null.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from supervisor import sse
from supervisor.assemble import Assembler


def lacks_head(first: bytes) -> bool:
    """Whether a stream that begins with these bytes has no ``message_start``."""
    return first.startswith((b"event: content_block_", b"event: message_delta"))


def head(id_: str, model: str | None) -> bytes:
    """The event that such a stream lacks."""
    usage = {"cache_read_input_tokens": None, "input_tokens": None, "output_tokens": 0}
    message: dict[str, Any] = {"id": id_, "type": "message", "role": "assistant", "content": [], "model": model}
    ends = {"stop_reason": None, "stop_sequence": None}
    return sse.event({"type": "message_start", "message": message | ends | {"usage": usage}}, name="message_start")


@dataclass(slots=True)
class _Tool:
    id: str
    name: str
    json: list[str] = field(default_factory=list)

    def block(self) -> dict[str, Any]:
        return {"type": "tool_use", "id": self.id, "name": self.name, "input": _parsed("".join(self.json))}


class Messages(Assembler):
    """A message."""

    def __init__(self) -> None:
        super().__init__()
        self._head: dict[str, Any] = {}
        self._thinking: list[str] = []
        self._text: list[str] = []
        self._tools: dict[int, _Tool] = {}  # by the index of their block
        self._tail: dict[str, Any] = {}
        self._ended = False

    @property
    def done(self) -> bool:
        """After ``message_stop``."""
        return self._ended

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "content_block_delta":
            self._take_delta(event["index"], event["delta"])
        elif kind == "content_block_start":
            self._begin_block(event["index"], event["content_block"])
        elif kind == "message_start":
            self._head = dict(event["message"])
        elif kind == "message_delta":
            self._tail = dict(event)
        elif kind == "message_stop":
            self._ended = True
        elif "code" in event:  # the engine's error has no envelope here, only the name of its event
            self._fail(event)

    def _begin_block(self, index: int, block: dict[str, Any]) -> None:
        if block["type"] != "tool_use":
            return
        if index in self._tools:  # a name that grew comes again, whole
            self._tools[index].id, self._tools[index].name = block["id"], block["name"]
        else:
            self._tools[index] = _Tool(block["id"], block["name"])

    def _take_delta(self, index: int, delta: dict[str, Any]) -> None:
        kind = delta["type"]
        if kind == "text_delta":
            self._text.append(delta["text"])
        elif kind == "thinking_delta":
            self._thinking.append(delta["thinking"])
        elif kind == "input_json_delta":
            self._tools[index].json.append(delta["partial_json"])

    def _reply(self) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        if thinking := "".join(self._thinking):
            blocks.append({"type": "thinking", "thinking": thinking, "signature": ""})
        if text := "".join(self._text):
            blocks.append({"type": "text", "text": text})
        blocks += [tool.block() for _, tool in sorted(self._tools.items())]
        usage = self._head.get("usage") or {}
        return {
            "id": self._head.get("id"),
            "type": "message",
            "role": "assistant",
            "content": blocks,
            "model": self._head.get("model"),
            "stop_reason": self._tail["delta"]["stop_reason"],
            "stop_sequence": self._tail["delta"]["stop_sequence"],
            "usage": {
                "cache_read_input_tokens": usage.get("cache_read_input_tokens"),
                "input_tokens": usage.get("input_tokens"),
                "output_tokens": self._tail["usage"]["output_tokens"],
            },
        }


def _parsed(text: str) -> object:
    try:
        found: object = json.loads(text)
    except ValueError:
        return {}
    return found
