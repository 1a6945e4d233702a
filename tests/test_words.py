"""A YAML file as words with lines: what is kept, what is refused, and that no file exhausts stack or memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from supervisor import words
from supervisor.words import Block, Fault, Series, Word


def read(tmp_path: Path, text: str) -> tuple[Block, list[str]]:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    root, faults = words.read(path)
    return root, [fault.where(path).removeprefix(f"{path}:") for fault in faults]


def refused(tmp_path: Path, raw: bytes) -> words.Fault:
    path = tmp_path / "a.yaml"
    path.write_bytes(raw)
    with pytest.raises(words.Unreadable) as raised:
        words.read(path)
    return raised.value.fault


@pytest.mark.parametrize(
    "word", ["off", "no", "on", "010", "0x10", "1e3", "~", "null", "2026-11-30", "1_000", "12:30:45", "=", ".inf"]
)
def test_a_scalar_stays_the_word_that_was_written(word: str, tmp_path: Path) -> None:
    root, faults = read(tmp_path, f"\nkey: {word}\n")
    assert (root.entries, faults) == ({"key": Word(word, 2)}, [])


def test_blocks_lists_and_their_lines(tmp_path: Path) -> None:
    root, faults = read(tmp_path, "a:\n  b: {c: 1}\n  d: [x, 'y z']\ne:\n")
    assert root.lines == {"a": 1, "e": 4}
    inner = root.entries["a"]
    assert isinstance(inner, Block)
    assert inner.lines == {"b": 2, "d": 3}
    assert inner.entries["d"] == Series((Word("x", 3), Word("y z", 3)), 3)
    assert root.entries["e"] == Word("", 4)
    assert faults == []


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("a: 1\nb: 2\na: 3\n", ["3: 'a' stands here and in line 1"]),
        ("a: {b: 1,\n  b: 2}\n", ["2: 'b' stands here and in line 1"]),
        ("a: 1\na: 2\na: 3\n", ["2: 'a' stands here and in line 1", "3: 'a' stands here and in line 1"]),
        ("a: &x 1\n", ["1: '&x' names a value to be used elsewhere"]),
        ("a: &x 1\nb: *x\n", ["1: '&x' names a value to be used elsewhere", "2: '*x' stands for what was written elsewhere"]),
        ("a: &x [*x]\n", ["1: '&x' names a value to be used elsewhere", "1: '*x' stands for what was written elsewhere"]),
        ("a: !!python/object:os.system 1\n", ["1: the tag 'tag:yaml.org,2002:python/object:os.system' is not read"]),
        ("a: !!int 1\n", ["1: the tag 'tag:yaml.org,2002:int' is not read"]),
        ("? [a]\n: 1\nb: 2\n", ["1: a key is a word, not a list"]),
        ("? {a: 1}\n: [1, 2]\nb: 2\n", ["1: a key is a word, not a block of keys"]),
        ('"\\0": 1\n"\\0": 2\n', ["2: '\\x00' stands here and in line 1"]),
        ('"\\e[31m": 1\n"\\e[31m": 2\n', ["2: '\\x1b[31m' stands here and in line 1"]),
        ("a: !<\\e\\n> 1\n".replace("\\e\\n", "%1B%0A"), ["1: the tag '\\x1b\\n' is not read"]),
        ("a: {'': [1], b: 2}\n", ["1: a key is empty: nothing stands before ':'"]),
        ("'': 1\n'': 2\n", ["1: a key is empty: nothing stands before ':'", "2: a key is empty: nothing stands before ':'"]),
    ],
)
def test_what_may_not_have_been_meant_is_noted_and_reading_goes_on(text: str, faults: list[str], tmp_path: Path) -> None:
    assert read(tmp_path, text)[1] == faults


def test_of_a_key_that_stands_twice_the_first_value_stays(tmp_path: Path) -> None:
    assert read(tmp_path, "a: {x: 1}\na: [2]\nb: 3\n")[0].entries["b"] == Word("3", 3)
    root, _ = read(tmp_path, "a: 1\na: [2]\n")
    assert root.entries == {"a": Word("1", 1)}


@pytest.mark.parametrize(
    ("raw", "line", "says"),
    [
        (b"", 1, "holds no keys"),
        (b"# nothing\n", 1, "holds no keys"),
        (b"just words\n", 1, "holds no keys"),
        (b"- a\n", 1, "holds no keys"),
        (b"a: 1\n---\nb: 2\n", 2, "a second document begins here"),
        (b"a: 1\nb: \xff\n", 2, "is not UTF-8: byte 0xff"),
        (b"a:\n\tb: 1\n", 2, "begins with a tab, and a tab can't indent"),
        (b"a:\n  b: 1\n  \tc: 1\n", 3, "begins with a tab, and a tab can't indent"),
        (b"a: 1\n\tb: 1\n", 2, "begins with a tab, and a tab can't indent"),
        (b": x\nb: 1\n", 1, "a key is empty: nothing stands before ':'"),
        (b"a:\n  : x\n", 2, "a key is empty: nothing stands before ':'"),
        (b"a: @b\n", 1, "found character that cannot start any token"),
        (b"a: 1\nb: [1\n", 3, "did not find expected ',' or ']'"),
        (b"a: 1\n b: 2\n", 2, "mapping values are not allowed in this context"),
        (b"a: " + b"[" * 9, 1, "nests deeper than 8 levels"),
        (b"a: " + b"{a: " * 500, 1, "nests deeper than 8 levels"),
        (b"a: 1\n" * (words.WORDS // 2 - 1) + b"b: [1, 2]\n", words.WORDS // 2, "is the 10,001th word"),
        (b"#" * (words.SIZE_BYTES + 1), 1, f"has more than {words.SIZE_BYTES} bytes"),
    ],
)
def test_what_is_no_block_of_keys_is_one_fault(raw: bytes, line: int, says: str, tmp_path: Path) -> None:
    fault = refused(tmp_path, raw)
    assert (fault.line, "\n" in fault.message) == (line, False)
    assert fault.message.startswith(says)
    assert fault.hint


@pytest.mark.parametrize("opening", [b"[", b"{a: ", b"- ", b"? "])
def test_depth_exhausts_nothing(opening: bytes, tmp_path: Path) -> None:
    """The parser in C ends it by itself at a thousand levels."""
    assert "nest" in refused(tmp_path, b"a:\n " + opening * 100_000).message


def test_a_file_that_can_not_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(words.Unreadable, match="can't be read: "):
            words.read(path)


def test_nothing_but_a_file_is_opened(tmp_path: Path) -> None:
    """A pipe would keep us waiting, and ``/dev/zero`` never end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("no\nwhere")
    (tmp_path / "ring").symlink_to("ring")
    told = {
        tmp_path: "can't be read: it is a folder, not a file",
        tmp_path / "pipe": "can't be read: it is a pipe, not a file",
        Path("/dev/zero"): "can't be read: it is a device, not a file",
        tmp_path / "link": "can't be read: it is a link to 'no\\nwhere', which isn't there",
        tmp_path / "ring": "can't be read: Too many levels of symbolic links",
    }
    for path, sentence in told.items():
        with pytest.raises(words.Unreadable) as raised:
            words.read(path)
        assert raised.value.fault.message == sentence


def test_of_many_faults_the_first_are_told_and_how_many_more_there_are() -> None:
    faults = [Fault(line, "x", "y") for line in range(50, 0, -1)]
    told = words.first(faults + faults)
    assert [fault.line for fault in told] == list(range(1, words.FAULTS + 2))
    assert told[-1].message == "30 more faults, here and further down"
    assert words.first(faults[: words.FAULTS]) == tuple(reversed(faults[: words.FAULTS]))


@pytest.mark.parametrize("loader", [yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)])
def test_both_of_pyyamls_parsers_give_the_same(loader: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_LOADER", loader)
    root, faults = read(tmp_path, "a: off\nb: {c: [1, 010], d: 'x: y'}\nb: 2\ne: &x 1\n")
    b = root.entries["b"]
    assert isinstance(b, Block)
    assert b.entries["c"] == Series((Word("1", 2), Word("010", 2)), 2)
    assert faults == ["3: 'b' stands here and in line 2", "4: '&x' names a value to be used elsewhere"]
