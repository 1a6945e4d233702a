"""What a word in a preset may mean: a whole number, a number, a duration, on or off, one of some words, text, a list of words.

A kind reads the word that was written and answers the value; a word it doesn't take raises ``ValueError`` whose text goes on a sentence
that ends in "but ": ``should be a whole number from 1 to 256``. It writes a value back as the word, says it in JSON Schema, and names a
word that would do. Nothing else knows how an option is spelled.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final, Protocol

from supervisor.words import FAULTS, Fault, Node, Series, Word, quoted, shown

Value = bool | int | float | str | tuple[str, ...]
Schema = dict[str, Any]
_Parse = type[int] | type[float]

DIGITS: Final = 64
"""A number may have so many before its point, and after it."""
_WHOLE: Final = re.compile(rf"[+-]?[0-9]{{1,{DIGITS}}}")
_DECIMAL: Final = re.compile(rf"[+-]?(?:[0-9]{{1,{DIGITS}}}(?:\.[0-9]{{0,{DIGITS}}})?|\.[0-9]{{1,{DIGITS}}})")
_NUMERAL: Final = re.compile(r"[+-]?[\d_,.' ]+")
"""What a person may have meant for a number: in other scripts' digits, or with something between them."""
_UNITS_S: Final[Mapping[str, int]] = MappingProxyType({"d": 86_400, "h": 3_600, "m": 60, "s": 1})
"""Of a duration, in seconds; the largest first."""
_DURATION: Final = re.compile(rf"([0-9]{{1,{DIGITS}}})([{''.join(_UNITS_S)}]?)")
_LONGEST_KEY: Final = 64
"""A longer one is none that was misspelt."""
_ODD: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, other ends of a line, and what stands for bytes that aren't UTF-8."""


class Kind(Protocol):
    """How one option's word is read."""

    def read(self, word: str) -> Value:
        """The value; ``ValueError`` with ``should be …``."""

    def write(self, value: Value) -> str:
        """The word for the value, as ``--set`` takes it."""

    def schema(self) -> Schema:
        """The values as JSON Schema, for an editor that has read the YAML."""

    @property
    def told(self) -> str:
        """The words or bounds, for a table: ``on, off``, ``auto, 1–1,024``; may be empty."""

    @property
    def example(self) -> str:
        """A word that would do."""


class _Plain:
    """What most kinds have in common."""

    __slots__ = ()

    def write(self, value: Value) -> str:
        """As it is."""
        return str(value)

    @property
    def told(self) -> str:
        """Nothing: the help says it."""
        return ""


@dataclass(frozen=True, slots=True)
class _Bounded(_Plain):
    """A number between two bounds, or one of some words. Bounds that are whole are given as ``int``: they are said as they stand."""

    least: float
    most: float
    words: tuple[str, ...] = ()
    says: ClassVar[str]
    type: ClassVar[str]
    shape: ClassVar[re.Pattern[str]]
    parse: ClassVar[_Parse]
    """Makes the number of a word that has the shape: decimal, whatever it begins with; the nearest float."""

    def read(self, word: str) -> Value:
        """``010`` is ten; no exponent, no ``inf``, no ``nan``."""
        if word in self.words:
            return word
        if not self.shape.fullmatch(word) or not self.least <= self.parse(word) <= self.most:
            either = "".join(f"{each!r} or " for each in self.words)
            raise ValueError(f"should be {either}{self.says} from {self.least} to {self.most}{_spelling(word)}")
        return self.parse(word)

    def schema(self) -> Schema:
        """A number with bounds."""
        number = {"type": self.type, "minimum": self.least, "maximum": self.most}
        return {"anyOf": [{"enum": list(self.words)}, number]} if self.words else number

    @property
    def told(self) -> str:
        """Words and bounds."""
        return ", ".join((*self.words, f"{self.least:,}–{self.most:,}"))

    @property
    def example(self) -> str:
        """A word if there is one, else the least."""
        return self.words[0] if self.words else str(self.least)


def _spelling(word: str) -> str:
    """How a number has to be written, for a word that would be one for a person."""
    if not _NUMERAL.fullmatch(word):
        return ""
    if re.search(r"[^0-9.+-]", word):
        return ", in the digits 0 to 9 with nothing between them"
    return f", in at most {DIGITS} digits" if len(word) > DIGITS else ""


class Integer(_Bounded):
    """A whole number between two bounds, or one of some words."""

    __slots__ = ()
    says = "a whole number"
    type = "integer"
    shape = _WHOLE
    parse = int


class Number(_Bounded):
    """A decimal number between two bounds, or one of some words."""

    __slots__ = ()
    says = "a number"
    type = "number"
    shape = _DECIMAL
    parse = float

    def write(self, value: Value) -> str:
        """The shortest decimal that reads back as the same number."""
        if isinstance(value, str):
            return value
        text = f"{value:.15f}".rstrip("0")
        return text + "0" if text.endswith(".") else text


