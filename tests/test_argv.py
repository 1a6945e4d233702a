"""The llama-server command line and its environment, word for word."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from supervisor import argv, engine, paths, preset, sampling
from supervisor.engine import Flags
from supervisor.errors import Error, Exit
from supervisor.model import Model
from supervisor.preset import Preset

FLAGS = engine.parse_help((Path(__file__).parent / "data" / "llama-server-help.txt").read_text())
SERVER = Path("/engines/x/llama-server")
MODEL = Path("/models/m.gguf")


def complete(name: str, tmp_path: Path, *overrides: str, context: str | None = None, mode: str | None = None) -> Preset:
    """A shipped preset with the numbers that a plan would give it."""
    home = paths.home({"LLMCTL_HOME": str(tmp_path)})
    found = preset.load(name, home, context=context, mode=mode, overrides=overrides)
    numbers = {"threads": 6, "batch": 2048, "ubatch": 512, "checkpoints": 5}
    auto = {key: number for key, number in numbers.items() if getattr(found, key) == "auto"}
    return found.change({**auto, **sampling.resolve(found, "llama" if name == "tiny" else "qwen35")}, "derived")


@pytest.fixture
def tiny(tmp_path: Path) -> Preset:
    return complete("tiny", tmp_path)


def render(found: Preset, flags: Flags | None = FLAGS) -> tuple[str, ...]:
    return argv.render(found, SERVER, MODEL, flags=flags)


def flags_of(words: tuple[str, ...]) -> dict[str, str]:
    """Flag → value, empty for one without."""
    pairs: dict[str, str] = {}
    for word, after in zip(words[1:], (*words[2:], "--"), strict=True):
        if word.startswith("--"):
            pairs[word] = "" if after.startswith("--") else after
    return pairs


def test_the_whole_line_of_tiny(tiny: Preset) -> None:
    words = render(tiny)
    assert words[0] == str(SERVER)
    assert flags_of(words) == {
        "--model": "/models/m.gguf",
        "--alias": "tiny",
        "--host": "child.sock",
        "--fit": "off",
        "--log-colors": "off",
        "--log-verbosity": "4",
        "--sse-ping-interval": "-1",
        "--device": "none",
        "--ctx-size": "16384",
        "--parallel": "4",
        "--no-kv-unified": "",
        "--threads": "6",
        "--batch-size": "512",
        "--ubatch-size": "512",
        "--cache-type-k": "f16",
        "--cache-type-v": "f16",
        "--flash-attn": "auto",
        "--cache-ram": "256",
        "--ctx-checkpoints": "1",
        "--reasoning": "off",
        "--no-reasoning-preserve": "",
        "--temp": "0.8",
        "--top-p": "0.95",
        "--top-k": "40",
        "--min-p": "0.05",
        "--presence-penalty": "0.0",
        "--repeat-penalty": "1.0",
        "--predict": "-1",
    }


def test_the_line_of_turbo_4b(tmp_path: Path) -> None:
    assert " ".join(render(complete("turbo_4b", tmp_path))[1:]) == (
        "--model /models/m.gguf --alias turbo_4b --host child.sock --fit off --log-colors off --log-verbosity 4"
        " --sse-ping-interval -1 --device CUDA0 --gpu-layers all --ctx-size 65536 --parallel 1 --no-kv-unified --threads 6"
        " --batch-size 2048 --ubatch-size 512 --cache-type-k f16 --cache-type-v f16 --flash-attn on --spec-type draft-mtp"
        " --spec-draft-n-max 2 --spec-draft-p-min 0.0 --ctx-checkpoints 5 --cache-ram 2048 --reasoning off"
        " --no-reasoning-preserve --temp 0.7 --top-p 0.8 --top-k 20 --min-p 0.0 --presence-penalty 1.5 --repeat-penalty 1.0"
        " --predict -1"
    )


def test_what_selects_a_feature_is_passed_only_where_it_is_used(tmp_path: Path) -> None:
    long = render(complete("turbo_4b", tmp_path, context="long", mode="throughput"))
    assert not [word for word in long if word.startswith("--spec")]
    assert "--kv-unified" in long
    tiny = render(complete("tiny", tmp_path))
    assert not {"--gpu-layers", "--chat-template-file", "--reasoning-budget", "--pooling", "--embeddings"} & set(tiny)
    thinking = render(complete("tiny", tmp_path, "reasoning=on", "reasoning_budget=100", "preserve_reasoning=on"))
    assert flags_of(thinking)["--reasoning-budget"] == "100"
    assert "--reasoning-preserve" in thinking


@pytest.mark.parametrize(("kind", "flag"), [("embedding", "--embeddings"), ("rerank", "--reranking")])
def test_a_server_that_decodes_nothing_gets_no_sampling(kind: str, flag: str, tmp_path: Path) -> None:
    words = render(complete("tiny", tmp_path, f"kind={kind}"))
    assert flag in words
    assert not {"--temp", "--predict", "--reasoning", "--pooling"} & set(words)
    assert "--pooling" not in render(complete("tiny", tmp_path))
    assert flags_of(render(complete("tiny", tmp_path, "kind=embedding", "pooling=mean")))["--pooling"] == "mean"


def test_a_draft_model_is_passed_where_one_drafts(tiny: Preset) -> None:
    drafting = tiny.change({"speculative": "draft", "draft_model": Model("d.gguf", path="/d.gguf")}, "test")
    words = flags_of(argv.render(drafting, SERVER, MODEL, flags=FLAGS, draft=Path("/models/d.gguf")))
    assert (words["--spec-type"], words["--spec-draft-model"]) == ("draft-simple", "/models/d.gguf")


@pytest.mark.parametrize("name", ["tiny", "turbo_4b", "balanced_9b", "cpu_fallback"])
def test_no_flag_stands_twice_and_each_is_the_engines(name: str, tmp_path: Path) -> None:
    """The last one of two would win, without a word."""
    flags = [word for word in render(complete(name, tmp_path)) if word.startswith("--")]
    assert len(flags) == len(set(flags))
    assert set(flags) <= set(FLAGS)


def test_what_the_engine_would_choose_itself_is_always_said(tiny: Preset) -> None:
    """``-np`` unset is four slots, ``--fit`` lowers the context, ``--cache-ram`` takes 8 GiB."""
    assert {"--parallel", "--fit", "--cache-ram", "--ctx-size", "--device", "--threads", "--top-k"} <= set(render(tiny))


@pytest.mark.parametrize(
    "missing", [{"threads": "auto"}, {"batch": "auto"}, {"ubatch": "auto"}, {"checkpoints": "auto"}, {"top_k": "chain"}]
)
def test_what_is_still_to_be_worked_out_is_a_bug_here(missing: dict[str, str], tiny: Preset) -> None:
    late = dataclasses.replace(tiny, **missing)  # type: ignore[arg-type]
    (name,) = missing
    assert (argv.pending(late, name), argv.words(late, name)) == (True, ())
    with pytest.raises(AssertionError, match=rf"\['{name}'\] is still to be worked out"):
        render(late)


def test_an_options_words_are_none_where_it_is_not_used(tiny: Preset) -> None:
    assert argv.words(tiny, "flash_attention") == ("--flash-attn", "auto")
    assert argv.words(tiny, "slots") == ("--parallel", "4")
    assert argv.words(tiny, "draft_length") == argv.words(tiny, "gpu_layers") == argv.words(tiny, "warm_prompt") == ()
    assert argv.words(dataclasses.replace(tiny, extra_args=("--prio", "2")), "extra_args") == ("--prio", "2")
    embedding = dataclasses.replace(tiny, kind="embedding", temperature="chain")
    assert not argv.pending(embedding, "temperature")


def test_a_flag_the_engine_lacks_is_our_error_and_not_its_usage_text(tiny: Preset) -> None:
    with pytest.raises(Error) as raised:
        render(tiny, engine.parse_help("--model X   path\n--alias X   name\n"))
    assert raised.value.exit is Exit.ENGINE
    assert raised.value.message == f"the engine {SERVER} has no option --host"


def test_extra_words_come_last_and_are_the_engines(tmp_path: Path) -> None:
    words = render(complete("tiny", tmp_path, "extra_args=--no-warmup --seed -1 --yarn_ext_factor -1.0"))
    assert words[-5:] == ("--no-warmup", "--seed", "-1", "--yarn_ext_factor", "-1.0")
    with pytest.raises(Error) as raised:
        render(complete("tiny", tmp_path, "extra_args=--no-such 1"))
    assert raised.value.exit is Exit.ENGINE
    assert raised.value.message == f"extra_args has '--no-such', which the engine {SERVER} doesn't have"


def test_a_newer_engines_alias_of_what_is_refused_is_refused_too(tmp_path: Path) -> None:
    """An alias that this llmctl doesn't know is looked up in the groups of the engine's own help."""
    newer = engine.parse_help(
        (Path(__file__).parent / "data" / "llama-server-help.txt").read_text() + "\n--listen, --host HOST\n"
    )
    with pytest.raises(Error) as raised:
        render(complete("tiny", tmp_path, "extra_args=--listen 0.0.0.0"), newer)
    assert raised.value.exit is Exit.CONFIG
    assert raised.value.message == "extra_args has '--listen' (--host), but llmctl sets that itself"


def test_without_an_engine_the_words_are_not_checked(tmp_path: Path) -> None:
    assert render(complete("tiny", tmp_path, "extra_args=--no-such 1"), None)[-2:] == ("--no-such", "1")


def test_the_environment_is_an_allow_list() -> None:
    outer = {
        "PATH": "/bin",
        "LANG": "C",
        "CUDA_VISIBLE_DEVICES": "1",
        "HOME": "/home/me",
        "XDG_CONFIG_HOME": "/home/me/.config",
        "LLAMA_ARG_CTX_SIZE": "1",
        "LLAMA_API_KEY": "secret",
        "LLAMA_CACHE": "/x",
        "GGML_CUDA_FORCE_MMQ": "1",
        "HF_TOKEN": "secret",
        "HUGGING_FACE_HUB_TOKEN": "secret",
        "MTMD_BACKEND_DEVICE": "x",
        "AIP_HTTP_PORT": "1",
        "OPENAI_API_KEY": "secret",
        "http_proxy": "http://proxy",
        "LD_PRELOAD": "/evil.so",
    }
    assert argv.environment(outer, Path("/run/tiny")) == {
        "PATH": "/bin",
        "LANG": "C",
        "CUDA_VISIBLE_DEVICES": "1",
        "HOME": "/run/tiny",
        "XDG_CONFIG_HOME": "/run/tiny",
        "GGML_NO_BACKTRACE": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def test_what_an_option_says_in_the_environment_is_added(tmp_path: Path) -> None:
    turbo, folder = complete("turbo_4b", tmp_path), Path("/run/turbo_4b")
    graphless = turbo.change({"cuda_graphs": "off"}, "test")
    assert argv.environment({}, folder, turbo) == argv.environment({}, folder)
    assert argv.environment({"GGML_CUDA_DISABLE_GRAPHS": "0"}, folder, turbo) == argv.environment({}, folder)
    assert argv.environment({}, folder, graphless) == argv.environment({}, folder) | {"GGML_CUDA_DISABLE_GRAPHS": "1"}
    assert render(graphless) == render(turbo)  # there is no flag for it
    assert argv.environment({}, folder, dataclasses.replace(graphless, device="none")) == argv.environment({}, folder)


def test_what_the_outer_environment_lacks_is_not_made_up() -> None:
    assert set(argv.environment({}, Path("/run/tiny"))) == {"HOME", "XDG_CONFIG_HOME", "GGML_NO_BACKTRACE", "CUDA_DEVICE_ORDER"}
