"""From what is asked to what will run: every number that the engine is told, and why, and whether it fits. Pure.

The order (:func:`make`): (0) what was given up before, because it ran out of memory all the same (:class:`Step`,
:mod:`~supervisor.stepdown`); (1) what is asked, everything on the device; (2) each rung of the preset's ``fallback``, one on top of the
other, still with everything on the device; (3) fewer layers on the card, if the list ends with that; else what does not fit, where, and
by how much. Nothing that the list doesn't name is given up, and nothing that wouldn't lessen what is short: a card's shortage isn't
mended by a smaller prompt cache, nor the host's by a smaller KV cache on the card. Where it still doesn't fit the list is walked again,
since layers that left the card may have made the host short.

A configuration is completed before it is judged (:mod:`~supervisor.derive`): threads, the batch, the number of checkpoints. What the
engine allocated on earlier starts of the same file corrects the prediction (:func:`corrected`): the same flags give the same bytes, and
other flags at least the same weights.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from supervisor import architecture, derive, estimate, gguf, passthrough
from supervisor.allocation import Allocation
from supervisor.budget import Budget
from supervisor.errors import Error, Exit
from supervisor.estimate import Estimate, Settings
from supervisor.gguf import Header
from supervisor.model import Model
from supervisor.option import OFF, options
from supervisor.preset import Preset
from supervisor.profile import FEWER_LAYERS, RUNG_FIXED, Rung
from supervisor.units import MIB, size
from supervisor.value import Value

if TYPE_CHECKING:
    from supervisor.engine import Engine  # a plan for a card that isn't here needs no engine, nor the time to import it


@dataclass(frozen=True, slots=True)
class Allocated:
    """What the engine allocated on an earlier start of a file: bytes a term, as in an estimate, and by what they were decided."""

    settings: str
    """:func:`fingerprint` of all settings."""
    weights: str
    """Of those that decide the weights."""
    device: Mapping[str, int]
    host: Mapping[str, int]


def fingerprint(preset: Preset, settings: Settings, *, weights_only: bool = False) -> str:
    """What decides the engine's buffers, or its weights alone, as a short text that can be kept and compared.

    Extra arguments may change anything, so they tell two starts apart.
    """
    said = {
        each.name: getattr(settings, each.name) for each in fields(settings) if each.name not in ("checkpoints", "cache_ram_mib")
    }
    said |= {"cpu_flags": sorted(settings.cpu_flags), "mtp": settings.speculative == "mtp", "extra": preset.extra_args}
    if weights_only:
        said = {name: said[name] for name in ("gpu_layers", "cuda", "cpu_flags", "mtp", "extra")}
    elif preset.draft_model is not None:
        said["draft"] = (preset.draft_model.sha256, preset.draft_model.source, preset.draft_model.file)
    return hashlib.sha256(repr(sorted(said.items())).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Step:
    """Something that is given up: options and the values that they get; not what was there before, so it can be kept."""

    changes: Mapping[str, Value | Model | None] = field(hash=False)
    """As in a rung; ``gpu_layers`` is a number. None takes the draft model away."""
    why: str
    """Goes in brackets: ``it ran out of the card's memory``, ``20 MiB short``."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What will run."""

    asked: Preset
    """With what was given up, and what the machine decides still open."""
    preset: Preset
    """Complete: nothing in it is still to be derived."""
    header: Header
    settings: Settings
    predicted: Estimate
    """By the formulas alone."""
    estimate: Estimate
    """The same, corrected by what the engine allocated before."""
    budget: Budget
    given_up: tuple[str, ...]
    """The rungs that were taken, in words."""
    reasons: tuple[str, ...]
    """Where a number comes from that nobody wrote down, and what a reader should doubt."""
    steps: tuple[Step, ...] = ()
    """The same as ``given_up``, one for one: a plan for this budget that begins with them is this plan."""

    @property
    def device_bytes(self) -> int:
        """All terms of the device."""
        return sum(self.estimate.device.values())

    @property
    def host_bytes(self) -> int:
        """All terms of the host."""
        return sum(self.estimate.host.values())

    @property
    def device_lacks(self) -> int:
        """Bytes that the device has too few of; on the CPU everything is the device's."""
        need = self.device_bytes + (0 if self.budget.cuda else self.host_bytes)
        return max(0, need - self.budget.free_bytes)

    @property
    def host_lacks(self) -> int:
        """Bytes that the host has too few of beside a card."""
        return max(0, self.host_bytes - self.budget.host_free_bytes) if self.budget.cuda else 0

    @property
    def fits(self) -> bool:
        """Whether there is room for it."""
        return not (self.device_lacks or self.host_lacks)

    @property
    def shortage(self) -> str:
        """What does not fit, where and by how much, in words; empty when it fits."""
        free = self.budget
        words = []
        if self.device_lacks:
            have = free.free_bytes
            words.append(
                f"{size(have + self.device_lacks)} of {free.place}, which has {size(have)}: {size(self.device_lacks)} too much"
            )
        if self.host_lacks:
            have = free.host_free_bytes
            words.append(
                f"{size(have + self.host_lacks)} of the host's memory, which has {size(have)}: {size(self.host_lacks)} too much"
            )
        return " and ".join(words)

    def require(self) -> None:
        """Raise :class:`Error` (exit code 4) unless it fits."""
        if not self.fits:
            gave = f" with {'; '.join(self.given_up)}" if self.given_up else ""
            raise Error(
                f"{self.preset.name} needs{gave} {self.shortage}",
                exit=Exit.NO_FIT,
                hint=f"llmctl plan {self.preset.name}, or close what else uses the memory",
            )

    def __repr__(self) -> str:
        need, free = self.device_bytes // MIB, self.budget.free_bytes // MIB
        return f"<Plan {self.preset.name} {need} of {free} MiB, {'fits' if self.fits else 'too much'}>"


