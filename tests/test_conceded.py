"""What was given up is remembered for the next start, by model file, engine, card and preset."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisor import cards, conceded, paths, preset
from supervisor.paths import Home
from supervisor.plan import Step
from supervisor.profile import Rung
from tests.plans import NOWHERE

CARD = replace(cards.named("rtx3070"), uuid="GPU-1")
WHY = "it ran out of the card's memory"
STEPS = (
    Step({"cuda_graphs": False}, "a CUDA graph found no room on the card"),
    Step({"speculative": "off", "draft_model": None}, WHY),
    Step({"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, "21 MiB short"),
    Step({"gpu_layers": 30, "draft_min_p": 0.5}, WHY),
)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return paths.home({"LLMCTL_HOME": str(tmp_path / "home")})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "m.gguf"
    found.write_bytes(b"GGUF")
    return found


def test_what_is_kept_is_found_again_in_the_place_of_what_was_before(home: Home, file: Path) -> None:
    assert conceded.load(home, file, "engine", CARD, "turbo_4b") == ()
    for steps in (STEPS[:1], STEPS, STEPS[1:]):
        conceded.keep(home, file, "engine", CARD, "turbo_4b", steps)
        assert conceded.load(home, file, "engine", CARD, "turbo_4b") == steps


def test_it_is_of_one_file_engine_card_and_preset(home: Home, file: Path) -> None:
    conceded.keep(home, file, "engine", CARD, "turbo_4b", STEPS)
    assert conceded.load(home, file, "another", CARD, "turbo_4b") == ()
    assert conceded.load(home, file, "engine", None, "turbo_4b") == ()
    assert conceded.load(home, file, "engine", replace(CARD, uuid="GPU-2"), "turbo_4b") == ()
    assert conceded.load(home, file, "engine", CARD, "balanced_9b") == ()
    os.utime(file, ns=(1, 1))
    assert conceded.load(home, file, "engine", CARD, "turbo_4b") == ()


def test_what_is_asked_anew_begins_anew(home: Home, file: Path) -> None:
    assert not conceded.any_kept(home)
    for name in ("turbo_4b", "balanced_9b"):
        conceded.keep(home, file, "engine", None, name, STEPS)
    for _ in range(2):  # also where there is nothing
        conceded.forget(home, file, "engine", None, "turbo_4b")
    assert conceded.load(home, file, "engine", None, "turbo_4b") == ()
    assert conceded.load(home, file, "engine", None, "balanced_9b") == STEPS
    assert conceded.any_kept(home)
    conceded.forget(home, file, "engine", None, "balanced_9b")
    assert not conceded.any_kept(home)


@pytest.mark.parametrize("name", ["balanced_9b", "cpu_fallback"])
def test_a_model_is_the_very_one_of_the_fallback(home: Home, file: Path, name: str) -> None:
    """All of it, so a plan takes it only where the preset still names it."""
    asked = preset.load(name, NOWHERE)
    rung = next(each for each in asked.fallback if isinstance(each, Rung) and "model" in each.changes)
    conceded.keep(home, file, "engine", None, name, [Step(rung.changes, WHY)])
    (found,) = conceded.load(home, file, "engine", None, name)
    assert found.changes["model"] in asked.models


def test_a_model_in_a_wheel_is_found_again_too(home: Home, file: Path) -> None:
    steps = (Step({"model": preset.load("tiny", NOWHERE).model}, WHY),)
    conceded.keep(home, file, "engine", None, "mine", steps)
    assert conceded.load(home, file, "engine", None, "mine") == steps


@pytest.mark.parametrize(
    "found",
    [
        "",
        "{}",
        "[1]",
        "7",
        "[" * 100_000,
        [{"changes": {"context": 4096}}],
        [{"why": "x"}],
        [{"changes": {}, "why": "x"}],
        [{"changes": [], "why": "x"}],
        [{"changes": {"context": [4096]}, "why": "x"}],
        [{"changes": {"model": {"file": "m.gguf"}}, "why": "x"}],
        [{"changes": {"model": {"file": "m.gguf", "hub": 1, "wheel": None}}, "why": "x"}],
        [{"changes": {"model": {"file": "m.gguf", "hub": None, "wheel": None, "more": 1}}, "why": "x"}],
        [{"changes": {"context": 4096}, "why": "x" * 201}],
        [{"changes": {"context": 4096}, "why": "x\x1b[2J"}],
        [{"changes": {"context": 4096}, "why": "x"}] * 65,
    ],
)
def test_a_damaged_file_is_nothing_given_up(home: Home, file: Path, found: Any) -> None:
    conceded.keep(home, file, "engine", CARD, "turbo_4b", STEPS)
    (path,) = (home.data / "conceded").glob("*.json")
    path.write_text(found if isinstance(found, str) else json.dumps(found))
    assert conceded.load(home, file, "engine", CARD, "turbo_4b") == ()
    conceded.keep(home, file, "engine", CARD, "turbo_4b", STEPS)
    assert conceded.load(home, file, "engine", CARD, "turbo_4b") == STEPS


def test_what_can_not_be_written_costs_the_memory_of_it_and_is_said(
    home: Home, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        conceded.keep(home, file, "engine", CARD, "turbo_4b", STEPS)
        assert caplog.messages == []
        conceded.forget(home, file, "engine", CARD, "turbo_4b")
        (home.data / "conceded").rmdir()
        (home.data / "conceded").write_text("in the way")
        conceded.keep(home, file, "engine", CARD, "turbo_4b", STEPS)
        conceded.forget(home, file, "engine", CARD, "turbo_4b")
    kept, forgotten = caplog.messages
    assert kept.startswith("what turbo_4b gave up can't be kept in ")
    assert forgotten.startswith("what turbo_4b gave up can't be forgotten: ")
    assert conceded.load(home, file, "engine", CARD, "turbo_4b") == ()
