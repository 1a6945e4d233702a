"""What the fake says: the bytes of one reply, streamed or whole, in the shapes of the API that asked (tools/server/server-task.cpp)."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fakes.completion import Reply

FINGERPRINT = "b11312-0c1e57098"
Body = dict[str, Any]


_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def compact(value: object) -> bytes:
    """JSON without blanks, as the engine writes it."""
    return _encode(value).encode()


def event(value: object) -> bytes:
    """One SSE event."""
    return b"data: %b\n\n" % compact(value)


def named(name: str, **body: object) -> bytes:
    """One SSE event of an API whose events have names."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), compact({"type": name, **body}))


class Voice(ABC):
    """One reply's words. What doesn't change from token to token is made once."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.id = f"chatcmpl-{reply.task:032}"
        self.created = int(time.time())
        self.alias = reply.engine.options.alias
        self.words = reply.knobs.text.split(" ") if reply.knobs.text else []

    @abstractmethod
    def token(self, sent: int) -> Iterator[bytes]:
        """The events of token ``sent``: an HTTP chunk for each choice."""

    @abstractmethod
    def closing(self) -> Iterator[bytes]:
        """The last events."""

    @abstractmethod
    def whole(self) -> object:
        """The unstreamed body."""

    def error(self, inside: Body) -> bytes:
        """The event of an error in mid-stream."""
        return event({"error": inside})

    def piece(self, sent: int) -> str:
        """The text of one token."""
        word = self.words[sent % len(self.words)] if self.words else f"t{sent}"
        return " " + word if sent else word

    def text(self) -> str:
        """All of it, so far."""
        return "".join(self.piece(sent) for sent in range(self.reply.sent))


class Choices(Voice):
    """OpenAI's completions: chat and text."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self.frames = [self._frame(index) for index in range(reply.choices)]

    def token(self, sent: int) -> Iterator[bytes]:
        """A chat's first token shares its chunk with the role."""
        reply = self.reply
        quoted = compact(self.piece(sent))
        for index, (before, after) in enumerate(self.frames):
            if reply.knobs.deltas:
                said = self._delta(index, reply.knobs.deltas[sent])
            else:
                said = before + quoted.ljust(reply.knobs.chunk_bytes - len(before) - len(after)) + after
            if sent == 0 and reply.route == "chat":
                said = self._delta(index, {"role": "assistant", "content": None}) + said
            yield said

    def closing(self) -> Iterator[bytes]:
        """finish_reason, usage where asked for; timings on the last of each choice."""
        reply = self.reply
        for index in range(reply.choices):
            timed = {"timings": timings(reply)}
            if reply.route == "text":
                choice: Body = {"text": "", "index": index, "logprobs": None, "finish_reason": reply.finish_reason}
                yield event({"choices": [choice], **self._identity("text_completion", usage=True), **timed})
                continue
            choice = {"finish_reason": reply.finish_reason, "index": index, "delta": {}}
            last = {"choices": [choice], **self._identity("chat.completion.chunk")}
            if not reply.wants_usage:
                yield event({**last, **timed})
                continue
            identity = self._identity("chat.completion.chunk")
            yield event(last) + event({"choices": [], **identity, "usage": self._usage(), **timed})
        yield b"data: [DONE]\n\n"

    def whole(self) -> object:
        """``chat.completion`` or ``text_completion``."""
        reply = self.reply
        chat = reply.route == "chat"
        choices: list[Body] = []
        for index in range(reply.choices):
            if chat:
                message = {"role": "assistant", "content": self.text()}
                choices.append({"finish_reason": reply.finish_reason, "index": index, "message": message})
            else:
                choices.append({"text": self.text(), "index": index, "logprobs": None, "finish_reason": reply.finish_reason})
        identity = self._identity("chat.completion" if chat else "text_completion", usage=True)
        return {"choices": choices, **identity, "timings": timings(reply)}

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """An event's bytes around the text of a token."""
        mark = "\x00"
        if self.reply.route == "chat":
            whole = self._delta(index, {"content": mark})
        else:
            choice = {"text": mark, "index": index, "logprobs": None, "finish_reason": None}
            whole = event({"choices": [choice], **self._identity("text_completion")})
        before, _, after = whole.partition(compact(mark))
        return before, after

    def _delta(self, index: int, delta: Body) -> bytes:
        choice = {"finish_reason": None, "index": index, "delta": delta}
        return event({"choices": [choice], **self._identity("chat.completion.chunk")})

    def _identity(self, noun: str, *, usage: bool = False) -> Body:
        """The fields each chunk of a reply carries; their order differs between the engine's shapes, and so it does here."""
        model = {"model": self.alias, "system_fingerprint": FINGERPRINT, "object": noun}
        if noun == "chat.completion.chunk":
            return {"created": self.created, "id": self.id, **model}
        return {"created": self.created, **model, **({"usage": self._usage()} if usage else {}), "id": self.id}

    def _usage(self) -> Body:
        """Counts of one choice, however many there are: so counts the engine."""
        done, prompt = self.reply.sent, self.reply.prompt_n
        details = {"prompt_tokens_details": {"cached_tokens": self.reply.cached_n}}
        return {"completion_tokens": done, "prompt_tokens": prompt, "total_tokens": done + prompt, **details}


