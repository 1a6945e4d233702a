"""What will run: the order in which things are given up, what is refused, what earlier starts correct, and the recorded plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from supervisor import budget, derive, headers, plan, preset
from supervisor.allocation import Allocation
from supervisor.engine import Engine
from supervisor.errors import Error, Exit
from supervisor.gguf import Header
from supervisor.model import Model
from supervisor.plan import Plan, Step
from supervisor.preset import Preset
from supervisor.units import GIB, MIB
from tests import plans
from tests.plans import NOWHERE, machine


def load(name: str = "turbo_4b", **asked: Any) -> Preset:
    return preset.load(name, NOWHERE, **asked)


def known(asked: Preset) -> dict[Model, Header]:
    return {model: headers.find(NOWHERE, model) for model in asked.models}


def make(asked: Preset, free_mib: int = 7670, *, host_gib: float = 12, **more: Any) -> Plan:
    """A plan for an RTX 3070 with so much free."""
    where = budget.make("CUDA0", machine(16, host_gib), gpu="rtx3070", vram=free_mib * MIB)
    return plan.make(asked, known(asked), where, **more)


def engine(**more: Any) -> Engine:
    facts: dict[str, Any] = {"cuda": "13.0", "arch": "86", "fa_pairs": ("f16-f16", "q8_0-q8_0", "q4_0-q4_0")}
    return Engine(plans.FILE, "abc", "native", 11312, "0c1e57098", **(facts | more))


def test_the_recorded_plans() -> None:
    """Every shipped preset, context and mode on every machine. After a wanted change: ``python -m tests.plans``, and read the diff."""
    recorded = plans.FILE.read_text().splitlines()
    assert list(plans.lines()) == recorded
    assert not [line for line in recorded if "| fits |" not in line]


def test_with_room_for_it_nothing_is_given_up() -> None:
    found = make(load())
    assert (found.fits, found.given_up, found.preset.context, found.preset.speculative) == (True, (), 65536, "mtp")
    assert found.device_bytes == sum(found.estimate.device.values())


RUNGS = (
    "speculative mtp → off",
    "cache_type_k f16 → q8_0, cache_type_v f16 → q8_0",
    "context 65536 → 32768",
    "context 32768 → 16384",
)
"""Those of turbo_4b that lessen what a card is short of."""


def words(found: Plan) -> tuple[str, ...]:
    """What was given up, without how much was short before."""
    return tuple(sentence.rpartition(" (")[0] for sentence in found.given_up)


def test_rungs_are_given_up_in_their_order_each_on_top_of_the_last() -> None:
    seen: list[tuple[str, ...]] = []
    for free in range(8000, 3000, -50):
        found = make(load(), free)
        if not seen or words(found) != seen[-1]:
            seen.append(words(found))
    assert seen[:5] == [RUNGS[:count] for count in range(5)]
    assert all(given[:4] == RUNGS and "layers run on the CPU" in given[4] for given in seen[5:])
    assert len(seen) > 6


def test_what_was_short_is_said_with_each_rung() -> None:
    whole = make(load())
    (sentence,) = make(load(), whole.device_bytes // MIB - 20).given_up
    assert sentence == "speculative mtp → off (21 MiB short)"


def test_it_fits_to_the_byte() -> None:
    need = make(load()).device_bytes
    for spare, fits in ((0, True), (-1, False)):
        where = budget.make("CUDA0", machine(16, 12), gpu="rtx3070", vram=need + spare)
        assert (plan.make(load(), known(load()), where).given_up == ()) is fits


def test_a_rung_that_would_not_lessen_what_is_short_is_kept() -> None:
    """The host is short, so the prompt cache goes, and nothing of the card's; the card is short, so the prompt cache stays."""
    short_host = make(load(), host_gib=2)
    assert words(short_host) == ("cache_ram 2048 → 256",)
    assert (short_host.fits, short_host.preset.context, short_host.preset.speculative) == (True, 65536, "mtp")
    assert make(load(), 4000).preset.cache_ram == 2048


def test_layers_stay_on_a_card_that_has_room() -> None:
    found = make(load(), host_gib=0.5)
    assert (found.fits, found.preset.gpu_layers, found.device_lacks) == (False, "all", 0)
    assert found.host_lacks == found.host_bytes - GIB // 2


