"""What only a card can show: ``pytest -m gpu`` on a box that has one and an engine built for it. Models are phantoms of some MB."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor import engine, phantom
from supervisor.vram import Vram
from tests.conftest import Box, Client, until
from tests.fakes import gguf

pytestmark = pytest.mark.gpu


@pytest.fixture
def on_the_card(tmp_path: Path, real_engine: engine.Engine) -> Iterator[Client]:
    """A made-up Qwen3.5 with MTP on the first card."""
    phantom.write(gguf.qwen35(), tmp_path / "m.gguf")
    box = Box(tmp_path / "home", real_engine.server, tmp_path / "m.gguf")
    yield box.up("--set", "device=CUDA0", "--set", "speculative=mtp", "--set", "context=4096")
    box.close()


def test_a_child_s_memory_of_the_card_is_seen_and_is_back_after_its_death(on_the_card: Client) -> None:
    tiny = on_the_card.presets()["tiny"]
    cards = Vram()
    with cards.in_use("CUDA0"):
        held = cards.used_bytes([tiny["pid"]])[tiny["pid"]]
        planned = sum(tiny["memory"]["planned_mib"]["device"].values())
        assert 0 < held / 2**20 < planned  # its margin is for what grows
        os.kill(tiny["pid"], signal.SIGKILL)
        until(lambda: on_the_card.presets()["tiny"]["pid"] not in (None, tiny["pid"]))
        until(lambda: on_the_card.presets()["tiny"]["state"] == "ready")
        assert cards.holds(tiny["pid"]) is False


def test_the_driver_s_share_is_told_while_it_runs(on_the_card: Client) -> None:
    assert until(lambda: on_the_card.presets()["tiny"]["used_mib"]["card"]) > 0
