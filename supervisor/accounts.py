"""Reads the ledger's file for the commands: records, one record, sums by day, and what stands beside them.

Every function opens the file read-only for itself, beside a writer that runs; no file is no records. A file that an older llmctl wrote
and none has taken over yet is read as it will be then: a copy in memory is.

Sums come from the table ``days``, so they take as long for a million requests as for a hundred, and know those whose own record is gone.
``since`` and ``until`` are days of this machine's time zone, both of them inside.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import date, datetime, timedelta
from datetime import time as clock
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_type_hints

from supervisor import schema
from supervisor.errors import Error, Exit
from supervisor.record import STATUSES, Record, Run, Status
from supervisor.units import JOULES_A_WH

By = Literal["key", "preset", "model", "day"]
BYS: Final[tuple[By, ...]] = get_args(By)
COUNTED: Final = STATUSES[1:]
"""What a request can end as: a sum has the count of each."""
SHORTEST_ID: Final = 10
"""Characters of an id, ``req_`` among them, that are enough to look for it."""
NEWEST: Final = 256
"""Among so many requests that were admitted last is the one that ended last: no line is longer."""

_BOOLS: Final = tuple(name for name, hint in get_type_hints(Record).items() if hint is bool)
_OF_RECORD: Final = ", ".join(schema.FIELDS)
_SUMMED: Final = ", ".join(
    (
        "sum(requests) AS requests",
        *(f"ifnull(sum(requests) FILTER (WHERE status = '{status}'), 0) AS {status}" for status in COUNTED),
        "sum(begun) AS begun",
        "sum(ttft_ms) / nullif(sum(begun), 0) AS ttft_mean_ms",
        *(f"sum({name}) AS {name}" for name in schema.SUMMED),
    )
)


def records(
    path: Path,
    limit: int | None,
    *,
    preset: str | None = None,
    status: Status | None = None,
    since: date | None = None,
    until: date | None = None,
) -> Iterator[dict[str, Any]]:
    """The last ``limit`` of the records that are so, all for None, newest last: ``seq``, every field of Record, and Run's.

    Raises :class:`Error` (exit code 3) when the file can't be read.
    """
    asked, values = _where(preset=preset, status=status)
    if since is not None:
        asked, values = f"{asked} AND opened_at >= ?", [*values, _begins(since)]
    if until is not None:
        asked, values = f"{asked} AND opened_at < ?", [*values, _begins(until + timedelta(days=1))]
    # From where the last of them begin: sorting them all would keep them all in memory.
    first = f"SELECT min(seq) FROM (SELECT seq FROM requests WHERE {asked} ORDER BY seq DESC LIMIT ?)"
    statement = f"SELECT * FROM records WHERE seq >= ({first}) AND {asked} ORDER BY seq"
    for row in _rows(path, statement, (*values, -1 if limit is None else limit, *values)):
        yield _as_dict(row)


def find(path: Path, what: str, preset: str | None = None) -> list[tuple[Record, Run | None]]:
    """The records that a person means, newest last: by id or its beginning, by the client's id, or ``last``: the one that ended last."""
    asked, values = _where(preset=preset)
    if what == "last":
        newest = f"SELECT * FROM records WHERE {asked} AND status != 'open' ORDER BY seq DESC LIMIT {NEWEST}"
        return _pairs(path, f"SELECT * FROM ({newest}) ORDER BY closed_at DESC, seq DESC LIMIT 1", values)
    meant = "id = ?" if len(what) < SHORTEST_ID else "id >= ? AND id < ? || char(0x10ffff)"
    ids = (what,) if len(what) < SHORTEST_ID else (what, what)
    # Each by its own index. The client's own word may look like an id of ours: both are told then.
    of_id = f"SELECT seq FROM requests WHERE {meant}"
    of_client = "SELECT seq FROM requests WHERE client_id = ?"
    statement = f"SELECT * FROM records WHERE seq IN ({of_id} UNION {of_client}) AND {asked} ORDER BY seq"
    return _pairs(path, statement, (*ids, what, *values))


def before(path: Path, record: Record, limit: int) -> list[Record]:
    """The last ``limit`` requests of its preset that were admitted before it and have ended, newest last."""
    statement = f"""
    SELECT {_OF_RECORD} FROM requests WHERE preset = ? AND seq < (SELECT seq FROM requests WHERE id = ?) AND status != 'open'
    ORDER BY seq DESC LIMIT ?"""
    return [_as_record(row) for row in _rows(path, statement, (record.preset, record.id, limit))][::-1]


def get(path: Path, id: str) -> Record | None:  # noqa: A002  (what the field is called)
    """The record of that id."""
    return next((_as_record(row) for row in _rows(path, f"SELECT {_OF_RECORD} FROM requests WHERE id = ?", (id,))), None)


