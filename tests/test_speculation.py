"""What is learnt of guesses, when it is enough, and which way is tried next; then the same with running children."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor import budget, headers, paths, plan, preset, speculation
from supervisor.arbiter import Arbiter
from supervisor.errors import Error, Exit
from supervisor.lifecycle import State
from supervisor.model import Model
from supervisor.option import Options, Speculation, methods
from supervisor.order import Order
from supervisor.plan import Plan, Step
from supervisor.speculation import AGAIN_S, BAD, GOOD, LONG_S, LOT, LOTS, Acceptance, Verdict, Watch
from supervisor.units import MIB
from supervisor.ward import Ward
from tests.fakes import gguf
from tests.plans import NOWHERE, machine
from tests.shelf import Shelf, ask, place, run, state, turns, until

THREE: tuple[Speculation, ...] = ("mtp", "ngram", "off")


def teach(
    watch: Watch | Acceptance, share: float, *, lots: int = 2 * LOTS, from_s: float = 0.0, over_s: float = 3 * LONG_S
) -> float:
    """So many requests that each are a lot, evenly over the time; the time of the last."""
    for number in range(lots):
        watch.learn(from_s + over_s * number / max(1, lots - 1), LOT, round(share * LOT))
    return from_s + over_s


# The list.


@pytest.mark.parametrize(
    ("first", "then", "found"),
    [
        ("off", (), ("off",)),
        ("off", ("ngram",), ("off",)),
        ("mtp", (), ("mtp", "off")),
        ("mtp", ("ngram",), THREE),
        ("mtp", ("ngram", "off"), THREE),
        ("ngram", ("mtp", "ngram"), ("ngram", "mtp", "off")),
    ],
)
def test_the_list_begins_with_its_own_way_and_ends_with_off(first: Any, then: Any, found: tuple[str, ...]) -> None:
    assert methods(Options(speculative=first, speculative_next=then)) == found


def test_a_preset_further_down_its_list_has_the_rest_of_it() -> None:
    own = Model("own.gguf", path="/own.gguf")
    asked = dataclasses.replace(
        preset.load("tiny", NOWHERE), model=own, draft_model=own, speculative="mtp", speculative_next=("draft", "ngram")
    )
    draft = asked.drafting("draft")
    assert (draft.speculative, draft.speculative_next, draft.draft_model) == ("draft", ("ngram", "off"), own)
    ngram = asked.drafting("ngram")
    assert (ngram.speculative, ngram.speculative_next, ngram.draft_model) == ("ngram", ("off",), None)
    off = draft.drafting("off")
    assert (off.speculative, off.speculative_next, off.draft_model) == ("off", (), None)
    assert off.origins["speculative"] == "speculation"
    assert asked.drafting("mtp") is asked
    assert off.drafting("mtp") is off  # an edited preset may not know it any more


FILE = """\
model: {path: m.gguf}
speculative: mtp
speculative_next: [ngram, off]
modes:
  plain: {speculative: off}
  quoting: {speculative: ngram, speculative_next: []}
