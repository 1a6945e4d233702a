"""A workload: what is asked, how often, by how many. One YAML file each, in ``bench/workloads`` or anywhere else.

It says lengths and not texts: a prompt is made anew for every repetition (``prompts``), since a text that was asked before is answered
out of the cache. What a person may not have meant is refused as in a preset (``supervisor.words``): unknown keys, values out of bounds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, cast, get_args

from supervisor import words
from supervisor.errors import Error, Exit
from supervisor.value import Choice, Integer, Kind, List, Number, Schema, Text, Value, nearest, take, unknown
from supervisor.words import Fault, first

FOLDER: Final = Path(__file__).parent / "workloads"
SUFFIX: Final = ".yaml"
MOST_TOKENS: Final = 1_000_000
MOST_USERS: Final = 1024

Api = Literal["chat", "text"]
APIS: Final[tuple[Api, ...]] = get_args(Api)


@dataclass(frozen=True, slots=True)
class Span:
    """A number of tokens, or any from ``least`` to ``most``, each as often."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"

    @property
    def mean(self) -> float:
        """Of what is drawn."""
        return (self.least + self.most) / 2

    @classmethod
    def read(cls, word: str) -> Span:
        """``128`` or ``80-240``; ValueError with ``should be …``."""
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", word)
        span = cls(int(found[1]), int(found[2] or found[1])) if found else None
        if span is None or not 1 <= span.least <= span.most <= MOST_TOKENS:
            raise ValueError(f"should be a number of tokens from 1 to {MOST_TOKENS}, or two of them like 80-240")
        return span


class _Spans:
    """The kind of value that a :class:`Span` is written as; it stays the word."""

    __slots__ = ()
    told = f"1–{MOST_TOKENS:,}, or 80-240"
    example = "128"

    def read(self, word: str) -> Value:
        """The word, checked."""
        return str(Span.read(word))

    def write(self, value: Value) -> str:
        """As it is."""
        return str(value)

    def schema(self) -> Schema:
        """A number, or two as text."""
        return {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": r"^\d+(-\d+)?$"}]}


@dataclass(frozen=True, slots=True)
class _Counts(List):
    """A list of whole numbers, none twice."""

    example: str = "[1, 2, 4]"
    most: int = MOST_USERS

    def checked(self, found: tuple[str, ...]) -> tuple[str, ...]:
        """The numbers as words."""
        for number, word in enumerate(found):
            if not re.fullmatch(r"[0-9]{1,6}", word) or not 1 <= int(word) <= self.most:
                raise ValueError(f"its word {word!r} should be a whole number from 1 to {self.most}")
            if word in found[:number]:
                raise ValueError(f"its word {word!r} should stand once")
        if not found:
            raise ValueError("should have a number")
        return found


def _declared(default: Any, kind: Kind, help_text: str, unit: str = "") -> Any:  # noqa: ANN401
    more: dict[str, Any] = {} if default is dataclasses.MISSING else {"default": default}
    return field(**more, metadata={"kind": kind, "help": help_text, "unit": unit})


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Every option, with its value."""

    name: str
    about: str = _declared("", Text(says="a sentence"), "for whom it is, in words")
    api: Api = _declared("chat", Choice(APIS), "chat completions, or text completions without a template")
    prompt: str = _declared(
        dataclasses.MISSING, _Spans(), "length of a prompt as the server counts it, template included", "tokens"
    )
    answer: str = _declared(
        dataclasses.MISSING, _Spans(), "length of an answer, exactly: where the server can, its end is ignored", "tokens"
    )
    shared: int = _declared(0, Integer(0, MOST_TOKENS), "of a prompt, what all prompts of a repetition begin with", "tokens")
    ask: tuple[str, ...] = _declared((), List('["Go on."]'), "sentences that prompts end with, one after the other")
    concurrency: tuple[str, ...] = _declared(("1",), _Counts(), "users at once: the levels that are measured")
    requests: int = _declared(4, Integer(1, 100_000), "of each user in a repetition")
    repetitions: int = _declared(5, Integer(1, 1000), "how often each level is measured, with new texts")
    ttft_ms: float | None = _declared(None, Number(0, 3_600_000), "limit: a request is good if its first token came sooner", "ms")
    tpot_ms: float | None = _declared(None, Number(0, 3_600_000), "limit: and each token after it took less, on the mean", "ms")
    e2e_ms: float | None = _declared(None, Number(0, 36_000_000), "limit: and all of it took less", "ms")

    @property
    def prompt_span(self) -> Span:
        """Tokens of a prompt."""
        return Span.read(self.prompt)

    @property
    def answer_span(self) -> Span:
        """Tokens of an answer."""
        return Span.read(self.answer)

    @property
    def users(self) -> tuple[int, ...]:
        """The levels."""
        return tuple(int(word) for word in self.concurrency)

    @property
    def limits(self) -> Mapping[str, float]:
        """Those that there are, by name, in ms."""
        found = {name: getattr(self, name) for name in LIMITS}
        return MappingProxyType({name: value for name, value in found.items() if value is not None})

    def as_dict(self) -> dict[str, Any]:
        """For a manifest."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)} | {
            "ask": list(self.ask),
            "concurrency": list(self.concurrency),
        }

    @property
    def work(self) -> str:
        """A digest of what one request asks for: two runs of unlike work can't be compared. Levels and repetitions may differ."""
        told = {name: value for name, value in self.as_dict().items() if name in WORK}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]

    def check(self) -> None:
        """Raise :class:`Error` (exit code 3) for what doesn't go together."""
        if self.shared >= self.prompt_span.least:
            raise Error(
                f"{self.name} has prompts of {self.prompt} tokens that begin with {self.shared} shared ones",
                exit=Exit.CONFIG,
                hint=f"shared: {max(0, self.prompt_span.least - 32)}",
            )


