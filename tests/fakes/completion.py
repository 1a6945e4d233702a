"""One completion of the fake: when it speaks (:class:`Reply`) and what it says (:class:`Voice`), in the engine's own shapes."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.fakes.knobs import HEALTHY

if TYPE_CHECKING:
    from tests.fakes.llama_server import Connection

FINGERPRINT = "b11312-0c1e57098"
PUSH_BYTES = 65536
Body = dict[str, Any]


_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def compact(value: object) -> bytes:
    """JSON without blanks, as the engine writes it."""
    return _encode(value).encode()


def event(value: object) -> bytes:
    """One SSE event."""
    return b"data: %b\n\n" % compact(value)


def words_in(body: Body) -> int:
    """A prompt's length: a token is a word."""
    prompt = body.get("prompt") or body.get("content") or body.get("input") or ""
    text = " ".join(str(message.get("content")) for message in body.get("messages") or []) or str(prompt)
    return len(text.split()) or 1


class Reply:
    """From the wait for slots to their release.

    Deadlines are absolute, so a late tick doesn't move those after it, and a stream costs one timer. It ends exactly once: ``end``
    tells how (``done``, ``error``, ``cut``), or the client left.
    """

    def __init__(self, connection: Connection, route: str, body: Body) -> None:
        self.connection, self.engine, self.route = connection, connection.engine, route
        self.loop = self.engine.loop
        knobs = self.engine.knobs
        if self.engine.completions < knobs.healthy_requests:
            knobs = replace(knobs, **HEALTHY)
        self.knobs = knobs = replace(knobs, **body.get("fake", {}))
        self.choices = int(body.get("n") or 1)
        self.streamed = bool(body.get("stream"))
        self.wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self.prompt_n = words_in(body)
        whole = len(self.knobs.deltas) or self.knobs.tokens
        limits = [body[key] for key in ("max_completion_tokens", "max_tokens", "n_predict") if (body.get(key) or 0) > 0]
        self.tokens = min(whole, *limits) if limits else whole
        self.finish_reason = self.knobs.finish_reason or ("length" if self.tokens < whole else "stop")
        self.task = self.engine.number(self)
        self.trouble_at = {knobs.die_after_tokens, knobs.stall_after_tokens, knobs.error_after_tokens, knobs.cut_after_tokens}
        self.slots: list[int] = []
        self.sent = 0
        self.over = self.blocked = False
        self.timer: asyncio.Handle | None = None
        self.first_at = 0.0

    def __repr__(self) -> str:
        return f"<Reply task={self.task} {self.sent}/{self.tokens} slots={self.slots}>"

    def start(self, slots: list[int]) -> None:
        """The slots are ours: the prompt begins."""
        self.slots = slots
        self.due = self.loop.time() + self.knobs.prefill_s
        if self.knobs.malformed:
            self.end("malformed")
            self.connection.transport.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
            self.connection.transport.close()
        elif self.knobs.prefill_s:
            self.timer = self.loop.call_at(self.due, self.first)
        else:
            self.first()

    def first(self) -> None:
        """The prompt is done: headers, or the refusal, or the wait for the whole."""
        self.first_at = self.loop.time()
        if self.knobs.error_status:
            self.end("error")
            self.connection.send({"error": self.knobs.error_body}, self.knobs.error_status)
            return
        self.voice = Voice(self)
        if not self.streamed:
            self.timer = self.loop.call_at(self.due + self.tokens * self.knobs.pace_s, self.whole)
            return
        self.connection.send_stream_head()
        self.engine.journal("first_byte", id=self.task)
        if not self.knobs.headers_only:
            self.tick()

    def tick(self) -> None:
        """One token of each choice, and the next one's timer."""
        if self.blocked or self.engine.stopping or self.misbehaves():
            return
        if self.knobs.push_bytes:
            if self.sent * PUSH_BYTES >= self.knobs.push_bytes:
                self.finish()
                return
            self.connection.send_chunk(b"data: %b\n\n" % (b"x" * (PUSH_BYTES - 8)))
        else:
            for events in self.voice.token(self.sent):
                self.connection.send_chunk(events)
        self.sent += 1
        if self.sent == self.tokens and not self.knobs.push_bytes:
            if not self.misbehaves():
                self.finish()
            return
        self.due += self.knobs.pace_s
        if self.knobs.pace_s:
            self.timer = self.loop.call_at(self.due, self.tick)
        else:
            self.timer = self.loop.call_soon(self.tick)

    def block(self, blocked: bool) -> None:
        """The client reads too slowly, or reads again: the engine waits in its write, and so do we."""
        self.blocked = blocked
        if not blocked and self.timer and not self.over:
            self.timer.cancel()
            self.timer = self.loop.call_soon(self.tick)

    def misbehaves(self) -> bool:
        """Do what the knobs ask for after this many tokens; True is the end of this reply."""
        knobs = self.knobs
        if self.sent not in self.trouble_at:
            return False
        if self.sent == knobs.die_after_tokens:
            os.write(2, knobs.die_log.encode() + b"\n")
            self.engine.leave(knobs.die_exit)
        if self.sent == knobs.error_after_tokens:
            self.end("error")
            self.connection.send_chunk(event({"error": knobs.error_body}))
            self.connection.end_stream()
            return True
        if self.sent == knobs.cut_after_tokens:
            self.end("cut")
            self.connection.transport.close()
            return True
        return self.sent == knobs.stall_after_tokens

    def finish(self) -> None:
        """The stream's last events, then the close that the engine follows every stream with."""
        self.engine.log_timings(self)
        if not self.knobs.push_bytes:
            for events in self.voice.closing():
                self.connection.send_chunk(events)
        if self.route != "native":
            self.connection.send_chunk(b"data: [DONE]\n\n")
        self.end("done")
        self.connection.end_stream()

    def whole(self) -> None:
        """The unstreamed reply."""
        self.sent = self.tokens
        self.engine.log_timings(self)
        self.connection.send(self.voice.whole())
        self.end("done")

    def end(self, how: str) -> None:
        """Give the slots back and say so."""
        self.over = True
        self.engine.journal("finished", id=self.task, tokens=self.sent, how=how)
        self.engine.give_back(self)

    def client_left(self) -> None:
        """The connection is gone; nothing happens if that is because we were done."""
        if self.over:
            return
        self.over = True
        if self.timer:
            self.timer.cancel()
        self.engine.journal("client_closed", id=self.task, tokens=self.sent)
        self.engine.log("W", f"cancel task, id_task = {self.task}", "stop")
        self.engine.give_back(self)