Headers = Mapping[Model, Header]
PastByModel = Mapping[Model, Sequence[Allocated]]
_LESS_IS_LESS: Final = ("context", "gpu_layers", "ubatch", "cache_ram", "checkpoint_budget")
"""Options of which a larger number is never something given up."""


@dataclass(frozen=True, slots=True)
class _Given:
    """A preset with what was given up, in words and in steps, one for one."""

    asked: Preset
    words: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()


def make(
    preset: Preset,
    headers: Headers,
    budget: Budget,
    *,
    engine: Engine | None = None,
    past: PastByModel = MappingProxyType({}),
    steps: Sequence[Step] = (),
) -> Plan:
    """Plan ``preset`` for ``budget``. ``headers`` holds one for every model that the preset or a rung of its fallback names.

    ``steps`` are given up first. One that no longer goes with the preset is left out, with a sentence in ``reasons``; one that would
    give up nothing is left out without.

    Raises :class:`Error` for what no memory would mend: a cache type that the engine has no kernel for, MTP without a head.
    """

    def taken(given: _Given, step: Step) -> _Given:
        asked = given.asked.change(step.changes, "fallback")
        refuse(asked, headers[asked.model], budget, engine)
        words = _words(given.asked, asked, step.changes, headers[asked.model])
        steps = stacked(given.steps, step)
        return _Given(asked, (*given.words[: len(steps) - 1], f"{words} ({step.why})"), steps)

    def after(best: Plan, step: Step) -> Plan:
        return _plan(taken(_Given(best.asked, best.given_up, best.steps), step), headers, budget, past)

    refuse(preset, headers[preset.model], budget, engine)
    given, strange = _Given(preset), []
    for step in steps:  # (0)
        if changes := lessening(given.asked, step.changes):
            try:
                _known(changes, headers)
                given = taken(given, Step(changes, step.why))
            except Error as error:
                strange.append(f"what was given up before ({step.why}) is kept: {error.message}")
    best = _plan(given, headers, budget, past)  # (1)
    for _ in preset.fallback:  # as often as there are rungs: a rung may be what makes another one help
        before = best
        best = _walk(best, preset, after)
        if best is before or best.fits:
            break
    return replace(best, reasons=(*strange, *best.reasons)) if strange else best


