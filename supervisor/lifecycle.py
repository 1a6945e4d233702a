"""What a child's state may become, and when to try again. Pure: time is an argument. Why a child ended is in ``causes``.

The table below is the whole truth about states: nothing else assigns one, and an event that a state doesn't know raises. What is
*wanted* is not a state, and it has an :class:`Owner`: a child that exits while STOPPING because it was told to goes to STOPPED, one that
exits while READY is started again, one that exits while DRAINING is not.

A child that is ended because it hung goes through STOPPING, and on from there as one that exited; one that needs a smaller plan goes on to
STOPPED, and whoever wants it has it planned anew.

A start that served nothing spends the restart budget; :class:`Restarts` says how long to wait and when to give up. What was given up is
tried once more after :data:`REARM_S`, unless its cause is permanent: then, when its preset, its model's file or the engine has changed.
A deliberate stop and a step-down neither wait nor spend.
"""

from __future__ import annotations

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
    STEP_DOWN = "step_down"
    """It ran out of memory, and has something to give up."""
    UNHEALTHY = "unhealthy"
    """It lives and does nothing: it is ended."""
    EXITED_WELL = "exited_well"
    EXITED_TRANSIENT = "exited_transient"
    EXITED_PERMANENT = "exited_permanent"
    """Trying it again soon would be in vain."""
    DELAY_ELAPSED = "delay_elapsed"
    BUDGET_SPENT = "budget_spent"
    REARMED = "rearmed"
    """It may be tried again, once."""
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
        Event.STEP_DOWN: State.STOPPING,
        Event.STOP: State.STOPPING,
    },
    State.READY: {
        Event.EXITED_WELL: State.STARTING,  # it had run long enough: no waiting
        Event.EXITED_TRANSIENT: State.BACKOFF,
        Event.EXITED_PERMANENT: State.FAILED,
        Event.STEP_DOWN: State.STOPPING,
        Event.UNHEALTHY: State.STOPPING,
        Event.DRAIN: State.DRAINING,  # no new request: it is to be stopped when those in work have ended
        Event.STOP: State.STOPPING,
    },
    State.DRAINING: {
        Event.RESUME: State.READY,  # nobody wants its memory any more
        Event.EXITED_WELL: State.STOPPED,  # it was to go anyway
        Event.EXITED_TRANSIENT: State.STOPPED,
        Event.EXITED_PERMANENT: State.FAILED,
        Event.STEP_DOWN: State.STOPPING,
        Event.UNHEALTHY: State.STOPPING,
        Event.STOP: State.STOPPING,
    },
    State.BACKOFF: {
        Event.DELAY_ELAPSED: State.STARTING,
        Event.BUDGET_SPENT: State.FAILED,
        Event.STOP: State.STOPPED,
    },
    State.FAILED: {Event.REARMED: State.STOPPED, Event.STOP: State.STOPPED},
    State.STOPPING: {
        Event.EXITED_WELL: State.STARTING,  # it was ended because it was unhealthy, and is wanted as before
        Event.EXITED_TRANSIENT: State.BACKOFF,
        Event.EXITED_PERMANENT: State.FAILED,
        Event.STEP_DOWN: State.STOPPING,
        Event.STOP: State.STOPPING,  # told to stop while it was being ended for another reason
        Event.GONE: State.STOPPED,
    },
}


class Owner(Enum):
    """Who wants a child up, or down."""

    USER = "user"
    """Up by ``llmctl up`` or ``switch``, down by ``unload`` or ``drain``, both by ``restart``."""
    REQUEST = "request"
    """Up, by asking for its preset."""
    TTL = "ttl"
    """Down: nobody asked for it for so long."""
    PLACEMENT = "placement"
    """Down: another one needs its memory."""


def step(state: State, event: Event) -> State:
    """The state after ``event``. Raises ValueError naming both when the table has no such edge."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise ValueError(f"a child that is {state.name} knows no event {event.name}") from None


RAN_WELL_S: Final = 60.0
"""READY for this long: the next start waits for nothing."""
REARM_S: Final = 600.0
"""What was given up gets one more try after so long: a card that another program filled may be free by then."""


@dataclass(slots=True)
class Restarts:
    """The restart budget of one child: exponential delays with jitter, at most ``most`` useless starts in ``window_s``.

    A start is useful when it served a request or ran well. The delays are short at first, since most deaths come alone, and grow fourfold:
    0.25 s, 1 s, 4 s, 16 s, 30 s at most, so that what somebody else does to the machine has most of a minute to end.
    """

    most: int = 5
    window_s: float = 600.0
    first_delay_s: float = 0.25
    factor: float = 4.0
    longest_delay_s: float = 30.0
    _useless: list[float] = field(default_factory=list)
    _on_trial: bool = False

    def ended(self, now_s: float, jitter: float, *, useful: bool) -> float | None:
        """Note the end of a start at ``now_s``; the seconds to wait before the next, or None: give up.

        ``jitter`` in [0, 1) spreads the delay over its upper half, so that several children don't start in step.
        """
        if useful:
            self.forgive()
            return self.first_delay_s * (0.5 + 0.5 * jitter)
        self._useless = [at for at in self._useless if now_s - at < self.window_s] + [now_s]
        if self._on_trial or len(self._useless) > self.most:
            return None
        delay = min(self.longest_delay_s, self.first_delay_s * self.factor ** (len(self._useless) - 1))
        return delay * (0.5 + 0.5 * jitter)

    def forgive(self) -> None:
        """The budget is whole again: a start was useful, or the user asks anew."""
        self._useless.clear()
        self._on_trial = False

    def on_trial(self) -> None:
        """From here on one useless start is enough to give up, until a useful one."""
        self._on_trial = True
