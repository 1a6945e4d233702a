"""The header of a GGUF file: what a model is made of, read from a few MB at the file's beginning, local or remote.

A header is a list of typed key-value pairs and a table of tensors (name, shape, type, offset); the weights follow. Version 2 and 3,
little-endian. One parser reads any :class:`~supervisor.cursor.Reader`; of the vocabulary, which is nearly all of a header's bytes, only
its length is kept. A split file (``-00001-of-00003.gguf``) is read through all of its parts.

Any file gives a header or an :class:`Error`, in bounded time and memory (see :mod:`supervisor.cursor`). The rules are the engine's
(``ggml/src/gguf.cpp:460``): what is read here loads there; where this is stricter, it is said.

A condensed header is the same without the vocabulary, as JSON of some KB: what ships with a preset so that it can be planned off-line. It
says where its shapes come from if that was not the very file.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from supervisor import ggml
from supervisor.cursor import LIMIT_BYTES, MAGIC, U32, U64, Cursor, Local, Reader, damaged, guess, not_gguf
from supervisor.errors import Error, Exit

Value: TypeAlias = "bool | int | float | str | tuple[bool, ...] | tuple[int, ...] | tuple[float, ...]"

VERSIONS: Final = (2, 3)
ALIGNMENT: Final = 32
"""Of tensor data where ``general.alignment`` says nothing (gguf.h:46)."""
ARRAY_KEPT: Final = 4096
"""The longest numeric array whose elements are kept; per-layer ones have some hundred at most."""

_PAIRS_MAX, _TENSORS_MAX, _PARTS_MAX = 1 << 16, 1 << 17, 1 << 10
_NAME_BYTES: Final = 63
"""Of a tensor (GGML_MAX_NAME, ggml.h:229, less its end)."""
_KEY_BYTES: Final = 65535
_DIMENSIONS: Final = 4

_FIXED = struct.Struct("<4sIQQ")
"""Magic, version, tensor count, key-value count: the fixed part of a header, little-endian since GGUF v2."""
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value types by number (gguf.h:53) as :mod:`struct` spells them."""
_STRING, _ARRAY = 8, 9
_PAIR_LEAST, _TENSOR_LEAST = 8 + 1 + 4 + 1, 8 + 4 + 4 + 8
"""Bytes of the shortest pair (length, a letter, type, a byte) and the shortest tensor entry (no name, no dimension)."""

_PART: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""A part's name (``llama_split_path``, src/llama.cpp)."""
_BLOCK: Final = re.compile(r"blk\.(?P<block>0|[1-9]\d*)\.(?P<rest>.+)")
_TOKENIZER_KEPT: Final = ("tokenizer.ggml.model", "tokenizer.ggml.pre")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of the tensor table."""

    name: str
    """``"blk.0.ffn_down.weight"``"""
    type: str
    """ggml's name of it: ``"f32"``, ``"q4_K"``, ``"iq4_xs"``; see :data:`supervisor.ggml.BY_NAME`."""
    shape: tuple[int, ...]
    """ggml's order, fastest dimension first: ``(in, out)`` of a weight; empty for a scalar."""
    bytes: int
    """Of its data, without padding."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a model file says of itself."""

    version: int
    entries: Mapping[str, Value]
    """The metadata. Numeric arrays of up to :data:`ARRAY_KEPT` elements are tuples; of others only the length is known."""
    lengths: Mapping[str, int]
    """The length of every array: ``lengths["tokenizer.ggml.tokens"]`` is the size of the vocabulary."""
    tensors: tuple[Tensor, ...]
    """In file order; those of a split file's parts one after the other."""
    data_offset: int
    """Where tensor data starts, in bytes; 0 in a condensed header."""
    assumed: bool = False
    """True for a shipped header that was not read from the very file."""
    file_bytes: int = 0
    """Of the file, all parts together; 0 where it isn't known."""

    @property
    def architecture(self) -> str:
        """The family, as llama.cpp names it: ``"qwen35"``. Raises :class:`Error` where the file names none."""
        name = self.entries.get("general.architecture")
        if not isinstance(name, str) or not name:
            raise _lacks("general.architecture")
        return name

    @property
    def has_mtp(self) -> bool:
        """Whether it has a multi-token prediction head, whose blocks ``block_count`` includes."""
        return self.integer("nextn_predict_layers", 0) > 0

    @property
    def tensor_bytes(self) -> int:
        """Of all tensors' data, without padding."""
        return sum(tensor.bytes for tensor in self.tensors)

    def get(self, key: str, default: Value | None = None) -> Value | None:
        """The value of a key of the architecture, without its prefix: ``get("attention.head_count_kv")``."""
        return self.entries.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        """The same for a whole number. Raises :class:`Error` where it is none, or is missing and has no default."""
        value = self.get(key, default)
        if value is None:
            raise _lacks(f"{self.architecture}.{key}")
        if not isinstance(value, int):
            found = f"{len(value)} values" if isinstance(value, tuple) else repr(value)
            raise Error(
                f"the model's {self.architecture}.{key} should be a whole number and is {found}",
                exit=Exit.MODEL,
                hint="another file of this model, or a newer llmctl",
            )
        return value


