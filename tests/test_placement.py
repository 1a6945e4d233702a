"""Which children may be in memory together: each rule by a case, and the choice of who gives way against all subsets."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest

from supervisor import budget, headers, placement, plan, preset
from supervisor.placement import HOST, Choice, GiveWay, Never, Running, Start, Wait, choose
from supervisor.units import GIB, MIB
from tests.plans import BOXES, NOWHERE

NOW_S = 1000.0


def on_host(name: str, planned: int, held: int | None = None, **more: Any) -> Running:
    """A child that has taken all that was planned, unless ``held`` says less."""
    return Running(name, {HOST: planned}, {HOST: planned if held is None else held}, **more)


def on_card(name: str, card: int, host: int = 0, **more: Any) -> Running:
    needs = {"CUDA0": card, HOST: host}
    return Running(name, needs, needs, **more)


CASES: dict[str, tuple[dict[str, int], dict[str, int], list[Running], Choice]] = {
    # (1)
    "it fits beside nothing": ({HOST: 10}, {HOST: 10}, [], Start()),
    "it fits beside others": ({HOST: 10}, {HOST: 10}, [on_host("a", 50)], Start()),
    "a pool that isn't there has nothing": ({"CUDA1": 1}, {HOST: 10}, [], Never(())),
    "what the others have yet to take isn't free": ({HOST: 10}, {HOST: 49}, [on_host("a", 50, 10, yields=False)], Never(("a",))),
    "what they have yet to take may be enough, too": ({HOST: 10}, {HOST: 50}, [on_host("a", 50, 10, yields=False)], Start()),
    "one that took more than planned is owed nothing": ({HOST: 10}, {HOST: 10}, [on_host("a", 50, 60, yields=False)], Start()),
    # (2)
    "one gives way": ({HOST: 10}, {HOST: 0}, [on_host("a", 10)], GiveWay(("a",))),
    "one that has yet to take its memory gives way with its right": (
        {HOST: 60},
        {HOST: 60},
        [on_host("a", 50, 0)],
        GiveWay(("a",)),
    ),
    "no more than needed": (
        {HOST: 10},
        {HOST: 0},
        [on_host("a", 10, used_s=1), on_host("b", 10, used_s=2)],
        GiveWay(("a",)),
    ),
    "both where one is not enough": (
        {HOST: 20},
        {HOST: 0},
        [on_host("a", 10, used_s=1), on_host("b", 10, used_s=2)],
        GiveWay(("a", "b")),
    ),
    "a small one that doesn't help stays": (
        {HOST: 10},
        {HOST: 0},
        [on_host("small", 5, used_s=1), on_host("large", 10, used_s=2)],
        GiveWay(("large",)),
    ),
    "the longest unused": (
        {HOST: 10},
        {HOST: 0},
        [on_host("a", 10, used_s=2), on_host("b", 10, used_s=1)],
        GiveWay(("b",)),
    ),
    "one that nobody ordered before one that was": (
        {HOST: 10},
        {HOST: 0},
        [on_host("a", 10, used_s=1, ordered=True), on_host("b", 10, used_s=2)],
        GiveWay(("b",)),
    ),
    "an idle one before a busy one": (
        {HOST: 10},
        {HOST: 0},
        [on_host("a", 10, used_s=1, busy=True), on_host("b", 10, used_s=2, ordered=True)],
        GiveWay(("b",)),
    ),
    "of those that are enough together, the ones that had rather stay do": (
        {HOST: 12},
        {HOST: 0},
        [on_host("a", 5, used_s=1), on_host("b", 5, used_s=2), on_host("c", 7, used_s=3)],
        GiveWay(("a", "c")),
    ),
    "a pinned one stays": (
        {HOST: 10},
        {HOST: 0},
        [on_host("a", 10, used_s=1, yields=False), on_host("b", 10, used_s=2)],
        GiveWay(("b",)),
    ),
    # (3)
    "a busy one may go on for its time": (
        {HOST: 10},
        {HOST: 0},
        [on_host("a", 10, busy=True, due_s=NOW_S + 7)],
        Wait(NOW_S + 7),
    ),
    "and then takes no more": ({HOST: 10}, {HOST: 0}, [on_host("a", 10, busy=True, due_s=NOW_S)], GiveWay(("a",))),
    "an idle one has no time left": ({HOST: 10}, {HOST: 0}, [on_host("a", 10, due_s=NOW_S + 7)], GiveWay(("a",))),
    "all go together, when the last one's time is over": (
        {HOST: 30},
        {HOST: 0},
        [
            on_host("a", 10),
            on_host("b", 10, busy=True, due_s=NOW_S + 3),
            on_host("c", 10, busy=True, due_s=NOW_S + 5),
        ],
        Wait(NOW_S + 5),
    ),
    # (4)
    "one that loads is waited for": ({HOST: 10}, {HOST: 10}, [on_host("a", 10, 0, settled=False)], Wait()),
    "one that stops is waited for": ({HOST: 10}, {HOST: 0}, [on_host("a", 10, leaving=True)], Wait()),
    "where one that stops is enough, nobody else gives way": (
        {HOST: 10},
        {HOST: 0},
        [on_host("a", 10, leaving=True), on_host("b", 10)],
        Wait(),
    ),
    "where it isn't, another one does": (
        {HOST: 15},
        {HOST: 0},
        [on_host("a", 10, leaving=True), on_host("b", 10)],
        GiveWay(("b",)),
    ),
    "one that loads is not asked where another is enough": (
        {HOST: 10},
        {HOST: 0},
        [on_host("a", 10, settled=False, used_s=1), on_host("b", 10, used_s=2)],
        GiveWay(("b",)),
    ),
    "a pinned one that loads may yet turn out smaller": (
        {HOST: 10},
        {HOST: 0},
        [on_host("a", 10, settled=False, yields=False)],
        Wait(),
    ),
    # (5)
    "it doesn't fit beside a pinned one": (
        {HOST: 10},
        {HOST: 5},
        [on_host("a", 10, yields=False), on_host("b", 4)],
        Never(("a",)),
    ),
    "it doesn't fit at all": ({HOST: 10}, {HOST: 9}, [], Never(())),
    # Pools.
    "on a card that is free beside a host that is full": ({"CUDA0": 10}, {"CUDA0": 10, HOST: 0}, [on_host("a", 10)], Start()),
    "every pool has to have room": (
        {"CUDA0": 10, HOST: 5},
        {"CUDA0": 10, HOST: 4},
        [on_host("a", 10)],
        GiveWay(("a",)),
    ),
    "who is in another pool stays": (
        {"CUDA0": 10, HOST: 1},
        {"CUDA0": 0, HOST: 5},
        [on_host("a", 50, used_s=1), on_card("b", 10, used_s=2)],
        GiveWay(("b",)),
    ),
    "one for each pool that is short": (
        {"CUDA0": 10, HOST: 10},
        {"CUDA0": 0, HOST: 0},
        [on_host("a", 10, used_s=1), on_card("b", 10, used_s=2), on_card("c", 10, used_s=3)],
        GiveWay(("a", "b")),
    ),
    "two cards are two pools": (
        {"CUDA1": 10},
        {"CUDA0": 99, "CUDA1": 0},
        [on_card("a", 50, used_s=1), Running("b", {"CUDA1": 10}, {"CUDA1": 10}, used_s=2)],
        GiveWay(("b",)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rules(case: str) -> None:
    need, free, running, choice = CASES[case]
    assert choose(need, free, running, NOW_S) == choice


@pytest.mark.parametrize("case", CASES)
def test_the_order_in_which_they_are_listed_changes_nothing(case: str) -> None:
    need, free, running, choice = CASES[case]
    found = choose(need, free, running[::-1], NOW_S)
    if isinstance(choice, Never):
        assert isinstance(found, Never)
        assert set(found.beside) == set(choice.beside)
    else:
        assert found == choice


def reluctance(each: Running) -> tuple[bool, bool, float]:
    return each.busy, each.ordered, each.used_s


def best(need: dict[str, int], free: dict[str, int], running: list[Running]) -> set[str] | None:
    """Of all sets that would be enough the one that spares the most reluctant, then the next: by looking at every set."""
    room = dict(free)
    for each in running:
        for pool in need:
            room[pool] = room.get(pool, 0) - max(0, each.planned.get(pool, 0) - each.held.get(pool, 0))
            room[pool] += each.planned.get(pool, 0) if each.leaving else 0
    candidates = sorted((each for each in running if each.yields and each.settled and not each.leaving), key=reluctance)
    for gone in itertools.product((False, True), repeat=len(candidates)):  # the last one is the least significant
        chosen = [each for each, goes in zip(candidates[::-1], gone, strict=True) if goes]
        if all(room.get(pool, 0) + sum(each.planned.get(pool, 0) for each in chosen) >= count for pool, count in need.items()):
            return {each.name for each in chosen}
    return None


@pytest.mark.parametrize("seed", range(30))
def test_who_gives_way_is_a_minimal_set_that_spares_the_most_reluctant(seed: int) -> None:
    draw = random.Random(seed)
    seen = set()
    for _ in range(300):
        pools = draw.choice([[HOST], [HOST, "CUDA0"], [HOST, "CUDA0", "CUDA1"]])
        running = []
        for number in range(draw.randint(0, 6)):
            planned = {pool: draw.choice([0, 1, 2, 3, 5, 8, 13]) for pool in draw.sample(pools, draw.randint(1, len(pools)))}
            held = {pool: draw.choice([0, count, count, count + 1]) for pool, count in planned.items()}
            flags: dict[str, Any] = {name: draw.random() < 0.3 for name in ("busy", "ordered")}
            kind = draw.random()
            flags |= {"yields": kind > 0.1, "settled": not 0.1 < kind < 0.2, "leaving": 0.2 < kind < 0.3}
            running.append(Running(f"{number}", planned, held, used_s=draw.random(), **flags))
        need = {pool: draw.randint(0, 20) for pool in pools}
        free = {pool: draw.randint(0, 30) for pool in pools}
        choice = choose(need, free, running, NOW_S)
        seen.add(type(choice))
        found = best(need, free, running)
        if isinstance(choice, Start):
            stays = [dataclasses.replace(each, leaving=False) for each in running]
            assert best(need, free, stays) == set()
        elif isinstance(choice, GiveWay):
            assert set(choice.names) == found
            assert found
        elif isinstance(choice, Wait):
            assert found in (set(), None)
            assert any(each.leaving or not each.settled for each in running)
        else:
            assert found is None
            assert set(choice.beside) == {each.name for each in running if not each.yields}
    assert seen == {Start, GiveWay, Wait, Never}


def test_what_a_plan_may_count_on_is_what_it_would_find_were_all_gone_that_may_go() -> None:
    running = [
        on_host("a", 50, 20),  # 30 are free now and promised to it: gone, it leaves 20 more than is free now
        on_card("b", 7, 3, yields=False),
        Running("c", {"CUDA0": 9, HOST: 1}, {"CUDA0": 4}, yields=False),
        on_card("d", 2, 1),
    ]
    assert placement.spare(running) == {HOST: 20 + 0 - 1 + 1, "CUDA0": 0 - 5 + 2}
    assert placement.spare([]) == {}


def test_a_plan_on_the_cpu_needs_the_hosts_memory_for_all_of_it() -> None:
    asked = preset.load("tiny", NOWHERE)
    found = plan.make(asked, {asked.model: headers.find(NOWHERE, asked.model)}, budget.make("none", BOXES["16 GB RAM"]))
    assert placement.needs(found) == {HOST: found.device_bytes + found.host_bytes}
    assert found.device_bytes > 100 * MIB


def test_a_plan_on_a_card_needs_both() -> None:
    asked = preset.load("turbo_4b", NOWHERE)
    known = {model: headers.find(NOWHERE, model) for model in asked.models}
    found = plan.make(asked, known, budget.make("CUDA0", BOXES["16 GB RAM"], gpu="rtx3070"))
    assert placement.needs(found) == {"CUDA0": found.device_bytes, HOST: found.host_bytes}
    assert GIB < found.device_bytes < 8 * GIB
    assert 0 < found.host_bytes < 4 * GIB
