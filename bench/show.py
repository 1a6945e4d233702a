"""A result on the terminal: what was measured, the table, why a number may not be trusted, what each column means, what to do next."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench import columns
from bench.columns import Column, plain
from bench.result import REQUESTS, Result
from supervisor import render

NAME: Final = 28
"""Characters of a subject's name in a row."""
BAR: Final = 40
"""Characters of the longest bar."""
COLOURS: Final = ("blue", "yellow", "green", "magenta", "cyan", "red")
GAP: Final = 2


def result(found: Result, path: Path) -> None:
    """Print it; ``path`` is where it lies."""
    for line in _head(found):
        render.out(line)
    for title, rows in _tables(found, _width()):
        render.out("")
        render.table(title, rows)
    _bars(found)
    for section in (_doubts(found), _meanings(found), _after(found, path)):
        if section:
            render.out("")
        for line in section:
            render.out(line)


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else render.PLAIN_WIDTH


def _head(found: Result) -> list[str]:
    """What was asked of whom, and where."""
    manifest = found.manifest
    trace = f"replay of {plain(manifest.replayed)}, " if manifest.replayed else ""
    subjects = [f"{plain(each.name)}: {columns.about(each)}" for each in manifest.subjects]
    turns = ["measured in turns, so that they can be compared"] if found.interleaved else []
    ended = ["ended before its end: what is here was measured whole"] if found.cut_short else []
    return [trace + plain(columns.measured(manifest.workload)), *subjects, f"machine: {columns.machine(found)}", *turns, *ended]


class _Number(float):
    """One that is written with its column's decimals, and that a table takes for a number."""

    __slots__ = ("text",)
    text: str

    @classmethod
    def of(cls, value: float, decimals: int) -> _Number:
        made = cls(value)
        made.text = columns.written(value, decimals)
        return made

    def __str__(self) -> str:
        return self.text


def _tables(found: Result, width: int) -> list[tuple[list[str], list[list[object]]]]:
    """The table, or several under each other where it is wider than the terminal; each row begins with whose it is."""
    if not found.points:
        return []
    several = found.interleaved
    who = [[plain(each.target, NAME)] * several + [plain(each.level, NAME)] for each in found.points]
    names = ["subject"] * several + ["level"]
    taken = sum(max(map(len, column)) + GAP for column in zip(names, *who, strict=True))
    parts: list[list[tuple[str, list[object]]]] = [[]]
    room = width - taken
    for column in columns.columns(found):
        cells = _cells(found, column)
        needs = max(len(word) for word in (*column.name.split(" "), *map(str, cells))) + GAP
        if needs > room and parts[-1]:
            parts.append([])
            room = width - taken
        parts[-1].append((column.name.replace(" ", "\n"), cells))
        room -= needs
    return [
        (
            [*names, *(name for name, _ in part)],
            [[*own, *(cells[row] for _, cells in part)] for row, own in enumerate(who)],
        )
        for part in parts
    ]


def _cells(found: Result, column: Column) -> list[object]:
    numbers = [column.of(point) for point in found.points]
    decimals = columns.digits(numbers)
    return [None if number is None else _Number.of(number, decimals) for number in numbers]


def _bars(found: Result) -> None:
    """Of a sweep: tokens/s in all by level, the same scale for all subjects, from zero."""
    rows = [(each, columns.metric(each, "output_token_throughput", "avg") or 0.0) for each in found.points]
    most = max((value for _, value in rows), default=0.0)
    if len(columns.levels(found)) < 2 or most <= 0:
        return
    from rich.console import Console
    from rich.text import Text

    names = [subject.name for subject in found.manifest.subjects]
    words = [(plain(each.target, NAME) if found.interleaved else "", plain(each.level, NAME)) for each, _ in rows]
    widths = [max(map(len, column)) for column in zip(*words, strict=True)]
    console = Console(width=_width())
    lines = [Text("tokens/s in all")]
    for (each, value), (target, level) in zip(rows, words, strict=True):
        colour = COLOURS[names.index(each.target) % len(COLOURS)] if each.target in names else ""
        own = f"{target:{widths[0]}}  " if found.interleaved else ""
        line = Text(f"{own}{level:{widths[1]}}  ")
        line.append("█" * round(value / most * BAR), style=colour)
        lines.append(line.append(f" {columns.short(value)}"))
    with console.capture() as drawn:
        console.print(*lines, sep="\n", no_wrap=True, overflow="ellipsis")
    render.out("\n" + "\n".join(line.rstrip() for line in drawn.get().splitlines()))


def _doubts(found: Result) -> list[str]:
    """Why its numbers may not be trusted."""
    flags = [plain(f"{each.target}, {each.level}: {flag}") for each in found.points for flag in each.flags]
    return [*(f"! {each}" for each in flags), *columns.failures(found)]


def _meanings(found: Result) -> list[str]:
    """Each column that is there with its formula."""
    told = [(each.name.removesuffix(" p50 ms"), each.meaning) for each in columns.columns(found) if each.meaning]
    if not told:
        return []
    told.append(("p50, p95", "what half of a level's requests don't exceed, and 95 of 100"))
    widest = max(len(name) for name, _ in told)
    return [f"{name:{widest}}  {meaning}" for name, meaning in told]


def _after(found: Result, path: Path) -> Sequence[str]:
    """Its own cost, where it lies, what to do with it."""
    cost = columns.generator(found)
    beside = (path.with_name(path.stem + REQUESTS), path.with_suffix(".html"))
    place = plain(shlex.quote(str(path)))
    next_ = f"llmctl compare {place}" if found.interleaved else f"llmctl compare OTHER.json {place}"
    return [
        *([cost] if cost else []),
        f"result: {plain(path)}",
        f"each request: {plain(beside[0])}",
        f"page: {plain(beside[1])}",
        f"next: {next_}",
    ]
