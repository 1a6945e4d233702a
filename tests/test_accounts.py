"""Sums are those of the records, by whatever one sums; one record is found by what a person has of it."""

from __future__ import annotations

import itertools
import json
import os
import random
import sqlite3
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import closing
from datetime import date, timedelta
from pathlib import Path
from typing import Any, get_args

import pytest

from supervisor import accounts, schema
from supervisor.accounts import By
from supervisor.errors import Error, Exit
from supervisor.ledger import Ledger
from supervisor.meter import Reading
from supervisor.record import Record, Run, columns
from supervisor.row import Measured
from tests.conftest import until

CHAT = "/v1/chat/completions"
RUNS = [
    None,
    Run(model="a.gguf", model_sha256="ab", engine="b11312", context=8192, slots=2, speculative="mtp"),
    Run(model="a.gguf", model_sha256="ab", engine="b11312", context=4096, slots=2, speculative="off"),
    Run(model="b.gguf", model_sha256=None, engine="b11312", context=512, slots=1, speculative="off"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "ledger.sqlite"


def add(book: Ledger, preset: str = "tiny", status: str = "ok", reading: Reading = Reading(), **fields: Any) -> str:  # noqa: B008
    """A request that ended so; its id."""
    row = book.open(CHAT, preset)
    for name, value in {"status": status, **fields}.items():
        setattr(row, name, value)
    book.close(row, lambda: Measured(reading))
    return row.id


def maybe(dice: random.Random, most: int) -> int | None:
    return None if dice.random() < 0.4 else dice.randrange(most)


def fill(path: Path, count: int, seed: int) -> None:
    """Requests of every kind over some days, about which much isn't known."""
    dice = random.Random(seed)
    book = Ledger(path)
    for _ in range(count):
        row = book.open(CHAT, dice.choice(["", "tiny", "turbo"]))
        row.opened_at -= dice.randrange(5) * 86_400
        row.key, row.run = dice.choice([None, "anna", "ben"]), dice.choice(RUNS)
        row.status = dice.choice(accounts.COUNTED)
        row.energy_j, row.wasted_tokens, row.attempts = maybe(dice, 100), dice.randrange(9), dice.randrange(3)
        reading = Reading(
            prompt_tokens=maybe(dice, 5000),
            cached_tokens=maybe(dice, 500),
            completion_tokens=maybe(dice, 900),
            draft_tokens=maybe(dice, 90),
            draft_accepted=maybe(dice, 50),
            counted=dice.random() < 0.5,
            decode_ms=maybe(dice, 9000),
            first_s=None if dice.random() < 0.5 else row.opened_s + dice.random(),
            sent_bytes=dice.randrange(9999),
        )
        book.close(row, lambda reading=reading: Measured(reading))
    book.shut()


def naive(rows: list[dict[str, Any]], by: Sequence[By]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The same sums, added up one record after the other."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        day = date.fromtimestamp(row["opened_at"]).isoformat()
        groups[tuple(({**row, "day": day})[name] for name in by)].append(row)

    def total(group: list[dict[str, Any]], name: str) -> Any:
        known = [row[name] for row in group if row[name] is not None]
        return sum(known) if known else None

    found = {}
    for names, group in groups.items():
        ended = Counter(row["status"] for row in group)
        began = [row["ttft_ms"] for row in group if row["ttft_ms"] is not None]
        found[names] = {
            "requests": len(group),
            **{status: ended[status] for status in accounts.COUNTED},
            "begun": len(began),
            "ttft_mean_ms": sum(began) / len(began) if began else None,
            **{name: total(group, name) for name in schema.SUMMED},
        }
    return found


COMBINATIONS = [chosen for count in range(5) for chosen in itertools.combinations(accounts.BYS, count)]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("filled") / "ledger.sqlite"
    fill(found, 600, seed=6)
    return found


@pytest.mark.parametrize("by", COMBINATIONS, ids="-".join)
def test_sums_are_those_of_the_records(filled: Path, by: tuple[By, ...]) -> None:
    due = naive(list(accounts.records(filled, None)), by)
    found = accounts.sums(filled, by)
    assert len(due) == len(found) > 0
    for row in found:
        expected = due[tuple(row[name] for name in by)]
        assert {name: row[name] for name in expected} == pytest.approx(expected)
        assert row.keys() == expected.keys() | {"key", "preset"} | set(by)
        assert all(row[name] is None for name in {"key", "preset"} - set(by))


def test_what_nobody_knows_is_none_and_never_0(path: Path) -> None:
    book = Ledger(path)
    add(book, status="refused")
    book.shut()
    (row,) = accounts.sums(path)
    assert (row["requests"], row["refused"], row["ok"], row["begun"]) == (1, 1, 0, 0)
    unknown = ("prompt_tokens", "cached_tokens", "completion_tokens", "draft_tokens", "energy_j", "ttft_mean_ms", "wasted_tokens")
    assert [row[name] for name in unknown] == [None] * len(unknown)


def test_sums_and_records_are_of_the_same_requests(filled: Path) -> None:
    today = date.today()
    for since, to in ((None, None), (today - timedelta(days=2), None), (None, today - timedelta(days=3)), (today, today)):
        for preset, status in ((None, None), ("tiny", None), (None, "ok"), ("turbo", "error"), ("nothing", None)):
            rows = list(accounts.records(filled, None, preset=preset, status=status, since=since, until=to))  # type: ignore[arg-type]
            found = accounts.sums(filled, (), since, to, preset=preset, status=status)  # type: ignore[arg-type]
            assert sum(row["requests"] for row in found) == len(rows)


def test_records_have_every_declared_field_and_its_type(filled: Path) -> None:
    rows = list(accounts.records(filled, 50))
    assert [row["seq"] for row in rows] == list(range(551, 601))
    for row in rows:
        assert tuple(row) == ("seq", *columns(Record), *columns(Run))
        assert all(isinstance(row[name], bool) for name in ("stream", "batch", "counted"))


def test_the_last_of_those_that_fit_are_listed(filled: Path) -> None:
    every = [row["id"] for row in accounts.records(filled, None, preset="tiny", status="ok")]
    assert len(every) > 10
    assert [row["id"] for row in accounts.records(filled, 7, preset="tiny", status="ok")] == every[-7:]
    assert list(accounts.records(filled, 0)) == []


BORDERS = """
import json, sys, time
from datetime import date, datetime
from pathlib import Path
from supervisor import accounts
from supervisor.ledger import Ledger
path = Path(sys.argv[1])
book = Ledger(path)
for text in ("2026-03-28T23:59:59.9", "2026-03-29T00:00:00.1", "2026-03-29T23:59:59.9", "2026-03-30T00:00:00.1"):
    row = book.open("/x", text)
    row.opened_at = datetime.fromisoformat(text).timestamp()
    row.status = "ok"
    book.close(row)
book.shut()
day = date(2026, 3, 29)
told = {
    "by day": [(row["day"], row["requests"]) for row in accounts.sums(path, ["day"])],
    "since": sum(row["requests"] for row in accounts.sums(path, since=day)),
    "until": sum(row["requests"] for row in accounts.sums(path, until=day)),
    "summed": sorted(row["preset"] for row in accounts.sums(path, since=day, until=day)),
    "listed": [row["preset"] for row in accounts.records(path, None, since=day, until=day)],
}
print(json.dumps(told))
"""


@pytest.mark.parametrize("zone", ["UTC0", "Europe/Berlin", "Pacific/Auckland", "America/Los_Angeles", "XXX-14", "XXX+12"])
def test_a_day_is_one_of_this_machines_time_zone(path: Path, zone: str) -> None:
    """In Berlin that day has 23 hours."""
    done = subprocess.run(
        [sys.executable, "-c", BORDERS, str(path)], env=os.environ | {"TZ": zone}, capture_output=True, text=True, check=True
    )
    of_day = ["2026-03-29T00:00:00.1", "2026-03-29T23:59:59.9"]
    assert json.loads(done.stdout) == {
        "by day": [["2026-03-28", 1], ["2026-03-29", 2], ["2026-03-30", 1]],
        "since": 3,
        "until": 3,
        "summed": of_day,
        "listed": of_day,
    }


def kept(path: Path, count: int) -> None:
    """Wait until so many are on disk: what is written together isn't in the order of admission."""
    until(lambda: len(list(accounts.records(path, None))) == count)


def test_a_record_is_found_by_what_a_person_has_of_it(path: Path) -> None:
    book = Ledger(path)
    first = add(book, client_id="order 7")
    kept(path, 1)
    second = add(book, client_id="order 7", preset="turbo", run=RUNS[1])
    kept(path, 2)
    waits = book.open(CHAT, "turbo", client_id=first)  # a client may send what it likes
    kept(path, 3)

    def ids(what: str, preset: str | None = None) -> list[str]:
        return [record.id for record, _ in accounts.find(path, what, preset)]

    assert ids(second) == [second]
    assert ids(first) == [first, waits.id]
    assert ids(second[: accounts.SHORTEST_ID]) == [first, second, waits.id]  # so many characters are a quarter of an hour
    assert ids(second[: accounts.SHORTEST_ID - 1]) == []
    assert ids("order 7") == [first, second]
    assert ids("order 7", "turbo") == [second]
    assert ids("order") == ids("") == ids("req_%%%%%%%%%%") == []
    assert ids("last") == ids("last", "turbo") == [second]
    assert ids("last", "tiny") == [first]
    assert ids("last", "nothing") == []
    ((record, run),) = accounts.find(path, second)
    assert (record.client_id, record.status, record.stream, run) == ("order 7", "ok", False, RUNS[1])
    assert accounts.find(path, first)[0][1] is None
    assert accounts.get(path, second) == record
    assert accounts.get(path, second[:-1]) is None
    book.close(waits)
    book.shut()


def test_last_is_the_one_that_ended_last(path: Path) -> None:
    book = Ledger(path)
    long = book.open(CHAT, "tiny")
    kept(path, 1)
    add(book)
    until(lambda: [row["status"] for row in accounts.records(path, 2)] == ["open", "ok"])
    book.close(long)
    book.shut()
    assert [record.id for record, _ in accounts.find(path, "last")] == [long.id]


def test_what_was_before_a_record_is_of_its_preset_and_has_ended(path: Path) -> None:
    book = Ledger(path)
    for _ in range(5):
        add(book)
    book.open(CHAT, "tiny")
    add(book, preset="turbo")
    kept(path, 7)
    ended = [row["id"] for row in accounts.records(path, None, preset="tiny", status="ok")]
    asked = add(book)
    kept(path, 8)
    add(book)
    book.shut()
    record = accounts.get(path, asked)
    assert record is not None
    assert [each.id for each in accounts.before(path, record, 3)] == ended[-3:]
    assert [each.id for each in accounts.before(path, record, 100)] == ended


def test_no_lookup_reads_every_record(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By SQLite's own account of what it does: over a million requests a scan is a second."""
    plans: list[str] = []
    ask = accounts._rows

    def explained(path: Path, statement: str, values: Sequence[Any]) -> Any:
        plans.append(" / ".join(row["detail"] for row in ask(path, f"EXPLAIN QUERY PLAN {statement}", values)))
        return ask(path, statement, values)

    ((record, _),) = accounts.find(filled, "last")  # backwards, and only so many
    monkeypatch.setattr(accounts, "_rows", explained)
    accounts.find(filled, record.id)
    accounts.find(filled, record.id[: accounts.SHORTEST_ID])
    accounts.find(filled, "order 7", "tiny")
    accounts.before(filled, record, 5)
    accounts.get(filled, record.id)
    assert len(plans) == 5
    assert all("SEARCH requests" in plan and "SCAN requests" not in plan for plan in plans), plans


def test_what_stands_beside_the_sums(path: Path) -> None:
    book = Ledger(path)
    book.add_energy({}, idle_j=7.0)
    for _ in range(3):
        book.turn_away("invalid_api_key", "public")
    book.turn_away("invalid_api_key", "private")
    book.turn_away("host_not_allowed", "public")
    book.shut()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO losses VALUES (date('now', 'localtime'), 3), ('2001-01-01', 4)")
    today, ago = date.today(), date.today() - timedelta(days=7)
    assert accounts.turned_away(path, ago) == accounts.turned_away(path) == {"invalid_api_key": 4, "host_not_allowed": 1}
    assert accounts.turned_away(path, today + timedelta(days=1)) == accounts.turned_away(path, None, ago) == {}
    assert accounts.idle_j(path, ago, today) == 7.0
    assert accounts.idle_j(path, until=ago) is None
    assert (accounts.lost(path), accounts.lost(path, ago), accounts.lost(path, None, ago)) == (7, 3, 4)
    assert accounts.sums(path) == []  # idle energy is nobody's


def test_energy_costs_its_price() -> None:
    assert accounts.cost(3.6e6, 0.31) == 0.31
    assert accounts.cost(1.8e6, 0.30) == pytest.approx(0.15)
    assert accounts.cost(5.0, 0.0) == 0.0
    assert accounts.cost(None, 0.31) is accounts.cost(1.0, None) is None


def test_without_a_file_there_is_nothing_and_none_is_made(path: Path) -> None:
    assert list(accounts.records(path, 5)) == accounts.sums(path) == accounts.find(path, "last") == []
    assert (accounts.get(path, "req_1"), accounts.idle_j(path), accounts.turned_away(path), accounts.lost(path)) == (
        None,
        None,
        {},
        0,
    )
    assert not path.parent.exists()


WRITER = """
import sys
from pathlib import Path
from supervisor.ledger import Ledger
from supervisor.row import Measured
from supervisor.meter import Reading
book = Ledger(Path(sys.argv[1]))
print("go", flush=True)
while sys.stdin.read(1):
    for _ in range(50):
        row = book.open("/x", "tiny")
        row.status = "ok"
        book.close(row, lambda: Measured(Reading(completion_tokens=3)))
book.shut()
"""


def test_it_reads_beside_a_process_that_writes(path: Path) -> None:
    """At every moment the sums are of closed records, whole."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdout.readline()
        seen = 0
        for round_number in range(1, 9):
            writer.stdin.write("x")
            writer.stdin.flush()

            def all_of_them(count: int = 50 * round_number) -> bool:
                nonlocal seen
                row = next(iter(accounts.sums(path)), {"requests": 0, "completion_tokens": 0})
                assert row["completion_tokens"] == 3 * row["requests"]
                assert row["requests"] >= seen
                seen = row["requests"]
                return seen == count == sum(1 for _ in accounts.records(path, None))

            until(all_of_them)
        writer.stdin.close()
    assert writer.returncode == 0


def test_a_file_of_an_older_llmctl_is_read_and_stays_as_it_is(path: Path) -> None:
    from tests.test_ledger import FIRST_SCHEMA

    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(FIRST_SCHEMA)
    raw = path.read_bytes()
    assert [row["id"] for row in accounts.records(path, 9)] == ["req_1", "req_2"]
    assert [(row["requests"], row["completion_tokens"]) for row in accounts.sums(path)] == [(1, 7)]  # the other one is still open
    assert path.read_bytes() == raw


def test_a_file_that_can_not_be_read_is_an_error_with_a_way_out(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"no database" * 100)
    for ask in (lambda: list(accounts.records(path, 5)), lambda: accounts.sums(path), lambda: accounts.find(path, "last")):
        with pytest.raises(Error) as caught:
            ask()
        assert caught.value.exit is Exit.CONFIG
        assert str(path) in caught.value.message
        assert caught.value.hint


def test_a_file_of_a_newer_llmctl_is_said_to_be_one(path: Path) -> None:
    Ledger(path).shut()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {schema.SCHEMA + 1}")
    with pytest.raises(Error, match="newer llmctl"):
        accounts.sums(path)


def test_by_is_every_name_that_days_are_kept_by() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        schema.prepare(connection, 0.0)
        names = {row[1] for row in connection.execute("PRAGMA table_info(days)") if row[5]}
    assert names == set(get_args(By)) | {"status"}
