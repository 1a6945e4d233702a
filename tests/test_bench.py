"""``llmctl bench`` as a person has it: real processes, the fake engine where its figures have to be known, the real one once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import result, trace
from bench.ask import Level
from tests.conftest import WAIT_S, Box, until
from tests.traffic import CHAT, ask

Boxes = Callable[..., Box]
SMALL = ("--repetitions", "3", "--requests", "1", "--prompt", "40-60", "--answer", "24")


def bench(box: Box, *words: str) -> dict[str, Any]:
    done = box.llmctl("bench", *words, "--json")
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_a_preset_is_served_for_as_long_as_it_is_measured(fake_box: Boxes) -> None:
    box = fake_box(pace_s=0.002, prefill_s=0.02, tokens=1000)
    told = bench(box, "tiny", "--model", str(box.model), "--concurrency", "1,3", *SMALL)
    found = result.read(Path(told["file"]))
    samples = result.samples(Path(told["file"]))
    assert Path(told["file"]).with_suffix(".html").read_text().startswith("<!doctype html>")
    assert [str(point.level) for point in found.points] == ["1 user", "3 users"]
    assert [point.counts.ok for point in found.points] == [3, 9]
    assert len(samples) == 12
    for sample in samples:
        assert (sample.error, sample.completion_tokens, sample.asked_answer) == (None, 24, 24)
        assert sample.prompt_tokens == sample.asked_prompt
        assert sample.ttft_ms is not None
        assert sample.ttft_ms >= 20
        assert sample.events == 24
    subject = found.manifest.subjects[0]
    assert (subject.name, subject.kind, subject.preset) == ("tiny", "llmctl", "tiny")
    assert subject.argv[subject.argv.index("--model") + 1] == str(box.model)
    assert subject.file == box.model.name
    assert len(subject.sha256) == 64
    assert not found.cut_short
    assert box.left_behind() == []
    assert json.loads(box.llmctl("status", "--json").stdout)["presets"] == []


def test_two_servers_are_measured_in_turns_and_compared(fake_box: Boxes) -> None:
    box = fake_box(pace_s=0.002, tokens=1000)
    client = box.up()
    told = bench(box, "tiny", "--url", f"{client.address}/v1#tiny", *SMALL, "--concurrency", "2")
    found = result.read(Path(told["file"]))
    assert [subject.name for subject in found.manifest.subjects] == ["tiny", "tiny (2)"]
    began = sorted((each.began_s, point.target) for point in found.points for each in point.repetitions)
    assert [target for _, target in began] == ["tiny", "tiny (2)", "tiny (2)", "tiny", "tiny", "tiny (2)"]
    done = box.llmctl("compare", "last", "--json")
    assert done.returncode == 0, done.stderr
    (compared,) = json.loads(done.stdout)["comparisons"]
    assert compared["paired"]
    assert {row["figure"] for row in compared["rows"]} == {
        *("time_to_first_token", "inter_token_latency", "output_token_throughput")
    }
    # Each sample's id is that of a record, with the same tokens.
    records = {record["id"]: record for record in box.closed_records(12)}
    for sample in result.samples(Path(told["file"])):
        assert sample.id is not None
        record = records[sample.id]
        assert (record["prompt_tokens"], record["completion_tokens"]) == (sample.prompt_tokens, sample.completion_tokens)


def test_requests_come_at_a_rate(fake_box: Boxes) -> None:
    box = fake_box(pace_s=0.001, tokens=1000)
    box.up("--set", "slots=2")
    told = bench(box, "tiny", "--rate", "40", "--arrivals", "constant", *SMALL)
    (point,) = result.read(Path(told["file"])).points
    assert point.level == Level(rate=40.0, arrivals="constant")
    assert point.counts.ok == 24
    sent = [each for each in result.samples(Path(told["file"])) if each.repetition == 0]
    assert [each.number for each in sent] == list(range(8))
    for each in sent:
        assert each.late_ms is not None
        due_s = sent[0].sent_s - (sent[0].late_ms or 0) / 1e3 + each.number / 40
        assert each.sent_s - each.late_ms / 1e3 == pytest.approx(due_s, abs=2e-3)


def test_what_was_measured_whole_is_kept_when_it_is_ended(fake_box: Boxes, tmp_path: Path) -> None:
    """By SIGTERM and under a starter that ignores SIGINT, as a job in the background is; what was started for it is stopped."""
    box = fake_box(pace_s=0.01, tokens=1000)
    out = tmp_path / "run.json"
    code = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    words = ["bench", "tiny", "--model", str(box.model), "--out", str(out), "--concurrency", "1", *SMALL, "--repetitions", "900"]
    command = [sys.executable, "-c", code, sys.executable, "-m", "supervisor", *words]
    process = subprocess.Popen(
        command, env=box.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    journal = box.engine.parent / "journal.jsonl"
    until(lambda: journal.exists() and journal.read_text().count('"event": "finished"') > 20)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, said
    found = result.read(out)
    assert found.cut_short
    assert 3 <= len(found.points[0].repetitions) < 900
    assert box.left_behind() == []


def test_a_running_llmctl_is_not_measured_as_what_it_is_not(fake_box: Boxes) -> None:
    box = fake_box()
    box.up()
    done = box.llmctl("bench", "tiny", "--set", "slots=2")
    assert done.returncode == 7
    assert "is to be measured in another way than it serves" in done.stderr
    assert "try: llmctl down" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tinny",), "there is no preset 'tinny'"),
        ((), "nothing runs"),
        (("tiny", "--workload", "talk"), "there is no workload 'talk'"),
        (("tiny", "--rate", "x"), "--rate is 'x', but should be requests a second"),
        (("tiny", "--rate", "1", "--concurrency", "1"), "--rate and --concurrency are two ways to ask"),
        (("tiny", "--limit", "ttft"), "--limit is 'ttft', but should be ttft, tpot or e2e"),
        (("--set", "slots=2"), "--context, --mode, --set and --model are for a PRESET"),
        (("--url", "http://127.0.0.1:9"), "nothing listens at http://127.0.0.1:9"),
        (("tiny", "--key-env", "NO_SUCH_KEY"), "--key-env names NO_SUCH_KEY, which is not set"),
        (("replay", "/nowhere.jsonl"), "/nowhere.jsonl can't be read"),
        (("record", "--since", "soon"), "--since is 'soon', but should be a time, or so long ago"),
        (("record", "--texts", "--since", "1h"), "--since and --until are of the past"),
        (("record",), "nothing was answered in that time"),
        (("tiny", "--out", "run.html"), "--out is run.html, but should end in .json"),
        (("tiny", "--out", "/proc/1/run.json"), "but nothing can be written in /proc/1"),
    ],
)
def test_wrong_words_have_a_sentence_and_a_way_out(fake_box: Boxes, words: tuple[str, ...], said: str) -> None:
    done = fake_box().llmctl("bench", *words)
    assert done.returncode in (2, 3, 7), done.stderr
    assert said in done.stderr
    assert "\ntry: " in done.stderr
    assert not done.stdout


def test_real_traffic_is_kept_and_asked_again(fake_box: Boxes, tmp_path: Path) -> None:
    box = fake_box(tokens=1000)
    client = box.up()
    for number in range(3):
        assert ask(client, "tiny", max_tokens=5 + number, stream=False).status_code == 200
    box.closed_records(3)
    path = tmp_path / "hour.jsonl"
    done = box.llmctl("bench", "record", "--out", str(path))
    assert done.returncode == 0, done.stderr
    kept = trace.read(path)
    assert [shape.completion_tokens for shape in kept.requests] == [5, 6, 7]
    assert not kept.texts
    told = bench(box, "replay", str(path), "--speed", "1000", "--repetitions", "2")
    found = result.read(Path(told["file"]))
    assert found.manifest.replayed == kept.digest
    assert found.points[0].counts.ok == 6
    assert [each.completion_tokens for each in result.samples(Path(told["file"]))][:3] == [5, 6, 7]


def test_texts_are_kept_only_if_they_are_asked_for(fake_box: Boxes, tmp_path: Path) -> None:
    box = fake_box(tokens=4)
    client = box.up()
    path = tmp_path / "texts.jsonl"
    words = ["bench", "record", "--texts", "--for", "1h", "--out", str(path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "supervisor", *words],
        env=box.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("0 requests")
    assert ask(client, "tiny", max_tokens=4).status_code == 200
    until(lambda: box.closed_records(1))
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, said
    (shape,) = trace.read(path).requests
    assert shape.body is not None
    assert shape.body["messages"] == [{"role": "user", "content": "Hello"}]
    assert shape.route == CHAT
    assert path.stat().st_mode & 0o077 == 0


def test_the_real_engine_is_measured(real_engine: Any, tiny_model: Path, tmp_path: Path) -> None:
    box = Box(tmp_path / "home", real_engine.server, tiny_model)
    try:
        told = bench(box, "tiny", "--model", str(box.model), "--set", "threads=1", "--concurrency", "2", "--workload", "agent", *SMALL[:4],
                     "--prompt", "160-200", "--shared", "120", "--answer", "24")  # fmt: skip
        samples = result.samples(Path(told["file"]))
        assert [sample.error for sample in samples] == [None] * 6
        assert all(sample.prompt_tokens == sample.asked_prompt and sample.completion_tokens == 24 for sample in samples)
        assert all(sample.decode_tps and sample.prefill_tps for sample in samples)
        assert told["points"][0]["metrics"]["cached_share"]["avg"] > 0.1  # what they share was computed once
    finally:
        box.close()
