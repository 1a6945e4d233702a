"""The ledger's SQLite file: opened, made one of today's, written a batch at a time, pruned. One thread at a time has it.

It is opened anew where it was removed or replaced: what is written to a removed file is gone with it. An error lets go of the connection,
so that the next try begins from what is on disk. What an earlier llmctl left open is closed by the first opening only: later on, what is
open is in work.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import logging
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from supervisor import schema
from supervisor.record import Record, Run
from supervisor.row import Row
from supervisor.units import MIB

log = logging.getLogger("llmctl.ledger")

PAGE_CACHE_KIB: Final = 256
"""Of SQLite's writer. It appends and touches the last pages again; the default 2,000 KiB fill up over the first 20,000 records and stay."""
WAL_BYTES: Final = 4 * MIB
"""What the write-ahead log is cut down to once it was written back."""
BUSY_S: Final = 5.0
"""How long another process may hold the file, one that backs it up, before we try again."""
PRUNED_AT_ONCE: Final = 500
"""Records a step, or pages given back, so that no step holds up a batch: 10 ms."""
SLACK: Final = 0.25
"""So much of the file may be free: it will be filled again."""


@dataclass(slots=True)
class Batch:
    """What the disk has not yet."""

    opened: dict[str, Row] = field(default_factory=dict)
    closed: list[tuple[Record, Run | None]] = field(default_factory=list)
    energy: list[tuple[str, float]] = field(default_factory=list)
    """Joules to be added to requests that are on disk."""
    idle_j: float = 0.0
    turned_away: Counter[tuple[int, str, str]] = field(default_factory=Counter)
    """By minute, code and where the client is."""
    lost: int = 0

    def __bool__(self) -> bool:
        return bool(self.opened or self.closed or self.energy or self.idle_j or self.turned_away or self.lost)

    def __len__(self) -> int:
        return len(self.opened) + len(self.closed) + len(self.energy)


_PRUNE: Final = f"""
DELETE FROM requests WHERE seq IN
    (SELECT seq FROM requests WHERE status != 'open' AND opened_at < ? ORDER BY seq LIMIT {PRUNED_AT_ONCE})"""
_COLUMNS: Final = ("run", *schema.FIELDS)
_ID: Final = _COLUMNS.index("id")
_ONE: Final = f"({', '.join('?' * len(_COLUMNS))})"
AT_ONCE: Final = 64
"""Records a statement. Python lets go of its lock for each, and a busy loop gives it back half a millisecond later: one a record would take
as long as all else together."""
_RUN: Final = f"""
INSERT OR IGNORE INTO runs ({", ".join(schema.RUN_FIELDS)}) VALUES ({", ".join(f":{name}" for name in schema.RUN_FIELDS)})"""
_RUN_ID: Final = f"SELECT id FROM runs WHERE {' AND '.join(f'{name} IS :{name}' for name in schema.RUN_FIELDS)}"
_ENERGY: Final = "UPDATE requests SET energy_j = ifnull(energy_j, 0) + ? WHERE id = ?"
_TURNED_AWAY: Final = """
INSERT INTO turned_away VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET count = turned_away.count + excluded.count"""
_LOSS: Final = """
INSERT INTO losses VALUES (date('now', 'localtime'), ?) ON CONFLICT DO UPDATE SET count = losses.count + excluded.count"""