def test_layers_leave_the_card_one_by_one_and_last() -> None:
    found = make(load(), 3000)
    assert found.fits
    assert words(found)[-1].endswith("of 34 layers run on the CPU")
    layers = int(found.preset.gpu_layers)
    more = replace(found.settings, gpu_layers=layers + 1)
    assert 0 < layers < 34
    taken = plan.estimate.make(plan.architecture.read(found.header), found.header, more)
    assert sum(taken.device.values()) > 3000 * MIB  # one more would not have fitted
    assert found.estimate.host["layers"] > 0


def test_nothing_outside_the_list_is_given_up() -> None:
    asked = replace(load(), fallback=())
    found = make(asked, 4000)
    assert (found.fits, found.given_up, found.preset.context) == (False, (), 65536)
    with pytest.raises(Error) as caught:
        found.require()
    assert caught.value.exit is Exit.NO_FIT
    assert caught.value.message == "turbo_4b needs 5.6 GiB of RTX 3070, which has 3.9 GiB: 1.7 GiB too much"


def test_what_never_fits_says_with_what_given_up() -> None:
    found = make(replace(load("balanced_9b"), fallback=load("balanced_9b").fallback[:2]), 3000)
    with pytest.raises(Error) as caught:
        found.require()
    assert "with model Qwen3.5-9B-Q4_K_M.gguf → Qwen3.5-9B-IQ4_XS.gguf" in caught.value.message


def test_the_hosts_memory_counts_too() -> None:
    found = make(load(), host_gib=0.5)
    assert not found.fits
    with pytest.raises(Error) as caught:
        found.require()
    assert "of the host's memory, which has 512.0 MiB" in caught.value.message


def test_on_the_cpu_both_draw_on_the_same_memory() -> None:
    asked = load("cpu_fallback")
    need = plan.make(asked, known(asked), budget.make("none", machine(16, 12)))
    both = need.device_bytes + need.host_bytes
    for spare, given_up in ((0, False), (-1, True)):
        where = budget.make("none", machine(16, (both + spare) / GIB))
        assert bool(plan.make(asked, known(asked), where).given_up) is given_up


def test_mtp_needs_a_head() -> None:
    asked = load()
    plain = {model: headers.find(NOWHERE, load("cpu_fallback").model) for model in asked.models}
    with pytest.raises(Error) as caught:
        plan.make(asked, plain, budget.make("CUDA0", machine(16, 12), gpu="rtx3070"))
    assert caught.value.message == "Qwen3.5-4B-Q4_K_M.gguf has no MTP head, and turbo_4b speculates with one"
    assert caught.value.exit is Exit.MODEL


def test_cache_types_need_a_kernel() -> None:
    pair = ("cache_type_k=q8_0", "cache_type_v=q4_0", "speculative=off")
    with pytest.raises(Error) as caught:
        make(load(overrides=pair), engine=engine())
    assert caught.value.message == (
        "the engine abc has no flash-attention kernel for a K cache of q8_0 with a V cache of q4_0; it has: f16-f16, q8_0-q8_0, q4_0-q4_0"
    )
    assert (caught.value.hint, caught.value.exit) == ("--set cache_type_v=q8_0", Exit.CONFIG)
    assert make(load(overrides=pair), engine=engine(fa_pairs=("q8_0-q4_0",))).fits


def test_a_card_needs_an_engine_for_it() -> None:
    with pytest.raises(Error) as caught:
        make(load(), engine=engine(cuda="", arch="", fa_pairs=()))
    assert caught.value.message == "turbo_4b runs on CUDA0 and the engine abc was built without CUDA"
    assert (caught.value.hint, caught.value.exit) == ("llmctl build", Exit.ENGINE)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"general.type": "adapter"}, "can't be loaded: it is a LoRA adapter, not a language model"),
        ({"qwen35.rope.dimension_sections": (11, 11, 10)}, "can't be loaded: qwen35.rope.dimension_sections has 3 entries"),
    ],
)
def test_what_the_engine_can_not_load_does_not_fit(entries: dict[str, Any], message: str) -> None:
    header = known(load())[load().model]
    broken = replace(header, entries={**header.entries, **entries})
    with pytest.raises(Error) as caught:
        plan.make(load(), {load().model: broken}, budget.make("CUDA0", machine(16, 12), gpu="rtx3070"))
    assert message in caught.value.message
    assert caught.value.exit is Exit.MODEL


