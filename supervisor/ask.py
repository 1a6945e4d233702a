"""What a request's body asks of the front door: the few fields that decide its way. Everything else passes unread.

Bodies go upstream byte for byte. Where a field has to differ, it is written once more before the last brace: the engine's JSON parser
(nlohmann) keeps the last of two equal keys, as this one does, so nothing is serialised anew and no number changes its spelling.

What a field does depends on the API. Chat, completions and llama.cpp's own routes hand the whole body to the sampler's schema, and so
does Responses after renaming ``max_output_tokens`` (tools/server/server-chat.cpp:295 at b11312). Anthropic's converter builds a new body
of the fields it knows (server-chat.cpp:346-615): no ``n``, ``n_predict``, ``id_slot`` or ``lora`` gets through it.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, StrictBool, ValidationError
from pydantic_core import from_json

from supervisor.errors import Error, Exit
from supervisor.routes import Api, Route

_SPACE: Final = b" \t\r\n"
_STRIPPED: Final = b'"id_slot":-1,"lora":[]'
"""``id_slot`` would let a client choose another's slot (out of range it even wraps), ``lora`` change a shared model."""
_ANTHROPIC_MAX_TOKENS: Final = 4096
"""What the engine takes where a Messages request says nothing (server-chat.cpp:589)."""


class _Fields(BaseModel):
    """The fields read. pydantic parses the body in Rust and builds Python objects for these alone: 5 MB take 3 ms."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str | None = None
    stream: StrictBool | None = None
    """The engine refuses anything else on every route that streams."""
    service_tier: Any = None
    n: Any = None
    n_cmpl: Any = None
    prompt: Any = None
    input: Any = None
    content: Any = None
    documents: Any = None
    texts: Any = None
    id_slot: Any = None
    lora: Any = None
    n_predict: Any = None
    max_completion_tokens: Any = None
    max_tokens: Any = None
    max_output_tokens: Any = None


class Ask(NamedTuple):
    """One request's wishes, as far as the front door heeds them."""

    api: Api
    model: str | None
    streams: bool
    """Whether the client wants events."""
    cost: int
    """How many sequences it decodes: choices times prompts (or texts to embed or to rank), at least 1."""
    service_tier: str | None
    """OpenAI's word for how soon; ``flex`` is the class that may wait."""
    asked_tokens: int | None
    """The longest answer it asks for, as the engine reads it; None where the engine's ``--predict`` counts."""
    meddles: bool
    """It chooses a slot or an adapter."""

    @classmethod
    def parse(cls, body: bytes, route: Route) -> Self:
        """Read a request's body. Raises :class:`Error` (HTTP 400) when it is no JSON object, or a field read here is of a wrong type."""
        try:
            said = _Fields.model_validate_json(body)
            if b"NaN" in body or b"Infinity" in body:
                from_json(body, allow_inf_nan=False)  # words that pydantic reads as numbers, and the engine answers with 500
        except ValidationError as exc:
            fault = exc.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in fault["loc"])
            if field:
                raise _unusable(f"{field}: {fault['msg']}", f"another {field}, or none") from exc
            raise _unusable(str(fault["msg"])) from exc
        except ValueError as exc:
            raise _unusable(f"Invalid JSON: {exc}") from exc
        return cls(
            api=route.api,
            model=said.model,
            streams=said.stream is True and route.api is not Api.WHOLE,
            cost=_cost(said, route),
            service_tier=said.service_tier if isinstance(said.service_tier, str) else None,
            asked_tokens=_asked_tokens(said, route.api),
            meddles=said.id_slot is not None or said.lora is not None,
        )

    def spliced(self, body: bytes, most_tokens: int | None) -> bytes:
        """The body without what a client may not choose, and with an answer no longer than ``most_tokens``."""
        members = [_STRIPPED] if self.meddles else []
        if most_tokens is not None and self.asked_tokens is not None and self.asked_tokens > most_tokens:
            # n_predict is the first of the names that the schema looks for; Anthropic's converter passes only max_tokens on.
            members.append(b'"%b":%d' % (b"max_tokens" if self.api is Api.ANTHROPIC else b"n_predict", most_tokens))
        return extend(body, b",".join(members)) if members else body


def _cost(said: _Fields, route: Route) -> int:
    if route.api in (Api.TEXT, Api.NATIVE):
        prompts = _texts(said.prompt) if route.path != "/infill" else 1  # infill's prompt is a string or not read at all
    elif route.api is Api.WHOLE:
        prompts = max(_texts(many) for many in (said.input, said.content, said.documents, said.texts))
    else:
        prompts = 1
    if route.api in (Api.WHOLE, Api.ANTHROPIC):
        return prompts
    # The engine's own name for n is n_cmpl, and it takes 2.0 for 2.
    choices = max((_int32(asked) for asked in (said.n, said.n_cmpl) if isinstance(asked, int | float)), default=1)
    return prompts * max(1, choices)


def _texts(prompt: object) -> int:
    """How many prompts that is: an array with a whole number in it is one, of tokens (server-common.cpp:1017)."""
    if not isinstance(prompt, list) or any(type(part) is int for part in prompt):
        return 1
    return max(1, len(prompt))


def _asked_tokens(said: _Fields, api: Api) -> int | None:
    """By the one of its names that counts. The schema takes the first of three that is there and not null (server-schema.cpp:44-47)."""
    if api is Api.ANTHROPIC:
        absent = "max_tokens" not in said.model_fields_set
        value = _ANTHROPIC_MAX_TOKENS if absent else said.max_tokens
    else:
        renamed = api is Api.RESPONSES and "max_output_tokens" in said.model_fields_set  # a null there hides max_tokens
        names = (said.n_predict, said.max_completion_tokens, said.max_output_tokens if renamed else said.max_tokens)
        value = next((name for name in names if name is not None), None)
    asked = _int32(value) if isinstance(value, int | float) else -1
    return asked if asked != -1 else None


def _int32(said: float) -> int:
    """The number as the engine reads it: of a whole one of 64 bits it keeps the low 32, so that -4294967294 is 2 there."""
    if isinstance(said, int) and -(1 << 63) <= said < 1 << 64:
        return (said + (1 << 31)) % (1 << 32) - (1 << 31)
    return int(said) if math.isfinite(said) else 0


def _unusable(why: str, hint: str = "send a JSON object") -> Error:
    return Error(
        f"the request's body can't be used: {why}",
        exit=Exit.USAGE,
        hint=hint,
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
