"""What people read: results on stdout, everything else on stderr."""

from __future__ import annotations

import json

import pytest

from supervisor import render
from supervisor.errors import Error, Exit


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that ``render`` sees; a test sets element 0."""
    now = [1000.0]
    monkeypatch.setattr(render.time, "monotonic", lambda: now[0])
    return now


def test_plain_progress_writes_one_line_per_step_and_period(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with render.progress() as report:
        for done in range(100):
            report("compiling", done, 100)
            clock[0] += 1.0
        report("compiling", 100, 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "compiling 0/100"
    assert lines[1] == "compiling 15/100, about 1 min 25 s left"
    assert lines[-1] == "compiling 100/100"
    assert len(lines) == 1 + 99 // 15 + 1


def test_a_new_kind_of_work_is_said_at_once_and_estimated_from_its_own_start(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with render.progress() as report:
        report("fetching", 0, 0)
        clock[0] += 500
        report("unpacking", 0, 10)
        clock[0] += 20
        report("unpacking", 5, 10)
    assert capsys.readouterr().err.splitlines() == ["fetching", "unpacking 0/10", "unpacking 5/10, about 20 s left"]


def test_an_unknown_total_shows_no_count(capsys: pytest.CaptureFixture[str]) -> None:
    with render.progress() as report:
        report("fetching", 7, 0)
    assert capsys.readouterr().err == "fetching\n"


def test_results_go_to_stdout_and_talk_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    render.out("result")
    render.as_json({"a": [1, None]})
    render.say("talk")
    render.error(Error("broken", exit=Exit.CHILD, hint="mend"))
    out, err = capsys.readouterr()
    assert out.startswith("result\n{")
    assert json.loads(out.partition("\n")[2]) == {"a": [1, None]}
    assert err == "talk\nerror: broken\ntry: mend\n"


def test_a_table_shows_every_cell_and_a_dash_for_none(capsys: pytest.CaptureFixture[str]) -> None:
    render.table(("name", "count"), [("a", 1), ("b", None)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["name", "count"], ["a", "1"], ["b", "–"]]


def test_a_sentence_that_quotes_a_file_gives_the_terminal_no_orders(capsys: pytest.CaptureFixture[str]) -> None:
    render.error(Error("it is '\x1b[31mred\nerror: fake\u202e'", exit=Exit.MODEL, hint="rm \x07"))
    assert capsys.readouterr().err == "error: it is '\\x1b[31mred\\nerror: fake\\u202e'\ntry: rm \\x07\n"
    render.error(Error("a" * 100_000, exit=Exit.MODEL))
    assert len(capsys.readouterr().err) < 5000
