"""The model block: from exactly one place, pinned as that place needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor import model, paths, words
from supervisor.model import Hub, Model, Wheel

SHA = "0123456789abcdef" * 4
HUB = f"model: {{file: m.gguf, sha256: {SHA}, hub: {{repository: a/b}}}}"


def read(tmp_path: Path, text: str) -> tuple[Model | None, list[str]]:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    root, noted = words.read(path)
    faults = list(noted)
    found = model.read(root.entries["model"], "model", root.lines["model"], tmp_path, faults)
    return found, [f"{fault.line}: {fault.message}; {fault.hint}" for fault in faults]


def test_from_the_hub(tmp_path: Path) -> None:
    found, faults = read(tmp_path, HUB)
    assert (found, faults) == (Model("m.gguf", None, SHA, hub=Hub("a/b", "main")), [])
    assert found is not None
    assert found.source == "a/b"
    text = HUB.replace("a/b}", "a/b, revision: c0ffee}").replace("file:", "bytes: 7, mtp: yes, licence: MIT, file:")
    assert read(tmp_path, text)[0] == Model("m.gguf", 7, SHA, "MIT", True, hub=Hub("a/b", "c0ffee"))


def test_from_a_wheel(tmp_path: Path) -> None:
    wheel = f"wheel: {{name: w, version: 1, sha256: {SHA}, member: w/m.gguf}}"
    found, faults = read(tmp_path, f"model: {{file: m.gguf, bytes: 1, sha256: {SHA}, {wheel}}}")
    assert (found, faults) == (Model("m.gguf", 1, SHA, wheel=Wheel("w", "1", SHA, "w/m.gguf")), [])
    assert found is not None
    assert found.source == "wheel w 1"


@pytest.mark.parametrize(
    ("written", "meant"), [("/x/m.gguf", "/x/m.gguf"), ("sub/m.gguf", "{}/sub/m.gguf"), ("~/m.gguf", "~/m.gguf")]
)
def test_from_a_path_that_may_be_left_unpinned(written: str, meant: str, tmp_path: Path) -> None:
    found, faults = read(tmp_path, f"model: {{path: {written}}}")
    path = str(Path(meant.format(tmp_path)).expanduser())
    assert (found, faults) == (Model("m.gguf", path=path), [])
    assert found is not None
    assert (found.source, found.mtp) == (path, None)


def test_a_header_is_one_that_is_shipped(tmp_path: Path) -> None:
    shipped = sorted(each.stem for each in (paths.data_folder("presets") / model.HEADERS).glob("*.json"))
    found, faults = read(tmp_path, HUB.replace("file:", f"header: {shipped[0]}, file:"))
    assert faults == []
    assert found is not None
    assert found.header_file == paths.data_folder("presets") / "headers" / f"{shipped[0]}.json"
    _, faults = read(tmp_path, HUB.replace("file:", "header: none-such, file:"))
    assert faults == [f"1: model.header is 'none-such', but no such header is shipped; one of: {', '.join(shipped)}"]


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        (
            "model: m.gguf",
            [
                "1: model is 'm.gguf', but should be a block of keys; one of: file, bytes, sha256, licence, mtp, header, path, hub, wheel"
            ],
        ),
        ("model: {file: m.gguf}", ["1: model says no place to get it from; add hub: {repository: owner/name}, wheel: or path:"]),
        (
            "model: {}",
            [
                "1: model says no place to get it from; add hub: {repository: owner/name}, wheel: or path:",
                "1: 'model.file' is missing; add file: …",
            ],
        ),
        (
            "model:\n  path: /m.gguf\n  hub: {repository: a/b}",
            ["3: model has path and hub, but a file comes from one place; keep one of them"],
        ),
        ("model: {file: m.gguf, hub: {repository: a/b}}", ["1: 'model.sha256' is missing; add sha256: …"]),
        (
            HUB.replace("m.gguf", "d/m.gguf"),
            ["1: model.file is 'd/m.gguf', but should be a file name in ASCII that ends in .gguf; file: model.gguf"],
        ),
        (
            HUB.replace("m.gguf", "m.bin"),
            ["1: model.file is 'm.bin', but should be a file name in ASCII that ends in .gguf; file: model.gguf"],
        ),
        (
            HUB.replace(SHA, SHA.upper()),
            [f"1: model.sha256 is {SHA.upper()!r}, but should be a sha256 of 64 hex digits; sha256: …64 hex digits…"],
        ),
        (HUB.replace("a/b", "b"), ["1: model.hub.repository is 'b', but should be owner/name; repository: owner/name"]),
        (HUB.replace("repository: a/b", ""), ["1: 'model.hub.repository' is missing; add repository: …"]),
        (
            HUB.replace("repository: a/b", "revisitory: a/b"),
            [
                "1: 'model.hub.revisitory' is not an option; did you mean repository?",
                "1: 'model.hub.repository' is missing; add repository: …",
            ],
        ),
        (
            HUB.replace("repository", "repo"),
            [
                "1: 'model.hub.repo' is not an option; did you mean repository?",
                "1: 'model.hub.repository' is missing; add repository: …",
            ],
        ),
        (HUB.replace("file:", "mtp: on, file:"), ["1: model.mtp is 'on', but should be 'yes' or 'no'; mtp: yes"]),
        (
            HUB.replace("file:", "bytes: 2GB, file:"),
            ["1: model.bytes is '2GB', but should be a whole number from 1 to 1125899906842624; bytes: 1"],
        ),
        (
            "model: {path: ~nobody-here/m.gguf}",
            ["1: model.path is '~nobody-here/m.gguf', but there is no such home folder; path: /models/my.gguf"],
        ),
        ("model: {path: /m.bin}", ["1: model.path is '/m.bin', but should be the path of a .gguf file; path: /models/my.gguf"]),
    ],
)
def test_each_fault_has_its_sentence(text: str, faults: list[str], tmp_path: Path) -> None:
    assert read(tmp_path, text) == (None, faults)


WHEEL = f"model: {{file: m.gguf, bytes: 1, sha256: {SHA}, wheel: {{name: w, version: '1', sha256: {SHA}, member: w/m.gguf}}}}"


@pytest.mark.parametrize(
    ("before", "odd"),
    [
        *(("repository: a/b", f"repository: {odd}") for odd in ("../..", "a/..", "../b", "-a/b", "a/-b", "a/b/c", "a/.b", "ä/b")),
        *(("repository: a/b", f"repository: {odd}") for odd in ("/b", "a/", "a/b..c", "a/" + "b" * 200, '"a/b\\n"')),
        *(
            ("a/b", f"a/b, revision: {odd}")
            for odd in ("/../../../zz", "..", "a/../b", "-r", "a/-r", "/a", "a/", "a//b", ".", "ä", "a" * 50 + "/a" * 100)
        ),
        *(
            ("file: m.gguf", f"file: {odd}")
            for odd in ("../m.gguf", "-m.gguf", "..gguf", "'a\\b.gguf'", "m" * 300 + ".gguf", "ä.gguf")
        ),
    ],
)
def test_nothing_of_a_hub_leads_out_of_its_folder_or_into_an_option(before: str, odd: str, tmp_path: Path) -> None:
    found, faults = read(tmp_path, HUB.replace(before, odd))
    assert found is None
    assert len(faults) == 1
    assert ", but should be " in faults[0]


@pytest.mark.parametrize("revision", ["main", "0123456789abcdef" * 2, "v1.0", "feature/x-y_z", "refs/pr/3"])
def test_a_revision_is_a_commit_or_a_branch(revision: str, tmp_path: Path) -> None:
    found, faults = read(tmp_path, HUB.replace("a/b}", f"a/b, revision: {revision}}}"))
    assert faults == []
    assert found is not None
    assert found.hub == Hub("a/b", revision)


@pytest.mark.parametrize(
    ("before", "odd"),
    [
        *(("name: w", f"name: {odd}") for odd in ("..", ".", "-r", "a/b", "w-", "'w[x]'", "w @ x", "ä")),
        *(("version: '1'", f"version: {odd}") for odd in ("..", "-r", "1..2", "'1 --x'", "1/2", "'*'", "'>=1'", "x")),
        *(
            ("member: w/m.gguf", f"member: {odd}")
            for odd in (
                "../x.gguf",
                "/x.gguf",
                "w/../x.gguf",
                "-x.gguf",
                "./x.gguf",
                "w//x.gguf",
                "w/-x.gguf",
                "'w\\x.gguf'",
                ".gguf",
            )
        ),
    ],
)
def test_nothing_of_a_wheel_leads_out_of_it_or_into_an_option(before: str, odd: str, tmp_path: Path) -> None:
    assert read(tmp_path, WHEEL)[1] == []
    found, faults = read(tmp_path, WHEEL.replace(before, odd))
    assert found is None
    assert len(faults) == 1
    assert ", but should be " in faults[0]


@pytest.mark.parametrize("text", [HUB.replace(f" sha256: {SHA},", ""), WHEEL.replace(f" sha256: {SHA}, wheel", " wheel")])
def test_what_is_fetched_is_pinned(text: str, tmp_path: Path) -> None:
    assert read(tmp_path, text) == (None, ["1: 'model.sha256' is missing; add sha256: …"])


@pytest.mark.parametrize("path", ["/" + "a" * 252 + ".gguf", "/a" * 2100 + ".gguf"])
def test_a_path_is_none_that_the_system_would_refuse(path: str, tmp_path: Path) -> None:
    found, faults = read(tmp_path, f"model: {{path: {path}}}")
    assert found is None
    assert faults[0].endswith("…', but a path has less than 4096 bytes, and a name in it at most 255; path: /models/my.gguf")
