"""A preset's file: what it sets at its base, in its contexts and modes, and what it allows to give up; read, not yet put together.

Everything in the file is read and checked, also the overlays and rungs that nobody chose this time, and each setting keeps its line. What
is wrong is collected as :class:`~supervisor.words.Fault`, so that ``llmctl check`` can say all of it at once.

An overlay (an entry of ``contexts`` or ``modes``) and a rung (an entry of ``fallback``) are blocks of the same settings as the file's own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from supervisor import model as models
from supervisor import passthrough, words
from supervisor.errors import Error, Exit
from supervisor.model import Model
from supervisor.option import Option, options
from supervisor.value import Value, nearest, take, unknown
from supervisor.words import Block, Fault, Node, Series, Word, quoted, shown

MODELS: Final = {
    "model": "the model file (hub, wheel or path)",
    "draft_model": "a small model that guesses for the large one, with speculative: draft",
}
"""Keys whose value is a model block, beside the options."""
BLOCKS: Final = {
    "fallback": "what may be given up, in order, when memory is short: changes, or the word fewer_layers",
    "contexts": "overlays by name for --context; each sets context, and what goes with it",
    "modes": "overlays by name for --mode",
    "default_context": "the overlay of contexts that holds where --context isn't given",
    "default_mode": "the overlay of modes that holds where --mode isn't given",
}
"""The other keys of a file that are no options."""
NAME: Final = "[A-Za-z][A-Za-z0-9_-]{0,31}"
"""Shape of an overlay's name: ``--context`` takes a number, too."""
# What the front door does with requests: nothing of it is memory.
_TRAFFIC: Final = ("aliases", "default", "ttl", "pin", "hold", "queue", "max_wait", "wait_comments", "truncate")
RUNG_FIXED: Final = (
    "about",
    "machine",
    "kind",
    "device",
    "warm_prompt",
    *_TRAFFIC,
    "extra_args",
    "draft_model",
    "speculative_next",
)
"""What a rung can't give up: it would be another preset, or take as much memory."""


@dataclass(frozen=True, slots=True)
class Rung:
    """Changes that may be given up to."""

    changes: Mapping[str, Value | Model] = field(hash=False)
    line: int = field(default=0, compare=False)

    def words(self, before: object) -> str:
        """What it changes of a preset: ``cache_type_k f16 → q8_0, context 65536 → 32768``."""
        pairs = ((key, worded(key, getattr(before, key)), worded(key, value)) for key, value in self.changes.items())
        return ", ".join(f"{key} {old} → {new}" for key, old, new in pairs if old != new)

    def __str__(self) -> str:
        """``cache_type_k q8_0, speculative off``."""
        return ", ".join(f"{key} {worded(key, value)}" for key, value in self.changes.items())


RESERVED: Final = ("llmctl", "instance.json", "instance.json.part", "lock")
"""Names that a preset may not have: its log would be llmctl's own, or its run folder one of the files beside it (``rundir``)."""
NAMED: Final = "a name of at most 64 letters, digits, '_', '-' and '.' that begins with a letter or digit, and then .yaml"
"""What a preset's file is called."""
MOST_PAIRS: Final = 64
"""Of a context and a mode. Each is put together and planned by ``llmctl check``."""
MOST_RUNGS: Final = 32
FewerLayers = Literal["fewer_layers"]
FEWER_LAYERS: Final[FewerLayers] = "fewer_layers"
"""The last rung: layers move to the CPU, as many as needed."""
Ladder = tuple[Rung | FewerLayers, ...]
Setting = Value | Model | Ladder


@dataclass(frozen=True, slots=True)
class Set:
    """One key's value, and its line in the file."""

    value: Setting
    line: int


Layer = Mapping[str, Set]


@dataclass(frozen=True, slots=True)
class Profile:
    """A file, read."""

    path: Path
    base: Layer
    contexts: Mapping[str, Layer]
    modes: Mapping[str, Layer]
    default_context: str = ""
    default_mode: str = ""

    @property
    def name(self) -> str:
        """The preset's name is its file's."""
        return self.path.stem


def worded(name: str, value: object) -> str:
    """A setting as a person writes it: ``on``, ``q8_0``, a model's file name."""
    if isinstance(value, Model):
        return value.file
    if name not in options():
        return "" if value is None else str(value)
    assert isinstance(value, Value)
    return options()[name].kind.write(value)


def settable(also: Iterable[str] = ()) -> tuple[str, ...]:
    """The keys of a block of settings, ``about`` first as people write them."""
    about, *rest = options()
    return (about, *MODELS, *rest, *also)


