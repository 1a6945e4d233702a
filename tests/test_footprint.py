"""The control plane stays small: under 80 MB after 20,000 streamed requests, and not growing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import psutil
import pytest

from supervisor import accounts
from tests.conftest import Box, Client, until

MOST_BYTES = 80_000_000
LEAK_BYTES = 400
"""A stream that leaves any of its objects behind leaves more than this. Seen over 25,000 streams after the first 5,000: 8 bytes each."""
AT_ONCE = 8
ROUND = 250
"""Streams between two looks at the ledger. A disk that stalls for a second leaves a second's records in memory, which is no leak."""


def served(client: Client, count: int) -> int:
    """Have so many streams served, round by round, each round's records on disk before the next; returns llmctl's RSS in bytes."""
    already = written(client)
    for done in range(ROUND, count + 1, ROUND):
        asyncio.run(streams(client, ROUND))
        until(lambda: written(client) == already + done)  # noqa: B023  # it is asked at once
    return int(psutil.Process(client.process.pid).memory_info().rss)


def written(client: Client) -> int:
    """Records of streams that ended well, on disk."""
    return sum(row["ok"] or 0 for row in accounts.sums(client.box.home.ledger))


async def streams(client: Client, count: int) -> None:
    """So many streamed chats, eight at a time, each connection used for all of its requests."""
    host, _, port = client.address.removeprefix("http://").rpartition(":")
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"

    async def one_client(share: int) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in range(share):
            writer.write(head.encode() + body)
            reply = await reader.readuntil(b"\r\n0\r\n\r\n")
            assert reply.startswith(b"HTTP/1.1 200 ")
            assert b"data: [DONE]" in reply
        writer.close()

    async with asyncio.TaskGroup() as group:
        for number in range(AT_ONCE):
            group.create_task(one_client(len(range(number, count, AT_ONCE))))


@pytest.mark.slow
def test_twenty_thousand_streams_leave_it_small_and_not_growing(fake_box: Callable[..., Box]) -> None:
    client = fake_box(tokens=5).up("--set", f"slots={AT_ONCE}")
    half = served(client, 5000)
    whole = served(client, 15_000)
    print(f"RSS after 5,000: {half / 1e6:.1f} MB, after 20,000: {whole / 1e6:.1f} MB")
    assert whole < MOST_BYTES
    assert whole - half < 15_000 * LEAK_BYTES
    rows = client.box.closed_records(20_000)
    assert [row["status"] for row in rows] == ["ok"] * 20_000
    assert len({row["id"] for row in rows}) == 20_000
