"""The compute graph that llama.cpp reserves memory for, family by family, reduced to what its allocator sees.

Before it serves, the engine lays out the largest graph it will run, a full micro-batch over a full cache, and allocates its buffer
(``llama_context::sched_reserve``, src/llama-context.cpp:616). The functions here build the same graph, operation by operation, in the
same order, out of shapes alone; ``supervisor.layout`` then says how long the buffer is. There is nothing fitted: a figure follows from
the source and holds for widths that were never measured. Sources, at b11312: src/models/{llama,qwen2,qwen3,smollm3,gemma3,qwen35}.cpp,
src/models/delta-net-base.cpp, and the ``build_*`` functions of src/llama-graph.cpp, whose names these have.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

from supervisor.architecture import Architecture, Layer
from supervisor.layout import EXTERNAL, Graph, Node, Place, buffers, store, view

_F16: Final = 2
_I32, _I64 = 4, 8
_ROTATION: Final = 64
"""The least width of the matrix that turns a quantised cache's vectors (``build_input_k_rot``, src/llama-kv-cache.cpp:1447)."""
_QUANTISED: Final = frozenset(["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"])


@dataclass(frozen=True, slots=True)
class Shape:
    """What a graph's size depends on besides the model."""

    tokens: int
    """Of a micro-batch; a multiple of ``slots``."""
    slots: int
    streams: int
    """1 with a unified cache, else one a slot."""
    cells: int
    """Of a full layer's cache, a stream."""
    window_cells: int
    outputs: int
    """Rows of logits."""
    state_rows: int
    """1 + the longest draft: how many steps back a recurrent layer can be taken."""
    cache_type_k: str
    cache_type_v: str
    flash_attention: bool
    cuda: bool
    scratch: bool = False
    """Room for converting a quantised cache; only with ``cuda``."""


@functools.lru_cache(maxsize=256)
def compute(architecture: Architecture, shape: Shape, *, mtp: bool = False) -> tuple[int, int]:
    """Bytes of the compute buffers on the device and on the host; ``mtp`` for the graph of the MTP head.

    Without a card it is all on the device's side: there is one buffer.
    """
    found = buffers(build(architecture, shape, mtp=mtp))
    if shape.cuda:
        return found[Place.DEVICE], found[Place.HOST]
    return found[Place.HOST], 0


def build(architecture: Architecture, shape: Shape, *, mtp: bool = False) -> Graph:
    """The graph itself."""
    return (_Mtp if mtp else _Model)(architecture, shape).graph


