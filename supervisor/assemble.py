"""An unstreamed request as a streamed one, and the streamed answer as the engine's unstreamed one.

The engine notices in time that a client has left only while it streams (facts/engine.md §2.6), so the front door streams upstream for
everybody. For a client that didn't ask for it, :func:`request_body` makes the request a streaming one and an :class:`Assembler`
makes one reply of the events: the reply the engine would have sent, in its keys and their order, bar ``id``, ``created`` and times
(tests/contract/test_assembly.py holds both against the real engine). The shapes are those of ``to_json_oaicompat`` and
``to_json_oaicompat_chat`` in llama.cpp's ``tools/server/server-task.cpp``.

With n > 1 the engine's own reply has the usage and timings of choice 0 alone; a stream sends them once a choice, behind its last chunk.

Three rare ends lack text that the unstreamed reply has, because the engine streams only what is settled and drops the rest at the end.
Nothing in a stream tells them, and every client that streams has them too; the contract tests keep them in view:

1. an end by length inside what may become a stop string: that half is missing;
2. an end by length inside a glyph on ``/v1/completions``: the U+FFFD is missing;
3. a chat answer its parser finds nothing in, say one cut in ``<think>`` or in a tool call's head, or blank: its raw text is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from supervisor.ask import extend
from supervisor.errors import Error, Exit

Route = Literal["/v1/chat/completions", "/v1/completions"]

_STREAMING = b'"stream":true,"stream_options":{"include_usage":true}'


def must_pass_unstreamed(fields: Mapping[str, object]) -> bool:
    """Whether a stream can't give the reply to this unstreamed request, so that the engine has to be asked as the request stands.

    1. ``logprobs``, or ``n_probs`` by the engine's name: a stream's lack the end token and tokens that split a glyph; with tools the
       engine refuses them.
    2. ``continue_final_message`` without ``echo``: unstreamed the answer begins with the message it continues, streamed it doesn't.
    3. ``verbose``: the engine's state, of which a stream's chunks hold other parts.
    4. A ``stream`` that is neither true nor false: the engine's refusal is the answer.

    Several prompts in one request and a last message by the assistant are not among them: shown equal.
    """
    stream = fields.get("stream")
    return (
        bool(fields.get("logprobs") or fields.get("n_probs"))  # 1
        or bool(fields.get("continue_final_message") and not fields.get("echo"))  # 2
        or bool(fields.get("verbose"))  # 3
        or not (stream is None or isinstance(stream, bool))  # 4
    )


def request_body(body: bytes) -> bytes:
    """The same request, streamed and with its usage. ``body`` is a JSON object, known to parse.

    Nothing is serialised anew: the two keys are put before the last brace, and where a key comes twice the engine's parser keeps the last.
    """
    return extend(body, _STREAMING)


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


class Assembler:
    """One reply in the making. Feed it the payload of every event, then ask for :meth:`result`."""

    def __init__(self, route: Route) -> None:
        self._chat = route == "/v1/chat/completions"
        self._choices: dict[int, _Choice] = {}
        self._last = _Choice()  # whose chunk came last: a chat's usage follows its choice and names none
        self._chunk: dict[str, Any] = {}
        self._events = 0
        self.done = False
        """Whether the stream came to its end, ``[DONE]``."""
        self.error: dict[str, Any] | None = None
        """The inside of the engine's error envelope, where the stream ended in one. Its ``code`` is the HTTP status."""

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "done" if self.done else "open"
        return f"<Assembler {state} events={self._events} choices={len(self._choices)}>"

    def feed(self, payload: bytes) -> None:
        """Take one event's payload. Raises :class:`Error` for one that is no chunk of the engine's."""
        self._events += 1
        if payload == b"[DONE]":
            self.done = True
            return
        try:
            chunk = json.loads(payload)
            if chunk is not None:  # null is what the engine sends as a further prompt begins
                self._take(chunk)
        except (ValueError, TypeError, AttributeError, LookupError) as exc:
            raise _broken(f"event {self._events} of the engine's stream is no chunk ({exc!r})") from exc

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            error = chunk["error"]
            self.error = error if isinstance(error, dict) else {"message": str(error)}
            return
        self._chunk = chunk
        for part in chunk["choices"]:
            choice = self._last = self._choices.setdefault(part["index"], _Choice())
            choice.finish_reason = part["finish_reason"]
            if self._chat:
                choice.take_delta(part["delta"])
            else:
                choice.text.append(part["text"])
        self._last.usage = chunk.get("usage")
        self._last.timings = chunk.get("timings")

    def result(self) -> dict[str, object]:
        """The reply, ready to be serialised in this order.

        Raises :class:`Error` where there is none: the engine ended in an error, which is raised as its unstreamed reply has it, or
        the stream ended before its end (the child died).
        """
        if self.error is not None:
            status = self.error.get("code")
            raise _broken(
                str(self.error.get("message")),
                status=status if isinstance(status, int) else 502,
                code=str(self.error.get("type") or "upstream_error"),
            )
        if not self.done or not self._choices:
            raise _broken(f"the engine's stream ended after {self._events} events, before its end")
        choices = sorted(self._choices.items())
        first = choices[0][1]
        reply: dict[str, object] = {
            "choices": [choice.chat_reply(index) if self._chat else choice.text_reply(index) for index, choice in choices],
            "created": self._chunk["created"],
            "model": self._chunk["model"],
            "system_fingerprint": self._chunk["system_fingerprint"],
            "object": "chat.completion" if self._chat else "text_completion",
            "usage": first.usage,
            "id": self._chunk["id"],
        }
        if first.timings is not None:
            reply["timings"] = first.timings
        return reply


def _broken(message: str, *, status: int = 502, code: str = "upstream_error") -> Error:
    return Error(message, exit=Exit.CHILD, status=status, code=code)
