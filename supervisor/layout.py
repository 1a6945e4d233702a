"""How ggml lays the tensors of a compute graph out in memory: the size of a compute buffer without running anything.

A graph is a list of tensors in the order in which they are computed. Walking it, ggml's allocator gives every result the smallest free
block it fits in, or room at the end; it lets a result take the place of an operand that nobody needs any more where the operation
allows that; it frees an operand after its last use. The buffer is as long as the end of the furthest block there ever was, holes
included, so it can't be had as a sum of sizes: it is found by walking. What is kept here of a tensor is only what the allocator sees.

With a card there are two buffers, and the graph is cut where the work changes place: what a part needs from the other place is copied
there when the part begins. The rules are those of b11312: the order of nodes ``ggml_visit_parents_graph`` (ggml/src/ggml.c:7245),
the places ``ggml_backend_sched_split_graph`` (ggml/src/ggml-backend.cpp), allocation ``ggml_gallocr_alloc_graph_impl`` and
``ggml_dyn_tallocr_alloc`` (ggml/src/ggml-alloc.c:714, :195). What a backend keeps alive for its fused operations is left out: CUDA's
does so for mixtures of experts only (ggml-cuda.cu:4522).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final


class Place(IntEnum):
    """Where a tensor is computed. On a plan without a card everything is on the host."""

    DEVICE = 0
    HOST = 1


ALIGNMENT: Final = {Place.DEVICE: 128, Place.HOST: 32}
"""Of every block, in bytes (ggml_backend_cuda_buffer_type_get_alignment; TENSOR_ALIGNMENT, ggml-impl.h)."""


@dataclass(slots=True, eq=False)
class Node:
    """A tensor as the allocator sees it. Two are the same only if they are one.

    It is never changed, but not frozen: a graph has thousands, and a frozen one takes three times as long to make.
    """

    shape: tuple[int, ...]
    width: int = 4
    """Bytes an element."""
    sources: tuple[Node, ...] = ()
    place: Place = Place.HOST
    root: Node | None = None
    """Whose memory a view looks at."""
    dense: bool = True
    """False for a view with gaps, which never has the layout of a result."""
    external: bool = False
    """A weight or a cache: it has memory of its own. (A leaf that isn't is an input of the graph.)"""
    output: bool = False
    """Kept to the end."""
    inplace: bool = False
    """The operation may write over an operand (ggml_op_can_inplace, ggml-alloc.c:22)."""
    extra_bytes: int = 0
    """What the backend wants behind the result while it works."""
    bytes: int = field(init=False)
    """Of the result with what is wanted behind it."""
    looks: bool = field(init=False)
    """A view of something that is computed or given: nothing is computed here, so nothing decides where."""

    def __post_init__(self) -> None:
        self.bytes = math.prod(self.shape) * self.width + self.extra_bytes
        self.looks = self.root is not None and self.root is not EXTERNAL

    @property
    def leaf(self) -> bool:
        """Nothing computes it."""
        return not self.sources and self.root is None


EXTERNAL: Final = Node((0,), external=True)
"""Any weight, any cache: one stands for all, as none of them is allocated here."""


def view(of: Node, shape: tuple[int, ...], *, dense: bool = True) -> Node:
    """A look at the memory of ``of``: reshape, slice, transposition."""
    return Node(shape, of.width, (of,), of.place, of.root or of, dense)


def store(place: Place, *operands: Node) -> Node:
    """A write into memory that exists already: a copy into a cache."""
    return Node((0,), sources=operands, place=place, root=EXTERNAL)


class Graph:
    """Nodes in the order of computation, and leaves in the order in which they were met."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.leaves: list[Node] = []
        self._seen: set[Node] = set()

    def expand(self, node: Node) -> None:
        """Add ``node`` and whatever it needs, operands first, left to right."""
        if node in self._seen:
            return
        self._seen.add(node)
        for source in node.sources:
            self.expand(source)
        (self.leaves if node.leaf else self.nodes).append(node)


def buffers(graph: Graph) -> dict[Place, int]:
    """Bytes of the compute buffer at each place."""
    return _Allocator(graph.leaves, _steps(graph.nodes)).run()


_Step = tuple[Node, tuple[Node, ...]]
"""A node to run, and what it reads once its operands are where it runs."""


def _steps(nodes: list[Node]) -> list[_Step]:
    """Cut the graph where the place changes. A part's foreign operands come first: each kept until it is copied, then its copy."""
    steps: list[_Step] = []
    copies: dict[Node, Node] = {}
    place = next((node.place for node in nodes if not node.looks), Place.HOST)
    part: list[Node] = []
    for node in nodes:
        if node.place is not place and not node.looks:
            steps += _part(part, place, copies)
            part, place = [], node.place
        part.append(node)
    return steps + _part(part, place, copies)


def _part(nodes: list[Node], place: Place, copies: dict[Node, Node]) -> list[_Step]:
    """The steps of one part. ``copies`` are on the card, from earlier parts too."""
    if place is Place.HOST:
        return [(node, node.sources) for node in nodes]
    first: list[_Step] = []
    rest: list[_Step] = []
    for node in nodes:
        if node.looks:
            rest.append((node, node.sources))
            continue
        for source in node.sources:
            if source not in copies and _foreign(source):
                copies[source] = copy = Node(source.shape, source.width, place=place)
                first += ((Node((0,), place=source.place, root=source.root or source), (source,)), (copy, ()))
        rest.append((node, tuple([copies.get(source, source) for source in node.sources])))
    return first + rest


def _foreign(node: Node) -> bool:
    """Whether the card can't read it where it is."""
    root = node.root or node
    return root.place is Place.HOST and not root.external


class _Arena:
    """The free blocks of one buffer, by address; the last has no end."""

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self._free = [[0, 1 << 62]]
        self.most = 0

    def take(self, count: int) -> int:
        """The address of a block of ``count`` bytes: the smallest free one that will do, the last such if several are, else the end."""
        count = self._padded(count)
        best = end = self._free[-1]
        for block in self._free:
            if block is not end and block[1] >= count and (best is end or block[1] <= best[1]):
                best = block
        start = best[0]
        best[0] += count
        best[1] -= count
        if not best[1]:
            self._free.remove(best)
        self.most = max(self.most, start + count)
        return start

    def give(self, start: int, count: int) -> None:
        """Free a block, and make one of it and the free ones beside it."""
        count = self._padded(count)
        for number, block in enumerate(self._free):
            if block[0] + block[1] == start:
                block[1] += count
                after = self._free[number + 1] if number + 1 < len(self._free) else None
                if after is not None and block[0] + block[1] == after[0]:
                    block[1] += after[1]
                    del self._free[number + 1]
                return
            if start + count == block[0]:
                block[0] = start
                block[1] += count
                return
            if block[0] > start:
                self._free.insert(number, [start, count])
                return

    def shrink(self, start: int, before: int, after: int) -> None:
        """Free the end of a block that is too long for its new holder."""
        before, after = self._padded(before), self._padded(after)
        if before > after:
            self.give(start + after, before - after)

    def _padded(self, count: int) -> int:
        return -(-count // self._alignment) * self._alignment


class _Allocator:
    """One walk over the steps."""

    def __init__(self, leaves: list[Node], steps: list[_Step]) -> None:
        self._leaves = leaves
        self._steps = steps
        self._arenas = {place: _Arena(ALIGNMENT[place]) for place in Place}
        self._children: dict[Node, int] = {}
        """Readers to come."""
        self._views: dict[Node, int] = {}
        """Views that will still be read."""
        self._held: dict[Node, int] = {}
        """Addresses."""

    def run(self) -> dict[Place, int]:
        """The furthest end in each arena."""
        for leaf in self._leaves:
            self._hold(leaf, ())
        for node, sources in self._steps:
            if node.looks and sources is node.sources and sources:
                assert node.root is not None
                self._views[node.root] = self._views.get(node.root, 0) + 1
            for source in sources:
                self._children[source] = self._children.get(source, 0) + 1
        for node, sources in self._steps:
            for source in sources:
                self._hold(source, ())
            self._hold(node, sources)
            for source in sources:
                self._read(source)
        return {place: arena.most for place, arena in self._arenas.items()}

    def _hold(self, node: Node, sources: tuple[Node, ...]) -> None:
        """Find room for a result that has none."""
        if node in self._held or node.root is not None or node.external:
            return
        if node.inplace:
            for parent in sources:
                if self._free_for(node, parent):
                    start = self._held[node] = self._held.pop(parent)
                    self._arenas[node.place].shrink(start, parent.bytes, node.bytes)
                    return
        self._held[node] = self._arenas[node.place].take(node.bytes)

    def _free_for(self, node: Node, parent: Node) -> bool:
        """Whether ``node`` may be written over ``parent``."""
        mine = parent in self._held and not parent.output and parent.place is node.place
        same = parent.shape == node.shape and parent.width == node.width
        return mine and same and self._children[parent] == 1 and not self._views.get(parent)

    def _read(self, parent: Node) -> None:
        """One reader of ``parent`` is done; free what nobody will read again."""
        left = self._children[parent] = self._children[parent] - 1
        if left or self._views.get(parent):
            return
        if parent.root is None:
            self._drop(parent)
        elif parent.looks:
            root = parent.root
            views = self._views[root] = self._views.get(root, 0) - 1
            if not views and not self._children.get(root):
                self._drop(root)

    def _drop(self, node: Node) -> None:
        if node in self._held and not node.output:
            self._arenas[node.place].give(self._held.pop(node), node.bytes)
