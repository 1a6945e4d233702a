"""What ``llmctl top`` draws: one :class:`Scene` on a screen of some size. Only the terminal's size decides what is left out.

From the top down, most telling first: the totals and a minute of their history, the presets with what ails them, what is in work, what
ended last. What has no room is left out as a column or at the end of its section, and no line is broken in two; the head of what is in work
says how many there are in all. Colours are few: red is for what failed, yellow for what waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.text import Text

from supervisor.glance import SPAN_S, Glance, History, Preset, Rates, Work
from supervisor.record import Record
from supervisor.units import KIB, duration, spell_ms

BLOCKS: Final = " ▁▂▃▄▅▆▇█"
ASCII: Final = " .:-=+*#%"
"""For a terminal that has no blocks."""
TALL: Final = 40
"""Lines from which on the history is :data:`TALL_ROWS` high."""
TALL_ROWS: Final = 4
ENDED: Final = 50
"""Requests that ended last, on the tallest screen."""
ILL: Final = ("failed", "backoff")
BAD: Final = ("error", "truncated", "interrupted")
GAP: Final = "  "
SECTION: Final = 2
"""Lines of a section that aren't its rows: an empty one, and the head."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What there is to draw."""

    glance: Glance
    rates: Rates | None
    """None at the first look."""
    made: History
    """Tokens of answers per second."""
    prompts: History
    """Tokens of prompts per second."""
    ended: Sequence[Record]
    """Requests that ended last, the last one first."""
    now_at: float
    """Seconds since 1970."""
    note: str = ""
    """A sentence for the person."""


class _Column(NamedTuple):
    title: str
    is_number: bool = False
    width: int = 0
    """At least, so that a table doesn't move with its numbers. Words that are longer may be cut down to it, numbers never."""
    drop: int = 0
    """What goes where there is no room: the largest first, 0 never."""


_Cell = str | Text


