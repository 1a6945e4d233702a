"""Two results beside each other: whether one is faster, by how much, how sure that is, and what differs between them. Pure.

A row is a figure at a level. Its verdict is ``better`` or ``worse`` where the interval of the ratio excludes 1 and the change is worth a
word; else ``tie``, with the bound that it keeps within and the number of repetitions that would tell more. The confidence is of all rows
together (Bonferroni): with six rows at 99 %, each has an interval of 99.83 %, so that of a hundred comparisons of the same with itself one
at most finds a difference anywhere.

A change is of the figure itself: an ITL of 11 ms after 10 is 10 % slower, and so are 90 tokens/s after 100.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from bench import figures, intervals, llamabench
from bench.ask import Level
from bench.figures import Figure
from bench.intervals import Interval
from bench.result import Point, Result
from bench.sides import Difference, Side, differences, unlike
from supervisor.errors import Error, Exit
from supervisor.units import duration

WORTH: Final = 0.01
"""The least change that has a word: below it is what a machine's own moods do to one configuration (vLLM's runs differ by 1 to 3 %,
llama.cpp's by up to 10: polyserve's report on its own noise)."""
TELL: Final = 0.03
"""Beside the change seen, what a tie says how to tell, where nobody asks for another."""
LOOSE: Final = 0.1
"""A tie's bound from which on it is said how little it says: a tenth is what people tune for."""
WIDENED: Final = 1.5
"""From which factor on it is said that an interval was widened."""
CONFIDENCE: Final = 0.99
Verdict = Literal["better", "worse", "tie", "unknown"]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure at one level."""

    level: str
    figure: Figure
    a: float
    b: float
    interval: Interval | None
    """Of B / A; None of fewer than three repetitions."""
    to_tell: Mapping[float, int | None]
    """Repetitions of each that would tell a change, by the change; only of a tie. None is more than anybody makes."""

    @property
    def change(self) -> float:
        """From A to B: 0.1 is 10 % more."""
        return (self.b / self.a if self.interval is None else self.interval.ratio) - 1

    @property
    def seen(self) -> float:
        """The change without its direction, as it is shown."""
        return round(abs(self.change), 3)

    @property
    def verdict(self) -> Verdict:
        """On B."""
        if self.interval is None:
            return "unknown"
        if not self.interval.excludes_one or abs(self.change) < WORTH:
            return "tie"
        return "better" if (self.change > 0) == (self.figure.better == "higher") else "worse"


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that can be said of two sides."""

    a: Side
    b: Side
    confidence: float
    """Of all rows together."""
    paired: bool
    """Measured in turns."""
    rows: tuple[Row, ...]
    differs: tuple[Difference, ...]
    notes: tuple[str, ...]
    """Sentences that limit the verdict."""
    flags: tuple[str, ...]
    """Of the points compared, with whose they are."""
    tell: float = TELL
    """The change that a tie says how to tell."""

    @property
    def worse(self) -> bool:
        """Whether B is worse in anything."""
        return any(row.verdict == "worse" for row in self.rows)

    @property
    def verdict(self) -> str:
        """In a sentence."""
        sure = f"{self.confidence * 100:g}% sure"
        known = [row for row in self.rows if row.interval is not None]
        if not known:
            return f"no verdict: an interval needs {intervals.LEAST} repetitions of each"
        told = [_told("worse", "slower", known), _told("better", "faster", known)]
        ties = [row for row in known if row.verdict == "tie"]
        if len(ties) < len(known):
            rest = f"; {len(ties)} of {len(known)} figures are a tie" if ties else ""
            return f"B is {', but '.join(each for each in told if each)} ({sure}){rest}"
        bound, worst = max(((row.interval.bound, row) for row in ties if row.interval is not None), key=lambda pair: pair[0])
        if bound > LOOSE:
            return (
                f"a tie, but a coarse one: {bound:.1%} in {worst.figure.name} at {worst.level} would not have been seen ({sure})"
            )
        return f"a tie: no figure is more than {bound:.1%} apart ({sure})"

    @property
    def advice(self) -> str:
        """How many repetitions would tell more; empty where nothing is a tie."""
        ties = [row for row in self.rows if row.to_tell and row.interval is not None]
        if not ties:
            return ""
        made = min(row.interval.n for row in ties if row.interval is not None)
        told = f"{_many([row.to_tell[self.tell] for row in ties], made)} tell a difference of {self.tell * 100:g}% in any of them"
        if seen := [row.to_tell[row.seen] for row in ties if row.seen in row.to_tell and row.seen != self.tell]:
            told += f"; {_many(seen, made)} tell any that was seen"
        return f"of repetitions of each, {told} (9 times of 10)"

    def as_dict(self) -> dict[str, Any]:
        """For a script."""
        return {
            "a": {"file": self.a.file, "subject": self.a.subject.name},
            "b": {"file": self.b.file, "subject": self.b.subject.name},
            "confidence": self.confidence,
            "paired": self.paired,
            "verdict": self.verdict,
            "advice": self.advice,
            "rows": [_row_as_dict(row) for row in self.rows],
            "differs": [{"name": each.name, "a": each.a, "b": each.b} for each in self.differs],
            "notes": list(self.notes),
            "flags": list(self.flags),
        }


