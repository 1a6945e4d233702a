"""The declarations: each option is a flag that the engine has, and its words are ones that it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor import engine
from supervisor.option import Option, Options, applies, options
from supervisor.value import Value

HELP = (Path(__file__).parent / "data" / "llama-server-help.txt").read_text()
FLAGS = engine.parse_help(HELP)


def line(flag: str) -> str:
    """What ``--help`` says of a flag."""
    lines = HELP.splitlines()
    start = next(number for number, text in enumerate(lines) if text.startswith("-") and flag in text.replace(",", " ").split())
    end = next(number for number in range(start + 1, len(lines)) if not lines[number].startswith(" "))
    return " ".join(" ".join(lines[start:end]).split())


@pytest.mark.parametrize("option", options().values(), ids=lambda option: option.name)
def test_an_option_says_what_it_is_and_its_flag_is_the_engines(option: Option) -> None:
    assert option.help
    spelled = [words[0] for words in option.spelled.values() if words]
    assert all(flag in FLAGS for flag in (option.flag, *spelled) if flag)
    if option.only:
        other = options()[option.only.name].kind
        assert all(other.write(other.read(word)) == word for word in (*option.only.words, option.only.remedy))
        assert (option.only.remedy in option.only.words) is not option.only.unless
    default = option.kind.write(option.default)
    assert option.kind.read(default) == option.default


@pytest.mark.parametrize("flag", ["--cache-type-k", "--cache-type-v"])
def test_a_caches_types_are_those_the_engine_lists(flag: str) -> None:
    text = line(flag).partition("allowed values: ")[2].partition(" (")[0]
    declared = next(option for option in options().values() if option.flag == flag)
    assert set(text.split(", ")) == set(declared.kind.told.split(", "))


def test_the_speculations_and_poolings_are_those_the_engine_lists() -> None:
    ways = [words[1] for words in options()["speculative"].spelled.values() if words]
    assert set(ways) <= set(line("--spec-type").split()[1].split(","))
    pooling = set(options()["pooling"].kind.told.split(", ")) - {"model"}
    assert pooling == set(line("--pooling").split()[1].strip("{}").split(","))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("context", 4096, ("--ctx-size", "4096")),
        ("unified", True, ("--kv-unified",)),
        ("unified", False, ("--no-kv-unified",)),
        ("preserve_reasoning", False, ("--no-reasoning-preserve",)),
        ("reasoning", True, ("--reasoning", "on")),
        ("gpu_layers", "all", ("--gpu-layers", "all")),
        ("cuda_graphs", False, ()),
        ("speculative", "off", ()),
        ("speculative", "mtp", ("--spec-type", "draft-mtp")),
        ("speculative", "ngram", ("--spec-type", "ngram-mod")),
        ("speculative", "draft", ("--spec-type", "draft-simple")),
        ("draft_min_p", 0.75, ("--spec-draft-p-min", "0.75")),
        ("max_tokens", "unlimited", ("--predict", "-1")),
        ("max_tokens", 100, ("--predict", "100")),
        ("reasoning_budget", "unlimited", ("--reasoning-budget", "-1")),
        ("kind", "chat", ()),
        ("kind", "embedding", ("--embeddings",)),
        ("kind", "rerank", ("--reranking",)),
        ("pooling", "model", ()),
        ("chat_template_file", "", ()),
        ("checkpoint_budget", 100, ()),
        ("warm_prompt", "Be brief.", ()),
        ("extra_args", ("--prio", "2"), ("--prio", "2")),
        ("machine", "a large one", ()),
        ("aliases", ("gpt-4o", "--host"), ()),
        ("default", True, ()),
        ("ttl", 600, ()),
        ("ttl", "off", ()),
        ("pin", True, ()),
        ("hold", 10, ()),
        ("queue", 5, ()),
        ("max_wait", 60, ()),
        ("wait_comments", False, ()),
        ("truncate", "oldest", ()),
    ],
)
def test_an_options_words_on_the_command_line(name: str, value: Value, words: tuple[str, ...]) -> None:
    assert options()[name].arguments(value) == words


@pytest.mark.parametrize(
    ("name", "where", "elsewhere"),
    [
        ("pooling", {"kind": "embedding"}, {"kind": "chat"}),
        ("gpu_layers", {"device": "CUDA0"}, {"device": "none"}),
        ("cuda_graphs", {"device": "CUDA0"}, {"device": "none"}),
        ("draft_length", {"speculative": "mtp"}, {"speculative": "ngram"}),
        ("draft_min_p", {"speculative": "draft"}, {"speculative": "off"}),
        ("reasoning_budget", {"reasoning": True}, {"reasoning": False}),
        ("temperature", {"kind": "chat"}, {"kind": "rerank"}),
        ("wait_comments", {"kind": "chat"}, {"kind": "embedding"}),
        ("truncate", {"kind": "chat"}, {"kind": "rerank"}),
    ],
)
def test_an_option_is_passed_only_where_it_means_something(name: str, where: dict[str, str], elsewhere: dict[str, str]) -> None:
    assert applies(options()[name], Options(**where))  # type: ignore[arg-type]
    assert not applies(options()[name], Options(**elsewhere))  # type: ignore[arg-type]


def test_what_has_no_flag_is_said_in_the_environment() -> None:
    """And only what the engine looks for there: any value at all disables graphs (ggml/src/ggml-cuda/common.cuh:1289)."""
    told = {name: dict(option.variables) for name, option in options().items() if option.variables}
    assert told == {"cuda_graphs": {"off": {"GGML_CUDA_DISABLE_GRAPHS": "1"}}}
    assert options()["cuda_graphs"].environment(False) == {"GGML_CUDA_DISABLE_GRAPHS": "1"}
    assert options()["cuda_graphs"].environment(True) == options()["context"].environment(4096) == {}
