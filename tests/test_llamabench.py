"""llama-bench's rows are read as a result: real ones (SmolLM2-135M, two busy cores, ``-r 3 -p 64 -n 16 -d 0,256``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import llamabench
from supervisor.errors import Error, Exit

TEXT = (Path(__file__).parent / "data" / "llama-bench.jsonl").read_text()


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in TEXT.splitlines()]


def lines(*made: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in made)


def test_each_test_is_a_level_by_llama_benchs_own_name() -> None:
    found = llamabench.read(TEXT, "rows.jsonl")
    assert [str(point.level) for point in found.points] == ["pp64", "tg16", "pp64 @ d256", "tg16 @ d256"]
    assert found.points[0].values("computed_prefill_throughput_per_user") == pytest.approx((45.0975, 17.8772, 28.0194), rel=1e-5)
    assert found.points[3].values("output_token_throughput_per_user") == pytest.approx((2.37003, 1.5882, 1.31756), rel=1e-5)
    assert found.points[0].metrics["computed_prefill_throughput_per_user"]["avg"] == pytest.approx(
        30.331399, rel=1e-5
    )  # its avg_ts
    assert set(found.points[1].metrics) == {"output_token_throughput_per_user"}
    assert [point.counts.ok for point in found.points] == [3, 3, 3, 3]
    assert [each.number for each in found.points[0].repetitions] == [0, 1, 2]
    assert [each.began_s for each in found.points[1].repetitions] == [9.0, 9.806, 10.654]  # from the first test's time on


def test_the_manifest_is_what_the_rows_tell() -> None:
    manifest = llamabench.read(TEXT, "rows.jsonl").manifest
    assert manifest.created_at == 1796100687  # date -d 2026-12-01T04:51:27Z +%s
    (subject,) = manifest.subjects
    assert (subject.kind, subject.engine) == ("llama-bench", "b11312 (0c1e57098)")
    assert subject.file == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert {"n_batch=2048", "type_k=f16", "flash_attn=-1", "repack=true"} <= set(subject.argv)
    assert not any("samples" in word or "n_prompt" in word for word in subject.argv)
    assert manifest.machine.cpu == "AMD EPYC"
    assert (manifest.workload.prompt, manifest.workload.answer) == ("64", "16")


def test_json_says_the_same_as_jsonl() -> None:
    assert llamabench.read(json.dumps(rows(), indent=2), "x") == llamabench.read(TEXT, "x")
    assert llamabench.told_in(json.dumps(rows()))
    assert llamabench.told_in(TEXT)
    assert not llamabench.told_in('{\n "schema": "llmctl-bench/1",')


def test_unlike_settings_are_subjects_by_what_is_their_own() -> None:
    first, second = rows()[:2]
    found = llamabench.read(lines(first, {**first, "n_ubatch": 256}, second, {**second, "n_ubatch": 256}), "x")
    names = [subject.name.partition(" ")[2] for subject in found.manifest.subjects]
    assert names == ["n_ubatch=512", "n_ubatch=256"]
    assert [point.target.partition(" ")[2] for point in found.points] == [*names, *names]


def test_a_test_that_was_measured_twice_has_the_repetitions_of_both() -> None:
    first = rows()[0]
    (point,) = llamabench.read(lines(first, first), "x").points
    assert [each.number for each in point.repetitions] == [0, 1, 2, 3, 4, 5]


def test_fields_that_nobody_knows_yet_are_settings_and_card_and_both_at_once_are_read() -> None:
    row = rows()[0] | {"moe_cache": 7, "gpu_info": "NVIDIA GeForce RTX 3070", "n_gen": 16}
    found = llamabench.read(lines(row), "x")
    assert "moe_cache=7" in found.manifest.subjects[0].argv
    assert found.manifest.machine.cards == ("NVIDIA GeForce RTX 3070",)
    assert str(found.points[0].level) == "pp64+tg16"
    assert set(found.points[0].metrics) == {"total_token_throughput"}


@pytest.mark.parametrize(
    ("text", "said", "tried"),
    [
        ("[\n", "ends after its first bracket", "-o jsonl"),
        (TEXT[:-40], "end too soon", "-o jsonl"),
        ("[]", "has no rows", "-o jsonl"),
        ("[1]", "has no rows", "-o jsonl"),
        (lines({key: value for key, value in rows()[0].items() if key != "samples_ns"}), "'samples_ns'", "-o jsonl"),
        (lines(rows()[0] | {"samples_ns": []}), "no samples_ns", "-o jsonl"),
        (lines(rows()[0] | {"samples_ns": [0]}), "lacks something", "-o jsonl"),
    ],
)
def test_what_is_broken_is_said_so(text: str, said: str, tried: str) -> None:
    with pytest.raises(Error) as caught:
        llamabench.read(text, "rows.json")
    assert said in caught.value.message
    assert "rows.json" in caught.value.message
    assert tried in caught.value.hint
    assert caught.value.exit is Exit.USAGE