def read(source: Path | Reader) -> Header:
    """Read the header of a file; of a split file, give the first part.

    Raises :class:`Error` (exit code 6) when it is missing, unreadable, cut off, damaged or no GGUF of version 2 or 3.
    """
    if isinstance(source, Path):
        source = Local(source)
    first = _parse(source)
    parts = first.entries.get("split.count", 1)
    if not isinstance(parts, int) or not 1 <= parts <= _PARTS_MAX:
        raise damaged(source, f"it says that it has {parts} parts")
    if parts == 1:
        return first
    headers = [first, *_others(source, first, parts)]
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    stated = first.entries.get("split.tensors.count", len(tensors))
    if stated != len(tensors):
        raise damaged(source, f"its {parts} parts have {len(tensors)} tensors, it says {stated}")
    size = sum(header.file_bytes for header in headers)
    return Header(first.version, first.entries, first.lengths, tensors, first.data_offset, file_bytes=size)


def condense(header: Header, *, file: str = "", sha256: str = "", assumed: str = "") -> dict[str, object]:
    """The header without its vocabulary, ready for JSON; :func:`dump` writes it readably.

    Entries of the tokenizer are left out but for its model and pre-tokenizer; equally named tensors of all blocks share a row: name with
    a ``*``, shape, type or ``{type: blocks}``. ``assumed`` is a sentence that says where the shapes come from if not from the file.
    """
    kept = {key: value for key, value in header.entries.items() if not key.startswith("tokenizer.") or key in _TOKENIZER_KEPT}
    rows: dict[tuple[str, tuple[int, ...]], dict[str, list[int]]] = {}
    single: list[list[object]] = []
    for tensor in header.tensors:
        if match := _BLOCK.fullmatch(tensor.name):
            row = rows.setdefault((f"blk.*.{match['rest']}", tensor.shape), {})
            row.setdefault(tensor.type, []).append(int(match["block"]))
        else:
            single.append([tensor.name, list(tensor.shape), tensor.type])
    in_blocks = [[name, list(shape), {type_: _spans(row[type_]) for type_ in row}] for (name, shape), row in rows.items()]
    data: dict[str, object] = {"file": file, "bytes": header.file_bytes, "sha256": sha256}
    if assumed or header.assumed:
        data["assumed"] = assumed or True
    data["version"] = header.version
    data["entries"] = {key: list(value) if isinstance(value, tuple) else value for key, value in kept.items()}
    return data | {"lengths": dict(header.lengths), "tensors": single + in_blocks}


