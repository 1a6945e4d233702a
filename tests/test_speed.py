"""Speed: what a step reads and a round costs, llama-bench's rows, and both tools as they are run: a script and the fake in their place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from supervisor import architecture, engine, estimate, gguf, paths, speed, step, trial
from supervisor.errors import Error, Exit
from supervisor.estimate import Estimate, Settings
from supervisor.speed import AtDepth, Depths, Streams, Together
from supervisor.trial import Case
from tests import fakes
from tests.fakes.gguf import qwen35

QUICK = Depths("135M", (0, 512))
SMALL = Settings(context=4096)


# What a step reads


def planned(case: Case) -> tuple[Estimate, Settings]:
    header = gguf.expand(json.loads((paths.data_folder("presets") / "headers" / trial.HEADERS[case.model, case.mtp]).read_text()))
    shape = architecture.read(header)
    settings = trial.settings(case, shape, cuda=True, cpu_flags=frozenset())
    return estimate.make(shape, header, settings), settings


def test_a_step_reads_weights_caches_and_states() -> None:
    """Qwen3.5-4B: 8 layers with a cache of 4 heads of 256, f16; the recurrent state is read and written."""
    plan, settings = planned(Case("4B", False, 32768, slots=4, unified=True))
    none, one, four = (step.read_bytes(plan, settings, depth, streams) for depth, streams in ((0, 1), (8192, 1), (8192, 4)))
    state = plan.device["state"] / 4
    assert none == plan.device["weights"] + 2 * state
    assert one - none == 8192 * 8 * 2 * 4 * 256 * 2
    assert four - plan.device["weights"] == 4 * (one - plan.device["weights"])


@pytest.mark.parametrize("case", [Case("4B", False, 32768, slots=2), Case("4B", False, 32768), Case("4B", False, 65536)])
def test_what_a_step_reads_is_not_of_the_slots_and_the_context_that_there_are(case: Case) -> None:
    wanted = step.read_bytes(*planned(Case("4B", False, 16384)), depth=1000)
    assert step.read_bytes(*planned(case), depth=1000) == pytest.approx(wanted)


# What a round costs


def test_the_tokens_of_a_round() -> None:
    assert step.tokens_a_round(0.0, 3) == 1
    assert step.tokens_a_round(1.0, 3) == 4
    assert step.tokens_a_round(0.5, 2) == 1.75


@pytest.mark.parametrize("drafted", [1, 2, 3])
@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.9])
def test_the_break_even_is_where_a_round_makes_what_it_costs(drafted: int, acceptance: float) -> None:
    assert step.break_even(step.tokens_a_round(acceptance, drafted), drafted) == pytest.approx(acceptance)


def test_a_round_that_costs_nothing_more_always_pays_and_one_that_costs_all_it_can_make_never() -> None:
    assert step.break_even(0.9, 2) == 0.0
    assert step.break_even(3.0, 2) is None


def test_the_steps_of_a_repetition() -> None:
    """Of two streams with 11 tokens each, a first token each and 8 right guesses are no steps."""
    seen = Together(streams=2, tokens=22, wall_s=2.0, decode_s=2.4, draft_tokens=20, draft_accepted=8)
    assert (seen.steps, seen.step_s) == (12, pytest.approx(0.2))
    assert seen.decode_tps == pytest.approx(20 / 2.4)
    assert seen.total_tps == pytest.approx(11.0)


# llama-bench


def line(**fields: object) -> str:
    return json.dumps({"n_prompt": 512, "n_gen": 0, "n_depth": 8192, "avg_ts": 3100.5, "stddev_ts": 2.5, "new": 1} | fields)


def test_a_row_is_read_by_its_names() -> None:
    assert speed.row(line()) == AtDepth(8192, True, 512, 3100.5, 2.5)
    assert speed.row(line(n_prompt=0, n_gen=64)) == AtDepth(8192, False, 64, 3100.5, 2.5)


@pytest.mark.parametrize(
    "text", ["", "[", "ggml_cuda_init: found 1", "[1]", '{"n_prompt": 1}', line(n_gen=64), line(avg_ts=None)]
)
def test_what_is_no_row(text: str) -> None:
    assert speed.row(text) is None


def script(folder: Path, text: str) -> Path:
    path = folder / "llama-bench"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def at_depths(tool: Path) -> list[AtDepth]:
    return list(speed.at_depths(tool, Path("m.gguf"), QUICK, device="CUDA0", threads=3))


def test_llama_bench_is_asked_for_all_depths_at_once(tmp_path: Path) -> None:
    tool = script(tmp_path, f"echo \"$@\" > {tmp_path}/asked; echo '{line()}'")
    assert at_depths(tool) == [AtDepth(8192, True, 512, 3100.5, 2.5)]
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("-m m.gguf -o jsonl -p 512 -n 64 -d 0,512 -r 3 ")
    assert "-ctk f16 -ctv f16 -fa on -dev CUDA0 -ngl 999 -t 3" in asked


def test_rows_before_a_failure_are_seen(tmp_path: Path) -> None:
    tool = script(tmp_path, f"echo '{line()}'; echo 'CUDA error: out of memory' >&2; exit 1")
    seen = speed.at_depths(tool, Path("m.gguf"), QUICK, device="CUDA0", threads=1)
    assert next(seen).depth == 8192
    with pytest.raises(Error, match="llama-bench ended: the card's memory ran out") as caught:
        next(seen)
    assert caught.value.exit == Exit.CHILD


def test_a_llama_bench_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "TIMEOUT_S", 0.3)
    tool = script(tmp_path, f"echo $$ > {tmp_path}/pid; echo '{line()}'; exec sleep 60")
    with pytest.raises(Error, match="not done after 0 s"):
        at_depths(tool)
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_nothing_is_left_of_one_that_nobody_waits_for(tmp_path: Path) -> None:
    tool = script(tmp_path, f"echo $$ > {tmp_path}/pid; echo '{line()}'; exec sleep 60")
    seen = speed.at_depths(tool, Path("m.gguf"), QUICK, device="none", threads=1)
    next(seen)
    seen.close()
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_the_deepest_test_decides_about_memory() -> None:
    assert Depths("4B", (0, 32768)).case.context == 33280
    assert Depths("4B", (0,), answer=600).case.context == 768


# llama-server


def test_how_often_a_guess_is_right_is_told_for_each_position_by_itself() -> None:
    assert Streams(Case("4B", True, 4096), draft=3, acceptance=0.5).flags == ("--spec-synth-rates", "0.500000,0.250000,0.125000")
    assert Streams(Case("4B", False, 4096)).flags == ()


def test_streams_are_asked_at_once_after_one_that_is_not_counted(tmp_path: Path) -> None:
    server = fakes.install(tmp_path / "fake", tokens=64, pace_s=0.002, drafts={"draft-mtp": [2, 1]})
    sprint = Streams(Case("135M", True, 4096, slots=2, unified=True), (1, 2), draft=2, acceptance=0.7, answer=32, repetitions=2)
    seen = list(speed.together(server, tmp_path / "m.gguf", sprint, SMALL, device="none", threads=1))
    assert [(each.streams, each.tokens) for each in seen] == [(1, 32), (1, 32), (2, 64), (2, 64)]
    assert [(each.draft_accepted, each.steps) for each in seen] == [(16, 15), (16, 15), (32, 30), (32, 30)]
    assert all(each.wall_s > 0 < each.decode_s for each in seen)
    (start,) = fakes.events(tmp_path / "fake", "start")
    words = start["argv"]
    assert words[-2:] == ["--spec-synth-rates", "0.700000,0.490000"]
    assert words[words.index("--spec-draft-n-max") + 1] == "2"
    assert not Path("/proc", str(start["pid"])).exists()


def test_a_server_that_answers_nothing(tmp_path: Path) -> None:
    server = fakes.install(tmp_path / "fake", healthy_requests=1, error_status=500)
    sprint = Streams(Case("135M", False, 4096, slots=2), (2,), answer=32)
    with pytest.raises(Error) as caught:
        list(speed.together(server, tmp_path / "m.gguf", sprint, SMALL, device="none", threads=1))
    assert (caught.value.exit, "gave no answer" in caught.value.message) == (Exit.CHILD, True)
    (start,) = fakes.events(tmp_path / "fake", "start")
    assert not Path("/proc", str(start["pid"])).exists()


def test_a_plain_step_and_a_round_are_planned_apart() -> None:
    chosen = replace(SMALL, speculative="mtp", draft_length=2)
    assert speed.settings(Streams(Case("4B", True, 4096), draft=3, acceptance=0.7), chosen).draft_length == 3
    assert speed.settings(Streams(Case("4B", False, 4096)), chosen).speculative == "off"


def test_every_sprint_drafts_where_it_has_a_head_and_no_two_are_one() -> None:
    every = (*speed.SPRINTS, *speed.SPRINTS_WITHOUT_A_CARD)
    assert len({one.name for one in every}) == len(every)
    for one in every:
        assert (one.case.model, one.case.mtp) in trial.HEADERS
        if isinstance(one, Streams):
            assert one.case.mtp is (one.draft > 0)
            assert max(one.streams) <= one.case.slots


@pytest.mark.slow
def test_the_real_engine_draws_the_guesses(tmp_path: Path, real_engine: engine.Engine) -> None:
    """A phantom of Qwen3.5's kind with four layers and an MTP head: at acceptance 1 every guess is right, at 0 none."""
    from supervisor import phantom

    model = tmp_path / "m.gguf"
    phantom.write(qwen35(), model)
    for acceptance in (0.0, 1.0):
        sprint = Streams(Case("4B", True, 1024), draft=2, acceptance=acceptance, answer=33, repetitions=1)
        (seen,) = speed.together(real_engine.server, model, sprint, replace(SMALL, context=1024), device="none", threads=1)
        assert seen.draft_tokens > 0
        assert seen.draft_accepted == acceptance * seen.draft_tokens
        assert seen.steps == 32 - seen.draft_accepted