def nameable(name: str) -> bool:
    """Whether a preset can have the name: it is a folder's below the run folder, a log's, an argument, and what clients send."""
    shape = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name)
    return shape is not None and ".." not in name and not name.endswith(".") and name not in RESERVED


def read(path: Path) -> tuple[Profile | None, tuple[Fault, ...]]:
    """The file, and all that is wrong with it; no profile where there is nothing to look at further."""
    try:
        root, noted = words.read(path)
    except words.Unreadable as exc:
        return None, (exc.fault,)
    reader = _Reader(path.absolute().parent, list(noted))
    if path.suffix != ".yaml" or not nameable(path.stem):
        reader.faults.append(Fault(1, f"a preset's file can't be called {quoted(path.name)}", NAMED, rank=0))
    lacking = () if "model" in root.entries else ("model",)
    base = reader.layer(root, "", settable(BLOCKS), lacking)
    reader.faults += [models.missing(key, 1) for key in lacking]
    contexts, modes = (reader.overlays(root, key) for key in ("contexts", "modes"))
    ways = (len(contexts) + ("default_context" not in root.entries)) * (len(modes) + ("default_mode" not in root.entries))
    if ways > MOST_PAIRS:
        told = f"contexts has {len(contexts)} names and modes {len(modes)}, {ways} ways to run it, but at most {MOST_PAIRS} are taken"
        line = max(root.lines[key] for key in ("contexts", "modes") if key in root.lines)
        reader.faults.append(Fault(line, told, "another preset for some of them"))
    profile = Profile(path, base, contexts, modes)
    profile = dataclasses.replace(
        profile,
        default_context=reader.default(root, "default_context", contexts),
        default_mode=reader.default(root, "default_mode", modes),
    )
    return profile, tuple(reader.faults)


def located(option: Option, value: Value, folder: Path) -> Value:
    """A path among the options made absolute: the engine runs in a folder of its own. ``ValueError`` if no such file is there."""
    if not option.file or not value:
        return value
    path = models.resolved(str(value), folder)
    try:
        there = path.is_file()
    except OSError:  # in a folder that isn't ours to look into
        there = False
    if not there:
        raise ValueError(f"there is no file {quoted(str(path))}")
    return str(path)