class Native(Voice):
    """llama.cpp's own: a sequence of events each, and an array where there are several."""

    def token(self, sent: int) -> Iterator[bytes]:
        """One of each sequence."""
        counts = {"tokens_predicted": sent + 1, "tokens_evaluated": self.reply.prompt_n}
        for index in range(self.reply.choices):
            yield event({"index": index, "content": self.piece(sent), "tokens": [sent], "stop": False, "id_slot": -1, **counts})

    def closing(self) -> Iterator[bytes]:
        """One each, and nothing after it."""
        for index in range(self.reply.choices):
            yield event(self._end(index, ""))

    def whole(self) -> object:
        """One, or an array."""
        ends = [self._end(index, self.text()) for index in range(self.reply.choices)]
        return ends[0] if len(ends) == 1 else ends

    def _end(self, index: int, text: str) -> Body:
        reply = self.reply
        return {
            "index": index,
            "content": text,
            "tokens": [],
            "id_slot": reply.slots[index % len(reply.slots)],
            "stop": True,
            "model": self.alias,
            "tokens_predicted": reply.sent,
            "tokens_evaluated": reply.prompt_n,
            "generation_settings": {"n_predict": reply.tokens, "stream": reply.streamed, "reasoning_in_content": False},
            "prompt": reply.prompt,
            "has_new_line": False,
            "truncated": False,
            "stop_type": "limit" if reply.finish_reason == "length" else "eos",
            "stopping_word": "",
            "tokens_cached": reply.prompt_n + reply.sent - 1,
            "timings": timings(reply),
        }


