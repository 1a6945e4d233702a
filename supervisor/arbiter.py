"""The children and what is wanted of them. The only writer of their state; everybody else waits in a child's line.

Two kinds of tasks, all in :meth:`Arbiter.run`, and the children end with them:

- A *bringer* lives while a preset is asked for that doesn't run: it plans it, makes room as ``placement`` says, and starts it. It undoes
  what it asked of others when nobody waits any more.
- A *keeper* (:mod:`~supervisor.keeper`) lives while a child is wanted. Cancelling it is how a child is stopped.

Two more go round: one unloads what nobody has asked for, gives another try to what was given up, and another way to guess ahead to what
guesses badly (``speculation``); one heeds changed files.

Nothing is awaited between a state's check and its change. Whoever waits for a change waits for the pulse, and looks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from supervisor import keeper, logs, placement, speculation
from supervisor.catalog import Catalog, Launch, not_here
from supervisor.causes import Cause
from supervisor.errors import Error, Exit
from supervisor.lifecycle import REARM_S, Event, Owner, State
from supervisor.line import Line
from supervisor.option import Speculation
from supervisor.preset import Preset
from supervisor.speculation import Verdict
from supervisor.units import duration
from supervisor.vram import Vram
from supervisor.ward import Ward

log = logging.getLogger("llmctl.arbiter")

POLL_S: Final = 0.05
"""Between looks at what is free, while memory comes back."""
RELEASE_S: Final = 5.0
"""How long the memory of a child that ended may take to be free again. Here it is free with its exit; a CUDA driver was seen to lag."""
REREAD_S: Final = 2.0
"""Between two looks at the presets' files. One costs some 0.2 ms."""

Listener = Callable[[dict[str, Any]], None]