def draw(scene: Scene, width: int, height: int | None, *, marks: str = BLOCKS) -> RenderableType:
    """A picture of at most ``height`` lines (None: as many as it takes), drawn by characters of these marks, lowest first."""
    top = [_title(scene, width), _totals(scene, width), *_history(scene.made, width, height, marks)]
    if scene.note:
        top.append(_line(scene.note, "yellow"))
    presets = sorted(scene.glance.presets, key=lambda each: each.state == "stopped")
    problems = [_line(each.problem, "red") for each in presets if each.problem]
    wanted = (len(presets) + len(problems), len(scene.glance.in_work), len(scene.ended))
    room = _share(None if height is None else height - len(top), wanted)
    ills = min(len(problems), room[0] // 2)
    parts: list[RenderableType] = list(top)
    if room[0]:
        parts += ["", _presets(scene, presets[: room[0] - ills], width), *problems[:ills]]
    if room[1]:
        parts += ["", _in_work(scene.glance.in_work, room[1], width)]
    if room[2]:
        parts += ["", _ended(scene.ended[: room[2]], scene.now_at, width)]
    return Group(*parts)


def plain(scene: Scene, width: int, *, marks: str = BLOCKS) -> str:
    """One picture as text without any orders to a terminal."""
    console = Console(width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as drawn:
        console.print(draw(scene, width, None, marks=marks))
    return "\n".join(line.rstrip() for line in drawn.get().splitlines())


def _share(lines: int | None, wanted: tuple[int, int, int]) -> tuple[int, int, int]:
    """Rows of each section: the first has up to half of the lines, the second leaves the third a third of what is left then."""
    if lines is None:
        return wanted
    first = _rows(max(lines // 2, SECTION + 1, lines - _whole(wanted[1]) - _whole(wanted[2])), wanted[0])
    left = lines - _whole(first)
    second = _rows(max(left - left // 3, left - _whole(wanted[2])), wanted[1])
    return first, second, _rows(left - _whole(second), wanted[2])


def _whole(rows: int) -> int:
    return rows + SECTION if rows else 0


def _rows(lines: int, wanted: int) -> int:
    return max(0, min(wanted, lines - SECTION))


def _title(scene: Scene, width: int) -> Text:
    glance = scene.glance
    said = [_line(f"llmctl {glance.version}", "bold"), _line(f"{glance.address}/v1"), _line(f"pid {glance.pid}")]
    if glance.records_lost:
        said.insert(1, _line(f"{glance.records_lost:,} records lost", "red"))
    if scene.rates is not None:
        said.append(_line(f"uses {scene.rates.cpu_share:.1%} of a core"))
    return _fit([*said, _line(f"engine {glance.engine}")], width)


def _totals(scene: Scene, width: int) -> Text:
    """What fits, most telling first."""
    glance = scene.glance
    waiting = sum(each.waiting for each in glance.presets)
    said = [
        _line(f"{_rate(None if scene.rates is None else scene.rates.all.completion)} tokens/s", "bold"),
        _line(f"{sum(each.busy for each in glance.presets)} of {sum(each.slots for each in glance.presets)} slots busy"),
        _line(f"{waiting} waiting", "yellow" if waiting else ""),
    ]
    if glance.power_w is not None:
        said.append(_line(f"{glance.power_w:.0f} W"))
    for name, found in (
        ("card", [each.card_mib for each in glance.presets]),
        ("host", [each.host_mib for each in glance.presets]),
    ):
        known = [mib for mib in found if mib is not None]
        if known:
            said.append(_line(f"{name} {_gib(sum(known))}"))
    if scene.prompts.mean is not None:
        said.append(_line(f"prompts {_rate(scene.prompts.mean)} tokens/s"))
    return _fit(said, width)


def _history(made: History, width: int, height: int | None, marks: str) -> list[Text]:
    rows = TALL_ROWS if height is not None and height >= TALL else 1
    most = max((rate for rate in made.spread(int(SPAN_S)) if rate is not None), default=None)
    told = f" {SPAN_S:.0f} s, most {_rate(most)}"
    lines = bars(made.spread(min(2 * int(SPAN_S), max(1, width - len(told)))), rows, marks)
    return [_line(line) for line in (*lines[:-1], lines[-1] + told)]


def bars(values: Sequence[float | None], rows: int, marks: str) -> list[str]:
    """A bar a value, so many rows high, the top row first. A value of 0 has the lowest mark, None has none."""
    most = max((value for value in values if value is not None), default=0.0)
    steps = len(marks) - 1
    heights = [0 if value is None else max(1, round(value / most * rows * steps)) if most else 1 for value in values]
    return ["".join(marks[min(max(tall - below * steps, 0), steps)] for tall in heights) for below in reversed(range(rows))]


def _presets(scene: Scene, presets: Sequence[Preset], width: int) -> Text:
    has_card = any(each.has_card for each in presets)
    columns = (
        *(_Column("preset", width=12), _Column("state", width=16), _Column("tok/s", True, 6), _Column("busy", True, 5, drop=1)),
        *(_Column("waiting", True, drop=2), *((_Column("card MiB", True, drop=3),) if has_card else ())),
        *(_Column("host MiB", True, drop=4), _Column("restarts", True, drop=5)),
    )
    rates = scene.rates.by_preset if scene.rates is not None else {}
    rows = []
    for each in presets:
        made = rates[each.name].completion if each.name in rates else None
        state_style = "red" if each.state in ILL else "" if each.state in ("ready", "stopped") else "yellow"
        busy = f"{each.busy}/{each.slots}" if each.slots else None
        card = (_used(each.card_mib, each.planned_mib if each.has_card else None),) if has_card else ()
        host = _used(each.host_mib, None if each.has_card else each.planned_mib)
        waiting = _line(str(each.waiting), "yellow" if each.waiting else "")
        rows.append((each.name, _line(each.told, state_style), _rate(made), busy, waiting, *card, host, str(each.restarts)))
    return _table(columns, rows, width)


def _in_work(work: Sequence[Work], room: int, width: int) -> Text:
    shown = work[:room]
    count = f"in work ({len(work)})" if len(shown) == len(work) else f"in work ({len(work)}, oldest)"
    columns = (
        *(_Column(count, width=23), _Column("preset", width=12, drop=2), _Column("route", width=20, drop=4)),
        *(_Column("phase", width=7), _Column("age", True, 8)),
        *(_Column("tokens", True, 6, drop=3), _Column("tok/s", True, 6, drop=1)),
    )
    return _table(
        columns,
        (
            (
                *(each.id, each.preset, each.route, _line(each.phase, "yellow" if each.phase == "waits" else "")),
                *(duration(each.age_s), f"{each.tokens:,}" if each.phase == "decode" else None, _rate(each.tokens_per_s)),
            )
            for each in shown
        ),
        width,
    )


def _ended(records: Sequence[Record], now_at: float, width: int) -> Text:
    columns = (
        *(_Column("ended last", width=23), _Column("preset", width=12, drop=2), _Column("route", width=20, drop=8)),
        *(_Column("status", width=9), _Column("took", True, 8, drop=1)),
        *(_Column("tokens", True, 6, drop=3), _Column("tok/s", True, 6, drop=4)),
        *(_Column("first token", True, drop=6), _Column("prompt", True, drop=7), _Column("cached", True, drop=7)),
        _Column("ago", True, drop=5),
    )
    return _table(columns, (_ended_row(each, now_at) for each in records), width)


def _ended_row(record: Record, now_at: float) -> tuple[_Cell | None, ...]:
    ago = None if record.closed_at is None else duration(max(0.0, now_at - record.closed_at))
    why = f" ({record.error})" if record.error else ""
    status = _line(record.status + why, "red" if record.status in BAD else "yellow" if record.status == "refused" else "")
    return (
        *(record.id, record.preset or None, record.route, status, _ms(record.total_ms)),
        *(_count(record.completion_tokens), _rate(record.decode_tps)),
        *(_ms(record.ttft_ms), _count(record.prompt_tokens), _count(record.cached_tokens), ago),
    )


def _table(columns: Sequence[_Column], rows: Iterable[Sequence[_Cell | None]], width: int) -> Text:
    """A line a row below the head, none longer than the width."""
    cells = [[_as_text(cell) for cell in row] for row in rows]
    whole = [max(column.width, len(column.title), *(row[at].cell_len for row in cells)) for at, column in enumerate(columns)]
    widths = [most if column.is_number else min(most, column.width) for column, most in zip(columns, whole, strict=True)]
    kept = list(range(len(columns)))

    def left() -> int:
        return width - sum(widths[at] for at in kept) - len(GAP) * (len(kept) - 1)

    while left() < 0 and (least := max(kept, key=lambda at: columns[at].drop)) and columns[least].drop:
        kept.remove(least)
    for at in kept:
        widths[at] += min(whole[at] - widths[at], max(0, left()))
    head = [_line(column.title, "bold") for column in columns]
    lines = []
    for row in (head, *cells):
        for at in kept:
            row[at].truncate(widths[at], overflow="ellipsis")
            row[at].align("right" if columns[at].is_number else "left", widths[at])
        lines.append(_line(GAP).join(row[at] for at in kept))
    return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)


def _as_text(cell: _Cell | None) -> Text:
    return _line("–") if cell is None else _line(cell) if isinstance(cell, str) else cell


def _line(text: str, style: str = "") -> Text:
    """One line, that gives the terminal no orders whatever it quotes."""
    return Text("".join(char if char.isprintable() else " " for char in text), style, no_wrap=True, overflow="ellipsis")


def _fit(said: Sequence[Text], width: int) -> Text:
    """As many of these as the width has, at least the first."""
    line = _line("")
    for each in said:
        if line and line.cell_len + len(GAP) + each.cell_len > width:
            break
        line = _line(GAP).join([line, each]) if line else each
    return line


def _ms(milliseconds: float | None) -> str | None:
    return None if milliseconds is None else spell_ms(milliseconds)


def _count(number: int | None) -> str | None:
    return None if number is None else f"{number:,}"


def _rate(per_s: float | None) -> str:
    return "–" if per_s is None else f"{per_s:.1f}" if per_s < 99.95 else f"{per_s:,.0f}"


def _gib(mib: int) -> str:
    return f"{mib:,} MiB" if mib < KIB else f"{mib / KIB:.1f} GiB"


def _used(mib: int | None, planned_mib: int | None) -> str | None:
    """``412 of 430``."""
    if mib is None:
        return None
    return f"{mib:,}" if planned_mib is None else f"{mib:,} of {planned_mib:,}"
