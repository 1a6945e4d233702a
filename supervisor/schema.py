"""The ledger's tables, and how an older file becomes one of today.

- ``requests``: a row a request, a column a field of :class:`~supervisor.record.Record`; ``seq`` is the order of admission, ``run`` what
  answered it.
- ``runs``: each distinct :class:`~supervisor.record.Run` once. The view ``records`` has both, for whoever asks by hand.
- ``days``: sums by day (of this machine's time zone), key, preset, model and status. They are added to in the transaction that closes a
  request, and stay when the request's own row is pruned. A sum of what is known; NULL where nothing of it is. The status ``idle`` has the
  card's energy while nothing was in work.
- ``turned_away``: requests that were refused at the door, before anything of them was read, summed by minute.
- ``losses``: records that could not be kept.

A file of an older schema is taken over whole or not at all, in one transaction. New columns need no step of their own: those that a table
lacks are added.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from supervisor.record import Record, Run, columns, sql_type

SCHEMA: Final = 3
"""Kept in ``PRAGMA user_version``."""
FIELDS: Final = tuple(columns(Record))
RUN_FIELDS: Final = tuple(columns(Run))
SUMMED: Final = (
    *("counted", "prompt_tokens", "cached_tokens", "completion_tokens", "wasted_tokens", "draft_tokens", "draft_accepted"),
    *("queue_ms", "load_ms", "ttft_ms", "prefill_ms", "decode_ms", "total_ms", "bytes", "energy_j"),
)
"""Fields of a record that ``days`` sums. ``begun`` counts those with a first token: a mean of ``ttft_ms`` needs it."""
IDLE: Final = "idle"
LOCAL_DAY: Final = "date(opened_at, 'unixepoch', 'localtime')"

_RUNS: Final = f"""
CREATE TABLE IF NOT EXISTS runs (id INTEGER PRIMARY KEY, {", ".join(f"{name} {sql_type(Run, name)}" for name in RUN_FIELDS)})"""
_ONE_RUN: Final = f"CREATE UNIQUE INDEX IF NOT EXISTS one_run ON runs ({', '.join(f'ifnull({name}, 0)' for name in RUN_FIELDS)})"
_REQUESTS: Final = f"""
CREATE TABLE IF NOT EXISTS requests (seq INTEGER PRIMARY KEY, run INTEGER REFERENCES runs (id),
    {", ".join(f"{name} {sql_type(Record, name)}" for name in FIELDS)})"""
_DAYS: Final = f"""
CREATE TABLE IF NOT EXISTS days (day TEXT NOT NULL, key TEXT NOT NULL, preset TEXT NOT NULL, model TEXT NOT NULL, status TEXT NOT NULL,
    requests INTEGER NOT NULL DEFAULT 0, begun INTEGER NOT NULL DEFAULT 0, {", ".join(f"{name} NUMERIC" for name in SUMMED)},
    PRIMARY KEY (day, key, preset, model, status)) WITHOUT ROWID"""
TABLES: Final = (
    _RUNS,
    _REQUESTS,
    _DAYS,
    "CREATE TABLE IF NOT EXISTS turned_away (minute INTEGER NOT NULL, code TEXT NOT NULL, client TEXT NOT NULL, count INTEGER NOT NULL, "
    "PRIMARY KEY (minute, code, client)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS losses (day TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID",
)
INDEXES: Final = (
    _ONE_RUN,
    "CREATE UNIQUE INDEX IF NOT EXISTS by_id ON requests (id)",
    "CREATE INDEX IF NOT EXISTS by_client_id ON requests (client_id) WHERE client_id IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS by_preset ON requests (preset, seq)",
    "CREATE INDEX IF NOT EXISTS still_open ON requests (seq) WHERE status = 'open'",
)
_VIEW: Final = f"""
CREATE VIEW records AS
SELECT {", ".join([*(f"requests.{name}" for name in ("seq", *FIELDS)), *(f"runs.{name}" for name in RUN_FIELDS)])}
FROM requests LEFT JOIN runs ON runs.id = requests.run"""

_ADDED: Final = ", ".join(
    f"{name} = coalesce(days.{name} + excluded.{name}, days.{name}, excluded.{name})" for name in ("requests", "begun", *SUMMED)
)
_SUMS: Final = f"""
INSERT INTO days (day, key, preset, model, status, requests, begun, {", ".join(SUMMED)})
SELECT {LOCAL_DAY}, ifnull(key, ''), preset, ifnull(model, ''), status, count(*), count(ttft_ms),
    {", ".join(f"sum({name})" for name in SUMMED)}
