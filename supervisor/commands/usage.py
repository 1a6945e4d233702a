"""``llmctl usage``: what was asked and answered, from the ledger."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from typing import Any, Final, NamedTuple

import click

from supervisor import accounts, config, paths, record, render, spendlog
from supervisor.errors import Error, Exit
from supervisor.record import Record, Run, Status
from supervisor.units import JOULES_A_WH, spell_ms

FORMATS: Final = ("table", "json", "csv", "litellm")
LISTED: Final = 100
WIDTH: Final = 120
"""Of the list of records."""
BAR: Final = 24
"""Characters of the longest bar."""
NEVER: Final = "–"
FORMULA: Final = frozenset("=+-@\t\r\n＝＋－＠")
"""What a spreadsheet takes for the beginning of a formula (OWASP, CSV injection)."""


class Asked(NamedTuple):
    """Which requests."""

    since: date | None
    until: date | None
    preset: str | None
    status: Status | None


def _day(ctx: click.Context, param: click.Parameter, text: str | None) -> date | None:
    """A date, or ``7d``: the day on which the last seven began, today being one of them."""
    if text is None:
        return None
    try:
        days = re.fullmatch(r"([1-9]\d*)d", text)
        found = date.today() - timedelta(days=int(days[1]) - 1) if days else date.fromisoformat(text)
        if not 1 < found.year < 9999:  # the calendar ends there, and a day has one before it and one behind it
            raise ValueError
    except (ValueError, OverflowError) as exc:
        raise Error(
            f"--{param.name} has {text!r}, which is neither a date nor a number of days",
            exit=Exit.USAGE,
            hint=f"llmctl usage --{param.name} 7d, or --{param.name} {date.today()}",
        ) from exc
    return found


@click.command("usage", short_help="Sum requests, tokens and energy, or list the requests.")
@click.option(
    "--by", "by", multiple=True, type=click.Choice(accounts.BYS), help="Sum by this; may be repeated.  [default: preset]"
)
@click.option("--since", metavar="DAY", callback=_day, help="From this day on: 2026-01-31, or 7d for the last seven days.")
@click.option("--until", metavar="DAY", callback=_day, help="Until this day, and all of it.")
@click.option("--preset", metavar="NAME", help="Of one preset only.")
@click.option("--status", type=click.Choice(record.STATUSES), help="Only what ended so.")
@click.option("--records", is_flag=True, help="One line a request, newest last, instead of sums.")
@click.option(
    "-n", "--limit", type=click.IntRange(min=0), help="The last so many requests.  [default: 100; all with csv and litellm]"
)
@click.option("--format", "form", type=click.Choice(FORMATS), help="litellm is requests in LiteLLM's spend-log columns, as CSV.")
@click.option("--json", "as_json", is_flag=True, help="As JSON; requests one object a line.")
def command(
    by: tuple[accounts.By, ...],
    since: date | None,
    until: date | None,
    preset: str | None,
    status: Status | None,
    records: bool,
    limit: int | None,
    form: str | None,
    as_json: bool,
) -> None:
    """Sum requests, tokens and energy by preset, key, model or day, or list the requests.

    In CSV, a text that a spreadsheet would take for a formula has a ' before it; JSON has it as it is.
    """
    records = records or form == "litellm"
    _check(by, since, until, records, limit, form, as_json)
    home = paths.home()
    asked = Asked(since, until, preset, status)
    settings = config.load(home)
    if records:
        listed = limit if limit is not None else (None if form in ("csv", "litellm") else LISTED)
        rows = accounts.records(home.ledger, listed, **asked._asdict())
        _list(rows, form or "table", as_json or form == "json", settings)
        return
    sums = _Sums(home, by or ("preset",), asked, settings)
    if as_json or form == "json":
        render.as_json(sums.as_dict())
    elif form == "csv":
        _csv(sums.COLUMNS, sums.csv_rows())
    else:
        sums.show()


def _check(
    by: Sequence[str], since: date | None, until: date | None, records: bool, limit: int | None, form: str | None, as_json: bool
) -> None:
    """What goes together. No option is taken and then ignored."""
    if records and by:
        raise click.UsageError("--by is for sums, and requests are listed one by one")
    if limit is not None and not records:
        raise click.UsageError("--limit is for --records: sums have every request")
    if as_json and form in ("table", "csv"):
        raise click.UsageError(f"--json and --format {form} say two things")
    if since and until and since > until:
        raise Error(
            f"--since {since} is later than --until {until}",
            exit=Exit.USAGE,
            hint=f"llmctl usage --since {until} --until {since}",
        )


# Sums


class _Sums:
    """What is told of sums, in each format."""

    COLUMNS: Final = (
        *("day", "key", "preset", "model", "requests", *accounts.COUNTED, "counted", "prompt_tokens", "cached_tokens"),
        *("completion_tokens", "wasted_tokens", "draft_tokens", "draft_accepted", "ttft_mean_ms", "queue_ms", "load_ms"),
        *("prefill_ms", "decode_ms", "total_ms", "bytes", "energy_j", "cost", "currency"),
    )
    """Of the CSV."""

    def __init__(self, home: paths.Home, by: tuple[accounts.By, ...], asked: Asked, settings: config.Config) -> None:
        self.by = tuple(dict.fromkeys(by))
        self.asked = asked
        self.settings = settings
        self.rows = [self._priced(row) for row in accounts.sums(home.ledger, self.by, **asked._asdict())]
        self.total = [self._priced(row) for row in accounts.sums(home.ledger, (), **asked._asdict())]
        days = (asked.since, asked.until)
        is_all = asked.preset is None and asked.status is None
        # Neither is of any preset, so they stand beside sums of all requests only. What was lost may have been of any.
        self.idle_j = accounts.idle_j(home.ledger, *days) if is_all else None
        self.turned_away = accounts.turned_away(home.ledger, *days) if is_all else {}
        self.lost = accounts.lost(home.ledger, *days)

    def _priced(self, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"cost": accounts.cost(row["energy_j"], self.settings.price_per_kwh)}

    def as_dict(self) -> dict[str, Any]:
        """For a script."""
        return {
            "rows": self.rows,
            "since": None if self.asked.since is None else self.asked.since.isoformat(),
            "until": None if self.asked.until is None else self.asked.until.isoformat(),
            "idle_j": self.idle_j,
            "idle_cost": accounts.cost(self.idle_j, self.settings.price_per_kwh),
            "price_per_kwh": self.settings.price_per_kwh,
            "currency": self.settings.currency,
            "turned_away": self.turned_away,
            "lost": self.lost,
        }

    def csv_rows(self) -> Iterable[Sequence[object]]:
        """One a row of the sums."""
        currency = {"currency": self.settings.currency or None}
        return ([(row | currency).get(name) for name in self.COLUMNS] for row in self.rows)

    def show(self) -> None:
        """For a person: the table, a total where there is something to add up, and what stands beside it."""
        if self.rows:
            told = [*self.rows, *(self.total if len(self.rows) > 1 else ())]
            columns = {name: cells for name, cells in self._columns(told).items() if set(cells) != {NEVER}}
            names = [[_plain(row[name]) for name in self.by] for row in self.rows]
            if len(told) > len(names):
                names.append(["total", *[""] * (len(self.by) - 1)])
            cells = [[*name, *row] for name, row in zip(names, zip(*columns.values(), strict=True), strict=True)]
            if "day" in self.by:
                cells = [[*row, bar] for row, bar in zip(cells, self._bars(len(cells)), strict=True)]
            heads = [*self.by, *columns, *([""] if "day" in self.by else [])]
            _grid(heads, cells, {*range(len(self.by)), len(self.by) + len(columns)})
        else:
            render.say("no request has ended yet" if self.asked == (None,) * 4 else "no request fits that")
        self._show_beside()

    def _columns(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
        """Cells by the column's head; a status that nothing ended with, and what nobody measured, are never seen."""
        ended: dict[str, list[str]] = {
            status: [f"{row[status]:,}" if status == "ok" or row[status] else NEVER for row in rows]
            for status in accounts.COUNTED
        }
        return {
            "requests": [f"{row['requests']:,}" for row in rows],
            **ended,
            "prompt tokens": [_count(row["prompt_tokens"]) for row in rows],
            "cached": [_share(row["cached_tokens"], row["prompt_tokens"]) for row in rows],
            "completion tokens": [_count(row["completion_tokens"]) for row in rows],
            "wasted": [_count(row["wasted_tokens"] or None) for row in rows],
            "mean TTFT": [_ms(row["ttft_mean_ms"]) for row in rows],
            "draft accepted": [_share(row["draft_accepted"], row["draft_tokens"]) for row in rows],
            "energy": [_energy(row["energy_j"]) for row in rows],
            "cost": [self._money(row["cost"]) for row in rows],
        }

    def _bars(self, count: int) -> list[str]:
        """Completion tokens, to look at."""
        most = max((row["completion_tokens"] or 0 for row in self.rows), default=0)
        bars = [_bar(row["completion_tokens"] or 0, most) for row in self.rows]
        return bars + [""] * (count - len(bars))

    def _show_beside(self) -> None:
        if self.idle_j is not None:
            money = accounts.cost(self.idle_j, self.settings.price_per_kwh)
            render.out(
                f"idle: {_energy(self.idle_j)}{'' if money is None else f', {self._money(money)}'} while nothing was in work"
            )
        if (
            self.settings.price_per_kwh is not None
            and self.rows
            and self.idle_j is None
            and all(row["energy_j"] is None for row in self.rows)
        ):
            render.out("energy and cost aren't known: no card here tells what it takes")
        if "key" in self.by and all(row["key"] is None for row in self.rows):
            render.out("llmctl has no keys yet: all requests count as one's")
        if self.turned_away:
            render.out("turned away: " + ", ".join(f"{count:,} {_plain(code)}" for code, count in self.turned_away.items()))
        if self.lost:
            render.out("1 record could not be kept" if self.lost == 1 else f"{self.lost:,} records could not be kept")

    def _money(self, amount: float | None) -> str:
        if amount is None:
            return NEVER
        return f"{amount:,.{2 if amount >= 0.1 or not amount else 4}f} {self.settings.currency}".rstrip()


