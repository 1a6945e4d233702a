"""A record in the column names of LiteLLM's spend log, for those whose dashboards and bills read that.

The names and types are of ``model LiteLLM_SpendLogs`` in its ``schema.prisma``, the words of ``call_type`` of ``CallTypes`` and
``API_ROUTE_TO_CALL_TYPES`` in its ``litellm/types/utils.py``. Its tokens and spend can't be NULL: what isn't known is 0 there, and null in
``metadata``, which has all that the columns have no room for.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final

from supervisor.config import Config
from supervisor.routes import ROUTES, Api

COLUMNS: Final = (
    *("request_id", "call_type", "api_key", "spend", "total_tokens", "prompt_tokens", "completion_tokens"),
    *("startTime", "endTime", "request_duration_ms", "completionStartTime", "model", "model_id", "model_group"),
    *("custom_llm_provider", "api_base", "user", "metadata", "cache_hit", "requester_ip_address", "status"),
)
"""In the order of the schema. Its others have a default, and nothing of ours belongs there: no messages, no teams."""
PROVIDER: Final = "custom_openai"
"""LiteLLM's word (``LlmProviders``) for a server that speaks OpenAI's API; it has none for llama.cpp."""
PASSED_ON: Final = "pass_through_endpoint"
"""Its word for what it neither measures nor prices: a tokenizer, a token count."""
CALL_TYPES: Final[Mapping[Api, str]] = MappingProxyType(
    {
        Api.CHAT: "acompletion",
        Api.TEXT: "atext_completion",
        Api.RESPONSES: "aresponses",
        Api.ANTHROPIC: "anthropic_messages",
        Api.NATIVE: "atext_completion",  # a prompt and its continuation, though in llama.cpp's own shapes
    }
)
_WHOLE: Final = MappingProxyType({"embedding": "aembedding", "rerank": "arerank"})
_TOLD: Final = frozenset(["seq", "id", "key", "preset", "model", "model_sha256", "prompt_tokens", "completion_tokens"])
"""Fields that a column has as they are."""


def row(record: Mapping[str, Any], spend: float | None, config: Config) -> dict[str, Any]:
    """A closed record, as ``accounts.records`` gives it, by :data:`COLUMNS`; ``metadata`` as an object, times in UTC.

    ``api_key`` has the key's name, where LiteLLM has the key's hash; ``spend`` is in the user's currency, where it has dollars.
    """
    prompt, completion = record["prompt_tokens"], record["completion_tokens"]
    begun_at = None if record["ttft_ms"] is None else record["opened_at"] + record["ttft_ms"] / 1e3
    return {
        "request_id": record["id"],
        "call_type": call_type(record["route"]),
        "api_key": record["key"] or "",
        "spend": spend or 0.0,
        "total_tokens": (prompt or 0) + (completion or 0),
        "prompt_tokens": prompt or 0,
        "completion_tokens": completion or 0,
        "startTime": _time(record["opened_at"]),
        "endTime": _time(record["closed_at"]),
        "request_duration_ms": None if record["total_ms"] is None else round(record["total_ms"]),
        "completionStartTime": None if begun_at is None else _time(begun_at),
        "model": record["model"] or "",
        "model_id": record["model_sha256"] or "",
        "model_group": record["preset"],
        "custom_llm_provider": PROVIDER,
        "api_base": "",
        "user": "",
        "metadata": _metadata(record, spend, config),
        "cache_hit": "False",  # of a cache of whole answers; what was found of the prompt stands in metadata
        "requester_ip_address": None,  # only its class is kept
        "status": "success" if record["status"] == "ok" else "failure",
    }


def call_type(route: str) -> str:
    """LiteLLM's word for a route of ours."""
    found = ROUTES.get(route)
    if found is None:
        return PASSED_ON
    return CALL_TYPES.get(found.api) or _WHOLE.get(found.kind or "", PASSED_ON)


def _metadata(record: Mapping[str, Any], spend: float | None, config: Config) -> dict[str, Any]:
    """What LiteLLM's own tools look for, then everything else, unknown as null."""
    unknown = {name: None for name in ("prompt_tokens", "completion_tokens") if record[name] is None}
    rest = {name: value for name, value in record.items() if name not in _TOLD} | unknown
    return {
        "user_api_key_alias": record["key"],
        "additional_usage_values": {"prompt_tokens_details": {"cached_tokens": record["cached_tokens"]}},
        "llmctl": {**rest, "spend": spend, "currency": config.currency},
    }


def _time(at_s: float) -> str:
    """``1769860800.5`` → ``"2026-01-31T12:00:00.500Z"``: Prisma's DateTime has milliseconds."""
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
