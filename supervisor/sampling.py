"""Sampling chains: what a request starts from when it doesn't say, by a name that tells the use.

All six values of a chain are always passed on, because llama.cpp's own (temperature 0.8, top_k 40, min_p 0.05; ``--help`` at b11312) are
nobody's recommendation. Where a model's card recommends values for a use, those are taken; for other models the values are llama.cpp's,
changed only as the use asks. An option of the same name set in the preset wins over the chain's value, and a request's own over both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final

from supervisor.option import CHAIN, Options


@dataclass(frozen=True, slots=True)
class Chain:
    """Six values and where they come from. The names are the options'."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    repeat_penalty: float
    source: str


_GREEDY: Final = Chain(0.0, 1.0, 1, 0.0, 0.0, 1.0, "greedy: the likeliest token, nothing else")
_STRUCTURED: Final = "low temperature and no penalty: JSON repeats its own words"

GENERIC: Final[Mapping[str, Chain]] = MappingProxyType(
    {
        "benchmark": _GREEDY,
        "code": Chain(0.2, 0.95, 40, 0.0, 0.0, 1.0, "low temperature; top_p and top_k are llama.cpp's"),
        "chat": Chain(0.8, 0.95, 40, 0.05, 0.0, 1.0, "llama.cpp's defaults at b11312"),
        "creative": Chain(1.0, 1.0, 0, 0.05, 0.0, 1.0, "temperature 1, and only min_p cuts: llama.cpp's 0.05"),
        "structured": Chain(0.2, 0.95, 40, 0.0, 0.0, 1.0, _STRUCTURED),
    }
)
"""For a model whose card we don't know."""

_CARD: Final = "the Qwen3.5 model card (4B and 9B agree), "
QWEN35_THINKING: Final[Mapping[str, Chain]] = MappingProxyType(
    {
        "benchmark": _GREEDY,
        "code": Chain(0.6, 0.95, 20, 0.0, 0.0, 1.0, _CARD + "thinking, precise coding"),
        "chat": Chain(1.0, 0.95, 20, 0.0, 1.5, 1.0, _CARD + "thinking, general"),
        "creative": Chain(1.0, 0.95, 20, 0.0, 1.5, 1.0, _CARD + "thinking, general"),
        "structured": Chain(0.6, 0.95, 20, 0.0, 0.0, 1.0, _CARD + "thinking, precise coding"),
    }
)
QWEN35_PLAIN: Final[Mapping[str, Chain]] = MappingProxyType(
    {
        "benchmark": _GREEDY,
        "code": Chain(0.6, 0.95, 20, 0.0, 0.0, 1.0, _CARD + "precise coding (it gives these for thinking only)"),
        "chat": Chain(0.7, 0.8, 20, 0.0, 1.5, 1.0, _CARD + "non-thinking, general"),
        "creative": Chain(1.0, 1.0, 40, 0.0, 2.0, 1.0, _CARD + "non-thinking, its freest row (named reasoning there)"),
        "structured": Chain(0.2, 0.8, 20, 0.0, 0.0, 1.0, _CARD + "non-thinking, with " + _STRUCTURED),
    }
)
_QWEN35: Final = ("qwen35", "qwen35moe")
"""``general.architecture`` of the family."""

NAMES: Final = tuple(each.name for each in fields(Chain) if each.name != "source")
"""The six options of a chain."""


def chain(name: str, *, architecture: str, thinking: bool) -> Chain:
    """The chain of that name for a model; ``architecture`` as in its GGUF, empty if unknown."""
    if architecture in _QWEN35:
        return (QWEN35_THINKING if thinking else QWEN35_PLAIN)[name]
    return GENERIC[name]


def resolve(chosen: Options, architecture: str) -> Mapping[str, float | int]:
    """Those of the six options that are left to the chain, with its values. Feed it to :meth:`Preset.change`."""
    found = chain(chosen.sampling, architecture=architecture, thinking=chosen.reasoning)
    return {name: getattr(found, name) for name in NAMES if getattr(chosen, name) == CHAIN}