"""


def test_the_list_is_read_from_a_file_and_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(FILE)
    assert methods(preset.read(path)) == THREE
    assert methods(preset.read(path, mode="plain")) == ("off",)
    assert methods(preset.read(path, mode="quoting")) == ("ngram", "off")
    assert methods(preset.read(path, overrides=["speculative_next=off"])) == ("mtp", "off")
    assert preset.read(path).values()["speculative_next"] == ["ngram", "off"]
    with pytest.raises(Error) as caught:
        preset.read(path, overrides=["speculative_next=ngram eagle"])
    assert "'eagle' should be 'off', 'mtp', 'ngram' or 'draft'" in caught.value.message
    assert caught.value.hint == "--set speculative_next=ngram"
    path.write_text(FILE + "fallback: [{speculative_next: [off]}]\n")
    with pytest.raises(Error, match=r"own\.yaml:7.*speculative_next"):
        preset.read(path)


def test_an_order_for_a_later_way_is_planned_with_it(tmp_path: Path) -> None:
    home = paths.home({"LLMCTL_HOME": str(tmp_path)})
    home.presets.mkdir(parents=True)
    (home.presets / "own.yaml").write_text(FILE.replace("m.gguf", str(gguf.minimal(tmp_path / "m.gguf"))))
    asked = Order("own", home=home, method="ngram")
    assert (asked.preset.speculative, "ngram-mod" in asked.argv) == ("ngram", True)
    assert "--spec-type" not in dataclasses.replace(asked, method="off").argv
    assert asked.words() == ["own"]
    assert dataclasses.replace(asked, method="draft").preset.speculative == "mtp"  # it isn't in the list any more


# What is learnt.


def naive(made_up: list[tuple[float, int, int]]) -> Iterator[tuple[float | None, bool]]:
    """After each request the part of the recent lots that was right, and whether it is bad; written the long way."""
    lots: list[tuple[float, float]] = []
    weight = right = 0.0
    below: list[float] = []
    bad = False
    for now_s, made, accepted in made_up:
        part = min(1.0, LOT / made) if made else 0.0
        weight, right = weight + made * part, right + accepted * part
        if weight >= LOT:
            lots.append((weight, right))
            weight = right = 0.0
            recent = lots[-LOTS:]
            share = sum(each[1] for each in recent) / sum(each[0] for each in recent)
            below = [*below, now_s] if len(recent) == LOTS and share < BAD else []
            bad = bool(below) and below[-1] - below[0] >= LONG_S
            if len(recent) == LOTS and share > GOOD:
                lots = []
        recent = lots[-LOTS:]
        full = len(recent) == LOTS
        yield (sum(each[1] for each in recent) / sum(each[0] for each in recent) if full else None), bad


def history(draw: random.Random) -> list[tuple[float, int, int]]:
    """Requests of all sizes: when, how many guesses, how many of them right; now and then the texts become others."""
    made_up, now_s, truth = [], 0.0, draw.random()
    for _ in range(1_000):
        if draw.random() < 0.005:
            truth = draw.random() ** 2
        now_s += draw.expovariate(1 / 60)
        made = draw.choice((0, 1, 7, 60, 100, 400, 30_000))
        made_up.append((now_s, made, sum(draw.random() < truth for _ in range(min(made, 400))) * made // max(1, min(made, 400))))
    return made_up


@pytest.mark.parametrize("seed", range(3))
def test_what_is_learnt_of_any_history_is_what_the_long_way_finds(seed: int) -> None:
    """And so it is never against a method whose recent guesses were right often enough, nor without enough of them."""
    draw, seen = random.Random(seed), 0
    for _ in range(10):
        seen += against(history(draw))
    assert seen > 0


def against(made_up: list[tuple[float, int, int]]) -> int:
    """How often it was found bad."""
    watch, seen = Acceptance(), 0
    for (at_s, made, right), (share, bad) in zip(made_up, naive(made_up), strict=True):
        watch.learn(at_s, made, right)
        assert (watch.window is None) is (share is None)
        assert share is None or watch.window == pytest.approx(share)
        assert watch.is_bad is bad
        if watch.is_bad:
            seen += 1
            assert watch.window is not None
            assert watch.window < BAD
    return seen


@pytest.mark.parametrize("made", [1, 3, 99, 100, 101, 5_000])
def test_bad_guesses_are_bad_after_so_many_lots_and_so_long(made: int) -> None:
    """The stated bound: the first lot that is full :data:`LONG_S` after the 64th was."""
    watch, each = Acceptance(), math.ceil(LOT / min(made, LOT))
    for number in range(each * LOTS):
        watch.learn(number, made, made // 4)
        assert not watch.is_bad
    full_s = each * LOTS - 1
    for number in range(each - 1):
        watch.learn(full_s + LONG_S, made, made // 4)
        assert not watch.is_bad, number
    watch.learn(full_s + LONG_S, made, made // 4)
    assert watch.is_bad


def test_a_burst_decides_nothing_however_long_ago() -> None:
    watch = Watch(THREE)
    teach(watch, 0.1, lots=10 * LOTS, over_s=LONG_S - 1)
    assert watch.verdict(30 * AGAIN_S) is Verdict.STAY
    watch.learn(AGAIN_S, LOT, 10)
    assert watch.verdict(AGAIN_S) is Verdict.NEXT


def test_between_the_two_it_goes_on_watching() -> None:
    watch = Watch(THREE)
    last_s = teach(watch, 0.45, lots=500, over_s=100 * LONG_S)
    assert watch.acceptance == pytest.approx(0.45)
    assert watch.verdict(last_s) is Verdict.STAY
    last_s = teach(watch, 0.0, lots=2 * LOTS // 3, from_s=last_s)  # fewer than the recent ones: what was before still counts
    assert watch.verdict(last_s) is Verdict.NEXT


def test_good_guesses_drop_what_spoke_against_it() -> None:
    watch = Watch(THREE)
    last_s = teach(watch, 0.9)
    assert watch.acceptance == pytest.approx(0.9)  # it is still said
    last_s = teach(watch, 0.0, lots=LOTS - 1, from_s=last_s, over_s=10 * LONG_S)
    assert watch.verdict(last_s) is Verdict.STAY  # as many as it takes have to be of after
    last_s = teach(watch, 0.0, lots=2, from_s=last_s, over_s=LONG_S)
    assert watch.verdict(last_s) is Verdict.NEXT


def test_one_long_request_counts_as_one() -> None:
    watch = Watch(THREE)
    watch.learn(0.0, 1_000_000, 0)
    last_s = teach(watch, 0.35, lots=3 * LOTS, over_s=10 * LONG_S)
    assert watch.verdict(last_s) is Verdict.STAY


def test_a_good_method_is_given_up_by_chance_as_seldom_as_is_said() -> None:
    """Requests as unlike each other as can be: of some all guesses are right, of the others none. The bound is of one look."""
    draw = random.Random(7)
    worst = 1.0
    for _ in range(2_000):
        watch = Acceptance()
        for number in range(LOTS):
            watch.learn(number, LOT, LOT if draw.random() < GOOD else 0)
        worst = min(worst, watch.window if watch.window is not None else 1.0)
    assert worst >= BAD


def test_memory_is_bounded_and_nonsense_is_borne() -> None:
    watch = Acceptance()
    for number in range(100_000):
        watch.learn(number, number % 301 - 1, number % 7 - 2)
    assert len(watch._lots) <= LOTS
    watch = Acceptance()
    for made, right in ((0, 5), (-3, 0), (10, 20), (10, -1)):
        watch.learn(0.0, made, right)
    assert watch.share == pytest.approx(0.5)


# Where it goes.


def test_it_goes_down_its_list_and_a_day_later_begins_again() -> None:
    watch = Watch(THREE)
    assert (watch.method, watch.candidates(0.0), watch.due_s, watch.why) == ("mtp", (), math.inf, None)
    last_s = teach(watch, 0.2)
    assert (watch.verdict(last_s), watch.candidates(last_s)) == (Verdict.NEXT, ("ngram", "off"))
    assert watch.due_s <= last_s
    assert watch.take("ngram", last_s) == "20% of what mtp guessed was right" == watch.why
    assert (watch.method, watch.acceptance, watch.verdict(last_s)) == ("ngram", None, Verdict.STAY)
    assert watch.due_s == last_s + AGAIN_S
    later_s = teach(watch, 0.05, from_s=last_s)
    assert watch.candidates(later_s) == ("off",)
    watch.take("off", later_s)
    assert (watch.method, watch.candidates(later_s + AGAIN_S - 1)) == ("off", ())
    assert watch.verdict(later_s + AGAIN_S) is Verdict.FIRST
    assert watch.candidates(later_s + AGAIN_S) == ("mtp",)
    assert watch.take("mtp", later_s + AGAIN_S) == "it is 24 h 0 min since mtp was given up"
    fresh = Watch(THREE)
    assert (watch.method, watch.why, watch.acceptance, watch.due_s) == (fresh.method, fresh.why, fresh.acceptance, fresh.due_s)


def test_a_later_way_that_is_good_is_left_for_the_first_only_after_its_day() -> None:
    watch = Watch(THREE)
    last_s = teach(watch, 0.2)
    watch.take("ngram", last_s)
    teach(watch, 0.8, lots=10 * LOTS, from_s=last_s, over_s=AGAIN_S - 1)
    assert watch.verdict(last_s + AGAIN_S - 1) is Verdict.STAY
    assert watch.verdict(last_s + AGAIN_S) is Verdict.FIRST


def test_what_can_not_be_changed_is_said_once_and_needs_new_evidence() -> None:
    watch = Watch(THREE)
    last_s = teach(watch, 0.2)
    assert watch.stay("no room", last_s)
    assert watch.verdict(last_s) is Verdict.STAY
    last_s = teach(watch, 0.2, from_s=last_s)
    assert watch.verdict(last_s) is Verdict.NEXT
    assert not watch.stay("no room", last_s)
    assert watch.stay("no kernel", last_s)


def planned(asked: preset.Preset, steps: tuple[Step, ...] = (), vram_mib: int = 7670) -> Plan:
    known = {model: headers.find(NOWHERE, model) for model in asked.models}
    return plan.make(asked, known, budget.make("CUDA0", machine(16, 12), gpu="rtx3070", vram=vram_mib * MIB), steps=steps)


def test_a_change_costs_what_it_gives_up_beyond_what_runs() -> None:
    asked = preset.load("turbo_4b", NOWHERE)
    short = Step({"context": 32768}, "20 MiB short")
    whole, less = planned(asked), planned(asked, (short,))
    assert speculation.price(whole, planned(asked.drafting("off"))) == ""
    assert speculation.price(whole, planned(asked.drafting("off"), (short,))) == "context 32768"
    assert speculation.price(less, planned(asked.drafting("off"), (short,))) == ""
    assert speculation.price(less, planned(asked.drafting("off"), (Step({"context": 16384, "gpu_layers": 20}, "why"),))) == (
        "context 16384, gpu_layers 20"
    )
    assert speculation.price(less, planned(asked.drafting("off"))) == ""


def test_what_was_given_up_never_turns_guessing_on_again() -> None:
    asked = dataclasses.replace(preset.load("turbo_4b", NOWHERE), speculative_next=("ngram",))
    found = planned(asked.drafting("off"), (Step({"speculative": "ngram"}, "it ran out of the card's memory"),))
    assert (found.preset.speculative, found.given_up) == ("off", ())
    found = planned(asked.drafting("ngram"), (Step({"speculative": "off"}, "it ran out of the card's memory"),))
    assert found.preset.speculative == "off"


# With children. The fake guesses as its --spec-type says.

OWN = Model("own.gguf", path="/own.gguf")
DRAFTS = {"draft-mtp": [2, 0], "ngram-mod": [4, 1]}


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few requests are enough, and an idle moment is short."""
    monkeypatch.setattr(speculation, "LOT", 4)
    monkeypatch.setattr(speculation, "LONG_S", 0.0)
    for module in ("speculation", "ward"):
        monkeypatch.setattr(f"supervisor.{module}.QUIET_S", 0.05)


