"""The beginning of a GGUF file: enough to tell a model from a web page before a process is started on it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.errors import Error, Exit

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
_FIXED = struct.Struct("<4sIQQ")
"""Magic, version, tensor count, key-value count: the fixed part of a header, little-endian since GGUF v2."""

_LOOKS_LIKE: Final = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file it stands for"),
    (b"<!doctype", "a web page"),
    (b"<html", "a web page"),
    (b"PK\x03\x04", "a zip archive"),
    (b"GGML", "a GGML file, the format before GGUF"),
)


@dataclass(frozen=True, slots=True)
class Header:
    """What the fixed part of the header says."""

    version: int
    tensors: int
    entries: int


def read(path: Path) -> Header:
    """Read the fixed part of the header of the local file ``path``.

    Raises :class:`Error` (exit code 6) when the file is missing, unreadable or no GGUF of version 2 or 3.
    """
    try:
        with path.open("rb") as file:
            start = file.read(_FIXED.size)
    except OSError as exc:
        raise Error(
            f"the model file {path} can't be read: {exc.strerror or exc}",
            exit=Exit.MODEL,
            hint="check the path and its permissions",
        ) from exc
    if start[:4] != MAGIC:
        raise _not_gguf(path, _guess(start))
    if len(start) < _FIXED.size:
        raise _not_gguf(path, f"cut off after {len(start)} bytes")
    _, version, tensors, entries = _FIXED.unpack(start)
    if version not in VERSIONS:
        swapped = int.from_bytes(start[4:8], "big")
        what = "big-endian" if swapped in VERSIONS else f"GGUF version {version}"
        raise _not_gguf(path, f"{what}; llama.cpp reads little-endian versions {VERSIONS[0]} and {VERSIONS[1]}")
    return Header(version, tensors, entries)


def _guess(start: bytes) -> str:
    for prefix, what in _LOOKS_LIKE:
        if start.lower().startswith(prefix.lower()):
            return what
    return f"it begins with {start[:4]!r} where {MAGIC!r} should stand" if start else "it is empty"


def _not_gguf(path: Path, why: str) -> Error:
    return Error(
        f"{path} is not a GGUF model: {why}",
        exit=Exit.MODEL,
        hint="give a .gguf file, or leave out --model to use the preset's own",
    )
