"""Everything a person reads on the terminal. Only this module and ``commands`` print.

rich is imported where it draws: it takes as long as a whole plan, and a script that asks for JSON doesn't need it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from supervisor.errors import Error
from supervisor.units import Progress, duration

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

LONGEST = 4000
"""Characters of a sentence."""
PLAIN_WIDTH = 160
"""Of a table that goes into a file or a pipe."""
PLAIN_EVERY_S = 15.0
"""How often progress writes a line where there is no terminal (CI logs, systemd's journal)."""


def error(problem: Error) -> None:
    """One sentence, what to try under it, and the last lines of what failed, on stderr."""
    print(f"error: {_harmless(problem.message)}", file=sys.stderr)
    if problem.hint:
        print(f"try: {_harmless(problem.hint)}", file=sys.stderr)
    for line in problem.log:
        print(f"    {_harmless(line)}", file=sys.stderr)


def _harmless(text: str) -> str:
    """A sentence that may quote anybody's file: one line, of some length, that gives the terminal no orders."""
    plain = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[: LONGEST + 1])
    return plain if len(text) <= LONGEST else plain[:LONGEST] + "…"


def say(text: str) -> None:
    """A line for a person, on stderr, so that stdout stays for results."""
    print(text, file=sys.stderr, flush=True)


def out(text: str) -> None:
    """A line of result, on stdout."""
    print(text, flush=True)


def as_json(value: object) -> None:
    """A result for a script: one JSON document on stdout."""
    print(json.dumps(value, indent=2), flush=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str | None = None) -> None:
    """A table on stdout; columns of numbers are right-aligned."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for index, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], int | float) or row[index] is None for row in rows)
        grid.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text("–" if cell is None else str(cell)) for cell in row))  # as text: rich would read [a] as its markup
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    with (
        console.capture() as drawn
    ):  # so that a reader who left (`| head`) is met where all output is, not by rich, which would exit with 1
        console.print(grid)
    out("\n".join(line.rstrip() for line in drawn.get().splitlines()))


def columns(rows: Sequence[Sequence[object]]) -> None:
    """Short rows on stdout, aligned, numbers to the right: for a picture that has to be there at once, before rich would be imported."""
    words = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*words, strict=True)]
    numeric = [isinstance(cell, int) for cell in rows[-1]]
    for row in words:
        cells = (
            cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        out("  ".join(cells).rstrip())


@contextmanager
def progress() -> Iterator[Progress]:
    """A :data:`~supervisor.units.Progress` that draws a bar on a terminal and writes a line now and then elsewhere."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        with bar:
            yield _drawn(bar)
        return
    yield _plain_progress()


def _drawn(bar: Bar) -> Progress:
    """One line a piece of work, which appears at its first report."""
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=None)
        bar.update(tasks[what], completed=done, total=total or None)

    return report


def _plain_progress() -> Progress:
    started = time.monotonic()
    last_at, last_what, last_done = 0.0, "", -1

    def report(what: str, done: int, total: int) -> None:
        nonlocal last_at, last_what, last_done, started
        now = time.monotonic()
        if what != last_what:
            started, last_what = now, what
        elif done == last_done or (now - last_at < PLAIN_EVERY_S and done != total):
            return
        last_at, last_done = now, done
        left = duration((now - started) / done * (total - done)) if done and total > done else ""
        count = f" {done}/{total}" if total else ""
        say(f"{what}{count}" + (f", about {left} left" if left else ""))

    return report
