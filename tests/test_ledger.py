"""A record is written once, survives a kill, and a disk that takes nothing for a while loses none."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from supervisor import accounts, ledger, ledgerfile, pace, schema
from supervisor.errors import Error, Exit
from supervisor.ledger import Ledger
from supervisor.likeness import Parting
from supervisor.meter import Reading
from supervisor.record import Record, Run
from supervisor.row import Measured
from tests.conftest import until

CHAT = "/v1/chat/completions"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "ledger.sqlite"


@pytest.fixture
def book(path: Path) -> Iterator[Ledger]:
    found = Ledger(path)
    yield found
    found.shut()  # also after a test that did so


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows with every commit that failed; the next try follows quickly."""
    found: list[bool] = []
    commit = Ledger._commit

    def watched(self: Ledger, batch: Any) -> bool:
        if not (done := commit(self, batch)):
            found.append(True)
        return done

    monkeypatch.setattr(ledger, "RETRY_S", 0.005)
    monkeypatch.setattr(ledgerfile, "BUSY_S", 0.0)
    monkeypatch.setattr(Ledger, "_commit", watched)
    return found


RUN = Run(model="m.gguf", model_sha256="ab", engine="b11312", context=8192, slots=2, speculative="mtp")


def rows(path: Path) -> list[dict[str, Any]]:
    return list(accounts.records(path, 100_000))


def closed(path: Path) -> list[dict[str, Any]]:
    return [each for each in rows(path) if each["status"] != "open"]


def said(**figures: Any) -> Any:
    return lambda: Measured(Reading(**figures))


def test_a_row_is_opened_at_admission_and_closed_with_what_was_learnt(book: Ledger, path: Path) -> None:
    row = book.open(CHAT, client="loopback", client_id="mine")
    row.preset, row.stream = "tiny", True
    opened = until(lambda: rows(path))[0]
    assert (opened["id"], opened["preset"], opened["route"], opened["stream"]) == (row.id, "tiny", CHAT, True)
    assert (opened["status"], opened["closed_at"], opened["completion_tokens"]) == ("open", None, None)
    row.status, row.attempts, row.dropped_turns, row.http_status, row.run = "ok", 2, 3, 200, RUN
    row.queue_s, row.load_s, row.up_s, row.ahead, row.wasted_tokens = 0.25, 1.5, 60.0, 4, 7
    gaps = {pace.OFFSET - 1: 99, pace.OFFSET + 7: 1}
    figures: dict[str, Any] = {
        "prompt_tokens": 12,
        "cached_tokens": 4,
        "completion_tokens": 11,
        "prefill_tps": 500.0,
        "decode_tps": 100.0,
        "draft_tokens": 20,
        "draft_accepted": 15,
        "finish_reason": "stop",
        "prefill_ms": 16.0,
        "decode_ms": 110.0,
    }
    reading = Reading(**figures, gaps=gaps, first_s=row.opened_s + 2.0, sent_bytes=1234)
    parting = Parting(prompt_chars=50, shared_chars=40, shared_with="req_0", parted_in="message 2 (user)")
    book.close(row, lambda: Measured(reading, parting))
    found = until(lambda: closed(path))[0]
    assert found["closed_at"] >= found["opened_at"] == opened["opened_at"]
    assert found["total_ms"] >= 0
    assert {key: value for key, value in found.items() if key not in ("seq", "id", "opened_at", "closed_at", "total_ms")} == {
        "preset": "tiny",
        "route": CHAT,
        "stream": True,
        "batch": False,
        "key": None,
        "client": "loopback",
        "client_id": "mine",
        "status": "ok",
        "http_status": 200,
        "error": None,
        "attempts": 2,
        "wasted_tokens": 7,
        "dropped_turns": 3,
        "ahead": 4,
        "queue_ms": 250.0,
        "load_ms": 1500.0,
        "up_ms": 60_000.0,
        "ttft_ms": 2000.0,
        **figures,
        "counted": False,
        "bytes": 1234,
        "energy_j": None,
        "itl_p50_ms": 1000.0,
        "itl_p99_ms": 1000.0,
        "prompt_chars": 50,
        "shared_chars": 40,
        "shared_with": "req_0",
        "parted_in": "message 2 (user)",
        "model": "m.gguf",
        "model_sha256": "ab",
        "engine": "b11312",
        "context": 8192,
        "slots": 2,
        "speculative": "mtp",
    }


def test_a_row_nobody_learnt_anything_of_is_an_error_with_unknown_figures(book: Ledger, path: Path) -> None:
    book.close(book.open(CHAT, "tiny"))
    found = until(lambda: closed(path))[0]
    assert (found["status"], found["prompt_tokens"], found["completion_tokens"], found["wasted_tokens"]) == (
        "error",
        None,
        None,
        None,
    )