def _row_as_dict(row: Row) -> dict[str, Any]:
    found = row.interval
    return {
        "level": row.level,
        "figure": row.figure.tag,
        "unit": row.figure.unit,
        "a": row.a,
        "b": row.b,
        "change": row.change,
        "verdict": row.verdict,
        "interval": None
        if found is None
        else {
            "low": found.low - 1,
            "high": found.high - 1,
            "confidence": found.confidence,
            "repetitions": found.n,
            "spread": found.spread,
        },
        "repetitions_to_tell": [{"change": change, "repetitions": needs} for change, needs in row.to_tell.items()],
    }


def _many(needs: Sequence[int | None], made: int) -> str:
    """``42 (37 more)``, of all of them."""
    most = max((each for each in needs if each is not None), default=0)
    if None in needs:
        return f"more than {intervals.MOST}"
    return f"{most} ({most - made} more)" if most > made else f"the {made} made"


def _told(which: Verdict, word: str, rows: Iterable[Row]) -> str:
    """``10.2% slower (8.9 to 11.5%) in tok/s at 1 user``; of each figure the greatest change, empty for none."""
    greatest = dict[str, Row]()
    for row in rows:
        if row.verdict == which and (row.figure.tag not in greatest or abs(row.change) > abs(greatest[row.figure.tag].change)):
            greatest[row.figure.tag] = row
    parts = [
        f"{abs(row.change):.1%}{'' if number else f' {word}'} ({_range(row)}) in {row.figure.name} at {row.level}"
        for number, row in enumerate(greatest.values())
    ]
    return _listed(parts)


