"""What a command line comes to: plans with and without an engine, a card and the network, and files that aren't what was planned."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisor import hardware, order, phantom
from supervisor.errors import Error, Exit
from supervisor.order import Order
from supervisor.plan import Step
from tests import console
from tests.fakes import gguf
from tests.plans import NOWHERE


def llmctl(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command in an empty home, with no engine; any attempt to reach the network fails at once."""
    nowhere = "http://127.0.0.1:9"
    return console.llmctl({"LLMCTL_HOME": str(home), "HTTPS_PROXY": nowhere, "HTTP_PROXY": nowhere}, *words)


def plan(home: Path, *words: str) -> dict[str, Any]:
    done = llmctl(home, "plan", *words, "--json")
    assert done.returncode in (Exit.OK, Exit.NO_FIT), done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    assert found["fits"] is (done.returncode == Exit.OK)
    return found


def test_a_plan_needs_no_engine_no_card_and_no_network(tmp_path: Path) -> None:
    found = plan(tmp_path, "turbo_4b", "--gpu", "rtx3070")
    assert set(found["device"]["terms"]) == {"weights", "kv", "state", "compute", "scratch", "draft", "context", "margin"}
    assert found["device"]["total_mib"] == pytest.approx(sum(found["device"]["terms"].values()), abs=0.1)
    assert found["host"]["total_mib"] == pytest.approx(sum(found["host"]["terms"].values()), abs=0.1)
    assert (found["device"]["name"], found["device"]["free_mib"], found["given_up"]) == ("RTX 3070", 7670.0, [])
    words = found["argv"]
    assert words[0] == "llama-server"
    assert words[words.index("--ctx-size") + 1] == "65536"
    assert words[words.index("--spec-type") + 1] == "draft-mtp"
    assert found["options"]["context"] == {"value": 65536, "from": "context medium"}
    assert found["options"]["checkpoints"] == {"value": 1, "from": "derived"}
    assert not list(tmp_path.rglob("*"))  # and it leaves nothing behind


def test_what_does_not_fit_is_exit_code_4_and_says_by_how_much(tmp_path: Path) -> None:
    found = plan(tmp_path, "balanced_9b", "--vram", "400M")
    assert found["lacking_mib"]["device"] > 0
    assert found["lacking_mib"]["host"] == 0
    assert found["given_up"]
    done = llmctl(tmp_path, "plan", "balanced_9b", "--vram", "400M")
    assert done.returncode == Exit.NO_FIT
    assert "it does not fit: " in done.stdout


def test_a_person_sees_the_terms_what_was_given_up_and_where_options_come_from(tmp_path: Path) -> None:
    shown = llmctl(tmp_path, "plan", "turbo_4b", "--gpu", "rtx3070", "--vram", "4600M", "--set", "slots=2").stdout
    for words in (
        "turbo_4b: Qwen3.5-4B-Q4_K_M.gguf, 2 slots of 32,768 tokens, q8_0 KV",
        "of 4,600 MiB free",
        "given up: speculative mtp → off (1,",
        "by --set: slots 2",
        "it fits, ",
    ):
        assert words in shown


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("turbo_4b", "--gpu", "voodoo"), Exit.USAGE, "the card 'voodoo' is not one of those known: "),
        (("turbo_4b", "--vram", "much"), Exit.USAGE, "'much' is no amount of memory"),
        (("tiny", "--gpu", "rtx3070"), Exit.USAGE, "this preset runs on the CPU, --gpu is about a card"),
        (("turbo_4b",), Exit.NO_FIT, "the preset runs on CUDA0 and this machine has no NVIDIA card"),
        (
            ("turbo_4b", "--context", "huge", "--gpu", "rtx3070"),
            Exit.CONFIG,
            "turbo_4b has no context 'huge'; it has: short, medium, long",
        ),
        (("turbo_4b", "--mode", "fats", "--gpu", "rtx3070"), Exit.CONFIG, "turbo_4b has no mode 'fats'"),
        (("turbo_5b",), Exit.CONFIG, "there is no preset 'turbo_5b'"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, words: tuple[str, ...], code: Exit, message: str) -> None:
    if words == ("turbo_4b",) and hardware.nvidia_cards().cards:
        pytest.skip("this machine has a card")
    done = llmctl(tmp_path, "plan", *words)
    assert done.returncode == code
    assert done.stderr.startswith(f"error: {message}")
    assert len(done.stderr.splitlines()) == 2
    assert done.stderr.splitlines()[1].startswith("try: ")


def test_the_same_order_as_words(tmp_path: Path) -> None:
    asked = Order("turbo_4b", context="long", mode="latency", overrides=("slots=2",), model=Path("/m.gguf"), home=NOWHERE)
    words = ["turbo_4b", "--context", "long", "--mode", "latency", "--set", "slots=2", "--model", "/m.gguf"]
    assert asked.words() == words
    assert Order("tiny", home=NOWHERE).words() == ["tiny"]


