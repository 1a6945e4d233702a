"""How much memory a model with given settings takes, term by term, before anything of it is downloaded. Pure; nothing is fitted.

On a plan with a card, ``device`` is the card and ``host`` the box's memory. On one without, both are the box's memory: ``device`` has what
the card would have, and ``host`` what stands beside it. Terms are bytes; the words are the same in what the engine says of itself
(``supervisor.allocation``).

device:

- ``weights``: on a card, the tensors of the layers there, each padded to 128 bytes, and the output matrix, which is a copy of the
  embedding where the model has none of its own. Without one, the span of the file that is mapped. An MTP head counts only when it is used.
- ``kv``: cells × width × type, of every layer that keeps keys and values. Cells are padded to 256; a cache that isn't unified has as
  many for every slot (src/llama-context.cpp:290). A sliding window's layers have ``pad256(min(cells, window × slots + ubatch))``
  (src/llama-kv-cache-iswa.cpp:66; × 1 if not unified).
- ``state``: of recurrent layers, for each slot and for each token that a draft may have to take back (src/llama-memory-recurrent.cpp:48).
- ``compute``, ``scratch``: the compute buffer, laid out as ggml does it (``supervisor.graph``, ``supervisor.layout``); scratch is what it
  grows by because CUDA converts a quantised cache. The engine's log names the sum.
- ``draft``: what drafting takes on top: cache and compute buffer of the MTP head's context, or a whole draft model.
- ``context``, ``margin``: on a card, :data:`CUDA_CONTEXT_BYTES` and :data:`MARGIN_BYTES`.

host:

- ``embedding``: on a plan with a card, the mapped embedding; it stays there though a tied one is copied to the card.
- ``layers``: weights, cache and state of the layers that are left on the CPU.
- ``repacked``: without a card, weights that the CPU backend copies into an order of its own, in anonymous memory (:func:`repacked`).
- ``output``: a row of logits a slot, for every context. ``grown``: what the first use adds on the host.
- ``compute``: on a plan with a card, the host's part of the compute buffers: inputs and the embedded tokens.
- ``checkpoints``, ``prompt_cache``: what the server may keep of old prompts, at most. ``process``: itself.

Partial offload is an approximation: the card's compute buffer grows by the largest weight left behind, which is copied over for a
batch (``op_offload``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from supervisor import ggml, graph
from supervisor.architecture import Architecture, Layer
from supervisor.gguf import ALIGNMENT, Header, Tensor
from supervisor.option import CONTEXT_STEP, Speculation
from supervisor.units import MIB

CUDA_CONTEXT_BYTES: Final = 140 * MIB
"""129–140 MiB on an RTX 4060 Laptop (the two logs of a Qwen3.5-4B, March and August 2026)."""
MARGIN_BYTES: Final = 250 * MIB
"""cuBLAS workspaces, CUDA graphs, pools: llama.cpp's dry run and what the driver reports differ by 150–200 MiB, a prefill adds 20."""
PROCESS_BYTES: Final = 24 * MIB
"""A llama-server without what grows with the vocabulary: 4 MiB anonymous and 12 of its own file, on b11312, and 8 for its requests."""
PROCESS_TOKEN_BYTES: Final = 380
"""Of an entry of the vocabulary with its merge: 362 by SmolLM2 (49,152, 20.9 MiB) and Qwen3.5 (248,320 with all merges, 89.7 MiB)."""
HEADER_BYTES: Final = round(10.5 * MIB)
"""Of a Qwen3.5 file before its weights: vocabulary and merges."""
NGRAM_DRAFT: Final = 64
"""The longest draft of ngram-mod (``--spec-ngram-mod-n-max``): so many rows of logits more a slot (common/speculative.cpp:2336)."""
NGRAM_TABLE_BYTES: Final = 16 * MIB
"""ngram-mod's own, of all slots together (4 Mi entries, common/speculative.cpp:1876); 15.5 MiB more were resident with it."""
_CUDA_ALIGNMENT: Final = 128


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides about memory besides the model. Every number is the one that the engine is told."""

    context: int
    slots: int = 1
    unified: bool = False
    batch: int = 2048
    ubatch: int = 512
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attention: bool = True
    """What ``auto`` comes to."""
    gpu_layers: int = 0
    """As ``--gpu-layers`` counts (:attr:`Architecture.offloadable`); more than the model has layers is everything."""
    speculative: Speculation = "off"
    draft_length: int = 0
    """The longest draft of ``mtp`` and ``draft``; ngram's is :data:`NGRAM_DRAFT`."""
    checkpoints: int = 0
    """A slot."""
    cache_ram_mib: int = 0
    embeds: bool = False
    """It serves embeddings or ranks: the engine keeps an output of every token (``server_output_limits``, server-context.cpp:41)."""
    cuda: bool = False
    cpu_flags: frozenset[str] = frozenset()
    """As /proc/cpuinfo spells them."""

    @property
    def drafted(self) -> int:
        """Tokens of the longest draft."""
        return {"off": 0, "mtp": self.draft_length, "draft": self.draft_length, "ngram": NGRAM_DRAFT}[self.speculative]

    @property
    def state_rows(self) -> int:
        """Of recurrent state a slot: MTP can be taken back so many tokens (``need_n_rs_seq``, common/common.h:396)."""
        return 1 + (self.draft_length if self.speculative == "mtp" else 0)

    @property
    def cells(self) -> int:
        """Of a full layer's cache, a stream (src/llama-context.cpp:290–303)."""
        return _padded(self.context) if self.unified else _padded(_padded(self.context) // self.slots)

    @property
    def streams(self) -> int:
        """How many caches there are."""
        return 1 if self.unified else self.slots

    @property
    def tokens(self) -> int:
        """Of the largest micro-batch (``sched_reserve``, src/llama-context.cpp:626; ``graph_reserve``, :2528)."""
        tokens = min(self.ubatch, self.batch, self.cells * self.streams)
        return -(-tokens // self.slots) * self.slots


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes a term."""

    device: Mapping[str, int]
    host: Mapping[str, int]
    checkpoint_bytes: int
    """What one context checkpoint of one slot takes of host memory, at the full context; 0 if the model needs none."""


def make(
    architecture: Architecture, header: Header, settings: Settings, *, draft: tuple[Architecture, Header] | None = None
) -> Estimate:
    """Estimate every term. ``draft`` is the draft model of ``speculative: draft``."""
    behind = _behind(architecture, settings)
    left, kept = architecture.layers[:behind], architecture.layers[behind:]
    held = _weights(architecture, header, settings, behind)
    buffer, host_buffer = graph.compute(architecture, shape(architecture, settings))
    plain = graph.compute(architecture, shape(architecture, settings, scratch=False))[0]
    drafting, drafting_host = _drafting(architecture, settings, draft)
    checkpoint = checkpoint_bytes(architecture, settings)
    contexts = 2 if settings.speculative in ("mtp", "draft") else 1
    device = {
        "weights": held.device,
        "kv": kv_bytes(architecture, settings, kept),
        "state": _state_bytes(architecture, settings, kept),
        "compute": plain + held.carried + _pooled_bytes(architecture, settings),
        "scratch": buffer - plain,
        "draft": drafting,
        "context": CUDA_CONTEXT_BYTES if settings.cuda else 0,
        "margin": MARGIN_BYTES if settings.cuda else 0,
    }
    host = {
        "embedding": held.embedding,
        "layers": held.layers + kv_bytes(architecture, settings, left) + _state_bytes(architecture, settings, left),
        "repacked": held.repacked + (_repacked_bytes(draft[1].tensors, settings.cpu_flags) if draft and not settings.cuda else 0),
        "output": contexts * settings.slots * _output_row_bytes(architecture, settings),
        "grown": _grown_bytes(architecture, settings),
        "compute": host_buffer + drafting_host,
        "checkpoints": settings.checkpoints * settings.slots * checkpoint,
        "prompt_cache": settings.cache_ram_mib * MIB,
        "process": PROCESS_BYTES + PROCESS_TOKEN_BYTES * architecture.vocabulary,
    }
    return Estimate(MappingProxyType(device), MappingProxyType(host), checkpoint)


def kv_bytes(architecture: Architecture, settings: Settings, layers: Iterable[Layer]) -> int:
    """Of these layers' caches, in bytes."""
    total = 0
    for layer in layers:
        cells = (_window_cells(architecture, settings) if layer.kind == "window" else settings.cells) * settings.streams
        total += cells * _row_bytes(layer, settings.cache_type_k, settings.cache_type_v)
    return total


def checkpoint_bytes(architecture: Architecture, settings: Settings) -> int:
    """Of one context checkpoint: a row of recurrent state or a sliding window's cells, and the MTP cache of all tokens so far.

    A plain transformer needs none: its cache can be cut anywhere (``server_context``, tools/server/server-context.cpp).
    """
    windows = [layer for layer in architecture.layers if layer.kind == "window"]
    cells = min(_window_cells(architecture, settings), architecture.window + settings.ubatch) if windows else 0
    window = cells * sum(_row_bytes(layer, settings.cache_type_k, settings.cache_type_v) for layer in windows)
    head = sum(_row_bytes(layer, "f16", "f16") for layer in architecture.mtp) if settings.speculative == "mtp" else 0
    return architecture.state_row_bytes + window + (head * settings.cells if architecture.state_row_bytes or window else 0)


def repacked(type_: str, shape: tuple[int, ...], flags: frozenset[str]) -> bool:
    """Whether the CPU backend copies a weight of this type into an order of its own.

    ``ggml_repack_get_optimal_repack_type``, ggml/src/ggml-cpu/repack.cpp:4925; AMX comes first where it is compiled in (amx/amx.cpp:152).
    """
    if len(shape) != 2:
        return False
    if flags >= _AMX_FLAGS and type_ in _AMX_TYPES and shape[1] % 32 == 0:
        return True
    return any(flags >= needs and shape[1] % rows == 0 for needs, types, rows in _REPACKED if type_ in types)


_AMX_FLAGS: Final = frozenset(["amx_int8", "avx512_vnni"])
_AMX_TYPES: Final = frozenset(["q4_0", "q4_1", "q8_0", "q4_K", "q5_K", "q6_K", "iq4_xs"])
_REPACKED: Final = (
    (frozenset(["avx2"]), frozenset(["q4_0", "q4_K", "iq4_nl", "mxfp4"]), 8),
    (frozenset(["avx512f"]), frozenset(["q2_K"]), 8),
    (frozenset(["asimd", "i8mm"]), frozenset(["q4_0", "q8_0", "q1_0"]), 4),
    (frozenset(["asimd", "i8mm"]), frozenset(["q4_K", "q5_K", "q6_K"]), 8),
    (frozenset(["asimd", "asimddp"]), frozenset(["q4_0", "iq4_nl", "mxfp4", "q8_0", "q1_0"]), 4),
    (frozenset(["asimd", "asimddp"]), frozenset(["q4_K", "q5_K", "q6_K"]), 8),
)
"""CPU flags, types, what the rows must be a multiple of."""
REPACK_FLAGS: Final = _AMX_FLAGS.union(*(needs for needs, _, _ in _REPACKED))
"""The CPU flags that decide about it."""


@dataclass(frozen=True, slots=True)
class _Weights:
    """Where the weights lie, in bytes."""

    device: int
    embedding: int = 0
    layers: int = 0
    repacked: int = 0
    carried: int = 0
    """The largest weight that is copied to the card for a batch."""


def _weights(architecture: Architecture, header: Header, settings: Settings, behind: int) -> _Weights:
    """Each tensor goes where its layer is computed; the embedding always to the host (src/llama-model.cpp:1589)."""
    used = [tensor for tensor in header.tensors if settings.speculative == "mtp" or _block(tensor) < architecture.n_layer]
    more = header.file_bytes - header.tensor_bytes - HEADER_BYTES if header.assumed and header.file_bytes else 0
    if not settings.cuda:
        weights = _Weights(_mapped_bytes(header, used, settings.cpu_flags), repacked=_repacked_bytes(used, settings.cpu_flags))
        return replace(weights, device=weights.device + more)
    there, embedding, left = more, 0, [0]
    for tensor in used:
        if tensor.name == "token_embd.weight":
            embedding += tensor.bytes
        elif _position(architecture, tensor) < behind:
            left.append(tensor.bytes)
        else:
            there += _padded(tensor.bytes, _CUDA_ALIGNMENT)
    if architecture.tied and behind < architecture.offloadable:
        there += _padded(embedding, _CUDA_ALIGNMENT)
    return _Weights(device=there, embedding=embedding, layers=sum(left), carried=max(left))


def _behind(architecture: Architecture, settings: Settings) -> int:
    """How many layers, the first ones, a plan with a card leaves on the CPU."""
    if not settings.cuda or settings.gpu_layers > architecture.n_layer:
        return 0
    return architecture.offloadable - settings.gpu_layers


def _position(architecture: Architecture, tensor: Tensor) -> int:
    """Where a tensor stands in the order in which layers go to the card: last the output."""
    block = _block(tensor)
    return block if block >= 0 else architecture.offloadable - 1


def _block(tensor: Tensor) -> int:
    """The number of a tensor's block; -1 outside of them."""
    start, _, rest = tensor.name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if start == "blk" and number.isdecimal() else -1


def _repacked_bytes(tensors: Iterable[Tensor], flags: frozenset[str]) -> int:
    """Of the copies. The embedding is looked up, not multiplied, and stays as it is, unless it serves as the output matrix too."""
    tensors = tuple(tensors)
    tied = all(tensor.name != "output.weight" for tensor in tensors)
    return sum(
        _padded(tensor.bytes, 64)
        for tensor in tensors
        if (tied or tensor.name != "token_embd.weight") and repacked(tensor.type, tensor.shape, flags)
    )


def _mapped_bytes(header: Header, used: list[Tensor], flags: frozenset[str]) -> int:
    """Of the file from the first tensor that is read in place to the last (``get_mapping_range``, src/llama-model-loader.cpp)."""
    alignment = header.entries.get("general.alignment", ALIGNMENT)
    assert isinstance(alignment, int)
    wanted, at, first, last = set(used), 0, None, 0
    for tensor in header.tensors:
        if tensor in wanted and (tensor.name == "token_embd.weight" or not repacked(tensor.type, tensor.shape, flags)):
            first = at if first is None else first
            last = at + tensor.bytes
        at += _padded(tensor.bytes, alignment)
    return last - (first or 0)


def _state_bytes(architecture: Architecture, settings: Settings, layers: Iterable[Layer]) -> int:
    net = architecture.recurrent
    if net is None:
        return 0
    count = sum(layer.kind == "recurrent" for layer in layers)
    return count * (net.r_bytes + net.s_bytes) * settings.slots * settings.state_rows


def _drafting(architecture: Architecture, settings: Settings, draft: tuple[Architecture, Header] | None) -> tuple[int, int]:
    """What drafting takes on the device and of the host's compute buffer; its cache is f16 (``-ctkd``, ``-ctvd`` are left alone)."""
    alone = replace(settings, cache_type_k="f16", cache_type_v="f16", speculative="off", checkpoints=0)
    if settings.speculative == "mtp" and architecture.mtp:
        device, host = graph.compute(architecture, shape(architecture, alone), mtp=True)
        return kv_bytes(architecture, alone, architecture.mtp) + device, host
    if settings.speculative == "draft" and draft is not None:
        other, header = draft
        found = make(other, header, replace(alone, gpu_layers=other.offloadable)).device
        return sum(found[term] for term in ("weights", "kv", "state", "compute", "scratch")), 0
    return 0, 0


def _pooled_bytes(architecture: Architecture, settings: Settings) -> int:
    """What an embedding's graph keeps of its tokens' hidden states to pool them; an upper bound, seen 1 to 5 % of the buffer too high."""
    return 2 * 4 * architecture.n_embd * settings.tokens if settings.embeds else 0


def _output_row_bytes(architecture: Architecture, settings: Settings) -> int:
    """A token's logits, and its embedding where that is wanted (``output_reserve``, src/llama-context.cpp:2116)."""
    return 4 * (architecture.vocabulary + (architecture.n_embd if settings.embeds else 0))


def _grown_bytes(architecture: Architecture, settings: Settings) -> int:
    """What the first use adds on the host, most of it to the output buffers (``output_reserve``, src/llama-context.cpp:2116).

    Rows beyond the first of each slot: of a draft's tokens, or of a batch's where they are embedded. With MTP, the hidden state of a
    batch's tokens in both contexts, and what sampling on the backend returns.
    """
    row = _output_row_bytes(architecture, settings)
    if settings.embeds:
        return row * max(0, settings.tokens - settings.slots)
    rows = row * settings.slots
    head = 2 * 4 * architecture.n_embd * settings.batch + 3 * rows if settings.speculative == "mtp" else 0
    table = NGRAM_TABLE_BYTES if settings.speculative == "ngram" else 0
    return rows * settings.drafted + head + table


def shape(architecture: Architecture, settings: Settings, *, scratch: bool = True) -> graph.Shape:
    """What the compute graph depends on; without ``scratch``, as if nothing had to be converted."""
    wanted = settings.batch if settings.embeds else settings.slots * (1 + settings.drafted)
    outputs = min(settings.batch, settings.tokens, wanted)
    return graph.Shape(
        tokens=settings.tokens,
        slots=settings.slots,
        streams=settings.streams,
        cells=settings.cells,
        window_cells=_window_cells(architecture, settings),
        outputs=outputs,
        state_rows=settings.state_rows,
        cache_type_k=settings.cache_type_k,
        cache_type_v=settings.cache_type_v,
        flash_attention=settings.flash_attention,
        cuda=settings.cuda,
        scratch=scratch
        and settings.cuda
        and settings.flash_attention
        and settings.cache_type_k + settings.cache_type_v != "f16f16",
    )


def _window_cells(architecture: Architecture, settings: Settings) -> int:
    """Of a sliding window's cache, a stream (src/llama-kv-cache-iswa.cpp:66)."""
    wanted = architecture.window * (settings.slots if settings.unified else 1) + min(settings.ubatch, settings.batch)
    return _padded(min(settings.cells, wanted))


def _row_bytes(layer: Layer, type_k: str, type_v: str) -> int:
    """Of a token's keys and values in one layer."""
    return ggml.BY_NAME[type_k].row_bytes(layer.k_width) + ggml.BY_NAME[type_v].row_bytes(layer.v_width)


def _padded(count: int, to: int = CONTEXT_STEP) -> int:
    return -(-count // to) * to
