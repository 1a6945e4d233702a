"""Where things lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor import paths
from supervisor.paths import Home

FOLDERS = ("config", "data", "cache", "state", "run", "presets", "config_file", "engines", "toolkits", "models", "ledger", "logs")


def test_llmctl_home_holds_everything(tmp_path: Path) -> None:
    home = paths.home({"LLMCTL_HOME": str(tmp_path)})
    assert all(getattr(home, name).is_relative_to(tmp_path) for name in FOLDERS)


def test_no_two_kinds_of_things_share_a_place(tmp_path: Path) -> None:
    home = paths.home({"LLMCTL_HOME": str(tmp_path)})
    assert len({getattr(home, name) for name in FOLDERS}) == len(FOLDERS)


def test_a_relative_or_tilde_home_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.home({"LLMCTL_HOME": "here"}).data == tmp_path / "here" / "data"
    assert paths.home({"LLMCTL_HOME": "~/there"}).data == tmp_path / "there" / "data"


def test_without_it_the_users_folders_are_used_and_named_llmctl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "d"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "s"))
    for env in ({}, {"LLMCTL_HOME": ""}):
        home = paths.home(env)
        assert home.data == tmp_path / "d" / "llmctl"
        assert home.run.is_relative_to(tmp_path / "s" / "llmctl")
        assert home.run not in (home.state, home.logs)


def test_asking_where_creates_nothing(tmp_path: Path) -> None:
    root = tmp_path / "home"
    home = paths.home({"LLMCTL_HOME": str(root)})
    assert isinstance(home, Home)
    assert home.models
    assert not root.exists()


@pytest.mark.parametrize(("name", "file"), [("presets", "tiny.yaml"), ("build", "pin.yaml")])
def test_shipped_data_is_found_in_a_checkout(name: str, file: str) -> None:
    assert (paths.data_folder(name) / file).is_file()