def test_extra_arguments_that_are_not_counted_are_named() -> None:
    found = make(load(overrides=("extra_args=--override-tensor blk.0=CPU",)))
    assert "--override-tensor of extra_args may take or save memory that isn't counted here" in found.reasons


def test_layers_that_left_the_card_may_make_the_host_short_and_then_the_list_is_walked_again() -> None:
    """The prompt cache's rung is the list's first, and no help until the layers are the host's."""
    found = make(load(), 1800, host_gib=4)
    assert found.fits
    assert words(found)[-2].endswith("of 34 layers run on the CPU")
    assert words(found)[-1] == "cache_ram 2048 → 256"
    assert make(load(), 1800, host_gib=4, steps=found.steps).given_up == found.given_up


# what was given up before


def test_what_was_given_up_before_is_given_up_first_and_then_the_walk_goes_on() -> None:
    why = "it ran out of the card's memory"
    found = make(load(), 4600, steps=[Step({"context": 16384}, why), Step({"speculative": "off"}, why)])
    assert found.given_up[:2] == (f"context 65536 → 16384 ({why})", f"speculative mtp → off ({why})")
    assert found.fits
    assert (found.preset.context, found.preset.speculative, found.preset.cache_type_k) == (16384, "off", "f16")
    assert [dict(step.changes) for step in found.steps] == [{"context": 16384}, {"speculative": "off"}]
    further = make(load(), 3300, steps=found.steps)
    assert further.given_up[:2] == found.given_up
    assert words(further)[2] == "cache_type_k f16 → q8_0, cache_type_v f16 → q8_0"  # and no rung with a larger context
    assert further.preset.context == 16384


def test_what_is_given_up_for_shortage_are_steps_too() -> None:
    found = make(load(), 3000)
    assert [dict(step.changes) for step in found.steps] == [
        {"speculative": "off"},
        {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
        {"context": 32768},
        {"context": 16384},
        {"gpu_layers": found.preset.gpu_layers},
    ]
    roomy = make(load(), 7670, steps=found.steps)
    assert roomy.given_up == found.given_up
    assert roomy.estimate == found.estimate


@pytest.mark.parametrize(
    ("changes", "why_not"),
    [
        ({"no_such": 1}, "the preset has no no_such 1 that it could go down to"),
        ({"extra_args": "--prio"}, "the preset has no extra_args --prio that it could go down to"),
        ({"device": "none"}, "the preset has no device none that it could go down to"),
        ({"conflicts": 1}, "the preset has no conflicts 1 that it could go down to"),
        ({"model": load("tiny").model}, "the preset has no model SmolLM2-135M-Instruct.Q4_1.gguf that it could go down to"),
        ({"model": "tiny.gguf"}, "the preset has no model tiny.gguf that it could go down to"),
        (
            {"draft_model": load("tiny").model},
            "the preset has no draft_model SmolLM2-135M-Instruct.Q4_1.gguf that it could go down to",
        ),
        ({"context": 3}, "fallback: context is 3, but should be a whole number from 256 to 1048576"),
        ({"cache_type_k": "q9"}, "fallback: cache_type_k is 'q9', but should be"),
        ({"flash_attention": "off", "cache_type_v": "q8_0"}, "fallback: cache_type_v is q8_0, but flash_attention is off"),
        ({"cache_type_k": "q4_0"}, "the engine abc has no flash-attention kernel for a K cache of q4_0 with a V cache of f16"),
        ({"speculative": "draft"}, "fallback: speculative is draft, but there is no draft_model"),
    ],
)
def test_what_no_longer_goes_with_the_preset_is_left_out_and_said(changes: dict[str, Any], why_not: str) -> None:
    """The user edited it since, or the engine's kernels are others."""
    after = Step({"context": 32768}, "after it")
    found = make(load(), engine=engine(), steps=[Step(changes, "before"), after])
    assert (found.given_up, found.steps) == (("context 65536 → 32768 (after it)",), (after,))
    assert found.reasons[0].startswith(f"what was given up before (before) is kept: {why_not}")


def test_a_model_that_can_not_be_read_any_more_is_left_out_and_said() -> None:
    asked = load("balanced_9b")
    smaller = next(model for model in asked.models if model != asked.model)
    headers_ = known(asked)
    broken = replace(headers_[smaller], entries={**headers_[smaller].entries, "qwen35.block_count": 10**6})
    where = budget.make("CUDA0", machine(16, 12), gpu="rtx3070")
    for header, steps in ((headers_[smaller], 1), (broken, 0)):
        found = plan.make(asked, {**headers_, smaller: header}, where, steps=[Step({"model": smaller}, "before")])
        assert len(found.steps) == steps
        assert ("(before) is kept" in found.reasons[0]) is (steps == 0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"context": 65536},
        {"context": 131072},
        {"ubatch": 1024},
        {"speculative": "mtp"},
        {"gpu_layers": "all"},
        {"cache_ram": 4096},
    ],
)
def test_what_would_give_nothing_up_is_left_out_without_a_word(changes: dict[str, Any]) -> None:
    found, plain = make(load(), steps=[Step(changes, "before")]), make(load())
    assert (found.given_up, found.steps, found.reasons) == ((), (), plain.reasons)


