"""A YAML file as the words that were written, each with its line.

YAML 1.1 would make ``off`` a boolean, ``010`` an octal and ``2026-11-30`` a date. Here a scalar stays text and whoever asked for it says
what it means. What a person may not have meant is a :class:`Fault`, and reading goes on, so that one look finds all of them: a key that
stands twice, a tag, an anchor or alias (a file of ten lines could stand for millions), a key that is no word.

The file is read as a stream of events, not by the parser's own recursion, and at most :data:`DEPTH` levels deep, :data:`SIZE_BYTES` long
and :data:`WORDS` many: no file can exhaust the stack, the memory or somebody's patience. What isn't a file at all (a pipe, ``/dev/zero``)
isn't opened.

Whatever of the file stands in a sentence is :func:`quoted` there: it may hold a terminal's escapes, or be a megabyte.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import yaml

DEPTH: Final = 8
"""More levels than a preset has: contexts → long → model → wheel → name is four."""
SIZE_BYTES: Final = 1 << 20
"""The longest shipped preset has 4 KiB."""
WORDS: Final = 10_000
"""Keys, values and items. The shipped presets have about a hundred."""
FAULTS: Final = 20
"""So many are told of a file, and how many more there are."""
_EMPTY_KEY: Final = "a key is empty: nothing stands before ':'"
_SHOWN: Final = 80
"""So much of a word is said in a sentence."""
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's parser where PyYAML was built with it: a shipped preset takes 0.3 ms instead of 5."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong in a file: a sentence without its place, and what to do about it."""

    line: int
    message: str
    hint: str
    rank: int = 1
    """Which fault is told where only one is: the lowest. A misspelt key (0) comes before the one that is missing for it."""

    def where(self, path: Path) -> str:
        """``presets/mine.yaml:3: slots is …``."""
        return f"{path}:{self.line}: {self.message}"