def add(shelf: Shelf, name: str = "a", **options: Any) -> Shelf:
    wanted: dict[str, Any] = {"model": OWN, "speculative": "mtp", "speculative_next": ("ngram",)}
    return shelf.add(name, fake={"tokens": 8, "drafts": DRAFTS}, **(wanted | options))


async def served(arbiter: Arbiter, name: str = "a", *, times: int = LOTS + 10) -> None:
    """Requests whose drafts are learnt, as the ledger's reader would tell them."""
    for _ in range(times):
        async with place(arbiter, name) as ward:
            assert ward.upstream is not None
            assert ward.launch is not None
            method = ward.launch.preset.speculative
            body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "stream": True}).encode()
            exchange = ward.upstream.request("/v1/chat/completions", body)
            answer = bytearray()
            try:
                await exchange.head()
                exchange.pipe(answer.extend)
                await exchange.ended()
            finally:
                exchange.abort()
            last = json.loads(answer.split(b"data: ")[-2])["timings"]
        if "draft_n" in last:
            arbiter.learn(name, method, last["draft_n"], last["draft_n_accepted"])


def runs(ward: Ward) -> str | None:
    """How its child guesses, by the words that it was started with."""
    if ward.child is None or ward.upstream is None or ward.launch is None:
        return None
    words = list(ward.launch.command)
    return words[words.index("--spec-type") + 1] if "--spec-type" in words else "none"


