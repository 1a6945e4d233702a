"""The store of records: one SQLite row a request, opened at admission and closed once.

A thread of its own writes, in batches; the request's path only puts a value into a queue. SQLite in WAL mode with
``synchronous=NORMAL`` keeps what was committed when llmctl is killed; a batch waits at most :data:`BATCH_S`. What a kill left open,
the next start closes as ``interrupted``.
"""

from __future__ import annotations

import logging
import queue
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from supervisor.errors import Error, Exit
from supervisor.meter import Reading

log = logging.getLogger("llmctl.ledger")

SCHEMA: Final = 2
"""Kept in ``PRAGMA user_version``."""
_STEPS: Final = {2: "ALTER TABLE requests ADD COLUMN dropped_turns INTEGER"}
"""What makes an older file one of each schema."""
PAGE_CACHE_KIB: Final = 256
"""Of SQLite's writer. It appends and touches the last pages again; the default 2,000 KiB fill up over the first 20,000 records and stay."""
BATCH_S: Final = 0.05
"""How long the writer gathers before it commits; the promise is 250 ms."""
RETRY_S: Final = 1.0
PENDING_LIMIT: Final = 20_000
"""Changes kept in memory while the disk takes none; beyond that they are counted as lost."""

Status = Literal["open", "ok", "cancelled", "truncated", "refused", "error", "interrupted"]

_CREATE: Final = """
CREATE TABLE IF NOT EXISTS requests (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    opened_at REAL NOT NULL,
    closed_at REAL,
    preset TEXT NOT NULL,
    route TEXT NOT NULL,
    stream INTEGER NOT NULL,
    status TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    prompt_tokens INTEGER,
    cached_tokens INTEGER,
    completion_tokens INTEGER,
    counted INTEGER,
    prefill_tps REAL,
    decode_tps REAL,
    draft_tokens INTEGER,
    draft_accepted INTEGER,
    finish_reason TEXT,
    bytes INTEGER,
    dropped_turns INTEGER
)"""
_OPEN: Final = "INSERT INTO requests (id, opened_at, preset, route, stream, status) VALUES (?, ?, ?, ?, ?, 'open')"
_CLOSE: Final = """
UPDATE requests SET closed_at = ?, status = ?, attempts = ?, prompt_tokens = ?, cached_tokens = ?, completion_tokens = ?, counted = ?,
    prefill_tps = ?, decode_tps = ?, draft_tokens = ?, draft_accepted = ?, finish_reason = ?, bytes = ?,
    dropped_turns = ?
WHERE id = ? AND status = 'open'"""
_SUMS: Final = """
SELECT NULL AS key, preset, COUNT(*) AS requests, SUM(prompt_tokens) AS prompt_tokens, SUM(cached_tokens) AS cached_tokens,
    SUM(completion_tokens) AS completion_tokens, SUM(status = 'ok') AS ok, SUM(status = 'cancelled') AS cancelled,
    SUM(status NOT IN ('ok', 'cancelled')) AS other
FROM requests GROUP BY preset ORDER BY preset"""

_Change = tuple[str, Callable[[], tuple[Any, ...]]]
"""A statement, and what gives its values."""
_Write = tuple[str, tuple[Any, ...]]
"""The same with its values: a reply's last events, from which they are read, are ten times as large, and a disk may stall."""


@dataclass(slots=True)
class Row:
    """An open row. Its owner, the proxy, sets what it learns and hands it to :meth:`Ledger.close` once."""

    id: str
    status: Status = "error"
    attempts: int = 0
    dropped_turns: int | None = None
    """Turns of a dialogue that were left out because it was too long."""


