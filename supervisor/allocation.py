"""What the engine says that it allocated, read from its log (``-lv 4``), in the words of ``supervisor.estimate``.

Every buffer has one line, ``FUNCTION: NAME KIND buffer size = N MiB``, after the model is loaded (``load_tensors``) or while a context
is made. A second context is the MTP head's or a draft model's; so is a model that is loaded after the first context. A context may reserve
its compute buffer again; the last line counts. The text may hold several starts, one after the other; the last counts.

Where a card's buffers are named, they are the device. What the log doesn't name has no term: CUDA's context, checkpoints, the process.
``compute`` holds CUDA's scratch too, which the engine doesn't tell apart. A line has two decimals of a MiB, so a figure may be 5 KiB off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from supervisor.units import MIB

_START: Final = "llama_server: initializing"
"""The first line of a start (tools/server/server.cpp)."""
_CONTEXT: Final = "llama_context: constructing llama_context"
"""The first line of a context (src/llama-context.cpp:146)."""
_BUFFER: Final = re.compile(
    r"\b\w+: +(?P<name>[\w-]+) +(?P<kind>model|KV|RS|compute|output) buffer size = +(?P<mib>\d+\.\d\d) MiB"
)
"""src/llama-model.cpp:1930, llama-kv-cache.cpp:291, llama-memory-recurrent.cpp:124, llama-context.cpp:381 and :740."""
_CARD: Final = re.compile(r"(?:CUDA|ROCm|Vulkan|SYCL)\d+")
_TERMS: Final = {"model": "weights", "KV": "kv", "RS": "state", "compute": "compute"}


@dataclass(frozen=True, slots=True)
class Allocation:
    """Bytes a term; terms that the log has no line for are missing."""

    device: Mapping[str, int]
    host: Mapping[str, int]
    cuda: bool
    """The device is a card."""


@dataclass(frozen=True, slots=True)
class _Line:
    """One buffer; ``context`` is 0 for the model's own and 1 or more for drafting."""

    name: str
    kind: str
    context: int
    bytes: int


def parse(log: str) -> Allocation | None:
    """What the last start in ``log`` allocated; None where it names no buffer."""
    lines = _lines(log[max(0, log.rfind(_START)) :])
    if not lines:
        return None
    cuda = any(_CARD.fullmatch(line.name) for line in lines)
    device: dict[str, int] = {}
    host: dict[str, int] = {}
    for line in lines:
        place, term = _term(line, cuda)
        terms = device if place else host
        terms[term] = terms.get(term, 0) + line.bytes
    return Allocation(MappingProxyType(device), MappingProxyType(host), cuda)


def _lines(log: str) -> list[_Line]:
    """The buffers' lines, a compute buffer once a context and place."""
    found: list[_Line] = []
    reserved: dict[tuple[str, int], int] = {}
    contexts = 0
    for text in log.splitlines():
        if _CONTEXT in text:
            contexts += 1
        elif match := _BUFFER.search(text):
            kind = match["kind"]
            context = contexts if kind == "model" else max(0, contexts - 1)
            line = _Line(match["name"], kind, context, round(float(match["mib"]) * MIB))
            place = reserved.setdefault((line.name, context), len(found)) if kind == "compute" else len(found)
            found[place:] = [line, *found[place + 1 :]]
    return found


def _term(line: _Line, cuda: bool) -> tuple[bool, str]:
    """Whether a buffer belongs to the device, and its term."""
    if line.kind == "output":
        return False, "output"
    if cuda and not _CARD.fullmatch(line.name):
        return False, {"model": "embedding", "compute": "compute"}.get(line.kind, "layers")
    if line.name in ("CPU_REPACK", "AMX"):
        return False, "repacked"
    return True, "draft" if line.context else _TERMS[line.kind]