# Requests


def _list(rows: Iterable[dict[str, Any]], form: str, as_json: bool, settings: config.Config) -> None:
    if form == "litellm":
        told = (
            spendlog.row(row, accounts.cost(row["energy_j"], settings.price_per_kwh), settings)
            for row in rows
            if row["status"] != "open"
        )
        if as_json:
            _json_lines(told)
        else:
            flat = (row | {"metadata": json.dumps(row["metadata"])} for row in told)
            _csv(spendlog.COLUMNS, ([row[name] for name in spendlog.COLUMNS] for row in flat))
    elif as_json:
        _json_lines(rows)
    elif form == "csv":
        names = ("seq", *record.columns(Record), *record.columns(Run))
        _csv(names, ([row[name] for name in names] for row in rows))
    else:
        _list_in_table(list(rows))


def _list_in_table(rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        render.say("no request has come yet, or none fits that")
        return
    heads = ("time", "id", "preset", "status", "prompt", "cached", "answer", "TTFT", "tok/s", "took")
    cells = [
        [
            f"{datetime.fromtimestamp(row['opened_at']):%m-%d %H:%M:%S}",
            row["id"],
            _plain(row["preset"]),
            row["status"],
            _count(row["prompt_tokens"]),
            _share(row["cached_tokens"], row["prompt_tokens"]),
            _count(row["completion_tokens"]),
            _ms(row["ttft_ms"]),
            NEVER if row["decode_tps"] is None else f"{row['decode_tps']:.1f}",
            _ms(row["total_ms"]),
        ]
        for row in rows
    ]
    taken = sum(max(map(len, column)) + 2 for column in zip(heads, *cells, strict=True)) - 2
    names = max([len(row[2]) for row in cells], default=0)
    room = max(len(heads[2]), names - max(0, taken - WIDTH))
    for row in cells:
        row[2] = row[2] if len(row[2]) <= room else row[2][: room - 1] + "…"
    _grid(heads, cells, {0, 1, 2, 3})


# Ways to print. They write by the block: a million lines, each flushed, take a minute.


def _json_lines(rows: Iterable[Mapping[str, Any]]) -> None:
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def _csv(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """As RFC 4180 says; None is an empty cell."""
    writer = csv.writer(sys.stdout)
    writer.writerow(heads)
    writer.writerows([_defused(cell) for cell in row] for row in rows)
    sys.stdout.flush()


def _defused(cell: object) -> object:
    """A client chooses its request's id, and a person opens the file: what a spreadsheet would compute becomes a text."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in FORMULA else cell


def _grid(heads: Sequence[str], rows: Sequence[Sequence[str]], left: set[int]) -> None:
    """Aligned columns, without rich: it takes longer to import than a million requests to sum."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        cells = (
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        render.out("  ".join(cells).rstrip())


def _plain(text: str | None) -> str:
    """A name that gives the terminal no orders."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text) if text else NEVER


def _count(number: int | None) -> str:
    return NEVER if number is None else f"{number:,}"


def _share(part: int | None, of: int | None) -> str:
    return NEVER if part is None or not of else f"{part / of:.0%}"


def _ms(value_ms: float | None) -> str:
    return NEVER if value_ms is None else spell_ms(value_ms)


def _energy(joules: float | None) -> str:
    if joules is None:
        return NEVER
    wh = joules / JOULES_A_WH
    return f"{wh:,.{0 if wh >= 1000 else 1 if wh >= 10 else 3}f} Wh"


def _bar(value: float, most: float) -> str:
    """To an eighth of a character."""
    eighths = round(value / most * BAR * 8) if most else 0
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