class _Builder:
    """The pieces that all families are made of."""

    def __init__(self, architecture: Architecture, shape: Shape) -> None:
        self.architecture = architecture
        self.shape = shape
        self.graph = Graph()
        self.place = Place.DEVICE if shape.cuda else Place.HOST
        tokens, heads = shape.tokens, (architecture.head_k, architecture.head_v)
        positions = 4 if architecture.family == "qwen35" else 1  # multi-section RoPE (n_pos_per_embd)
        self.positions = _input((tokens * positions,), _I32)
        self.out_ids = _input((shape.outputs,), _I32)
        widest = max((layer.v_width for layer in architecture.layers), default=0)
        k_turned = shape.cache_type_k in _QUANTISED and heads[0] % _ROTATION == 0
        v_turned = shape.cache_type_v in _QUANTISED and heads[1] % _ROTATION == 0
        self.caches = {
            kind: _Cache(
                cells=cells,
                k_ids=_input((tokens,), _I64),
                v_ids=_input((tokens if shape.flash_attention else tokens * widest,), _I64),
                mask=_input((cells, tokens // shape.streams, 1, shape.streams), _F16 if shape.flash_attention else 4),
                k_turn=_input((_power(heads[0]),) * 2) if k_turned else None,
                v_turn=_input((_ROTATION,) * 2) if v_turned else None,
            )
            for kind, cells in (("full", shape.cells), ("window", shape.window_cells))
        }

    def op(self, shape: tuple[int, ...], *sources: Node, extra_bytes: int = 0) -> Node:
        """A result with memory of its own."""
        return Node(shape, sources=sources, place=self.place, extra_bytes=extra_bytes)

    def over(self, first: Node, *others: Node) -> Node:
        """A result of the first operand's shape, which may take its place, or that of another operand."""
        return Node(first.shape, sources=(first, *others), place=self.place, inplace=True)

    def mul_mat(self, rows: int, of: Node) -> Node:
        """A weight times ``of``, whose memory is (width, tokens)."""
        return self.op((rows, *of.shape[1:]), EXTERNAL, of)

    def norm(self, of: Node, *, weight: bool = True) -> Node:
        """``build_norm``: RMS norm and its weight."""
        normed = self.over(of)
        return self.over(normed, EXTERNAL) if weight else normed

    def embed(self) -> Node:
        """``build_inp_embd``: tokens or, not used here but allocated all the same, vectors from outside."""
        tokens = self.shape.tokens
        ids = _input((tokens,), _I32)
        looked_up = Node((self.architecture.n_embd, tokens), sources=(EXTERNAL, ids))
        self.graph.expand(looked_up)
        self.graph.expand(_input((self.architecture.n_embd, tokens)))
        return looked_up

    def heads_of(self, of: Node, head: int) -> Node:
        """(width, tokens) seen as (head, heads, tokens)."""
        return view(of, (head, of.shape[0] // head, self.shape.tokens))

    def attend(self, layer: Layer, q: Node, k: Node, v: Node) -> Node:
        """``build_attn`` without the output matrix: turn, store, attend. The result is (heads × head, tokens)."""
        cache = self.caches[layer.kind]
        if cache.k_turn is not None:
            q, k = self._turned(q, cache.k_turn), self._turned(k, cache.k_turn)
        if cache.v_turn is not None:
            v = self._turned(v, cache.v_turn)
        for node in (q, v, k):
            self.graph.expand(node)
        tokens = self.shape.tokens
        self.graph.expand(store(self.place, view(k, (layer.k_width, tokens)), cache.k_ids, EXTERNAL))
        self.graph.expand(store(self.place, view(v, (layer.v_width, tokens)), cache.v_ids, EXTERNAL))
        attended = self._attention(layer, q, cache)
        self.graph.expand(attended)
        return attended if cache.v_turn is None else self._turned(attended, cache.v_turn)

    def _attention(self, layer: Layer, q: Node, cache: _Cache) -> Node:
        """``build_attn_mha``."""
        shape, head_v = self.shape, self.architecture.head_v
        rows = shape.tokens // shape.streams
        seen = view(view(q, q.shape), (q.shape[0], rows, layer.n_head, shape.streams), dense=False)
        if shape.flash_attention:
            result = self.op(
                (head_v, layer.n_head, rows, shape.streams),
                seen,
                EXTERNAL,
                EXTERNAL,
                cache.mask,
                extra_bytes=self._converted(layer, cache),
            )
            return view(result, (head_v * layer.n_head, shape.tokens))
        scores = self.op((cache.cells, rows, layer.n_head, shape.streams), EXTERNAL, seen)
        chances = self.over(scores, cache.mask)
        mixed = self.op((head_v, rows, layer.n_head, shape.streams), EXTERNAL, chances)
        return self.op((head_v * layer.n_head, shape.tokens), view(mixed, mixed.shape, dense=False))

    def _converted(self, layer: Layer, cache: _Cache) -> int:
        """What CUDA needs to convert a quantised cache of one layer, in full, behind the result.

        Its flash attention over several tokens takes f16 only (``ggml_cuda_flash_attn_ext_get_alloc_size``, fattn.cu:722).
        """
        if not self.shape.scratch:
            return 0
        cells = cache.cells * self.shape.streams
        k = layer.k_width if self.shape.cache_type_k != "f16" else 0
        v = layer.v_width if self.shape.cache_type_v != "f16" else 0
        return cells * (k + v) * _F16

    def _turned(self, of: Node, matrix: Node) -> Node:
        """``llama_mul_mat_hadamard``."""
        side = matrix.shape[0]
        count = _elements(of)
        seen = view(of, (side, count // side)) if of.dense else self.op((side, count // side), of)
        return view(self.op(seen.shape, matrix, seen), of.shape)

    def feed_forward(self, layer: Layer, of: Node) -> Node:
        """``build_ffn``: gate and up, their product, down."""
        gate, up = self.mul_mat(layer.n_ff, of), self.mul_mat(layer.n_ff, of)
        return self.mul_mat(self.architecture.n_embd, self.op(gate.shape, gate, up))

    def pick(self, of: Node) -> Node:
        """The rows that logits are wanted of."""
        return self.op((of.shape[0], self.shape.outputs), of, self.out_ids)

    def finish(self, of: Node) -> None:
        """The logits."""
        logits = Node((self.architecture.vocabulary, of.shape[1]), sources=(EXTERNAL, of), place=self.place, output=True)
        self.graph.expand(logits)


@dataclass(frozen=True, slots=True)
class _Cache:
    """The inputs that go with a cache."""

    cells: int
    k_ids: Node
    v_ids: Node
    mask: Node
    k_turn: Node | None
    v_turn: Node | None


class _Model(_Builder):
    """A model's own graph."""

    def __init__(self, architecture: Architecture, shape: Shape) -> None:
        super().__init__(architecture, shape)
        copies = _input((shape.slots,), _I32)
        self.copied, self.others = view(copies, (shape.slots,)), view(copies, (0,))
        build = {"gemma3": self._gemma3, "qwen35": self._qwen35}.get(architecture.family, self._llama)
        build(architecture.layers)

    def _llama(self, layers: tuple[Layer, ...]) -> None:
        """src/models/llama.cpp, smollm3.cpp, qwen2.cpp (biases), qwen3.cpp (norms of queries and keys)."""
        state = self.embed()
        for number, layer in enumerate(layers, 1):
            before = state
            q, k, v = self._projections(layer, self.norm(before))
            q, k = self._roped(q), self._roped(k)
            attended = self.mul_mat(self.architecture.n_embd, self.attend(layer, q, k, v))
            if number == len(layers):
                attended, before = self.pick(attended), self.pick(before)
            middle = self.over(attended, before)
            state = self.over(self.feed_forward(layer, self.norm(middle)), middle)
        self.finish(_kept(self.norm(state)))

    def _gemma3(self, layers: tuple[Layer, ...]) -> None:
        """src/models/gemma3.cpp: norms on both sides of attention and feed-forward."""
        state = self.over(self.embed())
        for number, layer in enumerate(layers, 1):
            before = state
            q, k, v = self._projections(layer, self.norm(before))
            q, k = self.over(self._roped(q)), self._roped(k)
            attended = self.mul_mat(self.architecture.n_embd, self.attend(layer, q, k, v))
            if number == len(layers):
                attended, before = self.pick(attended), self.pick(before)
            middle = self.over(self.norm(attended), before)
            state = self.over(self.norm(self.feed_forward(layer, self.norm(middle))), middle)
        self.finish(_kept(self.norm(state)))

    def _qwen35(self, layers: tuple[Layer, ...]) -> None:
        """src/models/qwen35.cpp: gated attention in some layers, a gated delta net in the others."""
        state = self.embed()
        for layer in layers:
            normed = self.norm(state)
            self.graph.expand(normed)
            mixed = self._delta_net(normed) if layer.kind == "recurrent" else self.gated_attention(layer, normed)
            middle = self.over(mixed, state)
            state = self.over(self.feed_forward(layer, self.norm(middle)), middle)
        self.finish(_kept(self.pick(_kept(self.norm(state)))))

    def _projections(self, layer: Layer, of: Node) -> tuple[Node, Node, Node]:
        """``build_qkv`` with reshape, and the norms of queries and keys."""
        shape = self.architecture
        made = []
        for width, head in (
            (layer.n_head * shape.head_k, shape.head_k),
            (layer.k_width, shape.head_k),
            (layer.v_width, shape.head_v),
        ):
            part = self.mul_mat(width, of)
            made.append(self.heads_of(self.over(part, EXTERNAL) if shape.qkv_bias else part, head))
        q, k, v = made
        return (self.norm(q), self.norm(k), v) if shape.qk_norm else (q, k, v)

    def _roped(self, of: Node) -> Node:
        return self.over(of, self.positions)

    def gated_attention(self, layer: Layer, of: Node) -> Node:
        """``build_layer_attn``: queries and their gate come out of one matrix."""
        shape = self.architecture
        both = self.mul_mat(2 * layer.n_head * shape.head_k, of)
        q = view(both, (shape.head_k, layer.n_head, self.shape.tokens), dense=False)
        k = self.heads_of(self.mul_mat(layer.k_width, of), shape.head_k)
        v = self.heads_of(self.mul_mat(layer.v_width, of), shape.head_v)
        gate = self.op((shape.head_k * layer.n_head, self.shape.tokens), view(both, q.shape, dense=False))
        attended = self.attend(layer, self._roped(self.norm(q)), self._roped(self.norm(k)), v)
        return self.mul_mat(shape.n_embd, self.over(attended, self.over(gate)))

    def _delta_net(self, of: Node) -> Node:
        """``build_layer_attn_linear`` with the fused operation, which CPU and CUDA both have (delta-net-base.cpp)."""
        net = self.architecture.recurrent
        assert net is not None
        tokens, slots = self.shape.tokens, self.shape.slots
        mixed = self.mul_mat(net.conv_channels, of)
        gate = self.mul_mat(net.value_width, of)
        beta = self.over(view(self.mul_mat(net.heads, of), (1, net.heads, tokens)))
        alpha = view(self.mul_mat(net.heads, of), (net.heads, tokens, 1))
        decay = view(self.over(self.over(self.over(alpha, EXTERNAL)), EXTERNAL), (1, net.heads, tokens))

        past = self._rows((net.conv_kernel - 1) * net.conv_channels)
        padded = self.op(
            (net.conv_kernel - 1 + tokens // slots, net.conv_channels, slots), past, view(mixed, mixed.shape, dense=False)
        )
        for _ in range(self.shape.state_rows):
            self.graph.expand(store(self.place, view(padded, (0,), dense=False)))
        state = self._rows(net.s_bytes // 4)
        convolved = self.over(self.op((net.conv_channels, tokens // slots, slots), padded, EXTERNAL))
        keys = (net.head_dim, net.key_heads, tokens)
        q, k = (self.over(self.over(view(convolved, keys, dense=False))) for _ in range(2))
        v = view(convolved, (net.head_dim, net.heads, tokens), dense=False)
        rows = tokens + self.shape.state_rows * net.head_dim * slots
        result = self.op((net.value_width, rows), q, k, v, decay, beta, state)
        self.graph.expand(store(self.place, view(result, (0,), dense=False)))

        seen = view(result, (net.head_dim, net.heads, tokens))
        gated = self.over(self.norm(seen), self.over(view(gate, seen.shape)))
        return view(
            self.mul_mat(self.architecture.n_embd, view(gated, (net.value_width, tokens))), (self.architecture.n_embd, tokens)
        )

    def _rows(self, width: int) -> Node:
        """``build_rs``: the state of the sequences at hand."""
        self.graph.expand(store(self.place, EXTERNAL))
        rows = self.op((width, self.shape.slots), EXTERNAL, self.copied)
        self.graph.expand(rows)
        self.graph.expand(store(self.place, self.op((width, 0), EXTERNAL, self.others)))
        return rows


class _Mtp(_Model):
    """The graph of the MTP head, in a context of its own (``graph_mtp``, src/models/qwen35.cpp:466)."""

    def _qwen35(self, layers: tuple[Layer, ...]) -> None:
        layer, shape, tokens = self.architecture.mtp[0], self.architecture, self.shape.tokens
        known = Node((shape.n_embd, tokens), sources=(EXTERNAL, _input((tokens,), _I32)))
        hidden = self.norm(_input((shape.n_embd, tokens)))
        joined = self.op((2 * shape.n_embd, tokens), self.norm(known), hidden)
        state = self.mul_mat(shape.n_embd, joined)
        middle = self.over(self.gated_attention(layer, self.norm(state)), state)
        last = self.over(self.feed_forward(layer, self.norm(middle)), middle)
        self.finish(self.pick(_kept(self.norm(last))))


def _input(shape: tuple[int, ...], width: int = 4) -> Node:
    return Node(shape, width)


def _kept(node: Node) -> Node:
    """The same, flagged as an output of the graph."""
    return Node(node.shape, node.width, node.sources, node.place, node.root, node.dense, output=True, inplace=node.inplace)


def _elements(node: Node) -> int:
    total = 1
    for extent in node.shape:
        total *= extent
    return total


def _power(head: int) -> int:
    """The largest power of two, 64 or more, that divides a head."""
    side = _ROTATION
    while not head % (2 * side):
        side *= 2
    return side