def test_a_child_that_guesses_badly_is_renewed_with_the_next_way_at_an_idle_moment(
    shelf: Shelf, hasty: None, caplog: pytest.LogCaptureFixture
) -> None:
    add(shelf).ordered = ("a",)
    told: list[dict[str, Any]] = []

    async def test() -> None:
        async with shelf.run() as arbiter:
            arbiter.listeners.add(lambda said: told.append(said) if "speculative" in said else None)
            ward = await state(arbiter.ward("a"), State.READY)
            assert runs(ward) == "draft-mtp"
            assert ward.guessing == {"method": "mtp", "acceptance": None, "asked": "mtp", "why": None}
            async with place(arbiter, "a"):  # somebody is in work all the while
                await served(arbiter)
                assert ward.guessing["acceptance"] == 0
                await asyncio.sleep(0.2)
                assert (runs(ward), shelf.starts("a")) == ("draft-mtp", 1)
            await until(lambda: runs(ward) == "ngram-mod")
            assert ward.guessing == {
                "method": "ngram",
                "acceptance": None,
                "asked": "mtp",
                "why": "0% of what mtp guessed was right",
            }
            await served(arbiter)
            await until(lambda: runs(ward) == "none")
            assert ward.guessing["why"] == "25% of what ngram guessed was right"
            assert (shelf.starts("a"), ward.restarts) == (3, 0)
            assert ward.launch is not None
            assert ward.asked.speculative == "mtp"
            assert await ask(arbiter, "a") == "answered 200"

    run(test)
    assert [(each["preset"], each["speculative"]["method"]) for each in told] == [("a", "ngram"), ("a", "off")]
    assert told[0]["speculative"]["why"] == "0% of what mtp guessed was right"
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said == [
        "a: speculative mtp → ngram, 0% of what mtp guessed was right",
        "a: speculative ngram → off, 25% of what ngram guessed was right",
    ]


