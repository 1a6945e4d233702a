"""What the engine allocated is kept for the next plan."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from supervisor import measured, paths
from supervisor.plan import Allocated


def seen(settings: str, weights: int = 1) -> Allocated:
    return Allocated(settings, "w", {"weights": weights}, {"output": 2})


def test_the_newest_of_each_settings_is_kept(tmp_path: Path) -> None:
    home, file = paths.home({"LLMCTL_HOME": str(tmp_path / "home")}), tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert measured.load(home, file, "engine") == ()
    for one in (seen("a"), seen("b"), seen("a", weights=3)):
        measured.keep(home, file, "engine", one)
    assert measured.load(home, file, "engine") == (seen("a", weights=3), seen("b"))
    assert measured.load(home, file, "another") == ()


def test_another_content_of_the_file_is_another_file(tmp_path: Path) -> None:
    home, file = paths.home({"LLMCTL_HOME": str(tmp_path / "home")}), tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    measured.keep(home, file, "engine", seen("a"))
    os.utime(file, ns=(1, 1))
    assert measured.load(home, file, "engine") == ()


def test_it_is_bounded(tmp_path: Path) -> None:
    home, file = paths.home({"LLMCTL_HOME": str(tmp_path / "home")}), tmp_path / "m.gguf"
    for number in range(measured.KEEP + 5):
        measured.keep(home, file, "engine", seen(str(number)))
    kept = measured.load(home, file, "engine")
    assert len(kept) == measured.KEEP
    assert kept[0].settings == str(measured.KEEP + 4)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        "[" * 100_000,
        '[{"settings": "a", "weights": "w", "device": null, "host": {}}]',
        '[{"settings": "a", "weights": "w", "device": [], "host": {}}]',
        '[{"settings": "a", "weights": "w", "device": {"kv": "1"}, "host": {}}]',
        '[{"settings": "a", "weights": "w", "device": {"kv": NaN}, "host": {}}]',
        '[{"settings": "a", "weights": "w", "device": {"kv": -1}, "host": {}}]',
        '[{"settings": "a", "weights": "w", "device": {"kv": 1e300}, "host": {}}]',
        '[{"settings": "a", "weights": "w", "device": {"kv": true}, "host": {}}]',
    ],
)
def test_a_damaged_file_is_no_correction(tmp_path: Path, text: str) -> None:
    home, file = paths.home({"LLMCTL_HOME": str(tmp_path / "home")}), tmp_path / "m.gguf"
    measured.keep(home, file, "engine", seen("a"))
    (path,) = (home.data / "measured").glob("*.json")
    path.write_text(text)
    assert measured.load(home, file, "engine") == ()
    measured.keep(home, file, "engine", seen("b"))
    assert measured.load(home, file, "engine") == (seen("b"),)


def test_what_can_not_be_read_or_written_is_no_correction(tmp_path: Path) -> None:
    home, file = paths.home({"LLMCTL_HOME": str(tmp_path / "home")}), tmp_path / "m.gguf"
    measured.keep(home, file, "engine", seen("a"))
    (path,) = (home.data / "measured").glob("*.json")
    path.write_text('[{"settings": "a"}]')
    assert measured.load(home, file, "engine") == ()
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("in the way")
    measured.keep(home, file, "engine", seen("a"))
    assert measured.load(home, file, "engine") == ()
