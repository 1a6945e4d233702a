"""What a child's state may become, why a child ended, and when to try again. Pure: time is an argument.

The table below is the whole truth about states: nothing else assigns one, and an event that a state doesn't know raises. What is
*wanted* is not a state, and it has an :class:`Owner`: a child that exits while STOPPING goes to STOPPED, one that exits while READY is
started again, one that exits while DRAINING is not.

A start that served nothing spends the restart budget; :class:`Restarts` says how long to wait and when to give up. A deliberate
stop neither waits nor spends.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import Enum
from typing import Final


class State(Enum):
    """Where a child is in its life."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    BACKOFF = "backoff"
    FAILED = "failed"
    STOPPING = "stopping"


class Event(Enum):
    """What moves it."""

    START = "start"
    WARM = "warm"
    READY_TIMEOUT = "ready_timeout"
    EXITED_WELL = "exited_well"
    EXITED_TRANSIENT = "exited_transient"
    EXITED_PERMANENT = "exited_permanent"
    DELAY_ELAPSED = "delay_elapsed"
    BUDGET_SPENT = "budget_spent"
    DRAIN = "drain"
    RESUME = "resume"
    STOP = "stop"
    GONE = "gone"


TRANSITIONS: Final[dict[State, dict[Event, State]]] = {
    State.STOPPED: {Event.START: State.STARTING},
    State.STARTING: {
        Event.WARM: State.READY,
        Event.EXITED_TRANSIENT: State.BACKOFF,
        Event.EXITED_PERMANENT: State.FAILED,
        Event.READY_TIMEOUT: State.BACKOFF,
        Event.STOP: State.STOPPING,
    },
    State.READY: {
        Event.EXITED_WELL: State.STARTING,  # it had run long enough: no waiting
        Event.EXITED_TRANSIENT: State.BACKOFF,
        Event.EXITED_PERMANENT: State.FAILED,
        Event.DRAIN: State.DRAINING,  # no new request: it is to be stopped when those in work have ended
        Event.STOP: State.STOPPING,
    },
    State.DRAINING: {
        Event.RESUME: State.READY,  # nobody wants its memory any more
        Event.EXITED_WELL: State.STOPPED,  # it was to go anyway
        Event.EXITED_TRANSIENT: State.STOPPED,
        Event.EXITED_PERMANENT: State.FAILED,
        Event.STOP: State.STOPPING,
    },
    State.BACKOFF: {
        Event.DELAY_ELAPSED: State.STARTING,
        Event.BUDGET_SPENT: State.FAILED,
        Event.STOP: State.STOPPED,
    },
    State.FAILED: {Event.START: State.STARTING, Event.STOP: State.STOPPED},
    State.STOPPING: {Event.GONE: State.STOPPED},
}


class Owner(Enum):
    """Who wants a child up."""

    USER = "user"
    """By ``llmctl up`` or ``llmctl switch``."""
    REQUEST = "request"
    """By asking for its preset."""


def step(state: State, event: Event) -> State:
    """The state after ``event``. Raises ValueError naming both when the table has no such edge."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise ValueError(f"a child that is {state.name} knows no event {event.name}") from None


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a child ended, for a person. A permanent cause comes back at once if the same command is tried again."""

    text: str
    permanent: bool
    hint: str = "llmctl logs"


