"""The table of states, the causes of an end, the restart budget."""

from __future__ import annotations

import itertools
import random
import signal

import pytest

from supervisor import lifecycle
from supervisor.lifecycle import TRANSITIONS, Event, Restarts, State
from tests import fakes

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
    assert set(TRANSITIONS[State.FAILED]) == {Event.START, Event.STOP}


def test_a_deliberate_stop_waits_in_no_back_off() -> None:
    assert lifecycle.step(State.STOPPING, Event.GONE) is State.STOPPED
    assert lifecycle.step(State.BACKOFF, Event.STOP) is State.STOPPED


@pytest.mark.parametrize(
    ("state", "event"), [pair for pair in itertools.product(State, Event) if pair[1] not in TRANSITIONS[pair[0]]]
)
def test_an_event_that_a_state_does_not_know_raises_naming_both(state: State, event: Event) -> None:
    with pytest.raises(ValueError, match=f"{state.name}.*{event.name}"):
        lifecycle.step(state, event)


# Causes. The texts are those of the pin (facts/engine.md §1.3, §1.4).

LOAD_FAILED = """\
0.00.121.001 E srv    load_model: failed to load model, '/m.gguf'
0.00.121.040 I srv    operator(): cleaning up before exit...
0.00.121.090 E srv  llama_server: exiting due to model loading error
"""
PERMANENT = {
    "error: invalid argument: --bogus": "knows no such option",
    'error while handling argument "--port": stoi\n\nusage:\n--port PORT\n\nto show complete usage, run with -h': "refused",
    'error while handling argument "--cache-type-k": Unsupported cache type: foo': "refused",
    'error while handling argument "--device": invalid device: CUDA0': "refused",
    'error while handling argument "--spec-type": unknown speculative type: foo': "refused",
    "0.00.120.000 E gguf_init_from_file: failed to open GGUF file '/m.gguf' (No such file or directory)\n"
    + LOAD_FAILED: "opened",
    "0.00.120.000 E gguf_init_from_file: invalid magic characters: '????', expected 'GGUF'\n" + LOAD_FAILED: "not GGUF",
    "llama_model_load: tensor 'x' data is not within the file bounds, model is corrupted or incomplete\n"
    + LOAD_FAILED: "cut off",
    "llama_model_load: error loading model: unknown model architecture: 'qwen9'\n" + LOAD_FAILED: "too old",
    "llama_model_load: error loading model: error loading model hyperparameters: key not found\n" + LOAD_FAILED: "header",
    "llama_model_load: error loading model: error loading model vocabulary: cannot find tokenizer\n" + LOAD_FAILED: "vocabulary",
    "llama_model_load: error loading model: missing tensor 'blk.0.attn_q.weight'\n" + LOAD_FAILED: "lacks a tensor",
    "0.02.000.000 E srv  load_model: failed to create MTP context\n" + LOAD_FAILED: "MTP",
}
TRANSIENT = {
    fakes.CUDA_OOM + "\n" + LOAD_FAILED: "memory ran out",
    "0.00.030.000 E srv start: couldn't bind HTTP server socket, hostname: x.sock, port: 8080\n": "socket is taken",
    LOAD_FAILED: "could not be loaded",
    "": "ended with code 1",
    "0.00.030.000 W fit: failed to initialize CUDA: no CUDA-capable device is detected\n": "ended with code 1",
}


@pytest.mark.parametrize(("log", "says"), PERMANENT.items(), ids=PERMANENT.values())
def test_a_cause_that_comes_back_at_once_is_permanent(log: str, says: str) -> None:
    found = lifecycle.cause(1, log)
    assert found.permanent
    assert says in found.text
    assert found.hint


@pytest.mark.parametrize(("log", "says"), TRANSIENT.items(), ids=TRANSIENT.values())
def test_a_cause_that_may_pass_is_not(log: str, says: str) -> None:
    found = lifecycle.cause(1, log)
    assert not found.permanent
    assert says in found.text