def test_a_child_that_guesses_well_stays(shelf: Shelf, hasty: None) -> None:
    add(shelf).ordered = ("a",)
    shelf.knobs["a"]["drafts"] = {"draft-mtp": [3, 3]}

    async def test() -> None:
        async with shelf.run() as arbiter:
            ward = await state(arbiter.ward("a"), State.READY)
            await served(arbiter, times=2 * LOTS + 10)
            assert ward.guessing["acceptance"] == 1
            await asyncio.sleep(0.2)
            assert (runs(ward), shelf.starts("a")) == ("draft-mtp", 1)

    run(test)


def teach_badly(arbiter: Arbiter, method: str = "mtp", name: str = "a") -> None:
    """As requests over a long time would."""
    for number in range(2 * LOTS):
        arbiter.wards[name].learn(method, 100, 10, number * LONG_S / LOTS - AGAIN_S / 2)
    arbiter._beat()


def test_what_another_way_guessed_says_nothing_of_the_present_one(shelf: Shelf) -> None:
    add(shelf).ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            ward = await state(arbiter.ward("a"), State.READY)
            for method in ("ngram", "draft", "off"):
                teach_badly(arbiter, method)
                arbiter.learn("a", method, 100, 0)
            arbiter.learn("nobody", "mtp", 100, 0)
            assert ward.watch.acceptance is None
            arbiter.learn("a", "mtp", 100, 40)
            assert ward.watch.acceptance == pytest.approx(0.4)

    run(test)


def test_what_has_no_room_is_passed_over_and_where_nothing_has_it_goes_on_and_says_so_once(
    shelf: Shelf, hasty: None, caplog: pytest.LogCaptureFixture
) -> None:
    add(shelf).ordered = ("a",)
    shelf.problems = {f"a {method}": Error(f"no room for {method}", exit=Exit.NO_FIT) for method in ("ngram", "off")}

    async def test() -> None:
        async with shelf.run() as arbiter:
            ward = await state(arbiter.ward("a"), State.READY)
            for _ in range(2):
                teach_badly(arbiter)
                await until(lambda: ward.watch.acceptance is None)
            assert (runs(ward), shelf.starts("a")) == ("draft-mtp", 1)
            del shelf.problems["a off"]
            teach_badly(arbiter)
            await until(lambda: runs(ward) == "none")
            assert shelf.starts("a") == 2

    run(test)
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said == [
        "a goes on with speculative mtp; ngram: no room for ngram; off: no room for off",
        "a: speculative mtp → off, 10% of what mtp guessed was right",
    ]


