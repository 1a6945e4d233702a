"""``extra_args``: which words of llama-server's may be passed through, and why others may not.

A repeated flag is last-one-wins for the engine, so ``--host`` among the extra words would open the child to the network. Refused are
(1) flags that are options of a preset, (2) flags that llmctl sets itself, (3) flags that open a door, log what was said, fetch a model or
end the process. Every spelling counts: the engine takes ``_`` for ``-`` in long flags (common/arg.cpp, common_params_parse_ex) and has
short aliases, which :data:`ALIASES` lists for b11312; ``argv`` looks again with the alias groups of the very engine that will run.

What changes how much memory the engine takes isn't refused, but the estimate doesn't know of it: :func:`uncounted` names it.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from supervisor.option import options
from supervisor.words import quoted

MOST: Final = 256
"""Words. llama-server has about as many flags."""
MOST_BYTES: Final = 64 << 10
"""Of all words: Linux passes at most 128 KiB in one (execve(2), MAX_ARG_STRLEN)."""

_SETS: Final = "llmctl sets that itself"
_DOOR: Final = "that opens a door which llmctl keeps shut"
_FETCHES: Final = "the model comes from the preset alone"
_LOGS: Final = "the log is llmctl's, and holds no prompts"
_ENDS: Final = "the engine would print something and end"
_ROUTES: Final = "llmctl relies on the engine's own routes and hours"

_REFUSED: Final = (
    (r"--(host|port|fit|fit-target|fit-ctx|model|alias|sse-ping-interval)", _SETS),
    (
        r"--(api-key.*|tools.*|mcp-.*|agent|ui-mcp-proxy|cors-.*|slot-save-path|media-path|rpc|path|props|ssl-.*|reuse-port|lookup-cache-dynamic)",
        _DOOR,
    ),
    (r"--(models-.*|hf-.*|model-url|docker-repo|spec-draft-hf|mmproj-url|.*-default|fim-qwen-.*-spec)", _FETCHES),
    (r"--(log-.*)", _LOGS),
    (r"--(help|version|cache-list|completion-bash|list-devices)", _ENDS),
    (r"--(api-prefix|slots|sleep-idle-seconds|ui|ui-config|ui-config-file)", _ROUTES),
)
"""Long flag → why not. The first pattern that fits."""

ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        alias: flag
        for flag, aliases in {
            # options
            "--device": "-dev",
            "--gpu-layers": "-ngl --n-gpu-layers",
            "--ctx-size": "-c",
            "--parallel": "-np",
            "--kv-unified": "-kvu -no-kvu --no-kv-unified",
            "--threads": "-t",
            "--batch-size": "-b",
            "--ubatch-size": "-ub",
            "--cache-type-k": "-ctk",
            "--cache-type-v": "-ctv",
            "--flash-attn": "-fa",
            "--spec-draft-n-max": "--draft --draft-n --draft-max",  # the three end the engine: "the argument has been removed"
            "--spec-draft-p-min": "--draft-p-min",
            "--spec-draft-model": "-md --model-draft",
            "--ctx-checkpoints": "-ctxcp --swa-checkpoints",
            "--cache-ram": "-cram",
            "--reasoning": "-rea",
            "--reasoning-preserve": "--no-reasoning-preserve",
            "--temp": "--temperature",
            "--predict": "-n --n-predict",
            "--embeddings": "--embedding",
            "--reranking": "--rerank",
            # ours
            "--model": "-m",
            "--alias": "-a",
            "--fit": "-fit",
            "--fit-target": "-fitt",
            "--fit-ctx": "-fitc",
            # doors and the rest
            "--agent": "-ag -no-ag --no-agent",
            "--ui-mcp-proxy": "--webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy",
            "--cors-credentials": "--no-cors-credentials",
            "--lookup-cache-dynamic": "-lcd",  # a file that holds what was generated
            "--hf-repo": "-hf -hfr",
            "--hf-file": "-hff",
            "--hf-token": "-hft",
            "--model-url": "-mu",
            "--docker-repo": "-dr",
            "--spec-draft-hf": "-hfd -hfrd --hf-repo-draft",
            "--mmproj-url": "-mmu",
            "--models-autoload": "--no-models-autoload",
            "--log-verbose": "-v --verbose",
            "--log-verbosity": "-lv --verbosity",
            "--log-jsonl": "--no-log-jsonl",
            "--log-prefix": "--no-log-prefix",
            "--log-timestamps": "--no-log-timestamps",
            "--help": "-h --usage",
            "--cache-list": "-cl",
            "--slots": "--no-slots",
            "--ui": "--webui --no-ui --no-webui",
            "--ui-config": "--webui-config",
            "--ui-config-file": "--webui-config-file",
        }.items()
        for alias in aliases.split()
    }
)
"""Other spelling → the flag it is, for what is refused; ``tests/test_passthrough.py`` holds it against ``--help``."""


UNCOUNTED: Final = frozenset(
    (
        # files that are loaded beside the model
        *("-mm", "--mmproj", "-mmdev", "--mmproj-device", "--no-mmproj-offload", "--mtmd-batch-max-tokens"),
        *("--image-min-tokens", "--image-max-tokens", "--lora", "--lora-scaled", "--control-vector", "--control-vector-scaled"),
        # where tensors go
        *("-ot", "--override-tensor", "-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe", "-ncffn", "--n-cpu-ffn"),
        *("-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu"),
        *("-nkvo", "--no-kv-offload", "--no-op-offload", "--no-host", "-nr", "--no-repack"),
        *("-lm", "--load-mode", "-lzm", "--lazy-mode"),
        # what is kept and computed
        *("--override-kv", "--kv-unified-per-slot", "--swa-full", "-bs", "--backend-sampling"),
        # the draft model's
        *("--spec-draft-override-tensor", "-otd", "--override-tensor-draft", "--spec-draft-cpu-moe", "-cmoed", "--cpu-moe-draft"),
        *("--spec-draft-n-cpu-moe", "--spec-draft-ncmoe", "-ncmoed", "--n-cpu-moe-draft"),
        *("--spec-draft-device", "-devd", "--device-draft"),
        *("--spec-draft-ngl", "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft"),
        *("--spec-draft-type-k", "-ctkd", "--cache-type-k-draft", "--spec-draft-type-v", "-ctvd", "--cache-type-v-draft"),
        "--spec-draft-backend-sampling",
    )
)
"""Flags that change what the engine allocates (``--help`` at b11312), in every spelling; not those that only say its default."""


def is_flag(word: str) -> bool:
    """Whether the engine would look the word up as a flag: ``-c``, but not ``-1``."""
    return re.match(r"-(?![\d.]+$).", word) is not None


def canonical(word: str) -> str:
    """The flag a word is, however it is spelled: ``--ctx_size`` and ``-c`` are ``--ctx-size``."""
    flag = _spelled(word)
    return ALIASES.get(flag, flag)


def _spelled(word: str) -> str:
    """The flag as ``--help`` lists it."""
    flag = word.partition("=")[0]
    return flag.replace("_", "-") if flag.startswith("--") else flag


def uncounted(words: Sequence[str]) -> tuple[str, ...]:
    """The flags among the words that change the engine's memory without the estimate's knowing, as they are written."""
    return tuple(dict.fromkeys(word for word in words if is_flag(word) and _spelled(word) in UNCOUNTED))


def refusal(word: str) -> tuple[str, str] | None:
    """Why a word may not be passed on, and what to do instead; None if it may."""
    flag = canonical(word)
    if flag in _by_flag():
        name = _by_flag()[flag]
        return f"extra_args has {quoted(word)}, but that is the option {name}", f"{name}: …"
    why = next((why for pattern, why in _REFUSED if re.fullmatch(pattern, flag)), None)
    return (f"extra_args has {quoted(word)}, but {why}", "leave it out") if why else None


def faults(words: Sequence[str]) -> list[tuple[str, str]]:
    """Everything wrong with the words as far as can be said without an engine: (sentence, hint)."""
    size = sum(len(os.fsencode(word)) for word in words)
    if len(words) > MOST or size > MOST_BYTES:
        sentence = f"extra_args has {len(words):,} words of {size:,} bytes, but at most {MOST} of {MOST_BYTES:,} may be passed on"
        return [(sentence, "leave some out")]
    found = [told for word in words if is_flag(word) and (told := refusal(word))]
    if words and not is_flag(words[0]):
        found.append((f"extra_args begins with {quoted(words[0])}, but that is no flag", "begin with a flag, '--no-warmup'"))
    flags = Counter(canonical(word) for word in words if is_flag(word))
    found += [
        (f"extra_args has {quoted(word)}, but llama-server takes no value after '='", f"two words: {_pair(word)}")
        for word in words
        if is_flag(word) and "=" in word and not refusal(word)
    ]
    twice = next((flag for flag, count in flags.items() if count > 1), None)
    if twice and not refusal(twice):
        found.append((f"extra_args has {quoted(twice)} twice, and the engine would take the last", "keep one of them"))
    return found


def _pair(word: str) -> str:
    flag, _, value = word.partition("=")
    return f"{quoted(flag)}, {quoted(value)}"


@functools.cache
def _by_flag() -> Mapping[str, str]:
    """Flag → the option that it is."""
    found = {"--spec-draft-model": "draft_model"}
    for option in options().values():
        spelled = [word for words in option.spelled.values() for word in words if word.startswith("--")]
        found |= {flag: option.name for flag in (option.flag, *spelled) if flag}
    return MappingProxyType(found)
