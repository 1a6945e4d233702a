"""What a request's body asks of the front door: the few fields that decide its way. Everything else passes unread.

Bodies go upstream byte for byte. Where a field has to differ, it is written once more before the last brace: the engine's JSON parser
(nlohmann) keeps the last of two equal keys, as this one does, so nothing is serialised anew and no number changes its spelling.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from supervisor.errors import Error, Exit

_SPACE: Final = b" \t\r\n"
_STRIPPED: Final = b'"id_slot":-1,"lora":[]'
"""``id_slot`` would let a client choose another's slot (out of range it even wraps), ``lora`` change a shared model."""


class Ask(BaseModel):
    """The fields read. pydantic parses the body in Rust and builds Python objects for these alone: 5 MB take 3 ms."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str | None = None
    stream: Any = None
    n: Any = None
    n_cmpl: Any = None
    prompt: Any = None
    input: Any = None
    documents: Any = None
    id_slot: Any = None
    lora: Any = None
    n_predict: Any = None
    max_completion_tokens: Any = None
    max_tokens: Any = None

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read a request's body. Raises :class:`Error` (HTTP 400) when it is no JSON object."""
        try:
            found = cls.model_validate_json(body)
            if b"NaN" in body or b"Infinity" in body:
                from_json(body, allow_inf_nan=False)  # words that pydantic reads as numbers, and the engine answers with 500
        except ValidationError as exc:
            fault = exc.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in fault["loc"])
            raise _unusable(f"{field}: {fault['msg']}" if field else str(fault["msg"])) from exc
        except ValueError as exc:
            raise _unusable(f"Invalid JSON: {exc}") from exc
        return found

    @property
    def streams(self) -> bool:
        """Whether the client wants events."""
        return self.stream is True

    @property
    def cost(self) -> int:
        """How many sequences it decodes: choices times prompts (or texts to embed or to rank), at least 1."""
        lists = (many for many in (self.prompt, self.input, self.documents) if isinstance(many, list))
        prompts = max((len(many) for many in lists if not all(isinstance(part, int) for part in many)), default=1)
        # The engine's own name for n is n_cmpl, and it takes 2.0 for 2.
        choices = max((_int32(said) for said in (self.n, self.n_cmpl) if isinstance(said, int | float)), default=1)
        return max(1, prompts) * max(1, choices)

    def spliced(self, body: bytes, most_tokens: int | None) -> bytes:
        """The body without what a client may not choose, and with an answer no longer than ``most_tokens``.

        The engine takes the first of these three that is there (its order at b11312, tools/server/server-context.cpp); where none is,
        or it is -1, its ``--predict`` counts, which is ``most_tokens`` too.
        """
        members = [] if self.id_slot is None and self.lora is None else [_STRIPPED]
        asked = next((n for n in (self.n_predict, self.max_completion_tokens, self.max_tokens) if n is not None), 0)
        if most_tokens is not None and isinstance(asked, int | float) and _int32(asked) > most_tokens:
            members.append(b'"n_predict":%d' % most_tokens)
        return extend(body, b",".join(members)) if members else body


def _int32(said: float) -> int:
    """The number as the engine reads it: of a whole one of 64 bits it keeps the low 32, so that -4294967294 is 2 there."""
    if isinstance(said, int) and -(1 << 63) <= said < 1 << 64:
        return (said + (1 << 31)) % (1 << 32) - (1 << 31)
    return int(said) if math.isfinite(said) else 0


def _unusable(why: str) -> Error:
    return Error(
        f"the request's body can't be used: {why}",
        exit=Exit.USAGE,
        hint="send a JSON object",
        status=400,
        code="invalid_request_error",
    )


def fields(body: bytes) -> dict[str, Any]:
    """The whole body as Python objects, for requests whose way depends on more than :class:`Ask` reads. Known to parse."""
    found = json.loads(body)
    assert isinstance(found, dict)
    return found


def extend(body: bytes, members: bytes) -> bytes:
    """``body``, a JSON object known to parse, with ``members`` as its last, which win over equal keys before them."""
    head = body.rstrip(_SPACE)
    if not head.endswith(b"}"):
        raise Error("the request's body is not a JSON object", exit=Exit.USAGE, status=400, code="invalid_request_error")
    head = head[:-1].rstrip(_SPACE)
    return b"".join((head, b"" if head.endswith(b"{") else b",", members, b"}"))
