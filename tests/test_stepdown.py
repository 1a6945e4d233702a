"""What is given up after running out of memory: the ladders, what each step lessens, and plans that begin with them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from supervisor import budget, headers, plan, preset, stepdown
from supervisor.budget import Budget
from supervisor.causes import Kind
from supervisor.option import options
from supervisor.plan import Plan, Step
from supervisor.preset import Preset
from supervisor.profile import FEWER_LAYERS, FewerLayers, Rung
from supervisor.units import MIB
from supervisor.value import Value
from tests.plans import NOWHERE, machine

MEMORY = (Kind.DEVICE_MEMORY, Kind.HOST_MEMORY, Kind.GRAPH_MEMORY, Kind.ILLEGAL_ACCESS)
"""Kinds with something to give up."""


def load(name: str = "turbo_4b", **asked: Any) -> Preset:
    return preset.load(name, NOWHERE, **asked)


def card(free_mib: int = 7670, host_gib: float = 12) -> Budget:
    """An RTX 3070 with so much free."""
    return budget.make("CUDA0", machine(16, host_gib), gpu="rtx3070", vram=free_mib * MIB)


def planner(asked: Preset, where: Budget) -> stepdown.Replan:
    known = {model: headers.find(NOWHERE, model) for model in asked.models}
    return lambda steps: plan.make(asked, known, where, steps=steps)


def walk(replan: stepdown.Replan, kind: Kind, steps: Sequence[Step] = ()) -> Iterator[Plan]:
    """Every plan down to the last, the first included."""
    found = replan(steps)
    yield found
    while (after := stepdown.after(found, kind, replan)) is not None:
        found = replan(after)
        yield found


def words(plans: Sequence[Plan]) -> list[str]:
    """What each gave up beyond the last one, without its reason."""
    return [found.given_up[-1].rpartition(" (")[0] for found in plans[1:]]


def test_a_card_that_ran_out_goes_down_the_whole_fallback_and_then_gives_its_layers_away() -> None:
    plans = list(walk(planner(load(), card()), Kind.DEVICE_MEMORY))
    taken = [found.device_bytes for found in plans]
    assert all(after < before for before, after in itertools.pairwise(taken))
    assert words(plans)[:4] == [
        "speculative mtp → off",
        "cache_type_k f16 → q8_0, cache_type_v f16 → q8_0",
        "context 65536 → 32768",
        "context 32768 → 16384",
    ]
    assert len(plans) > 6
    assert all(given.endswith(" of 34 layers run on the CPU") for given in words(plans)[4:])
    lots = taken[4:-1]  # the last may be less: it is all that is left
    assert all(after <= 0.9 * before for before, after in itertools.pairwise(lots))
    assert plans[-1].settings.gpu_layers == 0
    assert plans[1].given_up == ("speculative mtp → off (it ran out of the card's memory)",)


def test_no_more_layers_than_a_tenth_takes_leave_at_once() -> None:
    replan = planner(replace(load(), fallback=(FEWER_LAYERS,)), card())
    first, second, *_ = walk(replan, Kind.DEVICE_MEMORY)
    layers = second.settings.gpu_layers
    one_more = replan([Step({"gpu_layers": layers + 1}, "")])
    assert second.device_bytes <= 0.9 * first.device_bytes < one_more.device_bytes


def test_layers_that_left_in_lots_are_one_step() -> None:
    *_, last = walk(planner(replace(load(), fallback=(FEWER_LAYERS,)), card()), Kind.DEVICE_MEMORY)
    assert last.given_up == ("34 of 34 layers run on the CPU (it ran out of the card's memory)",)
    assert last.steps == (Step({"gpu_layers": 0}, "it ran out of the card's memory"),)


def test_what_the_host_lacks_is_no_help_to_the_card_and_the_other_way_round() -> None:
    assert words(list(walk(planner(load(), card()), Kind.HOST_MEMORY)))[:1] == ["cache_ram 2048 → 256"]
    plans = list(walk(planner(load(), card()), Kind.HOST_MEMORY))
    taken = [found.host_bytes for found in plans]
    assert all(after < before for before, after in itertools.pairwise(taken))
    assert all(found.preset.gpu_layers == "all" for found in plans)


def test_a_memory_that_is_short_by_now_is_not_taken_for_a_rungs_help() -> None:
    """The prompt cache's rung comes first; that less of the card is free makes the plan smaller, whichever rung is tried."""
    died = planner(load(), card())(())
    tight = planner(load(), card(died.device_bytes // MIB - 20))
    after = stepdown.after(died, Kind.DEVICE_MEMORY, tight)
    assert after is not None
    assert [dict(step.changes) for step in after] == [{"speculative": "off"}, {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}]
    assert [step.why for step in after] == ["21 MiB short", "it ran out of the card's memory"]


def test_without_a_card_both_are_the_machines_memory() -> None:
    for kind in (Kind.DEVICE_MEMORY, Kind.HOST_MEMORY):
        plans = list(walk(planner(load("cpu_fallback"), budget.make("none", machine(16, 14))), kind))
        taken = [found.device_bytes + found.host_bytes for found in plans]
        assert all(after < before for before, after in itertools.pairwise(taken))
        assert words(plans) == [
            "cache_ram 1024 → 256, checkpoint_budget 300 → 100",
            "context 8192 → 4096",
            "model Qwen3.5-4B-Q4_K_M.gguf → Qwen3.5-2B-Q4_K_M.gguf",
        ]
        assert plans[1].given_up[0].endswith(" (it ran out of the machine's memory)")


def test_a_graph_without_room_costs_graphs_first_then_half_a_ubatch_then_the_head() -> None:
    plans = list(walk(planner(load(), card()), Kind.GRAPH_MEMORY))
    assert words(plans)[:4] == [
        "cuda_graphs on → off",
        "ubatch 512 → 256",
        "speculative mtp → off",
        "cache_type_k f16 → q8_0, cache_type_v f16 → q8_0",
    ]
    assert words(plans)[-1] == "34 of 34 layers run on the CPU"
    assert plans[1].given_up == ("cuda_graphs on → off (a CUDA graph found no room on the card)",)
    assert all(int(found.preset.batch) >= int(found.preset.ubatch) for found in plans)


@pytest.mark.parametrize(
    ("overrides", "next_"),
    [
        (("cuda_graphs=off", "ubatch=64", "batch=512"), "speculative"),
        (("cuda_graphs=off", "ubatch=128", "batch=512"), "ubatch"),
    ],
)
def test_what_a_graph_leaves_no_room_for(overrides: tuple[str, ...], next_: str) -> None:
    replan = planner(load(overrides=overrides), card())
    after = stepdown.after(replan(()), Kind.GRAPH_MEMORY, replan)
    assert after is not None
    assert next(iter(after[-1].changes)) == next_


def test_a_table_of_what_was_said_is_no_head_on_the_card() -> None:
    asked = replace(load(overrides=("cuda_graphs=off", "ubatch=100", "speculative=ngram")), fallback=())
    replan = planner(asked, card())
    assert stepdown.after(replan(()), Kind.GRAPH_MEMORY, replan) is None


def test_a_text_that_is_embedded_in_one_ubatch_keeps_it() -> None:
    asked = load(overrides=("kind=embedding", "speculative=off", "cuda_graphs=off", "batch=512"))
    replan = planner(asked, card())
    after = stepdown.after(replan(()), Kind.GRAPH_MEMORY, replan)
    assert after is not None
    assert "ubatch" not in after[-1].changes


def test_an_illegal_access_costs_graphs_then_the_draft_then_a_quantised_cache() -> None:
    overrides = ("cache_type_k=q8_0", "cache_type_v=q8_0")
    plans = list(walk(planner(load(overrides=overrides), card()), Kind.ILLEGAL_ACCESS))
    assert words(plans) == [
        "cuda_graphs on → off",
        "speculative mtp → off",
        "cache_type_k q8_0 → f16, cache_type_v q8_0 → f16",
    ]
    assert plans[-1].given_up[-1].endswith(" (an illegal memory access on the card)")
    assert len(list(walk(planner(load(), card()), Kind.ILLEGAL_ACCESS))) == 3  # its cache is f16


def test_a_larger_cache_is_no_step_down_where_something_had_to_make_room_for_it() -> None:
    asked = load(overrides=("cache_type_k=q8_0", "cache_type_v=q8_0", "cuda_graphs=off", "speculative=off"))
    need = planner(asked, card())(()).device_bytes // MIB
    larger = planner(asked.change({"cache_type_k": "f16", "cache_type_v": "f16"}, "test"), card())(()).device_bytes // MIB
    for free, steps in ((need + 10, 0), (larger - 10, 0), (larger + 10, 1)):
        assert len(list(walk(planner(asked, card(free)), Kind.ILLEGAL_ACCESS))) == 1 + steps


def test_a_draft_model_goes_with_the_speculation() -> None:
    asked = load(overrides=("cuda_graphs=off",))
    asked = asked.change({"speculative": "draft", "draft_model": load("tiny").model}, "test")
    last = list(walk(planner(asked, card()), Kind.ILLEGAL_ACCESS))[-1]
    assert (last.preset.speculative, last.preset.draft_model) == ("off", None)
    assert last.given_up == ("speculative draft → off (an illegal memory access on the card)",)


def test_what_is_no_shortage_of_memory_gives_nothing_up() -> None:
    replan = planner(load(), card())
    for kind in Kind:
        assert (stepdown.after(replan(()), kind, replan) is not None) is (kind in MEMORY)
    tiny = planner(load("tiny"), budget.make("none", machine(16, 14)))
    for kind in Kind:  # it has no fallback, and nothing of a card's
        assert stepdown.after(tiny(()), kind, tiny) is None


def test_a_rung_that_can_not_run_is_passed_over() -> None:
    """Its cache's types have no kernel in this engine."""
    from supervisor.engine import Engine

    known = {model: headers.find(NOWHERE, model) for model in load().models}
    engine = Engine(NOWHERE.data, "abc", "native", 11312, "0c1e57098", cuda="13.0", arch="86", fa_pairs=("f16-f16",))

    def replan(steps: Sequence[Step]) -> Plan:
        return plan.make(load(), known, card(), engine=engine, steps=steps)

    assert words(list(walk(replan, Kind.DEVICE_MEMORY)))[:2] == ["speculative mtp → off", "context 65536 → 32768"]


# whatever the preset and the memory


CHANGES: Mapping[str, Sequence[Value]] = {
    "context": (2048, 4096, 16384, 65536),
    "ubatch": (64, 256, 512),
    "slots": (1, 2),
    "cache_type_k": ("f16", "q8_0", "q4_0"),
    "cache_type_v": ("f16", "q8_0", "q4_0"),
    "speculative": ("off", "ngram"),
    "gpu_layers": (0, 5, 20),
    "cache_ram": (0, 256, 4096),
    "checkpoint_budget": (0, 100),
    "unified": (True, False),
    "cuda_graphs": (False,),
}


def drawn(dice: random.Random) -> tuple[Preset, Budget]:
    """A preset with a fallback of any rungs, and memory of any size."""
    name = dice.choice(("turbo_4b", "balanced_9b", "cpu_fallback", "tiny"))
    asked = load(name)

    def rung() -> Rung | FewerLayers:
        names = dice.sample(list(CHANGES), dice.randint(1, 3))
        return Rung(MappingProxyType({name: dice.choice(CHANGES[name]) for name in names}))

    ladder = [*asked.fallback, *(rung() for _ in range(dice.randint(0, 4)))]
    dice.shuffle(ladder)
    ladder = [each for each in ladder if each != FEWER_LAYERS] + dice.choice(([], [FEWER_LAYERS]))
    asked = replace(asked, fallback=tuple(ladder))
    if asked.device == "none":
        return asked, budget.make("none", machine(16, dice.uniform(0.2, 14)))
    return asked, card(dice.randint(600, 9000), dice.uniform(0.5, 12))


@pytest.mark.parametrize("seed", range(40))
def test_each_step_lessens_what_ran_out_and_a_plan_is_what_its_steps_make(seed: int) -> None:
    dice = random.Random(seed)
    asked, where = drawn(dice)
    replan = planner(asked, where)
    kind = dice.choice(MEMORY)
    pool: Callable[[Plan], int] = {
        Kind.DEVICE_MEMORY: lambda found: found.device_bytes + (0 if where.cuda else found.host_bytes),
        Kind.HOST_MEMORY: lambda found: found.host_bytes + (0 if where.cuda else found.device_bytes),
    }.get(kind, lambda _: 0)
    before = None
    for found in walk(replan, kind):
        again = replan(found.steps)
        assert (again.asked, again.preset, again.estimate, again.given_up) == (
            found.asked,
            found.preset,
            found.estimate,
            found.given_up,
        )
        assert again.steps == found.steps
        assert len(found.steps) == len(found.given_up)
        assert set().union(*(step.changes for step in found.steps)) <= {*options(), "model", "draft_model"}
        assert before is None or kind in (Kind.GRAPH_MEMORY, Kind.ILLEGAL_ACCESS) or pool(found) < pool(before)
        before = found
