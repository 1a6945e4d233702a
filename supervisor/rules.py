"""What options can't stand beside each other: the engine would refuse them, or do something else without a word.

Each rule names the option to change, says both values in one sentence, and what would do. Rules that need the machine, the engine or the
model's header are the plan's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from supervisor.model import Model
from supervisor.option import AUTO, CONTEXT_STEP, OFF, Option, Options, applies, methods, options

_UNQUANTISED: Final = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two settings that don't go together."""

    key: str
    """The one to blame: its line is told."""
    message: str
    hint: str


_Found = Iterator[Conflict]


def conflicts(chosen: Options, model: Model, draft: Model | None) -> _Found:
    """Every pair of settings that don't go together."""
    yield from _speculation(chosen, model, draft)
    for rule in _RULES:
        yield from rule(chosen)


def idle(option: Option, chosen: Options) -> Conflict | None:
    """What keeps an option from counting at all; None where it counts, with whatever of :func:`methods`.

    No conflict in itself: what a file sets may be meant for one of its modes.
    """
    if option.only is None or any(applies(option, dataclasses.replace(chosen, speculative=way)) for way in methods(chosen)):
        return None
    word, other = option.kind.write(getattr(chosen, option.name)), option.only.name
    what = f"{option.name} is {word}, but {other} is {option.only.told(chosen)}, so it doesn't count"
    return Conflict(option.name, what, f"{other}: {option.only.remedy}")


def _speculation(chosen: Options, model: Model, draft: Model | None) -> _Found:
    way, ways = chosen.speculative, methods(chosen)
    for each in ways:
        key, told = (
            ("speculative", f"speculative is {each}") if each == way else ("speculative_next", f"speculative_next has {each}")
        )
        if each == "draft" and draft is None:
            without = "speculative: off" if each == way else "leave it out"
            yield Conflict(key, f"{told}, but there is no draft_model", f"add draft_model: or {without}")
        if each == "mtp" and (model.mtp is False or (model.mtp is None and not model.path)):
            says = "no" if model.mtp is False else "left out"
            yield Conflict(key, f"{told}, but mtp of {model.file} is {says}", "a file with an MTP head, and mtp: yes")
    if "draft" not in ways and draft is not None:
        yield Conflict("draft_model", f"draft_model is {draft.file}, but speculative is {way}", "speculative: draft")
    if OFF in chosen.speculative_next[:-1]:
        listed = options()["speculative_next"].kind.write(chosen.speculative_next)
        what = f"speculative_next is {listed}, but nothing is guessed with off, so nothing comes after it"
        yield Conflict("speculative_next", what, "move off to the end, or leave it out")
    if way != "off" and chosen.kind != "chat":
        yield Conflict(
            "speculative", f"speculative is {way}, but kind is {chosen.kind}, which decodes nothing", "speculative: off"
        )


def _batches(chosen: Options) -> _Found:
    """A batch smaller than a ubatch lowers it in silence (src/llama-context.cpp:248); an embedding is one ubatch (server.cpp:150)."""
    batch, ubatch = chosen.batch, chosen.ubatch
    if batch == AUTO or ubatch == AUTO:  # which is worked out from the other
        return
    assert isinstance(batch, int)
    assert isinstance(ubatch, int)
    if batch < ubatch:
        yield Conflict("batch", f"batch is {batch}, but ubatch is {ubatch}, and a batch bounds it", f"batch: {ubatch}")
    elif batch > ubatch and chosen.kind != "chat":
        what = f"batch is {batch}, but ubatch is {ubatch}, and an {chosen.kind} server takes a text in one ubatch"
        yield Conflict("batch", what.replace("an rerank", "a rerank"), f"batch: {ubatch}")


def _contexts(chosen: Options) -> _Found:
    least = CONTEXT_STEP * chosen.slots
    if chosen.context < least:
        what = f"context is {chosen.context}, but {chosen.slots} slots need at least {CONTEXT_STEP} tokens each"
        yield Conflict("context", what, f"context: {least}")


def _caches(chosen: Options) -> _Found:
    """src/llama-context.cpp:3840: such a context is refused."""
    if chosen.flash_attention == "off" and chosen.cache_type_v not in _UNQUANTISED:
        what = f"cache_type_v is {chosen.cache_type_v}, but flash_attention is off, and a quantised V cache needs it"
        yield Conflict("cache_type_v", what, "flash_attention: on")


def _kinds(chosen: Options) -> _Found:
    if chosen.kind == "rerank" and chosen.pooling not in ("model", "rank"):
        yield Conflict("pooling", f"pooling is {chosen.pooling}, but kind is rerank, which needs rank", "pooling: rank")
    if chosen.kind != "chat" and chosen.warm_prompt:
        yield Conflict(
            "warm_prompt", f"warm_prompt is given, but kind is {chosen.kind}, which has no system prompt", "leave it out"
        )


def _residence(chosen: Options) -> _Found:
    if chosen.pin and chosen.ttl != OFF:
        ttl = options()["ttl"].kind.write(chosen.ttl)
        yield Conflict("ttl", f"ttl is {ttl}, but pin is on, and what is pinned stays loaded", "ttl: off")


_RULES: Final[tuple[Callable[[Options], _Found], ...]] = (_batches, _contexts, _caches, _kinds, _residence)
