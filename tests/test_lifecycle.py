"""The table of states, the restart budget."""

from __future__ import annotations

import itertools
import random

import pytest

from supervisor import lifecycle
from supervisor.lifecycle import TRANSITIONS, Event, Restarts, State

# The table.


def reachable(start: State) -> set[State]:
    found, todo = {start}, [start]
    while todo:
        for state in TRANSITIONS[todo.pop()].values():
            if state not in found:
                found.add(state)
                todo.append(state)
    return found


def test_every_state_has_a_row_and_every_event_an_edge() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {event for row in TRANSITIONS.values() for event in row} == set(Event)


@pytest.mark.parametrize("state", State)
def test_from_every_state_every_state_can_be_reached(state: State) -> None:
    """So none is dead, and none is a trap."""
    assert reachable(state) == set(State)


@pytest.mark.parametrize("state", State)
def test_whatever_runs_or_will_run_can_be_stopped(state: State) -> None:
    ends = {State.STOPPED, State.STOPPING}
    assert state in ends or lifecycle.step(state, Event.STOP) in ends


def test_only_warm_makes_ready_and_only_starting_takes_it() -> None:
    """But for one that was ready already, and was about to go."""
    edges = [(state, event) for state, row in TRANSITIONS.items() for event, after in row.items() if after is State.READY]
    assert edges == [(State.STARTING, Event.WARM), (State.DRAINING, Event.RESUME)]


def test_one_that_hung_goes_on_as_one_that_exited() -> None:
    assert lifecycle.step(State.READY, Event.UNHEALTHY) is State.STOPPING
    exits = (Event.EXITED_WELL, Event.EXITED_TRANSIENT, Event.EXITED_PERMANENT)
    assert [lifecycle.step(State.STOPPING, event) for event in exits] == [lifecycle.step(State.READY, event) for event in exits]


@pytest.mark.parametrize("state", [State.STARTING, State.READY, State.DRAINING])
def test_a_step_down_ends_in_stopped_without_a_back_off(state: State) -> None:
    assert lifecycle.step(lifecycle.step(state, Event.STEP_DOWN), Event.GONE) is State.STOPPED


def test_only_a_ready_one_drains() -> None:
    edges = [(state, event) for state, row in TRANSITIONS.items() for event, after in row.items() if after is State.DRAINING]
    assert edges == [(State.READY, Event.DRAIN)]


@pytest.mark.parametrize("event", [Event.EXITED_WELL, Event.EXITED_TRANSIENT])
def test_one_that_ends_while_it_drains_is_not_started_again(event: Event) -> None:
    assert lifecycle.step(State.DRAINING, event) is State.STOPPED
    assert lifecycle.step(State.READY, event) in (State.STARTING, State.BACKOFF)


@pytest.mark.parametrize("state", [state for state in State if state is not State.STOPPED])
def test_two_events_at_most_end_whatever_state_it_is_in(state: State) -> None:
    """The arbiter relies on it for one that was cancelled before its first step."""
    after = state if state is State.STOPPING else lifecycle.step(state, Event.STOP)
    assert after is State.STOPPED or lifecycle.step(after, Event.GONE) is State.STOPPED


def test_a_permanent_cause_is_never_followed_by_another_start() -> None:
    after = {row[Event.EXITED_PERMANENT] for row in TRANSITIONS.values() if Event.EXITED_PERMANENT in row}
    assert after == {State.FAILED}
    assert set(TRANSITIONS[State.FAILED]) == {Event.REARMED, Event.STOP}
    assert set(TRANSITIONS[State.FAILED].values()) == {State.STOPPED}


def test_a_deliberate_stop_waits_in_no_back_off() -> None:
    assert lifecycle.step(State.STOPPING, Event.GONE) is State.STOPPED
    assert lifecycle.step(State.BACKOFF, Event.STOP) is State.STOPPED


@pytest.mark.parametrize(
    ("state", "event"), [pair for pair in itertools.product(State, Event) if pair[1] not in TRANSITIONS[pair[0]]]
)
def test_an_event_that_a_state_does_not_know_raises_naming_both(state: State, event: Event) -> None:
    with pytest.raises(ValueError, match=f"{state.name}.*{event.name}"):
        lifecycle.step(state, event)


# The restart budget.


def test_delays_grow_fourfold_up_to_a_limit_and_then_the_budget_is_spent() -> None:
    restarts = Restarts(most=8)
    delays = [restarts.ended(0.0, 1.0, useful=False) for _ in range(9)]
    assert delays == [0.25, 1.0, 4.0, 16.0, 30.0, 30.0, 30.0, 30.0, None]


def test_jitter_spreads_over_the_upper_half() -> None:
    draw = random.Random(1)
    delays = [Restarts().ended(0.0, draw.random(), useful=False) for _ in range(200)]
    assert all(delay is not None and 0.125 <= delay < 0.25 for delay in delays)
    assert Restarts().ended(0.0, 0.0, useful=False) == 0.125


def test_five_useless_starts_in_a_window_and_no_sixth() -> None:
    restarts = Restarts()
    assert all(restarts.ended(at, 0.0, useful=False) is not None for at in range(5))
    assert restarts.ended(5.0, 0.0, useful=False) is None


def test_failures_older_than_the_window_do_not_count() -> None:
    restarts = Restarts()
    for at in range(5):
        restarts.ended(float(at), 0.0, useful=False)
    assert restarts.ended(604.0, 0.0, useful=False) == 0.125


def test_one_failure_each_so_often_never_spends_the_budget() -> None:
    restarts = Restarts()
    assert all(restarts.ended(at * restarts.window_s / restarts.most, 0.0, useful=False) is not None for at in range(1000))


def test_a_useful_start_makes_the_budget_whole_and_waits_the_least() -> None:
    restarts = Restarts()
    for at in range(5):
        restarts.ended(float(at), 0.0, useful=False)
    assert restarts.ended(5.0, 1.0, useful=True) == 0.25
    assert restarts.ended(6.0, 1.0, useful=False) == 0.25


def test_useful_starts_never_spend_it() -> None:
    restarts = Restarts()
    assert {restarts.ended(at / 10, 1.0, useful=True) for at in range(1000)} == {0.25}


def test_on_trial_one_useless_start_is_enough_until_a_useful_one() -> None:
    restarts = Restarts()
    restarts.on_trial()
    assert restarts.ended(0.0, 0.0, useful=False) is None
    restarts.on_trial()
    assert restarts.ended(1.0, 0.0, useful=True) is not None
    assert restarts.ended(2.0, 0.0, useful=False) is not None


def test_two_children_have_budgets_of_their_own() -> None:
    spent = Restarts()
    for at in range(6):
        spent.ended(float(at), 0.0, useful=False)
    assert Restarts().ended(6.0, 0.0, useful=False) is not None
