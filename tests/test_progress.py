"""What moves is never called hung, and what doesn't is, within the bound that is stated. A child here is what can be seen of one."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from supervisor.progress import (
    ANSWER_BATCHES,
    ANSWER_S,
    BUSY_BATCHES,
    BUSY_S,
    GAP_BATCHES,
    GAP_S,
    LOOK_S,
    QUIET_S,
    SHARE,
    STOPPED_S,
    Hung,
    Look,
    Progress,
    Refused,
    Slots,
    Verdict,
    read_slots,
)

Answer = Slots | None | Refused


def idle(_: float) -> Slots:
    return ((0, 7, 900, 60),)


def frozen(_: float) -> Slots:
    return ((1, 7, 512, 0),)


def silent(_: float) -> None:
    return None


@dataclass
class Child:
    """Functions of the time in seconds: what would be seen of it then."""

    heard: Callable[[float], int] = lambda at_s: 0
    slots: Callable[[float], Answer] = frozen
    effort_s: Callable[[float], float] = lambda at_s: 0.0
    in_work: Callable[[float], int] = lambda at_s: 1
    stopped: Callable[[float], bool] = lambda at_s: False
    lagged: Callable[[float], bool] = lambda at_s: False
    polls: list[float] = field(default_factory=list)

    def look(self, at_s: float) -> Look:
        return Look(
            at_s,
            in_work=self.in_work(at_s),
            heard=self.heard(at_s),
            effort_s=self.effort_s(at_s),
            stopped=self.stopped(at_s),
            lagged=self.lagged(at_s),
        )


def watch(child: Child, progress: Progress, until_s: float, look_s: float = 1.0) -> tuple[Hung, float] | None:
    """Look every ``look_s``, and ask when told so; the first bad verdict and when it was."""
    at_s = 0.0
    while at_s < until_s:
        at_s += look_s
        verdict = progress.look(child.look(at_s))
        if verdict is Verdict.ASK:
            child.polls.append(at_s)
            slots = child.slots(at_s)
            at_s += progress.answer_s if slots is None else 0.01
            verdict = progress.told(child.look(at_s), slots)
        if isinstance(verdict, Hung):
            return verdict, at_s
        assert verdict is Verdict.FINE
    return None


def on_cpu(batch_s: float = 1.0) -> Progress:
    return Progress(cuda=False, batch_s=batch_s)


def on_cuda(batch_s: float = 1.0) -> Progress:
    return Progress(cuda=True, batch_s=batch_s)


# What is no hang.


@pytest.mark.parametrize("cuda", [True, False])
def test_a_prefill_of_100k_tokens_is_none(cuda: bool) -> None:
    """It takes minutes and brings no byte; a batch of 2,048 tokens in 5 s."""
    child = Child(slots=lambda at_s: ((1, 7, int(at_s / 5.0) * 2048, 0),), effort_s=lambda at_s: 0.0)
    assert watch(child, Progress(cuda=cuda, batch_s=5.0), 100_000 / 2048 * 5.0) is None
    assert child.polls


def test_a_long_first_batch_on_a_slow_cpu_is_none() -> None:
    """Its counters are 0, /slots is silent between two batches, and it takes ten times what was expected of it."""
    child = Child(slots=silent, effort_s=lambda at_s: at_s * 1.9)
    assert watch(child, on_cpu(20.0), 200.0) is None
    assert child.polls


@pytest.mark.parametrize("cuda", [True, False])
def test_a_long_batch_behind_an_answer_is_none(cuda: bool) -> None:
    """It answers, then is in a batch when it is asked again; each answer comes within two batches."""
    progress = Progress(cuda=cuda, batch_s=4.0)
    assert progress.answer_s == (8.0 if cuda else ANSWER_S)
    child = Child(slots=lambda at_s: ((1, 7, int(at_s / 4.0) * 512, 0),), effort_s=lambda at_s: at_s)
    assert watch(child, progress, 600.0) is None


def test_a_paused_laptop_is_none() -> None:
    """It closed its lid in the middle of a suspicion, an hour passes between two looks, and then nothing is known yet."""
    progress = on_cuda()
    progress.look(Look(0.0, in_work=1, heard=5, effort_s=3.0))
    assert progress.look(Look(QUIET_S + GAP_S, in_work=1, heard=5, effort_s=3.0)) is Verdict.ASK
    assert progress.told(Look(15.1, in_work=1, heard=5, effort_s=3.0), None) is Verdict.FINE
    assert progress.look(Look(3600.0, in_work=1, heard=5, effort_s=3.0, lagged=True)) is Verdict.FINE
    assert progress.look(Look(3604.0, in_work=1, heard=5, effort_s=3.0)) is Verdict.FINE
    assert progress.look(Look(3606.0, in_work=1, heard=5, effort_s=3.0)) is Verdict.ASK
    assert progress.told(Look(3609.0, in_work=1, heard=5, effort_s=3.0), None) is Verdict.FINE  # the first poll again
    assert progress.look(Look(3618.0, in_work=1, heard=5, effort_s=3.0)) is Verdict.FINE


def test_a_pause_while_slots_is_asked_is_none() -> None:
    progress = on_cuda()
    progress.look(Look(0.0, in_work=1, heard=5, effort_s=3.0))
    for at_s in (20.0, 40.0):
        assert progress.look(Look(at_s, in_work=1, heard=5, effort_s=3.0)) is Verdict.ASK
        verdict = progress.told(Look(at_s + 3.0, in_work=1, heard=5, effort_s=3.0, lagged=at_s == 40.0), None)
        assert verdict is Verdict.FINE


@pytest.mark.parametrize("slots", [silent, frozen])
def test_llmctl_lagging_is_none(slots: Callable[[float], Slots | None]) -> None:
    child = Child(slots=slots, lagged=lambda at_s: int(at_s) % 9 == 0)
    assert watch(child, on_cuda(), 600.0) is None
    assert child.polls


def test_a_box_at_100_percent_cpu_is_none() -> None:
    """The child gets no CPU at all for minutes: its effort is the time that its threads waited for one."""
    child = Child(slots=silent, effort_s=lambda at_s: 2.0 + 0.9 * at_s)
    assert watch(child, on_cpu(), 300.0) is None


def test_a_client_that_does_not_read_is_none() -> None:
    """It is not counted as in work; when it reads again, the quiet begins there."""
    child = Child(in_work=lambda at_s: 0 if at_s < 300.0 else 1)
    hung = watch(child, on_cuda(), 400.0)
    assert child.polls[0] >= 300.0
    assert hung is not None
    assert hung[1] >= 300.0 + GAP_S


def test_many_short_requests_are_none() -> None:
    child = Child(heard=lambda at_s: int(at_s * 30), slots=silent)
    assert watch(child, on_cuda(), 600.0) is None
    assert child.polls == []


def test_a_very_slow_stream_is_none_and_is_asked_rarely() -> None:
    child = Child(heard=lambda at_s: int(at_s / 7.0), slots=silent)
    assert watch(child, on_cuda(), 600.0) is None
    assert child.polls
    assert min(after - before for before, after in zip(child.polls, child.polls[1:], strict=False)) >= GAP_S


def test_nothing_in_work_is_none() -> None:
    child = Child(in_work=lambda at_s: 0, slots=silent)
    assert watch(child, on_cuda(), 10_000.0) is None
    assert child.polls == []


def test_a_prompt_that_is_tokenized_for_minutes_is_none_under_cuda_either() -> None:
    """No slot is in work, and a thread of the HTTP server runs: that is no spinning for the card."""
    child = Child(slots=idle, effort_s=lambda at_s: at_s)
    assert watch(child, on_cuda(), 300.0) is None
    assert child.polls


def test_a_thread_that_ended_counts_as_work() -> None:
    child = Child(slots=silent, effort_s=lambda at_s: 1000.0 - at_s)
    assert watch(child, on_cpu(), 300.0) is None


def test_a_short_stop_is_none_and_its_time_does_not_count() -> None:
    child = Child(stopped=lambda at_s: at_s % 20.0 < STOPPED_S - 1.0, slots=silent)
    assert watch(child, on_cuda(), 600.0) is None


# What is one.


@pytest.mark.parametrize(("slots", "said"), [(frozen, "the counters of /slots stand still"), (silent, "/slots doesn't answer")])
@pytest.mark.parametrize("cuda", [True, False])
def test_frozen_slots_are_one(cuda: bool, slots: Callable[[float], Slots | None], said: str) -> None:
    """A stream that fell silent after 30 s, and a CPU that is idle."""
    child = Child(heard=lambda at_s: int(min(at_s, 30.0) * 20), slots=slots)
    progress = Progress(cuda=cuda, batch_s=1.0)
    hung = watch(child, progress, 1000.0)
    assert hung is not None
    verdict, at_s = hung
    assert verdict.text.startswith("sent nothing for 1") or verdict.text.startswith("sent nothing for 2")
    assert said in verdict.text
    assert not verdict.outside
    assert 30.0 + QUIET_S + GAP_S <= at_s <= 30.0 + progress.longest_s
    assert len(child.polls) == 2


@pytest.mark.parametrize("slots", [frozen, silent])
def test_a_spinning_core_proves_nothing_under_cuda(slots: Callable[[float], Slots | None]) -> None:
    child = Child(slots=slots, effort_s=lambda at_s: at_s)
    progress = on_cuda()
    hung = watch(child, progress, 1000.0)
    assert hung is not None
    assert hung[1] <= progress.longest_s


def test_a_lost_request_is_one() -> None:
    """No slot is in work, the request waits for a result that will not come, and its thread wakes once a second."""
    child = Child(slots=idle, effort_s=lambda at_s: at_s * SHARE / 2)
    hung = watch(child, on_cuda(), 1000.0)
    assert hung is not None


def test_a_cpu_engine_that_spins_is_one_in_the_end() -> None:
    child = Child(slots=silent, effort_s=lambda at_s: at_s)
    progress = on_cpu()
    hung = watch(child, progress, 10_000.0)
    assert hung is not None
    assert "it computes all the time" in hung[0].text
    assert progress.busy_s <= hung[1] <= progress.busy_s + progress.longest_s


def test_the_time_it_may_compute_without_a_sign_begins_where_its_counters_last_moved() -> None:
    child = Child(slots=lambda at_s: ((1, 7, int(min(at_s, 500.0)), 0),), effort_s=lambda at_s: at_s)
    progress = on_cpu()
    hung = watch(child, progress, 10_000.0)
    assert hung is not None
    assert hung[1] >= 500.0 + progress.busy_s


def test_now_and_then_an_answer_with_the_same_counters_is_no_movement() -> None:
    child = Child(slots=lambda at_s: frozen(at_s) if int(at_s / 12) % 2 else None, effort_s=lambda at_s: at_s)
    assert watch(child, on_cpu(), 10_000.0) is not None


def test_a_long_batch_in_which_the_work_ends_is_one() -> None:
    child = Child(slots=silent, effort_s=lambda at_s: min(at_s, 100.0))
    progress = on_cpu()
    hung = watch(child, progress, 1000.0)
    assert hung is not None
    assert 100.0 < hung[1] <= 100.0 + progress.longest_s


@pytest.mark.parametrize("in_work", [0, 3])
def test_a_stopped_process_is_one_whether_it_is_busy_or_idle(in_work: int) -> None:
    child = Child(heard=lambda at_s: int(min(at_s, 50.0)), in_work=lambda at_s: in_work, stopped=lambda at_s: at_s >= 50.0)
    hung = watch(child, on_cpu(), 1000.0)
    assert hung == (Hung("was stopped from outside (SIGSTOP) for 5.0 s", outside=True), 50.0 + STOPPED_S)
    assert child.polls == []


def test_one_look_at_a_stopped_process_is_not_enough() -> None:
    progress = on_cpu()
    assert progress.look(Look(100.0, in_work=0, heard=0, effort_s=0.0, stopped=True)) is Verdict.FINE
    assert progress.look(Look(200.0, in_work=0, heard=0, effort_s=0.0)) is Verdict.FINE
    assert progress.look(Look(201.0, in_work=0, heard=0, effort_s=0.0, stopped=True)) is Verdict.FINE
    assert progress.look(Look(300.0, in_work=0, heard=0, effort_s=0.0, stopped=True, lagged=True)) is Verdict.FINE
    assert progress.look(Look(301.0, in_work=0, heard=0, effort_s=0.0, stopped=True)) is Verdict.FINE
    assert isinstance(progress.look(Look(306.0, in_work=0, heard=0, effort_s=0.0, stopped=True)), Hung)


def test_one_that_is_stopped_while_slots_is_asked_is_not_judged_by_its_silence() -> None:
    progress = on_cuda()
    for at_s in (0.0, 6.0):
        progress.look(Look(at_s, in_work=1, heard=0, effort_s=0.0))
    verdict = progress.told(Look(9.0, in_work=1, heard=0, effort_s=0.0, stopped=True), None)
    assert verdict is Verdict.FINE
    assert progress.look(Look(13.0, in_work=1, heard=0, effort_s=0.0, stopped=True)) is Verdict.FINE
    assert isinstance(progress.look(Look(14.0, in_work=1, heard=0, effort_s=0.0, stopped=True)), Hung)


def test_a_closed_listener_is_one_at_once() -> None:
    """SIGTERM from outside: it waits for its clients for ever, and one of them is silent."""
    child = Child(slots=lambda at_s: Refused(), effort_s=lambda at_s: at_s)
    hung = watch(child, on_cpu(), 100.0)
    assert hung is not None
    verdict, at_s = hung
    assert verdict.outside
    assert "takes no connection" in verdict.text
    assert at_s <= QUIET_S + 2.0


def test_a_closed_listener_is_none_when_the_last_request_has_just_left() -> None:
    """It ends by itself."""
    progress = on_cpu()
    for at_s in (0.0, 6.0):
        progress.look(Look(at_s, in_work=1, heard=0, effort_s=0.0))
    assert progress.told(Look(6.1, in_work=0, heard=0, effort_s=0.0), Refused()) is Verdict.FINE


def test_a_closed_listener_is_none_while_it_sends() -> None:
    progress = on_cpu()
    for at_s in (0.0, 6.0):
        progress.look(Look(at_s, in_work=1, heard=0, effort_s=0.0))
    assert progress.told(Look(6.1, in_work=1, heard=9, effort_s=0.0), Refused()) is Verdict.FINE
    assert progress.told(Look(6.2, in_work=1, heard=9, effort_s=0.0), Refused()) is Verdict.FINE  # it wasn't asked for


# How often it is asked.


@pytest.mark.parametrize("batch_s", [0.1, 1.0, 30.0])
def test_polls_of_one_suspicion_are_three_batches_and_ten_seconds_apart(batch_s: float) -> None:
    progress = on_cpu(batch_s)
    child = Child(slots=silent, effort_s=lambda at_s: at_s)
    watch(child, progress, 500.0)
    gaps = [after - before for before, after in zip(child.polls, child.polls[1:], strict=False)]
    assert min(gaps) >= max(GAP_S, GAP_BATCHES * batch_s)
    assert child.polls[0] >= QUIET_S


def test_an_answer_that_never_comes_back_to_it_is_asked_for_again() -> None:
    """What asks was broken off."""
    progress = on_cpu(10.0)
    progress.look(Look(0.0, in_work=1, heard=0, effort_s=0.0))
    asked = [at_s for at_s in range(1, 100) if progress.look(Look(float(at_s), in_work=1, heard=0, effort_s=0.0)) is Verdict.ASK]
    assert asked == [5, 35, 65, 95]


def test_its_bounds_follow_the_batch() -> None:
    slow, fast = on_cuda(60.0), on_cuda(0.01)
    assert (fast.gap_s, fast.answer_s, fast.busy_s) == (GAP_S, ANSWER_S, BUSY_S)
    assert (slow.gap_s, slow.answer_s, slow.busy_s) == (GAP_BATCHES * 60.0, ANSWER_BATCHES * 60.0, BUSY_BATCHES * 60.0)
    assert fast.longest_s == 2 * GAP_S + 3 * (ANSWER_S + LOOK_S)


def test_it_shows_what_it_waits_for() -> None:
    progress = on_cpu()
    progress.look(Look(2.0, in_work=1, heard=0, effort_s=0.0))
    assert repr(progress) == "<Progress moved at 2.0 s>"
    progress.look(Look(12.0, in_work=1, heard=0, effort_s=0.0))
    assert repr(progress) == "<Progress moved at 2.0 s, waits for /slots>"
    progress.told(Look(13.0, in_work=1, heard=0, effort_s=0.0), None)
    assert repr(progress) == "<Progress moved at 2.0 s, asked once>"


# Reading /slots.


def test_the_counters_of_slots_are_read() -> None:
    body = [
        {"id": 0, "n_ctx": 4096, "speculative": False, "is_processing": False},
        {
            "id": 1,
            "n_ctx": 4096,
            "speculative": False,
            "is_processing": True,
            "id_task": 42,
            "n_prompt_tokens": 900,
            "n_prompt_tokens_processed": 512,
            "n_prompt_tokens_cache": 0,
            "params": {"n_predict": -1},
            "next_token": [{"has_next_token": True, "has_new_line": False, "n_remain": -1, "n_decoded": 17}],
        },
    ]
    assert read_slots(body) == ((0, 0, 0, 0), (1, 42, 512, 17))


@pytest.mark.parametrize("body", [None, {}, {"error": {"code": 501}}, [], ["slot"], [{"id": 0}], [{"is_processing": 1}], "[]", 7])
def test_what_is_not_a_slots_body_is_none(body: object) -> None:
    assert read_slots(body) is None


def test_odd_fields_of_a_slot_count_nothing() -> None:
    slot: dict[str, object] = {"is_processing": True, "id_task": None, "n_prompt_tokens_processed": "9", "next_token": {}}
    assert read_slots([slot, slot | {"next_token": [7]}]) == ((1, 0, 0, 0), (1, 0, 0, 0))


# Any history.


class Walk:
    """A child that goes from batch to batch, each at most as long as it may be, until it stops for ever.

    Between two batches it answers /slots, and then it sends bytes, or only its counters move.
    """

    def __init__(self, draw: random.Random, *, cuda: bool, batch_s: float, stops_s: float) -> None:
        self.cuda, self.draw, self.stops_s = cuda, draw, stops_s
        self.answers_after = draw.random() < 0.5
        talks = draw.choice([0.0, 0.05, 0.5, 1.0])
        longest_s = batch_s if cuda else draw.choice([batch_s, 10 * batch_s])
        self.turns: list[float] = []
        self.bytes: list[float] = []
        at_s = 0.0
        while True:
            at_s += draw.uniform(0.0, longest_s) if draw.random() < 0.7 else longest_s
            if at_s > stops_s:
                break
            self.turns.append(at_s)
            if draw.random() < talks:
                self.bytes.append(at_s)

    def look(self, at_s: float) -> Look:
        spins = at_s if self.cuda else min(at_s, self.stops_s) + at_s * SHARE / 5
        return Look(at_s, in_work=2, heard=bisect_right(self.bytes, at_s), effort_s=spins)

    def slots(self, at_s: float, answer_s: float) -> tuple[Slots | None, float]:
        """What it says, and when."""
        number = bisect_right(self.turns, at_s)
        if number < len(self.turns):
            told_s = self.turns[number]
        elif self.answers_after:
            told_s = max(at_s + 0.001, self.stops_s)
        else:
            told_s = float("inf")
        if told_s > at_s + answer_s:
            return None, at_s + answer_s
        return ((1, 7, 0, bisect_right(self.turns, told_s)),), told_s


@pytest.mark.parametrize("seed", range(400))
def test_what_moves_is_never_called_hung_and_what_stops_is_within_the_bound(seed: int) -> None:
    draw = random.Random(seed)
    cuda, batch_s, stops_s = draw.random() < 0.5, draw.choice([0.05, 0.5, 2.0, 6.0]), draw.uniform(0.0, 400.0)
    walk, progress = Walk(draw, cuda=cuda, batch_s=batch_s, stops_s=stops_s), Progress(cuda=cuda, batch_s=batch_s)
    at_s, last_ask_s = 0.0, -GAP_S
    asks_beside = draw.random() < 0.5  # it goes on looking while it waits for the answer
    verdict: Verdict | Hung = Verdict.FINE
    while not isinstance(verdict, Hung):
        at_s += draw.uniform(0.1, LOOK_S)
        assert at_s <= stops_s + progress.longest_s
        verdict = progress.look(walk.look(at_s))
        if verdict is not Verdict.ASK:
            continue
        assert at_s - last_ask_s >= GAP_S
        last_ask_s = at_s
        slots, told_s = walk.slots(at_s, progress.answer_s)
        while asks_beside and at_s + LOOK_S < told_s:
            at_s += draw.uniform(0.1, LOOK_S)
            assert progress.look(walk.look(at_s)) is Verdict.FINE
        at_s = told_s
        verdict = progress.told(walk.look(at_s), slots)
    assert at_s > stops_s