def _walk(best: Plan, preset: Preset, after: Callable[[Plan, Step], Plan]) -> Plan:
    """Down the fallback once, until it fits."""
    for rung in preset.fallback:
        if best.fits:
            return best
        if rung != FEWER_LAYERS:  # (2)
            if changes := lessening(best.asked, rung.changes):
                found = after(best, Step(changes, _short(best)))
                best = found if _helps(found, best) else best
        elif best.device_lacks and best.budget.cuda:  # (3)
            best = _fewer_layers(best, after)
    return best


def _fewer_layers(full: Plan, after: Callable[[Plan, Step], Plan]) -> Plan:
    """The most layers on the card with which it fits there; as it was if it fits with none. What it takes grows with the layers."""

    def with_layers(count: int) -> Plan:
        return after(full, Step({"gpu_layers": count}, _short(full)))

    fewer = range(1, full.settings.gpu_layers)
    count = bisect.bisect_right(fewer, False, key=lambda layers: with_layers(layers).device_lacks > 0)
    return with_layers(count) if count else full


def lessening(asked: Preset, changes: Mapping[str, Value | Model | None]) -> dict[str, Value | Model | None]:
    """Those of the changes that give something up: not what holds already, nor more of what takes memory by the number."""

    def more(name: str, value: object) -> bool:
        now = getattr(asked, name)
        if name == "speculative" and now == OFF:
            return True
        return name in _LESS_IS_LESS and isinstance(value, int) and isinstance(now, int) and value > now

    return {
        name: value
        for name, value in changes.items()
        if not hasattr(asked, name) or (getattr(asked, name) != value and not more(name, value))
    }


def _known(changes: Mapping[str, object], headers: Headers) -> None:
    """Raise :class:`Error` for changes that no rung of this preset could make, and for a model that can't be read."""
    for name, value in changes.items():
        if name == "model" and isinstance(value, Model) and value in headers:
            architecture.read(headers[value])
        elif (name not in options() or name in RUNG_FIXED) and (name, value) != ("draft_model", None):
            word = value.file if isinstance(value, Model) else value
            raise Error(f"the preset has no {name} {word} that it could go down to", exit=Exit.CONFIG)


def stacked(steps: tuple[Step, ...], step: Step) -> tuple[Step, ...]:
    """The steps with one more. Layers that left the card in two lots are one step: its sentence counts all of them."""
    again = bool(steps) and {*steps[-1].changes} == {*step.changes} == {"gpu_layers"}
    return (*steps[: len(steps) - again], step)


def _words(before: Preset, after: Preset, changed: Iterable[str], header: Header) -> str:
    """What is given up: ``cache_type_k f16 → q8_0, context 65536 → 32768``, ``3 of 34 layers run on the CPU``."""
    names = [name for name in changed if name not in ("gpu_layers", "draft_model")]  # a draft model goes with its speculation
    words = [Rung({name: getattr(after, name) for name in names}).words(before)] if names else []
    if "gpu_layers" in changed:
        every = architecture.read(header).offloadable
        layers = every if after.gpu_layers == "all" else min(every, int(after.gpu_layers))
        words.append(f"{every - layers} of {every} layers run on the CPU")
    return ", ".join(words)


def _helps(found: Plan, before: Plan) -> bool:
    """Whether it lessens what is short, of the device or of the host. One that doesn't is not given up."""
    return found.device_lacks < before.device_lacks or found.host_lacks < before.host_lacks


def _short(plan: Plan) -> str:
    """``20 MiB short``."""
    return f"{max(1, round(max(plan.device_lacks, plan.host_lacks) / MIB)):,} MiB short"


