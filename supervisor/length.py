"""Whether a prompt fits its slot, asked before it takes one; and with ``truncate: oldest``, what of it is left.

A token is at least a byte, so only a body of more bytes than the context has tokens is worth a question to the engine. Its count needs
no slot. Where the engine can't count (a route without one, an input that isn't text) it is sent as it is, and the engine refuses it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from supervisor import ask as asks
from supervisor import shorten
from supervisor.ask import Ask
from supervisor.fault import TooLong
from supervisor.preset import Preset
from supervisor.routes import Route
from supervisor.upstream import Upstream

_HINT: Final = "a shorter prompt, or a preset with more context"


async def fit(upstream: Upstream, route: Route, ask: Ask, body: bytes, preset: Preset, context: int) -> tuple[bytes, int]:
    """The body as it may go upstream, and how many of its turns were left out for it.

    ``context`` is a slot's, in tokens. Raises :class:`Error` (HTTP 400, ``context_length_exceeded``) with both numbers.
    """
    if len(body) <= context or not route.count:
        return body, 0
    tokens = await _count(upstream, route, body)
    if tokens is None or tokens < context:  # the engine refuses a prompt that fills its slot
        return body, 0
    turns = shorten.Turns.of(route.api, body) if preset.truncate == "oldest" else None
    if turns is None:
        raise TooLong(tokens, context, hint=_HINT)
    search, left = shorten.Search(turns.groups, shorten.room(context, ask.asked_tokens)), tokens
    while (groups := search.next) is not None:
        counted = await _count(upstream, route, turns.without(groups))
        left = context if counted is None else counted
        search.tell(left)
    groups = search.found
    if groups is None:  # the last count was of the last exchange alone: it may take the room of its answer
        if left >= context:
            raise TooLong(left, context, hint=_HINT)
        groups = turns.groups
    return turns.without(groups), turns.left_out(groups)


async def _count(upstream: Upstream, route: Route, body: bytes) -> int | None:
    """Tokens of the longest prompt in a body; None where the engine can't say."""
    if route.count != "/tokenize":
        found = await upstream.ask(route.count, body)
        tokens = None if found is None else found.get("input_tokens")
        return tokens if isinstance(tokens, int) else None
    counts = [await _tokens(upstream, prompt) for prompt in _prompts(asks.fields(body))]
    return max((count for count in counts if count is not None), default=None)


def _prompts(fields: Mapping[str, Any]) -> list[object]:
    prompt = fields.get("prompt")
    many = isinstance(prompt, list) and not all(isinstance(part, int) for part in prompt)
    return prompt if many and isinstance(prompt, list) else [prompt]


async def _tokens(upstream: Upstream, prompt: object) -> int | None:
    if isinstance(prompt, list):
        return len(prompt) if all(isinstance(part, int) for part in prompt) else None
    if not isinstance(prompt, str):
        return None
    found = await upstream.ask("/tokenize", json.dumps({"content": prompt, "add_special": True}).encode())
    tokens = None if found is None else found.get("tokens")
    return len(tokens) if isinstance(tokens, list) else None