def test_what_still_gives_something_up_of_a_step_is_given_up() -> None:
    found = make(load(), steps=[Step({"context": 131072, "speculative": "off"}, "before")])
    assert found.given_up == ("speculative mtp → off (before)",)
    assert found.preset.context == 65536


def test_what_can_not_run_as_asked_is_refused_whatever_was_given_up() -> None:
    asked = load()
    plain = {model: headers.find(NOWHERE, load("cpu_fallback").model) for model in asked.models}
    with pytest.raises(Error, match="has no MTP head"):
        plan.make(
            asked,
            plain,
            budget.make("CUDA0", machine(16, 12), gpu="rtx3070"),
            steps=[Step({"speculative": "off"}, "before")],
        )


# what the preset leaves to the machine


def test_threads_are_the_physical_cores_and_half_of_a_laptops() -> None:
    asked = load("cpu_fallback")
    for laptop, threads in ((False, 8), (True, 4)):
        where = budget.make("none", replace(machine(16, 12), laptop=laptop))
        assert plan.make(asked, known(asked), where).preset.threads == threads
    assert make(load(), 7670).preset.threads == 8


@pytest.mark.parametrize(("cores", "batch"), [(1, 128), (2, 256), (8, 1024), (64, 2048)])
def test_a_batch_is_about_a_second_of_prefill(cores: int, batch: int) -> None:
    asked = load("tiny", overrides=("batch=auto", "ubatch=auto"))
    where = budget.make("none", machine(16, 12, cores))
    found = plan.make(asked, known(asked), where)
    assert batch <= derive.prefill_tps(found.header, where, cores)
    assert (found.preset.batch, found.preset.ubatch) == (batch, min(batch, 512))


def test_a_slow_machine_has_the_least_batch_and_a_written_ubatch_holds() -> None:
    where = budget.make("none", machine(16, 12, 1))
    for overrides, batch, ubatch in (
        ((), 64, 64),
        (("ubatch=256",), 256, 256),
        (("batch=512",), 512, 512),
        (("batch=512", "ubatch=64"), 512, 64),
    ):
        asked = load("cpu_fallback", overrides=overrides)
        found = plan.make(asked, known(asked), where)
        assert (found.preset.batch, found.preset.ubatch) == (batch, ubatch)


def test_a_text_is_embedded_in_one_computed_batch() -> None:
    asked = load("tiny", overrides=("kind=embedding", "pooling=mean", "batch=auto", "ubatch=auto"))
    found = plan.make(asked, known(asked), budget.make("none", machine(16, 12)))
    assert found.preset.batch == found.preset.ubatch == 512


def test_the_prefill_to_expect_of_the_reference_card_is_the_measured_one() -> None:
    """Qwen3.5-9B Q4_K_M on an RTX 3070: 2,374 tokens/s at 512 tokens."""
    found = make(load("balanced_9b"))
    assert derive.prefill_tps(found.header, found.budget, 8) == pytest.approx(2374, rel=0.03)


def test_checkpoints_fill_their_budget_and_are_at_least_one() -> None:
    """50.25 MiB each, and 4 KiB a token of context with MTP."""
    assert make(load(mode="throughput")).preset.checkpoints == 300 // 50.25
    assert make(load(context="short")).preset.checkpoints == 300 // (50.25 + 64)
    assert make(load()).preset.checkpoints == 1
    assert make(load(overrides=("checkpoints=7",))).preset.checkpoints == 7
    assert make(load(mode="throughput", overrides=("checkpoint_budget=1000",))).preset.checkpoints == 1000 // 50.25


