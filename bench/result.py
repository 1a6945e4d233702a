"""A run's result: what was measured, and of what. One JSON file, and two beside it.

    NAME.json            {"schema": "llmctl-bench/1", "manifest": {…}, "points": [{target, level, counts, metrics, repetitions, flags}]}
    NAME.requests.jsonl  a Sample a line
    NAME.html            both as a page with pictures (``page``)

A result names all that decides about its numbers: model and its sha256, engine, command line, machine, driver, clocks, workload, seed. It
is written whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from bench import figures
from bench.ask import Level
from bench.sample import Sample
from bench.workload import Workload
from supervisor.errors import Error, Exit

SCHEMA: Final = "llmctl-bench/1"
REQUESTS: Final = ".requests.jsonl"
PAGE: Final = ".html"
MEASURE: Final = "llmctl bench tiny --out run.json"


class Kind(StrEnum):
    """What speaks there."""

    LLMCTL = "llmctl"
    LLAMA_CPP = "llama.cpp"
    VLLM = "vllm"
    OLLAMA = "ollama"
    OPENAI = "openai"
    """Any other."""

    @property
    def ignores_eos(self) -> bool:
        """Whether it can be made to go on to a length."""
        return self in (Kind.LLMCTL, Kind.LLAMA_CPP, Kind.VLLM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What was asked: a server, and what is known of what stands behind it. Empty and None are not known."""

    name: str
    """In the run: unique there."""
    kind: str
    """A :class:`Kind`, or llama-bench."""
    url: str = ""
    model: str = ""
    """What requests name."""
    version: str = ""
    """Of the server, in its own words."""
    preset: str = ""
    file: str = ""
    """The model's file, its name alone."""
    sha256: str = ""
    """Of that file."""
    engine: str = ""
    """llama.cpp's build."""
    argv: tuple[str, ...] = ()
    """The engine's command line."""
    slots: int | None = None
    context: int | None = None
    """Tokens of one slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where it ran."""

    host: str
    """A digest of the machine's identity: two results of one machine have the same."""
    cpu: str
    cores: int
    memory_mib: int
    kernel: str
    cards: tuple[str, ...] = ()
    driver: str = ""
    governor: str = ""
    """Of the CPU's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All that decides about a run's numbers."""

    created_at: float
    """Seconds since 1970."""
    llmctl: str
    workload: Workload
    seed: int
    """Of lengths and arrival times."""
    salt: str
    """Of texts, new in each run."""
    subjects: tuple[Subject, ...]
    machine: Machine
    replayed: str = ""
    """The trace's digest, where it was a replay."""
    generator: Mapping[str, float] = field(default_factory=dict)
    """What the load generator itself took: ``cpu_share`` of one core, ``us_an_event``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """One repetition at one level."""

    number: int
    began_s: float
    """From the run's beginning."""
    duration_s: float
    values: Mapping[str, float]
    """Its figures by tag: of single requests the median, else of the repetition."""
    gauges: Mapping[str, float] = field(default_factory=dict)
    """What the machine showed meanwhile, by name (``gauges``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One subject at one level."""

    target: str
    """The subject's name."""
    level: Level
    counts: figures.Counts
    metrics: Mapping[str, Mapping[str, Any]]
    """AIPerf's shape, by tag: of single requests over all of them, else over repetitions."""
    repetitions: tuple[Repetition, ...]
    flags: tuple[str, ...] = ()
    """Why its numbers may not be trusted: ``rep_drift: …``, a word and a sentence."""

    def values(self, tag: str) -> tuple[float, ...]:
        """A figure's value in each repetition that has it."""
        return tuple(each.values[tag] for each in self.repetitions if tag in each.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A run."""

    manifest: Manifest
    points: tuple[Point, ...]
    cut_short: bool = False
    """Somebody ended it before its end; what is here was measured whole."""

    def point(self, target: str, level: Level) -> Point | None:
        """The one of a subject at a level."""
        return next((each for each in self.points if each.target == target and each.level.key == level.key), None)

    @property
    def interleaved(self) -> bool:
        """Whether several subjects were measured in turns."""
        return len(self.manifest.subjects) > 1

    def as_dict(self) -> dict[str, Any]:
        """The JSON."""
        manifest = {**asdict(self.manifest), "workload": self.manifest.workload.as_dict()}
        return {
            "schema": SCHEMA,
            "manifest": manifest,
            "cut_short": self.cut_short,
            "points": [asdict(each) for each in self.points],
        }


def point(
    target: str,
    level: Level,
    samples: Sequence[Sample],
    limits: Mapping[str, float],
    *,
    began_s: Mapping[int, float],
    gauges: Mapping[int, Mapping[str, float]],
) -> Point:
    """Reckon one. ``samples`` are those of the subject at the level; ``began_s`` and ``gauges`` are by repetition."""
    repetitions = []
    for number in sorted(began_s):
        mine = [each for each in samples if each.repetition == number]
        seen = gauges.get(number, {})
        repetitions.append(
            Repetition(
                number=number,
                began_s=round(began_s[number], 3),
                duration_s=round(figures.duration_s(mine), 4),
                values={tag: round(value, 6) for tag, value in figures.of_repetition(mine, limits, seen.get("energy_j")).items()},
                gauges=seen,
            )
        )
    counted = [each for each in samples if each.repetition >= 0]
    metrics = {tag: spread.as_dict() for tag, spread in figures.of_requests(counted).items()}
    for figure in figures.FIGURES:
        if figure.of is None:
            values = [each.values[figure.tag] for each in repetitions if figure.tag in each.values]
            if spread := figures.Spread.over(figure.unit, values):
                metrics[figure.tag] = spread.as_dict()
    return Point(target=target, level=level, counts=figures.count(counted), metrics=metrics, repetitions=tuple(repetitions))


def write(result: Result, samples: Iterable[Sample], page: str, path: Path) -> None:
    """Write its three files: the result last, so that one that is there is whole.

    Raises :class:`Error` (exit code 2) where they can't be written.
    """
    texts = {
        path.with_name(path.stem + REQUESTS): "".join(
            json.dumps(each.as_dict(), separators=(",", ":")) + "\n" for each in samples
        ),
        path.with_name(path.stem + PAGE): page,
        path: json.dumps(result.as_dict(), indent=1) + "\n",
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for place, text in texts.items():
            fresh = place.with_name(f".{place.name}.{os.getpid()}")
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(place)
    except OSError as exc:
        raise Error(f"{path} can't be written: {exc.strerror or exc}", exit=Exit.USAGE, hint="--out FILE, elsewhere") from exc


def contents(path: Path, hint: str = MEASURE) -> str:
    """The text of a file. Raises :class:`Error` (exit code 2) for what is none, or can't be read."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise Error(f"{path} is no file", exit=Exit.USAGE, hint=hint)
        return path.read_text()
    except OSError as exc:
        raise Error(f"{path} can't be read: {exc.strerror or exc}", exit=Exit.USAGE, hint=hint) from exc
    except UnicodeDecodeError as exc:
        raise Error(f"{path} can't be read: it is no text", exit=Exit.USAGE, hint=hint) from exc


def read(path: Path) -> Result:
    """A result. Raises :class:`Error` (exit code 2) for a file that is none, or of another schema."""
    return parse(contents(path), str(path))


def parse(text: str, path: str) -> Result:
    """The same of a text; ``path`` is for messages."""
    import pydantic  # which takes as long to import as all else

    try:
        told = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as exc:
        raise Error(f"{path} is no result: {exc}", exit=Exit.USAGE, hint=MEASURE) from exc
    schema = told.pop("schema", None) if isinstance(told, dict) else None
    if schema != SCHEMA:
        raise Error(f"{path} has the schema {schema!r}, this llmctl reads {SCHEMA}", exit=Exit.USAGE, hint=MEASURE)
    try:
        found = pydantic.TypeAdapter(Result).validate_python(told)
        found.manifest.workload.check()
    except pydantic.ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Error(f"{path} is a damaged result: {where}: {first['msg']}", exit=Exit.USAGE, hint="measure again") from exc
    except (ValueError, Error) as exc:
        raise Error(f"{path} is a damaged result: {exc}", exit=Exit.USAGE, hint="measure again") from exc
    return found


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number")


def samples(path: Path) -> list[Sample]:
    """The requests of the result at ``path``; none where their file isn't there. Raises :class:`Error` as :func:`read`."""
    lines = path.with_name(path.stem + REQUESTS)
    if not lines.exists():
        return []
    try:
        return [Sample.of(json.loads(line)) for line in lines.read_text().splitlines()]
    except (ValueError, TypeError, OSError) as exc:
        raise Error(f"{lines} is damaged: {exc}", exit=Exit.USAGE, hint="measure again") from exc