@pytest.mark.parametrize(
    ("number", "says", "permanent"),
    [
        (signal.SIGILL, "another CPU", True),
        (signal.SIGKILL, "killed", False),
        (signal.SIGABRT, "aborted", False),
        (signal.SIGSEGV, "died of SIGSEGV", False),
        (signal.SIGTERM, "died of SIGTERM", False),
        (signal.SIGRTMIN + 1, "died of signal 35", False),
    ],
)
def test_a_signal_is_named(number: int, says: str, permanent: bool) -> None:
    found = lifecycle.cause(-number, "")
    assert says in found.text
    assert found.permanent is permanent


def test_a_log_tells_more_than_a_signal() -> None:
    """A CUDA fault aborts; so does running out of its memory while it serves."""
    assert lifecycle.cause(-6, fakes.CUDA_ABORT).text.startswith("a CUDA error: CUDA error: an illegal memory access")
    assert "memory ran out" in lifecycle.cause(-6, "CUDA error: out of memory\n  current device: 0").text


def test_the_childs_own_telling_line_is_quoted_without_its_time_stamp() -> None:
    """The line that says what went wrong, and not the ``exiting due to model loading error`` which ends every such log."""
    log = "0.00.120.000 E gguf_init_from_file: failed to open GGUF file '/m.gguf' (No such file or directory)\n" + LOAD_FAILED
    text = lifecycle.cause(1, log).text
    assert (
        text
        == "the model file can't be opened: gguf_init_from_file: failed to open GGUF file '/m.gguf' (No such file or directory)"
    )
    assert lifecycle.cause(1, fakes.CUDA_OOM).text.endswith(
        "allocating 2368.00 MiB on device 0: cudaMalloc failed: out of memory"
    )


def test_an_unknown_fault_is_quoted_from_the_end() -> None:
    log = "0.00.1.1 E srv x: first error\n0.00.2.2 I srv y: fine\n0.00.3.3 E srv z: GGML_ASSERT(a == b) failed\n0.00.4.4 I srv: bye\n"
    assert lifecycle.cause(-6, log).text == "the engine aborted: srv z: GGML_ASSERT(a == b) failed"


@pytest.mark.parametrize("log", ["", "\n\n", "0.00.1.1 I srv x: fine\n", "\x00\ufffd\n"])
def test_a_log_without_a_fault_adds_nothing(log: str) -> None:
    assert lifecycle.last_words(log) == ""
    assert lifecycle.cause(3, log).text == "it ended with code 3"


# The restart budget.


def test_delays_double_up_to_a_limit_and_then_the_budget_is_spent() -> None:
    restarts = Restarts(most=8)
    assert [restarts.failed(0.0, jitter=1.0) for _ in range(9)] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, None]


def test_jitter_spreads_over_the_upper_half() -> None:
    draw = random.Random(1)
    delays = [Restarts().failed(0.0, draw.random()) for _ in range(200)]
    assert all(delay is not None and 0.5 <= delay < 1.0 for delay in delays)
    assert Restarts().failed(0.0, jitter=0.0) == 0.5


def test_five_restarts_in_a_window_and_no_sixth() -> None:
    restarts = Restarts()
    assert all(restarts.failed(at, 0.0) is not None for at in range(5))
    assert restarts.failed(5.0, 0.0) is None


def test_failures_older_than_the_window_do_not_count() -> None:
    restarts = Restarts()
    for at in range(5):
        restarts.failed(float(at), 0.0)
    assert restarts.failed(604.0, 0.0) == 0.5


def test_one_failure_each_so_often_never_spends_the_budget() -> None:
    restarts = Restarts()
    assert all(restarts.failed(at * restarts.window_s / restarts.most, 0.0) is not None for at in range(1000))


def test_a_start_that_served_well_makes_the_budget_whole() -> None:
    restarts = Restarts()
    for at in range(5):
        restarts.failed(float(at), 0.0)
    restarts.forgive()
    assert restarts.failed(5.0, jitter=1.0) == 1.0


def test_two_children_have_budgets_of_their_own() -> None:
    spent = Restarts()
    for at in range(6):
        spent.failed(float(at), 0.0)
    assert Restarts().failed(6.0, 0.0) is not None
