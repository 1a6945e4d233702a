"""Server-sent events in, payloads out, however the network cut them."""

from __future__ import annotations

import json
import random
import time

import pytest

from supervisor import sse
from supervisor.errors import Error

MIXED = (
    b": hello\n\n"
    b"\n\r\n"
    b'data: {"a":1}\n\n'
    b"event: delta\r\nid: 7\r\nretry: 10\r\ndata:  two spaces\r\n\r\n"
    b"data: first\ndata\ndata:third\n\n"
    b":\n\n"
    b"database: no field of ours\n\n"
    b"data:\n\n"
    b"event: alone\n\n"
    b"data: " + "é🎉\rß".encode() + b"\n:in between\n\n"
    b"data: [DONE]\n\n"
    b"data: without an end"
)
PAYLOADS = [b'{"a":1}', b" two spaces", b"first\n\nthird", b"", "é🎉\rß".encode(), b"[DONE]"]


def feed(parser: sse.Parser, chunks: list[bytes]) -> list[bytes]:
    return [payload for chunk in chunks for payload in parser.feed(chunk)]


def test_whole() -> None:
    assert sse.Parser().feed(MIXED) == PAYLOADS


@pytest.mark.parametrize("cut", range(len(MIXED) + 1))
def test_cut_once_anywhere(cut: int) -> None:
    assert feed(sse.Parser(), [MIXED[:cut], MIXED[cut:]]) == PAYLOADS


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_cut_into_pieces(size: int) -> None:
    assert feed(sse.Parser(), [MIXED[at : at + size] for at in range(0, len(MIXED), size)]) == PAYLOADS


def test_cut_at_random() -> None:
    dice = random.Random(11)
    stream = MIXED[: -len(b"data: without an end")] * 5
    for _ in range(200):
        cuts = sorted(dice.choices(range(len(stream)), k=dice.randrange(12)))
        assert feed(sse.Parser(), [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]) == PAYLOADS * 5


def test_an_event_is_handed_over_with_its_last_byte() -> None:
    parser = sse.Parser()
    assert parser.feed(b"data: x\n") == []
    assert "1 lines" in repr(parser)
    assert parser.feed(b"\n") == [b"x"]


def test_crlf_cut_between_its_bytes() -> None:
    assert feed(sse.Parser(), [b"data: x\r", b"\n\r", b"\n"]) == [b"x"]


@pytest.mark.parametrize(
    "stream",
    [b"data: " + b"x" * 101 + b"\n\n", b"data: " + b"x" * 101, b":" + b"x" * 101, b"data: xxxx\n" * 25, b"data\n" * 101],
    ids=["one line", "no line end", "comment", "lines", "empty lines"],
)
def test_a_larger_event_is_an_error(stream: bytes) -> None:
    for size in (1, len(stream)):
        with pytest.raises(Error, match="more than 100 bytes"):
            feed(sse.Parser(max_event_bytes=100), [stream[at : at + size] for at in range(0, len(stream), size)])


def test_the_limit_is_an_events_and_not_the_streams() -> None:
    parser = sse.Parser(max_event_bytes=100)
    stream = (b"data: " + b"x" * 90 + b"\n\n") * 50
    assert feed(parser, [stream]) == [b"x" * 90] * 50


def test_a_large_event_in_small_pieces_costs_no_more_than_its_bytes() -> None:
    # 8 MiB in 64 KiB pieces took 4 ms, in 128 byte pieces 50 ms; a buffer copied for each piece would take minutes.
    event = b"data: " + b"x" * (8 << 20) + b"\n\n"
    began = time.process_time()
    assert feed(sse.Parser(), [event[at : at + 128] for at in range(0, len(event), 128)]) == [event[6:-2]]
    assert time.process_time() - began < 5


def test_written_events_are_read_back() -> None:
    payload = {"text": "é\n\rß\ud800", "n": [1, 2]}
    stream = sse.comment() + sse.comment("waiting") + sse.event(payload) + sse.event(payload, name="delta")
    first, second = sse.Parser().feed(stream)
    assert first == second
    assert json.loads(first) == {"text": "é\n\rß?", "n": [1, 2]}


def test_the_bytes_of_what_is_written() -> None:
    error = {"error": {"message": "the engine died", "code": "engine_died"}}
    inside = b'data: {"error":{"message":"the engine died","code":"engine_died"}}\n\n'
    assert sse.comment() == b":\n\n"
    assert sse.comment("waiting") == b": waiting\n\n"
    assert sse.event(error) == inside
    assert sse.event(error, name="error") == b"event: error\n" + inside