class Voice:
    """The bytes of one reply's events. What doesn't change from token to token is made once."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.id = f"chatcmpl-{reply.task:032}"
        self.created = int(time.time())
        self.words = reply.knobs.text.split(" ") if reply.knobs.text else []
        self.frames = [self._frame(index) for index in range(reply.choices)] if reply.route != "native" else []

    def token(self, sent: int) -> Iterator[bytes]:
        """The events of token ``sent``: an HTTP chunk for each choice. A chat's first token shares its chunk with the role."""
        reply = self.reply
        if reply.route == "native":
            counts = {"tokens_predicted": sent + 1, "tokens_evaluated": reply.prompt_n}
            yield event({"index": 0, "content": self.piece(sent), "tokens": [sent], "stop": False, "id_slot": -1, **counts})
            return
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
        """The last events: finish_reason, usage where asked for; timings on the last of each choice."""
        reply = self.reply
        if reply.route == "native":
            yield event(self._native_end(""))
            return
        for index in range(reply.choices):
            timings = {"timings": self._timings()}
            if reply.route == "text":
                choice: Body = {"text": "", "index": index, "logprobs": None, "finish_reason": reply.finish_reason}
                yield event({"choices": [choice], **self._identity("text_completion", usage=True), **timings})
                continue
            choice = {"finish_reason": reply.finish_reason, "index": index, "delta": {}}
            last = {"choices": [choice], **self._identity("chat.completion.chunk")}
            if not reply.wants_usage:
                yield event({**last, **timings})
                continue
            identity = self._identity("chat.completion.chunk")
            yield event(last) + event({"choices": [], **identity, "usage": self._usage(), **timings})

    def whole(self) -> Body:
        """The unstreamed body."""
        reply = self.reply
        text = "".join(self.piece(sent) for sent in range(reply.tokens))
        if reply.route == "native":
            return self._native_end(text)
        chat = reply.route == "chat"
        choices = []
        for index in range(reply.choices):
            if chat:
                choices.append(
                    {"finish_reason": reply.finish_reason, "index": index, "message": {"role": "assistant", "content": text}}
                )
            else:
                choices.append({"text": text, "index": index, "logprobs": None, "finish_reason": reply.finish_reason})
        identity = self._identity("chat.completion" if chat else "text_completion", usage=True)
        return {"choices": choices, **identity, "timings": self._timings()}

    def piece(self, sent: int) -> str:
        """The text of one token."""
        word = self.words[sent % len(self.words)] if self.words else f"t{sent}"
        return " " + word if sent else word

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
        model = {"model": self.reply.engine.options.alias, "system_fingerprint": FINGERPRINT, "object": noun}
        if noun == "chat.completion.chunk":
            return {"created": self.created, "id": self.id, **model}
        return {"created": self.created, **model, **({"usage": self._usage()} if usage else {}), "id": self.id}

    def _usage(self) -> Body:
        """Counts of one choice, however many there are: so counts the engine."""
        done, prompt = self.reply.sent, self.reply.prompt_n
        details = {"prompt_tokens_details": {"cached_tokens": 0}}
        return {"completion_tokens": done, "prompt_tokens": prompt, "total_tokens": done + prompt, **details}

    def _timings(self) -> Body:
        return timings(self.reply)

    def _native_end(self, text: str) -> Body:
        reply = self.reply
        return {
            "index": 0,
            "content": text,
            "tokens": [],
            "id_slot": reply.slots[0],
            "stop": True,
            "model": reply.engine.options.alias,
            "tokens_predicted": reply.sent,
            "tokens_evaluated": reply.prompt_n,
            "truncated": False,
            "stop_type": "limit" if reply.finish_reason == "length" else "eos",
            "stopping_word": "",
            "tokens_cached": reply.prompt_n + reply.sent - 1,
            "timings": self._timings(),
        }


def timings(reply: Reply) -> Body:
    """By this reply's clock. The first token is free: the rate counts the others."""
    prompt_ms = max(reply.knobs.prefill_s * 1000, 0.01)
    predicted_ms = max((reply.loop.time() - reply.first_at) * 1000, 0.01)
    steps = max(reply.sent - 1, 1)
    return {
        "cache_n": 0,
        "prompt_n": reply.prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / reply.prompt_n,
        "prompt_per_second": reply.prompt_n / prompt_ms * 1000,
        "predicted_n": reply.sent,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / steps,
        "predicted_per_second": steps / predicted_ms * 1000,
    }