def test_what_was_given_up_before_is_the_plans_and_no_word_of_the_command_line() -> None:
    step = Step({"context": 16384}, "it ran out of the card's memory")
    asked = Order("turbo_4b", gpu="rtx3070", home=NOWHERE, steps=(step,))
    assert asked.plan.given_up == ("context 65536 → 16384 (it ran out of the card's memory)",)
    assert asked.plan.steps == (step,)
    assert asked.words() == ["turbo_4b"]


@pytest.mark.parametrize(
    ("preset", "mtp", "message"),
    [
        ("turbo_4b", False, "has no MTP head, and turbo_4b takes it for a file with one"),
        ("cpu_fallback", True, "has an MTP head, and cpu_fallback takes it for a file with none"),
    ],
)
def test_two_files_of_one_name_are_told_apart(preset: str, mtp: bool, message: str) -> None:
    """What ``unsloth/Qwen3.5-4B-GGUF`` and ``…-MTP-GGUF`` call Qwen3.5-4B-Q4_K_M.gguf both."""
    asked, file = Order(preset, home=NOWHERE).preset, Path("Qwen3.5-4B-Q4_K_M.gguf")
    with pytest.raises(Error) as caught:
        order.check_file(asked, gguf.qwen35(mtp=mtp), file)
    assert caught.value.message == f"{file} {message}"
    assert caught.value.exit is Exit.MODEL
    order.check_file(asked, gguf.qwen35(mtp=not mtp), file)


def test_a_file_that_the_engine_can_not_load_is_known_before_it_is_started() -> None:
    old = gguf.qwen35()
    old = replace(old, entries={**old.entries, "qwen35.rope.dimension_sections": (11, 11, 10)})
    with pytest.raises(Error) as caught:
        order.check_file(Order("turbo_4b", home=NOWHERE).preset, old, Path("m.gguf"))
    assert "has 3 entries where llama.cpp wants 4" in caught.value.message


BIG = """\
about: big
model:
  file: Qwen3.5-9B-Q4_K_M.gguf
  sha256: 03b74727a860a56338e042c4420bb3f04b2fec5734175f4cb9fa853daf52b7e8
  header: qwen3.5-9b-q4_k_m
  hub: {repository: some/where}
device: CUDA0
context: 262144
modes:
  small: {context: 8192}
"""


def test_check_says_what_can_never_fit(tmp_path: Path) -> None:
    if hardware.nvidia_cards().cards:
        pytest.skip("this machine has a card of its own")
    file = tmp_path / "big.yaml"
    file.write_text(BIG)
    done = llmctl(tmp_path, "check", str(file))
    assert done.returncode == Exit.NO_FIT
    message = "it can never fit: it needs 13.5 GiB of RTX 3070, which has 8.0 GiB: 5.5 GiB too much"
    assert done.stderr == f"error: {file}: {message}\ntry: a smaller context, or more that its fallback may give up\n"
    found = json.loads(llmctl(tmp_path, "check", str(file), "--json").stdout)
    assert (found["ok"], found["never_fits"], found["faults"]) == (False, [message], [])


def test_a_rung_that_makes_it_fit_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "big.yaml"
    file.write_text(BIG + "fallback:\n  - {context: 8192}\n")
    assert llmctl(tmp_path, "check", str(file)).returncode == Exit.OK


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    file = tmp_path / "big.yaml"
    file.write_text(BIG.replace("  header: qwen3.5-9b-q4_k_m\n", ""))
    done = llmctl(tmp_path, "check", str(file))
    assert done.returncode == Exit.OK
    assert done.stderr == "whether it fits is not known: the header of Qwen3.5-9B-Q4_K_M.gguf isn't known here\n"


def test_check_knows_what_can_not_run_whatever_the_memory(tmp_path: Path) -> None:
    phantom.write(gguf.qwen35(mtp=False), tmp_path / "plain.gguf")
    file = tmp_path / "mine.yaml"
    file.write_text("model: {file: plain.gguf, path: plain.gguf, mtp: yes}\nspeculative: mtp\n")
    done = llmctl(tmp_path, "check", str(file))
    assert done.returncode == Exit.NO_FIT
    assert "it can't run: plain.gguf has no MTP head, and mine speculates with one" in done.stderr


def test_without_a_command_the_help_is_shown(tmp_path: Path) -> None:
    done = llmctl(tmp_path)
    assert done.returncode == Exit.USAGE
    assert "[OPTIONS] COMMAND [ARGS]..." in done.stderr
    assert "error:" not in done.stderr


def test_a_broken_build_is_refused_by_a_plan_too(tmp_path: Path) -> None:
    server = tmp_path / "llama-server"
    server.write_text("#!/bin/sh\necho 'version: 0.5.0 (build 10745, commit abcdef123)' >&2\n")
    server.chmod(0o755)
    done = console.llmctl({"LLMCTL_HOME": str(tmp_path / "home"), "LLMCTL_ENGINE": str(server)}, "plan", "tiny")
    assert done.returncode == Exit.ENGINE
    assert done.stderr.startswith(f"error: llama.cpp b10745 at {server} must not be used: ")
