"""llmctl's own routes, described in OpenAPI 3.1: what ``/llmctl/openapi.json`` says. Pure.

The routes that go to a child are OpenAI's, Anthropic's and llama.cpp's, and described there.
"""

from __future__ import annotations

from typing import Any, Final, get_args

from supervisor import __version__
from supervisor.lifecycle import State
from supervisor.option import Speculation

_JSON: Final = "application/json"
_STATE: Final = {"enum": [state.value for state in State]}
_NAME: Final = {"type": "string", "description": "a preset's name"}


def _object(properties: dict[str, Any], *, optional: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [name for name in properties if name not in optional]}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


_TEXT: Final = {"type": "string"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_TERMS: Final = {"type": "object", "additionalProperties": {"type": "number"}, "description": "MiB a term"}
_PLACES: Final = _object({"device": _TERMS, "host": _TERMS})
_ERROR: Final = _object(
    {
        "error": _object(
            {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": "null"},
                "code": _TEXT,
                "source": {"const": "llmctl"},
                "log": {"type": "array", "items": _TEXT},
                "try": _TEXT,
            },
            optional=("log", "try"),
        )
    }
)
_MODEL: Final = _object(
    {
        "id": _NAME,
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": _TEXT,
        "state": _STATE,
        "meta": _object(
            {
                "about": _TEXT,
                "kind": {"enum": ["chat", "embedding", "rerank"]},
                "aliases": {"type": "array", "items": _TEXT},
                "file": _TEXT,
                "n_ctx": {"type": "integer", "description": "tokens that one request may use"},
                "slots": _COUNT,
                "max_tokens": _nullable(_COUNT),
            }
        ),
    }
)
_METHOD: Final = {"enum": list(get_args(Speculation))}
_PRESET: Final = _object(
    {
        "name": _NAME,
        "state": _STATE,
        "pid": _nullable(_COUNT),
        "slots": _object({"busy": _COUNT, "total": _COUNT}),
        "waiting": _COUNT,
        "restarts": _COUNT,
        "cause": _nullable(_TEXT),
        "log": {"type": "array", "items": _TEXT, "description": "what its engine said last when it died"},
        "try": _nullable({"type": "string", "description": "what to do about its cause"}),
        "died_s_ago": _nullable({"type": "number", "description": "seconds since its engine died last, of itself"}),
        "try_again_s": _nullable({"type": "number", "description": "in so many seconds it is started again"}),
        "wanted_by": _nullable({"enum": ["user", "request"]}),
        "stopped_by": _nullable({"enum": ["user", "ttl", "placement"]}),
        "held": {"type": "boolean", "description": "drained: its requests wait until it is restarted"},
        "used_mib": _object({"host": _nullable(_COUNT), "card": _nullable(_COUNT)}),
        "loaded": _nullable({"type": "number", "minimum": 0, "maximum": 1, "description": "part of its files that it has read"}),
        "speculative": _object(
            {
                "method": _nullable({**_METHOD, "description": "how its engine guesses ahead"}),
                "acceptance": _nullable(
                    {"type": "number", "minimum": 0, "maximum": 1, "description": "part of its late guesses that was right"}
                ),
                "asked": {**_METHOD, "description": "what the preset asks for first"},
                "why": _nullable({"type": "string", "description": "why it is another one"}),
            }
        ),
        "pinned": {"type": "boolean"},
        "memory": _nullable(
            _object(
                {
                    "device": _TEXT,
                    "planned_mib": _PLACES,
                    "allocated_mib": _nullable(_PLACES),
                    "given_up": {"type": "array", "items": _TEXT},
                }
            )
        ),
    }
)
_SELF: Final = {"address": _TEXT, "pid": _COUNT, "version": _TEXT, "engine": _TEXT, "records_lost": _COUNT}
_STATUS: Final = _object({**_SELF, "presets": {"type": "array", "items": _PRESET}})
_TOKENS: Final = {
    "type": "object",
    "additionalProperties": _COUNT,
    "description": "tokens since the start, by kind; they move while answers are made",
}
_WORK: Final = _object(
    {
        "id": _TEXT,
        "preset": _NAME,
        "route": _TEXT,
        "phase": {"enum": ["waits", "prefill", "decode"]},
        "age_s": {"type": "number"},
        "tokens": _COUNT,
        "tokens_per_s": _nullable({"type": "number"}),
    }
)
_TOP: Final = _object(
    {
        **_SELF,
        "at_s": {"type": "number", "description": "by a clock that doesn't go back"},
        "presets": {"type": "array", "items": {"allOf": [_PRESET, _object({"tokens": _TOKENS})]}},
        "in_work": {"type": "array", "items": _WORK},
        "power_w": _nullable({"type": "number", "description": "what the cards take"}),
        "cpu_s": {"type": "number", "description": "CPU time of llmctl itself"},
    }
)
_HEALTH: Final = _object(
    {"status": {"enum": ["ok", "unavailable"]}, "presets": {"type": "object", "additionalProperties": _STATE}}
)
_TAKEN: Final = _object({"preset": _NAME, "state": _STATE})


def _answer(said: str, schema: dict[str, Any], kind: str = _JSON) -> dict[str, Any]:
    return {"description": said, "content": {kind: {"schema": schema}}}


_UNAUTHORISED: Final = {"401": _answer("no admin right", _ERROR)}
_REFUSED: Final = {
    "400": _answer("the body names no preset", _ERROR),
    **_UNAUTHORISED,
    "403": _answer("another site's page, or another Host", _ERROR),
    "404": _answer("no such preset", _ERROR),
    "413": _answer("the body is too large", _ERROR),
    "415": _answer("the body is not JSON", _ERROR),
    "503": _answer("its model is not on this machine", _ERROR),
}
_ADMIN: Final = [{"start": list[str]()}]


def _post(summary: str, *, of_all: bool = False) -> dict[str, Any]:
    """``of_all``: without a preset it is about all of them."""
    asked = {
        "required": not of_all,
        "content": {_JSON: {"schema": _object({"preset": _NAME}, optional=("preset",) if of_all else ())}},
    }
    taken = _object({"presets": {"type": "array", "items": _TAKEN}}) if of_all else _TAKEN
    return {
        "post": {
            "summary": summary,
            "security": _ADMIN,
            "requestBody": asked,
            "responses": {"202": _answer("it is under way", taken), **_REFUSED},
        }
    }


def _get(summary: str, answers: dict[str, Any], **more: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"get": {"summary": summary, "responses": answers, **more}}


def describe(address: str) -> dict[str, Any]:
    """The whole document, for the server at this address."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmctl", "version": __version__, "description": "What an llmctl says of itself and can be told."},
        "servers": [{"url": address}],
        "components": {
            "securitySchemes": {
                "start": {"type": "http", "scheme": "bearer", "description": "the token of this start's run folder"}
            }
        },
        "paths": {
            "/health": _get(
                "Whether what was ordered can answer",
                {"200": _answer("it can", _HEALTH), "503": _answer("it can't, or not yet", _HEALTH)},
            ),
            "/v1/models": _get(
                "What can be asked for without a download",
                {
                    "200": _answer(
                        "OpenAI's list", _object({"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL}})
                    )
                },
            ),
            "/v1/models/{model}": _get(
                "One of them, by name or alias",
                {"200": _answer("the model", _MODEL), "404": _answer("no such model", _ERROR)},
                parameters=[{"name": "model", "in": "path", "required": True, "schema": _TEXT}],
            ),
            "/llmctl/status": _get("What runs", {"200": _answer("the presets", _STATUS), **_UNAUTHORISED}, security=_ADMIN),
            "/llmctl/top": _get(
                "What runs and what is in work, with counters",
                {"200": _answer("the moment", _TOP), **_UNAUTHORISED},
                security=_ADMIN,
            ),
            "/metrics": _get("For Prometheus", {"200": _answer("its text format, or OpenMetrics", _TEXT, "text/plain")}),
            "/llmctl/openapi.json": _get(
                "This document", {"200": _answer("it", {"type": "object"}), **_UNAUTHORISED}, security=_ADMIN
            ),
            "/llmctl/events": _get(
                "Changes of state and the progress of loads, as they come",
                {"200": _answer("one JSON object an event", _TEXT, "text/event-stream"), **_UNAUTHORISED},
                security=_ADMIN,
            ),
            "/llmctl/texts": _get(
                "Each request that is admitted from now on, with its body, as they come; kept nowhere",
                {"200": _answer("one JSON object an event", _TEXT, "text/event-stream"), **_UNAUTHORISED},
                security=_ADMIN,
            ),
            "/llmctl/switch": _post("Have a preset up in the place of those that were ordered before"),
            "/llmctl/unload": _post("Stop a preset's child when its requests have ended"),
            "/llmctl/restart": _post("Start a preset's child anew when its requests have ended, or those of all", of_all=True),
            "/llmctl/drain": _post(
                "Stop a preset's child when its requests have ended, or all, and hold the next ones", of_all=True
            ),
        },
    }
