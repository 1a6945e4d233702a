"""The options of a preset, each declared once: name, type, unit, bounds, default, help and the llama-server flag it becomes.

Reading, ``--set``, ``llmctl schema``, the README's table and the command line all come from these declarations, so nothing about an
option is said twice. The spelling of flags and their values is llama.cpp's at b11312 (``llama-server --help``,
``tests/data/llama-server-help.txt``).

Three words stand for a value that is found later: ``auto`` is what the plan works out for this machine and model, ``chain`` is what the
sampling chain says, ``unlimited`` is the engine's -1. A preset that is ready to run holds no ``auto`` and no ``chain``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, cast, get_args

from supervisor.value import Choice, Choices, Duration, Integer, Kind, List, Names, Number, Switch, Text, Value

AUTO: Final = "auto"
CHAIN: Final = "chain"
UNLIMITED: Final = "unlimited"
OFF: Final = "off"
CONTEXT_STEP: Final = 256
"""The context, and then the part of each slot, is rounded up to a multiple of this (llama.cpp src/llama-context.cpp:290-303)."""

Served = Literal["chat", "embedding", "rerank"]
FlashAttention = Literal["on", "off", "auto"]
Speculation = Literal["off", "mtp", "ngram", "draft"]
Truncation = Literal["off", "oldest"]
ChainName = Literal["benchmark", "code", "chat", "creative", "structured"]

_KV_TYPES: Final = Choice(("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"))
"""What ``--cache-type-k`` takes (common/arg.cpp, kv_cache_types)."""
_HOUR_S: Final = 3_600
_DAY_S: Final = 24 * _HOUR_S
_MONTH_S: Final = 30 * _DAY_S
_TEMPLATE: Final = Text(says="the path of a file", example="template.jinja")


@dataclass(frozen=True, slots=True)
class Only:
    """Where an option counts: where another one has one of these words; with ``unless``, where it has none of them."""

    name: str
    words: tuple[str, ...]
    unless: bool = False

    def holds(self, chosen: Options) -> bool:
        """Whether the option counts."""
        return (self.told(chosen) in self.words) is not self.unless

    def told(self, chosen: Options) -> str:
        """The other option's word."""
        return options()[self.name].kind.write(getattr(chosen, self.name))

    @property
    def remedy(self) -> str:
        """A word of the other option with which this one counts."""
        return options()[self.name].kind.example if self.unless else self.words[0]

    def __str__(self) -> str:
        """``speculative mtp or draft``."""
        return f"{self.name} {'other than ' * self.unless}{' or '.join(self.words)}"


_CHAT: Final = Only("kind", ("chat",))
_DRAFTING: Final = Only("speculative", ("mtp", "draft"))
_GUESSING: Final = Only("speculative", ("mtp", "ngram", "draft"))


@dataclass(frozen=True, slots=True)
class Option:
    """One declaration."""

    name: str
    kind: Kind
    default: Value
    help: str
    flag: str = ""
    """llama-server's, long form; empty for an option that is ours alone."""
    unit: str = ""
    spelled: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Words of the command line in place of ``flag word``, for the words that need others; none at all for what is left out."""
    variables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """What the engine is told in its environment, for the words that are said there."""
    only: Only | None = None
    """The option is passed on only where this holds; None is everywhere."""
    file: bool = False
    """A path: a relative one is meant from the preset's folder, not from the engine's."""
    verbatim: bool = False
    """Its words are llama-server's, flags and all."""

    def arguments(self, value: Value) -> tuple[str, ...]:
        """The option on llama-server's command line."""
        if self.verbatim:
            assert isinstance(value, tuple)
            return value
        word = self.kind.write(value)
        if word in self.spelled:
            return self.spelled[word]
        return (self.flag, word) if self.flag and word else ()

    def environment(self, value: Value) -> Mapping[str, str]:
        """The option in llama-server's environment."""
        return self.variables.get(self.kind.write(value), {})


def _option(default: Any, kind: Kind, help_text: str, **more: Any) -> Any:  # noqa: ANN401
    """Declare an option as a field of :class:`Options`."""
    return field(default=default, metadata={"kind": kind, "help": help_text, **more})


def _switch(flag: str) -> Mapping[str, tuple[str, ...]]:
    """``--kv-unified`` and ``--no-kv-unified``."""
    return {"on": (flag,), "off": (flag.replace("--", "--no-", 1),)}


