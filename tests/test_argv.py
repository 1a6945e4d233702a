"""The llama-server command line and its environment, word for word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from supervisor import argv, paths, preset
from supervisor.errors import Error, Exit
from supervisor.preset import Preset

HELP = Path(__file__).with_name("data") / "llama-server-help.txt"
KNOWN = frozenset(re.findall(r"(?<![\w-])--[a-z][\w-]*", HELP.read_text()))
SERVER = Path("/engines/x/llama-server")
MODEL = Path("/models/m.gguf")


@pytest.fixture
def tiny(tmp_path: Path) -> Preset:
    return preset.load("tiny", paths.home({"LLMCTL_HOME": str(tmp_path)}))


def flags_of(words: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(words[1::2], words[2::2], strict=True))


def test_the_whole_line_of_tiny(tiny: Preset) -> None:
    words = argv.render(tiny, SERVER, MODEL, threads=6, flags=KNOWN)
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
        "--threads": "6",
        "--batch-size": "512",
        "--ubatch-size": "512",
        "--cache-type-k": "f16",
        "--cache-type-v": "f16",
        "--flash-attn": "auto",
        "--cache-ram": "256",
        "--ctx-checkpoints": "1",
    }


def test_no_flag_stands_twice(tiny: Preset) -> None:
    """The last one of two would win, without a word (facts/engine.md §11)."""
    words = argv.render(tiny, SERVER, MODEL, threads=6, flags=KNOWN)
    assert len(words[1::2]) == len(set(words[1::2]))


def test_what_the_engine_would_choose_itself_is_always_said(tiny: Preset) -> None:
    """``-np`` unset is four slots, ``--fit`` lowers the context, ``--cache-ram`` takes 8 GiB."""
    words = argv.render(tiny, SERVER, MODEL, threads=6, flags=KNOWN)
    assert {"--parallel", "--fit", "--cache-ram", "--ctx-size", "--device", "--threads"} <= set(words)


def test_threads_of_the_preset_win_over_the_machines(tiny: Preset) -> None:
    words = argv.render(tiny.model_copy(update={"threads": 2}), SERVER, MODEL, threads=6, flags=KNOWN)
    assert flags_of(words)["--threads"] == "2"


def test_a_device_gets_all_layers_and_the_cpu_is_given_none(tiny: Preset) -> None:
    on_card = argv.render(tiny.model_copy(update={"device": "CUDA0"}), SERVER, MODEL, threads=6, flags=KNOWN)
    assert flags_of(on_card)["--device"] == "CUDA0"
    assert flags_of(on_card)["--gpu-layers"] == "99"
    assert "--gpu-layers" not in argv.render(tiny, SERVER, MODEL, threads=6, flags=KNOWN)


def test_an_empty_option_is_left_out_and_a_given_one_is_passed(tiny: Preset) -> None:
    assert "--chat-template-file" not in argv.render(tiny, SERVER, MODEL, threads=6, flags=KNOWN)
    given = argv.render(tiny.model_copy(update={"chat_template_file": "/t.jinja"}), SERVER, MODEL, threads=6, flags=KNOWN)
    assert flags_of(given)["--chat-template-file"] == "/t.jinja"


def test_a_flag_the_engine_lacks_is_our_error_and_not_its_usage_text(tiny: Preset) -> None:
    with pytest.raises(Error) as raised:
        argv.render(tiny, SERVER, MODEL, threads=6, flags=KNOWN - {"--ctx-checkpoints"})
    assert raised.value.exit is Exit.ENGINE
    assert raised.value.message == f"the engine {SERVER} has no option --ctx-checkpoints"


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
    }


def test_what_the_outer_environment_lacks_is_not_made_up() -> None:
    assert set(argv.environment({}, Path("/run/tiny"))) == {"HOME", "XDG_CONFIG_HOME", "GGML_NO_BACKTRACE"}
