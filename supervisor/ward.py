"""One child as the arbiter keeps it: what is wanted of it, the state it is in, the line before it. Others read it for display only."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from supervisor import lifecycle
from supervisor.allocation import Allocation
from supervisor.catalog import Launch
from supervisor.causes import Cause
from supervisor.child import Child
from supervisor.errors import Error, Exit
from supervisor.lifecycle import Event, Owner, Restarts, State
from supervisor.line import Line
from supervisor.option import methods
from supervisor.placement import HOST, Running
from supervisor.preset import Preset
from supervisor.speculation import QUIET_S, Watch
from supervisor.suspects import Suspects
from supervisor.upstream import Upstream

log = logging.getLogger("llmctl.arbiter")


@dataclass(slots=True, eq=False)
class Ward:
    """A preset that was asked for, and its child if it has one."""

    name: str
    asked: Preset
    """As it was asked for; what runs is the plan's, :attr:`preset`."""
    line: Line
    told: Callable[[dict[str, Any]], None]
    """Is told each change, as JSON."""
    renew: Callable[[str], None]
    """Ends its child when what is in work has ended, and starts another one; told why. What its keeper can't mend is mended so."""
    ordered: bool = False
    """The user named it, in ``up`` or ``switch``."""
    wanted: Owner | None = None
    """Who wants it up now."""
    unwanted: Owner | None = None
    """Who wanted it down last, since it was up."""
    was_wanted: Owner | None = None
    """Who did when it began to end."""
    state: State = State.STOPPED
    cause: Cause | None = None
    """Why its child ended last, when nobody stopped it."""
    problem: Error | None = None
    """Why it could not even be started, the last time that this was tried."""
    restarts: int = 0
    budget: Restarts = field(default_factory=Restarts)
    again_s: float | None = None
    """When it is tried again, while it is BACKOFF or FAILED."""
    held: bool = False
    """Drained by the user: whoever asks for it waits until it is restarted."""
    ended_by_drain: bool = False
    """It ran when it was drained, so a restart of all brings it back."""
    returns: bool = False
    """It ends to be started again."""
    suspects: Suspects = field(default_factory=Suspects)
    """Requests that were in flight when its child died."""
    launch: Launch | None = None
    child: Child | None = None
    upstream: Upstream | None = None
    """While it is READY or DRAINING."""
    keeper: asyncio.Task[None] | None = None
    bringer: asyncio.Task[None] | None = None
    """What makes room for it and starts it."""
    gives_way_to: Ward | None = None
    """For whom it is to end; itself where it ends for good."""
    makes_room_for: Launch | None = None
    """What others ended for: until it starts, their memory is its."""
    asked_s: float = 0.0
    """Since when its bringer is at work."""
    ended_s: float = -math.inf
    """When its last child had ended and nobody had started since."""
    ready_s: float | None = None
    """When it was last ready."""
    died_s: float = -math.inf
    """When its child died last, of itself."""
    died_pid: int | None = None
    """Whose memory of the card may not be free yet."""
    weighed_s: float = -math.inf
    """When it was last renewed for its memory."""
    slot_context: int | None = None
    """Tokens one request may use, as the engine says; known once it was ready."""
    allocated: Allocation | None = None
    """What the engine allocated at its last start, by its log."""
    loaded: float = 0.0
    """Part of its files that it has read, while it starts."""
    own_bytes: int | None = None
    """Memory of its own in the host's RAM, as last seen while it runs."""
    card_bytes: int | None = None
    """What it has of cards' memory, likewise; None where the driver doesn't say."""
    watch: Watch = field(init=False)
    """Which of its ways to guess ahead it is at."""

    def __post_init__(self) -> None:
        """Begin with the preset's own way."""
        self.begin_anew()

    def __repr__(self) -> str:
        pid = self.child.pid if self.child else None
        admission = self.line.admission
        return f"<Ward {self.name} {self.state.name} pid={pid} slots={admission.busy}/{admission.places}>"

    @property
    def preset(self) -> Preset:
        """What runs, or what was asked for."""
        return self.launch.preset if self.launch else self.asked

    def begin_anew(self) -> None:
        """Guess ahead in the preset's own way: from the next start on, or the next idle moment."""
        self.watch = Watch(methods(self.asked))

    def ask(self, asked: Preset) -> None:
        """It is asked for like this from here on."""
        if asked != self.asked:
            self.asked = asked
            self.begin_anew()

    def learn(self, method: str, draft_tokens: int, draft_accepted: int, now_s: float) -> bool:
        """A request has ended that guessed so; of another method than the present one nothing is learnt. Whether a change is due by it."""
        if self.launch is None or not method == self.watch.method == self.launch.preset.speculative:
            return False
        was_due = self.watch.due_s <= now_s
        self.watch.learn(now_s, draft_tokens, draft_accepted)
        return not was_due and self.watch.due_s <= now_s

    def changes_s(self, now_s: float) -> float:
        """When it may be given another way to guess ahead: when one is due, and nobody has been there for :data:`QUIET_S`."""
        if self.state is not State.READY or self.stopping or self.held or self.launch is None:
            return math.inf
        due_s = self.watch.due_s if self.launch.method == self.watch.method else -math.inf
        quiet_s = (max(self.line.idle_since_s, self.ready_s or 0.0) if self.line.idle else now_s) + QUIET_S
        return max(due_s, quiet_s) if due_s < math.inf else math.inf

    @property
    def guessing(self) -> dict[str, Any]:
        """How it guesses ahead, as JSON."""
        share = self.watch.acceptance
        runs = self.launch.preset.speculative if self.launch is not None and self.upstream is not None else None
        return {
            "method": runs,
            "acceptance": None if share is None else round(share, 3),
            "asked": self.asked.speculative,
            "why": self.watch.why,
        }

    @property
    def stopping(self) -> bool:
        """Whether its end has begun."""
        return self.state is State.STOPPING or (self.keeper is not None and self.keeper.cancelling() > 0)

    @property
    def unavailable(self) -> Error | None:
        """What a request for it hears (HTTP 503) when it was given up."""
        if self.state is not State.FAILED or self.cause is None:
            return None
        return Error(
            f"{self.name} is not running: {self.cause.text}",
            exit=Exit.CHILD,
            hint=self.cause.hint,
            status=503,
            code="engine_unavailable",
            retry=False if self.cause.permanent else None,
            log=self.cause.lines,
        )

    @property
    def is_asked_for(self) -> bool:
        """Whether anybody wants it up who isn't being served yet."""
        return not self.held and (self.wanted is Owner.USER or self.returns or self.line.admission.waiting > 0)

    def move(self, event: Event) -> None:
        """Take one edge of the table, and tell it."""
        before, self.state = self.state, lifecycle.step(self.state, event)
        log.info("%s %s -> %s (%s)", self.name, before.value, self.state.value, event.value)
        self.tell()

    @property
    def why(self) -> str | None:
        """Why it is not up, when nobody stopped it."""
        if self.cause is not None:
            return self.cause.text
        return self.problem.message if self.problem is not None else None

    @property
    def hint(self) -> str | None:
        """What to do about that."""
        if self.cause is not None:
            return self.cause.hint
        return self.problem.hint if self.problem is not None else None

    def tell(self) -> None:
        """Tell where it is."""
        self.told(self.said())

    def said(self) -> dict[str, Any]:
        """Where it is, as an event."""
        said: dict[str, Any] = {"preset": self.name, "state": self.state.value}
        if self.state is State.STARTING:
            said["loaded"] = round(self.loaded, 3)
        is_down = self.state in (State.BACKOFF, State.FAILED) or (self.state is State.STOPPED and not self.is_asked_for)
        if self.why is not None and is_down:
            said["cause"] = self.why
            said["exit"] = int(Exit.CHILD if self.cause is not None or self.problem is None else self.problem.exit)
            said["try"] = self.hint or ""
        return said

    def yields_to(self, other: Ward) -> bool:
        """Whether it may give way to another one, now or when it has started."""
        both = self.wanted is Owner.USER and other.wanted is Owner.USER
        return not (self.preset.pin or both)

    def running(self, beside: Ward) -> Running | None:
        """Its part in the question what may run ``beside`` it; None when it has no memory and will have none."""
        if self.launch is None or self.state in (State.STOPPED, State.FAILED):
            return None
        planned = self.launch.needs
        held = {pool: count for pool, count in planned.items() if pool != HOST} if self.upstream else {}
        held[HOST] = self.child.anonymous_bytes() if self.child else 0
        taken = self.gives_way_to is not None and self.gives_way_to is not beside
        return Running(
            self.name,
            planned,
            held,
            yields=self.yields_to(beside),
            settled=not (self.state is State.STARTING or taken),
            leaving=self.stopping,
            busy=not self.line.idle,
            ordered=self.ordered,
            used_s=self.line.idle_since_s,
            due_s=0.0 if beside.wanted is Owner.USER else max(beside.asked_s, self.ready_s or 0.0) + self.preset.hold,
        )