@pytest.mark.parametrize("problem", [ValueError("x"), KeyError("x"), OverflowError("x"), RecursionError("x")])
def test_a_reply_that_can_not_be_measured_costs_its_figures_and_no_other_row(
    problem: Exception, book: Ledger, path: Path
) -> None:
    def fail() -> Measured:
        raise problem

    strange, next_one = (book.open(CHAT, "tiny") for _ in range(2))
    strange.status = next_one.status = "ok"
    book.close(strange, fail)
    book.close(next_one, said(completion_tokens=3))
    book.shut()
    assert [(each["status"], each["completion_tokens"]) for each in rows(path)] == [("ok", None), ("ok", 3)]


def test_a_row_is_closed_once(book: Ledger, path: Path) -> None:
    row = book.open(CHAT, "tiny")
    row.status = "cancelled"
    book.close(row)
    row.status = "ok"
    book.close(row)
    book.shut()
    assert len(rows(path)) == sum(each["requests"] for each in accounts.sums(path)) == 1


def test_shut_writes_what_is_left(book: Ledger, path: Path) -> None:
    for _ in range(1000):
        book.close(book.open(CHAT, "tiny"))
    book.shut()
    found = rows(path)
    assert len({each["id"] for each in found}) == 1000
    assert [each["seq"] for each in found] == sorted(each["seq"] for each in found)
    assert not any(thread.name == "ledger" for thread in threading.enumerate())


def test_the_next_start_closes_what_was_left_open_and_sums_it(path: Path) -> None:
    first = Ledger(path)
    first.open(CHAT, "tiny")
    done = first.open(CHAT, "tiny")
    done.status = "ok"
    first.close(done)
    first.shut()
    for _ in range(2):  # once, however often it is started
        Ledger(path).shut()
        assert [each["status"] for each in rows(path)] == ["interrupted", "ok"]
        assert [(each["requests"], each["ok"], each["interrupted"]) for each in accounts.sums(path)] == [(2, 1, 1)]
    assert all(each["closed_at"] for each in rows(path))


def test_a_reader_sees_the_last_rows_beside_the_writer(book: Ledger, path: Path) -> None:
    ids = [book.open(CHAT, "tiny").id for _ in range(20)]
    until(lambda: len(rows(path)) == 20)
    assert [each["id"] for each in accounts.records(path, 3)] == ids[-3:]
    assert list(accounts.records(path, 0)) == []


