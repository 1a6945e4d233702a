"""Two results beside each other: a tie is called one, a difference is told with how sure it is, and unlike runs are refused."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import compare, figures, llamabench, result, sides, workload
from bench.ask import Level
from bench.compare import Comparison
from bench.result import Machine, Manifest, Point, Repetition, Result, Subject
from bench.sides import Side
from supervisor import cli
from supervisor.errors import Error, Exit

TTFT, ITL, TPS = figures.HEADLINE
ONE = Level(users=1)
ROWS = Path(__file__).parent / "data" / "llama-bench.jsonl"
MACHINE = Machine(host="0123456789ab", cpu="c", cores=2, memory_mib=1000, kernel="k", cards=("RTX 3070",), driver="570")


def point(
    values: Mapping[str, Sequence[float]], *, target: str = "tiny", level: Level = ONE, flags: tuple[str, ...] = ()
) -> Point:
    count = max(map(len, values.values()))
    repetitions = tuple(
        Repetition(
            number=number,
            began_s=float(number),
            duration_s=1.0,
            values={tag: series[number] for tag, series in values.items() if number < len(series)},
        )
        for number in range(count)
    )
    return Point(target=target, level=level, counts=figures.Counts(4, 0, 0, 0), metrics={}, repetitions=repetitions, flags=flags)


def run(
    *points: Point, created_at: float = 0.0, machine: Machine = MACHINE, subject: Mapping[str, Any] = {}, **fields: Any
) -> Result:
    names = dict.fromkeys(each.target for each in points)
    told: dict[str, Any] = {
        "created_at": created_at,
        "llmctl": "0.1.0",
        "workload": workload.load("chat"),
        "seed": 0,
        "salt": str(created_at),
        "subjects": tuple(Subject(**{"name": name, "kind": "llmctl", **subject}) for name in names),
        "machine": machine,
    }
    return Result(manifest=Manifest(**{**told, **fields}), points=points)


def noisy(factor: float, seed: int, *, count: int = 5, spread: float = 0.01) -> dict[str, list[float]]:
    """Figures of a server that is slower by the factor."""
    draw = random.Random(seed)
    slow = [factor * math.exp(draw.gauss(0, spread)) for _ in range(count)]
    return {TTFT: [200 * each for each in slow], ITL: [10 * each for each in slow], TPS: [95 / each for each in slow]}


def apart(a: Result, b: Result, **options: Any) -> Comparison:
    return compare.compare(sides.pick(a, "a.json"), sides.pick(b, "b.json"), **options)


def test_the_same_twice_is_a_tie_with_its_bound_and_what_would_tell_more() -> None:
    found = apart(run(point(noisy(1, 1))), run(point(noisy(1, 2)), created_at=600.0))
    assert [row.verdict for row in found.rows] == ["tie"] * 3
    bound = max(row.interval.bound for row in found.rows if row.interval)
    assert found.verdict == f"a tie: no figure is more than {bound:.1%} apart (99% sure)"
    needs = [row.to_tell[compare.TELL] for row in found.rows]
    most = max(need for need in needs if need is not None)
    assert most > 5
    assert f"{most} ({most - 5} more) tell a difference of 3% in any of them" in found.advice
    assert not found.worse
    assert found.notes[0].startswith("A and B were measured 10 min 0 s apart; what changed in between no repetition shows")


def test_a_tie_that_says_little_says_so() -> None:
    found = apart(run(point(noisy(1, 1, spread=0.2))), run(point(noisy(1, 2, spread=0.2)), created_at=600.0))
    worst = max((row for row in found.rows if row.interval), key=lambda row: row.interval.bound if row.interval else 0.0)
    assert worst.interval is not None
    assert worst.interval.bound > 0.1
    told = f"{worst.interval.bound:.1%} in {worst.figure.name} at 1 user would not have been seen (99% sure)"
    assert found.verdict == f"a tie, but a coarse one: {told}"


def test_a_slowdown_is_told_with_its_interval() -> None:
    found = apart(run(point(noisy(1, 1))), run(point(noisy(1.1, 2)), created_at=1.0))
    assert [row.verdict for row in found.rows] == ["worse"] * 3
    ttft, _, tps = found.rows
    assert ttft.change == pytest.approx(0.1, abs=0.02)
    assert tps.change == pytest.approx(-0.09, abs=0.02)  # 1 / 1.1
    assert tps.interval is not None
    low, high = 1 - tps.interval.high, 1 - tps.interval.low
    assert f"and {-tps.change:.1%} ({low * 100:.1f} to {high:.1%}) in tok/s at 1 user" in found.verdict
    assert found.verdict.startswith(f"B is {ttft.change:.1%} slower (")
    assert found.verdict.endswith("(99% sure)")
    assert found.advice == ""
    assert found.worse


def test_what_goes_either_way_is_told_either_way() -> None:
    a, b = noisy(1, 1), noisy(1, 2)
    b[TTFT] = [value * 0.5 for value in b[TTFT]]
    b[ITL] = [value * 1.5 for value in b[ITL]]
    found = apart(run(point(a)), run(point(b), created_at=1.0))
    assert [row.verdict for row in found.rows] == ["better", "worse", "tie"]
    slower, faster = found.verdict.split(", but ")
    assert "slower" in slower
    assert "ITL" in slower
    assert "faster" in faster
    assert "TTFT" in faster
    assert found.verdict.endswith("1 of 3 figures are a tie")


def test_a_change_below_one_percent_is_a_tie_however_sure_it_is() -> None:
    quiet = [100.0, 100.01, 99.99, 100.0, 100.01]
    found = apart(run(point({ITL: quiet})), run(point({ITL: [value * 1.005 for value in quiet]}), created_at=1.0))
    assert found.rows[0].interval is not None
    assert found.rows[0].interval.excludes_one
    assert found.rows[0].verdict == "tie"
    assert found.advice == "of repetitions of each, the 5 made tell a difference of 3% in any of them (9 times of 10)"


def test_the_confidence_is_of_all_rows_together() -> None:
    levels = [Level(users=users) for users in (1, 2, 4)]
    first = run(*(point(noisy(1, users), level=level) for users, level in enumerate(levels)))
    second = run(*(point(noisy(1, users + 9), level=level) for users, level in enumerate(levels)), created_at=1.0)
    rows = apart(first, second).rows
    assert [row.level for row in rows] == ["1 user"] * 3 + ["2 users"] * 3 + ["4 users"] * 3
    assert {round(row.interval.confidence, 9) for row in rows if row.interval} == {round(1 - 0.01 / 9, 9)}
    for spelling in ("4", "4 users"):
        (only, *_) = apart(first, second, level=spelling).rows
        assert only.level == "4 users"
        assert only.interval is not None
        assert only.interval.confidence == pytest.approx(1 - 0.01 / 3)
    with pytest.raises(Error, match="there is no level '3' in both; there is: 1 user, 2 users, 4 users"):
        apart(first, second, level="3")


def test_equals_are_called_a_tie_as_often_as_is_stated() -> None:
    """60 times over nine rows at 90 % confidence: beyond 1 in 10 by 3 standard errors of chance it would be no confidence."""
    found = 0
    for seed in range(60):
        levels = [Level(users=users) for users in (1, 2, 4)]
        a = [point(noisy(1, 6 * seed + 2 * n), level=level) for n, level in enumerate(levels)]
        b = [point(noisy(1, 6 * seed + 2 * n + 1), level=level) for n, level in enumerate(levels)]
        found += apart(run(*a), run(*b, created_at=1.0), confidence=0.9).verdict.startswith("a tie")
    assert found / 60 > 0.9 - 3 * math.sqrt(0.9 * 0.1 / 60)


def in_turns(*, factor: float, drift: float) -> Result:
    """A run of two servers while the machine gets slower."""
    a, b = noisy(1, 1), noisy(factor, 2)
    for number in range(5):
        for values in (a, b):
            values[ITL][number] *= (1 + drift) ** number
    only = [{ITL: values[ITL]} for values in (a, b)]
    return run(point(only[0], target="old"), point(only[1], target="new"))


def test_subjects_of_one_run_are_compared_pair_by_pair() -> None:
    (found,) = compare.within(in_turns(factor=1.1, drift=0.2), "run.json")
    assert found.paired
    assert found.rows[0].verdict == "worse"
    assert found.rows[0].change == pytest.approx(0.1, abs=0.02)
    both = in_turns(factor=1.1, drift=0.2)
    named = compare.compare(sides.pick(both, "run.json", "old"), sides.pick(both, "run.json", "new"))
    assert named.rows == found.rows
    assert not any("apart" in note for note in found.notes)
    other = dataclasses.replace(both, manifest=dataclasses.replace(both.manifest, created_at=9.0))
    assert not compare.compare(sides.pick(both, "a", "old"), sides.pick(other, "b", "new")).paired  # drift would be a difference


def test_pairs_are_of_the_same_repetition() -> None:
    both = in_turns(factor=1.0, drift=0.5)
    old, new = both.points
    without = dataclasses.replace(new, repetitions=tuple(each for each in new.repetitions if each.number != 1))
    (found,) = compare.within(dataclasses.replace(both, points=(old, without)), "run.json")
    assert found.rows[0].interval is not None
    assert found.rows[0].interval.n == 4
    assert found.rows[0].verdict == "tie"


def test_further_subjects_share_the_confidence() -> None:
    both = in_turns(factor=1.0, drift=0.0)
    third = dataclasses.replace(both.points[1], target="third")
    three = run(*both.points, third)
    found = compare.within(three, "run.json")
    assert [each.b.subject.name for each in found] == ["new", "third"]
    assert [row.interval.confidence for each in found for row in each.rows if row.interval] == pytest.approx([1 - 0.01 / 2] * 2)


def test_too_few_repetitions_give_no_verdict() -> None:
    two = {tag: values[:2] for tag, values in noisy(1, 1).items()}
    found = apart(run(point(two)), run(point(noisy(2, 2)), created_at=1.0))
    assert {row.verdict for row in found.rows} == {"unknown"}
    assert found.rows[0].change == pytest.approx(1.0, abs=0.05)
    assert found.verdict == "no verdict: an interval needs 3 repetitions of each"
    assert not found.worse


A = run(point(noisy(1, 1)))


def other(**changes: Any) -> Result:
    return run(point(noisy(1, 2)), created_at=1.0, **changes)


@pytest.mark.parametrize(
    ("b", "said"),
    [
        (other(workload=workload.load("rag")), "A and B were asked for different work: chat: prompts of "),
        (other(replayed="abc"), "A and B replay different traces: none; and abc"),
        (
            other(machine=dataclasses.replace(MACHINE, host="ffff56789ab")),
            "A and B ran on different machines: c, RTX 3070, 01234567; and c, RTX 3070, ffff5678",
        ),
    ],
)
def test_unlike_runs_are_refused_or_compared_with_a_word(b: Result, said: str) -> None:
    with pytest.raises(Error, match=said) as caught:
        apart(A, b)
    assert caught.value.exit is Exit.USAGE
    assert "--anyway" in caught.value.hint
    found = apart(A, b, anyway=True)
    assert found.notes[0].startswith(said)


def test_levels_and_repetitions_may_differ_where_something_is_common() -> None:
    asked = workload.changed(workload.load("chat"), concurrency=("1", "8"), repetitions=9)
    b = run(point(noisy(1, 2, count=9)), point(noisy(1, 3), level=Level(users=8)), created_at=1.0, workload=asked)
    assert {row.level for row in apart(A, b).rows} == {"1 user"}
    with pytest.raises(Error, match="no level in common: A has 1 user; B has 1/s"):
        apart(A, run(point(noisy(1, 2), level=Level(rate=1.0)), created_at=1.0), anyway=True)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (lambda: apart(A, A), "A and B are the same: tiny in a.json"),
        (lambda: sides.pick(in_turns(factor=1, drift=0), "run.json"), "run.json measures several: old, new"),
        (lambda: sides.pick(A, "a.json", "big"), "a.json measures no 'big'; there is: tiny"),
        (lambda: compare.within(A, "a.json"), "a.json measures tiny alone"),
        (lambda: apart(A, run(point({"goodput": [1.0]}), created_at=1.0)), "no figure in common"),
        (lambda: apart(A, llamabench.read(ROWS.read_text(), "x"), anyway=True), "one of them is llama-bench's"),
    ],
)
def test_what_cannot_be_compared_is_said_so(mistake: Callable[[], object], said: str) -> None:
    with pytest.raises(Error, match=said) as caught:
        mistake()
    assert caught.value.exit is Exit.USAGE
    assert caught.value.hint


def test_what_differs_is_told_flag_by_flag() -> None:
    argv = ("/a/llama-server", "--port", "8001", "-m", "/a/x.gguf", "-ngl", "-1", "--flash-attn", "on", "--no-mmap")
    later = ("/b/llama-server", "--port", "9001", "-m", "/b/x.gguf", "-ngl", "20", "--flash-attn", "on", "--mlock")
    a = run(point(noisy(1, 1)), subject={"argv": argv, "sha256": "a" * 64, "engine": "b11312", "slots": 4})
    b = run(
        *(point(noisy(1, 2)),),
        created_at=1.0,
        seed=7,
        machine=dataclasses.replace(MACHINE, driver="575"),
        subject={"argv": later, "sha256": "b" * 64, "engine": "b11313", "slots": 4},
    )
    assert [(each.name, each.a, each.b) for each in apart(a, b).differs] == [
        ("engine", "b11312", "b11313"),
        ("sha256", "a" * 12, "b" * 12),
        ("-ngl", "-1", "20"),
        ("--no-mmap", "on", ""),
        ("driver", "570", "575"),
        ("seed", "0", "7"),
        ("--mlock", "", "on"),
    ]


@pytest.mark.parametrize(("clock", "differs"), [(1515.0, []), (1800.0, [("clock sm_mhz", "1500 MHz", "1800 MHz")])])
def test_clocks_differ_by_more_than_a_step(clock: float, differs: list[tuple[str, str, str]]) -> None:
    def at(mhz: float, created_at: float) -> Result:
        made = point(noisy(1, 1))
        seen = tuple(dataclasses.replace(each, gauges={"sm_mhz": mhz}) for each in made.repetitions)
        return run(dataclasses.replace(made, repetitions=seen), created_at=created_at)

    found = apart(at(1500.0, 0.0), at(clock, 1.0)).differs
    assert [(each.name, each.a, each.b) for each in found] == differs


def test_flags_are_repeated_with_whose_they_are() -> None:
    b = run(point(noisy(1, 2), flags=("high_variance: ITL is spread by 9%",)), created_at=1.0)
    assert apart(A, b).flags == ("high_variance in B at 1 user: ITL is spread by 9%",)


def test_llama_benchs_rows_are_compared_with_each_other() -> None:
    text = ROWS.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    for row in lines:
        row["n_ubatch"], row["test_time"] = 256, "2026-12-01T05:51:27Z"
        row["samples_ns"] = [each * 10 for each in row["samples_ns"]]
    slower = llamabench.read("\n".join(map(json.dumps, lines)), "b")
    a = sides.pick(llamabench.read(text, "a"), "a")
    found = compare.compare(a, sides.pick(slower, "b"), confidence=0.9)
    assert [row.level for row in found.rows] == ["pp64", "tg16", "pp64 @ d256", "tg16 @ d256"]
    assert [round(row.change, 3) for row in found.rows] == [-0.9] * 4
    assert not found.paired
    assert [(each.name, each.a, each.b) for each in found.differs] == [("n_ubatch", "512", "256")]


Llmctl = Callable[..., int]


@pytest.fixture
def llmctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Llmctl:
    """Runs a command line in this process; its exit code."""
    monkeypatch.setenv("LLMCTL_HOME", str(tmp_path))

    def go(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["llmctl", *words])
        try:
            cli.main()
        except SystemExit as exc:
            return int(exc.code or 0)
        return 0

    return go


def test_the_command_finds_results_by_name_and_shows_all_of_it(
    llmctl: Llmctl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data" / "bench"
    result.write(A, [], "", folder / "before.json")
    slower = run(point(noisy(1.1, 2), flags=("rep_drift: it drifts",)), created_at=90.0, seed=7)
    result.write(slower, [], "", tmp_path / "after.json")
    assert llmctl("compare", "before", str(tmp_path / "after.json")) == 0
    shown = capsys.readouterr().out
    for word in (
        "B is ",
        " slower (",
        "TTFT",
        "worse",
        "1 min 30 s apart",
        "rep_drift in B at 1 user: it drifts",
        "what differs",
        "seed",
    ):
        assert word in shown
    assert llmctl("compare", "before", str(tmp_path / "after.json"), "--fail-if-worse") == 1
    assert llmctl("compare", str(tmp_path / "after.json"), "last", "--fail-if-worse") == 0
    assert " faster (" in capsys.readouterr().out
    assert llmctl("compare", "last", "nothing") == Exit.USAGE
    assert "nothing can't be read" in capsys.readouterr().err


def test_the_command_compares_the_subjects_of_a_run_and_answers_a_script(
    llmctl: Llmctl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    result.write(in_turns(factor=1.1, drift=0.2), [], "", path)
    assert llmctl("compare", str(path), "--json", "--confidence", "95") == 0
    (told,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert (told["a"]["subject"], told["b"]["subject"], told["paired"], told["confidence"]) == ("old", "new", True, 0.95)
    (row,) = told["rows"]
    assert (row["figure"], row["verdict"], row["interval"]["repetitions"]) == (ITL, "worse", 5)
    assert row["interval"]["low"] < row["change"] < row["interval"]["high"]
    assert llmctl("compare", f"{path}#old", f"{path}#new", "--json") == 0
    (told,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert told["paired"]
    assert llmctl("compare", f"{path}#old") == Exit.USAGE
    assert "is one side only" in capsys.readouterr().err


def test_the_command_reads_llama_benchs_rows(llmctl: Llmctl, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "again.jsonl").write_text(ROWS.read_text().replace("04:51", "05:51"))
    assert llmctl("compare", str(ROWS), str(tmp_path / "again.jsonl")) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("a tie")
    assert "pp64 @ d256" in shown
    assert "what differs" not in shown


def test_a_side_has_the_points_of_its_own() -> None:
    both = in_turns(factor=1.0, drift=0.0)
    side: Side = sides.pick(both, "run.json", "new")
    assert [each.target for each in side.points] == ["new"]
