"""A preset: what you ask for, put together from one file and the command line.

Later wins: (1) the declared default, (2) the file, (3) the mode, (4) the context, (5) ``--context N``, (6) ``--set``. A context beats a
mode because it was made for that length; where they disagree, the preset says so. Which of these gave an option its value stands in
:attr:`Preset.origins`.

Whatever changes a preset afterwards (a rung of its ``fallback``, a value that the plan worked out) goes through :meth:`Preset.change`,
which holds it to the same declarations and rules. A preset that was made is sound: its values are in their bounds and go together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from supervisor import paths, profile
from supervisor.errors import Error, Exit
from supervisor.model import Model
from supervisor.option import CONTEXT_STEP, OFF, UNLIMITED, Options, Speculation, methods, options
from supervisor.profile import Ladder, Layer, Profile, Rung, Set, Setting, worded
from supervisor.rules import Conflict, conflicts, idle
from supervisor.value import Duration, Switch, Value, nearest
from supervisor.words import Fault, first, quoted

DEFAULT: Final = "default"
FILE: Final = "file"


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence on why an option has its value; true as long as that comes from ``origin``."""

    key: str
    origin: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset(Options):
    """One thing that can be served. The options are its attributes."""

    name: str
    """The file's name without .yaml; clients send it as ``model``."""
    model: Model
    draft_model: Model | None = None
    fallback: Ladder = ()
    """What may be given up, in this order, each on top of those before it; the last may be the word ``fewer_layers``. Rungs that would
    give up nothing here (a context that is not smaller, a value that holds already) are left out."""
    contexts: tuple[str, ...] = ()
    """Names that ``--context`` takes."""
    modes: tuple[str, ...] = ()
    """Names that ``--mode`` takes."""
    context_name: str = ""
    """The chosen one of ``contexts``, or nothing."""
    mode_name: str = ""
    """The chosen one of ``modes``, or nothing."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Option → where its value comes from: ``default``, ``file``, ``mode latency``, ``context long``, ``--context``, ``--set``, or
    the origin given to :meth:`change`."""
    remarks: tuple[Note, ...] = field(default=(), compare=False)
    """What was to say when it was put together; see :attr:`notes`."""

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence on the context that a number of tokens took, and one for each option in which the context won over the mode.

        Nothing on an option whose value was given in another way after all.
        """
        return tuple(each.sentence for each in self.remarks if self.origins.get(each.key) == each.origin)

    @property
    def slot_context(self) -> int:
        """Tokens that one request may use: the whole is rounded up, and then a slot's part (src/llama-context.cpp:290-303)."""
        whole = _padded(self.context)
        return whole if self.unified else _padded(whole // self.slots)

    @property
    def most_tokens(self) -> int | None:
        """The longest answer that a request may ask for; None for no limit."""
        return None if self.max_tokens == UNLIMITED else int(self.max_tokens)

    @property
    def ttl_s(self) -> int | None:
        """Seconds without a request after which it is unloaded; None for never."""
        return None if self.ttl == OFF else int(self.ttl)

    @property
    def models(self) -> tuple[Model, ...]:
        """Every model that it or its fallback names, each once; its own first."""
        named = [self.model, self.draft_model, *(rung.changes.get("model") for rung in self.fallback if isinstance(rung, Rung))]
        return tuple(dict.fromkeys(each for each in named if isinstance(each, Model)))

    def values(self) -> dict[str, bool | int | float | str | list[str]]:
        """Every option and block with its value, as a script or a person would write it: switches, durations and models are words."""
        found: dict[str, bool | int | float | str | list[str]] = {"model": self.model.file}
        found["draft_model"] = worded("draft_model", self.draft_model)
        for name, option in options().items():
            value = getattr(self, name)
            word = worded(name, value) if isinstance(option.kind, Switch | Duration) else value
            found[name] = list(value) if isinstance(value, tuple) else word
        return found | {"fallback": [str(rung) for rung in self.fallback]}

    def change(self, changes: Mapping[str, object], origin: str) -> Preset:
        """The preset with other values for some options, which come from ``origin`` (``fallback``, ``derived``).

        A text is read like a word in the file; other values have to be in the same bounds. Raises :class:`Error` (exit code 3) for a
        value out of bounds or settings that don't go together.
        """
        values: dict[str, Any] = {}
        for key, value in changes.items():
            if isinstance(value, Model) or key in profile.MODELS:
                values[key] = value
                continue
            option = options()[key]
            assert isinstance(value, bool | int | float | str | tuple)
            try:
                values[key] = option.kind.read(value if isinstance(value, str) else option.kind.write(value))
            except ValueError as exc:
                raise Error(
                    f"{origin}: {key} is {quoted(value) if isinstance(value, str) else value}, but {exc}",
                    exit=Exit.CONFIG,
                    hint="correct the preset",
                ) from exc
        origins = MappingProxyType({**self.origins, **dict.fromkeys(values, origin)})
        changed = dataclasses.replace(self, **values, origins=origins)
        for conflict in changed.conflicts():
            raise Error(f"{origin}: {conflict.message}", exit=Exit.CONFIG, hint=conflict.hint)
        return changed

    def with_file(self, path: Path) -> Preset:
        """The preset with another GGUF file, absolute, in the place of its own; its fallback no longer changes the model.

        What the file holds is known when its header is read. Raises :class:`Error` as :meth:`change` does.
        """
        rungs = []
        for rung in self.fallback:
            kept = rung if isinstance(rung, str) else Rung(_without(rung.changes, "model"), rung.line)
            rungs += [kept] if isinstance(kept, str) or kept.changes else []
        return dataclasses.replace(self.change({"model": Model(path.name, path=str(path))}, "--model"), fallback=tuple(rungs))

    def drafting(self, method: Speculation) -> Preset:
        """The preset further down its list of ways to draft (:func:`~supervisor.option.methods`), at one of them; as it is at any other."""
        ways = methods(self)
        if method == self.speculative or method not in ways:
            return self
        rest = ways[ways.index(method) + 1 :]
        draft = {} if "draft" in (method, *rest) else {"draft_model": None}
        return self.change({"speculative": method, "speculative_next": rest, **draft}, "speculation")

    def conflicts(self) -> Iterator[Conflict]:
        """Settings that don't go together; none in a preset that was made by this module."""
        return conflicts(self, self.model, self.draft_model)

    def __repr__(self) -> str:
        return f"<Preset {self.name} {self.model.file} context={self.context} slots={self.slots}>"


def _padded(tokens: int) -> int:
    return -(-tokens // CONTEXT_STEP) * CONTEXT_STEP


def _without(changes: Mapping[str, Value | Model], name: str) -> Mapping[str, Value | Model]:
    return MappingProxyType({key: value for key, value in changes.items() if key != name})


def names(home: paths.Home) -> tuple[str, ...]:
    """All presets there are, sorted; the user's own and the shipped ones, broken ones too. What has no preset's name isn't one."""
    found = {path.stem for folder in folders(home) for path in folder.glob("*.yaml")}
    return tuple(sorted(filter(profile.nameable, found)))


def misnamed(home: paths.Home) -> tuple[Path, ...]:
    """The user's files that would be presets but for their names; hidden ones are an editor's."""
    found = (path for path in home.presets.glob("*.yaml") if not path.name.startswith("."))
    return tuple(sorted(path for path in found if not profile.nameable(path.stem)))


def find(name: str, home: paths.Home) -> Path:
    """The file of the preset called ``name``; the user's own wins over a shipped one, also where it can't be read.

    Error (exit code 3, status 404) if there is none.
    """
    if profile.nameable(name):
        for folder in folders(home):
            path = folder / f"{name}.yaml"
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                with contextlib.suppress(PermissionError):  # perhaps there is: reading it says why that isn't known
                    path.lstat()
                return path
    near, odd = nearest(name, names(home)), "" if profile.nameable(name) else ", and none can be called so"
    raise Error(
        f"there is no preset {quoted(name)}{odd}; there are: {', '.join(names(home)) or 'none'}",
        exit=Exit.CONFIG,
        hint=f"llmctl up {near}" if near else "llmctl presets",
        status=404,
        code="model_not_found",
    )


def load(
    name: str, home: paths.Home, *, context: str | None = None, mode: str | None = None, overrides: Sequence[str] = ()
) -> Preset:
    """The preset called ``name``, put together.

    ``context`` is a name or a number of tokens, ``mode`` a name, ``overrides`` are the ``KEY=VALUE`` texts of ``--set``. Raises
    :class:`Error` (exit code 3) for an unknown preset, and for anything wrong in its file, chosen or not; the message names file and line.
    """
    return read(find(name, home), context=context, mode=mode, overrides=overrides)


def read(path: Path, *, context: str | None = None, mode: str | None = None, overrides: Sequence[str] = ()) -> Preset:
    """Put together the preset in a file. Same arguments and errors as :func:`load`."""
    found, faults = check(path)
    if faults or found is None:
        worst = min(faults, key=lambda fault: (fault.rank, fault.line))
        raise Error(worst.where(path), exit=Exit.CONFIG, hint=worst.hint)
    return _chosen(found, context, mode, overrides)


def check(path: Path) -> tuple[Profile | None, tuple[Fault, ...]]:
    """The file and everything that is wrong with it, by line.

    Its words, its values, each pair of a context and a mode that it offers, and what it sets that counts in none of them.
    """
    found, faults = profile.read(path)
    if found is None or faults:  # what doesn't hold for itself isn't held against the rest
        return found, first(faults)
    ways = [_assemble(found, context, mode) for context, mode in pairs(found)]
    return found, first([*(fault for made in ways for fault in _way_faults(found, made)), *_idle_faults(found, ways)])


def pairs(found: Profile) -> tuple[tuple[str, str], ...]:
    """Every (context, mode) that can be chosen; empty text is none, where the file has no default."""
    contexts = tuple(found.contexts) if found.default_context else ("", *found.contexts)
    modes = tuple(found.modes) if found.default_mode else ("", *found.modes)
    return tuple(itertools.product(contexts, modes))


def folders(home: paths.Home) -> tuple[Path, Path]:
    """Where presets lie: the user's own, which win, and the shipped ones."""
    return home.presets, paths.data_folder("presets")


def _chosen(found: Profile, context: str | None, mode: str | None, overrides: Sequence[str]) -> Preset:
    """The preset that the command line asks for."""
    context_name, tokens, why = _context(found, context)
    mode_name = _overlay("mode", mode, tuple(found.modes), found) if mode is not None else found.default_mode
    more = [("--context", {"context": Set(tokens, 0)})] if tokens is not None else []
    given = {}
    for key, value in map(profile.assigned, overrides):
        given[key] = Set(value, 0)
    made = _assemble(
        found, context_name, mode_name, [*more, ("--set", given)], [Note("context", "--context", why)] if why else []
    )
    for conflict in (*made.conflicts(), *filter(None, (idle(options()[key], made) for key in given))):
        origin = made.origins.get(conflict.key, DEFAULT)
        blame = next((key for key in (conflict.key, *given) if key in given), None)
        where = f"--set {blame}" if blame else origin if origin.startswith("--") else str(found.path)
        key, colon, word = conflict.hint.partition(": ")
        hint = f"--set {key}={word}" if colon and key in options() else conflict.hint
        raise Error(f"{where}: {conflict.message}", exit=Exit.CONFIG, hint=hint)
    return made


def _assemble(
    found: Profile, context: str, mode: str, more: Sequence[tuple[str, Layer]] = (), remarks: Sequence[Note] = ()
) -> Preset:
    """Lay the layers over one another; the result's settings may not go together yet."""
    over = found.contexts.get(context, {})
    under = found.modes.get(mode, {})
    layers = [(FILE, found.base), (f"mode {mode}", under), (f"context {context}", over), *more]
    values: dict[str, Setting] = {}
    origins = dict.fromkeys((*profile.MODELS, *options(), "fallback"), DEFAULT)
    for origin, layer in layers:
        values |= {key: each.value for key, each in layer.items()}
        origins |= dict.fromkeys(layer, origin)
    rungs = values.pop("fallback", ())
    made = Preset(
        name=found.name,
        contexts=tuple(found.contexts),
        modes=tuple(found.modes),
        context_name=context,
        mode_name=mode,
        origins=MappingProxyType(origins),
        remarks=(
            *remarks,
            *(
                Note(
                    key,
                    f"context {context}",
                    f"mode {mode} has {key} {worded(key, each.value)}, "
                    f"context {context} has {worded(key, over[key].value)}: the context wins",
                )
                for key, each in under.items()
                if key in over and over[key].value != each.value and key != "fallback"
            ),
        ),
        **values,  # type: ignore[arg-type]  # each was read by the kind of its option
    )
    return dataclasses.replace(made, fallback=_ladder(made, rungs))  # type: ignore[arg-type]


def _ladder(made: Preset, rungs: Ladder) -> Ladder:
    """The rungs that give something up here: no larger context, nothing that holds already."""
    now: dict[str, Any] = {}
    ladder: list[Rung | profile.FewerLayers] = []
    for rung in rungs:
        if isinstance(rung, str):
            ladder.append(rung)
            continue
        changes = {
            key: value
            for key, value in rung.changes.items()
            if now.get(key, getattr(made, key)) != value and not (key == "context" and _larger(value, now.get(key, made.context)))
        }
        now |= changes
        if changes:
            ladder.append(Rung(MappingProxyType(changes), rung.line))
    return tuple(ladder)


def _larger(value: Value | Model, than: int) -> bool:
    assert isinstance(value, int)
    return value > than


def _way_faults(found: Profile, made: Preset) -> Iterator[Fault]:
    """What doesn't go together with one context and mode, also further down the ladder."""
    layers = (found.contexts.get(made.context_name, {}), found.modes.get(made.mode_name, {}), found.base)
    for conflict in made.conflicts():
        line = next((layer[conflict.key].line for layer in layers if conflict.key in layer), 1)
        yield Fault(line, conflict.message, conflict.hint)
        return
    for rung in made.fallback:
        if isinstance(rung, str):
            continue
        values: dict[str, Any] = dict(rung.changes)
        made = dataclasses.replace(made, **values)
        for conflict in made.conflicts():
            yield Fault(rung.line, f"with {rung} given up, {conflict.message}", conflict.hint)


def _idle_faults(found: Profile, ways: Sequence[Preset]) -> Iterator[Fault]:
    """What the file sets to other than its default, and counts in no context and mode in which it holds."""
    for layer in (found.base, *found.contexts.values(), *found.modes.values()):
        for key, each in layer.items():
            option = options().get(key)
            if option is None or each.value == option.default:
                continue
            held = [idle(option, made) for made in ways if getattr(made, key) == each.value]
            told = [conflict for conflict in held if conflict is not None]
            if told and len(told) == len(held):
                yield Fault(each.line, told[0].message, told[0].hint)


def _context(found: Profile, asked: str | None) -> tuple[str, int | None, str]:
    """The context overlay for ``--context NAME|N|Nk``, N, and for N a sentence on why this overlay.

    (1) not given: the default, (2) N: the smallest that holds N, else the largest, (3) a name.
    """
    if asked is None:  # (1)
        return found.default_context, None, ""
    if not asked[:1].isdigit() and not asked.startswith(("-", "+")):  # (3)
        return _overlay("context", asked, tuple(found.contexts), found), None, ""
    thousands = re.fullmatch(r"([0-9]{1,6})[kK]", asked)  # (2)
    try:
        tokens = options()["context"].kind.read(str(int(thousands[1]) * 1024) if thousands else asked)
    except ValueError as exc:
        named = f", or a name: {', '.join(found.contexts)}" if found.contexts else ""
        message = f"--context: context is {quoted(asked)}, but {exc}"
        raise Error(message, exit=Exit.CONFIG, hint=f"--context 16384, --context 64k{named}") from exc
    assert isinstance(tokens, int)
    sizes = sorted((layer["context"].value, name) for name, layer in found.contexts.items())
    if not sizes:
        return "", tokens, ""
    fitting = [name for size, name in sizes if size >= tokens]  # type: ignore[operator]
    name = (fitting or [sizes[-1][1]])[0]
    which = "the smallest that holds them" if fitting else "the largest, though it holds fewer"
    return name, tokens, f"{tokens:,} tokens: context {name} is {which}, so what else it sets counts"


def _overlay(what: str, asked: str, known: tuple[str, ...], found: Profile) -> str:
    if asked in known:
        return asked
    near = nearest(asked, known) or next(iter(known), "")
    hint = f"--{what} {near}" if near else "--context 16384" if what == "context" else f"llmctl show {found.name}"
    raise Error(f"{found.name} has no {what} {quoted(asked)}; it has: {', '.join(known) or 'none'}", exit=Exit.CONFIG, hint=hint)
