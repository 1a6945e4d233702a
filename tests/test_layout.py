"""The allocator: what takes whose place, what is freed when, and where a graph is cut."""

from __future__ import annotations

from supervisor.layout import EXTERNAL, Graph, Node, Place, buffers, store, view

KB = 1024
"""Sizes are multiples of every alignment."""


def result(count: int, *sources: Node, place: Place = Place.HOST, inplace: bool = False, output: bool = False) -> Node:
    """A result of ``count`` KB."""
    return Node((count * KB // 4,), sources=sources or (EXTERNAL,), place=place, inplace=inplace, output=output)


def size(*ends: Node, place: Place = Place.HOST) -> float:
    """KB of the buffer of a graph that computes these, one after the other."""
    graph = Graph()
    for end in ends:
        graph.expand(end)
    return buffers(graph)[place] / KB


def test_a_chain_needs_an_operand_and_its_result() -> None:
    first = result(4)
    assert size(result(4, result(4, first))) == 8


def test_in_place_a_result_takes_its_operands_place() -> None:
    first = result(4)
    assert size(result(4, result(4, first, inplace=True), inplace=True)) == 4


def test_an_operand_that_is_read_again_is_not_written_over() -> None:
    first = result(4)
    second = result(4, first, inplace=True)
    assert size(result(4, second, first)) == 12


def test_an_operand_of_another_shape_is_not_written_over() -> None:
    assert size(result(4, result(8), inplace=True)) == 12


def test_an_output_is_neither_freed_nor_written_over() -> None:
    kept = result(4, output=True)
    assert size(result(4, result(4, kept, inplace=True))) == 12


def test_the_smallest_hole_that_fits_is_taken() -> None:
    """A hole of 8 stands before one of 4; had 4 gone into the first, the 8 after it would go to the end."""
    big, wall, small, end = result(8), result(1), result(4), result(1)
    late = result(4)
    assert size(big, wall, small, end, store(Place.HOST, big, small), late, result(8, wall, end, late)) == 14


def test_holes_side_by_side_become_one() -> None:
    first, second, wall = result(4), result(4), result(1)
    freed = store(Place.HOST, first), store(Place.HOST, second)
    assert size(first, second, wall, *freed, result(8, wall)) == 9


def test_a_view_keeps_what_it_looks_at() -> None:
    whole = result(8)
    part = view(whole, (KB,))
    other = result(4, whole)
    assert size(other, result(4, part, other)) == 16


def test_what_a_view_looks_at_is_freed_with_its_last_reader() -> None:
    whole = result(8)
    seen = result(4, view(whole, (KB,)))
    assert size(seen, result(8, seen)) == 12


def test_a_view_is_not_written_over() -> None:
    whole = result(4)
    assert size(result(4, view(whole, whole.shape), inplace=True)) == 8


def test_an_input_that_nobody_reads_has_room_all_the_same() -> None:
    assert size(Node((KB,)), result(4)) == 8


def test_weights_and_caches_take_no_room() -> None:
    assert size(EXTERNAL, store(Place.HOST, result(4), EXTERNAL)) == 4


def test_room_behind_a_result_is_room() -> None:
    wide = Node((KB,), sources=(EXTERNAL,), extra_bytes=3 * KB)
    assert size(wide) == 7


def test_blocks_are_padded() -> None:
    graph = Graph()
    graph.expand(Node((1,), sources=(Node((1,), sources=(EXTERNAL,)),)))
    assert buffers(graph)[Place.HOST] == 64
    graph = Graph()
    graph.expand(Node((1,), sources=(EXTERNAL,), place=Place.DEVICE))
    assert buffers(graph)[Place.DEVICE] == 128


def test_what_a_card_reads_from_the_host_is_copied_once_when_its_part_begins() -> None:
    told = Node((KB,))
    first = result(8, told, place=Place.DEVICE)
    last = result(8, first, told, place=Place.DEVICE)
    assert size(last, place=Place.DEVICE) == 4 + 16
    assert size(last) == 4


def test_the_hosts_result_is_kept_until_it_was_copied() -> None:
    looked_up = result(4, place=Place.HOST)
    end = result(4, looked_up, place=Place.DEVICE)
    assert size(end, place=Place.DEVICE) == 8
    assert size(end) == 4


def test_a_copy_is_freed_like_any_operand() -> None:
    looked_up = result(4)
    first = result(4, looked_up, place=Place.DEVICE)
    second = result(4, first, place=Place.DEVICE)
    assert size(second, place=Place.DEVICE) == 8
