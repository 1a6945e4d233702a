"""``llmctl compare``: whether one of two results is faster, by how much, how sure that is, and what differs between them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from supervisor import paths, render
from supervisor.errors import Error, Exit

if TYPE_CHECKING:
    from bench.compare import Comparison, Row
    from bench.result import Result

LAST: Final = "last"
WORSE: Final = 1
"""Exit code of --fail-if-worse."""


@click.command("compare", short_help="Say whether one of two results is faster, and how sure that is.")
@click.argument("a", metavar="A[#SUBJECT]")
@click.argument("b", metavar="[B[#SUBJECT]]", required=False)
@click.option(
    "--confidence",
    type=click.FloatRange(50, 99.99),
    default=99.0,
    show_default=True,
    metavar="PERCENT",
    help="Of the verdict as a whole, all figures and levels together.",
)
@click.option("--level", default="", metavar="L", help="Only this one: '4 users', or 4.")
@click.option(
    "--tell",
    type=click.FloatRange(0.1, 100),
    default=3.0,
    show_default=True,
    metavar="PERCENT",
    help="How many repetitions would tell a difference of so much, where it is a tie.",
)
@click.option("--anyway", is_flag=True, help="Compare unlike work or machines, too.")
@click.option("--fail-if-worse", is_flag=True, help="Exit with 1 where B is worse in any figure.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(
    a: str, b: str | None, confidence: float, level: str, tell: float, anyway: bool, fail_if_worse: bool, as_json: bool
) -> None:
    """Compare B with A: files of `llmctl bench` or of `llama-bench -o jsonl`, names in the data folder, or `last`.

    A alone is a run that measured several servers in turns: each is compared with its first.

    \b
    llmctl compare last
    llmctl compare before.json after.json
    llmctl compare run.json#tiny other.json#tiny --level 4
    """
    from bench import compare, sides

    sure = confidence / 100
    first, file, subject = _read(a)
    if b is None:
        if subject:
            raise Error(f"{a} is one side only", exit=Exit.USAGE, hint=f"llmctl compare {file}, or a second result")
        found = compare.within(first, file, confidence=sure, level=level, anyway=anyway, tell=tell / 100)
    else:
        second, place, other = _read(b)
        pair = sides.pick(first, file, subject), sides.pick(second, place, other)
        found = (compare.compare(*pair, confidence=sure, level=level, anyway=anyway, tell=tell / 100),)
    if as_json:
        render.as_json({"comparisons": [each.as_dict() for each in found]})
    else:
        for number, each in enumerate(found):
            if number:
                render.out("")
            _show(each)
    if fail_if_worse and any(each.worse for each in found):
        raise click.exceptions.Exit(WORSE)


def _read(place: str) -> tuple[Result, str, str]:
    """The result, the file that it is in, and which of its subjects is meant: empty where nobody says."""
    from bench import llamabench, result

    name, subject = place, ""
    if not Path(place).exists() and "#" in place:
        name, _, subject = place.partition("#")
    path = _find(name)
    file = path.name if path.parent == paths.home().bench else str(path)
    text = result.contents(path)
    return (llamabench.read if llamabench.told_in(text) else result.parse)(text, file), file, subject


def _find(name: str) -> Path:
    """A path as it is, or a result in the data folder by its name, with or without suffix."""
    folder = paths.home().bench
    if name == LAST:
        results = [path for path in folder.glob("*.json") if path.is_file()]
        if not results:
            raise Error(f"there is no result in {folder}", exit=Exit.USAGE, hint="llmctl bench tiny")
        return max(results, key=lambda path: path.stat().st_mtime)
    path = Path(name).expanduser()
    kept = (folder / name, folder / f"{name}.json")
    return next((each for each in (path, *kept) if each.is_file()), path)


def _show(found: Comparison) -> None:
    from bench import intervals

    render.out(found.verdict)
    turns = "in turns" if found.paired else "apart"
    for letter, side in (("A", found.a), ("B", found.b)):
        render.out(f"{letter}: {side.subject.name}, {side.file}")
    render.out("")
    render.table(("level", "figure", "A", "B", "change", "interval", "repetitions", "verdict"), [_row(row) for row in found.rows])
    render.out("")
    few = [row for row in found.rows if row.interval is None]
    if few:
        render.out(f"fewer than {intervals.LEAST} repetitions have no interval: {len(few)} of {len(found.rows)} figures")
    if found.advice:
        render.out(found.advice)
    render.out(f"measured {turns}; intervals hold all together, {found.confidence * 100:g} times of 100")
    for sentence in (*found.notes, *found.flags):
        render.out(sentence)
    if found.differs:
        render.out("")
        render.table(("what differs", "A", "B"), [(each.name, each.a or None, each.b or None) for each in found.differs])


def _row(row: Row) -> tuple[object, ...]:
    def value(number: float) -> str:
        return f"{number:.4g} {row.figure.unit}"

    seen = row.interval
    if seen is None:
        return row.level, row.figure.name, value(row.a), value(row.b), f"{row.change:+.1%}", None, None, "too few repetitions"
    low, high = (f"{end - 1:+.1%}" for end in (seen.low, seen.high))
    told = f"tie, within ±{seen.bound:.1%}" if row.verdict == "tie" else row.verdict
    return row.level, row.figure.name, value(row.a), value(row.b), f"{row.change:+.1%}", f"{low} to {high}", seen.n, told