def first(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """Each once, by line: the first :data:`FAULTS` of them, and how many more there are."""
    told = sorted(dict.fromkeys(faults), key=lambda fault: fault.line)
    more = told[FAULTS:]
    if more:
        told[FAULTS:] = [
            Fault(more[0].line, f"{len(more)} more faults, here and further down", "correct those above first", rank=3)
        ]
    return tuple(told)


@dataclass(frozen=True, slots=True)
class Word:
    """A scalar, as written."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Series:
    """A list."""

    items: tuple[Node, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Block:
    """A mapping. Keys are words; ``lines`` holds the line of each."""

    entries: Mapping[str, Node]
    lines: Mapping[str, int]
    line: int


Node = Word | Series | Block


def quoted(text: str) -> str:
    """The text in a sentence: quoted, with what can't be printed as escapes; a long one is cut."""
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


def shown(node: Node) -> str:
    """The node in a sentence: ``'two'``, ``a list``, ``a block of keys``."""
    if isinstance(node, Word):
        return quoted(node.text)
    return "a list" if isinstance(node, Series) else "a block of keys"


class Unreadable(Exception):
    """The file holds nothing that could be looked at further; carries the one fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


def read(path: Path) -> tuple[Block, tuple[Fault, ...]]:
    """The file's keys, and what is wrong with how they are written.

    Raises :class:`Unreadable` where that is no block of keys at all: a missing file, bytes that aren't UTF-8, broken YAML, a list.
    """
    raw = _bytes(path)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        line = raw[: exc.start].count(b"\n") + 1
        raise Unreadable(Fault(line, f"is not UTF-8: byte 0x{raw[exc.start]:02x}", "save it as UTF-8")) from exc
    found = _Reader()
    try:
        with contextlib.closing(_events(text)) as events:
            for event in events:
                found.take(event)
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        found_in = "".join(text.split("\n")[line - 1 : line])
        if re.match(r" *\t", found_in):
            raise Unreadable(Fault(line, "begins with a tab, and a tab can't indent", "indent with spaces")) from exc
        if re.match(r" *:(\s|$)", found_in):
            raise Unreadable(Fault(line, _EMPTY_KEY, "correct that line")) from exc
        what = getattr(exc, "problem", None) or " ".join(str(exc).split())
        raise Unreadable(Fault(line, str(what), "correct that line")) from exc
    if not isinstance(found.root, Block):
        raise Unreadable(Fault(1, "holds no keys", "start from a shipped preset: llmctl presets"))
    return found.root, tuple(found.faults)


def _bytes(path: Path) -> bytes:
    """What the file holds; :class:`Unreadable` where it is none, or too long. A pipe isn't opened: it would keep us waiting."""
    try:
        kind = path.stat().st_mode
        if not stat.S_ISREG(kind):
            what = _NO_FILE.get(stat.S_IFMT(kind), "a device")
            raise Unreadable(Fault(1, f"can't be read: it is {what}, not a file", "give the path of a preset file"))
        with open(path, "rb", opener=_unwaiting) as file:
            raw = file.read(SIZE_BYTES + 1) or b""  # nothing where it would wait: some of /proc say that they are files
    except FileNotFoundError as exc:
        what = f"it is a link to {quoted(str(path.readlink()))}, which isn't there" if path.is_symlink() else str(exc.strerror)
        raise Unreadable(Fault(1, f"can't be read: {what}", "give the path of a preset file")) from exc
    except OSError as exc:
        raise Unreadable(Fault(1, f"can't be read: {exc.strerror}", "give the path of a preset file")) from exc
    if len(raw) > SIZE_BYTES:
        raise Unreadable(Fault(1, f"has more than {SIZE_BYTES} bytes, and a preset has at most so many", "is it the right file?"))
    return raw


def _unwaiting(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK)


_NO_FILE: Final[Mapping[int, str]] = MappingProxyType(
    {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
)


def _events(text: str) -> Generator[Any, None, None]:
    loader = _LOADER(text)
    try:
        while loader.check_event():
            yield loader.get_event()
    finally:
        loader.dispose()


@dataclass(slots=True)
class _Open:
    """A list or block whose end hasn't come yet."""

    line: int
    items: list[Node] | None = None
    entries: dict[str, Node] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    key: str | None = None
    """The key that waits for its value; empty text where nobody will ask for it."""
    repeated: bool = False
    """The key stands here a second time: its value is dropped."""


@dataclass(slots=True)
class _Reader:
    """Builds the tree from the parser's events."""

    root: Node | None = None
    faults: list[Fault] = field(default_factory=list)
    _open: list[_Open] = field(default_factory=list)
    _documents: int = 0
    _words: int = 0

    def take(self, event: Any) -> None:  # noqa: ANN401  (PyYAML's classes have no types)
        line = event.start_mark.line + 1
        self._words += isinstance(event, yaml.NodeEvent)
        if self._words > WORDS:
            raise Unreadable(
                Fault(line, f"is the {WORDS + 1:,}th word, and a preset has at most {WORDS:,}", "is it the right file?")
            )
        if isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                raise Unreadable(Fault(line, "a second document begins here", "keep one: a preset is one file"))
        elif isinstance(event, yaml.AliasEvent):
            self._fault(line, f"{quoted(f'*{event.anchor}')} stands for what was written elsewhere", "write the value out")
            self._put(Word("", line))
        elif isinstance(event, yaml.ScalarEvent):
            self._plain(event, line)
            self._scalar(Word(event.value, line))
        elif isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
            self._plain(event, line)
            if len(self._open) >= DEPTH:
                raise Unreadable(Fault(line, f"nests deeper than {DEPTH} levels", "correct that line"))
            self._open.append(_Open(line, [] if isinstance(event, yaml.SequenceStartEvent) else None))
        elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
            done = self._open.pop()
            if done.items is not None:
                self._put(Series(tuple(done.items), done.line))
            else:
                self._put(Block(done.entries, done.lines, done.line))

    def _plain(self, event: Any, line: int) -> None:  # noqa: ANN401
        """Refuse what makes a value other than what is seen."""
        if event.anchor:
            self._fault(
                line, f"{quoted(f'&{event.anchor}')} names a value to be used elsewhere", "write the value out where it is used"
            )
        if event.tag not in (None, "!"):
            self._fault(line, f"the tag {quoted(event.tag)} is not read", "leave it out")

    def _scalar(self, word: Word) -> None:
        """A key where one is due, else a value."""
        top = self._open[-1] if self._open else None
        if top is None or top.items is not None or top.key is not None:
            self._put(word)
            return
        top.key, top.repeated = word.text, word.text in top.lines or not word.text
        if not word.text:
            self._fault(word.line, _EMPTY_KEY, "correct that line")
        elif top.repeated:
            self._fault(word.line, f"{quoted(word.text)} stands here and in line {top.lines[word.text]}", "keep one of them")
        top.lines.setdefault(word.text, word.line)

    def _put(self, node: Node) -> None:
        """Hang a finished node where it belongs; the first value of a key stays."""
        if not self._open:
            self.root = node
            return
        top = self._open[-1]
        if top.items is not None:
            top.items.append(node)
        elif top.key is None:
            self._fault(node.line, f"a key is a word, not {shown(node)}", "correct that line")
            top.key, top.repeated = "", True
        else:
            if not top.repeated:
                top.entries[top.key] = node
            top.key = None

    def _fault(self, line: int, message: str, hint: str) -> None:
        self.faults.append(Fault(line, message, hint))
