"""What may be asked for at the front door, and how it is started: the presets there are, those that ``up`` was given as it was told.

The folders are looked at again when a name isn't known, so that a new preset needs no restart. A preset that can't be read is left out,
and why is in the log. Starting one plans it anew for the memory there is then; the first start of what ``up`` was given takes the plan
that ``up`` has just made and shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from supervisor import argv, hardware, placement, preset, routing, store
from supervisor.allocation import Allocation
from supervisor.budget import CPU
from supervisor.errors import Error, Exit
from supervisor.order import Order
from supervisor.paths import Home
from supervisor.placement import HOST, Pools
from supervisor.plan import Plan
from supervisor.preset import Preset
from supervisor.rundir import RunDir
from supervisor.units import MIB

log = logging.getLogger("llmctl.catalog")

LOAD_BASE_S: Final = 60.0
LOAD_RATE_BYTES_S: Final = 20 * MIB
"""A load is given up after the base plus the file's size at this rate: a slow USB disk, cold (llama.cpp#15128: hangs during load)."""


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
        return LOAD_BASE_S + self.plan.header.file_bytes / LOAD_RATE_BYTES_S


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
        self._seen: object = None
        self._reading = threading.Lock()
        self.refresh()
        if clash := routing.clash({name: self.presets[name] for name in self.ordered}):
            raise Error(clash, exit=Exit.CONFIG, hint="change one of the presets' aliases and defaults")

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
        found = {name: order.preset for name, order in self._orders.items()}
        faults: dict[str, Error] = {}
        for name in preset.names(self._home):
            if name in found:
                continue
            try:
                read = preset.load(name, self._home)
            except Error as error:
                log.warning("the preset %s is left out: %s", name, error.message)
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

    def launch(self, name: str, spare: Pools) -> Launch:
        """Plan a preset for what is free now and ``spare``. Raises :class:`Error`: it doesn't fit, its model isn't here, its engine."""
        order = self._planned.pop(name, None)
        if order is None:
            order = dataclasses.replace(self._orders.get(name) or Order(name, home=self._home), spare=spare)
        if missing := [model.file for model in order.files if not store.have(self._home, model)]:
            raise not_here(name, missing[0])
        order.plan.require()
        order.check()
        folder, file = self._owned.child_folder(name), self._home.logs / f"{name}.log"
        return Launch(order.plan, order.argv, argv.environment(os.environ, folder), folder, file, order.remember)

    def free(self, launch: Launch) -> Pools:
        """What is free now of the pools that a launch needs."""
        device = launch.preset.device
        machine = hardware.detect(cards=device != CPU)
        found = {HOST: machine.available_bytes}
        found |= {f"CUDA{card.index}": card.free_bytes for card in machine.cards}
        return found


def _versions(folder: Path) -> list[tuple[str, int]]:
    """Its presets' files and when they were written. One that goes away meanwhile isn't among them."""
    found = []
    for path in sorted(folder.glob("*.yaml")):
        with contextlib.suppress(FileNotFoundError):
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
