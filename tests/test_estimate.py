"""The estimate against what llama-server allocated, start by start, and what of it no start can show."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bench.proof import memory
from bench.proof.memory import Kept, Row
from supervisor import architecture, estimate, graph, hardware
from supervisor.engine import Engine
from supervisor.estimate import Estimate, Settings
from supervisor.gguf import Header
from supervisor.units import MIB

LOG_MIB = 0.01
"""The log has two decimals."""
KEPT = memory.recorded()
ROWS = [pytest.param(each, row, id=row.case.name) for each in KEPT for row in each.rows]
FOUR = "qwen3.5-4b"
AVX2 = frozenset(["avx2"])


def of(model: str, *, context: int = 8192, **settings: object) -> Estimate:
    header = memory.header(model)
    return made(header, context=context, **settings)


def made(header: Header, *, context: int = 8192, **settings: object) -> Estimate:
    whole = dataclasses.replace(Settings(context=context), **settings)  # type: ignore[arg-type]
    return estimate.make(architecture.read(header), header, whole)


def on_card(model: str, **settings: object) -> Estimate:
    return of(model, cuda=True, gpu_layers=99, **settings)


# Against the engine.


@pytest.mark.parametrize(("kept", "row"), ROWS)
def test_a_start_took_what_was_planned(kept: Kept, row: Row) -> None:
    """Weights, cache and state to the last digit of the log; so is the rest, where 10 % and 3 % would do."""
    errors = memory.errors(row, kept.cpu_flags)
    for term in memory.TERMS:
        assert abs(errors[term].mib) <= 2 * LOG_MIB, (term, errors[term])
    assert abs(errors["total"].percent) < 0.01


def test_there_are_enough_starts_and_every_model_is_among_them() -> None:
    rows = [row for each in KEPT for row in each.rows]
    assert len(rows) >= 60
    assert {row.case.model for row in rows} == {path.stem for path in memory.HEADERS.glob("*.json")}
    settings = [row.case.settings for row in rows]
    assert {s.slots for s in settings} >= {1, 2, 4}
    assert {s.cache_type_k for s in settings} >= {"f16", "q8_0", "q4_0"}
    assert {s.speculative for s in settings} >= {"off", "mtp", "ngram"}
    assert min(s.context for s in settings) <= 8192
    assert max(s.context for s in settings) >= 131072


def test_twenty_were_drawn_and_none_was_picked() -> None:
    """The cases of a drawn file are those of its seed, in order; one may be left out for want of memory, and is then drawn again."""
    drawn = [each for each in KEPT if each.drawn]
    assert sum(len(each.rows) for each in drawn) >= 20
    for each in drawn:
        count, seed = (int(word) for word in each.drawn.replace(";", "").split() if word.isdecimal())
        assert [row.case for row in each.rows] == list(memory.drawn(count, seed))


@pytest.mark.parametrize(("kept", "row"), ROWS)
def test_anonymous_memory_is_what_is_repacked_and_what_is_kept(kept: Kept, row: Row) -> None:
    """Resident after a first answer: repacked weights, caches and states in full, and of everything else no more than is planned for it."""
    found = memory.predict(row.case, kept.cpu_flags)
    shape, settings = architecture.read(memory.header(row.case.model)), row.case.settings
    plain = dataclasses.replace(settings, cache_type_k="f16", cache_type_v="f16")
    drafts = estimate.kv_bytes(shape, plain, shape.mtp) if settings.speculative == "mtp" else 0
    certain = found.host["repacked"] + found.device["kv"] + found.device["state"] + drafts
    touched = found.device["compute"] + found.device["draft"] - drafts
    most = certain + touched + found.host["process"] + found.host["output"] + found.host["grown"]
    assert certain / MIB < row.anonymous_mib < most / MIB


def test_the_engine_at_hand_allocates_what_is_planned(real_engine: Engine, tmp_path: Path) -> None:
    """Of the invented models, which are small: one of a family that no recorded start of a published model has."""
    flags = hardware.cpu_flags() & estimate.REPACK_FLAGS
    cases = [case for case in memory.chosen() if case.model == "made-qwen3"]
    rows = list(memory.measure(real_engine.server, tmp_path, cases[:2], flags))
    assert len(rows) == 2
    for row in rows:
        assert {term: each.mib for term, each in memory.errors(row, flags).items() if abs(each.mib) > 4 * LOG_MIB} == {}
    memory.save(tmp_path / "kept.json", Kept("this", "", flags, tuple(rows)))
    assert memory.load(tmp_path / "kept.json").rows[0].case == cases[0]


# Against cards. Nothing here was measured by us: the lines were logged by others (facts on Qwen3.5, section 4.2).


def assumed(model: str, file_bytes: int) -> Header:
    """The header of a file of this size whose types aren't known tensor by tensor."""
    return dataclasses.replace(memory.header(model), assumed=True, file_bytes=file_bytes)


