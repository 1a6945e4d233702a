"""extra_args: what is refused, in every spelling the engine takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor import engine, passthrough
from supervisor.option import options

FLAGS = engine.parse_help((Path(__file__).parent / "data" / "llama-server-help.txt").read_text())
GROUPS = {FLAGS.group(flag) for flag in FLAGS}


@pytest.mark.parametrize("group", sorted(GROUPS), ids=lambda group: group[-1])
def test_of_one_flag_all_spellings_are_refused_or_none(group: tuple[str, ...]) -> None:
    """``ALIASES`` knows as much as ``--help``."""
    told = {flag: passthrough.refusal(flag) for flag in group}
    assert len({bool(each) for each in told.values()}) == 1, told


def test_no_alias_is_one_that_the_engine_lacks() -> None:
    assert set(passthrough.ALIASES) <= set(FLAGS)
    assert set(passthrough.ALIASES.values()) <= set(FLAGS)


@pytest.mark.parametrize(
    "word",
    [
        *(
            "--host",
            "--port",
            "--api-key",
            "--api-key-file",
            "--tools",
            "--tools-runtime",
            "--mcp-servers-config",
            "--agent",
            "-ag",
        ),
        *("--ui-mcp-proxy", "--webui-mcp-proxy", "--cors-origins", "--cors-credentials", "--no-cors-credentials", "--log-file"),
        *("--log-disable", "--log-prompts-dir", "-v", "--verbose", "-lv", "--slot-save-path", "--media-path", "--models-dir"),
        *(
            "--models-autoload",
            "-hf",
            "-hfr",
            "--hf-repo",
            "-mu",
            "--model-url",
            "-dr",
            "--docker-repo",
            "--rpc",
            "-m",
            "--model",
        ),
        *("-lcd", "--lookup-cache-dynamic"),
        *("-a", "--alias", "--fit", "-fitt", "--sse-ping-interval", "-h", "--version", "--props", "--api-prefix", "-hfd"),
        *("--gpt-oss-20b-default", "--fim-qwen-7b-spec", "--embd-gemma-default", "--ssl-key-file", "--no-slots", "--path"),
    ],
)
def test_what_llmctl_owns_and_what_opens_a_door(word: str) -> None:
    for spelling in {word, word.replace("-", "_").replace("__", "--", 1), f"{word}=1"}:
        told = passthrough.refusal(spelling) if spelling.startswith("-") else None
        assert told or not spelling.startswith("-"), spelling


def test_an_options_flag_is_named_with_its_option() -> None:
    assert passthrough.refusal("-c") == ("extra_args has '-c', but that is the option context", "context: …")
    assert passthrough.refusal("--ctx_size") == ("extra_args has '--ctx_size', but that is the option context", "context: …")
    assert passthrough.refusal("-md") == ("extra_args has '-md', but that is the option draft_model", "draft_model: …")
    assert passthrough.refusal("--draft-max") == (
        "extra_args has '--draft-max', but that is the option draft_length",
        "draft_length: …",
    )
    assert all(passthrough.refusal(option.flag) for option in options().values() if option.flag)


@pytest.mark.parametrize(
    ("words", "sentence", "hint"),
    [
        (["--host", "0.0.0.0"], "extra_args has '--host', but llmctl sets that itself", "leave it out"),
        (["--tools", "all"], "extra_args has '--tools', but that opens a door which llmctl keeps shut", "leave it out"),
        (["-hf", "a/b"], "extra_args has '-hf', but the model comes from the preset alone", "leave it out"),
        (["-v"], "extra_args has '-v', but the log is llmctl's, and holds no prompts", "leave it out"),
        (["--version"], "extra_args has '--version', but the engine would print something and end", "leave it out"),
        (["--no-slots"], "extra_args has '--no-slots', but llmctl relies on the engine's own routes and hours", "leave it out"),
        (["x", "--no-warmup"], "extra_args begins with 'x', but that is no flag", "begin with a flag, '--no-warmup'"),
        (["--prio=2"], "extra_args has '--prio=2', but llama-server takes no value after '='", "two words: '--prio', '2'"),
        (["--prio", "1", "--prio", "2"], "extra_args has '--prio' twice, and the engine would take the last", "keep one of them"),
        (["--grammar", "--host"], "extra_args has '--host', but llmctl sets that itself", "leave it out"),
    ],
)
def test_each_fault_has_its_sentence(words: list[str], sentence: str, hint: str) -> None:
    assert passthrough.faults(words) == [(sentence, hint)]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--no-warmup"],
        ["--seed", "-1"],
        ["--prio", "2", "--numa", "isolate"],
        ["-ot", r"blk\.1\.=CPU"],
        ["--yarn-ext-factor", "-1.0"],
    ],
)
def test_anything_else_may_pass(words: list[str]) -> None:
    assert passthrough.faults(words) == []


def test_there_are_not_more_words_than_a_command_line_takes() -> None:
    """Also said of what would each be a fault, and at once."""
    (sentence, hint), *more = passthrough.faults(["--host"] * 20_000)
    assert sentence == "extra_args has 20,000 words of 120,000 bytes, but at most 256 of 65,536 may be passed on"
    assert (hint, more) == ("leave some out", [])
    assert passthrough.faults(["--grammar", "x" * (64 << 10)])[0][0].startswith("extra_args has 2 words of 65,545 bytes, but ")
    assert passthrough.faults(["--grammar", "x" * (60 << 10)]) == []


def test_a_long_word_is_cut_in_its_sentence() -> None:
    assert max(len(text) for told in passthrough.faults(["--prio=" + "x" * 60_000]) for text in told) < 300


def test_what_changes_the_memory_is_named() -> None:
    words = [
        "--no-warmup",
        "-ot",
        "x=CPU",
        "--override_kv",
        "a=int:1",
        "-nkvo",
        "--lora",
        "a.gguf",
        "--lora",
        "b.gguf",
        "-ctkd",
        "q8_0",
    ]
    assert passthrough.uncounted(words) == ("-ot", "--override_kv", "-nkvo", "--lora", "-ctkd")
    assert passthrough.uncounted(["--no-warmup", "--prio", "2", "--seed", "-1", "--kv-offload"]) == ()


def test_of_what_changes_the_memory_every_spelling_is_known_but_the_defaults() -> None:
    """And what is refused anyhow isn't among it."""
    assert set(FLAGS) >= passthrough.UNCOUNTED
    known = {flag for group in GROUPS if passthrough.UNCOUNTED & set(group) for flag in group}
    assert known - passthrough.UNCOUNTED == {
        *("-kvo", "--kv-offload", "--op-offload", "--repack", "--mmproj-offload"),
        "--no-spec-draft-backend-sampling",
    }
    assert [flag for flag in passthrough.UNCOUNTED if passthrough.refusal(flag)] == []
