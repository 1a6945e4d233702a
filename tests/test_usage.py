"""What a person, a script, a spreadsheet and LiteLLM's readers get to see of the ledger."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from supervisor import accounts, paths, spendlog
from supervisor.config import Config
from supervisor.errors import Exit
from supervisor.ledger import Ledger
from supervisor.meter import Reading
from supervisor.record import STATUSES, Record, Run, columns
from supervisor.routes import ROUTES
from supervisor.row import Measured
from tests import console

CHAT = "/v1/chat/completions"
RUN = Run(model="m.gguf", model_sha256="ab" * 32, engine="b11312", context=8192, slots=2, speculative="mtp")
READING = Reading(
    prompt_tokens=12_000, cached_tokens=9_000, completion_tokens=1_500, draft_tokens=200, draft_accepted=150, decode_tps=51.234
)

Usage = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def home(tmp_path: Path) -> paths.Home:
    return paths.home({"LLMCTL_HOME": str(tmp_path)})


@pytest.fixture
def usage(tmp_path: Path) -> Usage:
    return lambda *words: console.llmctl({"LLMCTL_HOME": str(tmp_path)}, "usage", *words)


def add(book: Ledger, preset: str = "tiny", status: str = "ok", reading: Reading = READING, **fields: Any) -> str:
    """A request that ended so; its id."""
    row = book.open(fields.pop("route", CHAT), preset)
    row.opened_at -= 86_400 * fields.pop("days_ago", 0)
    for name, value in {"status": status, "run": RUN, **fields}.items():
        setattr(row, name, value)
    book.close(row, lambda: Measured(reading))
    return row.id


def fill(home: paths.Home) -> None:
    book = Ledger(home.ledger)
    add(book, "turbo", key="anna", energy_j=7200.0)
    add(book, "turbo", key="anna", energy_j=3600.0, days_ago=2)
    add(book, "tiny", status="cancelled", reading=Reading(), energy_j=None)
    book.shut()


def price(home: paths.Home) -> None:
    home.config.mkdir(parents=True, exist_ok=True)
    home.config_file.write_text("price_per_kwh: 0.5\ncurrency: EUR\n")


def parsed(done: subprocess.CompletedProcess[str]) -> list[dict[str, str]]:
    assert (done.returncode, done.stderr) == (0, "")
    return list(csv.DictReader(io.StringIO(done.stdout, newline="")))


def test_a_script_gets_rows_and_what_stands_beside_them(usage: Usage, home: paths.Home) -> None:
    fill(home)
    price(home)
    found = json.loads(usage("--json").stdout)
    tiny, turbo = found["rows"]
    assert (turbo["key"], turbo["preset"], turbo["requests"], turbo["ok"]) == (None, "turbo", 2, 2)
    assert (turbo["prompt_tokens"], turbo["cached_tokens"], turbo["completion_tokens"]) == (24_000, 18_000, 3_000)
    assert (turbo["energy_j"], turbo["cost"]) == (10_800.0, pytest.approx(0.0015))
    assert (tiny["requests"], tiny["cancelled"], tiny["completion_tokens"], tiny["cost"]) == (1, 1, None, None)
    assert (found["currency"], found["price_per_kwh"], found["idle_j"], found["turned_away"], found["lost"]) == (
        "EUR",
        0.5,
        None,
        {},
        0,
    )
    assert usage("--format", "json").stdout == usage("--json").stdout


def test_it_sums_by_what_is_asked_and_of_what_is_asked(usage: Usage, home: paths.Home) -> None:
    fill(home)

    def rows(*words: str) -> list[tuple[Any, ...]]:
        found = json.loads(usage("--json", *words).stdout)["rows"]
        return [(row.get("day"), row["key"], row["preset"], row.get("model"), row["requests"]) for row in found]

    today, ago = (date.today() - timedelta(days=days) for days in (0, 2))
    assert rows("--by", "key") == [(None, None, None, None, 1), (None, "anna", None, None, 2)]
    assert rows("--by", "model", "--by", "preset") == [(None, None, "tiny", "m.gguf", 1), (None, None, "turbo", "m.gguf", 2)]
    assert rows("--by", "day") == [(str(ago), None, None, None, 1), (str(today), None, None, None, 2)]
    assert rows("--since", "2d") == rows("--since", str(today)) == [(None, None, "tiny", None, 1), (None, None, "turbo", None, 1)]
    assert (
        rows("--since", "3d", "--until", str(ago))
        == rows("--until", "2d", "--preset", "turbo")
        == [(None, None, "turbo", None, 1)]
    )
    assert rows("--status", "cancelled") == [(None, None, "tiny", None, 1)]
    assert rows("--preset", "nothing") == []


def test_the_table_has_what_there_is(usage: Usage, home: paths.Home) -> None:
    fill(home)
    price(home)
    lines = usage().stdout.splitlines()
    assert "prompt tokens" in lines[0]
    assert [line.split()[0] for line in lines] == ["preset", "tiny", "turbo", "total"]
    turbo, total = lines[2].split(), lines[3].split()
    assert turbo == ["turbo", "2", "2", "–", "24,000", "75%", "3,000", "75%", "3.000", "Wh", "0.0015", "EUR"]
    assert total[1:4] == ["3", "2", "1"]
    for absent in ("refused", "interrupted", "wasted", "TTFT", "turned away", "could not", "idle"):
        assert absent not in "\n".join(lines)


def test_a_day_has_a_bar(usage: Usage, home: paths.Home) -> None:
    book = Ledger(home.ledger)
    for days_ago, tokens in ((2, 1000), (1, 500), (0, 1)):
        add(book, reading=Reading(completion_tokens=tokens), days_ago=days_ago)
    add(book, status="refused", reading=Reading(), days_ago=3)
    book.shut()
    bars = [line.split()[-1] for line in usage("--by", "day").stdout.splitlines()[1:]]
    assert [bar.count("█") for bar in bars] == [0, 24, 12, 0, 0]
    assert bars[1] == "█" * 24


def test_what_stands_beside_the_table_is_a_line_each(usage: Usage, home: paths.Home) -> None:
    fill(home)
    price(home)
    book = Ledger(home.ledger)
    book.add_energy({}, idle_j=36_000.0)
    for _ in range(1200):
        book.turn_away("invalid_api_key", "public")
    book.shut()
    with closing(sqlite3.connect(home.ledger)) as connection, connection:
        connection.execute("INSERT INTO losses VALUES (date('now', 'localtime'), 12)")
    assert usage().stdout.splitlines()[-3:] == [
        "idle: 10.0 Wh, 0.0050 EUR while nothing was in work",
        "turned away: 1,200 invalid_api_key",
        "12 records could not be kept",
    ]
    assert usage("--preset", "tiny").stdout.splitlines()[-1] == "12 records could not be kept"  # whosever they were
    assert "turned away" not in usage("--preset", "tiny").stdout
    assert "could not" not in usage("--until", "2d").stdout
    assert json.loads(usage("--json").stdout)["lost"] == 12


def test_an_empty_home_says_so(usage: Usage) -> None:
    done = usage()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "no request has ended yet\n")
    assert json.loads(usage("--json").stdout)["rows"] == []
    assert usage("--records", "--json").stdout == ""
    assert (
        parsed(usage("--format", "csv"))
        == parsed(usage("--records", "--format", "csv"))
        == parsed(usage("--format", "litellm"))
        == []
    )


def test_sums_as_csv_are_those_as_json(usage: Usage, home: paths.Home) -> None:
    fill(home)
    price(home)
    words = ("--by", "key", "--by", "day", "--by", "model")
    due = json.loads(usage("--json", *words).stdout)["rows"]
    found = parsed(usage("--format", "csv", *words))
    assert len(found) == len(due) == 3
    for row, expected in zip(found, due, strict=True):
        assert row.pop("currency") == "EUR"
        assert row == {name: "" if expected[name] is None else str(expected[name]) for name in row}
        assert expected.keys() - row.keys() == {"begun", "ttft_ms"}


def test_records_are_one_object_a_line_newest_last(usage: Usage, home: paths.Home) -> None:
    book = Ledger(home.ledger)
    made = [add(book, key="anna", preset=preset) for preset in ("tiny", "turbo") for _ in range(60)]
    book.shut()
    ids = [row["id"] for row in accounts.records(home.ledger, None)]
    assert sorted(ids) == sorted(made)
    rows = [json.loads(line) for line in usage("--records", "--json").stdout.splitlines()]
    assert [row["id"] for row in rows] == ids[-100:]
    assert rows[0].keys() == {"seq", *columns(Record), *columns(Run)}
    assert (rows[0]["key"], rows[0]["stream"], rows[0]["ttft_ms"]) == ("anna", False, None)
    assert usage("--records", "--json", "-n", "0").stdout == ""
    last = usage("--records", "--json", "-n", "3", "--preset", "tiny").stdout.splitlines()
    assert [json.loads(line)["id"] for line in last] == [each for each in ids if each in made[:60]][-3:]
    assert len(parsed(usage("--records", "--format", "csv"))) == 120  # a file is of everything


def test_the_list_fits_a_terminal_whatever_a_preset_is_called(usage: Usage, home: paths.Home) -> None:
    book = Ledger(home.ledger)
    large = Reading(prompt_tokens=1_000_000, cached_tokens=1_000_000, completion_tokens=100_000, decode_tps=12_345.67)
    name = add(book, "a_preset_with_a_rather_long_name_" * 3, status="interrupted", reading=large)
    add(book, "\x1b[31mred", reading=Reading())
    book.open(CHAT, "tiny")
    book.shut()
    done = usage("--records")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 120
    (line,) = (line for line in lines if name in line)
    shown, status = line.split()[3:5]
    assert shown.startswith("a_preset_with")
    assert shown.endswith("…")
    assert status == "interrupted"
    assert "1,000,000" in done.stdout
    assert "\x1b" not in done.stdout
    assert " open " in done.stdout


def test_a_spreadsheet_computes_nothing_that_a_client_sent(usage: Usage, home: paths.Home) -> None:
    book = Ledger(home.ledger)
    texts = ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(A1)", "＝1+1", 'a "quoted", one', "two\r\nlines", "", "plain"]
    for text in texts:
        add(book, client_id=text)
    book.shut()
    found = sorted(row["client_id"] for row in parsed(usage("--records", "--format", "csv")))
    assert found == sorted(f"'{text}" if text[:1] in tuple("=+-@＝") else text for text in texts)
    told = [json.loads(line)["client_id"] for line in usage("--records", "--json").stdout.splitlines()]
    assert sorted(told) == sorted(texts)


SCHEMA = """\

