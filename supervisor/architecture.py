"""What a model's shape is, as far as memory goes: its layers, the widths of what is computed, the state that it keeps a sequence.

A layer keeps keys and values of every token (``full``), of the last few (``window``), or a state of fixed size (``recurrent``). The
keys of a header that say so, and what is assumed where one is missing, are llama.cpp's (``llama_model_base::load_hparams``,
src/llama-model.cpp:1370, and ``load_arch_hparams`` of src/models/FAMILY.cpp at b11312).

A family that isn't among :data:`FAMILIES` is read as a plain transformer with full attention in every layer; :attr:`Architecture.rough`
says so. Then its weights and its vocabulary are right, the cache is an upper bound, and the compute buffer is a guess.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from supervisor.errors import Error, Exit
from supervisor.gguf import Header

FAMILIES: Final = frozenset(["llama", "smollm3", "qwen2", "qwen3", "gemma3", "qwen35"])
"""Those whose graph is known here (``supervisor.graph``)."""
Kind = Literal["full", "window", "recurrent"]
_FULL: Final[Kind] = "full"
_WINDOW: Final[Kind] = "window"
_RECURRENT: Final[Kind] = "recurrent"


@dataclass(frozen=True, slots=True)
class Layer:
    """One block."""

    kind: Kind
    n_head: int
    k_width: int
    """Elements of a token's keys; 0 in a recurrent layer."""
    v_width: int
    n_ff: int


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The gated delta net of qwen35 (load_arch_hparams, src/models/qwen35.cpp:4)."""

    conv_kernel: int
    conv_channels: int
    """Queries, keys and values side by side: inner size + 2 × groups × state size."""
    heads: int
    """Of values."""
    head_dim: int
    key_heads: int

    @property
    def value_width(self) -> int:
        """Elements of a token's values."""
        return self.heads * self.head_dim

    @property
    def r_bytes(self) -> int:
        """The convolution's last inputs, of one layer and row, in f32 (``n_embd_r``, src/llama-hparams.cpp)."""
        return 4 * (self.conv_kernel - 1) * self.conv_channels

    @property
    def s_bytes(self) -> int:
        """The state, of one layer and row, in f32 (``n_embd_s``)."""
        return 4 * self.head_dim * self.value_width


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model's shape."""

    family: str
    layers: tuple[Layer, ...]
    """Without the MTP head's."""
    mtp: tuple[Layer, ...]
    n_embd: int
    head_k: int
    """Elements of one head's keys."""
    head_v: int
    vocabulary: int
    tied: bool
    """No output matrix of its own: the embedding serves as one."""
    window: int
    """Tokens that a ``window`` layer looks back on."""
    recurrent: Recurrent | None
    qk_norm: bool
    """Queries and keys are normalised, head by head."""
    qkv_bias: bool
    context_train: int
    """Tokens it was trained on."""
    rough: str = ""
    """Why an estimate of it is rough; empty where it isn't."""

    @property
    def n_layer(self) -> int:
        """Blocks without the MTP head's."""
        return len(self.layers)

    @property
    def offloadable(self) -> int:
        """What ``--gpu-layers`` counts: all blocks, the MTP head's too, and the output (src/llama-model.cpp:1589)."""
        return len(self.layers) + len(self.mtp) + 1

    @property
    def state_row_bytes(self) -> int:
        """The recurrent layers' state of one row; 0 for a plain transformer."""
        if self.recurrent is None:
            return 0
        count = sum(layer.kind == "recurrent" for layer in self.layers)
        return count * (self.recurrent.r_bytes + self.recurrent.s_bytes)


