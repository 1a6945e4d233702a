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

from supervisor import ledger
from supervisor.errors import Error, Exit
from supervisor.ledger import Ledger
from supervisor.meter import Reading
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

    def watched(self: Ledger, connection: sqlite3.Connection, pending: list[Any]) -> bool:
        if not (done := commit(self, connection, pending)):
            found.append(True)
        return done

    monkeypatch.setattr(ledger, "RETRY_S", 0.005)
    monkeypatch.setattr(Ledger, "_commit", watched)
    return found


def rows(path: Path) -> list[dict[str, Any]]:
    return list(ledger.records(path, 100_000))


def test_a_row_is_opened_at_admission_and_closed_with_what_was_learnt(book: Ledger, path: Path) -> None:
    row = book.open("tiny", CHAT, stream=True)
    opened = until(lambda: rows(path))[0]
    assert (opened["id"], opened["preset"], opened["route"], opened["stream"]) == (row.id, "tiny", CHAT, True)
    assert (opened["status"], opened["closed_at"], opened["completion_tokens"]) == ("open", None, None)
    row.status, row.attempts, row.dropped_turns = "ok", 2, 3
    book.close(row, lambda: Reading(12, 4, 11, 500.0, 100.0, 20, 15, "stop", sent_bytes=1234))
    closed = until(lambda: [each for each in rows(path) if each["status"] != "open"])[0]
    assert closed["closed_at"] >= closed["opened_at"] == opened["opened_at"]
    assert {key: value for key, value in closed.items() if key not in ("seq", "id", "opened_at", "closed_at")} == {
        "preset": "tiny",
        "route": CHAT,
        "stream": True,
        "status": "ok",
        "attempts": 2,
        "prompt_tokens": 12,
        "cached_tokens": 4,
        "completion_tokens": 11,
        "counted": False,
        "prefill_tps": 500.0,
        "decode_tps": 100.0,
        "draft_tokens": 20,
        "draft_accepted": 15,
        "finish_reason": "stop",
        "bytes": 1234,
        "dropped_turns": 3,
    }


def test_a_row_nobody_learnt_anything_of_is_an_error_with_unknown_figures(book: Ledger, path: Path) -> None:
    book.close(book.open("tiny", CHAT, stream=False))
    found = until(lambda: [each for each in rows(path) if each["status"] != "open"])[0]
    assert (found["status"], found["prompt_tokens"], found["completion_tokens"]) == ("error", None, None)


@pytest.mark.parametrize("problem", [ValueError("x"), KeyError("x"), OverflowError("x"), RecursionError("x")])
def test_a_reply_that_can_not_be_measured_costs_its_figures_and_no_other_row(
    problem: Exception, book: Ledger, path: Path
) -> None:
    def fail() -> Reading:
        raise problem

    strange, next_one = (book.open("tiny", CHAT, stream=True) for _ in range(2))
    strange.status = next_one.status = "ok"
    book.close(strange, fail)
    book.close(next_one, lambda: Reading(completion_tokens=3))
    book.shut()
    assert [(each["status"], each["completion_tokens"]) for each in rows(path)] == [("ok", None), ("ok", 3)]


def test_a_row_is_closed_once(book: Ledger, path: Path) -> None:
    row = book.open("tiny", CHAT, stream=True)
    row.status = "cancelled"
    book.close(row)
    row.status = "ok"
    book.close(row)
    book.shut()
    assert [each["status"] for each in rows(path)] == ["cancelled"]


def test_shut_writes_what_is_left(book: Ledger, path: Path) -> None:
    for _ in range(1000):
        book.close(book.open("tiny", CHAT, stream=True))
    book.shut()
    found = rows(path)
    assert len({each["id"] for each in found}) == 1000
    assert [each["seq"] for each in found] == sorted(each["seq"] for each in found)
    assert not any(thread.name == "ledger" for thread in threading.enumerate())


def test_the_next_start_closes_what_was_left_open(path: Path) -> None:
    first = Ledger(path)
    first.open("tiny", CHAT, stream=True)
    done = first.open("tiny", CHAT, stream=True)
    done.status = "ok"
    first.close(done)
    first.shut()
    Ledger(path).shut()
    assert [each["status"] for each in rows(path)] == ["interrupted", "ok"]
    assert all(each["closed_at"] for each in rows(path))


def test_a_reader_sees_the_last_rows_beside_the_writer(book: Ledger, path: Path) -> None:
    ids = [book.open("tiny", CHAT, stream=True).id for _ in range(20)]
    until(lambda: len(rows(path)) == 20)
    assert [each["id"] for each in ledger.records(path, 3)] == ids[-3:]
    assert list(ledger.records(path, 0)) == []