def test_a_day_later_the_first_way_is_tried_again(shelf: Shelf, hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    add(shelf).ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            ward = await state(arbiter.ward("a"), State.READY)
            teach_badly(arbiter)
            await until(lambda: runs(ward) == "ngram-mod")
            ward.watch._since_s -= AGAIN_S
            arbiter._beat()
            await until(lambda: runs(ward) == "draft-mtp")
            assert (ward.watch.why, ward.watch.acceptance) == (None, None)

    run(test)


@pytest.mark.parametrize(
    "anew",
    [
        lambda arbiter, ward: arbiter.restart(ward),
        lambda arbiter, ward: arbiter.want("a"),
        lambda arbiter, ward: (arbiter.unload(ward), arbiter.want("a")),
    ],
    ids=["restart", "switch", "unload, then switch"],
)
def test_what_is_asked_for_anew_begins_in_its_own_way(shelf: Shelf, hasty: None, anew: Callable[[Arbiter, Ward], None]) -> None:
    add(shelf).ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            ward = await state(arbiter.ward("a"), State.READY)
            teach_badly(arbiter)
            await until(lambda: runs(ward) == "ngram-mod")
            anew(arbiter, ward)
            await until(lambda: runs(ward) == "draft-mtp")
            await asyncio.sleep(0.2)
            assert (runs(ward), shelf.starts("a"), ward.watch.why) == ("draft-mtp", 3, None)

    run(test)


def test_an_edited_preset_begins_in_its_own_way(shelf: Shelf, hasty: None) -> None:
    add(shelf).ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            ward = await state(arbiter.ward("a"), State.READY)
            teach_badly(arbiter)
            await until(lambda: runs(ward) == "ngram-mod")
            shelf.presets["a"] = dataclasses.replace(shelf.presets["a"], max_tokens=7)
            await arbiter._heed(ward, shelf.presets["a"])
            await until(lambda: runs(ward) == "draft-mtp")
            assert ward.watch.method == "mtp"

    run(test)


def test_what_unloads_keeps_its_place_in_the_list(shelf: Shelf, hasty: None) -> None:
    add(shelf)

    async def test() -> None:
        async with shelf.run() as arbiter:
            assert await ask(arbiter, "a") == "answered 200"
            ward = arbiter.ward("a")
            teach_badly(arbiter)
            await until(lambda: runs(ward) == "ngram-mod")
            arbiter.unload(ward)
            await state(ward, State.STOPPED)
            assert await ask(arbiter, "a") == "answered 200"
            assert runs(ward) == "ngram-mod"

    run(test)


def test_guessing_that_was_given_up_for_memory_stays_off(shelf: Shelf, hasty: None) -> None:
    add(shelf).ordered = ("a",)
    shelf.no_guesses.add("a")

    async def test() -> None:
        async with shelf.run() as arbiter:
            ward = await state(arbiter.ward("a"), State.READY)
            teach_badly(arbiter)
            await asyncio.sleep(0.2)
            assert (runs(ward), ward.guessing["method"], shelf.starts("a")) == ("none", "off", 1)
            arbiter.want("a")
            await asyncio.sleep(0.2)
            assert shelf.starts("a") == 1

    run(test)


def test_it_waits_until_a_swap_is_over_and_is_no_hindrance_to_it(shelf: Shelf, hasty: None) -> None:
    add(shelf, gib=6).add("b", 6, fake={"load_s": 0.2}, hold=0)

    async def test() -> None:
        async with shelf.run() as arbiter:
            assert await ask(arbiter, "a") == "answered 200"
            teach_badly(arbiter)
            assert await ask(arbiter, "b") == "answered 200"
            assert await ask(arbiter, "a") == "answered 200"
            ward = arbiter.ward("a")
            await until(lambda: runs(ward) == "ngram-mod")
            assert await ask(arbiter, "b") == "answered 200"

    run(test)
    assert shelf.most_gib <= 10


def test_a_held_child_is_left_alone(shelf: Shelf, hasty: None) -> None:
    add(shelf).ordered = ("a",)

    async def test() -> None:
        async with shelf.run() as arbiter:
            ward = await state(arbiter.ward("a"), State.READY)
            teach_badly(arbiter)
            arbiter.drain(ward)
            await state(ward, State.STOPPED)
            await asyncio.sleep(0.2)
            await turns()
            assert (ward.state, shelf.starts("a")) == (State.STOPPED, 1)
            arbiter.restart(ward)
            await until(lambda: runs(ward) == "draft-mtp")

    run(test)
