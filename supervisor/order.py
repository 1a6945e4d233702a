"""What a command line asks for, and what it comes to: preset → header → plan → engine's command line. Shared by all commands that plan.

Everything is found when it is first asked for, so that what is wrong with a preset can be said without an engine, and a plan for a card
that isn't here needs neither an engine nor the network.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from supervisor import argv, budget, conceded, gguf, hardware, headers, measured, paths, plan, preset, store
from supervisor.allocation import Allocation
from supervisor.budget import Budget
from supervisor.errors import Error, Exit
from supervisor.gguf import Header
from supervisor.hardware import Card
from supervisor.model import Model
from supervisor.option import Speculation
from supervisor.paths import Home
from supervisor.placement import HOST
from supervisor.plan import Allocated, Plan, Step
from supervisor.preset import Preset
from supervisor.units import Progress

if TYPE_CHECKING:
    from supervisor.engine import Engine


@dataclass(frozen=True)
class Order:
    """A preset, and how it is to differ from what its file says."""

    name: str
    context: str | None = None
    mode: str | None = None
    overrides: tuple[str, ...] = ()
    model: Path | None = None
    """Another file in the place of the preset's."""
    gpu: str | None = None
    vram: int | None = None
    ram: int | None = None
    spare: Mapping[str, int] = field(default_factory=dict)
    """Bytes by pool of memory that it may use beside what is free now; negative ones are taken."""
    online: bool = False
    """Whether a header may be read from the hub."""
    steps: tuple[Step, ...] = ()
    """What is given up before anything else: it ran out of memory with it."""
    method: Speculation | None = None
    """Another one of the preset's ways to guess ahead (:func:`~supervisor.option.methods`) than its first; a plan's concern alone."""
    home: Home = field(default_factory=paths.home)

    @functools.cached_property
    def preset(self) -> Preset:
        """The preset as asked for."""
        found = preset.load(self.name, self.home, context=self.context, mode=self.mode, overrides=self.overrides)
        found = found.with_file(self.model.absolute()) if self.model else found
        return found.drafting(self.method) if self.method else found

    @functools.cached_property
    def engine(self) -> Engine:
        """The engine that will run it."""
        from supervisor import engine  # which runs processes; a plan for a card that isn't here doesn't

        return engine.locate(self.home)

    @functools.cached_property
    def known_engine(self) -> Engine | None:
        """The engine that a plan is held against; None where there is none yet, or it is planned for another machine's.

        Raises :class:`Error` for one that must not run.
        """
        if self.elsewhere:
            return None
        from supervisor import engine

        return self.engine if engine.chosen(self.home) else None

    @functools.cached_property
    def budget(self) -> Budget:
        """The memory there is."""
        here = self.preset.device != budget.CPU and not self.elsewhere
        found = budget.make(self.preset.device, hardware.detect(cards=here), gpu=self.gpu, vram=self.vram, ram=self.ram)
        host = self.spare.get(HOST, 0)
        return found.changed(host if self.preset.device == budget.CPU else self.spare.get(self.preset.device, 0), host)

    @property
    def elsewhere(self) -> bool:
        """Whether it is planned for a card that isn't here, so the engine here isn't the one that will run it."""
        return self.gpu is not None or self.vram is not None

    @functools.cached_property
    def headers(self) -> Mapping[Model, Header]:
        """Of every model that the preset or its fallback names."""
        return {model: headers.find(self.home, model, online=self.online) for model in self.preset.models}

    @functools.cached_property
    def plan(self) -> Plan:
        """What will run."""
        return self.replanned(self.steps)

    def _past(self, known: Engine) -> Mapping[Model, Sequence[Allocated]]:
        return {model: measured.load(self.home, store.path(self.home, model), known.identity) for model in self.preset.models}

    def replanned(self, steps: Sequence[Step]) -> Plan:
        """The plan for the same memory with these steps given up first."""
        known = self.known_engine
        past = {} if known is None else self._past(known)
        return plan.make(self.preset, self.headers, self.budget, engine=known, past=past, steps=steps)

    def conceded(self) -> tuple[Step, ...]:
        """What was given up for it before, because it ran out of memory."""
        return conceded.load(*self._conceded)

    def concede(self, steps: Sequence[Step]) -> None:
        """Remember that these are given up."""
        conceded.keep(*self._conceded, steps)

    def forget(self) -> None:
        """Give nothing up from the start."""
        conceded.forget(*self._conceded)

    @property
    def _conceded(self) -> tuple[Home, Path, str, Card | None, str]:
        return self.home, store.path(self.home, self.preset.model), self.engine.identity, self.budget.card, self.name

    @property
    def file(self) -> Path:
        """The model file of the plan, which may not be here yet."""
        return store.path(self.home, self.plan.preset.model)

    @functools.cached_property
    def argv(self) -> tuple[str, ...]:
        """The llama-server command line; without an engine it is not checked against one."""
        chosen = self.plan.preset  # before the engine: what is wrong with a preset can be said without one
        server, flags = Path("llama-server"), None
        if known := self.known_engine:
            from supervisor import engine

            server, flags = known.server, engine.capabilities(known)
        draft = store.path(self.home, chosen.draft_model) if chosen.draft_model else None
        return argv.render(chosen, server, self.file, flags=flags, draft=draft)

    def words(self) -> list[str]:
        """The same order as arguments of ``llmctl up``."""
        found = [self.name]
        found += ["--context", self.context] if self.context else []
        found += ["--mode", self.mode] if self.mode else []
        found += [word for override in self.overrides for word in ("--set", override)]
        return found + (["--model", str(self.model.absolute())] if self.model else [])

    @property
    def files(self) -> Mapping[Model, Path]:
        """The model files that the plan loads; they may not be here yet."""
        chosen = self.plan.preset
        return {model: store.path(self.home, model) for model in (chosen.model, chosen.draft_model) if model is not None}

    def fetch(self, progress: Progress) -> None:
        """Have the model here and see that it is the one that was planned."""
        for model in self.files:
            store.pull(self.home, model, progress)
        self.check()

    def check(self) -> None:
        """Raise :class:`Error` (exit code 6) when the model's file isn't the one that was planned."""
        check_file(self.plan.preset, headers.local(self.home, self.file), self.file)

    def remember(self, seen: Allocation) -> None:
        """Keep what the engine allocated, for the next plan."""
        measured.keep(self.home, self.file, self.engine.identity, plan.allocated(self.plan, seen))