FROM records WHERE {{}} GROUP BY 1, 2, 3, 4, 5
ON CONFLICT DO UPDATE SET {_ADDED}"""
SUM_CLOSED: Final = _SUMS.format("status != 'open'")
SUM_THESE: Final = _SUMS.format("id IN (SELECT value FROM json_each(?))")
"""Takes the ids as a JSON array."""
ADD_ENERGY: Final = f"""
INSERT INTO days (day, key, preset, model, status, energy_j)
SELECT {LOCAL_DAY}, ifnull(key, ''), preset, ifnull(model, ''), status, ?2 FROM records WHERE id = ?1 AND status != 'open'
ON CONFLICT DO UPDATE SET energy_j = ifnull(days.energy_j, 0) + excluded.energy_j"""
"""Takes a request's id and joules."""
ADD_IDLE: Final = f"""
INSERT INTO days (day, key, preset, model, status, energy_j) VALUES (date('now', 'localtime'), '', '', '', '{IDLE}', ?)
ON CONFLICT DO UPDATE SET energy_j = ifnull(days.energy_j, 0) + excluded.energy_j"""


def _second(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE requests ADD COLUMN dropped_turns INTEGER")


def _third(connection: sqlite3.Connection) -> None:
    """Many more columns, what answered, and the sums."""
    kept = [name for name in _names(connection, "requests") if name != "counted"]
    connection.execute("ALTER TABLE requests RENAME TO older")
    for statement in TABLES:
        connection.execute(statement)
    names = ", ".join(kept)
    rest = "batch, counted"
    connection.execute(f"INSERT INTO requests ({names}, {rest}) SELECT {names}, 0, ifnull(counted, 0) FROM older")
    connection.execute("DROP TABLE older")
    _remake_view(connection)
    connection.execute(SUM_CLOSED)


_STEPS: Final[Mapping[int, Callable[[sqlite3.Connection], None]]] = MappingProxyType({2: _second, 3: _third})
"""What makes a file of the schema before one of this."""


def prepare(connection: sqlite3.Connection, now: float | None) -> None:
    """Make the file one of today's schema, and close what a kill left open as ``interrupted``.

    ``now`` is in seconds since 1970; without it, what is open stays so, as in a copy that is only read.

    Raises :class:`sqlite3.Error`, also for a file of a newer schema; then nothing was changed.
    """
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA:
        raise sqlite3.DatabaseError(f"it was written by a newer llmctl (schema {version}, this one knows {SCHEMA})")
    if not version:
        connection.execute(
            "PRAGMA auto_vacuum = INCREMENTAL"
        )  # so that pruning gives space back; it must be said before the first table
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("BEGIN IMMEDIATE")
    try:
        for step in range(version + 1, SCHEMA + 1) if version else ():
            _STEPS[step](connection)
        for statement in TABLES:
            connection.execute(statement)
        _add_columns(connection)
        for statement in INDEXES:
            connection.execute(statement)
        _remake_view(connection)
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
        if now is not None:
            _close_open(connection, now)
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    if version and connection.execute("PRAGMA auto_vacuum").fetchone() == (0,):
        with contextlib.suppress(sqlite3.Error):  # it needs as much room as the file has: without it the file only never shrinks
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("VACUUM")


def _close_open(connection: sqlite3.Connection, now: float) -> None:
    ids = "SELECT json_group_array(id) FROM requests WHERE status = 'open'"
    left: str = connection.execute(ids).fetchone()[0]
    connection.execute("UPDATE requests SET status = 'interrupted', closed_at = ? WHERE status = 'open'", (now,))
    connection.execute(SUM_THESE, (left,))


def _remake_view(connection: sqlite3.Connection) -> None:
    connection.execute("DROP VIEW IF EXISTS records")
    connection.execute(_VIEW)


def _add_columns(connection: sqlite3.Connection) -> None:
    for table, names, of in (("requests", FIELDS, Record), ("runs", RUN_FIELDS, Run)):
        there = _names(connection, table)
        for name in names:
            if name not in there:
                connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} {sql_type(of, name)}")
    there = _names(connection, "days")
    for name in SUMMED:
        if name not in there:
            connection.execute(f"ALTER TABLE days ADD COLUMN {name} NUMERIC")


def _names(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
