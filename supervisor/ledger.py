"""The writer of records: one a request, opened at admission and closed once.

A thread of its own writes, in batches; the request's path only puts a value into a queue. What a reply was made of is read there, too,
since that parses JSON. SQLite in WAL mode keeps what was written when llmctl is killed; a batch waits at most :data:`BATCH_S`, and each
commit is synced, so a power cut costs no more. What a kill left open, the next start closes as ``interrupted``.

While the disk takes nothing, records wait in memory, :data:`PENDING_LIMIT` of them; each beyond it is lost, which is counted, shown
(``llmctl status``, ``usage``, ``/metrics``) and written down as soon as there is something to write to.

The oldest records go when they are older than the user wants them, or take more room. Their sums by day stay (see ``schema``).
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import math
import queue
import random
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from supervisor import schema
from supervisor.errors import Error, Exit
from supervisor.meter import Reading
from supervisor.record import Record, Run, Status
from supervisor.units import MIB

if TYPE_CHECKING:
    from supervisor.likeness import Parting

log = logging.getLogger("llmctl.ledger")

PAGE_CACHE_KIB: Final = 256
"""Of SQLite's writer. It appends and touches the last pages again; the default 2,000 KiB fill up over the first 20,000 records and stay."""
WAL_BYTES: Final = 4 * MIB
"""What the write-ahead log is cut down to once it was written back."""
BATCH_S: Final = 0.1
"""How long the writer gathers before it commits; the promise is 250 ms."""
RETRY_S: Final = 1.0
BUSY_S: Final = 5.0
"""How long another process may hold the file, one that backs it up, before we try again."""
PENDING_LIMIT: Final = 20_000
"""Records kept in memory while the disk takes none; one has about 1 KiB."""
IDLE_S: Final = 60.0
"""Between two words on what an idle card takes."""
PRUNE_S: Final = 3600.0
"""Between two looks for what is too old or too much."""
PRUNED_AT_ONCE: Final = 500
"""Records a step, or pages given back, so that no step holds up a batch: 10 ms."""
SLACK: Final = 0.25
"""So much of the file may be free: it will be filled again."""

Reader = Callable[[Record, Run | None, Reading], None]


class Measured(NamedTuple):
    """What is found out about a request when it has ended, on the writer's thread."""

    reading: Reading
    parting: Parting | None = None


Measure = Callable[[], Measured]


@dataclass(slots=True)
class Row:
    """An open record. Its owner, the proxy, sets what it learns and hands it to :meth:`Ledger.close` once."""

    id: str
    opened_at: float
    opened_s: float
    """The same by the monotonic clock."""
    route: str
    preset: str
    stream: bool = False
    batch: bool = False
    key: str | None = None
    client: str | None = None
    client_id: str | None = None
    status: Status = "error"
    http_status: int | None = None
    error: str | None = None
    attempts: int = 0
    wasted_tokens: int = 0
    ahead: int | None = None
    queue_s: float | None = None
    load_s: float | None = None
    up_s: float | None = None
    run: Run | None = None
    energy_j: float | None = None
    dropped_turns: int | None = None
    closed_at: float | None = None
    """Set by :meth:`Ledger.close`; from there on nobody changes it."""
    closed_s: float = 0.0


@dataclass(slots=True)
class _Batch:
    """What the disk has not yet."""

    opened: dict[str, Row] = field(default_factory=dict)
    closed: list[tuple[Record, Run | None]] = field(default_factory=list)
    energy: list[tuple[str, float]] = field(default_factory=list)
    idle_j: float = 0.0
    turned_away: Counter[tuple[int, str, str]] = field(default_factory=Counter)
    lost: int = 0

    def __bool__(self) -> bool:
        return bool(self.opened or self.closed or self.energy or self.idle_j or self.turned_away or self.lost)

    def __len__(self) -> int:
        return len(self.opened) + len(self.closed) + len(self.energy)