request_id String
call_type String
api_key String=
spend Float=
total_tokens Int=
prompt_tokens Int=
completion_tokens Int=
startTime DateTime
endTime DateTime
request_duration_ms Int?
completionStartTime DateTime?
model String=
model_id String?
model_group String?
custom_llm_provider String?
api_base String?
user String?
metadata Json?
cache_hit String?
cache_key String?
request_tags Json?
team_id String?
organization_id String?
end_user String?
requester_ip_address String?
messages Json?
response Json?
session_id String?
status String?
mcp_namespaced_tool_name String?
agent_id String?
proxy_server_request Json?
"""
"""``model LiteLLM_SpendLogs``, BerriAI/litellm schema.prisma at 029f645: ? may be NULL, = has a default."""
SPEND_LOGS: dict[str, str] = dict(line.split() for line in SCHEMA.split("\n") if line)
KINDS: dict[str, type | tuple[type, ...]] = {"String": str, "Float": float, "Int": int, "DateTime": str, "Json": dict}
THEIR_CALL_TYPES = {
    "/v1/chat/completions": ["acompletion", "completion"],
    "/v1/completions": ["atext_completion", "text_completion"],
    "/v1/embeddings": ["aembedding", "embedding"],
    "/v1/rerank": ["arerank", "rerank"],
    "/v1/responses": ["aresponses", "responses"],
    "/v1/messages": ["anthropic_messages"],
}
"""``API_ROUTE_TO_CALL_TYPES``, litellm/types/utils.py there. Others of ``CallTypes`` that we use:"""
THEIR_OTHERS = {"atext_completion", "pass_through_endpoint"}
THEIR_STATUSES = {"success", "failure"}
"""``SpendLogsPayload.status``, litellm/proxy/_types.py."""
THEIR_PROVIDERS = {"openai", "openai_like", "custom_openai", "text-completion-openai", "llamafile", "hosted_vllm"}
"""Of ``LlmProviders``, litellm/types/utils.py: those for a server of one's own."""