class Ledger:
    """The writer. Made at start, closed at the end; everything in between is off the request's path."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises :class:`Error` (exit code 3) when it can't be used."""
        self.path = path
        self.lost = 0
        self.soon: Callable[[Callable[[_Change], None], _Change], object] = lambda put, change: put(change)
        """How a change reaches the queue, in order. ``serve`` sets the loop's ``call_soon``: a put wakes the writer, which would take
        the interpreter away just while a request is on its way out."""
        self._changes: queue.SimpleQueue[_Change | None] = queue.SimpleQueue()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._connect()) as connection:
                _prepare(connection)
        except (OSError, sqlite3.Error) as exc:
            raise Error(f"the ledger {path} can't be opened: {exc}", exit=Exit.CONFIG, hint=f"move {path} away") from exc
        self._thread = threading.Thread(target=self._write, name="ledger", daemon=True)
        self._thread.start()

    def open(self, preset: str, route: str, *, stream: bool) -> Row:
        """Open the row of a request that is being admitted."""
        row = Row(f"req_{random.getrandbits(64):016x}")
        values = (row.id, time.time(), preset, route, stream)
        self.soon(self._changes.put, (_OPEN, lambda: values))
        return row

    def close(self, row: Row, measure: Callable[[], Reading] = Reading) -> None:
        """Close a row with what its owner set and ``measure`` says; the writer's thread calls that. A second call changes nothing."""
        known = (time.time(), row.status, row.attempts)
        dropped = row.dropped_turns
        self.soon(self._changes.put, (_CLOSE, lambda: (*known, *_measured(row.id, measure), dropped, row.id)))

    def shut(self) -> None:
        """Write what is left and end the thread; what the disk doesn't take now is lost."""
        self._changes.put(None)
        self._thread.join()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=5.0, isolation_level=None)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute(f"PRAGMA cache_size = -{PAGE_CACHE_KIB}")
        return connection

    def _write(self) -> None:
        pending: list[_Write] = []
        with closing(self._connect()) as connection:
            more = True
            while more:
                more = self._gather(pending)
                if not self._commit(connection, pending):
                    time.sleep(RETRY_S if more else 0)
        self.lost += len(pending)

    def _gather(self, pending: list[_Write]) -> bool:
        """Add the changes of one batch; False when that was the last."""
        if not pending:
            change = self._changes.get()
            if change is None:
                return False
            pending.append((change[0], change[1]()))
            time.sleep(BATCH_S)
        while True:
            try:
                change = self._changes.get_nowait()
            except queue.Empty:
                return True
            if change is None:
                return False
            if len(pending) < PENDING_LIMIT:
                pending.append((change[0], change[1]()))
            else:
                self.lost += 1

    def _commit(self, connection: sqlite3.Connection, pending: list[_Write]) -> bool:
        """Write the batch; False when the disk or a lock doesn't let us, and it has to be tried again."""
        try:
            connection.execute("BEGIN IMMEDIATE")
            for statement, values in pending:
                try:
                    connection.execute(statement, values)
                except (sqlite3.ProgrammingError, sqlite3.InterfaceError, OverflowError) as exc:
                    # A value that SQLite can't hold, from an engine that speaks otherwise, mustn't hold up the rest.
                    self.lost += 1
                    log.warning("a record can't be written: %s", exc)
            connection.execute("COMMIT")
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            return False
        pending.clear()
        return True


def _measured(request: str, measure: Callable[[], Reading]) -> tuple[Any, ...]:
    """What was measured, in the order of :data:`_CLOSE`."""
    try:
        found = measure()
    except Exception as exc:  # an engine that speaks otherwise must not end the writer
        log.warning("%s can't be measured: %r", request, exc)
        found = Reading()
    return (
        *(found.prompt_tokens, found.cached_tokens, found.completion_tokens, found.counted, found.prefill_tps, found.decode_tps),
        *(found.draft_tokens, found.draft_accepted, found.finish_reason, found.sent_bytes),
    )


def _prepare(connection: sqlite3.Connection) -> None:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA:
        raise sqlite3.DatabaseError(f"it was written by a newer llmctl (schema {version}, this one knows {SCHEMA})")
    connection.execute("BEGIN IMMEDIATE")  # all of it or nothing: a kill in between mustn't leave a step that can't be done again
    if version:
        for step in range(version + 1, SCHEMA + 1):
            connection.execute(_STEPS[step])
    connection.execute(_CREATE)
    connection.execute(f"PRAGMA user_version = {SCHEMA}")
    connection.execute("UPDATE requests SET status = 'interrupted', closed_at = ? WHERE status = 'open'", (time.time(),))
    connection.execute("COMMIT")


def records(path: Path, limit: int) -> Iterator[dict[str, Any]]:
    """The last ``limit`` rows as dictionaries, newest last. Reads beside a running writer."""
    found = _query(path, f"SELECT * FROM (SELECT * FROM requests ORDER BY seq DESC LIMIT {int(limit)}) ORDER BY seq")
    for row in found:
        yield row | {"stream": bool(row["stream"]), "counted": bool(row["counted"])}


def sums(path: Path) -> Sequence[dict[str, Any]]:
    """Requests and tokens by preset."""
    return _query(path, _SUMS)


def _query(path: Path, statement: str) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute(statement)]
    except sqlite3.Error as exc:
        raise Error(f"the ledger {path} can't be read: {exc}", exit=Exit.CONFIG, hint=f"move {path} away") from exc