def sums(
    path: Path,
    by: Sequence[By] = ("preset",),
    since: date | None = None,
    until: date | None = None,
    *,
    preset: str | None = None,
    status: Status | None = None,
) -> list[dict[str, Any]]:
    """The sums of requests that have ended, a row each of what they are summed by, in its order; no ``by`` is one row.

    ``key`` and ``preset`` are in every row, None where it isn't by them; ``key`` is also None where there was none, ``preset`` is empty
    where none was found. Then ``requests``, a count of each status, ``begun`` (those with a first token), ``ttft_mean_ms`` and the sums
    of :data:`schema.SUMMED`, each of what is known, None where nothing is. What the card took while idle is in none of them.
    """
    kept, values = _kept(since, until)
    asked, more = _where(preset=preset, status=status)
    names = list(dict.fromkeys(by))
    grouped = ", ".join(names) or "NULL"  # without any, a sum of nothing has no row either
    statement = f"""
    SELECT {"".join(f"{name}, " for name in names)}{_SUMMED} FROM days WHERE status != '{schema.IDLE}' AND {kept} AND {asked}
    GROUP BY {grouped} ORDER BY {grouped}"""
    found: list[dict[str, Any]] = []
    for row in _rows(path, statement, (*values, *more)):
        found.append({"key": None, "preset": None} | dict(row))
        for name in set(names) & {"key", "model"}:
            found[-1][name] = row[name] or None
    return found


def idle_j(path: Path, since: date | None = None, until: date | None = None) -> float | None:
    """What the card took while nothing was in work; None where nothing measured it."""
    kept, values = _kept(since, until)
    statement = f"SELECT sum(energy_j) AS energy_j FROM days WHERE status = '{schema.IDLE}' AND {kept}"
    return next((row["energy_j"] for row in _rows(path, statement, values)), None)


def turned_away(path: Path, since: date | None = None, until: date | None = None) -> dict[str, int]:
    """Requests refused at the door, before anything of them was read, by code; the most first. They have no record."""
    asked, values = "TRUE", []
    if since is not None:
        asked, values = "minute >= ?", [_begins(since)]
    if until is not None:
        asked, values = f"{asked} AND minute < ?", [*values, _begins(until + timedelta(days=1))]
    statement = f"SELECT code, sum(count) AS count FROM turned_away WHERE {asked} GROUP BY code ORDER BY 2 DESC, 1"
    return {row["code"]: row["count"] for row in _rows(path, statement, values)}


def lost(path: Path, since: date | None = None, until: date | None = None) -> int:
    """Records that could not be kept."""
    kept, values = _kept(since, until)
    return next((row["count"] for row in _rows(path, f"SELECT sum(count) AS count FROM losses WHERE {kept}", values)), None) or 0


def cost(energy_j: float | None, price_per_kwh: float | None) -> float | None:
    """What the energy costs, in the currency of the price; None where either isn't known."""
    return None if energy_j is None or price_per_kwh is None else energy_j / (1e3 * JOULES_A_WH) * price_per_kwh


def _where(**equal: str | None) -> tuple[str, list[Any]]:
    """A condition on columns, those that matter, and its values."""
    asked = {name: value for name, value in equal.items() if value is not None}
    return " AND ".join(f"{name} = ?" for name in asked) or "TRUE", list(asked.values())


def _kept(since: date | None, until: date | None) -> tuple[str, list[Any]]:
    """The same for a column ``day``."""
    ends = {"day >= ?": since, "day <= ?": until}
    asked = {text: day.isoformat() for text, day in ends.items() if day is not None}
    return " AND ".join(asked) or "TRUE", list(asked.values())


def _begins(day: date) -> float:
    """When a day of this machine's time zone begins, in seconds since 1970."""
    return datetime.combine(day, clock()).timestamp()


def _pairs(path: Path, statement: str, values: Sequence[Any]) -> list[tuple[Record, Run | None]]:
    return [(_as_record(row), _as_run(row)) for row in _rows(path, statement, values)]


def _as_dict(row: sqlite3.Row) -> dict[str, Any]:
    return dict(row) | {name: bool(row[name]) for name in _BOOLS}


def _as_record(row: sqlite3.Row) -> Record:
    values: dict[str, Any] = {name: bool(row[name]) if name in _BOOLS else row[name] for name in schema.FIELDS}
    return Record(**values)


def _as_run(row: sqlite3.Row) -> Run | None:
    return None if row["model"] is None else Run(**{name: row[name] for name in schema.RUN_FIELDS})


def _rows(path: Path, statement: str, values: Sequence[Any]) -> Iterator[sqlite3.Row]:
    try:
        with _opened(path) as connection:
            connection.row_factory = sqlite3.Row
            yield from connection.execute(statement, values)
    except FileNotFoundError:
        return
    except sqlite3.Error as exc:
        raise Error(f"the ledger {path} can't be read: {exc}", exit=Exit.CONFIG, hint=f"move {path} away") from exc


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """The file, or what it will be once a llmctl of today has opened it. Raises FileNotFoundError and :class:`sqlite3.Error`."""
    if not path.exists():
        raise FileNotFoundError(path)
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == schema.SCHEMA:
            yield connection
            return
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as copy:
            connection.backup(copy)
            schema.prepare(copy, None)  # refuses a newer one
            yield copy