_Change = tuple[Row, Measure | None] | Callable[[_Batch], None]
"""A row that was opened, one that is closed and how it is measured, or what else is to be noted."""

_PRUNE: Final = f"""
DELETE FROM requests WHERE seq IN
    (SELECT seq FROM requests WHERE status != 'open' AND opened_at < ? ORDER BY seq LIMIT {PRUNED_AT_ONCE})"""
_OPEN: Final = f"""
INSERT INTO requests ({", ".join(schema.FIELDS)}) VALUES ({", ".join(f":{name}" for name in schema.FIELDS)})"""
_CLOSE: Final = f"""
INSERT INTO requests (run, {", ".join(schema.FIELDS)}) VALUES (:run, {", ".join(f":{name}" for name in schema.FIELDS)})
ON CONFLICT (id) DO UPDATE SET run = excluded.run, {", ".join(f"{name} = excluded.{name}" for name in schema.FIELDS if name != "id")}"""
_RUN: Final = f"""
INSERT OR IGNORE INTO runs ({", ".join(schema.RUN_FIELDS)}) VALUES ({", ".join(f":{name}" for name in schema.RUN_FIELDS)})"""
_RUN_ID: Final = f"SELECT id FROM runs WHERE {' AND '.join(f'{name} IS :{name}' for name in schema.RUN_FIELDS)}"
_ENERGY: Final = "UPDATE requests SET energy_j = ifnull(energy_j, 0) + ? WHERE id = ?"
_TURNED_AWAY: Final = """
INSERT INTO turned_away VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET count = turned_away.count + excluded.count"""
_LOSS: Final = """
INSERT INTO losses VALUES (date('now', 'localtime'), ?) ON CONFLICT DO UPDATE SET count = losses.count + excluded.count"""