LIMITS: Final = ("ttft_ms", "tpot_ms", "e2e_ms")
WORK: Final = ("api", "prompt", "answer", "shared", "ask")
_REQUIRED: Final = ("prompt", "answer")


def options() -> Mapping[str, dataclasses.Field[Any]]:
    """What a file may say, by name, in the order of the declarations; its kind, help and unit are in the metadata."""
    return MappingProxyType({each.name: each for each in dataclasses.fields(Workload) if each.metadata})


def names() -> tuple[str, ...]:
    """The workloads that llmctl brings."""
    return tuple(sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}")))


def load(name: str) -> Workload:
    """A workload by its name, or by the path of a file. Raises :class:`Error` (exit code 3); the message names file and line."""
    if name in names():
        return read(FOLDER / f"{name}{SUFFIX}")
    path = Path(name).expanduser()
    if not path.exists():
        near = nearest(name, names())
        raise Error(
            f"there is no workload {words.quoted(name)}; there are: {', '.join(names())}",
            exit=Exit.CONFIG,
            hint=f"--workload {near or names()[0]}, or the path of a file",
        )
    return read(path)


def read(path: Path) -> Workload:
    """The workload in a file. Raises :class:`Error` as :func:`load`."""
    found, faults = _values(path)
    faults += [
        Fault(1, f"{name} is missing", f"{name}: {options()[name].metadata['kind'].example}", rank=0)
        for name in _REQUIRED
        if name not in found and not faults
    ]
    if faults:
        worst = min(first(faults), key=lambda fault: (fault.rank, fault.line))
        raise Error(worst.where(path), exit=Exit.CONFIG, hint=worst.hint)
    made = Workload(name=path.stem, **found)
    made.check()
    return made


def _values(path: Path) -> tuple[dict[str, Any], list[Fault]]:
    try:
        root, noted = words.read(path)
    except words.Unreadable as exc:
        return {}, [exc.fault]
    faults, found = list(noted), dict[str, Any]()
    for key, node in root.entries.items():
        if key not in options():
            unknown(key, root.lines[key], options(), faults)
        elif (value := take(options()[key].metadata["kind"], node, key, faults)) is not None:
            found[key] = value
    return found, faults


def changed(workload: Workload, **changes: object) -> Workload:
    """The same with some options as a command line gives them; None changes nothing. Raises :class:`Error` (exit code 2 or 3)."""
    told = {name: value for name, value in changes.items() if value is not None}
    for name, value in told.items():
        kind = options()[name].metadata["kind"]
        try:
            told[name] = kind.checked(value) if isinstance(value, tuple) else kind.read(str(value))
        except ValueError as exc:
            said = ",".join(value) if isinstance(value, tuple) else value
            raise Error(
                f"{name} is {words.quoted(str(said))}, but {exc}", exit=Exit.USAGE, hint=f"--{name} {kind.example}"
            ) from exc
    made = dataclasses.replace(workload, **cast(dict[str, Any], told))
    made.check()
    return made


def told(workload: Workload) -> str:
    """``chat: prompts of 80-240 tokens, answers of 128``."""
    shared = f", {workload.shared} of them shared" if workload.shared else ""
    return f"{workload.name}: prompts of {workload.prompt} tokens{shared}, answers of {workload.answer}"
