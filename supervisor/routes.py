"""The routes that go to a child, each declared once: which API it speaks, what kind of preset serves it, what it costs there. Pure.

A request on a route that decodes takes places in its preset's queue. One that doesn't (a tokenizer, a token count) runs on the engine's
HTTP threads beside the slots; it only waits for a child that is ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

from supervisor.option import Served


class Api(Enum):
    """Whose shapes a route's requests, answers and errors have."""

    CHAT = "chat"
    TEXT = "text"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"
    NATIVE = "native"
    """llama.cpp's own."""
    WHOLE = "whole"
    """One JSON answer, never streamed."""


@dataclass(frozen=True, slots=True)
class Route:
    """One route. ``path`` is the same at the front door and at the engine."""

    path: str
    api: Api
    kind: Served | None = "chat"
    """The kind of preset that it needs; None is any."""
    decodes: bool = True
    """Whether it takes slots."""
    count: str = ""
    """The engine's route that counts the tokens of this route's prompt without a slot; empty where there is none."""


ROUTES: Final[Mapping[str, Route]] = MappingProxyType(
    {
        route.path: route
        for route in (
            Route("/v1/chat/completions", Api.CHAT, count="/v1/chat/completions/input_tokens"),
            Route("/v1/chat/completions/input_tokens", Api.WHOLE, decodes=False),
            Route("/v1/completions", Api.TEXT, count="/tokenize"),
            Route("/v1/responses", Api.RESPONSES, count="/v1/responses/input_tokens"),
            Route("/v1/responses/input_tokens", Api.WHOLE, decodes=False),
            Route("/v1/messages", Api.ANTHROPIC, count="/v1/messages/count_tokens"),
            Route("/v1/messages/count_tokens", Api.WHOLE, decodes=False),
            Route("/completion", Api.NATIVE, count="/tokenize"),
            Route("/infill", Api.NATIVE),
            Route("/v1/embeddings", Api.WHOLE, kind="embedding"),
            Route("/v1/rerank", Api.WHOLE, kind="rerank"),
            Route("/tokenize", Api.WHOLE, kind=None, decodes=False),
            Route("/detokenize", Api.WHOLE, kind=None, decodes=False),
            Route("/apply-template", Api.WHOLE, decodes=False),
        )
    }
)


def is_anthropic(path: str) -> bool:
    """Whether a client of this path reads Anthropic's errors."""
    return path.startswith("/v1/messages")


def served_by(kind: str) -> str:
    """A route that a preset of this kind serves."""
    return next(path for path, route in ROUTES.items() if route.kind == kind)
