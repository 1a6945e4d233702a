"""A GGUF file small enough to write in a test and true enough to be read: the header of version 3, no weights."""

from __future__ import annotations

import struct
from pathlib import Path

UINT32, FLOAT32, STRING = 4, 6, 8

KEYS: dict[str, int | float | str] = {
    "general.architecture": "llama",
    "general.name": "Minimal",
    "general.file_type": 3,  # mostly Q4_1
    "llama.block_count": 2,
    "llama.context_length": 2048,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def minimal(path: Path, **keys: int | float | str) -> Path:
    """Write ``path`` with :data:`KEYS`, changed by ``keys`` (``llama__block_count=30``: two underscores are a dot); returns it."""
    values = KEYS | {name.replace("__", "."): value for name, value in keys.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, len(values))
    path.write_bytes(header + b"".join(_string(name) + _value(value) for name, value in values.items()))
    return path


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: float | str) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    return struct.pack("<II", UINT32, value)
