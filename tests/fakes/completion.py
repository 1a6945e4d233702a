"""One completion of the fake: when it speaks. What it says is a voice's (``voices``)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.fakes.knobs import HEALTHY
from tests.fakes.voices import VOICES, Body, drafts

if TYPE_CHECKING:
    from tests.fakes.llama_server import Connection

PUSH_BYTES = 65536
LIMITS = {
    "messages": ("max_tokens",),
    "responses": ("n_predict", "max_completion_tokens", "max_output_tokens", "max_tokens"),
}
"""The names of an answer's longest length, where they aren't the usual ones."""


def words_of(body: Body) -> str:
    """The prompt, or all of a dialogue, as one text."""
    parts: list[Any] = [
        body.get(key) for key in ("system", "instructions", "prompt", "content", "input", "input_prefix", "input_suffix")
    ]
    parts += [message.get("content") for message in body.get("messages") or []]
    return " ".join(str(part) for part in parts if part)


def words_in(body: Body) -> int:
    """A prompt's length: a token is a word."""
    return len(words_of(body).split()) or 1


def sequences(route: str, body: Body) -> int:
    """How many answers there are to be: choices times prompts."""
    if route == "messages":
        return 1  # its converter drops n
    prompt = body.get("prompt") if route in ("text", "native") else None
    prompts = len(prompt) if isinstance(prompt, list) and not any(isinstance(part, int) for part in prompt) else 1
    return max(1, prompts) * int(body.get("n_cmpl") or body.get("n") or 1)


class Reply:
    """From the wait for slots to their release.

    Deadlines are absolute, so a late tick doesn't move those after it, and a stream costs one timer. It ends exactly once: ``end``
    tells how (``done``, ``error``, ``cut``), or the client left, or the process ended; the journal has :meth:`account` each time.
    """

    def __init__(self, connection: Connection, route: str, body: Body) -> None:
        self.connection, self.engine, self.route = connection, connection.engine, route
        self.loop = self.engine.loop
        knobs = self.engine.knobs
        if self.engine.completions < knobs.healthy_requests:
            knobs = replace(knobs, **HEALTHY)
        self.knobs = knobs = replace(knobs, **body.get("fake", {}))
        self.choices = sequences(route, body)
        self.places = min(self.choices, self.engine.options.slots)
        self.prompt = words_of(body)
        self.streamed = bool(body.get("stream"))
        self.wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self.prompt_n = words_in(body)
        self.cached_n = min(self.knobs.cached, self.prompt_n - 1)
        self.name = str(body.get("user") or "")
        whole = len(self.knobs.deltas) or self.knobs.tokens
        names = LIMITS.get(route, ("n_predict", "max_completion_tokens", "max_tokens"))
        limit = next((body[name] for name in names if body.get(name) is not None), -1)  # the first that is there
        self.tokens = min(whole, limit) if limit > 0 else whole
        self.finish_reason = self.knobs.finish_reason or ("length" if self.tokens < whole else "stop")
        self.task = self.engine.number(self)
        self.trouble_at = {knobs.die_after_tokens, knobs.stall_after_tokens, knobs.error_after_tokens, knobs.cut_after_tokens}
        self.slots: list[int] = []
        self.sent = 0
        self.over = self.blocked = False
        self.timer: asyncio.Handle | None = None
        self.begun = self.first_at = 0.0

    def __repr__(self) -> str:
        return f"<Reply task={self.task} {self.sent}/{self.tokens} slots={self.slots}>"

    def start(self, slots: list[int]) -> None:
        """The slots are ours: the prompt begins."""
        self.slots = slots
        self.begun = self.loop.time()
        self.due = self.begun + self.knobs.prefill_s
        if self.knobs.spin:
            self.engine.spin()
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
        if self.engine.dies_warming or (self.knobs.killer and self.knobs.killer in self.prompt.split()):
            self.die()
            return
        if self.knobs.error_status:
            self.end("error")
            self.connection.send({"error": self.knobs.error_body}, self.knobs.error_status)
            return
        self.voice = VOICES[self.route](self)
        if not self.streamed:
            self.timer = self.loop.call_at(self.due + self.tokens * self.knobs.pace_s, self.whole)
            return
        self.connection.send_stream_head()
        self.engine.journal("first_byte", id=self.task)
        if not self.knobs.headers_only:
            self.tick()

    @property
    def evaluated(self) -> int:
        """Tokens of the prompt that ``/slots`` counts as processed: whole batches."""
        if self.first_at:
            return self.prompt_n
        step_s = self.knobs.prefill_s / self.knobs.prefill_steps
        done = int((self.loop.time() - self.begun) / step_s) if step_s else self.knobs.prefill_steps
        return self.prompt_n * min(done, self.knobs.prefill_steps) // self.knobs.prefill_steps

    def account(self) -> dict[str, Any]:
        """What was made for it, all its sequences together; ``user`` is the name that the request came with."""
        each = {"prompt": self.prompt_n, "cached": self.cached_n, "completion": self.sent, **drafts(self)}
        return {"user": self.name, "route": self.route, "made": {what: self.choices * count for what, count in each.items()}}

    def die(self) -> None:
        """Take the process along."""
        self.engine.die(self.knobs)

    def tick(self) -> None:
        """One token of each choice, and the next one's timer."""
        if self.blocked or self.engine.stopping or self.engine.wedged or self.misbehaves():
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
            self.die()
            return True
        if self.sent == knobs.error_after_tokens:
            self.end("error")
            self.connection.send_chunk(self.voice.error(knobs.error_body))
            self.connection.end_stream()
            return True
        if self.sent == knobs.cut_after_tokens:
            self.end("cut")
            self.connection.transport.close()
            return True
        if self.sent == knobs.stall_after_tokens:
            self.engine.journal("stalled", id=self.task, user=self.name)
            return True
        return False

    def finish(self) -> None:
        """The stream's last events, then the close that the engine follows every stream with."""
        self.engine.log_timings(self)
        if not self.knobs.push_bytes:
            for events in self.voice.closing():
                self.connection.send_chunk(events)
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
        if self.knobs.grow_mib:
            self.engine.grown.append(bytearray(b"x") * (self.knobs.grow_mib << 20))  # written to, so that it is really taken
        self.engine.journal("finished", id=self.task, tokens=self.sent, how=how, **self.account())
        self.engine.give_back(self)

    def client_left(self) -> None:
        """The connection is gone; nothing happens if that is because we were done."""
        if self.over:
            return
        self.over = True
        if self.timer:
            self.timer.cancel()
        self.engine.journal("client_closed", id=self.task, tokens=self.sent, **self.account())
        self.engine.log("W", f"cancel task, id_task = {self.task}", "stop")
        self.engine.give_back(self)