class Arbiter:
    """Keeps the children. ``async with arbiter.run():`` starts those that ``up`` was given; leaving the block ends all."""

    def __init__(self, catalog: Catalog, *, children_changed: Callable[[dict[str, int]], None]) -> None:
        """``children_changed`` is told the pids that live by name, each time that changes, so that a successor can find orphans."""
        self.catalog = catalog
        self.wards: dict[str, Ward] = {}
        self.listeners: set[Listener] = set()
        self._children_changed = children_changed
        self._group: asyncio.TaskGroup | None = None
        self._pulse = asyncio.Event()
        self.cards = Vram()
        """What children have of the cards, and what those take."""
        self._held = False
        """Everything is drained, also what nobody has asked for yet."""
        for name in catalog.ordered:
            self.ward(name).ordered = True

    def __repr__(self) -> str:
        return f"<Arbiter {list(self.wards.values())}>"

    def ward(self, name: str) -> Ward:
        """The ward of a preset in the catalog, made when it is first asked for.

        Raises :class:`Error` (HTTP 503) when its model was never fetched: no request starts a download.
        """
        if name not in self.wards:
            if not self.catalog.here(name):
                raise not_here(name, self.catalog.presets[name].model.file)
            asked = self.catalog.presets[name]
            line = Line(
                name, places=asked.slots, limit=asked.queue, max_wait_s=asked.max_wait, stir=lambda: self._stir(self.wards[name])
            )
            ward = self.wards[name] = Ward(name, asked, line, self._tell, renew=lambda why: self.renew(self.wards[name], why))
            ward.held = self._held
        return self.wards[name]

    def check(self, ward: Ward) -> None:
        """Raise :class:`Error` (HTTP 503) when a request for it would wait in vain."""
        if ward.unavailable is not None:
            raise ward.unavailable

    async def ensure_ready(self, ward: Ward) -> None:
        """Return when it is ready. Raises :class:`Error` with the cause when it won't be."""
        while ward.state is not State.READY:
            if ward.problem is not None:
                raise ward.problem
            if ward.unavailable is not None:
                raise ward.unavailable
            await self._changed()

    def want(self, *names: str) -> None:
        """The user wants these up, and nothing else for its own sake: others may give way, and needn't."""
        for ward in self.wards.values():
            ward.wanted, ward.ordered = ward.wanted and Owner.REQUEST, False
            if ward.state is State.STOPPED:
                ward.again_s = None
        for name in names:
            ward = self.ward(name)
            ward.ordered, ward.wanted = True, Owner.USER
            self._release(ward)

    def unload(self, ward: Ward) -> None:
        """Stop its child once what is in work has ended, whoever wants it; the next request starts it again."""
        ward.wanted, ward.ordered, ward.returns = None, False, False
        ward.ended_by_drain = False
        self._end(ward)

    def drain(self, *wards: Ward) -> None:
        """Stop these once what is in work has ended, and hold who asks for them until they are restarted; without any, all there are."""
        self._held = self._held or not wards
        for ward in wards or self.wards.values():
            ward.ended_by_drain = ward.ended_by_drain or ward.keeper is not None
            ward.held, ward.returns = True, False
            self._end(ward)

    def restart(self, *wards: Ward) -> tuple[Ward, ...]:
        """Start these anew, planned anew, once what is in work has ended; requests wait meanwhile. Without any: what runs, or was to.

        Returns those that are to come up.
        """
        self._held = self._held and bool(wards)
        found = wards or tuple(
            ward
            for ward in self.wards.values()
            if ward.ordered or ward.keeper is not None or ward.ended_by_drain or ward.line.admission.waiting
        )
        for ward in self.wards.values() if not wards else ():
            ward.held = False
            self._stir(ward)
        for ward in found:
            ward.ended_by_drain = False
            self.renew(ward, "it is restarted")
            ward.returns = True
            ward.wanted = ward.wanted or (Owner.USER if ward.ordered else None)
            self._release(ward)
        return found

    def learn(self, preset: str, method: str, draft_tokens: int, draft_accepted: int) -> None:
        """A request has ended for which an engine that guesses by ``method`` guessed so many tokens, of which so many were right."""
        ward = self.wards.get(preset)
        if ward is not None and ward.learn(method, draft_tokens, draft_accepted, time.monotonic()):
            self._beat()

    def renew(self, ward: Ward, why: str) -> None:
        """Start its child anew once what it has in work has ended. It neither waits for that nor spends its budget."""
        if ward.keeper is None or ward.gives_way_to is not None:
            return  # it ends anyway
        log.info("%s is renewed: %s", ward.name, why)
        ward.returns = True
        ward.gives_way_to = ward
        self._retire(ward)
        self._beat()

    def _end(self, ward: Ward) -> None:
        ward.again_s = None
        if ward.state is State.FAILED:
            ward.move(Event.STOP)
        elif ward.keeper is not None:
            ward.gives_way_to = ward
            self._retire(ward, Owner.USER)
        self._beat()

    def _release(self, ward: Ward) -> None:
        """The user asks for it anew: what was given up, or held against it, is forgotten."""
        self.catalog.forget(ward.name)
        ward.begin_anew()
        ward.held, ward.problem = False, None
        ward.again_s = None
        ward.budget.forgive()
        if ward.state in (State.FAILED, State.STOPPED):
            ward.cause = None
        if ward.state is State.FAILED:
            ward.move(Event.STOP)
        self._stir(ward)
        self._beat()  # one that guesses otherwise by now is to be changed back

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Keep the children while the block runs; at its end every one is stopped and reaped."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            going = [group.create_task(each, name="tend") for each in (self._tend(), self._reread())]
            self.want(*self.catalog.ordered)
            try:
                yield
            finally:
                self._group = None
                for task in going:
                    task.cancel()
                for ward in self.wards.values():
                    for each in (ward.bringer, ward.keeper):
                        if each is not None:
                            each.cancel()

    # Who is up

    def _stir(self, ward: Ward) -> None:
        """Somebody began to wait for it while it can't answer, or the last one inside has left."""
        if ward.unavailable is not None:
            ward.line.refuse(ward.unavailable)
        if ward.gives_way_to is not None:
            self._retire(ward)
        if ward.is_asked_for and ward.state is State.STOPPED and ward.bringer is None and self._group is not None:
            ward.bringer = self._group.create_task(self._bring(ward), name=f"bring up {ward.name}", context=logs.about(ward.name))
            ward.bringer.add_done_callback(lambda _: self._brought(ward))
        if ward.state is not State.READY or ward.gives_way_to is not None or self._is_bringing:
            self._beat()

    @property
    def _is_bringing(self) -> bool:
        return any(ward.bringer is not None for ward in self.wards.values())

    def _brought(self, ward: Ward) -> None:
        ward.bringer = None
        self._stir(ward)

    async def _bring(self, ward: Ward) -> None:
        """Make room for it and start it."""
        ward.asked_s, owner = time.monotonic(), ward.wanted
        try:
            await self._place(ward)
            if ward.state is State.STOPPED and owner is Owner.USER and not ward.held:
                ward.cause = Cause("it is no longer wanted", hint=f"llmctl switch {ward.name}")
                ward.tell()
        except (Error, OSError) as exc:
            error = _said(exc)
            log.warning("%s can't be started: %s", ward.name, error.message)
            ward.problem = _cannot_start(error)
            if owner is Owner.USER and ward.ready_s is not None:
                ward.again_s = time.monotonic() + REARM_S  # it was up, and should be
                if ward.launch is not None:
                    ward.launch = ward.launch.seen_now()  # or when one of its files has changed
            ward.wanted, ward.returns = None, False
            ward.line.refuse(ward.problem)
            ward.tell()
        finally:
            ward.makes_room_for = None
            for other in self.wards.values():
                if other.gives_way_to is ward:
                    self._resume(other)

    async def _place(self, ward: Ward) -> None:
        """Look until it fits and starts, or nobody asks any more. Raises :class:`Error` when it can't be."""
        launch = await self._launch(ward)
        replanned, asked = False, ward.asked
        while ward.is_asked_for:
            if ward.asked != asked:  # its preset was changed while it waited
                launch, asked = await self._launch(ward), ward.asked
                continue
            up = [each.upstream for each in self.wards.values()]
            free = await asyncio.to_thread(self.catalog.free, launch)
            if up != [each.upstream for each in self.wards.values()]:
                continue  # one took or freed its memory just then, and what is free doesn't go with what each holds
            now_s = time.monotonic()
            late = self._lingering(now_s)
            running = [*self._running(ward), *late]
            choice = placement.choose(launch.needs, free, running, now_s)
            if isinstance(choice, placement.Start):
                self._begin(ward, launch)
                return
            if isinstance(choice, placement.GiveWay):
                ward.makes_room_for = launch
                self._give_way(choice.names, ward)
                await self._changed()
            elif late:
                await self._changed(now_s + POLL_S)
            elif isinstance(choice, placement.Wait):
                await self._changed(choice.until_s)
            elif replanned:
                raise _no_room(ward, choice.beside)
            else:
                launch, replanned = await self._launch(ward), True

    async def _launch(self, ward: Ward) -> Launch:
        running = self._running(ward)
        spare = placement.spare([*running, *self._lingering(time.monotonic())])
        ward.ask(self.catalog.presets.get(ward.name, ward.asked))
        try:
            return await asyncio.to_thread(self.catalog.launch, ward.name, spare, ward.watch.method)
        except Error as error:
            staying = tuple(each.name for each in running if not each.yields)
            if error.exit is not Exit.NO_FIT or not staying:
                raise
            raise _no_room(ward, staying, error.message) from error

    def _running(self, beside: Ward) -> list[placement.Running]:
        """What has memory, or a right to it."""
        found = [ward.running(beside) for ward in self.wards.values() if ward is not beside]
        busy = {ward.gives_way_to for ward in self.wards.values()}
        for ward in self.wards.values():
            # Those that ended for it must not take their memory back before it could.
            if ward.makes_room_for is not None and ward not in busy and ward.asked_s < beside.asked_s:
                yields = ward.yields_to(beside)
                found.append(placement.Running(ward.name, ward.makes_room_for.needs, {}, yields=yields, settled=False))
        return [each for each in found if each is not None]

    def _lingering(self, now_s: float) -> list[placement.Running]:
        """Those that have just ended: what they had of a card may not be free again yet; the host's memory is."""
        found = []
        for ward in self.wards.values():
            if ward.launch is not None and now_s - ward.ended_s < RELEASE_S:
                needs = {pool: count for pool, count in ward.launch.needs.items() if pool != placement.HOST}
                found.append(placement.Running(ward.name, needs, needs, leaving=True))
        return found

    def _give_way(self, names: tuple[str, ...], to: Ward) -> None:
        for name in names:
            ward = self.wards[name]
            if ward.gives_way_to is None:
                log.info("%s gives way to %s", name, to.name)
            ward.gives_way_to, ward.returns = to, False
            self._retire(ward, Owner.PLACEMENT)

    def _retire(self, ward: Ward, by: Owner | None = None) -> None:
        """Let it end: now if it has nothing in work, else when that has ended (:meth:`_stir`); its line is closed."""
        ward.unwanted = by or ward.unwanted
        if ward.keeper is not None and ward.keeper.cancelling():
            return
        if ward.state not in (State.DRAINING, State.STOPPING):
            ward.was_wanted, ward.wanted = ward.wanted, None  # whoever asks from here on wants it again
        if ward.state is State.READY:
            ward.move(Event.DRAIN)
            ward.line.close()
        served = ward.state not in (State.STARTING, State.BACKOFF)  # else who is inside still is at the child before
        if ward.keeper is not None and not (served and ward.line.admission.inside):
            ward.keeper.cancel("it gives way")

    def _resume(self, ward: Ward) -> None:
        """Nobody wants its memory any more."""
        ward.gives_way_to = ward.unwanted = None
        if ward.state is State.DRAINING and not ward.stopping and ward.launch is not None and ward.upstream is not None:
            ward.move(Event.RESUME)
            ward.wanted = ward.wanted or ward.was_wanted
            ward.line.open(ward.launch.preset.slots)

    def _begin(self, ward: Ward, launch: Launch) -> None:
        assert self._group is not None
        for each in self.wards.values():
            each.ended_s = -math.inf  # what it freed is there
        owner = Owner.REQUEST if ward.again_s is None else Owner.USER  # whose wish could not be met before
        ward.launch, ward.problem, ward.again_s, ward.unwanted = launch, None, None, None
        ward.returns = False
        ward.line.bound(limit=launch.preset.queue, max_wait_s=launch.preset.max_wait)
        ward.wanted = ward.wanted or owner
        ward.loaded = 0.0
        ward.move(Event.START)
        keep = keeper.keep(ward, self.cards, self._tell_children)
        ward.keeper = self._group.create_task(keep, name=f"keep {ward.name}", context=logs.about(ward.name))
        ward.keeper.add_done_callback(lambda _: self._kept(ward))

    def _kept(self, ward: Ward) -> None:
        """Its keeper has ended: it was stopped, or given up."""
        ward.keeper = None
        ward.gives_way_to = None
        while ward.state not in (State.STOPPED, State.FAILED):  # it was cancelled before its first step, or while its child ended
            ward.move(Event.GONE if ward.state is State.STOPPING else Event.STOP)
        if ward.state is State.FAILED:
            for_good = ward.cause is not None and ward.cause.permanent
            ward.again_s = None if for_good else time.monotonic() + REARM_S
            when = "when one of its files has changed" if for_good else f"in {duration(REARM_S)}"
            log.warning("%s is tried again %s, or by llmctl restart %s", ward.name, when, ward.name)
        elif ward.returns:
            ward.wanted = ward.wanted or ward.was_wanted
        if ward.cause is not None and ward.cause.text == keeper.STOPPED:
            ward.cause = None
        self._beat()
        self._stir(ward)

    async def _tend(self) -> None:
        """Unload what nobody has asked for as long as its ``ttl`` says, and give another try to what was given up long ago.

        What guesses badly is given another way to.
        """
        while True:
            now_s = time.monotonic()
            next_s = math.inf
            for ward in self.wards.values():
                next_s = min(next_s, self._expires_s(ward, now_s), self._rearms_s(ward, now_s))
                changes_s = ward.changes_s(now_s)
                next_s = min(next_s, changes_s if changes_s > now_s else now_s + speculation.QUIET_S)
            due = next((ward for ward in self.wards.values() if ward.changes_s(now_s) <= now_s), None)
            if due is not None and not self._is_bringing:  # which may want the memory that it would leave for a moment
                await self._guess_otherwise(due)
                continue
            await self._changed(None if next_s == math.inf else next_s)

    def _expires_s(self, ward: Ward, now_s: float) -> float:
        """Unload it if it is time; else when it will be."""
        ttl = ward.preset.ttl_s
        if ward.state is not State.READY or ttl is None:
            return math.inf
        since_s = max(ward.line.idle_since_s, ward.ready_s or 0.0) if ward.line.idle else now_s
        if not ward.line.idle or now_s - since_s < ttl:
            return since_s + ttl
        log.info("%s is unloaded: nobody asked for it for %s", ward.name, duration(now_s - since_s))
        self._retire(ward, Owner.TTL)
        return math.inf

    def _rearms_s(self, ward: Ward, now_s: float) -> float:
        """Let it be tried once more if it is time; else when it will be."""
        if ward.state not in (State.FAILED, State.STOPPED) or ward.again_s is None or ward.bringer is not None:
            return math.inf
        if now_s < ward.again_s:
            return ward.again_s
        self._rearm(ward)
        return math.inf

    def _rearm(self, ward: Ward) -> None:
        ward.again_s = None
        if ward.state is State.FAILED:
            ward.budget.on_trial()
            ward.move(Event.REARMED)
        else:
            ward.wanted = Owner.USER
        self._stir(ward)

    async def _guess_otherwise(self, ward: Ward) -> None:
        """Give it the way to guess ahead that its watch asks for: its child is renewed. It goes on as it was where that can't be planned.

        What guesses badly is changed only for what costs nothing else.
        """
        was, watch = ward.launch, ward.watch
        assert was is not None
        verdict = watch.verdict(time.monotonic())
        obstacles = []
        for method in watch.candidates(time.monotonic()) or (watch.method,):
            try:
                launch = await self._in_its_place(ward, method)
                price = speculation.price(was.plan, launch.plan) if verdict is Verdict.NEXT else ""
                obstacle = f"it would take {price}" if price else ""
            except (Error, OSError) as exc:
                obstacle = _said(exc).message
            now_s = time.monotonic()
            if ward.launch is not was or ward.watch is not watch or ward.changes_s(now_s) > now_s or self._is_bringing:
                return  # it isn't idle any more
            if not obstacle:
                self._guess(ward, was, launch, watch.take(method, now_s))
                return
            obstacles.append(f"{method}: {obstacle}")
        ward.launch = dataclasses.replace(was, method=watch.method)  # as far as it can be
        if watch.stay("; ".join(obstacles), time.monotonic()):
            log.warning("%s goes on with speculative %s; %s", ward.name, was.preset.speculative, watch.obstacle)

    def _guess(self, ward: Ward, was: Launch, launch: Launch, why: str) -> None:
        told = f"speculative {was.preset.speculative} → {launch.preset.speculative}, {why}"
        log.warning("%s: %s", ward.name, told)
        self._tell(ward.said() | {"speculative": ward.guessing | {"method": launch.preset.speculative}})
        self._follow(ward, was, launch, told)

    # What changes on disk

    async def _reread(self) -> None:
        """Heed changed presets, and files that what was given up for good is made of."""
        seen, lost = self.catalog.presets, False
        while True:
            await asyncio.sleep(REREAD_S)
            try:
                await asyncio.to_thread(self.catalog.refresh)
            except OSError as exc:  # a folder that can't be listed: what was read of it stays
                if not lost:
                    log.warning("the presets can't be looked at: %s", exc)
                lost = True
                continue
            lost = False
            if self.catalog.presets is not seen:
                seen = self.catalog.presets
                for ward in [ward for ward in self.wards.values() if ward.name in seen and seen[ward.name] != ward.asked]:
                    await self._heed(ward, seen[ward.name])
            for ward in self.wards.values():
                for_good = ward.state is State.FAILED and ward.again_s is None
                unmet = ward.state is State.STOPPED and ward.again_s is not None and ward.bringer is None
                if (for_good or unmet) and ward.launch is not None and ward.launch.is_stale():
                    log.info("%s may be tried again: its files have changed", ward.name)
                    self._rearm(ward)

    async def _heed(self, ward: Ward, asked: Preset) -> None:
        """Its preset has changed. Its child is renewed only if its command line is another one, and fits where the old one is."""
        ward.ask(asked)
        if ward.keeper is None or ward.launch is None or ward.gives_way_to is not None:
            if ward.state is State.FAILED:
                self._rearm(ward)
            return
        was = ward.launch
        try:
            launch = await self._in_its_place(ward, ward.watch.method)
        except (Error, OSError) as exc:
            log.warning("%s goes on as it was: %s", ward.name, _said(exc).message)
            return
        if ward.launch is not was or ward.keeper is None:
            return  # it has been started anew meanwhile
        if not self._follow(ward, was, launch, "its preset has changed"):
            return
        ward.line.bound(limit=asked.queue, max_wait_s=asked.max_wait)
        self._beat()

    def _follow(self, ward: Ward, was: Launch, launch: Launch, why: str) -> bool:
        """Have it run as ``launch`` says. Whether it does already: else its child is renewed, since its command line is another one."""
        if (launch.command, launch.environment) != (was.command, was.environment):
            self.renew(ward, why)
            return False
        ward.launch = dataclasses.replace(was, plan=launch.plan, method=launch.method)
        return True

    async def _in_its_place(self, ward: Ward, method: Speculation) -> Launch:
        """What would be started now in the place of its child, where that is. Raises as the catalog's ``launch``."""
        own = ward.running(ward)
        others = [dataclasses.replace(each, yields=False) for each in self._running(ward)]
        spare = placement.spare([*others, *([dataclasses.replace(own, yields=True)] if own is not None else [])])
        return await asyncio.to_thread(self.catalog.launch, ward.name, spare, method)

    # Who is told

    def _beat(self) -> None:
        """Wake whoever waits for a change."""
        self._pulse.set()
        self._pulse = asyncio.Event()

    async def _changed(self, until_s: float | None = None) -> None:
        """Return at the next change, or at that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                await self._pulse.wait()

    def _tell(self, said: dict[str, Any]) -> None:
        self._beat()
        for listener in self.listeners:
            listener(said)

    def _tell_children(self) -> None:
        try:
            self._children_changed({ward.name: ward.child.pid for ward in self.wards.values() if ward.child is not None})
        except OSError as exc:  # a full disk costs a successor the list of orphans, and nobody a running server
            log.warning("the run folder can't be written: %s", exc)

    def kill(self) -> None:
        """End every child now; whoever stops one sees it gone."""
        for ward in self.wards.values():
            if ward.child is not None:
                ward.child.kill()


def _said(exc: Error | OSError) -> Error:
    """As an error of ours: a machine without a descriptor left must not end what runs."""
    if isinstance(exc, Error):
        return exc
    return Error(f"the machine can't be looked at: {exc}", exit=Exit.CHILD, hint="llmctl logs")


def _cannot_start(error: Error) -> Error:
    """The same for a client: 503, and what it is; asking again is of no use until something else changes."""
    code = "does_not_fit" if error.exit is Exit.NO_FIT else error.code if error.status == 503 else "cannot_start"
    return Error(error.message, exit=error.exit, hint=error.hint, status=503, code=code, retry=False)


def _no_room(ward: Ward, beside: tuple[str, ...], lacking: str = "") -> Error:
    said = lacking + "," if lacking else f"{ward.name} doesn't fit"
    return Error(
        f"{said} beside {' and '.join(beside) or 'what else uses the memory'}",
        exit=Exit.NO_FIT,
        hint=f"llmctl unload {beside[0]}" if beside else f"llmctl plan {ward.name}",
    )