def _plan(given: _Given, headers: Headers, budget: Budget, past: PastByModel) -> Plan:
    """One configuration, completed and estimated."""
    asked, header = given.asked, headers[given.asked.model]
    shape = architecture.read(header)
    draft = headers[asked.draft_model] if asked.draft_model else None
    preset, reasons = derive.complete(asked, shape, header, budget)
    settings = derive.settle(preset, shape, budget)
    found = estimate.make(shape, header, settings, draft=(architecture.read(draft), draft) if draft else None)
    predicted = found
    found, doubts = corrected(found, preset, settings, past.get(preset.model, ()))
    if uncounted := passthrough.uncounted(preset.extra_args):
        doubts = (f"{', '.join(uncounted)} of extra_args may take or save memory that isn't counted here", *doubts)
    if shape.rough:
        doubts = (shape.rough, *doubts)
    if header.assumed:
        doubts = ("the file itself was not read yet, its sizes are those of its recipe: --online reads its header", *doubts)
    reasons = (*asked.notes, *reasons, *doubts)
    return Plan(asked, preset, header, settings, predicted, found, budget, given.words, reasons, given.steps)


def refuse(preset: Preset, header: Header, budget: Budget, engine: Engine | None) -> None:
    """Raise :class:`Error` for what can't run, however much memory there is."""
    gguf.require(header, preset.model.file)
    if preset.speculative == "mtp" and not header.has_mtp:
        raise Error(
            f"{preset.model.file} has no MTP head, and {preset.name} speculates with one",
            exit=Exit.MODEL,
            hint="--set speculative=off, or the file of the MTP repository",
        )
    if not budget.cuda or engine is None:
        return
    if not engine.cuda and engine.key != "external":
        raise Error(
            f"{preset.name} runs on {preset.device} and the engine {engine.key} was built without CUDA",
            exit=Exit.ENGINE,
            hint="llmctl build",
        )
    pair = f"{preset.cache_type_k}-{preset.cache_type_v}"
    if engine.fa_pairs and preset.flash_attention != "off" and pair not in engine.fa_pairs:
        known = ", ".join(engine.fa_pairs)
        raise Error(
            f"the engine {engine.key} has no flash-attention kernel for a K cache of {preset.cache_type_k} with a V cache of "
            f"{preset.cache_type_v}; it has: {known}",
            exit=Exit.CONFIG,
            hint=f"--set cache_type_v={preset.cache_type_k}",
        )


def allocated(plan: Plan, seen: Allocation) -> Allocated:
    """What a start of this plan allocated, to be kept. The engine's compute buffer includes the scratch that a plan names apart."""
    device = dict(seen.device)
    if "compute" in device:
        device["scratch"] = 0
    kept = plan.preset, plan.settings
    return Allocated(fingerprint(*kept), fingerprint(*kept, weights_only=True), device, dict(seen.host))


def corrected(found: Estimate, preset: Preset, settings: Settings, past: Sequence[Allocated]) -> tuple[Estimate, tuple[str, ...]]:
    """The estimate, with what the engine allocated before in the place of what was predicted.

    (1) It ran with these very settings: every term it reported. (2) It ran with others: the weights, which don't depend on them
    while the same layers are on the card and MTP's block is loaded or not as before.
    """
    if not past:
        return found, ()
    whole = fingerprint(preset, settings)
    seen = next((each for each in past if each.settings == whole), None)
    if seen is not None:  # (1)
        terms: Container[str] = {*found.device, *found.host}
        words = "the memory is what the engine allocated before, with the same flags"
    else:  # (2)
        weights = fingerprint(preset, settings, weights_only=True)
        seen = next((each for each in past if each.weights == weights), None)
        terms, words = WEIGHTS, "the weights' memory is what the engine allocated before"
    if seen is None:
        return found, ()
    device = {term: seen.device.get(term, value) if term in terms else value for term, value in found.device.items()}
    host = {term: seen.host.get(term, value) if term in terms else value for term, value in found.host.items()}
    return replace(found, device=device, host=host), (words,)


WEIGHTS: Final = frozenset(("weights", "repacked", "embedding", "layers"))
"""The terms of an estimate that only the file and the placement decide."""