def total_mib(found: Estimate, *without: str) -> float:
    return sum(value for term, value in found.device.items() if term not in ("margin", *without)) / MIB


UD_Q5_K_XL = 3_304_827_200
"""Bytes of unsloth's Qwen3.5-4B-UD-Q5_K_XL with MTP head."""
LONG = {"context": 131072, "cache_type_k": "q8_0", "cache_type_v": "q8_0", "cuda": True, "gpu_layers": 99}


def test_rtx_4060_with_mtp() -> None:
    """Logged: 3141.27 weights, 2176 KV, 201 state, 690.28 compute, 682.02 MTP context; 7031 to 7053 in all."""
    found = made(assumed("qwen3.5-4b-mtp", UD_Q5_K_XL), **LONG, speculative="mtp", draft_length=3)
    mib = {term: value / MIB for term, value in found.device.items()}
    assert abs(mib["weights"] - 3141.27) < 0.1
    assert (mib["kv"], mib["state"]) == (2176, 201)
    assert abs(mib["compute"] + mib["scratch"] - 690.28) < 0.02
    assert abs(mib["draft"] - 682.02) < 0.02
    assert 7031 * 0.999 < total_mib(found) < 7053 * 1.001


def test_rtx_4060_without_mtp() -> None:
    """Logged: 6119 in all. The head's own share of the larger file isn't known; it is taken as Q4_K_M's."""
    assert abs(total_mib(made(assumed("qwen3.5-4b-mtp", UD_Q5_K_XL), **LONG)) / 6119 - 1) < 0.03


def before_output_limits(model: str, settings: Settings) -> float:
    """Compute buffer of engines before the server limited its outputs: logits of a whole micro-batch."""
    shape = architecture.read(memory.header(model))
    old = dataclasses.replace(estimate.shape(shape, settings), outputs=settings.ubatch)
    return graph.compute(shape, old)[0] / MIB


def test_an_8_gb_card_with_the_9b() -> None:
    """Logged by an engine of before the limit: 4861.28 + 1088 + 50.25 + 493 = 6492 projected, without CUDA's context."""
    found = made(assumed("qwen3.5-9b", 5_680_522_464), **LONG | {"context": 65536})
    settings = dataclasses.replace(Settings(context=65536), cache_type_k="q8_0", cache_type_v="q8_0", cuda=True, gpu_layers=99)
    assert abs(found.device["weights"] / MIB - 4861.28) < 1
    assert abs(total_mib(found, "context") / 6492 - 1) < 0.03
    then = total_mib(found, "context", "compute", "scratch") + before_output_limits("qwen3.5-9b", settings)
    assert abs(then / 6492 - 1) < 0.01


def test_rtx_4060_in_march() -> None:
    """Logged by b8467: 2573 weights, 50 state, 490 compute, 129 context, and 71 that must be a q8_0 cache of 4096 tokens; 3313 in all."""
    settings = Settings(context=4096, cache_type_k="q8_0", cache_type_v="q8_0", cuda=True, gpu_layers=99)
    found = made(memory.header(FOUR), context=4096, cache_type_k="q8_0", cache_type_v="q8_0", cuda=True, gpu_layers=99)
    then = total_mib(found, "compute", "scratch") + before_output_limits(FOUR, settings)
    assert abs(then / 3313 - 1) < 0.03


# What follows from the rules.


