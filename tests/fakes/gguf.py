"""GGUF files small enough to write in a test and true enough to be read, and the header of a small Qwen3.5."""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path

from supervisor.gguf import Header, Tensor, Value

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


WORDS = 32


def minimal(path: Path, **keys: int | float | str) -> Path:
    """Write ``path`` with :data:`KEYS`, changed by ``keys`` (``llama__block_count=30``: two underscores are a dot); returns it.

    Its one tensor is the embedding of :data:`WORDS` tokens, without which a file is no model.
    """
    values = KEYS | {name.replace("__", "."): value for name, value in keys.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    width = int(KEYS["llama.embedding_length"])
    start = b"GGUF" + struct.pack("<IQQ", 3, 1, len(values))
    start += b"".join(_string(name) + _value(value) for name, value in values.items())
    start += _string("token_embd.weight") + struct.pack("<IQQIQ", 2, width, WORDS, 0, 0)
    path.write_bytes(start + bytes(-len(start) % 32) + bytes(width * WORDS * 4))
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


def qwen35(layers: int = 4, *, mtp: bool = True, words: int = 512) -> Header:
    """The header of a made-up Qwen3.5 of some MB: delta-net blocks, each fourth one with attention, and an MTP head.

    Written by ``phantom.write`` it runs in the real engine. Names and proportions are those of src/models/qwen35.cpp.
    """
    width, ffn, heads, kv_heads, head, state, groups, value_heads = 256, 512, 4, 2, 64, 32, 4, 8
    key_width, value_width = state * groups, state * value_heads
    entries: dict[str, Value] = {
        "general.architecture": "qwen35",
        "general.name": "Made-up",
        "qwen35.block_count": layers + mtp,
        "qwen35.context_length": 262144,
        "qwen35.embedding_length": width,
        "qwen35.feed_forward_length": ffn,
        "qwen35.attention.head_count": heads,
        "qwen35.attention.head_count_kv": kv_heads,
        "qwen35.attention.key_length": head,
        "qwen35.attention.value_length": head,
        "qwen35.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen35.rope.dimension_count": head,
        "qwen35.rope.dimension_sections": (11, 11, 10, 0),
        "qwen35.rope.freq_base": 1e7,
        "qwen35.ssm.conv_kernel": 4,
        "qwen35.ssm.state_size": state,
        "qwen35.ssm.group_count": groups,
        "qwen35.ssm.time_step_rank": value_heads,
        "qwen35.ssm.inner_size": value_width,
        "qwen35.full_attention_interval": 4,
    }
    if mtp:
        entries["qwen35.nextn_predict_layers"] = 1
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (width, words), "output_norm.weight": (width,)}
    common = {
        "attn_norm.weight": (width,),
        "post_attention_norm.weight": (width,),
        "ffn_gate.weight": (width, ffn),
        "ffn_up.weight": (width, ffn),
        "ffn_down.weight": (ffn, width),
    }
    attention = common | {
        "attn_q.weight": (width, 2 * head * heads),
        "attn_k.weight": (width, head * kv_heads),
        "attn_v.weight": (width, head * kv_heads),
        "attn_output.weight": (head * heads, width),
        "attn_q_norm.weight": (head,),
        "attn_k_norm.weight": (head,),
    }
    linear = common | {
        "attn_qkv.weight": (width, 2 * key_width + value_width),
        "attn_gate.weight": (width, value_width),
        "ssm_conv1d.weight": (4, 2 * key_width + value_width),
        "ssm_dt.bias": (value_heads,),
        "ssm_a": (value_heads,),
        "ssm_beta.weight": (width, value_heads),
        "ssm_alpha.weight": (width, value_heads),
        "ssm_norm.weight": (state,),
        "ssm_out.weight": (value_width, width),
    }
    head_of_mtp = attention | {"nextn.eh_proj.weight": (2 * width, width)}
    head_of_mtp |= {f"nextn.{name}.weight": (width,) for name in ("enorm", "hnorm", "shared_head_norm")}
    for block in range(layers + mtp):
        kind = head_of_mtp if block == layers else attention if block % 4 == 3 else linear
        shapes |= {f"blk.{block}.{name}": shape for name, shape in kind.items()}
    lengths = {"qwen35.rope.dimension_sections": 4, "tokenizer.ggml.tokens": words}
    return Header(3, entries, lengths, _tensors(shapes), data_offset=0, assumed=True)


def split(folder: Path, parts: int) -> list[Path]:
    """A model in ``parts`` files as llama-gguf-split makes them: ``m-00001-of-0000N.gguf``, one f32 tensor in each."""
    made = []
    for number in range(parts):
        keys = (KEYS if number == 0 else {}) | {"split.no": number, "split.count": parts, "split.tensors.count": parts}
        pairs = b"".join(_string(name) + _value(value) for name, value in keys.items())
        tensor = _string(f"blk.{number}.w") + struct.pack("<IQQIQ", 2, 8, 2, 0, 0)
        start = b"GGUF" + struct.pack("<IQQ", 3, 1, len(keys)) + pairs + tensor
        made.append(folder / f"m-{number + 1:05}-of-{parts:05}.gguf")
        made[-1].write_bytes(start + bytes(-len(start) % 32) + bytes(64))
    return made


def plain(architecture: str, layers: int = 2, words: int = 512) -> Header:
    """The header of a made-up dense transformer of one of the families qwen2, qwen3, llama, gemma3."""
    width, ffn, heads, kv_heads, head = 256, 512, 4, 2, 64
    keys: dict[str, Value] = {
        "block_count": layers,
        "context_length": 32768,
        "embedding_length": width,
        "feed_forward_length": ffn,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
    }
    if architecture == "gemma3":
        keys["attention.sliding_window"] = 512
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (width,),
        "attn_q.weight": (width, head * heads),
        "attn_k.weight": (width, head * kv_heads),
        "attn_v.weight": (width, head * kv_heads),
        "attn_output.weight": (head * heads, width),
        "ffn_norm.weight": (width,),
        "ffn_gate.weight": (width, ffn),
        "ffn_up.weight": (width, ffn),
        "ffn_down.weight": (ffn, width),
    }
    if architecture == "qwen2":
        shapes |= {"attn_q.bias": (head * heads,), "attn_k.bias": (head * kv_heads,), "attn_v.bias": (head * kv_heads,)}
    if architecture in ("qwen3", "gemma3"):
        shapes |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
    if architecture == "gemma3":
        shapes |= {"post_attention_norm.weight": (width,), "post_ffw_norm.weight": (width,)}
    table: dict[str, tuple[int, ...]] = {"token_embd.weight": (width, words), "output_norm.weight": (width,)}
    for block in range(layers):
        table |= {f"blk.{block}.{name}": shape for name, shape in shapes.items()}
    entries: dict[str, Value] = {"general.architecture": architecture}
    entries |= {f"{architecture}.{key}": value for key, value in keys.items()}
    return Header(3, entries, {"tokenizer.ggml.tokens": words}, _tensors(table), data_offset=0, assumed=True)


def _tensors(shapes: dict[str, tuple[int, ...]]) -> tuple[Tensor, ...]:
    """Weights of two dimensions in q4_K, but for convolutions; all others in f32."""
    return tuple(
        Tensor(name, "q4_K", shape, prod(shape) // 256 * 144)
        if len(shape) == 2 and "conv1d" not in name
        else Tensor(name, "f32", shape, prod(shape) * 4)
        for name, shape in shapes.items()
    )
