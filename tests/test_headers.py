"""Which place a header comes from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from supervisor import gguf, headers, paths, preset, store
from supervisor.errors import Error, Exit
from supervisor.model import Hub, Model
from tests.fakes.gguf import minimal
from tests.fakes.hub import Site, serve


@pytest.fixture
def home(tmp_path: Path) -> paths.Home:
    return paths.home({"LLMCTL_HOME": str(tmp_path / "home")})


def shipped() -> Model:
    return preset.load("turbo_4b", paths.home({"LLMCTL_HOME": "/nonexistent"})).model


def test_before_the_file_is_here_the_shipped_one_serves(home: paths.Home) -> None:
    found = headers.find(home, shipped())
    assert found.assumed
    assert found.has_mtp
    assert found.file_bytes == 2_834_975_040


MODEL = Model("m.gguf", sha256="a" * 64, hub=Hub("some/repo", "r1"), header="qwen3.5-4b-q4_k_m.mtp")


def test_the_file_itself_wins_over_the_shipped_one(home: paths.Home) -> None:
    minimal(store.path(home, MODEL), general__name="read")
    assert headers.find(home, MODEL).entries["general.name"] == "read"


def test_a_header_that_was_read_from_the_hub_is_kept_for_that_very_file(
    home: paths.Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site()
    site.files["/some/repo/resolve/r1/m.gguf"] = minimal(tmp_path / "m.gguf", general__name="true").read_bytes()
    server = serve(site)
    monkeypatch.setenv("HF_ENDPOINT", site.address)
    assert headers.find(home, MODEL).assumed
    assert headers.find(home, MODEL, online=True).entries["general.name"] == "true"
    server.shutdown()
    server.server_close()
    again = headers.find(home, MODEL)
    assert (again.entries["general.name"], again.assumed) == ("true", False)
    assert headers.find(home, replace(MODEL, sha256="b" * 64)).assumed  # another content is another file


def test_a_local_file_is_read_again_when_it_changed(home: paths.Home, tmp_path: Path) -> None:
    file = minimal(tmp_path / "m.gguf", general__name="first")
    assert headers.local(home, file).entries["general.name"] == "first"
    minimal(file, general__name="second one")
    assert headers.local(home, file).entries["general.name"] == "second one"


def test_the_second_time_it_is_not_parsed(home: paths.Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = minimal(tmp_path / "m.gguf")
    first = headers.local(home, file)
    monkeypatch.setattr(gguf, "read", lambda _: pytest.fail("it was read again"))
    again = headers.local(home, file)
    assert (again.entries, again.tensors, again.file_bytes, again.assumed) == (
        first.entries,
        first.tensors,
        first.file_bytes,
        False,
    )


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[" * 100_000,
        "[]",
        '{"tensors": 1}',
        '{"bytes": Infinity}',
        '{"tensors": [["blk.*.w", [8, 2], {"f32": "0-99999999999"}]]}',
    ],
)
def test_a_broken_copy_is_read_anew(home: paths.Home, tmp_path: Path, damage: str) -> None:
    file = minimal(tmp_path / "m.gguf")
    headers.local(home, file)
    (kept,) = (home.cache / "headers").glob("*.json")
    kept.write_text(damage)
    assert headers.local(home, file).architecture == "llama"
    assert json.loads(kept.read_text())


def test_a_cache_that_can_not_be_written_costs_nothing_else(home: paths.Home, tmp_path: Path) -> None:
    home.cache.parent.mkdir(parents=True)
    home.cache.write_text("in the way")
    assert headers.local(home, minimal(tmp_path / "m.gguf")).architecture == "llama"


def test_what_is_known_nowhere_says_how_to_know_it(home: paths.Home) -> None:
    with pytest.raises(Error) as caught:
        headers.find(home, Model("m.gguf", sha256="a" * 64, hub=Hub("o/n", "main")))
    assert caught.value.message == "the header of m.gguf isn't known here"
    assert (caught.value.hint, caught.value.exit) == ("the same with --online reads it from the hub", Exit.MODEL)


def test_a_file_that_is_missing_is_named(home: paths.Home, tmp_path: Path) -> None:
    with pytest.raises(Error) as caught:
        headers.find(home, Model("m.gguf", path=str(tmp_path / "m.gguf")))
    assert str(tmp_path / "m.gguf") in caught.value.message
    assert caught.value.exit is Exit.MODEL