@dataclass(frozen=True, slots=True)
class Duration:
    """A whole number of seconds between two bounds, or one of some words. Written ``90``, ``90s``, ``10m``, ``2h`` or ``1d``."""

    least_s: int
    most_s: int
    words: tuple[str, ...] = ()

    def read(self, word: str) -> Value:
        """Seconds. One number and one unit: ``1h30m`` and ``1.5h`` are ``90m``."""
        if word in self.words:
            return word
        parts = _DURATION.fullmatch(word)
        seconds = int(parts[1]) * _UNITS_S[parts[2] or "s"] if parts else -1
        if not self.least_s <= seconds <= self.most_s:
            either = "".join(f"{each!r} or " for each in self.words)
            bounds = f"from {_written(self.least_s)} to {_written(self.most_s)}"
            raise ValueError(f"should be {either}a duration {bounds}, like 90s, 10m, 2h or 1d")
        return seconds

    def write(self, value: Value) -> str:
        """The largest unit that needs no fraction."""
        assert isinstance(value, int | str)
        return value if isinstance(value, str) else _written(value)

    def schema(self) -> Schema:
        """Seconds with bounds, or a number and its unit as text, whose bounds are for the reader to say."""
        kinds: list[Schema] = [
            {"type": "integer", "minimum": self.least_s, "maximum": self.most_s},
            {"type": "string", "pattern": f"^{_DURATION.pattern}$"},
        ]
        return {"anyOf": [{"enum": list(self.words)}, *kinds] if self.words else kinds}

    @property
    def told(self) -> str:
        """Words and bounds."""
        return ", ".join((*self.words, f"{_written(self.least_s)}–{_written(self.most_s)}"))

    @property
    def example(self) -> str:
        """A word if there is one, else the most."""
        return self.words[0] if self.words else _written(self.most_s)


def _written(seconds: int) -> str:
    return next(
        f"{seconds // size_s}{unit}" for unit, size_s in _UNITS_S.items() if size_s == 1 or (seconds and not seconds % size_s)
    )


@dataclass(frozen=True, slots=True)
class Choice(_Plain):
    """One of some words."""

    words: tuple[str, ...]

    def read(self, word: str) -> Value:
        """The word itself."""
        if word not in self.words:
            raise ValueError(f"should be {listed(self.words)}")
        return word

    def schema(self) -> Schema:
        """An enumeration."""
        return {"enum": list(self.words)}

    @property
    def told(self) -> str:
        """The words."""
        return ", ".join(self.words)

    @property
    def example(self) -> str:
        """The first."""
        return self.words[0]


@dataclass(frozen=True, slots=True)
class Switch:
    """Two words that stand for true and false."""

    on: str = "on"
    off: str = "off"

    def read(self, word: str) -> Value:
        """Whether it is the first."""
        if word not in (self.on, self.off):
            raise ValueError(f"should be {self.on!r} or {self.off!r}")
        return word == self.on

    def write(self, value: Value) -> str:
        """The word."""
        return self.on if value else self.off

    def schema(self) -> Schema:
        """An enumeration: YAML 1.2, which editors read, keeps ``on`` and ``yes`` words."""
        return {"enum": [self.on, self.off]}

    @property
    def told(self) -> str:
        """Both words."""
        return f"{self.on}, {self.off}"

    @property
    def example(self) -> str:
        """The first."""
        return self.on


@dataclass(frozen=True, slots=True)
class Text(_Plain):
    """Any text of one line, or one of a shape: ``shape`` is the pattern, ``says`` what it means, ``example`` one that has it.

    With ``lines`` it may have several, and tabs.
    """

    shape: str = ""
    says: str = "text"
    example: str = "…"
    lines: bool = False

    def read(self, word: str) -> Value:
        """The text itself; control characters are in no name or prompt, nor what isn't UTF-8."""
        if odd := _ODD.search(re.sub(r"[\n\t]", "", word) if self.lines else word):
            raise ValueError(f"should be {self.says} without {odd[0]!r}")
        if self.shape and not re.fullmatch(self.shape, word):
            raise ValueError(f"should be {self.says}")
        return word

    def schema(self) -> Schema:
        """A string. A digest or a version of digits alone would be read as a number by an editor: it has to be quoted there."""
        shape = f"(?:{self.shape})" if self.shape else r"[^\x00-\x1f\x7f-\x9f]*"
        return {"type": "string"} | ({"pattern": f"^{shape}$"} if not self.lines else {})