def test_an_open_transaction_of_a_reader_stops_no_writer(book: Ledger, path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT COUNT(*) FROM requests").fetchone()
        book.open(CHAT, "tiny")
        until(lambda: rows(path))
        assert reader.execute("SELECT COUNT(*) FROM requests").fetchone() == (0,)  # its own snapshot


def test_whoever_reads_along_is_told_every_record_once_and_can_not_end_the_writer(book: Ledger, path: Path) -> None:
    told: list[tuple[Record, Run | None]] = []

    def fail(record: Record, run: Run | None, reading: Reading) -> None:
        raise RuntimeError(record.id)

    book.readers += [fail, lambda record, run, reading: told.append((record, run))]
    row = book.open(CHAT, "tiny")
    row.run = RUN
    book.close(row, said(completion_tokens=3))
    book.shut()
    assert [(record.id, record.completion_tokens, run) for record, run in told] == [(row.id, 3, RUN)]
    assert len(rows(path)) == 1


def test_what_answered_is_kept_once(book: Ledger, path: Path) -> None:
    unnamed = Run(model="m.gguf", engine="b11312", context=8192, slots=2, speculative="off")
    for run in (RUN, unnamed, RUN, unnamed, None):
        row = book.open(CHAT, "tiny")
        row.run = run
        book.close(row)
        until(lambda row=row: [each for each in closed(path) if each["id"] == row.id])  # in transactions of their own
    assert [each["speculative"] for each in rows(path)] == ["mtp", "off", "mtp", "off", None]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM runs").fetchone() == (2,)


def test_energy_comes_after_the_end_and_is_summed_with_the_rest(book: Ledger, path: Path) -> None:
    rows_made = [book.open(CHAT, "tiny") for _ in range(2)]
    for row in rows_made:
        row.status = "ok"
    rows_made[0].energy_j = 1.5
    for row in rows_made:
        book.close(row)
    until(lambda: len(closed(path)) == 2)
    book.add_energy({rows_made[0].id: 2.0, rows_made[1].id: 0.25}, idle_j=10.0)
    book.add_energy({}, idle_j=5.0)
    book.shut()
    assert [each["energy_j"] for each in rows(path)] == [3.5, 0.25]
    assert [each["energy_j"] for each in accounts.sums(path)] == [3.75]
    assert accounts.idle_j(path) == 15.0


def test_a_flood_at_the_door_is_a_row_a_minute(book: Ledger, path: Path) -> None:
    for _ in range(5000):
        book.turn_away("invalid_api_key", "public")
    book.turn_away("host_not_allowed", "loopback")
    book.shut()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM turned_away").fetchone()[0] <= 4  # a minute may end meanwhile
    assert accounts.turned_away(path) == {"invalid_api_key": 5000, "host_not_allowed": 1}
    assert rows(path) == []


def fill(path: Path, count: int, *, age_s: float = 0.0) -> None:
    """Records that were made at once, so many seconds ago."""
    book = Ledger(path)
    for _ in range(count):
        row = book.open(CHAT, "tiny")
        row.opened_at -= age_s
        row.status = "ok"
        book.close(row, said(completion_tokens=2))
    book.shut()


def test_what_is_too_old_goes_and_its_sums_stay(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(path, 1200, age_s=3 * 86_400)
    fill(path, 5)
    before = accounts.sums(path)
    book = Ledger(path, keep_days=2)
    until(lambda: len(rows(path)) == 5)
    book.shut()
    assert accounts.sums(path) == before
    assert sum(each["requests"] for each in before) == 1205


def test_what_is_too_much_goes_oldest_first_and_gives_its_room_back(path: Path) -> None:
    fill(path, 4000)
    last = rows(path)[-1]["id"]
    size = path.stat().st_size
    book = Ledger(path, keep_bytes=size / 4)
    until(lambda: path.stat().st_size < size / 2)
    book.shut()
    found = rows(path)
    assert 0 < len(found) < 2000
    assert found[-1]["id"] == last
    assert sum(each["requests"] for each in accounts.sums(path)) == 4000


def test_an_open_row_is_never_pruned(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "PRUNE_S", 0.01)
    book = Ledger(path, keep_days=0)
    open_one = book.open(CHAT, "tiny")
    book.close(book.open(CHAT, "tiny"))
    until(lambda: accounts.sums(path))
    until(lambda: [each["id"] for each in rows(path)] == [open_one.id])
    book.close(open_one)
    book.shut()


def test_a_removed_file_is_begun_anew(book: Ledger, path: Path) -> None:
    book.close(book.open(CHAT, "tiny"))
    until(lambda: closed(path))
    for file in path.parent.iterdir():
        file.unlink()
    path.parent.rmdir()
    row = book.open(CHAT, "tiny")
    book.close(row)
    assert [each["id"] for each in until(lambda: closed(path))] == [row.id]


WRITER = """
import sys, time
from pathlib import Path
from supervisor.ledger import Ledger
book = Ledger(Path(sys.argv[1]))
while True:
    row = book.open("/x", "tiny")
    print(time.monotonic(), row.id, flush=True)
    row.status = "ok"
    book.close(row)
    time.sleep(0.001)
"""


def test_a_kill_loses_nothing_that_is_older_than_250_ms(path: Path) -> None:
    """A real process, kill -9, no farewell. The clock is the writer's own last line, so a busy machine can't fail it."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        said = [writer.stdout.readline() for _ in range(400)]
        writer.send_signal(signal.SIGKILL)
        said += writer.stdout.read().splitlines()
    assert writer.returncode == -signal.SIGKILL
    lines = [line.split() for line in said if len(line.split()) == 2]
    last_s = float(lines[-1][0])
    old = {name for at, name in lines if last_s - float(at) > 0.250}
    assert len(old) > 50
    kept = {each["id"]: each["status"] for each in rows(path)}
    assert old <= kept.keys()
    Ledger(path).shut()  # and the next start reads on
    assert {each["status"] for each in rows(path)} <= {"ok", "interrupted"}


FIRST_SCHEMA = """
CREATE TABLE requests (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, opened_at REAL NOT NULL, closed_at REAL, preset TEXT NOT NULL, route TEXT NOT NULL,
    stream INTEGER NOT NULL, status TEXT NOT NULL, attempts INTEGER NOT NULL DEFAULT 0, prompt_tokens INTEGER, cached_tokens INTEGER,
    completion_tokens INTEGER, counted INTEGER, prefill_tps REAL, decode_tps REAL, draft_tokens INTEGER, draft_accepted INTEGER,
    finish_reason TEXT, bytes INTEGER
);
INSERT INTO requests (id, opened_at, closed_at, preset, route, stream, status, attempts, completion_tokens)
    VALUES ('req_1', 1.0, 2.0, 'tiny', '/v1/chat/completions', 1, 'ok', 1, 7);
INSERT INTO requests (id, opened_at, preset, route, stream, status) VALUES ('req_2', 3.0, 'tiny', '/v1/chat/completions', 1, 'open');
PRAGMA user_version = 1;
"""
"""What llmctl 0.1.0 wrote before truncation was a policy."""


def test_an_older_file_is_taken_over_with_its_rows(path: Path) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(FIRST_SCHEMA)
    book = Ledger(path)
    row = book.open(CHAT, "tiny")
    row.status, row.dropped_turns = "ok", 4
    book.close(row)
    book.shut()
    found = [(each["id"], each["status"], each["completion_tokens"], each["dropped_turns"]) for each in rows(path)]
    assert found == [("req_1", "ok", 7, None), ("req_2", "interrupted", None, None), (row.id, "ok", None, 4)]
    assert sum(each["requests"] for each in accounts.sums(path)) == 3
    assert sum(each["completion_tokens"] or 0 for each in accounts.sums(path)) == 7
    fresh = path.with_name("fresh.sqlite")
    Ledger(fresh).shut()
    for file in (path, fresh):  # the same table, however it came to be
        with closing(sqlite3.connect(file)) as connection:
            assert connection.execute("PRAGMA user_version").fetchone() == (schema.SCHEMA,)
            names = [each[1] for each in connection.execute("PRAGMA table_info(requests)")]
            assert names == ["seq", "run", *schema.FIELDS]
            assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    Ledger(path).shut()  # and the next start finds nothing to do


def test_an_older_file_is_taken_over_whole_or_not_at_all(path: Path) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"{FIRST_SCHEMA} CREATE TABLE records (in_the_way INTEGER);")
    with pytest.raises(Error, match="records"):
        Ledger(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
        connection.execute("DROP TABLE records")
    Ledger(path).shut()
    assert [each["status"] for each in rows(path)] == ["ok", "interrupted"]


def test_a_newer_schema_is_refused_and_left_as_it_is(path: Path) -> None:
    Ledger(path).shut()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {schema.SCHEMA + 1}")
    with pytest.raises(Error, match=rf"newer llmctl \(schema {schema.SCHEMA + 1}, this one knows {schema.SCHEMA}\)") as raised:
        Ledger(path)
    assert raised.value.exit is Exit.CONFIG
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (schema.SCHEMA + 1,)


@pytest.mark.parametrize("kind", ["no database", "folder", "no folder"])
def test_what_can_not_be_opened_is_one_error(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x" / "ledger.sqlite"
    if kind == "no folder":
        path.parent.write_text("a file")
    else:
        path.parent.mkdir()
        path.mkdir() if kind == "folder" else path.write_bytes(
            b"this is not a database, and long enough to be told from one" * 20
        )
    with pytest.raises(Error) as raised:
        Ledger(path)
    assert raised.value.exit is Exit.CONFIG
    assert str(path) in raised.value.message
    assert not any(thread.name == "ledger" for thread in threading.enumerate())
    if kind == "no database":
        with pytest.raises(Error):
            rows(path)


def test_a_lock_held_by_another_is_waited_for(book: Ledger, path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        row = book.open(CHAT, "tiny")
        row.status = "ok"
        book.close(row)
        assert rows(path) == []
        other.execute("COMMIT")
    until(lambda: [each["status"] for each in rows(path)] == ["ok"])


@pytest.fixture
def stuck(path: Path) -> Iterator[sqlite3.Connection]:
    """Another process holds the file, until it commits."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=30)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield other


def test_writes_that_fail_are_kept_and_written_when_the_disk_takes_them_again(
    failures: list[bool], book: Ledger, path: Path, stuck: sqlite3.Connection
) -> None:
    expected = []
    for number in range(10):
        row = book.open(CHAT, "tiny")
        row.status, row.attempts = "ok", number
        book.close(row)
        expected.append(row.id)
    until(lambda: len(failures) > 3)
    assert rows(path) == []
    stuck.execute("COMMIT")
    until(lambda: [(each["id"], each["status"]) for each in rows(path)] == [(name, "ok") for name in expected])
    book.shut()
    assert book.lost == 0


def test_beyond_the_limit_records_are_lost_and_counted_also_in_the_file(
    failures: list[bool], book: Ledger, path: Path, stuck: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "PENDING_LIMIT", 6)
    told: list[str] = []
    book.readers.append(lambda record, run, reading: told.append(record.id))
    made = [book.open(CHAT, "tiny") for _ in range(10)]
    for row in made:
        book.close(row)
    until(lambda: book.lost == 4)
    stuck.execute("COMMIT")
    until(lambda: len(closed(path)) == 6)
    book.shut()
    assert told == [row.id for row in made]  # metrics lose none
    assert accounts.lost(path) == 4
    assert sum(each["requests"] for each in accounts.sums(path)) == 6


def test_one_that_was_opened_while_there_was_no_room_is_written_when_it_ends(
    failures: list[bool], book: Ledger, path: Path, stuck: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "PENDING_LIMIT", 1)
    first, second = (book.open(CHAT, "tiny") for _ in range(2))
    until(lambda: failures)
    stuck.execute("COMMIT")
    until(lambda: [each["id"] for each in rows(path)] == [first.id])
    book.close(second)
    assert [each["id"] for each in until(lambda: closed(path))] == [second.id]
    book.close(first)
    book.shut()
    assert book.lost == 0


def test_what_is_in_work_while_the_disk_fails_is_no_interrupted_one(failures: list[bool], book: Ledger, path: Path) -> None:
    """The file is opened anew after an error. What was left open before this start is closed then only once, at the start."""
    row = book.open(CHAT, "tiny")
    until(lambda: rows(path))
    with closing(sqlite3.connect(path, isolation_level=None, timeout=30)) as other:
        other.execute("BEGIN IMMEDIATE")
        book.close(book.open(CHAT, "tiny"))
        until(lambda: failures)
        other.execute("COMMIT")
    until(lambda: closed(path))
    assert [each["status"] for each in rows(path)] == ["open", "error"]
    row.status = "ok"
    book.close(row)
    book.shut()
    assert [each["status"] for each in rows(path)] == ["ok", "error"]
    assert [(each["requests"], each["ok"], each["error"], each["interrupted"]) for each in accounts.sums(path)] == [(2, 1, 1, 0)]


FULL = """
import resource, sys, time
from pathlib import Path
from supervisor.ledger import Ledger
path, mode = Path(sys.argv[1]), sys.argv[2]
room = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
if mode == "from the start":
    room(0)
book = Ledger(path)
room(0)
made = []
for _ in range(100):
    row = book.open("/x", "tiny")
    row.status = "ok"
    book.close(row)
    made.append(row.id)
time.sleep(0.5)
assert book.lost == 0
room(resource.RLIM_INFINITY)
book.shut()
print(book.lost, *made)
"""


@pytest.mark.parametrize("mode", ["later", "from the start"])
def test_a_full_disk_keeps_nobody_from_starting_and_loses_nothing(mode: str, path: Path) -> None:
    """A real one: the kernel refuses each write that would make a file larger, as it does on a full disk."""
    done = subprocess.run([sys.executable, "-c", FULL, str(path), mode], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lost, *made = done.stdout.split()
    assert lost == "0"
    assert [(each["id"], each["status"]) for each in rows(path)] == [(name, "ok") for name in made]


@pytest.mark.parametrize("odd", [1 << 80, 1 << 62, [1], float("inf"), float("nan"), -3, 3.25, "three", True])
def test_a_figure_that_can_not_be_is_unknown_and_holds_up_nobody(odd: Any, book: Ledger, path: Path) -> None:
    for tokens in (odd, odd, 5):
        book.close(book.open(CHAT, "tiny"), said(completion_tokens=tokens, finish_reason="\ud800"))
    book.shut()
    assert [row["completion_tokens"] for row in rows(path)] == [None, None, 5]
    assert {row["finish_reason"] for row in rows(path)} == {"?"}
    assert [each["completion_tokens"] for each in accounts.sums(path)] == [5]
    assert book.lost == 0


def test_a_fault_of_ours_costs_its_records_and_none_after_them(book: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "SUM_THESE", "SELECT abs(-9223372036854775808) FROM json_each(?)")  # integer overflow
    book.close(book.open(CHAT, "tiny"))
    until(lambda: book.lost == 1)
    monkeypatch.undo()
    row = book.open(CHAT, "tiny")
    book.close(row)
    assert [each["id"] for each in until(lambda: closed(path))] == [row.id]
    book.shut()
    assert accounts.lost(path) == 1


def test_what_a_shut_can_not_write_is_counted_as_lost(
    failures: list[bool], book: Ledger, path: Path, stuck: sqlite3.Connection
) -> None:
    for _ in range(3):
        book.close(book.open(CHAT, "tiny"))
    book.shut()
    assert book.lost == 3
    stuck.execute("COMMIT")