def test_a_complete_preset_leaves_nothing_open() -> None:
    for name in preset.names(NOWHERE):
        asked = load(name)
        where = budget.make(asked.device, machine(16, 12), gpu=None if asked.device == "none" else "rtx3070")
        found = plan.make(asked, known(asked), where)
        assert not {"auto", "chain"} & {str(value) for key, value in found.preset.values().items() if key != "flash_attention"}


# what earlier starts correct


def test_the_same_flags_take_what_they_took() -> None:
    first = make(load())
    mib = 1.0 * MIB
    seen = Allocation(
        {"weights": int(2700 * mib), "kv": int(2048 * mib), "compute": int(150 * mib)}, {"output": int(3 * mib)}, cuda=True
    )
    past = {load().model: [plan.allocated(first, seen)]}
    again = make(load(), past=past)
    assert again.estimate.device["weights"] == 2700 * MIB
    assert again.estimate.device["compute"] + again.estimate.device["scratch"] == 150 * MIB
    assert again.estimate.device["margin"] == first.estimate.device["margin"]
    assert again.estimate.host["output"] == 3 * MIB
    assert "the memory is what the engine allocated before, with the same flags" in again.reasons


def test_other_flags_take_the_same_weights() -> None:
    first = make(load())
    seen = Allocation({"weights": 2700 * MIB, "kv": 1}, {"embedding": 500 * MIB, "output": 1}, cuda=True)
    past = {load().model: [plan.allocated(first, seen)]}
    other = make(load(context="short"), past=past)
    plain = make(load(context="short"))
    assert (other.estimate.device["weights"], other.estimate.host["embedding"]) == (2700 * MIB, 500 * MIB)
    assert other.estimate.device["kv"] == plain.estimate.device["kv"]
    assert other.estimate.host["output"] == plain.estimate.host["output"]
    without = make(load(mode="throughput"), past=past)  # the head isn't loaded, so these aren't its weights
    assert without.estimate == make(load(mode="throughput")).estimate


def test_a_rung_that_was_tried_before_is_corrected_too() -> None:
    """The engine took more than was predicted: what seemed to fit doesn't, and the next rung is taken."""
    first = make(load(), 5800)
    assert first.given_up == ()
    seen = Allocation({**first.estimate.device, "compute": 400 * MIB}, {}, cuda=True)
    assert words(make(load(), 5800, past={load().model: [plan.allocated(first, seen)]})) == RUNGS[:1]


@pytest.mark.parametrize(
    "override", ["extra_args=--swa-full", "cache_type_k=q8_0", "slots=2", "unified=on", "draft_length=3", "flash_attention=off"]
)
def test_other_flags_are_another_start(override: str) -> None:
    first, other = make(load()), make(load(overrides=(override,)))
    assert plan.fingerprint(first.preset, first.settings) != plan.fingerprint(other.preset, other.settings)


def test_another_kind_or_draft_model_is_another_start() -> None:
    first, other = make(load("balanced_9b")), make(load("balanced_9b", overrides=("kind=embedding",)))
    assert plan.fingerprint(first.preset, first.settings) != plan.fingerprint(other.preset, other.settings)
    drafts = [replace(first.preset, draft_model=Model("d.gguf", path=path)) for path in ("/a/d.gguf", "/b/d.gguf")]
    assert plan.fingerprint(drafts[0], first.settings) != plan.fingerprint(drafts[1], first.settings)


def test_what_only_the_server_keeps_is_the_same_start() -> None:
    first, other = make(load()), make(load(overrides=("cache_ram=100", "checkpoints=3", "threads=1", "temperature=1")))
    assert plan.fingerprint(first.preset, first.settings) == plan.fingerprint(other.preset, other.settings)


def test_the_prediction_stays_beside_its_correction() -> None:
    first = make(load())
    seen = Allocation({"compute": 400 * MIB}, {}, cuda=True)
    again = make(load(), past={load().model: [plan.allocated(first, seen)]})
    assert again.predicted == first.estimate
    assert again.estimate.device["compute"] == 400 * MIB
