"""A result on the terminal: the right figures in the right columns, and nothing of a file that gives a terminal orders."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bench import columns, show
from bench.ask import Level
from bench.result import Point, Repetition, Result
from tests import results

PATH = Path("runs/run.json")


def printed(found: Result, capsys: pytest.CaptureFixture[str], path: Path = PATH) -> str:
    show.result(found, path)
    return capsys.readouterr().out


def row(text: str, *begins: str) -> list[str]:
    """The table's row that begins with these words, as words."""
    rows = [line.split() for line in text.splitlines()]
    return next(words for words in rows if words[: len(begins)] == list(begins))


def test_each_point_has_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = results.made()
    text = printed(found, capsys)
    for point in found.points:
        cells = row(text, point.target, *str(point.level).split())[3:]
        p50, p95 = (point.metrics["time_to_first_token"][name] for name in ("p50", "p95"))
        rate = point.metrics["output_token_throughput"]["avg"]
        assert cells[:2] == [f"{p50:.1f}", f"{p95:.1f}"]
        assert cells[5] == f"{rate:.1f}"
        assert cells[9:11] == ["2.50", "75.0"]  # 4 of 160 cached, 45 of 60 drafts right


def test_the_head_says_what_was_measured_and_the_end_where_it_lies(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(results.made(flags=("rep_drift: 12 % slower",))[0], capsys)
    for told in (
        "chat: prompts of 80-240 tokens, answers of 128, 5 repetitions; good is within TTFT 150 ms",
        "tiny: llama.cpp, SmolLM2.gguf (sha256 abababababab), 4 slots",
        "machine: 2 × Some CPU, 24,000 MiB, no card, Linux 6.1",
        "! tiny, 1 user: rep_drift: 12 % slower",
        "the load generator took 3.1 % of one core, 12 µs an event",
        "result: runs/run.json",
        "each request: runs/run.requests.jsonl",
        "page: runs/run.html",
        "next: llmctl compare runs/run.json",
    ):
        assert told in text.splitlines()


def test_a_column_that_nobody_has_is_left_out_with_what_it_means(capsys: pytest.CaptureFixture[str]) -> None:
    whole = printed(results.made()[0], capsys)
    text = printed(results.made(cached_tokens=None, draft_tokens=None)[0], capsys)
    assert "cached %  " in whole
    assert "accepted %  " in whole
    assert "cached" not in text
    assert "accepted" not in text
    assert "VRAM" not in text


def test_a_99th_percentile_is_of_a_hundred_requests() -> None:
    point = results.made()[0].points[0]
    spread = point.metrics["time_to_first_token"]
    tail = next(each for each in columns.COLUMNS if each.name == "TTFT p99 ms")
    for count, shown in ((columns.TAIL - 1, None), (columns.TAIL, spread["p99"])):
        assert tail.of(dataclasses.replace(point, metrics={"time_to_first_token": {**spread, "count": count}})) == shown


def test_the_cards_memory_is_the_servers_where_that_is_told() -> None:
    found, _ = results.made()

    def vram(**gauges: float) -> float | None:
        repetitions = tuple(dataclasses.replace(each, gauges=gauges) for each in found.points[0].repetitions)
        point = dataclasses.replace(found.points[0], repetitions=repetitions)
        (column,) = [
            each for each in columns.columns(dataclasses.replace(found, points=(point,))) if each.name.startswith("VRAM")
        ]
        return column.of(point)

    assert vram(card_mib=900.0) == 900
    assert vram(card_mib=900.0, server_card_mib=700.0) == 700


def test_how_sure_a_mean_is() -> None:
    """Five values with mean 100 and s = √10; Student's t for 4 degrees of freedom, 97.5 %, is 2.776 (any table)."""
    made = [
        Repetition(number=number, began_s=0, duration_s=1, values={"output_token_throughput": value})
        for number, value in enumerate((96.0, 98.0, 100.0, 102.0, 104.0))
    ]
    point = dataclasses.replace(results.made()[0].points[0], repetitions=tuple(made))
    assert columns.half_width_percent(point) == pytest.approx(2.776 * 10**0.5 / 5**0.5, rel=1e-3)
    assert columns.half_width_percent(dataclasses.replace(point, repetitions=tuple(made[:2]))) is None


def test_a_sweep_is_drawn_from_zero(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = results.made()
    lines = [line for line in printed(found, capsys).splitlines() if "█" in line]
    rates = [point.metrics["output_token_throughput"]["avg"] for point in found.points]
    assert [line.count("█") for line in lines] == [round(rate / max(rates) * show.BAR) for rate in rates]
    assert "█" not in printed(results.made(users=(2,))[0], capsys)


def test_a_table_that_is_wider_than_the_terminal_becomes_several() -> None:
    found, _ = results.made()
    (names, _), *more = show._tables(found, 1000)
    assert not more
    parts = show._tables(found, 60)
    assert len(parts) > 1
    assert [name for part, _ in parts for name in part[2:]] == names[2:]
    assert all(part[:2] == ["subject", "level"] for part, _ in parts)
    for part, rows in parts:
        widths = [
            max(len(word) for cell in (title, *column) for word in str(cell).split("\n"))
            for title, *column in zip(part, *rows, strict=True)
        ]
        assert sum(widths) + show.GAP * (len(widths) - 1) <= 60


HOSTILE = "\x1b]0;x\x07\x1b[31m\n[bold]\u202e\ud800"


def test_what_a_file_says_gives_a_terminal_no_orders(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = results.made(names=(HOSTILE, "b"), flags=(f"rep_drift: {HOSTILE}",))
    subjects = tuple(
        dataclasses.replace(each, kind=HOSTILE, file=HOSTILE, version=HOSTILE, engine=HOSTILE) for each in found.manifest.subjects
    )
    machine = dataclasses.replace(found.manifest.machine, cpu=HOSTILE, cards=(HOSTILE,))
    manifest = dataclasses.replace(found.manifest, subjects=subjects, machine=machine, replayed=HOSTILE)
    points = tuple(dataclasses.replace(each, level=Level(name=HOSTILE)) for each in found.points)
    text = printed(dataclasses.replace(found, manifest=manifest, points=points), capsys, Path(f"a{HOSTILE}.json"))
    assert all(line.isprintable() for line in text.split("\n"))
    assert "[bold]" in text
    assert text.encode()


@pytest.mark.parametrize("value", ["<b>", None, float("nan"), float("inf"), 10**400, [], True])
def test_a_number_that_is_none_is_not_known(value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = results.made(names=("t",), users=(1, 2))
    broken = {tag: dict.fromkeys(spread, value) for tag, spread in found.points[0].metrics.items()}
    repetitions = tuple(
        dataclasses.replace(each, values=dict.fromkeys(each.values, value), gauges=dict.fromkeys(each.gauges, value))
        for each in found.points[0].repetitions
    )
    point: Point = dataclasses.replace(found.points[0], metrics=broken, repetitions=repetitions)
    cells = row(printed(dataclasses.replace(found, points=(point, *found.points[1:])), capsys), "1", "user")
    assert set(cells[2:]) == {"–"}


def test_what_failed_and_what_is_not_whole_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = results.made(names=("t",), users=(1,), error="500 no", e2e_ms=None)
    text = printed(dataclasses.replace(found, cut_short=True), capsys)
    assert "t, 1 user: of 20 requests 20 failed" in text.splitlines()
    assert "ended before its end: what is here was measured whole" in text.splitlines()


def test_a_run_of_nothing_is_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert "result: runs/run.json" in printed(dataclasses.replace(results.made()[0], points=()), capsys)