def _listed(parts: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def _range(row: Row) -> str:
    assert row.interval is not None
    ends = sorted(abs(end - 1) for end in (row.interval.low, row.interval.high))
    return f"{ends[0] * 100:.1f} to {ends[1]:.1%}"


def within(
    result: Result, file: str, *, confidence: float = CONFIDENCE, level: str = "", anyway: bool = False, tell: float = TELL
) -> tuple[Comparison, ...]:
    """Each further subject of one run with its first; the confidence is of all of it. Raises :class:`Error` as :func:`compare`."""
    first, *others = [Side(result, each, file) for each in result.manifest.subjects]
    if not others:
        what = f"{file} measures {first.subject.name} alone, so there is nothing to compare it with"
        raise Error(what, exit=Exit.USAGE, hint=f"llmctl compare {file} ANOTHER, or measure with --url as well")
    return tuple(
        compare(first, each, confidence=confidence, level=level, anyway=anyway, tell=tell, beside=len(others)) for each in others
    )


def compare(
    a: Side,
    b: Side,
    *,
    confidence: float = CONFIDENCE,
    level: str = "",
    anyway: bool = False,
    tell: float = TELL,
    beside: int = 1,
) -> Comparison:
    """How B does against A. ``level`` is the only one to look at, ``beside`` how many comparisons share the confidence.

    A tie says how many repetitions would tell a change of ``tell``.

    Raises :class:`Error` (exit code 2) where the two aren't alike enough (``anyway`` lets pass what can be reckoned at all).
    """
    same_run = (a.manifest.created_at, a.manifest.salt) == (b.manifest.created_at, b.manifest.salt)
    if same_run and a.subject.name == b.subject.name:
        raise Error(f"A and B are the same: {a.subject.name} in {a.file}", exit=Exit.USAGE, hint="llmctl compare --help")
    notes = unlike(a, b, anyway=anyway)
    pairs = _common(a, b, level)
    paired = same_run and a.subject.kind != llamabench.KIND
    tags = llamabench.TAGS if a.subject.kind == llamabench.KIND else figures.HEADLINE
    cells = [(tag, mine, other) for mine, other in pairs for tag in tags if mine.values(tag) and other.values(tag)]
    if not cells:
        raise Error("A and B have no figure in common: their requests failed", exit=Exit.USAGE, hint="llmctl logs")
    each = 1 - (1 - confidence) / (len(cells) * beside)
    rows = tuple(_row(tag, mine, other, each, tell, paired=paired) for tag, mine, other in cells)
    if not paired:
        notes += _apart(a, b)
    notes += _widened(rows)
    return Comparison(
        a=a,
        b=b,
        confidence=confidence,
        paired=paired,
        rows=rows,
        differs=tuple(differences(a, b)),
        notes=tuple(notes),
        flags=tuple(_flags(pairs)),
        tell=tell,
    )


def _widened(rows: Iterable[Row]) -> Iterator[str]:
    found = [(row, row.interval.widened) for row in rows if row.interval is not None and row.interval.widened > WIDENED]
    if found:
        names = _listed([f"{row.figure.name} at {row.level}" for row, _ in found])
        most = max(by for _, by in found)
        yield f"repetitions resemble those before them in {names}, which makes intervals up to {most:.1f} times as wide"


def _common(a: Side, b: Side, level: str) -> list[tuple[Point, Point]]:
    """Points of one level."""
    pairs = [(mine, other) for mine in a.points for other in b.points if mine.level.key == other.level.key]
    told = [", ".join(str(point.level) for point in each.points) or "none" for each in (a, b)]
    if not pairs:
        what = f"A and B have no level in common: A has {told[0]}; B has {told[1]}"
        raise Error(what, exit=Exit.USAGE, hint="measure both with the same --concurrency or --rate")
    if not level:
        return pairs
    chosen = [(mine, other) for mine, other in pairs if level in _spellings(mine.level)]
    if not chosen:
        common = [str(mine.level) for mine, _ in pairs]
        what = f"there is no level {level!r} in both; there is: {', '.join(common)}"
        raise Error(what, exit=Exit.USAGE, hint=f"--level '{common[0]}'")
    return chosen


def _spellings(level: Level) -> tuple[str, ...]:
    """``4 users`` is 4 as well, ``0.5/s`` 0.5."""
    number = "" if level.name else f"{level.users if level.rate is None else level.rate:g}"
    return (str(level), number)


def _row(tag: str, a: Point, b: Point, confidence: float, tell: float, *, paired: bool) -> Row:
    ours, theirs = (_values(point, tag) for point in (a, b))
    if paired:
        both = sorted(ours.keys() & theirs.keys())
        found = intervals.paired([ours[number] for number in both], [theirs[number] for number in both], confidence)
    else:
        found = intervals.apart(list(ours.values()), list(theirs.values()), confidence)
    row = Row(
        level=str(a.level),
        figure=figures.BY_TAG[tag],
        a=intervals.centre(list(ours.values())),
        b=intervals.centre(list(theirs.values())),
        interval=found,
        to_tell={},
    )
    if found is None or row.verdict != "tie":
        return row
    changes = dict.fromkeys((tell, row.seen) if row.seen >= WORTH else (tell,))
    needs = {change: intervals.needed(found, change) for change in changes}
    return Row(row.level, row.figure, row.a, row.b, found, needs)


def _values(point: Point, tag: str) -> dict[int, float]:
    """By repetition; a ratio of nothing is none."""
    return {each.number: each.values[tag] for each in point.repetitions if each.values.get(tag, 0.0) > 0}


def _apart(a: Side, b: Side) -> Iterator[str]:
    between_s = abs(a.manifest.created_at - b.manifest.created_at)
    what = f"A and B were measured {duration(between_s)} apart" if between_s else "A and B were measured one after the other"
    what += "; what changed in between no repetition shows"
    yield (
        what
        if a.subject.kind == llamabench.KIND
        else (f"{what}. Two servers in one run (llmctl bench --url A --url B) are measured in turns, and drift cancels")
    )


def _flags(pairs: Sequence[tuple[Point, Point]]) -> Iterator[str]:
    for pair in pairs:
        for letter, point in zip("AB", pair, strict=True):
            for flag in point.flags:
                word, _, sentence = flag.partition(": ")
                yield f"{word} in {letter} at {point.level}: {sentence}"