def test_on_a_card_a_tied_embedding_is_there_twice() -> None:
    tied, untied = on_card(FOUR), on_card("qwen3.5-9b")
    embedding = {
        name: next(t.bytes for t in memory.header(name).tensors if t.name == "token_embd.weight") for name in (FOUR, "qwen3.5-9b")
    }
    assert tied.host["embedding"] == embedding[FOUR]
    assert abs(tied.device["weights"] - memory.header(FOUR).tensor_bytes) < MIB / 10
    assert untied.host["embedding"] == embedding["qwen3.5-9b"]
    assert abs(untied.device["weights"] + embedding["qwen3.5-9b"] - memory.header("qwen3.5-9b").tensor_bytes) < MIB / 10


def test_an_mtp_head_counts_only_when_it_is_used() -> None:
    without, unused, used = (
        on_card(FOUR),
        on_card("qwen3.5-4b-mtp"),
        on_card("qwen3.5-4b-mtp", speculative="mtp", draft_length=2),
    )
    assert unused.device == without.device
    assert round((used.device["weights"] - without.device["weights"]) / MIB, 1) == 71.2
    assert used.device["state"] == 3 * without.device["state"]
    assert used.device["draft"] > 0


def test_a_card_has_a_context_and_a_margin_and_a_cpu_plan_has_neither() -> None:
    card, cpu = on_card(FOUR), of(FOUR)
    assert (card.device["context"], card.device["margin"]) == (140 * MIB, 250 * MIB)
    assert (cpu.device["context"], cpu.device["margin"], cpu.device["scratch"]) == (0, 0, 0)
    assert list(card.device) == list(cpu.device) == ["weights", "kv", "state", "compute", "scratch", "draft", "context", "margin"]


def test_scratch_is_of_quantised_caches_on_cards() -> None:
    assert on_card(FOUR, context=131072).device["scratch"] == 0
    assert on_card(FOUR, context=131072, cache_type_k="q8_0", cache_type_v="q8_0").device["scratch"] > 480 * MIB
    one = on_card(FOUR, context=131072, cache_type_v="q8_0").device["scratch"]
    assert 224 * MIB < one < 260 * MIB


def test_fewer_layers_on_the_card() -> None:
    """What a layer gives up on the card it takes on the host, and all layers together stay the same."""
    whole = on_card("qwen3.5-9b")
    before = whole
    for behind in range(1, 33):
        found = of("qwen3.5-9b", cuda=True, gpu_layers=33 - behind)
        assert found.device["weights"] < before.device["weights"]
        assert found.host["layers"] > before.host["layers"]
        kept = sum(found.device[term] for term in ("weights", "kv", "state")) + found.host["layers"]
        assert abs(kept - sum(whole.device[term] for term in ("weights", "kv", "state"))) < MIB / 10
        before = found
    assert before.device["kv"] == before.device["state"] == 0


def test_no_layer_on_the_card() -> None:
    """``--gpu-layers 0`` leaves the output behind too."""
    found = of(FOUR, cuda=True, gpu_layers=0)
    assert (found.device["weights"], found.device["kv"], found.device["state"]) == (0, 0, 0)
    assert (
        abs(found.host["layers"] + found.host["embedding"] - of(FOUR).device["weights"] - of(FOUR).device["kv"] - 50.25 * MIB)
        < MIB
    )


def test_a_head_counts_among_the_layers_that_are_left_behind() -> None:
    """``--gpu-layers`` counts the MTP head's block too, so 32 of 34 leaves two."""
    left = of("qwen3.5-4b-mtp", cuda=True, gpu_layers=32).host["layers"]
    assert left == of(FOUR, cuda=True, gpu_layers=31).host["layers"]


def test_a_checkpoint_holds_a_state_and_the_heads_cache() -> None:
    assert of(FOUR).checkpoint_bytes == round(50.25 * MIB)
    assert (
        of("qwen3.5-4b-mtp", context=65536, speculative="mtp", draft_length=2).checkpoint_bytes
        == round(50.25 * MIB) + 65536 * 4096
    )
    assert of("smollm2-135m").checkpoint_bytes == 0
    assert of("gemma3-270m").checkpoint_bytes > 0
    assert of(FOUR, slots=4, checkpoints=8).host["checkpoints"] == 32 * round(50.25 * MIB)


def test_what_may_be_kept_of_prompts() -> None:
    assert of(FOUR, cache_ram_mib=2048).host["prompt_cache"] == 2048 * MIB