def _chain(least: float, most: float, help_text: str, flag: str) -> Any:  # noqa: ANN401
    """Declare one value of the sampling chain."""
    return _option(CHAIN, Number(least, most, (CHAIN,)), help_text, flag=flag, only=_CHAT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Every option, with its value. The types here are the values' after reading."""

    about: str = _option("", Text(), "one line for people")
    machine: str = _option("", Text(), "the machine it is made for, for people")
    kind: Served = _option(
        "chat",
        Choice(get_args(Served)),
        "what it serves",
        flag="--embeddings",
        spelled={"chat": (), "embedding": ("--embeddings",), "rerank": ("--reranking",)},
    )
    pooling: str = _option(
        "model",
        Choice(("model", "mean", "cls", "last", "rank", "none")),
        "how an embedding is made of a text's tokens; model is the file's own way",
        flag="--pooling",
        spelled={"model": ()},
        only=Only("kind", ("embedding", "rerank")),
    )
    device: str = _option(
        "none",
        Text(r"[A-Za-z][A-Za-z0-9_-]{0,31}", "none or a device's name, CUDA0", "CUDA0"),
        "backend device that holds the model: CUDA0; none is the CPU",
        flag="--device",
    )
    gpu_layers: int | Literal["all"] = _option(
        "all",
        Integer(0, 999, ("all",)),
        "layers on the device",
        flag="--gpu-layers",
        unit="layers",
        only=Only("device", ("none",), unless=True),
    )
    context: int = _option(
        8192, Integer(CONTEXT_STEP, 1 << 20), "KV cache, divided among the slots", flag="--ctx-size", unit="tokens"
    )
    slots: int = _option(1, Integer(1, 256), "requests decoded at the same time", flag="--parallel")
    unified: bool = _option(
        False,
        Switch(),
        "one KV cache that the slots share, instead of a part for each",
        flag="--kv-unified",
        spelled=_switch("--kv-unified"),
    )
    threads: int | Literal["auto"] = _option(
        AUTO, Integer(1, 1024, (AUTO,)), "CPU threads while decoding; auto is one a physical core", flag="--threads"
    )
    batch: int | Literal["auto"] = _option(
        AUTO,
        Integer(32, 16384, (AUTO,)),
        "tokens a prefill step takes; a cancel waits for the step; auto is about 1 s of prefill",
        flag="--batch-size",
        unit="tokens",
    )
    ubatch: int | Literal["auto"] = _option(
        AUTO,
        Integer(32, 16384, (AUTO,)),
        "tokens computed at once; auto is 512, or the batch where that is less",
        flag="--ubatch-size",
        unit="tokens",
    )
    cache_type_k: str = _option("f16", _KV_TYPES, "type of the K cache", flag="--cache-type-k")
    cache_type_v: str = _option("f16", _KV_TYPES, "type of the V cache", flag="--cache-type-v")
    flash_attention: FlashAttention = _option(
        "auto", Choice(get_args(FlashAttention)), "flash attention; auto is the engine's choice", flag="--flash-attn"
    )
    cuda_graphs: bool = _option(
        True,
        Switch(),
        "launch a decoding step as one recorded CUDA graph; off where the card has no room to instantiate it (llama.cpp#22638: 8 GB)",
        variables={"off": {"GGML_CUDA_DISABLE_GRAPHS": "1"}},  # any value disables them (ggml/src/ggml-cuda/common.cuh:1289)
        only=Only("device", ("none",), unless=True),
    )
    speculative: Speculation = _option(
        "off",
        Choice(get_args(Speculation)),
        "guess tokens ahead and verify them in one step: by the model's own MTP head, by what was said before, by a draft model",
        flag="--spec-type",
        spelled={
            "off": (),
            "mtp": ("--spec-type", "draft-mtp"),
            "ngram": ("--spec-type", "ngram-mod"),
            "draft": ("--spec-type", "draft-simple"),
        },
    )
    speculative_next: tuple[Speculation, ...] = _option(
        (),
        Choices("[ngram]", get_args(Speculation)),
        "what is tried in its place, one after the other, while most guesses are wrong; after the last comes off",
        only=_GUESSING,
    )
    draft_length: int = _option(
        2, Integer(1, 16), "most tokens guessed at once", flag="--spec-draft-n-max", unit="tokens", only=_DRAFTING
    )
    draft_min_p: float = _option(
        0.0,
        Number(0, 1),
        "a guess less likely than this ends the draft",
        flag="--spec-draft-p-min",
        only=_DRAFTING,
    )
    checkpoints: int | Literal["auto"] = _option(
        AUTO,
        Integer(0, 256, (AUTO,)),
        "states kept a slot to return to (recurrent and sliding-window models can't go back otherwise); auto fills checkpoint_budget",
        flag="--ctx-checkpoints",
    )
    checkpoint_budget: int = _option(300, Integer(0, 1 << 20), "host memory that all checkpoints of a slot may take", unit="MiB")
    cache_ram: int = _option(2048, Integer(0, 1 << 20), "host memory for prompts of idle slots", flag="--cache-ram", unit="MiB")
    chat_template_file: str = _option(
        "",
        _TEMPLATE,
        "a Jinja chat template in place of the model's own",
        flag="--chat-template-file",
        only=_CHAT,
        file=True,
    )
    reasoning: bool = _option(False, Switch(), "let the model think before it answers", flag="--reasoning", only=_CHAT)
    reasoning_budget: int | Literal["unlimited"] = _option(
        UNLIMITED,
        Integer(0, 1 << 20, (UNLIMITED,)),
        "thinking ends after so many",
        flag="--reasoning-budget",
        unit="tokens",
        spelled={UNLIMITED: ("--reasoning-budget", "-1")},
        only=Only("reasoning", ("on",)),
    )
    preserve_reasoning: bool = _option(
        False,
        Switch(),
        "keep old thoughts in the prompt",
        flag="--reasoning-preserve",
        spelled=_switch("--reasoning-preserve"),
        only=_CHAT,
    )
    sampling: ChainName = _option(
        "chat",
        Choice(get_args(ChainName)),
        "chain of sampling values a request starts from; it may set its own",
    )
    temperature: float | Literal["chain"] = _chain(0, 5, "0 is greedy", "--temp")
    top_p: float | Literal["chain"] = _chain(0, 1, "the likeliest tokens up to this sum; 1 is all", "--top-p")
    top_k: int | Literal["chain"] = _option(
        CHAIN,
        Integer(0, 1 << 20, (CHAIN,)),
        "so many of the likeliest tokens; 0 is all",
        flag="--top-k",
        unit="tokens",
        only=_CHAT,
    )
    min_p: float | Literal["chain"] = _chain(0, 1, "none less likely than this part of the likeliest; 0 is all", "--min-p")
    presence_penalty: float | Literal["chain"] = _chain(
        -2, 2, "taken from tokens that were there already; 0 is nothing", "--presence-penalty"
    )
    repeat_penalty: float | Literal["chain"] = _chain(
        0.5, 2, "tokens that were there already are so many times less likely; 1 is nothing", "--repeat-penalty"
    )
    max_tokens: int | Literal["unlimited"] = _option(
        UNLIMITED,
        Integer(1, 1 << 20, (UNLIMITED,)),
        "the longest answer, also where the request doesn't say",
        flag="--predict",
        unit="tokens",
        spelled={UNLIMITED: ("--predict", "-1")},
        only=_CHAT,
    )
    warm_prompt: str = _option("", Text(lines=True), "a system prompt that is evaluated before the first request comes")
    aliases: tuple[str, ...] = _option((), Names(), "other names by which clients may ask for it")
    default: bool = _option(False, Switch(), "answers for model names that nobody has, too")
    ttl: int | Literal["off"] = _option(
        OFF, Duration(1, _MONTH_S, (OFF,)), "unloaded after so long without a request; the next one starts it again"
    )
    pin: bool = _option(False, Switch(), "never gives way to another preset")
    hold: int = _option(
        10,
        Duration(0, _HOUR_S),
        "while requests for it keep coming, a preset that needs its memory waits so long, and then for those in work",
    )
    queue: int = _option(256, Integer(0, 100_000), "requests that may wait; one more gets 429", unit="requests")
    max_wait: int = _option(600, Duration(1, _DAY_S), "the longest wait for a place; then 429")
    wait_comments: bool = _option(
        True,
        Switch(),
        "a stream that waits gets an SSE comment every few seconds; off for clients that can't bear comments",
        only=_CHAT,
    )
    truncate: Truncation = _option(
        OFF,
        Choice(get_args(Truncation)),
        "what to do with a chat that is longer than the context: refuse it, or leave out its oldest turns",
        only=_CHAT,
    )
    extra_args: tuple[str, ...] = _option(
        (), List(), "words passed on to llama-server; not what llmctl sets itself, nor what opens a door", verbatim=True
    )


@functools.cache
def options() -> Mapping[str, Option]:
    """Every option by name, in the order of the declarations."""
    return MappingProxyType({each.name: _declared(each) for each in dataclasses.fields(Options)})


def _declared(each: dataclasses.Field[Any]) -> Option:
    return Option(each.name, default=cast(Value, each.default), **each.metadata)


def methods(chosen: Options) -> tuple[Speculation, ...]:
    """The ways to guess ahead that it may come to, in their order, each once; the last is off."""
    if chosen.speculative == OFF:
        return (OFF,)
    listed = (chosen.speculative, *chosen.speculative_next)
    return (*dict.fromkeys(each for each in listed if each != OFF), OFF)


def applies(option: Option, chosen: Options) -> bool:
    """Whether the option is passed on, by its ``only`` and the other options' values."""
    return option.only is None or option.only.holds(chosen)
