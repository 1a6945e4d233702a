"""What may be asked for at the front door, and how it is started: the presets there are, those that ``up`` was given as it was told.

The folders are looked at again when a name isn't known, so that a new preset needs no restart. A preset that can't be read is left out,
and why is in the log. Starting one plans it anew for the memory there is then; the first start of what ``up`` was given takes the plan
that ``up`` has just made and shown. A plan that ran out of memory is followed by a smaller one (``stepdown``), which is remembered until
the user asks for the preset anew.

What ``up`` was given keeps the differences from its file that it was given with; the file itself is read again like the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from supervisor import argv, conceded, derive, hardware, kept, placement, preset, routing, stepdown, store
from supervisor.allocation import Allocation
from supervisor.budget import CPU
from supervisor.causes import Kind
from supervisor.errors import Error, Exit
from supervisor.option import OFF, Speculation
from supervisor.order import Order
from supervisor.paths import Home
from supervisor.placement import HOST, Pools
from supervisor.plan import Plan, Step
from supervisor.preset import Preset
from supervisor.record import Run
from supervisor.rundir import RunDir
from supervisor.units import MIB

log = logging.getLogger("llmctl.catalog")

LOAD_BASE_S: Final = 60.0
LOAD_RATE_BYTES_S: Final = 20 * MIB
"""A load is given up after the base plus the file's size at this rate: a slow USB disk, cold (llama.cpp#15128: hangs during load)."""
PROMPT_BYTES: Final = 3
"""A token of a warm prompt has at least about so many; prefill may be four times slower than expected (:data:`SLOWER`)."""
SLOWER: Final = 4


def _nothing(_: Kind) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Launch:
    """All that is needed to start one child."""

    plan: Plan
    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    log: Path
    remember: Callable[[Allocation], None]
    """Gets what the engine allocated, on a thread, once it is ready."""
    step_down: Callable[[Kind], str | None] = _nothing
    """Called on a thread after a child of it ended for that: the next launch gives something up. Says what; None when nothing is left."""
    identities: Mapping[Path, str] = field(default_factory=dict)
    """The files it is made of, and what they were then."""
    run: Run | None = None
    """What a record says of it."""
    method: Speculation = OFF
    """How it was to guess ahead; what was given up may have turned it off."""

    @property
    def preset(self) -> Preset:
        """What runs."""
        return self.plan.preset

    @property
    def needs(self) -> Pools:
        """What it takes of each pool of memory."""
        return placement.needs(self.plan)

    @property
    def load_limit_s(self) -> float:
        """After this long a load is a hang."""
        warm_tokens = len(self.preset.warm_prompt) / PROMPT_BYTES
        return LOAD_BASE_S + self.plan.header.file_bytes / LOAD_RATE_BYTES_S + SLOWER * warm_tokens / self._prefill_tps

    @property
    def batch_s(self) -> float:
        """What one batch of prefill takes, as expected."""
        return int(self.preset.batch) / self._prefill_tps

    @property
    def _prefill_tps(self) -> float:
        return derive.prefill_tps(self.plan.header, self.plan.budget, int(self.preset.threads))

    def seen_now(self) -> Launch:
        """The same, of its files as they are now."""
        return dataclasses.replace(self, identities={file: kept.identity(file) for file in self.identities})

    def is_stale(self) -> bool:
        """Whether one of its files is another one by now."""
        return any(kept.identity(file) != seen for file, seen in self.identities.items())