def test_drafting_adds_rows_of_logits() -> None:
    row = 4 * 248320
    assert of(FOUR).host["grown"] == 0
    assert of(FOUR, slots=2, speculative="ngram").host["grown"] == 2 * 64 * row + 16 * MIB
    assert of("qwen3.5-4b-mtp", speculative="mtp", draft_length=2).host["grown"] > 2 * row


def test_a_draft_model_is_counted_whole() -> None:
    header, small = memory.header(FOUR), memory.header("qwen3.5-0.8b")
    settings = Settings(
        context=8192, cuda=True, gpu_layers=99, speculative="draft", draft_length=4, cache_type_k="q8_0", cache_type_v="q8_0"
    )
    found = estimate.make(architecture.read(header), header, settings, draft=(architecture.read(small), small))
    alone = on_card("qwen3.5-0.8b")
    assert found.device["draft"] == sum(alone.device[term] for term in ("weights", "kv", "state", "compute"))
    assert found.device["state"] == on_card(FOUR).device["state"]


@pytest.mark.parametrize(
    ("type_", "rows", "flags", "copied"),
    [
        ("q4_K", 64, {"avx2"}, True),
        ("q4_K", 60, {"avx2"}, False),
        ("q4_0", 64, {"avx2"}, True),
        ("iq4_nl", 64, {"avx2"}, True),
        ("q6_K", 64, {"avx2"}, False),
        ("q8_0", 64, {"avx2"}, False),
        ("q2_K", 64, {"avx2"}, False),
        ("q2_K", 64, {"avx2", "avx512f"}, True),
        ("q4_K", 64, {"sse4_2"}, False),
        ("q6_K", 64, {"amx_int8", "avx512_vnni"}, True),
        ("q6_K", 64, {"amx_int8"}, False),
        ("q8_0", 60, {"asimd", "asimddp"}, True),
        ("q6_K", 64, {"asimd", "asimddp"}, True),
        ("q6_K", 64, {"asimd"}, False),
        ("f16", 64, {"avx2", "asimd", "i8mm"}, False),
    ],
)
def test_what_a_cpu_repacks(type_: str, rows: int, flags: set[str], copied: bool) -> None:
    assert estimate.repacked(type_, (256, rows), frozenset(flags)) == copied


def test_only_matrices_are_repacked() -> None:
    assert not estimate.repacked("q4_K", (256,), AVX2)
    assert not estimate.repacked("q4_K", (256, 64, 4), AVX2)


def test_a_card_repacks_nothing() -> None:
    assert on_card(FOUR, cpu_flags=AVX2).host["repacked"] == 0
    assert of(FOUR, cpu_flags=AVX2).host["repacked"] > 1500 * MIB


def test_cells_are_padded() -> None:
    assert of(FOUR, context=8193).device["kv"] == of(FOUR, context=8448).device["kv"]
    assert of(FOUR, context=8192, slots=3).device["kv"] == of(FOUR, context=3 * 2816).device["kv"]
    assert of(FOUR, context=8192, slots=3, unified=True).device["kv"] == of(FOUR).device["kv"]


def test_an_assumed_files_surplus_is_weights() -> None:
    header = memory.header(FOUR)
    known = dataclasses.replace(header, file_bytes=header.tensor_bytes + estimate.HEADER_BYTES + 31 * MIB)
    guessed = dataclasses.replace(known, assumed=True)
    for settings in ({}, {"cuda": True, "gpu_layers": 99}):
        assert made(guessed, **settings).device["weights"] - made(known, **settings).device["weights"] == 31 * MIB


def test_more_of_anything_takes_no_less() -> None:
    small = on_card("qwen3.5-4b-mtp", context=16384, speculative="mtp", draft_length=1)
    for change in ({"context": 32768}, {"slots": 2}, {"ubatch": 1024}, {"draft_length": 3}):
        more = on_card("qwen3.5-4b-mtp", **{"context": 16384, "speculative": "mtp", "draft_length": 1} | change)
        assert sum(more.device.values()) > sum(small.device.values())


def test_the_chosen_cases_were_all_started() -> None:
    rows = memory.load(memory.RECORDED / "chosen.json").rows
    assert [row.case for row in rows] == list(memory.chosen())
