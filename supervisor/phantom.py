"""A phantom: a model file with a true header and no weights. llama-server loads, plans and serves it like the real one, and answers noise.

So what the engine allocates for a model of gigabytes can be seen before a byte of it is downloaded. The file is sparse: shapes and types
are those of the given header, tensor data is a hole, and only a vocabulary of the right length takes room (5 MB for a quarter of a
million tokens).

The vocabulary is made up, whatever the model's own was: byte tokens, fillers and the control tokens of ChatML, as byte-pair encoding
with one merge, so that any text can be tokenized. The chat template is ChatML's shortest. Rotary frequency factors, by which the engine
divides, are ones; every other weight is zero.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Final

from supervisor import ggml, gguf
from supervisor.cursor import MAGIC
from supervisor.errors import Error, Exit
from supervisor.gguf import Header, Value
from supervisor.units import size

_SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Of ChatML; llama.cpp knows them by name as ends of a turn (src/llama-vocab.cpp)."""
_BYTES: Final = 256
_PRE: Final = {"qwen35": "qwen35", "qwen35moe": "qwen35", "qwen2": "qwen2", "qwen3": "qwen2", "llama": "llama-bpe"}
"""Pre-tokenizer by architecture; ``default`` for others. It splits text and costs no memory."""
_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
"""Token types (llama_token_type, include/llama.h)."""
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64, _INT64 = 4, 5, 6, 7, 8, 9, 10, 11
_FACTORS: Final = ("rope_freqs.", "rope_factors_")


def write(header: Header, path: Path) -> None:
    """Write the phantom of ``header`` to ``path``. It takes some MB of disk and has the size of the model.

    Raises :class:`Error` (exit code 6) where the vocabulary is too small for byte tokens, or the file can't be written.
    """
    words = vocabulary_size(header)
    if words < _BYTES + len(_SPECIAL):
        what = f"a phantom needs a vocabulary of {_BYTES + len(_SPECIAL)} tokens or more, this header has {words}"
        raise Error(what, exit=Exit.MODEL, hint="give a language model's header")
    pairs = [_string(key) + value for key, value in _pairs(header, words)]
    table, offsets, data_bytes = _table(header)
    start = MAGIC + struct.pack("<IQQ", gguf.VERSIONS[-1], len(header.tensors), len(pairs)) + b"".join(pairs) + table
    data_offset = len(start) + -len(start) % gguf.ALIGNMENT
    try:
        with path.open("wb") as file:
            file.write(start)
            file.truncate(data_offset + data_bytes)
            _fill_factors(file, header, data_offset, offsets)
    except OSError as exc:
        why = f"the disk is full, it needs {size(len(start))}" if exc.errno == errno.ENOSPC else exc.strerror or str(exc)
        raise Error(f"the phantom {path} can't be written: {why}", exit=Exit.MODEL, hint="give another folder") from exc


def vocabulary_size(header: Header) -> int:
    """Tokens of the model: the length of its list, or the width of its embedding."""
    rows = next((tensor.shape[-1] for tensor in header.tensors if tensor.name == "token_embd.weight" and tensor.shape), 0)
    return rows or header.lengths.get("tokenizer.ggml.tokens", 0)


def _pairs(header: Header, words: int) -> Iterator[tuple[str, bytes]]:
    """The metadata: the model's own, but for its tokenizer, parts and alignment."""
    for key, value in header.entries.items():
        if not key.startswith(("tokenizer.", "split.")) and key != "general.alignment":
            yield key, _value(value)
    first = words - len(_SPECIAL)
    texts = [*_byte_tokens(), *(f"<f{number}>" for number in range(_BYTES, first)), *_SPECIAL]
    types = [_NORMAL] * _BYTES + [_UNUSED] * (first - _BYTES) + [_CONTROL] * len(_SPECIAL)
    made_up: Mapping[str, bytes] = {
        "model": _value("gpt2"),
        "pre": _value(_PRE.get(header.architecture, "default")),
        "tokens": _array(_STRING, len(texts), b"".join(map(_string, texts))),
        "token_type": _array(_INT32, len(types), struct.pack(f"<{len(types)}i", *types)),
        "merges": _array(_STRING, 1, _string("a b")),
        "bos_token_id": _value(first),
        "eos_token_id": _value(first + 2),
        "padding_token_id": _value(first),
        "add_bos_token": _value(False),
    }
    yield from ((f"tokenizer.ggml.{key}", value) for key, value in made_up.items())
    yield "tokenizer.chat_template", _value(_TEMPLATE)


def _byte_tokens() -> Iterator[str]:
    """GPT-2's letters for the 256 bytes: itself where it is printable, else one from 256 on (unicode_byte_to_utf8, src/unicode.cpp)."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    for byte in range(_BYTES):
        yield chr(byte if byte in plain else next(others))


def _table(header: Header) -> tuple[bytes, Mapping[str, int], int]:
    """The tensor table, the offsets of the tensors' data in the data section, and that section's bytes."""
    table, offsets, end = bytearray(), {}, 0
    for tensor in header.tensors:
        table += _string(tensor.name) + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        table += struct.pack("<IQ", ggml.BY_NAME[tensor.type].number, end)
        offsets[tensor.name] = end
        end += tensor.bytes + -tensor.bytes % gguf.ALIGNMENT
    return bytes(table), offsets, end


def _fill_factors(file: BinaryIO, header: Header, data_offset: int, offsets: Mapping[str, int]) -> None:
    for tensor in header.tensors:
        if tensor.name.startswith(_FACTORS) and tensor.type == "f32":
            file.seek(data_offset + offsets[tensor.name])
            file.write(struct.pack("<f", 1.0) * (tensor.bytes // 4))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _array(kind: int, count: int, data: bytes) -> bytes:
    return struct.pack("<IIQ", _ARRAY, kind, count) + data


def _value(value: Value) -> bytes:
    """A value with its type. A header doesn't keep the width of numbers; llama.cpp asks for 32 bits, and for signed ones in arrays."""
    if isinstance(value, tuple):
        if all(isinstance(each, bool) for each in value):
            return _array(_BOOL, len(value), struct.pack(f"<{len(value)}?", *value))
        if any(isinstance(each, float) for each in value):
            return _array(_FLOAT32, len(value), struct.pack(f"<{len(value)}f", *value))
        return _array(_INT32, len(value), struct.pack(f"<{len(value)}i", *value))
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if value < 0:
        return struct.pack("<Ii", _INT32, value) if value >= -(1 << 31) else struct.pack("<Iq", _INT64, value)
    return struct.pack("<II", _UINT32, value) if value < 1 << 32 else struct.pack("<IQ", _UINT64, value)