def assigned(text: str) -> tuple[str, Value]:
    """The option and value of one ``--set KEY=VALUE``. Raises :class:`Error` (exit code 3, or 2 where it isn't of that form)."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise Error(f"--set takes KEY=VALUE, not {quoted(text)}", exit=Exit.USAGE, hint="--set slots=2")
    return key.strip(), _assigned(key.strip(), value.strip())


def _assigned(key: str, word: str) -> Value:
    if key not in options():
        if key in (*MODELS, *BLOCKS):
            hint = "--model FILE" if key == "model" else "a preset of your own"
            raise Error(f"--set {key}: that is a block of the file, not an option", exit=Exit.CONFIG, hint=hint)
        near = nearest(key, options())
        hint = f"--set {near}=…" if near else f"one of: {', '.join(options())}"
        raise Error(f"--set {quoted(key)[1:-1]}: there is no such option", exit=Exit.CONFIG, hint=hint)
    option = options()[key]
    try:
        value = located(option, option.kind.read(word), Path.cwd())
    except ValueError as exc:
        message = f"--set {key}: {key} is {quoted(word)}, but {exc}"
        example = option.kind.example.strip("[]")  # of a list, whose words stand without brackets here
        raise Error(message, exit=Exit.CONFIG, hint=f"--set {key}={example}") from exc
    for sentence, hint in passthrough.faults(value) if option.verbatim and isinstance(value, tuple) else ():
        raise Error(f"--set {key}: {sentence}", exit=Exit.CONFIG, hint=hint)
    return value


@dataclass(slots=True)
class _Reader:
    """Reads blocks of settings and collects faults."""

    folder: Path
    faults: list[Fault]

    def layer(self, block: Block, at: str, keys: tuple[str, ...], lacking: tuple[str, ...] = ()) -> dict[str, Set]:
        """The settings of one block. ``at`` is its key with a dot, or nothing; ``keys`` are those it may have, ``lacking`` must have."""
        found: dict[str, Set] = {}
        for key, node in block.entries.items():
            line = block.lines[key]
            if key == "name":
                self.faults.append(Fault(line, "a preset's name is its file's, not a key", "rename the file", rank=0))
            elif key not in keys:
                unknown(f"{at}{key}", line, keys, self.faults, lacking=lacking)
            elif key in MODELS:
                model = models.read(node, f"{at}{key}", line, self.folder, self.faults)
                if model is not None:
                    found[key] = Set(model, line)
            elif key == "fallback":
                found[key] = Set(self.rungs(node, f"{at}{key}"), line)
            elif key in options():
                value = self.option(options()[key], node, f"{at}{key}")
                if value is not None:
                    found[key] = Set(value, line)
        return found

    def option(self, option: Option, node: Node, at: str) -> Value | None:
        """One option's value; None if there was a fault."""
        value = take(option.kind, node, at, self.faults)
        if value is None:
            return None
        if option.verbatim and isinstance(value, tuple):
            self.faults += [Fault(node.line, sentence, hint) for sentence, hint in passthrough.faults(value)]
        try:
            return located(option, value, self.folder)
        except ValueError as exc:
            self.faults.append(Fault(node.line, f"{at} is {shown(node)}, but {exc}", f"{option.name}: {option.kind.example}"))
            return None

    def overlays(self, root: Block, key: str) -> dict[str, Layer]:
        """The overlays under ``contexts`` or ``modes``."""
        node = root.entries.get(key)
        if node is None:
            return {}
        example = "{short: {context: 4096}}" if key == "contexts" else "{latency: {slots: 1}}"
        if not isinstance(node, Block):
            self.faults.append(Fault(node.line, f"{key} is {shown(node)}, but should be a block of names", f"{key}: {example}"))
            return {}
        found: dict[str, Layer] = {}
        for name, child in node.entries.items():
            at = f"{key}.{name}"
            if not re.fullmatch(NAME, name):
                self.faults.append(
                    Fault(
                        node.lines[name],
                        f"{quoted(at)} should be a name of at most 32 letters, digits, '_' and '-' that begins with a letter",
                        f"{key}: {example}",
                    )
                )
            elif not isinstance(child, Block):
                self.faults.append(
                    Fault(child.line, f"{at} is {shown(child)}, but should be a block of options", f"{key}: {example}")
                )
            else:
                found[name] = self.layer(child, f"{at}.", settable(["fallback"]))
                if key == "contexts" and "context" not in child.entries:
                    self.faults.append(Fault(node.lines[name], f"{at} sets no context", "add context: …", rank=2))
        return found

    def rungs(self, node: Node, at: str) -> Ladder:
        """The list of what may be given up."""
        example = "fallback: [{context: 4096}, fewer_layers]"
        if not isinstance(node, Series):
            self.faults.append(Fault(node.line, f"{at} is {shown(node)}, but should be a list", example))
            return ()
        if len(node.items) > MOST_RUNGS:
            self.faults.append(Fault(node.line, f"{at} has {len(node.items)} steps, but at most {MOST_RUNGS} are taken", example))
            return ()
        found: list[Rung | FewerLayers] = []
        for number, item in enumerate(node.items, 1):
            if isinstance(item, Block) and item.entries:
                keys = tuple(key for key in settable() if key not in RUNG_FIXED)
                layer = self.layer(item, f"{at}.{number}.", keys)
                changes = {key: each.value for key, each in layer.items() if not isinstance(each.value, tuple)}
                found.append(Rung(MappingProxyType(changes), item.line))
            elif isinstance(item, Word) and item.text == FEWER_LAYERS:
                found.append(FEWER_LAYERS)
                if number < len(node.items):
                    self.faults.append(
                        Fault(item.line, f"{at}.{number} is {FEWER_LAYERS}, but that comes last", "move it to the end")
                    )
            else:
                what = "is an empty block" if isinstance(item, Block) else f"is {shown(item)}"
                self.faults.append(Fault(item.line, f"{at}.{number} {what}, but should be changes or {FEWER_LAYERS!r}", example))
        return tuple(found)

    def default(self, root: Block, key: str, overlays: Mapping[str, Layer]) -> str:
        """The name under ``default_context`` or ``default_mode``."""
        node = root.entries.get(key)
        if node is None:
            return ""
        group = key.removeprefix("default_") + "s"
        if not isinstance(node, Word) or node.text not in overlays:
            known = ", ".join(overlays) or "nothing"
            hint = f"{key}: {next(iter(overlays))}" if overlays else "leave it out"
            self.faults.append(Fault(node.line, f"{key} is {shown(node)}, but {group} has {known}", hint))
            return ""
        return node.text