_PATTERNS: Final[tuple[tuple[str, Cause], ...]] = (
    # llama-server exits with 1 for all of these; only its text tells them apart (tools/server, src/llama-model-loader.cpp at b11312).
    (
        "cudaMalloc failed: out of memory",
        Cause("the card's memory ran out", permanent=False, hint="close what else uses the card"),
    ),
    ("CUDA error: out of memory", Cause("the card's memory ran out", permanent=False, hint="close what else uses the card")),
    ("CUDA error", Cause("a CUDA error", permanent=False)),
    ("error: invalid argument", Cause("the engine knows no such option", permanent=True, hint="llmctl build")),
    ("error while handling argument", Cause("the engine refused the value of an option", permanent=True)),
    ("can't be started:", Cause("the engine's binary can't be run", permanent=True, hint="llmctl build")),  # launcher's words
    ("unknown model architecture", Cause("the engine is too old for this model", permanent=True, hint="llmctl build")),
    ("failed to open GGUF file", Cause("the model file can't be opened", permanent=True, hint="check the file")),
    ("invalid magic characters", Cause("the model file is not GGUF", permanent=True, hint="check the file")),
    (
        "data is not within the file bounds",
        Cause("the model file is cut off", permanent=True, hint="delete that file, then llmctl up fetches it again"),
    ),
    (
        "error loading model hyperparameters",
        Cause("the model file's header is broken", permanent=True, hint="delete that file, then llmctl up fetches it again"),
    ),
    (
        "error loading model vocabulary",
        Cause("the model file's vocabulary is broken", permanent=True, hint="delete that file, then llmctl up fetches it again"),
    ),
    (
        "missing tensor",
        Cause("the model file lacks a tensor", permanent=True, hint="delete that file, then llmctl up fetches it again"),
    ),
    (
        "common_chat_verify_template",
        Cause("the chat template can't be used", permanent=True, hint="correct chat_template_file, or leave it out"),
    ),
    ("failed to create MTP context", Cause("the model file has no MTP head", permanent=True)),
    ("couldn't bind HTTP server socket", Cause("the child's socket is taken", permanent=False)),
    ("failed to load model", Cause("the model could not be loaded", permanent=False)),
)

_SIGNALS: Final[dict[int, Cause]] = {
    signal.SIGILL: Cause("the engine was built for another CPU", permanent=True, hint="llmctl build"),
    signal.SIGKILL: Cause("it was killed; perhaps the machine ran out of memory", permanent=False),
    signal.SIGABRT: Cause("the engine aborted", permanent=False),
}

_NAMING: Final = ("error", "fail", "abort", "assert", "invalid", "unable")


def cause(returncode: int, log_tail: str) -> Cause:
    """Classify an exit from its code (negative: a signal) and the last lines of its log.

    The child's own line that tells most is part of the text, because it knows best: the one with the known pattern, else its last
    that names a fault (behind a known pattern that is only ``exiting due to model loading error``).
    """
    pattern, found = next((known for known in _PATTERNS if known[0] in log_tail), ("", None))
    if found is None and returncode < 0:
        found = _SIGNALS.get(-returncode) or Cause(f"it died of {_signal_name(-returncode)}", permanent=False)
    if found is None:
        found = Cause(f"it ended with code {returncode}", permanent=False)
    said = last_words(log_tail, pattern)
    return Cause(f"{found.text}: {said}" if said else found.text, found.permanent, found.hint)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def last_words(log_tail: str, pattern: str = "") -> str:
    """The last line of a log that names a fault, or has ``pattern``, without its time stamp; empty if there is none."""
    for line in reversed(log_tail.splitlines()):
        if pattern in line if pattern else any(word in line.lower() for word in _NAMING):
            return line.partition(" E ")[2].strip() or line.strip()
    return ""


RAN_WELL_S: Final = 60.0
"""READY for this long: the next start waits for nothing (spec §7)."""


@dataclass(slots=True)
class Restarts:
    """The restart budget of one child: exponential delays with jitter, at most ``most`` useless starts in ``window_s``."""

    most: int = 5
    window_s: float = 600.0
    first_delay_s: float = 1.0
    longest_delay_s: float = 30.0
    _failures: list[float] = field(default_factory=list)

    def failed(self, now_s: float, jitter: float) -> float | None:
        """Note a start that served nothing at ``now_s``; the seconds to wait before the next, or None: give up.

        ``jitter`` in [0, 1) spreads the delay over its upper half, so that several children don't start in step.
        """
        self._failures = [at for at in self._failures if now_s - at < self.window_s] + [now_s]
        if len(self._failures) > self.most:
            return None
        delay = min(self.longest_delay_s, self.first_delay_s * 2.0 ** (len(self._failures) - 1))
        return delay * (0.5 + 0.5 * jitter)

    def forgive(self) -> None:
        """A start that served well: the budget is whole again."""
        self._failures.clear()