def test_litellms_columns_have_their_names_and_types(usage: Usage, home: paths.Home) -> None:
    price(home)
    book = Ledger(home.ledger)
    for status in STATUSES[1:]:
        add(book, status=status, energy_j=3.6e6, key="anna", reading=READING)
        add(book, status=status, reading=Reading(), run=None)
    book.open(CHAT, "tiny")  # has no end yet: LiteLLM writes a row at the end
    book.shut()
    rows = [json.loads(line) for line in usage("--format", "litellm", "--json").stdout.splitlines()]
    assert len(rows) == 2 * len(STATUSES[1:])
    for row in rows:
        assert {name for name, kind in SPEND_LOGS.items() if kind in KINDS} <= row.keys() <= SPEND_LOGS.keys()
        for name, value in row.items():
            kind = SPEND_LOGS[name]
            assert (value is None and kind.endswith("?")) or type(value) is KINDS[kind.rstrip("?=")], name
        assert datetime.fromisoformat(row["startTime"]) <= datetime.fromisoformat(row["endTime"])
        assert row["startTime"].endswith("Z")
        assert row["status"] in THEIR_STATUSES
        assert row["custom_llm_provider"] in THEIR_PROVIDERS
    first = next(row for row in rows if row["status"] == "success" and row["api_key"])
    second = next(row for row in rows if row["status"] == "success" and not row["api_key"])
    assert (first["api_key"], first["spend"], first["prompt_tokens"], first["total_tokens"]) == ("anna", 0.5, 12_000, 13_500)
    assert (first["model"], first["model_group"], first["status"]) == ("m.gguf", "tiny", "success")
    assert first["metadata"]["additional_usage_values"]["prompt_tokens_details"]["cached_tokens"] == 9_000
    assert first["metadata"]["llmctl"]["currency"] == "EUR"
    assert (second["spend"], second["prompt_tokens"]) == (0.0, 0)  # their columns have no NULL: metadata says what isn't known
    assert (second["metadata"]["llmctl"]["spend"], second["metadata"]["llmctl"]["prompt_tokens"]) == (None, None)
    assert {row["metadata"]["llmctl"]["status"] for row in rows if row["status"] == "failure"} == set(STATUSES[2:])
    flat = parsed(usage("--format", "litellm"))
    assert [row | {"metadata": json.loads(row["metadata"])} for row in flat] == [
        {name: value if isinstance(value, dict) else "" if value is None else str(value) for name, value in row.items()}
        for row in rows
    ]