class Ledger:
    """The writer. Made at start, closed at the end; everything in between is off the request's path."""

    def __init__(self, path: Path, *, keep_days: float = math.inf, keep_bytes: float = math.inf) -> None:
        """Open or create the file; single records are kept so long, and while they take no more. Raises :class:`Error` (exit code 3)."""
        self.path = path
        self.lost = 0
        """Records that could not be kept, since the start."""
        self.readers: list[Reader] = []
        """Are told every record on the writer's thread, before it is on disk."""
        self.soon: Callable[[Callable[[_Change], None], _Change], object] = lambda put, change: put(change)
        """How a change reaches the queue, in order. ``serve`` sets the loop's ``call_soon``: a put wakes the writer, which would take
        the interpreter away just while a request is on its way out."""
        self._keep_s, self._keep_bytes = keep_days * 86_400, keep_bytes
        self._changes: queue.SimpleQueue[_Change | None] = queue.SimpleQueue()
        self._turned_away: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._idle_j, self._idle_said_s = 0.0, -math.inf
        self._runs: dict[Run, int] = {}
        self._opened: _Opened | None = None
        try:
            _open(path).connection.close()
        except (OSError, sqlite3.Error) as exc:
            if not _is_full(exc):
                raise Error(f"the ledger {path} can't be opened: {exc}", exit=Exit.CONFIG, hint=f"move {path} away") from exc
            log.error("the ledger %s can't be written: %s; records wait in memory", path, exc)
        self._thread = threading.Thread(target=self._write, name="ledger", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Ledger {self.path} lost={self.lost}>"

    def open(self, route: str, preset: str = "", *, client: str | None = None, client_id: str | None = None) -> Row:
        """Open the row of a request that comes in; whose it is may be set until it is closed."""
        now = time.time()
        name = f"req_{int(now * 1e6):013x}{random.getrandbits(24):06x}"  # in the order of time: the index only grows at its end
        row = Row(name, now, time.monotonic(), route, preset, client=client, client_id=client_id)
        self.soon(self._changes.put, (row, None))
        return row

    def close(self, row: Row, measure: Measure = lambda: Measured(Reading())) -> None:
        """Close a row with what its owner set and ``measure`` says; the writer's thread calls that. A second call changes nothing."""
        if row.closed_at is not None:
            return
        row.closed_at, row.closed_s = time.time(), time.monotonic()
        self.soon(self._changes.put, (row, measure))

    def add_energy(self, joules: Mapping[str, float], idle_j: float = 0.0) -> None:
        """Add to what requests took that are closed already, by their ids, and to what the card took while nothing was in work.

        The latter is written with the former, or once a minute: an idle llmctl shouldn't keep a disk awake.
        """
        self._idle_j += idle_j
        if joules or time.monotonic() - self._idle_said_s >= IDLE_S:
            self._say_energy(joules)

    def _say_energy(self, joules: Mapping[str, float]) -> None:
        energy, idle_j = list(joules.items()), self._idle_j
        self._idle_j, self._idle_said_s = 0.0, time.monotonic()

        def note(batch: _Batch) -> None:
            batch.energy += energy
            batch.idle_j += idle_j

        self.soon(self._changes.put, note)

    def turn_away(self, code: str, client: str) -> None:
        """Count a request that was refused at the door; a flood of them is one row a minute."""
        with self._lock:
            is_first = not self._turned_away
            self._turned_away[code, client] += 1
        if is_first:
            self.soon(self._changes.put, self._note_turned_away)

    def shut(self) -> None:
        """Write what is left and end the thread; what the disk doesn't take now is lost. The loop that ``soon`` is of has ended."""
        self.soon = lambda put, change: put(change)
        if self._idle_j:
            self._say_energy({})
        self._changes.put(None)
        self._thread.join()

    # The writer's thread

    def _write(self) -> None:
        batch = _Batch()
        prune_at_s = time.monotonic()
        more = True
        while more:
            more = self._gather(batch, prune_at_s)
            if batch and not self._commit(batch):
                time.sleep(RETRY_S if more else 0)
            elif more and time.monotonic() >= prune_at_s:
                prune_at_s = time.monotonic() + (0.0 if self._prune() else PRUNE_S)
        self.lost += len(batch.closed)
        self._let_go()

    def _gather(self, batch: _Batch, until_s: float) -> bool:
        """Add the changes of one batch, or return at that time; False when it was the last."""
        if not batch:
            try:
                change = self._changes.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                return True
            if change is None:
                return False
            self._add(batch, change)
            time.sleep(BATCH_S)
        while True:
            try:
                change = self._changes.get_nowait()
            except queue.Empty:
                return True
            if change is None:
                return False
            self._add(batch, change)

    def _add(self, batch: _Batch, change: _Change) -> None:
        if not isinstance(change, tuple):
            change(batch)
            return
        row, measure = change
        if measure is None:
            if len(batch) < PENDING_LIMIT:  # else it is written when it is closed
                batch.opened[row.id] = row
            return
        record, reading = _record(row, measure)
        for reader in self.readers:
            try:
                reader(record, row.run, reading)
            except Exception:  # who listens mustn't end the writer
                log.exception("%s", record.id)
        batch.opened.pop(record.id, None)
        if len(batch) < PENDING_LIMIT:
            batch.closed.append((record, row.run))
        else:
            self._lose(batch)

    def _lose(self, batch: _Batch) -> None:
        if not batch.lost:
            log.error("records are being lost: the disk has taken none for a while")
        self.lost += 1
        batch.lost += 1

    def _note_turned_away(self, batch: _Batch) -> None:
        with self._lock:
            counts, self._turned_away = self._turned_away, Counter()
        minute = int(time.time() // 60) * 60
        for (code, client), count in counts.items():
            batch.turned_away[minute, code, client] += count

    def _connection(self) -> sqlite3.Connection:
        """The file, opened; anew where it was removed or replaced. Raises OSError or :class:`sqlite3.Error`."""
        if self._opened is not None and not self._opened.is_there(self.path):
            log.warning("the ledger %s is gone, a new one is begun", self.path)
            self._let_go()
        if self._opened is None:
            self._opened = _open(self.path)
        return self._opened.connection

    def _let_go(self) -> None:
        self._runs.clear()
        if self._opened is not None:
            with suppress(sqlite3.Error):
                self._opened.connection.close()
            self._opened = None

    def _commit(self, batch: _Batch) -> bool:
        """Write the batch; False when the disk or a lock doesn't let us, and it has to be tried again."""
        try:
            connection = self._connection()
            connection.execute("BEGIN IMMEDIATE")
            self._put(connection, batch)
            connection.execute("COMMIT")
        except (OSError, sqlite3.Error) as exc:
            log.debug("the ledger can't be written: %s", exc)
            self._let_go()
            return False
        except Exception:  # a fault of ours costs these records, and none after them
            log.exception("%d records can't be written", len(batch.closed))
            self._let_go()
            self.lost += len(batch.closed)
            batch.closed.clear()
        _clear(batch)
        return True

    def _put(self, connection: sqlite3.Connection, batch: _Batch) -> None:
        found: list[tuple[str, dict[str, Any]]] = [(_OPEN, _as_open(row)) for row in batch.opened.values()]
        for record, run in batch.closed:
            values = {name: getattr(record, name) for name in schema.FIELDS}
            found.append((_CLOSE, {**values, "run": self._run_id(connection, run)}))
        for statement, values in sorted(found, key=lambda each: str(each[1]["id"])):  # seq is the order of admission
            if not self._put_one(connection, statement, values) and statement is _CLOSE:
                self._lose(batch)
        connection.execute(schema.SUM_THESE, (json.dumps([record.id for record, _ in batch.closed]),))
        for request, joules in batch.energy:
            connection.execute(_ENERGY, (joules, request))
            connection.execute(schema.ADD_ENERGY, (request, joules))
        if batch.idle_j:
            connection.execute(schema.ADD_IDLE, (batch.idle_j,))
        connection.executemany(_TURNED_AWAY, ((*what, count) for what, count in batch.turned_away.items()))
        if batch.lost:
            connection.execute(_LOSS, (batch.lost,))

    @staticmethod
    def _put_one(connection: sqlite3.Connection, statement: str, values: Mapping[str, Any]) -> bool:
        """A value that SQLite can't hold, from an engine that speaks otherwise, mustn't hold up the rest."""
        try:
            connection.execute(statement, values)
        except (sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.IntegrityError, OverflowError, ValueError) as exc:
            log.warning("the record %s can't be written: %s", values["id"], type(exc).__name__)
            return False
        return True

    def _run_id(self, connection: sqlite3.Connection, run: Run | None) -> int | None:
        if run is None:
            return None
        if run not in self._runs:
            values = dataclasses.asdict(run)
            connection.execute(_RUN, values)
            self._runs[run] = connection.execute(_RUN_ID, values).fetchone()[0]
        return self._runs[run]

    def _prune(self) -> bool:
        """Remove some records that are too old or too many, and give some room back; whether there may be more to do."""
        try:
            connection = self._connection()
            size, pages, free = (
                int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_size", "page_count", "freelist_count")
            )
            is_too_large = (pages - free) * size > self._keep_bytes
            before = math.inf if is_too_large else time.time() - self._keep_s
            gone = connection.execute(_PRUNE, (before,)).rowcount
            connection.execute("DELETE FROM turned_away WHERE minute < ?", (time.time() - self._keep_s,))
            gives_back = not gone and free > pages * SLACK
            if gives_back:
                connection.execute(f"PRAGMA incremental_vacuum({PRUNED_AT_ONCE})").fetchall()
                connection.execute("PRAGMA wal_checkpoint").fetchall()  # only then the file is shorter
        except (OSError, sqlite3.Error) as exc:
            log.debug("the ledger can't be pruned: %s", exc)
            self._let_go()
            return False
        return gives_back or gone == PRUNED_AT_ONCE or (is_too_large and gone > 0)


@dataclass(frozen=True, slots=True)
class _Opened:
    """The file as it was opened."""

    connection: sqlite3.Connection
    inode: int

    def is_there(self, path: Path) -> bool:
        """Whether the path still leads to it: what is written to a removed file is gone with it."""
        try:
            return path.stat().st_ino == self.inode
        except OSError:
            return False


def _open(path: Path) -> _Opened:
    """Open or create the file, and make it one of today's. Raises OSError or :class:`sqlite3.Error`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    try:
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA cache_size = -{PAGE_CACHE_KIB}")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        schema.prepare(connection, time.time())
        return _Opened(connection, path.stat().st_ino)
    except BaseException:
        connection.close()
        raise


def _is_full(exc: OSError | sqlite3.Error) -> bool:
    """Whether there is only no room for it now."""
    if isinstance(exc, OSError):
        return exc.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(exc, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def _clear(batch: _Batch) -> None:
    for each in (batch.opened, batch.closed, batch.energy, batch.turned_away):
        each.clear()
    batch.idle_j, batch.lost = 0.0, 0


def _as_open(row: Row) -> dict[str, Any]:
    opened = Record(
        id=row.id,
        opened_at=row.opened_at,
        preset=row.preset,
        route=row.route,
        stream=row.stream,
        batch=row.batch,
        key=row.key,
        client=row.client,
        client_id=row.client_id,
    )
    return {name: getattr(opened, name) for name in schema.FIELDS}


def _record(row: Row, measure: Measure) -> tuple[Record, Reading]:
    """The record of a row that was closed, and what was read off its reply."""
    try:
        reading, parting = measure()
    except Exception as exc:  # an engine that speaks otherwise must not end the writer
        log.warning("%s can't be measured: %s", row.id, type(exc).__name__)
        reading, parting = Reading(), None
    record = Record(
        **{name: getattr(row, name) for name in _OF_ROW},
        **{name: _storable(getattr(reading, name)) for name in _OF_READING},
        **({name: getattr(parting, name) for name in _OF_PARTING} if parting is not None else {}),
        counted=reading.counted,
        wasted_tokens=row.wasted_tokens if row.attempts else None,
        queue_ms=_ms(row.queue_s),
        load_ms=_ms(row.load_s),
        up_ms=_ms(row.up_s),
        ttft_ms=_ms(None if reading.first_s is None else reading.first_s - row.opened_s),
        total_ms=_ms(row.closed_s - row.opened_s),
        itl_p50_ms=reading.itl_ms(0.5),
        itl_p99_ms=reading.itl_ms(0.99),
        bytes=reading.sent_bytes,
    )
    return record, reading


_OF_ROW: Final = (
    *(
        "id",
        "client_id",
        "opened_at",
        "closed_at",
        "key",
        "preset",
        "route",
        "stream",
        "batch",
        "client",
        "status",
        "http_status",
    ),
    *("error", "attempts", "ahead", "energy_j", "dropped_turns"),
)
_OF_READING: Final = (
    *("prefill_ms", "decode_ms", "prompt_tokens", "cached_tokens", "completion_tokens", "prefill_tps", "decode_tps"),
    *("draft_tokens", "draft_accepted", "finish_reason"),
)
_OF_PARTING: Final = ("prompt_chars", "shared_chars", "shared_with", "parted_in")


_WORD: Final = 32
"""Characters of a finish reason: the longest of llama.cpp's has 13."""


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _storable(value: object) -> Any:  # noqa: ANN401
    """The value, or None for one of an engine's that SQLite has no room for."""
    if isinstance(value, str):
        return value[:_WORD].encode("utf-8", "replace").decode()
    fits = isinstance(value, int | float) and not isinstance(value, bool) and -(2.0**63) <= value < 2.0**63
    return value if fits else None
