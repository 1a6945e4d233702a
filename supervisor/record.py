"""What is kept of one request: every field declared once, with its type and what it means.

The ledger's columns, ``usage --records --json``, the exports and the README's table come from these declarations. Unknown is None and
never 0: a request that was refused has no tokens, and one that was cut before the engine counted has no prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, get_args, get_type_hints

Status = Literal["open", "ok", "cancelled", "truncated", "refused", "error", "interrupted"]
STATUSES: Final[tuple[Status, ...]] = get_args(Status)


def _column(help_text: str, default: Any = None, unit: str = "") -> Any:  # noqa: ANN401
    return field(default=default, metadata={"help": help_text, "unit": unit})


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What answered. Few requests differ in it, so the ledger keeps each once."""

    model: str = _column("the model's file")
    model_sha256: str | None = _column("its sha256, as the preset pins it")
    engine: str = _column("the engine's build, and its key")
    context: int = _column("context of one slot", unit="tokens")
    slots: int = _column("slots of the engine")
    speculative: str = _column("how it drafted: off, mtp, ngram, draft")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request."""

    id: str = _column("its name, unique, in the order of time")
    client_id: str | None = _column("the X-Request-Id that it came with")
    opened_at: float = _column("when it was admitted", unit="s since 1970")
    closed_at: float | None = _column("when it had ended", unit="s since 1970")
    key: str | None = _column("name of the key that it came with")
    preset: str = _column("whom it was for; empty where no preset was found for it", "")
    route: str = _column("the path", "")
    stream: bool = _column("whether the client asked for events", False)
    batch: bool = _column("whether it was of the class that may wait", False)
    client: str | None = _column("where its client is: loopback, private or public")
    status: Status = _column("how it ended: " + ", ".join(STATUSES[1:]), "open")
    http_status: int | None = _column("the status that the client got")
    error: str | None = _column("code of the error that it had")
    attempts: int = _column("engines that it was put to", 0)
    wasted_tokens: int | None = _column("made by engines that died, and made again", unit="tokens")
    ahead: int | None = _column("requests in work or waiting when it came")
    queue_ms: float | None = _column("waited for a place at an engine that was up", unit="ms")
    load_ms: float | None = _column("waited for an engine to be up", unit="ms")
    ttft_ms: float | None = _column(
        "from admission to the engine's first token, also of an answer that the client got whole", unit="ms"
    )
    prefill_ms: float | None = _column("the engine computed its prompts", unit="ms")
    decode_ms: float | None = _column("the engine made its answers", unit="ms")
    total_ms: float | None = _column("from admission to the end", unit="ms")
    prompt_tokens: int | None = _column("of its prompts, cached ones too", unit="tokens")
    cached_tokens: int | None = _column("of its prompts, found in the cache", unit="tokens")
    completion_tokens: int | None = _column("of its answers", unit="tokens")
    counted: bool = _column("completion_tokens is the number of events that passed: the engine hadn't said it yet", False)
    prefill_tps: float | None = _column("prompt computed", unit="tokens/s")
    decode_tps: float | None = _column("answers made, after their first token, which comes out of the prefill", unit="tokens/s")
    itl_p50_ms: float | None = _column("median gap between arrivals of text", unit="ms")
    itl_p99_ms: float | None = _column("99th percentile of them", unit="ms")
    draft_tokens: int | None = _column("guessed ahead", unit="tokens")
    draft_accepted: int | None = _column("of those, right", unit="tokens")
    finish_reason: str | None = _column("why the answer ended, in its API's word")
    bytes: int | None = _column("of the engine's answer", unit="bytes")
    energy_j: float | None = _column("its part of the card's energy", unit="J")
    dropped_turns: int | None = _column("oldest turns that were left out, with truncate: oldest")
    up_ms: float | None = _column("how long the engine had been up when it was put to it", unit="ms")
    prompt_chars: int | None = _column("length of its prompt as it came", unit="bytes")
    shared_chars: int | None = _column("of those, the same as in the likest prompt before it", unit="bytes")
    shared_with: str | None = _column("whose prompt that was: a request's id")
    parted_in: str | None = _column(
        "where they part, or its first piece where it begins like none: tools, system, prompt, message 3 (user)"
    )


Columns = Mapping[str, Mapping[str, Any]]
"""Help and unit by name."""


def columns(of: type) -> Columns:
    """The declared fields of :class:`Record` or :class:`Run`, in their order."""
    return MappingProxyType({each.name: each.metadata for each in dataclasses.fields(of)})


def sql_type(of: type, name: str) -> str:
    """SQLite's type for a field: TEXT, INTEGER or REAL, with NOT NULL where it is never None."""
    hint = get_type_hints(of)[name]
    options = get_args(hint)
    may_be_none = type(None) in options
    kind = next((each for each in options if isinstance(each, type) and each is not type(None)), hint)
    word = "TEXT" if not isinstance(kind, type) else {int: "INTEGER", bool: "INTEGER", float: "REAL", str: "TEXT"}[kind]
    return word if may_be_none else f"{word} NOT NULL"