def check_file(chosen: Preset, header: Header, file: Path) -> None:
    """Raise :class:`Error` (exit code 6) when the file isn't what the preset takes it for.

    Two repositories of the hub hold different files of the same name, one with an MTP head and one without.
    """
    gguf.require(header, str(file))
    if chosen.model.mtp is not None and header.tensors and chosen.model.mtp != header.has_mtp:
        have, want = ("an", "none") if header.has_mtp else ("no", "one")
        raise Error(
            f"{file} has {have} MTP head, and {chosen.name} takes it for a file with {want}",
            exit=Exit.MODEL,
            hint="the file of the other repository, or correct the preset's model.mtp",
        )


def never_fits(file: Path, home: Home) -> tuple[tuple[str, ...], str]:
    """What keeps a sound preset file from ever running here, were the machine empty and everything given up; and why that isn't known.

    A sentence for each way to run it that can't. Where the machine has no card, a preset for one is held against the reference card.
    """
    found, _ = preset.check(file)
    assert found is not None
    machine = hardware.detect()
    sentences: list[str] = []
    for context, mode in preset.pairs(found):
        asked = preset.read(file, context=context or None, mode=mode or None)
        way = " and ".join(f"{what} {name}" for what, name in (("context", context), ("mode", mode)) if name)
        subject = f"with {way} it" if way else "it"
        try:
            known = {model: headers.find(home, model) for model in asked.models}
        except Error as error:
            return tuple(sentences), error.message
        try:
            best = plan.make(asked, known, budget.whole(asked.device, machine))
        except Error as error:
            sentences.append(f"{subject} can't run: {error.message}")
            continue
        if not best.fits:
            gave = f" even with {'; '.join(best.given_up)}" if best.given_up else ""
            sentences.append(f"{subject} can never fit: it needs{gave} {best.shortage}")
    return tuple(sentences), ""
