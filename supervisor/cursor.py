"""A place in a file that may be anybody's, and what is read there: the lower half of :mod:`supervisor.gguf`.

The file is a :class:`Reader`, here or on the hub, and is read in blocks that grow. Before a count or a length is followed, it is compared
with what the file has left; nothing is read past ``LIMIT_BYTES``, and of what is read at most ``_KEPT_BYTES`` are handed out to be kept. So
whatever the file says, time and memory are bounded.
"""

from __future__ import annotations

import os
import stat
import struct
from operator import length_hint
from pathlib import Path
from typing import Any, Final, Protocol

from supervisor.errors import Error, Exit
from supervisor.units import KIB, MIB

MAGIC: Final = b"GGUF"
LIMIT_BYTES: Final = 64 * MIB
"""The longest header. Gemma 4's has 16 MB, with 262,144 tokens and their merges, so a vocabulary of a million fits."""
_KEPT_BYTES: Final = 8 * MIB
"""Of keys, strings, arrays and tensor names together; chat templates are the largest, some 10 KB."""
_FIRST_BYTES, _BLOCK_BYTES = 64 * KIB, 4 * MIB
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
_LOOKS_LIKE: Final = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file it stands for"),
    (b"<!doctype", "a web page"),
    (b"<html", "a web page"),
    (b"PK\x03\x04", "a zip archive"),
    (b"GGML", "a GGML file, the format before GGUF"),
)


class Reader(Protocol):
    """Where a header's bytes come from."""

    @property
    def name(self) -> str:
        """What messages call it; ends with the file's name."""

    @property
    def size(self) -> int:
        """Of the file, in bytes."""

    def read_at(self, offset: int, count: int) -> bytes:
        """``count`` bytes from ``offset``, fewer only where the file ends; raises :class:`Error`."""

    def sibling(self, name: str) -> Reader:
        """The file of this name beside it, which need not exist yet."""


class Local:
    """A local file as a :class:`Reader`. It holds nothing open: a header takes a handful of reads."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise OSError("Is a directory" if stat.S_ISDIR(status.st_mode) else "it is no regular file")
        except OSError as exc:
            raise self._unreadable(exc) from exc
        self.size = status.st_size

    def read_at(self, offset: int, count: int) -> bytes:
        """See :class:`Reader`."""
        try:
            with self._path.open("rb", buffering=0) as file:
                return os.pread(file.fileno(), count, offset)
        except OSError as exc:
            raise self._unreadable(exc) from exc

    def sibling(self, name: str) -> Local:
        """See :class:`Reader`."""
        return Local(self._path.with_name(name))

    def _unreadable(self, exc: OSError) -> Error:
        return Error(
            f"the model file {self.name} can't be read: {exc.strerror or exc}",
            exit=Exit.MODEL,
            hint="check the path and its permissions",
        )


class Cursor:
    """A place in a file and a window on what follows it, filled in growing blocks."""

    def __init__(self, source: Reader) -> None:
        self.source = source
        self.end = min(source.size, LIMIT_BYTES)
        self._window = b""
        self._base = 0  # of the window, in the file
        self._at = 0  # in the window
        self._block = _FIRST_BYTES
        self._kept = 0

    @property
    def place(self) -> int:
        """Where it stands in the file."""
        return self._base + self._at

    def left(self, count: int, least: int, what: str) -> int:
        """``count`` if so many things of at least ``least`` bytes may follow, else an Error."""
        if count * least > self.end - self.place:
            raise self.short(f"{count} {what} at byte {self.place}")
        return count

    def short(self, what: str) -> Error:
        """What follows would not end within the file."""
        if self.source.size <= LIMIT_BYTES:
            return damaged(self.source, f"it ends after {self.source.size} bytes, before its header does ({what})")
        return damaged(self.source, f"its header goes on after {LIMIT_BYTES // MIB} MiB ({what})")

    def unpack(self, form: struct.Struct, what: str) -> tuple[Any, ...]:
        """Fixed-size values, little-endian."""
        self._need(form.size, what)
        values = form.unpack_from(self._window, self._at)
        self._at += form.size
        return values

    def number(self, form: struct.Struct, what: str) -> int:
        """One whole number."""
        value: int = self.unpack(form, what)[0]
        return value

    def text(self, what: str, most: int = LIMIT_BYTES) -> str:
        """A string: a 64-bit length and so many bytes, of which not all need be UTF-8."""
        length = self.number(U64, what)
        if length > most:
            raise damaged(self.source, f"{what} is {length} bytes long, {most} are allowed")
        return self.take(length, what).decode(errors="replace")

    def take(self, count: int, what: str) -> bytes:
        """``count`` bytes that are to be kept."""
        self._kept += count
        if self._kept > _KEPT_BYTES:
            raise damaged(self.source, f"its header holds more than {_KEPT_BYTES // MIB} MiB besides the vocabulary ({what})")
        self._need(count, what)
        self._at += count
        return self._window[self._at - count : self._at]

    def skip(self, count: int, what: str) -> None:
        """Go over ``count`` bytes, unread where possible."""
        self.left(count, 1, f"bytes of {what}")
        self._at += count

    def skip_strings(self, count: int, what: str) -> None:
        """Go over ``count`` strings. The loop of this module: a vocabulary has a quarter of a million."""
        self.left(count, 8, f"strings of {what}")
        unpack = U64.unpack_from
        while count:
            self._need(8, what)
            window, at, steps = self._window, self._at, iter(range(count))
            try:
                for _ in steps:
                    at += 8 + unpack(window, at)[0]
                count = 0
            except (struct.error, OverflowError):  # the window's end, or a length that points far beyond it
                count = length_hint(steps) + 1
            self._at = at
            if self.place > self.end:
                raise self.short(what)

    def _need(self, count: int, what: str) -> None:
        """Have ``count`` bytes in the window."""
        if self._at + count <= len(self._window):
            return
        if self.place + count > self.end:
            raise self.short(what)
        rest = self._window[self._at :]
        start = self.place + len(rest)
        block = min(max(count - len(rest), self._block), self.end - start)
        self._block = min(self._block * 4, _BLOCK_BYTES)
        self._base, self._at = self.place, 0
        self._window = rest + self.source.read_at(start, block)
        if len(self._window) < count:
            raise self.short(what)


def damaged(source: Reader, why: str) -> Error:
    """What is wrong with a file that began like a GGUF."""
    return Error(f"the GGUF file {source.name} is damaged: {why}", exit=Exit.MODEL, hint="fetch it again")


def guess(start: bytes) -> str:
    """What a file is that doesn't begin like a GGUF."""
    for prefix, what in _LOOKS_LIKE:
        if start.lower().startswith(prefix.lower()):
            return what
    return f"it begins with {start[:4]!r} where {MAGIC!r} should stand" if start else "it is empty"


def not_gguf(source: Reader, why: str) -> Error:
    """It is something else."""
    return Error(
        f"{source.name} is not a GGUF model: {why}",
        exit=Exit.MODEL,
        hint="give a .gguf file, or leave out --model to use the preset's own",
    )