def test_every_field_of_a_record_is_in_litellms_row(home: paths.Home) -> None:
    book = Ledger(home.ledger)
    add(book, key="anna", client_id="order 7")
    book.shut()
    (record,) = accounts.records(home.ledger, 1)
    row = spendlog.row(record, None, Config())
    kept = row["metadata"]["llmctl"]
    moved = {"seq", "id", "key", "preset", "model", "model_sha256", "prompt_tokens", "completion_tokens"}
    assert {name: value for name, value in record.items() if name not in moved} == {
        name: kept[name] for name in record.keys() - moved
    }


@pytest.mark.parametrize("route", [*ROUTES, "/v1/nothing"])
def test_every_route_has_a_word_of_litellms(route: str) -> None:
    found = spendlog.call_type(route)
    if route in THEIR_CALL_TYPES:
        assert found == THEIR_CALL_TYPES[route][0]
    else:
        assert found in THEIR_OTHERS


@pytest.mark.parametrize("text", ["yesterday", "7", "0d", "-1d", "2026-02-30", "99999999999d", "9999-12-31", "0001-01-01", ""])
@pytest.mark.parametrize("option", ["--since", "--until"])
def test_what_is_no_day_is_said_in_a_sentence(usage: Usage, option: str, text: str) -> None:
    done = usage(option, text)
    assert done.returncode == Exit.USAGE
    first, second = done.stderr.splitlines()
    assert first == f"error: {option} has {text!r}, which is neither a date nor a number of days"
    assert second.startswith(f"try: llmctl usage {option} 7d")


@pytest.mark.parametrize(
    "words",
    [
        ["--by", "moon"],
        ["--status", "fine"],
        ["--format", "xml"],
        ["--records", "--by", "key"],
        ["--format", "litellm", "--by", "key"],
        ["--limit", "3"],
        ["--json", "--format", "csv"],
        ["--json", "--format", "table"],
        ["--since", "2026-02-02", "--until", "2026-02-01"],
    ],
    ids=" ".join,
)
def test_what_does_not_go_together_is_refused(usage: Usage, words: list[str]) -> None:
    done = usage(*words)
    assert (done.returncode, done.stdout) == (Exit.USAGE, "")
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["error:", "try:"]


def test_a_fault_in_the_settings_is_said(usage: Usage, home: paths.Home) -> None:
    home.config.mkdir(parents=True)
    home.config_file.write_text("price_per_kwh: cheap\n")
    done = usage()
    assert done.returncode == Exit.CONFIG
    assert "config.yaml" in done.stderr


def test_what_a_table_can_not_say_is_said_below_it(tmp_path: Path) -> None:
    """A price without a meter, and keys that there aren't."""
    home = {"LLMCTL_HOME": str(tmp_path)}
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.yaml").write_text("price_per_kwh: 0.30\n")
    book = Ledger(tmp_path / "data" / "ledger.sqlite")
    book.close(book.open("/v1/chat/completions", "tiny"))
    book.shut()
    said = console.llmctl(home, "usage", "--by", "key").stdout
    assert "energy and cost aren't known: no card here tells what it takes" in said
    assert "llmctl has no keys yet" in said
    assert "no keys" not in console.llmctl(home, "usage").stdout