class LedgerFile:
    """The file at a path. Methods raise OSError or :class:`sqlite3.Error` when the disk, a lock or the file doesn't let them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        self._is_first = True
        self._runs: dict[Run, int] = {}

    def __repr__(self) -> str:
        return f"<LedgerFile {self._path} {'closed' if self._connection is None else 'open'}>"

    def open(self) -> sqlite3.Connection:
        """Open or create it, unless that was done, and make it one of today's."""
        if self._connection is not None and not self._is_there():
            log.warning("the ledger %s is gone, a new one is begun", self._path)
            self.close()
        if self._connection is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            try:
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute(f"PRAGMA cache_size = -{PAGE_CACHE_KIB}")
                connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
                schema.prepare(connection, time.time() if self._is_first else None)
                self._inode = self._path.stat().st_ino
            except BaseException:
                connection.close()
                raise
            self._connection, self._is_first = connection, False
        return self._connection

    def close(self) -> None:
        """Let go of it. Twice is harmless."""
        self._runs.clear()
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def commit(self, batch: Batch) -> int:
        """Write a batch, whole or not at all. Returns how many of its records can't be written and never will."""
        connection = self.open()
        connection.execute("BEGIN IMMEDIATE")
        refused = self._put(connection, batch)
        connection.execute("COMMIT")
        return refused

    def prune(self, before: float, most_bytes: float) -> bool:
        """Remove some records that were opened before that time, or the oldest where they take more, and give some room back.

        Returns whether there may be more to do.
        """
        connection = self.open()
        size, pages, free = (
            int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_size", "page_count", "freelist_count")
        )
        is_too_large = (pages - free) * size > most_bytes
        gone = connection.execute(_PRUNE, (math.inf if is_too_large else before,)).rowcount
        connection.execute("DELETE FROM turned_away WHERE minute < ?", (before,))
        gives_back = not gone and free > pages * SLACK
        if gives_back:
            connection.execute(f"PRAGMA incremental_vacuum({PRUNED_AT_ONCE})").fetchall()
            connection.execute("PRAGMA wal_checkpoint").fetchall()  # only then the file is shorter
        return gives_back or gone == PRUNED_AT_ONCE or (is_too_large and gone > 0)

    def _is_there(self) -> bool:
        """Whether the path still leads to it."""
        try:
            return self._path.stat().st_ino == self._inode
        except OSError:
            return False

    def _put(self, connection: sqlite3.Connection, batch: Batch) -> int:
        found = [(None, *_values(row.opened())) for row in batch.opened.values()]
        found += [(self._run_id(connection, run), *_values(record)) for record, run in batch.closed]
        found.sort(key=lambda values: str(values[_ID]))  # seq is the order of admission
        refused, at = 0, 0
        while at < len(found):
            count = min(AT_ONCE, 1 << (len(found) - at).bit_length() - 1)  # few statements, so that SQLite need not parse anew
            refused += _write(connection, found[at : at + count])
            at += count
        connection.execute(schema.SUM_THESE, (json.dumps([record.id for record, _ in batch.closed]),))
        for request, joules in batch.energy:
            connection.execute(_ENERGY, (joules, request))
            connection.execute(schema.ADD_ENERGY, (request, joules))
        if batch.idle_j:
            connection.execute(schema.ADD_IDLE, (batch.idle_j,))
        connection.executemany(_TURNED_AWAY, ((*what, count) for what, count in batch.turned_away.items()))
        if batch.lost:
            connection.execute(_LOSS, (batch.lost,))
        return refused

    def _run_id(self, connection: sqlite3.Connection, run: Run | None) -> int | None:
        if run is None:
            return None
        if run not in self._runs:
            values = dataclasses.asdict(run)
            connection.execute(_RUN, values)
            self._runs[run] = connection.execute(_RUN_ID, values).fetchone()[0]
        return self._runs[run]


def is_full(exc: OSError | sqlite3.Error) -> bool:
    """Whether there is only no room for it now."""
    if isinstance(exc, OSError):
        return exc.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(exc, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def may_pass(exc: OSError | sqlite3.Error) -> bool:
    """Whether it is of the disk or of somebody who holds the file, so that trying again may do; else it is a fault of ours."""
    return isinstance(exc, OSError) or getattr(exc, "sqlite_errorcode", 0) & 0xFF in _OUTER


_OUTER: Final = frozenset(
    (
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY),
        *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB),
        sqlite3.SQLITE_PERM,
    )
)


def _values(record: Record) -> tuple[Any, ...]:
    return tuple(getattr(record, name) for name in schema.FIELDS)


@functools.cache
def _statement(count: int) -> str:
    """What opens or closes so many records."""
    changed = ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS if name != "id")
    return f"INSERT INTO requests ({', '.join(_COLUMNS)}) VALUES {', '.join([_ONE] * count)} ON CONFLICT (id) DO UPDATE SET {changed}"


def _write(connection: sqlite3.Connection, rows: Sequence[tuple[Any, ...]]) -> int:
    """Write these; how many can't be: a value that SQLite can't hold, from an engine that speaks otherwise, mustn't hold up the rest."""
    try:
        connection.execute(_statement(len(rows)), [value for row in rows for value in row])
    except (sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.IntegrityError, OverflowError, ValueError) as exc:
        if len(rows) > 1:
            return sum(_write(connection, [row]) for row in rows)
        log.warning("the record %s can't be written: %s", rows[0][_ID], type(exc).__name__)
        return 1
    return 0