def read(header: Header) -> Architecture:
    """The shape that ``header`` describes. Raises :class:`Error` (exit code 6) naming the key that is missing."""
    family = header.architecture
    tensors = {tensor.name: tensor.shape for tensor in header.tensors}
    mtp = header.integer("nextn_predict_layers", 0)
    n_all = header.integer("block_count")
    n_embd = header.integer("embedding_length")
    heads = _each(header, "attention.head_count", n_all)
    heads_kv = _each(header, "attention.head_count_kv", n_all, heads)
    widths = _each(header, "feed_forward_length", n_all, (4 * n_embd,) * n_all if family not in FAMILIES else None)
    if not 0 <= mtp < n_all:
        raise _senseless(header, "block_count", n_all)
    head_k = header.integer("attention.key_length", n_embd // max(1, heads[0]))
    head_v = header.integer("attention.value_length", n_embd // max(1, heads[0]))
    window = header.integer("attention.sliding_window", 0) if family == "gemma3" else 0
    for key, values, least in (
        ("embedding_length", (n_embd,), 1),
        ("attention.head_count", heads, 1),
        ("attention.head_count_kv", heads_kv, 0),
        ("attention.key_length", (head_k,), 1),
        ("attention.value_length", (head_v,), 1),
        ("feed_forward_length", widths, 0),
        ("attention.sliding_window", (window,), 0),
    ):
        for value in values:
            if not least <= value <= _MOST:
                raise _senseless(header, key, value)
    kinds = _kinds(header, n_all, mtp, window)
    layers = tuple(
        Layer(kind, heads[i], *((0, 0) if kind == "recurrent" else (heads_kv[i] * head_k, heads_kv[i] * head_v)), widths[i])
        for i, kind in enumerate(kinds)
    )
    return Architecture(
        family=family,
        layers=layers[: n_all - mtp],
        mtp=layers[n_all - mtp :],
        n_embd=n_embd,
        head_k=head_k,
        head_v=head_v,
        vocabulary=_vocabulary(header, tensors),
        tied="output.weight" not in tensors,
        window=window,
        recurrent=_recurrent(header) if family == "qwen35" else None,
        qk_norm=any(name.endswith(".attn_q_norm.weight") for name in tensors),
        qkv_bias=any(name.endswith(".attn_q.bias") for name in tensors),
        context_train=header.integer("context_length", 0),
        rough=_rough(family),
    )


def _rough(family: str) -> str:
    if family in FAMILIES:
        return ""
    known = ", ".join(sorted(FAMILIES))
    return f"the estimate is rough: {family} is planned as a plain transformer, known are {known}"


def _each(header: Header, key: str, count: int, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """A number for every layer, written once or as an array (``get_key_or_arr``)."""
    if not 1 <= count <= _MOST_LAYERS:
        raise _senseless(header, "block_count", count)
    value = header.get(key)
    if isinstance(value, tuple):
        numbers = tuple(int(number) for number in value)
        if len(numbers) < count:
            raise _senseless(header, key, f"{len(numbers)} values for {count} layers")
        return numbers[:count]
    if value is None and default is not None:
        return default
    return (header.integer(key),) * count


def _kinds(header: Header, n_all: int, mtp: int, window: int) -> tuple[Kind, ...]:
    """Which layers keep what (qwen35.cpp:17, gemma3.cpp:5, ``set_swa_pattern``, llama-hparams.cpp:8)."""
    if header.architecture == "qwen35":
        told = header.get("attention.recurrent_layers")
        every = header.integer("full_attention_interval", 4)
        if isinstance(told, tuple) and len(told) >= n_all:
            return tuple(_RECURRENT if flag else _FULL for flag in told[:n_all])
        if every < 1:
            raise _senseless(header, "full_attention_interval", every)
        return tuple(_RECURRENT if i < n_all - mtp and (i + 1) % every else _FULL for i in range(n_all))
    if not window:
        return (_FULL,) * n_all
    pattern = header.get("attention.sliding_window_pattern")
    if isinstance(pattern, tuple) and len(pattern) >= n_all:
        return tuple(_WINDOW if flag else _FULL for flag in pattern[:n_all])
    every = pattern if isinstance(pattern, int) else 6
    return tuple(_WINDOW if every == 0 or i % every < every - 1 else _FULL for i in range(n_all))


def _recurrent(header: Header) -> Recurrent:
    heads = header.integer("ssm.time_step_rank")
    inner = header.integer("ssm.inner_size")
    groups, state = header.integer("ssm.group_count"), header.integer("ssm.state_size")
    kernel = header.integer("ssm.conv_kernel")
    told = {"time_step_rank": heads, "inner_size": inner, "group_count": groups, "state_size": state, "conv_kernel": kernel}
    for key, value in told.items():
        if not 1 <= value <= _MOST:
            raise _senseless(header, f"ssm.{key}", value)
    return Recurrent(
        conv_kernel=kernel,
        conv_channels=inner + 2 * groups * state,
        heads=heads,
        head_dim=inner // heads,
        key_heads=groups,
    )


def _vocabulary(header: Header, tensors: dict[str, tuple[int, ...]]) -> int:
    """Rows of the embedding; a header without one has its list of tokens."""
    shape = tensors.get("token_embd.weight", ())
    return math.prod(shape[1:]) if len(shape) > 1 else header.lengths.get("tokenizer.ggml.tokens", 0)


_MOST: Final = 1 << 24
"""Of any width: 60 times that of the largest models there are."""
_MOST_LAYERS: Final = 1024
"""Far above llama.cpp's own bound of 512 (LLAMA_MAX_LAYERS, src/llama-hparams.h)."""


def _senseless(header: Header, key: str, value: object) -> Error:
    return Error(
        f"the model's {header.architecture}.{key} is {value}, which makes no sense",
        exit=Exit.MODEL,
        hint="another file of this model, or a newer llmctl",
    )