class Responses(Voice):
    """OpenAI's Responses."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self.ids = {"response": f"resp_{reply.task:032}", "item": f"msg_{reply.task:032}"}

    def token(self, sent: int) -> Iterator[bytes]:
        """The first one is told with what it begins."""
        said = named("response.output_text.delta", item_id=self.ids["item"], delta=self.piece(sent))
        if sent == 0:
            begun = {"response": {"id": self.ids["response"], "object": "response", "status": "in_progress"}}
            item = {
                "content": [],
                "id": self.ids["item"],
                "role": "assistant",
                "status": "in_progress",
                "type": "message",
            }
            part = {"item_id": self.ids["item"], "part": {"type": "output_text", "text": ""}}
            said = b"".join(
                (
                    named("response.created", **begun),
                    named("response.in_progress", **begun),
                    named("response.output_item.added", item=item),
                    named("response.content_part.added", **part),
                    said,
                )
            )
        yield said

    def closing(self) -> Iterator[bytes]:
        """All that is done, the whole reply last."""
        part = {"type": "output_text", "annotations": [], "logprobs": [], "text": self.text()}
        item = {"type": "message", "status": "completed", "id": self.ids["item"], "content": [part], "role": "assistant"}
        response = {
            "id": self.ids["response"],
            "object": "response",
            "created_at": self.created,
            "status": "completed",
            "model": self.alias,
            "output": [item],
            "usage": self._usage(),
        }
        yield b"".join(
            (
                named("response.output_text.done", item_id=self.ids["item"], text=self.text()),
                named("response.content_part.done", item_id=self.ids["item"], part=part),
                named("response.output_item.done", item=item),
                named("response.completed", response=response, timings=timings(self.reply)),
            )
        )

    def whole(self) -> object:
        """Without timings."""
        part = {"type": "output_text", "annotations": [], "logprobs": [], "text": self.text()}
        item = {"content": [part], "id": self.ids["item"], "role": "assistant", "status": "completed", "type": "message"}
        return {
            "completed_at": self.created,
            "created_at": self.created,
            "id": self.ids["response"],
            "model": self.alias,
            "object": "response",
            "output": [item],
            "status": "completed",
            "usage": self._usage(),
        }

    def _usage(self) -> Body:
        done, prompt = self.reply.sent, self.reply.prompt_n
        details = {"input_tokens_details": {"cached_tokens": self.reply.cached_n}}
        return {"input_tokens": prompt, "output_tokens": done, "total_tokens": done + prompt, **details}


class Messages(Voice):
    """Anthropic's Messages."""

    def token(self, sent: int) -> Iterator[bytes]:
        """The first one is told with the message's head."""
        said = named("content_block_delta", index=0, delta={"type": "text_delta", "text": self.piece(sent)})
        if sent == 0:
            block = named("content_block_start", index=0, content_block={"type": "text", "text": ""})
            begun = b"" if self.reply.knobs.half_glyph_first else named("message_start", message=self._message([], None, 0))
            said = begun + block + said
        yield said

    def closing(self) -> Iterator[bytes]:
        """The block's end, why, and how many tokens."""
        yield b"".join(
            (
                named("content_block_stop", index=0),
                named(
                    "message_delta",
                    delta={"stop_reason": self._reason(), "stop_sequence": None},
                    usage={"output_tokens": self.reply.sent},
                ),
                named("message_stop"),
            )
        )

    def whole(self) -> object:
        """The message."""
        return self._message([{"type": "text", "text": self.text()}], self._reason(), self.reply.sent)

    def error(self, inside: Body) -> bytes:
        """By its event's name; the payload has no envelope."""
        return b"event: error\ndata: %b\n\n" % compact(inside)

    def _reason(self) -> str:
        return {"length": "max_tokens", "tool_calls": "tool_use"}.get(self.reply.finish_reason, "end_turn")

    def _message(self, content: list[Body], reason: str | None, done: int) -> Body:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.alias,
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": {
                "cache_read_input_tokens": self.reply.cached_n,
                "input_tokens": self.reply.prompt_n - self.reply.cached_n,
                "output_tokens": done,
            },
        }


VOICES: dict[str, type[Voice]] = {
    "chat": Choices,
    "text": Choices,
    "native": Native,
    "infill": Native,
    "responses": Responses,
    "messages": Messages,
}
"""By the word for a route."""


def timings(reply: Reply) -> Body:
    """By this reply's clock. The first token is free: the rate counts the others."""
    prompt_ms = max(reply.knobs.prefill_s * 1000, 0.01)
    predicted_ms = max((reply.loop.time() - reply.first_at) * 1000, 0.01)
    steps = max(reply.sent - 1, 1)
    computed_n = reply.prompt_n - reply.cached_n
    return {
        "cache_n": reply.cached_n,
        "prompt_n": computed_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / computed_n,
        "prompt_per_second": computed_n / prompt_ms * 1000,
        "predicted_n": reply.sent,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / steps,
        "predicted_per_second": steps / predicted_ms * 1000,
        **drafts(reply),
    }


def drafts(reply: Reply) -> Body:
    """Where any were made: a step makes one token more than it guessed right (tools/server/server-common.cpp:98)."""
    made, right = reply.knobs.drafts.get(reply.engine.options.guesses, (0, 0))
    steps = reply.sent // (right + 1)
    return {"draft_n": steps * made, "draft_n_accepted": steps * right} if steps * made else {}
