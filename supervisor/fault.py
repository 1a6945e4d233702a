"""Whose fault an error is, and how it is said to a client of each API.

SDKs retry a 5xx twice, so a fault of the request has to be a 4xx whatever the engine says. At b11312 it answers 500 to much that a
request did wrong, because every exception but ``std::invalid_argument`` becomes one (tools/server/server.cpp:60-71). The rule here:

1. A 500 in words of :data:`_ENGINES_OWN` is the engine's: they are said by the loop that decodes or by the reader of the model's
   output. So is a body that is no error object: the engine never answers a request so.
2. One that counts the tokens of the input is a prompt too long (an embedding's, which has to fit one batch), and so is an
   ``exceed_context_size_error``: HTTP 400, ``context_length_exceeded``, in the words that clients look for.
3. Every other 500 was thrown while the request was read, before a slot was taken: bad JSON, a field of a wrong type, an image for a text
   model, a template's refusal, a tool call whose arguments are no JSON, a token that doesn't exist. HTTP 400.
4. 501 says that this model or this start can't do it, which it won't at the next try either. HTTP 400.

In a stream, after the head, only rules 1 and 2 hold: by then the request was read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from supervisor.errors import Error, Exit
from supervisor.routes import Api, is_anthropic

_ENGINES_OWN: Final = (
    "got exception: ",  # tools/server/server-context.cpp:2717, 2729; the next five are of that file too
    "pre_decode() failed: ",  # 2820; decode() and post_decode() at 2873 and 2882
    "decode() failed: ",
    "post_decode() failed: ",
    "context shift ",  # 2896, 2908
    "the current context does not support logits computation",  # 3158
    "failed to process mtmd chunk",  # 3482
    "Context size has been exceeded.",  # 3672-3685, sent to every slot
    "Invalid input batch.",
    "Compute error.",
    "The model produced output that does not match the expected ",  # common/chat.cpp:1498
    "Invalid diff: ",  # common/chat.cpp:67, 297, 312
    "std::bad_alloc",
    "unknown error",  # tools/server/server.cpp:70
)
"""How the messages of the engine's own 500s begin."""
_TOO_LARGE: Final = re.compile(r"input \((\d+) tokens\) is too large to process\..*\(current batch size: (\d+)\)")
"""tools/server/server-context.cpp:3165: a prompt that can't be split, an embedding's, is longer than a batch."""
_TOO_LONG: Final = "context_length_exceeded"

_ANTHROPICS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
"""Anthropic's ``error.type`` of a status; any other 4xx is ``invalid_request_error``, any other 5xx ``api_error``."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An error as a client gets it."""

    message: str
    status: int
    """HTTP's, if no head went out yet."""
    kind: str
    """OpenAI's ``error.type``."""
    code: str | int | None
    """OpenAI's ``error.code``; the engine has the status there."""
    source: Literal["llmctl", "engine"]
    hint: str = ""
    tokens: tuple[int, int] | None = None
    """Of the prompt, and of the context it doesn't fit."""
    log: tuple[str, ...] = ()
    """The last lines of the engine that failed."""

    def body(self, path: str) -> dict[str, Any]:
        """The whole error body for a client of this path."""
        return self._anthropics() if is_anthropic(path) else {"error": self._inside()}

    def event(self, api: Api) -> tuple[str, dict[str, Any]]:
        """The name and the payload of the event that ends a stream with this error; an empty name is none.

        A Responses client finds its API's own fields, and OpenAI's SDK the ``error`` on which it raises (openai/_streaming.py).
        """
        if api is Api.ANTHROPIC:
            return "error", self._anthropics()
        inside = self._inside()
        if api is Api.RESPONSES:
            return "error", {"type": "error", "code": self.code, "message": self.message, "param": None, "error": inside}
        return "", {"error": inside}

    def _inside(self) -> dict[str, Any]:
        inside: dict[str, Any] = {
            "message": self._said(),
            "type": self.kind,
            "param": None,
            "code": self.code,
            "source": self.source,
        }
        return inside | self._rest()

    def _anthropics(self) -> dict[str, Any]:
        kind = _ANTHROPICS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        inside = {"type": kind, "message": self._said(anthropic=True), "code": self.code, "source": self.source}
        return {"type": "error", "error": inside | self._rest()}

    def _said(self, *, anthropic: bool = False) -> str:
        """The message; of a prompt too long in each vendor's own words, since clients look for them to shorten the history."""
        if self.tokens is None:
            return self.message
        prompt, context = self.tokens
        if anthropic:
            return f"prompt is too long: {prompt} tokens > {context} maximum"
        return (
            f"This model's maximum context length is {context} tokens. However, your messages resulted in {prompt} tokens. "
            "Please reduce the length of the messages."
        )

    def _rest(self) -> dict[str, Any]:
        """``n_prompt_tokens`` and ``n_ctx`` are the engine's own names."""
        rest: dict[str, Any] = {} if self.tokens is None else {"n_prompt_tokens": self.tokens[0], "n_ctx": self.tokens[1]}
        rest |= {"log": list(self.log)} if self.log else {}
        return rest | {"try": self.hint} if self.hint else rest


class TooLong(Error):
    """The prompt has more tokens than a slot's context; ``fault`` words it for each API. A refusal before a slot is taken."""

    def __init__(self, prompt_tokens: int, context_tokens: int, *, hint: str = "") -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens, and a slot's context {context_tokens}",
            exit=Exit.USAGE,
            hint=hint,
            status=400,
            code=_TOO_LONG,
        )
        self.tokens = (prompt_tokens, context_tokens)


def of(error: Error) -> Fault:
    """An error of ours."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    tokens = error.tokens if isinstance(error, TooLong) else None
    return Fault(error.message, error.status, kind, error.code, "llmctl", hint=error.hint, tokens=tokens, log=error.log)


def of_reply(raw: bytes, status: int) -> Fault:
    """What a reply of the engine's with this status, other than 200, says. Rules 1 to 4."""
    inside = _error_in(raw)
    if inside is None:
        said = raw.decode(errors="replace")[:500] or f"the engine said {status}"
        return Fault(said, status, "server_error", status, "engine")
    fault = of_event(inside, status)
    of_request = fault.status == 501 or (fault.status == 500 and not fault.message.startswith(_ENGINES_OWN))  # 4 and 3
    return replace(fault, status=400, kind="invalid_request_error", code=400) if of_request else fault


def of_event(inside: Mapping[str, object], status: int = 500) -> Fault:
    """What the inside of an error event of the engine's says; ``status`` is for one that names none. Rules 1 and 2."""
    code = inside.get("code")
    if isinstance(code, int) and 400 <= code < 600:
        status = code
    fault = Fault(str(inside.get("message")), status, str(inside.get("type") or "server_error"), status, "engine")
    counts = inside.get("n_prompt_tokens"), inside.get("n_ctx")
    if inside.get("type") == "exceed_context_size_error" and isinstance(counts[0], int) and isinstance(counts[1], int):
        return replace(fault, status=400, kind="invalid_request_error", code=_TOO_LONG, tokens=(counts[0], counts[1]))
    if found := _TOO_LARGE.match(fault.message):
        return replace(fault, status=400, kind="invalid_request_error", code=_TOO_LONG, tokens=(int(found[1]), int(found[2])))
    return fault


def _error_in(raw: bytes) -> Mapping[str, object] | None:
    try:
        body = json.loads(raw)
    except ValueError:
        return None
    inside = body.get("error") if isinstance(body, dict) else None
    return inside if isinstance(inside, dict) else None
