"""The writer of records: one a request, opened at admission and closed once.

A thread of its own writes, in batches; the request's path only puts a value into a queue. What a reply was made of is read there, too,
since that parses JSON. SQLite in WAL mode keeps what was written when llmctl is killed; a batch waits at most :data:`BATCH_S`, and each
commit is synced, so a power cut costs no more. What a kill left open, the next start closes as ``interrupted``.

While the disk takes nothing, records wait in memory, :data:`PENDING_LIMIT` of them; each beyond it is lost, which is counted, shown
(``llmctl status``, ``usage``, ``/metrics``) and written down as soon as there is something to write to.

The oldest records go when they are older than the user wants them, or take more room. Their sums by day stay (see ``schema``).
"""

from __future__ import annotations

import logging
import math
import queue
import random
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from supervisor.errors import Error, Exit
from supervisor.ledgerfile import Batch, LedgerFile, is_full, may_pass
from supervisor.meter import Reading
from supervisor.record import Record, Run
from supervisor.row import Measure, Measured, Row

log = logging.getLogger("llmctl.ledger")

BATCH_S: Final = 0.05
"""How long the writer gathers before it commits; the promise is 250 ms."""
RETRY_S: Final = 1.0
PENDING_LIMIT: Final = 20_000
"""Records kept in memory while the disk takes none; one has about 1 KiB."""
IDLE_S: Final = 60.0
"""Between two words on what an idle card takes."""
PRUNE_S: Final = 600.0
"""Between two looks for what is too old or too much."""

Reader = Callable[[Record, Run | None, Reading], None]
_Change = tuple[Row, Measure | None] | Callable[[Batch], None]
"""A row that was opened, one that is closed and how it is measured, or what else is to be noted."""


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
        self._file = LedgerFile(path)
        try:
            self._file.open()  # from here on it is the thread's
        except (OSError, sqlite3.Error) as exc:
            if not is_full(exc):
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

        def note(batch: Batch) -> None:
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
        batch = Batch()
        prune_at_s = time.monotonic()
        more, writing_s = True, 0.0
        while more:
            more = self._gather(batch, prune_at_s, BATCH_S - writing_s)
            begun_s = time.monotonic()
            if batch and not self._commit(batch):
                time.sleep(RETRY_S if more else 0)
            elif more and time.monotonic() >= prune_at_s:
                prune_at_s = time.monotonic() + (0.0 if self._prune() else PRUNE_S)
            writing_s = time.monotonic() - begun_s
        if batch.closed:
            self.lost += len(batch.closed)
            log.error("%d records are lost: the ledger %s can't be written at the end", len(batch.closed), self.path)
        self._file.close()

    def _gather(self, batch: Batch, until_s: float, wait_s: float) -> bool:
        """Add the changes of one batch, or return at that time; False when it was the last.

        After the first one it waits for more, but not for as long as the last batch took to write: they have come meanwhile.
        """
        if not batch:
            try:
                change = self._changes.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                return True
            if change is None:
                return False
            self._add(batch, change)
            time.sleep(max(BATCH_S / 4, wait_s))
        while True:
            try:
                change = self._changes.get_nowait()
            except queue.Empty:
                return True
            if change is None:
                return False
            self._add(batch, change)

    def _add(self, batch: Batch, change: _Change) -> None:
        if not isinstance(change, tuple):
            change(batch)
            return
        row, measure = change
        if measure is None:
            if len(batch) < PENDING_LIMIT:  # else it is written when it is closed
                batch.opened[row.id] = row
            return
        measured = _measured(row, measure)
        record = row.closed(measured)
        for reader in self.readers:
            try:
                reader(record, row.run, measured.reading)
            except Exception:  # who listens mustn't end the writer
                log.exception("%s", record.id)
        batch.opened.pop(record.id, None)
        if len(batch) < PENDING_LIMIT:
            batch.closed.append((record, row.run))
        else:
            if not batch.lost:
                log.error("records are being lost: the disk has taken none for a while")
            self.lost += 1
            batch.lost += 1

    def _note_turned_away(self, batch: Batch) -> None:
        with self._lock:
            counts, self._turned_away = self._turned_away, Counter()
        minute = int(time.time() // 60) * 60
        for (code, client), count in counts.items():
            batch.turned_away[minute, code, client] += count

    def _commit(self, batch: Batch) -> bool:
        """Write the batch; False when the disk or a lock doesn't let us, and it has to be tried again."""
        try:
            refused = self._file.commit(batch)
        except Exception as exc:
            self._file.close()
            if isinstance(exc, OSError | sqlite3.Error) and may_pass(exc):
                log.debug("the ledger can't be written: %s", exc)
                return False
            log.exception("%d records can't be written", len(batch.closed))  # a fault of ours costs these, and none after them
            refused = len(batch.closed)
        self.lost += refused
        for each in (batch.opened, batch.closed, batch.energy, batch.turned_away):
            each.clear()
        batch.idle_j, batch.lost = 0.0, refused  # which is written with the next batch
        return True

    def _prune(self) -> bool:
        """Whether there may be more to prune."""
        try:
            return self._file.prune(time.time() - self._keep_s, self._keep_bytes)
        except (OSError, sqlite3.Error) as exc:
            log.debug("the ledger can't be pruned: %s", exc)
            self._file.close()
            return False


def _measured(row: Row, measure: Measure) -> Measured:
    try:
        return measure()
    except Exception as exc:  # an engine that speaks otherwise must not end the writer
        log.warning("%s can't be measured: %s", row.id, type(exc).__name__)
        return Measured(Reading())