def test_an_open_transaction_of_a_reader_stops_no_writer(book: Ledger, path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT COUNT(*) FROM requests").fetchone()
        book.open("tiny", CHAT, stream=True)
        until(lambda: rows(path))
        assert reader.execute("SELECT COUNT(*) FROM requests").fetchone() == (0,)  # its own snapshot


def test_sums_are_by_preset(book: Ledger, path: Path) -> None:
    for preset, status, tokens in (("b", "ok", 5), ("a", "ok", 7), ("a", "cancelled", None), ("a", "ok", 1)):
        row = book.open(preset, CHAT, stream=True)
        row.status = status  # type: ignore[assignment]
        found = Reading(prompt_tokens=tokens, cached_tokens=0, completion_tokens=tokens)
        book.close(row, lambda found=found: found)
    book.shut()
    found = ledger.sums(path)
    assert [(each["preset"], each["requests"], each["ok"], each["cancelled"], each["completion_tokens"]) for each in found] == [
        ("a", 3, 2, 1, 8),
        ("b", 1, 1, 0, 5),
    ]


def test_without_a_file_there_are_no_records_and_none_is_made(path: Path) -> None:
    assert rows(path) == []
    assert ledger.sums(path) == []
    assert not path.exists()


WRITER = """
import sys, time
from pathlib import Path
from supervisor.ledger import Ledger
book = Ledger(Path(sys.argv[1]))
while True:
    row = book.open("tiny", "/x", stream=True)
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
    row = book.open("tiny", CHAT, stream=True)
    row.status, row.dropped_turns = "ok", 4
    book.close(row)
    book.shut()
    found = [(each["id"], each["status"], each["completion_tokens"], each["dropped_turns"]) for each in rows(path)]
    assert found == [("req_1", "ok", 7, None), ("req_2", "interrupted", None, None), (row.id, "ok", None, 4)]
    fresh = path.with_name("fresh.sqlite")
    Ledger(fresh).shut()
    for file in (path, fresh):  # the same table, however it came to be
        with closing(sqlite3.connect(file)) as connection:
            assert connection.execute("PRAGMA user_version").fetchone() == (ledger.SCHEMA,)
            names = [each[1] for each in connection.execute("PRAGMA table_info(requests)")]
            assert names[-1] == "dropped_turns"
            assert len(names) == 20
    Ledger(path).shut()  # and the next start finds nothing to do


def test_an_older_file_is_taken_over_whole_or_not_at_all(path: Path) -> None:
    path.parent.mkdir()
    refuse = "CREATE TRIGGER refuse BEFORE UPDATE ON requests BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"{FIRST_SCHEMA} {refuse};")
    with pytest.raises(Error, match="the disk is full"):
        Ledger(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
        connection.execute("DROP TRIGGER refuse")
    Ledger(path).shut()
    assert [each["status"] for each in rows(path)] == ["ok", "interrupted"]


def test_a_newer_schema_is_refused_and_left_as_it_is(path: Path) -> None:
    Ledger(path).shut()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {ledger.SCHEMA + 1}")
    with pytest.raises(Error, match=rf"newer llmctl \(schema {ledger.SCHEMA + 1}, this one knows {ledger.SCHEMA}\)") as raised:
        Ledger(path)
    assert raised.value.exit is Exit.CONFIG
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (ledger.SCHEMA + 1,)


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
        row = book.open("tiny", CHAT, stream=True)
        row.status = "ok"
        book.close(row)
        assert rows(path) == []
        other.execute("COMMIT")
    until(lambda: [each["status"] for each in rows(path)] == ["ok"])


REFUSE = "CREATE TRIGGER refuse BEFORE INSERT ON requests BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"


def test_writes_that_fail_are_kept_and_written_when_the_disk_takes_them_again(
    book: Ledger, path: Path, failures: list[bool]
) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute(REFUSE)
        expected = []
        for number in range(10):
            row = book.open("tiny", CHAT, stream=True)
            row.status, row.attempts = "ok", number
            book.close(row)
            expected.append(row.id)
        until(lambda: len(failures) > 3)
        assert rows(path) == []
        other.execute("DROP TRIGGER refuse")
    until(lambda: [(each["id"], each["status"]) for each in rows(path)] == [(name, "ok") for name in expected])
    book.shut()
    assert book.lost == 0


def test_beyond_the_limit_changes_are_counted_as_lost(
    book: Ledger, path: Path, failures: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "PENDING_LIMIT", 6)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute(REFUSE)
        for _ in range(10):
            book.open("tiny", CHAT, stream=True)
        until(lambda: book.lost == 4)
        other.execute("DROP TRIGGER refuse")
    until(lambda: len(rows(path)) == 6)
    book.shut()


def test_a_value_that_can_not_be_stored_holds_up_nobody_else(book: Ledger, path: Path) -> None:
    for tokens in (1 << 80, [1], 5):
        found = Reading(completion_tokens=tokens)  # type: ignore[arg-type]
        book.close(book.open("tiny", CHAT, stream=True), lambda found=found: found)
    book.shut()
    assert [(row["status"], row["completion_tokens"]) for row in rows(path)] == [("open", None), ("open", None), ("error", 5)]
    assert book.lost == 2


def test_what_a_shut_can_not_write_is_counted_as_lost(book: Ledger, path: Path, failures: list[bool]) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute(REFUSE)
        for _ in range(3):
            book.open("tiny", CHAT, stream=True)
        book.shut()
    assert book.lost == 3
