"""An unstreamed request as a streamed one, and the streamed answer as the engine's unstreamed one.

The engine notices in time that a client has left only while it streams (tools/server/server-queue.cpp), so the front door streams
upstream for everybody. For a client that didn't ask for it, :func:`request_body` makes the request a streaming one and an
:class:`Assembler` makes one reply of the events: the reply the engine would have sent, in its keys and their order, bar ids,
``created`` and times (tests/contract/test_assembly.py holds both against the real engine). Each API's assembler is a module of its own:
``choices``, ``responses``, ``messages``, ``native``. The shapes are those of the ``to_json_…`` in llama.cpp's ``tools/server/server-
task.cpp``.

Some rare ends lack text that the unstreamed reply has, because the engine streams only what is settled and drops the rest at the end.
Nothing in a stream tells them, and every client that streams has them too; the contract tests keep them in view:

1. an end by length inside what may become a stop string: that half is missing;
2. an end by length inside a glyph: the U+FFFD is missing (chat, Responses and Messages lack it unstreamed too);
3. an answer whose parser finds nothing in it, say one cut in ``<think>`` or in a tool call's head, or blank: its raw text is missing.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final

from supervisor.ask import extend
from supervisor.errors import Error, Exit
from supervisor.routes import Api

_STREAMING: Final = b'"stream":true'
_WITH_USAGE: Final = b'"stream":true,"stream_options":{"include_usage":true}'


def must_pass_unstreamed(api: Api, fields: Mapping[str, Any]) -> bool:
    """Whether a stream can't give the reply to this unstreamed request, so that the engine has to be asked as the request stands.

    1. ``logprobs``, or ``n_probs`` by the engine's name: a stream's lack the end token and tokens that split a glyph; with tools the
       engine refuses them.
    2. ``continue_final_message`` without ``echo``: unstreamed the answer begins with the message it continues, streamed it doesn't.
    3. ``verbose`` in OpenAI's completions: the engine's state, of which a stream's chunks hold other parts.
    4. ``n_indent``: the line that ends the answer is cut off again, after it was streamed.
    5. llama.cpp's own routes: ``return_tokens``, since a stream lacks the tokens that split a glyph; ``response_fields``, since they
       leave an event without its index and without what says that it is the last.
    6. Responses with several choices: the engine's reply is an array in their order, and no event says which choice it is of.

    Messages never need it: Anthropic's converter drops all these fields. Several prompts in one request, ``post_sampling_probs``,
    ``return_progress`` and a last message by the assistant are not among them: shown equal.
    """
    if api is Api.ANTHROPIC:
        return False
    several = (fields.get("n"), fields.get("n_cmpl"))
    return (
        bool(fields.get("logprobs") or fields.get("n_probs"))  # 1
        or bool(fields.get("continue_final_message") and not fields.get("echo"))  # 2
        or (api in (Api.CHAT, Api.TEXT) and bool(fields.get("verbose")))  # 3
        or bool(fields.get("n_indent"))  # 4
        or (api is Api.NATIVE and bool(fields.get("return_tokens") or fields.get("response_fields")))  # 5
        or (api is Api.RESPONSES and any(asked is not None and asked != 1 for asked in several))  # 6
    )


def request_body(api: Api, body: bytes) -> bytes:
    """The same request, streamed and with its usage. ``body`` is a JSON object, known to parse.

    Nothing is serialised anew: the keys are put before the last brace, and where a key comes twice the engine's parser keeps the last.
    """
    return extend(body, _WITH_USAGE if api in (Api.CHAT, Api.TEXT) else _STREAMING)


class Assembler(ABC):
    """One reply in the making. Feed it the payload of every event, then ask for :meth:`result`."""

    def __init__(self) -> None:
        self._events = 0
        self.error: dict[str, Any] | None = None
        """The inside of the engine's error, where the stream ended in one. Its ``code`` is the HTTP status."""

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "done" if self.done else "open"
        return f"<{type(self).__name__} {state} events={self._events}>"

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether the stream came to its end."""

    @abstractmethod
    def _take(self, event: dict[str, Any]) -> None:
        """Take one event that is no error. KeyError, TypeError and their like say that it is none of the engine's."""

    @abstractmethod
    def _reply(self) -> dict[str, Any] | list[Any]:
        """The reply of a stream that is done."""

    def feed(self, payload: bytes) -> None:
        """Take one event's payload. Raises :class:`Error` for one that is no event of the engine's."""
        self._events += 1
        try:
            event = json.loads(payload)
            if event is None:  # what the engine sends as a further prompt begins
                return
            if "error" in event:
                self._fail(event["error"])
            else:
                self._take(event)
        except (ValueError, TypeError, AttributeError, LookupError) as exc:
            raise broken(f"event {self._events} of the engine's stream is none ({type(exc).__name__})") from exc

    def _fail(self, error: object) -> None:
        self.error = error if isinstance(error, dict) else {"message": str(error)}

    def result(self) -> dict[str, Any] | list[Any]:
        """The reply, ready to be serialised in this order.

        Raises :class:`Error` (HTTP 502) where there is none: the engine ended in an error (see :attr:`error`), or the stream ended
        before its end.
        """
        if self.error is not None:
            raise broken(f"the engine's stream ended in an error: {self.error.get('message')}")
        if not self.done:
            raise broken(f"the engine's stream ended after {self._events} events, before its end")
        return self._reply()


def broken(message: str) -> Error:
    """The engine's stream is none (HTTP 502)."""
    return Error(message, exit=Exit.CHILD, hint="send it again", status=502, code="upstream_error")
