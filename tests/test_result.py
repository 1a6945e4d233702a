"""A result is what was measured, and is read back as it was written."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench import result, workload
from bench.ask import Level
from bench.result import Machine, Manifest, Result, Subject
from bench.sample import Sample
from supervisor.errors import Error, Exit
from tests.test_figures import sample


def made(*points: result.Point) -> Result:
    subject = Subject(name="tiny", kind="llmctl", argv=("llama-server", "-m", "x"), slots=4, context=4096)
    machine = Machine(host="h", cpu="c", cores=2, memory_mib=1000, kernel="k", cards=("RTX 3070",))
    manifest = Manifest(
        created_at=1.5, llmctl="0", workload=workload.load("chat"), seed=1, salt="s", subjects=(subject,), machine=machine
    )
    return Result(manifest=manifest, points=points)


def test_a_point_is_reckoned_by_repetition_and_over_all() -> None:
    samples = [sample(number, repetition=number // 2, ttft_ms=100.0 + number, sent_s=float(number)) for number in range(4)]
    found = result.point("tiny", Level(users=1), samples, {}, began_s={0: 0.0, 1: 2.0}, gauges={0: {"energy_j": 44.0}})
    assert [each.number for each in found.repetitions] == [0, 1]
    assert found.values("time_to_first_token") == (100.5, 102.5)
    assert found.values("energy_per_output_token") == (2.0,)  # nobody told it of the second
    assert found.metrics["time_to_first_token"]["count"] == 4
    assert found.metrics["time_to_first_token"]["p50"] == 101.5
    assert found.metrics["output_token_throughput"]["count"] == 2  # of repetitions
    assert found.counts.ok == 4


def test_a_result_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    samples = [sample(number) for number in range(3)]
    points = (
        result.point("tiny", Level(users=2), samples, {"ttft_ms": 1.0}, began_s={0: 0.25}, gauges={}),
        dataclasses.replace(
            result.point(
                "tiny", Level(rate=2.0, arrivals="constant"), samples, {}, began_s={0: 0.0}, gauges={0: {"rss_mib": 1.5}}
            ),
            flags=("rep_drift: it drifts",),
        ),
    )
    path = tmp_path / "new" / "run.json"
    result.write(made(*points), samples, "<page>", path)
    assert result.read(path) == made(*points)
    assert result.samples(path) == samples
    assert json.loads(path.read_text())["schema"] == "llmctl-bench/1"
    assert sorted(each.name for each in path.parent.iterdir()) == ["run.html", "run.json", "run.requests.jsonl"]


def test_figures_have_the_fields_that_aiperf_writes() -> None:
    point = result.point("tiny", Level(users=1), [sample()], {}, began_s={0: 0.0}, gauges={})
    shares = ("p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99")
    assert set(point.metrics["time_to_first_token"]) == {"unit", "avg", *shares, "min", "max", "std", "count", "sum"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "can't be read: No such file or directory"),
        ("{", "is no result: "),
        ('{"schema": "llmctl-bench/9"}', "has the schema 'llmctl-bench/9', this llmctl reads llmctl-bench/1"),
        ("[]", "has the schema None"),
        ('{"schema": "llmctl-bench/1", "manifest": {}}', "is a damaged result: manifest.created_at: Field required"),
        ('{"schema": NaN}', "is no result: NaN is no number"),
        ("[" * 100_000, "is no result: "),
    ],
)
def test_a_file_that_is_no_result_is_said_so(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(Error) as caught:
        result.read(path)
    assert said in caught.value.message
    assert caught.value.exit is Exit.USAGE
    assert caught.value.hint


def test_a_result_that_was_tampered_with_is_said_to_be_damaged(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    whole = made(result.point("tiny", Level(users=2), [sample()], {}, began_s={0: 0.0}, gauges={})).as_dict()
    for where, value, said in (
        (("points", 0, "repetitions", 0, "values", "request_latency"), "fast", "points.0.repetitions.0.values.request_latency: "),
        (("points", 0, "level", "users"), [], "points.0.level.users: "),
        (("manifest", "workload", "prompt"), "many", "should be a number of tokens"),
        (("manifest", "subjects"), None, "manifest.subjects: "),
    ):
        told = json.loads(json.dumps(whole))
        *inner, last = where
        at = told
        for step in inner:
            at = at[step]
        at[last] = value
        path.write_text(json.dumps(told))
        with pytest.raises(Error) as caught:
            result.read(path)
        assert "is a damaged result: " in caught.value.message
        assert said in caught.value.message


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(Error, match=r"run\.json is no file"):
        result.read(tmp_path / "run.json")


def test_a_place_that_cant_be_written_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Error, match="can't be written"):
        result.write(made(), [], "", tmp_path / "file" / "run.json")


def test_a_sample_is_a_line_and_one_of_a_later_llmctl_is_read_too() -> None:
    line: dict[str, Any] = json.loads(json.dumps(sample(id="req_1", left=True).as_dict()))
    assert Sample.of({**line, "unheard_of": 1}) == sample(id="req_1", left=True)
    with pytest.raises(TypeError):
        Sample.of({"number": 1})