class Catalog:
    """The presets by name. Its methods read files and the machine's memory: on a thread, but for :attr:`presets`."""

    def __init__(self, home: Home, orders: Sequence[Order], owned: RunDir) -> None:
        """``orders`` are what ``up`` was given, planned. Raises :class:`Error` (exit code 3) when their names and aliases clash."""
        self.presets: Mapping[str, Preset] = MappingProxyType({})
        self.faults: Mapping[str, Error] = MappingProxyType({})
        """What a request for one that can't be read hears (HTTP 503)."""
        self.ordered = tuple(order.name for order in orders)
        self._home = home
        self._owned = owned
        self._orders = {order.name: order for order in orders}
        self._planned = dict(self._orders)
        self._unkept: dict[str, tuple[Step, ...]] = {}
        """What was given up and could not be written down: without it a full disk would have the same plan die for ever."""
        self._seen: object = None
        self._reading = threading.Lock()
        self.refresh()
        if clash := routing.clash({name: self.presets[name] for name in self.ordered}):
            raise Error(clash, exit=Exit.CONFIG, hint="change one of the presets' aliases and defaults")
        for name in self.ordered:
            self.forget(name)

    def __repr__(self) -> str:
        return f"<Catalog {', '.join(self.presets)}>"

    def refresh(self) -> None:
        """Read the presets again if a file was changed. Of several who call it at once, all return when they are read."""
        with self._reading:
            seen = tuple(entry for folder in preset.folders(self._home) for entry in _versions(folder))
            if seen != self._seen:
                self._read()
                self._seen = seen

    def _read(self) -> None:
        found: dict[str, Preset] = {}
        for name, order in self._orders.items():
            try:
                found[name] = dataclasses.replace(order).preset if self._seen is not None else order.preset
            except Error as error:
                log.warning("the preset %s stays as it was: %s", name, error.message)
                found[name] = self.presets[name]
        faults: dict[str, Error] = {}
        for name in preset.names(self._home):
            if name in found:
                continue
            try:
                read = preset.load(name, self._home)
            except Error as error:
                what = "goes on as it was, if it runs" if name in self.presets else "is left out"
                log.warning("the preset %s %s: %s", name, what, error.message)
                said = f"the preset {name} can't be read: {error.message}"
                faults[name] = Error(said, exit=error.exit, hint=error.hint, status=503, code="faulty_preset", retry=False)
                continue
            if clash := routing.clash({**found, name: read}):
                log.warning("%s: those of %s are left out", clash, name)
                read = dataclasses.replace(read, aliases=(), default=False)
            found[name] = read
        self.presets, self.faults = MappingProxyType(found), MappingProxyType(faults)

    def here(self, name: str) -> bool:
        """Whether the model files of a preset are on this machine; ``up`` has fetched those of what it was given."""
        chosen = self.presets[name]
        return name in self._orders or all(
            store.have(self._home, model) for model in (chosen.model, chosen.draft_model) if model is not None
        )

    def launch(self, name: str, spare: Pools, method: Speculation | None = None) -> Launch:
        """Plan a preset for what is free now and ``spare``, with this one of its ways to guess ahead.

        Raises :class:`Error`: it doesn't fit, its model isn't here, its engine.
        """
        order = self._planned.pop(name, None)
        if order is None or method not in (None, order.preset.speculative):
            order = dataclasses.replace(self._orders.get(name) or Order(name, home=self._home), spare=spare, method=method)
            order = dataclasses.replace(order, steps=order.conceded() or self._unkept.get(name, ()))
        if missing := [model.file for model in order.files if not store.have(self._home, model)]:
            raise not_here(name, missing[0])
        order.plan.require()
        order.check()
        folder, file = self._owned.child_folder(name), self._home.logs / f"{name}.log"
        files = (order.engine.server, *order.files.values())
        return Launch(
            order.plan,
            order.argv,
            argv.environment(os.environ, folder, order.plan.preset),
            folder,
            file,
            remember=order.remember,
            step_down=functools.partial(self._step_down, order),
            identities={each: kept.identity(each) for each in files},
            run=_run(order),
            method=order.preset.speculative,
        )

    def forget(self, name: str) -> None:
        """The user asks for it anew: what was given up for it is tried again."""
        self._unkept.pop(name, None)
        if not conceded.any_kept(self._home):
            return
        with contextlib.suppress(Error):  # what can't be planned has nothing to forget
            dataclasses.replace(self._orders.get(name) or Order(name, home=self._home)).forget()

    def _step_down(self, order: Order, kind: Kind) -> str | None:
        """Give something up in the next plan of this order; what, in words."""
        plan = order.plan
        steps = stepdown.after(plan, kind, order.replanned)
        if steps is None:
            return None
        order.concede(steps)
        if order.conceded() != steps:
            self._unkept[order.name] = steps
        return "; ".join(each for each in order.replanned(steps).given_up if each not in plan.given_up)

    def free(self, launch: Launch) -> Pools:
        """What is free now of the pools that a launch needs."""
        device = launch.preset.device
        machine = hardware.detect(cards=device != CPU)
        found = {HOST: machine.available_bytes}
        found |= {f"CUDA{card.index}": card.free_bytes for card in machine.cards}
        return found


def _run(order: Order) -> Run:
    chosen = order.plan.preset
    return Run(
        model=chosen.model.file,
        model_sha256=chosen.model.sha256 or None,
        engine=f"{order.engine.title}, {order.engine.key}",
        context=chosen.slot_context,
        slots=chosen.slots,
        speculative=chosen.speculative,
    )


def _versions(folder: Path) -> list[tuple[str, int]]:
    """Its presets' files and when they were written. One that goes away meanwhile isn't among them."""
    found = []
    for path in sorted(folder.glob("*.yaml")):
        with contextlib.suppress(OSError):
            found.append((str(path), path.stat().st_mtime_ns))
    return found


def not_here(name: str, file: str) -> Error:
    """The :class:`Error` (HTTP 503) for a preset whose model was not fetched: a request starts no download."""
    return Error(
        f"the model of {name}, {file}, is not on this machine",
        exit=Exit.MODEL,
        hint=f"llmctl pull {name}",
        status=503,
        code="model_not_downloaded",
        retry=False,
    )