@dataclass(frozen=True, slots=True)
class List(_Plain):
    """Words of a command line: a list in the file (see :func:`take`), one text with shell quoting after ``--set``."""

    example: str = "[]"

    def read(self, word: str) -> Value:
        """Split as a shell would."""
        try:
            found = tuple(shlex.split(word))
        except ValueError as exc:
            raise ValueError(f"should be words as a shell takes them ({exc})") from exc
        return self.checked(found)

    def checked(self, found: tuple[str, ...]) -> tuple[str, ...]:
        """The words, none of which has what a command line can't pass on or a log not show."""
        for word in found:
            if odd := _ODD.search(word):
                raise ValueError(f"its word {quoted(word)} should be without {odd[0]!r}")
        return found

    def write(self, value: Value) -> str:
        """Joined with quotes where they are needed."""
        assert isinstance(value, tuple)
        return shlex.join(value)

    def schema(self) -> Schema:
        """A list of words or numbers."""
        return {"type": "array", "items": {"type": ["string", "number"]}}


@dataclass(frozen=True, slots=True)
class Names(List):
    """A list of names, written like a list of words. A name has no blanks, at most :attr:`most` characters, and stands once."""

    example: str = "[gpt-4o]"
    most: int = 128

    def checked(self, found: tuple[str, ...]) -> tuple[str, ...]:
        """The names, as they are."""
        for number, name in enumerate(found):
            if not 1 <= len(name) <= self.most or not name.isprintable() or re.search(r"\s", name):
                told = f"a name of 1 to {self.most} printable characters without blanks"
                raise ValueError(f"its word {quoted(name)} should be {told}")
            if name in found[:number]:
                raise ValueError(f"its word {quoted(name)} should stand once")
        return found

    def schema(self) -> Schema:
        """A list of words or numbers, none twice."""
        items = {"type": ["string", "number"], "pattern": rf"^\S{{1,{self.most}}}$"}
        return {"type": "array", "items": items, "uniqueItems": True}

    @property
    def told(self) -> str:
        """How long a name may be."""
        return f"names of 1–{self.most} characters"


@dataclass(frozen=True, slots=True)
class Choices(List):
    """Some of some words, in an order and none twice; written like a list of words."""

    words: tuple[str, ...] = ()

    def checked(self, found: tuple[str, ...]) -> tuple[str, ...]:
        """The words, as they are."""
        for number, word in enumerate(found):
            if word not in self.words:
                raise ValueError(f"its word {quoted(word)} should be {listed(self.words)}")
            if word in found[:number]:
                raise ValueError(f"its word {quoted(word)} should stand once")
        return found

    def schema(self) -> Schema:
        """A list of the words, none twice."""
        return {"type": "array", "items": {"enum": list(self.words)}, "uniqueItems": True}

    @property
    def told(self) -> str:
        """The words."""
        return f"of {', '.join(self.words)}"


def listed(words: tuple[str, ...]) -> str:
    """``'on', 'off' or 'auto'``."""
    quoted = [repr(word) for word in words]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def take(kind: Kind, node: Node, key: str, faults: list[Fault]) -> Value | None:
    """The value of ``key`` at ``node``, or None and a fault that names the value, what it should be and one that would do."""
    leaf = key.rpartition(".")[2]
    try:
        if isinstance(kind, List) and isinstance(node, Series):
            return _items(kind, node)
        if isinstance(node, Word) and not isinstance(kind, List):
            return kind.read(node.text)
        raise ValueError("should be a list" if isinstance(kind, List) else f"should be {_said(kind)}")
    except ValueError as exc:
        faults.append(Fault(node.line, f"{key} is {shown(node)}, but {exc}", f"{leaf}: {kind.example}"))
        return None


def _items(kind: List, node: Series) -> tuple[str, ...]:
    odd = next((item for item in node.items if not isinstance(item, Word)), None)
    if odd is not None:
        raise ValueError(f"its items should be words, not {shown(odd)}")
    return kind.checked(tuple(item.text for item in node.items if isinstance(item, Word)))


def unknown(key: str, line: int, known: Iterable[str], faults: list[Fault], *, lacking: Iterable[str] = ()) -> None:
    """Note a key that isn't one, with the nearest that is; before all with the nearest of those that have to stand here and don't."""
    known, leaf = tuple(known), key.rpartition(".")[2]
    near = (nearest(leaf, lacking) or nearest(leaf, known)) if len(faults) < FAULTS else ""  # the rest won't be told
    hint = f"did you mean {near}?" if near else f"one of: {', '.join(known)}"
    faults.append(Fault(line, f"{quoted(key)} is not an option", hint, rank=0))


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word most like it, or nothing. difflib is imported here, for the one who misspelt."""
    import difflib

    if len(word) > _LONGEST_KEY:
        return ""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)), "")


def _said(kind: Kind) -> str:
    """What the kind takes, as its own refusal says it."""
    if isinstance(kind, Text):
        return kind.says
    try:
        kind.read("\x00")
    except ValueError as exc:
        return str(exc).removeprefix("should be ")
    return "a word"
