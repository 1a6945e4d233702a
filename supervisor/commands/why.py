"""``llmctl why``: where the time of one request went, as a picture and in words. It reads the ledger's file; no llmctl has to run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from supervisor import accounts, paths, render, why
from supervisor.errors import Error, Exit
from supervisor.record import Record, Run
from supervisor.why import Segment
from supervisor.words import quoted

if TYPE_CHECKING:
    from rich.text import Text

LAST: Final = "last"
COMPARED: Final = 200
"""Of the preset's requests before it: what is usual comes from those."""
BAR: Final = 60
"""Characters of the picture; of a narrow terminal as many as it has."""
LEAST: Final = 0.001
"""Of the whole time; a shorter part is in no picture."""
LOOKS: Final = {
    "queue": ("░", "yellow"),
    "load": ("▒", "magenta"),
    "prefill": ("▓", "blue"),
    "decode": ("█", "green"),
    "first token": ("▓", "blue"),
    "answer": ("█", "green"),
    "rest": ("·", "bright_black"),
}
"""How a part is drawn: told apart without its colour, too."""


@click.command("why", short_help="Explain where the time of one request went.")
@click.argument("request")
@click.option("--preset", metavar="NAME", help="Only among the requests for this preset.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(request: str, preset: str | None, as_json: bool) -> None:
    """Explain REQUEST: its id or the beginning of one, the X-Request-Id that it came with, or `last`, the one that ended last.

    \b
    llmctl why last
    llmctl why last --preset tiny
    llmctl why req_0198b2c
    """
    path = paths.home().ledger
    record, run = _meant(path, request, preset)
    earlier = accounts.before(path, record, COMPARED)
    usual = why.usual(earlier)
    like = None if record.shared_with is None else accounts.get(path, record.shared_with)
    sentences = why.explain(record, run, usual, like, earlier)
    if as_json:
        render.as_json(
            {
                "record": dataclasses.asdict(record),
                "run": None if run is None else dataclasses.asdict(run),
                "usual": None if usual is None else _as_dict(usual),
                "sentences": sentences,
            }
        )
        return
    render.out(_head(record))
    parts = why.segments(record)
    if any(part.name != "rest" for part in parts):
        render.out("")
        _draw(parts)
        render.out("")
    for sentence in sentences:
        render.out(sentence)


def _meant(path: Path, request: str, preset: str | None) -> tuple[Record, Run | None]:
    """The request that is meant. Raises :class:`Error` (exit code 2): there is none, or the beginning is that of several."""
    found = accounts.find(path, request, preset)
    of = f" for {preset}" if preset else ""
    if not found:
        said = "no request has ended yet" if request == LAST else f"there is no request {quoted(request)}"
        hint = "llmctl up tiny" if request == LAST and preset is None else "llmctl usage --records"
        raise Error(f"{said}{of}", exit=Exit.USAGE, hint=hint)
    if len(found) > 1 and not all(record.client_id == request for record, _ in found):
        ids = ", ".join(record.id for record, _ in found[-3:])
        raise Error(
            f"{quoted(request)} is the beginning of {len(found)} requests' ids, the last of them {ids}",
            exit=Exit.USAGE,
            hint=f"llmctl why {found[-1][0].id}",
        )
    if len(found) > 1:
        render.say(f"{len(found)} requests came with that X-Request-Id{of}; this is the last of them")
    return found[-1]


def _as_dict(usual: why.Usual) -> dict[str, Any]:
    """A figure's quartiles by their names."""
    return {
        name: value._asdict() if isinstance(value, why.Quartiles) else value for name, value in dataclasses.asdict(usual).items()
    }


def _head(record: Record) -> str:
    """Which one it is."""
    when = f"{datetime.fromtimestamp(record.opened_at):%Y-%m-%d %H:%M:%S}"
    told = (record.id, record.preset, record.route, record.status, when, record.client_id and f"came as {record.client_id}")
    return "  ".join(each for each in told if each)


def _draw(parts: Sequence[Segment]) -> None:
    """The time as one bar, and under it what each part of the bar is."""
    from rich.console import Console
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else render.PLAIN_WIDTH)
    total_ms = sum(part.ms for part in parts)
    shown = [part for part in parts if part.ms >= LEAST * total_ms]
    bar, legend = Text(), Text()
    for part, cells in zip(shown, _cells([part.ms for part in shown], min(BAR, console.width)), strict=True):
        glyph, colour = LOOKS[part.name]
        bar.append(glyph * cells, style=colour)
        _add(legend, Text.assemble((glyph, colour), f" {part.name} {why.spell(part.ms)} ({part.ms / total_ms * 100:.0f} %)"))
    with console.capture() as drawn:
        console.print(bar, legend, sep="\n")
    render.out("\n".join(line.rstrip() for line in drawn.get().splitlines()))


def _add(legend: Text, told: Text) -> None:
    legend.append("   " if legend else "")
    legend.append_text(told)


def _cells(values: Sequence[float], width: int) -> list[int]:
    """The width shared out by the largest remainders, at least one cell for each value."""
    free, total = width - len(values), sum(values)
    shares = [value / total * free for value in values]
    cells = [1 + int(share) for share in shares]
    for at in sorted(range(len(values)), key=lambda at: int(shares[at]) - shares[at])[: width - sum(cells)]:
        cells[at] += 1
    return cells