def expand(data: Mapping[str, Any]) -> Header:
    """The header that :func:`condense` condensed; its tensors come block by block. Raises :class:`Error` where the form is another."""
    try:
        tensors = []
        in_blocks: list[tuple[int, Tensor]] = []
        for name, shape, types in data["tensors"]:
            if isinstance(types, str):
                tensors.append(_sized(name, ggml.BY_NAME[types], tuple(shape)))
                continue
            for type_, spans in types.items():
                for block in _blocks(spans):
                    in_blocks.append((block, _sized(name.replace("*", str(block), 1), ggml.BY_NAME[type_], tuple(shape))))
        in_blocks.sort(key=lambda pair: pair[0])
        return Header(
            version=int(data["version"]),
            entries={key: tuple(value) if isinstance(value, list) else value for key, value in data["entries"].items()},
            lengths=dict(data["lengths"]),
            tensors=(*tensors, *(tensor for _, tensor in in_blocks)),
            data_offset=0,
            assumed=bool(data.get("assumed", False)),
            file_bytes=int(data["bytes"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        what = f"a condensed header can't be read: {type(exc).__name__} {exc}"
        raise Error(what, exit=Exit.MODEL, hint="make it anew from the model's file") from exc


def dump(data: Mapping[str, object]) -> str:
    """A condensed header as JSON, one entry or tensor row a line."""
    lines = []
    for key, value in data.items():
        if isinstance(value, dict) and value:
            inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in value.items())
            lines.append(f"{json.dumps(key)}: {{\n{inner}\n }}")
        elif isinstance(value, list) and value:
            inner = ",\n".join(f"  {json.dumps(each)}" for each in value)
            lines.append(f"{json.dumps(key)}: [\n{inner}\n ]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def faults(header: Header) -> tuple[str, ...]:
    """What is known to keep llama-server from loading this file as a chat model, each in a sentence without its full stop."""
    kind = header.entries.get("general.type")
    if isinstance(kind, str) and kind in _NO_MODEL:
        return (f"it is {_NO_MODEL[kind]}, not a language model",)
    architecture = header.architecture
    found = []
    if architecture == "clip":
        found.append(f"it is {_NO_MODEL['mmproj']}, not a language model")
    elif not any(tensor.name == "token_embd.weight" for tensor in header.tensors):
        found.append("it holds a vocabulary and no weights" if not header.tensors else "it has no token_embd.weight")
    sections = header.get("rope.dimension_sections")
    if architecture in _FOUR_SECTIONS and isinstance(sections, tuple) and len(sections) != _DIMENSIONS:
        key = f"{architecture}.rope.dimension_sections"
        found.append(f"{key} has {len(sections)} entries where llama.cpp wants {_DIMENSIONS} (an old Ollama file)")
    if header.has_mtp and not any(".nextn." in tensor.name for tensor in header.tensors):
        found.append("it says that it has an MTP head, but the head's tensors are missing")
    return tuple(found)


def require(header: Header, name: str) -> None:
    """Raise :class:`Error` for a file, called ``name``, that is known to keep llama-server from loading it."""
    if found := faults(header):
        raise Error(f"{name} can't be loaded: {found[0]}", exit=Exit.MODEL, hint="another file of the model")


_NO_MODEL: Final = {
    "adapter": "a LoRA adapter",
    "imatrix": "an importance matrix",
    "mmproj": "the image part of a model",
}
"""By ``general.type`` (GGUFType, gguf-py/gguf/constants.py)."""
_FOUR_SECTIONS: Final = frozenset(["qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"])
"""Where the key must have four entries: src/models/qwen35.cpp:6 and its like."""


def _parse(source: Reader) -> Header:
    """One file."""
    cursor = Cursor(source)
    version, tensor_count, pair_count = _fixed(cursor)
    entries: dict[str, Value] = {}
    lengths: dict[str, int] = {}
    for number in range(cursor.left(pair_count, _PAIR_LEAST, "key-value pairs")):
        key = cursor.text(f"key {number}", _KEY_BYTES)
        if not key or key in entries or key in lengths:
            raise damaged(source, f"the key {key!r} is there twice" if key else f"key {number} is empty")
        _value(cursor, key, entries, lengths)
    alignment = entries.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > LIMIT_BYTES:
        raise damaged(source, f"general.alignment should be a power of 2 and is {alignment!r}")
    tensors: dict[str, Tensor] = {}
    data_bytes = end_bytes = 0
    for number in range(cursor.left(tensor_count, _TENSOR_LEAST, "tensors")):
        tensor, offset = _tensor(cursor, number)
        if tensor.name in tensors:
            raise damaged(source, f"the tensor {tensor.name!r} is there twice")
        if offset != data_bytes:  # llama.cpp wants them packed (gguf.cpp:768)
            raise damaged(source, f"the data of {tensor.name} begins at {offset}, {data_bytes} was expected")
        tensors[tensor.name] = tensor
        end_bytes = data_bytes + tensor.bytes
        data_bytes = end_bytes + -end_bytes % alignment
    data_offset = cursor.place + (-cursor.place % alignment if tensors else 0)
    if data_offset + end_bytes > source.size:
        raise damaged(source, f"it has {source.size} bytes, its tensors end at {data_offset + end_bytes}")
    return Header(version, entries, lengths, tuple(tensors.values()), data_offset, file_bytes=source.size)


def _sized(name: str, type_: ggml.Type, shape: tuple[int, ...]) -> Tensor:
    """A tensor and the bytes of its data: rows of whole blocks (``ggml_nbytes``, ggml.c:1298)."""
    return Tensor(name, type_.name, shape, type_.row_bytes(shape[0] if shape else 1) * math.prod(shape[1:]))


def _spans(blocks: Iterable[int]) -> str:
    """``0,1,2,3,6`` → ``"0-3,6"``."""
    spans: list[list[int]] = []
    for block in sorted(blocks):
        if spans and spans[-1][-1] == block - 1:
            spans[-1][1:] = [block]
        else:
            spans.append([block])
    return ",".join("-".join(map(str, span)) for span in spans)


def _blocks(spans: str) -> Iterator[int]:
    """``"0-3,6"`` → ``0,1,2,3,6``."""
    for span in spans.split(","):
        first, _, last = span.partition("-")
        if not 0 <= int(first) <= int(last or first) < _PAIRS_MAX:
            raise ValueError(f"{span!r} is no span of blocks")
        yield from range(int(first), int(last or first) + 1)


def _fixed(cursor: Cursor) -> tuple[int, int, int]:
    """Version, number of tensors, number of pairs; or what the file is instead."""
    source = cursor.source
    start = source.read_at(0, _FIXED.size)
    if start[:4] != MAGIC:
        raise not_gguf(source, guess(start))
    if len(start) < _FIXED.size:
        raise not_gguf(source, f"cut off after {len(start)} bytes")
    _, version, tensors, pairs = cursor.unpack(_FIXED, "its beginning")
    if version not in VERSIONS:
        swapped = int.from_bytes(start[4:8], "big")
        what = "big-endian" if swapped in VERSIONS else f"GGUF version {version}"
        raise not_gguf(source, f"{what}; llama.cpp reads little-endian versions {VERSIONS[0]} and {VERSIONS[1]}")
    for count, most, what in ((pairs, _PAIRS_MAX, "key-value pairs"), (tensors, _TENSORS_MAX, "tensors")):
        if count > most:
            raise damaged(source, f"it says that it has {count} {what}, {most} are allowed")
    return version, tensors, pairs


def _value(cursor: Cursor, key: str, entries: dict[str, Value], lengths: dict[str, int]) -> None:
    """Read one value into ``entries``, or only its length into ``lengths``."""
    kind = cursor.number(U32, key)
    if kind == _STRING:
        entries[key] = cursor.text(key)
    elif kind in _SCALARS:
        entries[key] = cursor.unpack(struct.Struct("<" + _SCALARS[kind]), key)[0]
    elif kind == _ARRAY:
        kind, count = cursor.number(U32, key), cursor.number(U64, key)
        lengths[key] = count
        if kind == _STRING:
            cursor.skip_strings(count, key)
        elif kind not in _SCALARS:  # arrays of arrays neither: gguf.cpp:606
            raise damaged(cursor.source, f"{key} is an array of values of type {kind}, which llama.cpp doesn't read")
        elif count <= ARRAY_KEPT:
            form = struct.Struct(f"<{count}{_SCALARS[kind]}")
            entries[key] = form.unpack(cursor.take(form.size, key))
        else:
            cursor.skip(count * struct.calcsize("<" + _SCALARS[kind]), key)
    else:
        raise damaged(cursor.source, f"{key} has a value of type {kind}, which llama.cpp doesn't read")


def _tensor(cursor: Cursor, number: int) -> tuple[Tensor, int]:
    """One entry of the tensor table, and the offset of its data."""
    source = cursor.source
    name = cursor.text(f"the name of tensor {number}", _NAME_BYTES)
    dimensions = cursor.number(U32, name)
    if dimensions > _DIMENSIONS:
        raise damaged(source, f"the tensor {name} has {dimensions} dimensions, {_DIMENSIONS} are allowed")
    shape = tuple(cursor.number(U64, name) for _ in range(dimensions))
    kind, offset = cursor.number(U32, name), cursor.number(U64, name)
    type_ = ggml.BY_NUMBER.get(kind)
    if type_ is None:
        raise damaged(source, f"the tensor {name} is of type {kind}, which llama.cpp doesn't read")
    # Stricter than the engine: a tensor without elements is of no use to a model.
    if 0 in shape or math.prod(shape) >= 1 << 63:
        raise damaged(source, f"the tensor {name} has the shape {list(shape)}")
    row = shape[0] if shape else 1
    if row % type_.block:
        raise damaged(source, f"the rows of {name} have {row} elements, no multiple of the {type_.block} of a {type_.name} block")
    return _sized(name, type_, shape), offset


def _others(source: Reader, first: Header, parts: int) -> Iterator[Header]:
    """The headers of a split file's other parts."""
    folder, slash, name = source.name.rpartition("/")
    match = _PART.fullmatch(name)
    if not match or int(match["count"]) != parts:
        raise damaged(source, f"it is one of {parts} parts, but isn't named like ...-00001-of-{parts:05}.gguf")
    if int(match["number"]) != 1 or first.entries.get("split.no", 0) != 0:
        wanted = f"{match['stem']}-00001-of-{parts:05}.gguf"
        raise Error(f"{source.name} is not the first part of its model", exit=Exit.MODEL, hint=f"give {folder}{slash}{wanted}")
    for number in range(2, parts + 1):
        part = f"{match['stem']}-{number:05}-of-{parts:05}.gguf"
        try:
            header = _parse(source.sibling(part))
        except Error as exc:
            what = f"part {number} of {parts} of {source.name} is not usable: {exc.message}"
            raise Error(what, exit=Exit.MODEL, hint=f"have all {parts} parts in one folder") from exc
        if header.entries.get("split.no") != number - 1 or header.entries.get("split.count") != parts:
            raise damaged(source.sibling(part), f"it isn't part {number} of {parts}, though named so")
        yield header


def _lacks(key: str) -> Error:
    return Error(
        f"the model's header has no {key}",
        exit=Exit.MODEL,
        hint="give a language model's file, not a vocabulary, projector or adapter",
    )
