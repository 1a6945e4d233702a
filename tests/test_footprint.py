"""The control plane stays small: under 80 MB after 10,000 streamed requests, and not growing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import psutil
import pytest

from tests.conftest import Box, Client

MOST_BYTES = 80_000_000
LEAK_BYTES = 400
"""A stream that leaves any of its objects behind leaves more than this. Seen over 25,000 streams after the first 5,000: 8 bytes each."""
AT_ONCE = 8


async def streams(client: Client, count: int) -> None:
    """So many streamed chats, eight at a time, each connection used for all of its requests."""
    host, _, port = client.address.removeprefix("http://").rpartition(":")
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"

    async def one_client() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in range(count // AT_ONCE):
            writer.write(head.encode() + body)
            reply = await reader.readuntil(b"\r\n0\r\n\r\n")
            assert reply.startswith(b"HTTP/1.1 200 ")
            assert b"data: [DONE]" in reply
        writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(one_client())


@pytest.mark.slow
def test_ten_thousand_streams_leave_it_small_and_not_growing(fake_box: Callable[..., Box]) -> None:
    client = fake_box(tokens=5).up("--set", f"slots={AT_ONCE}")
    llmctl = psutil.Process(client.process.pid)
    asyncio.run(streams(client, 5000))
    half = llmctl.memory_info().rss
    asyncio.run(streams(client, 5000))
    whole = llmctl.memory_info().rss
    print(f"RSS after 5,000: {half / 1e6:.1f} MB, after 10,000: {whole / 1e6:.1f} MB")
    assert whole < MOST_BYTES
    assert whole - half < 5000 * LEAK_BYTES
    rows = client.box.closed_records(10_000)
    assert [row["status"] for row in rows] == ["ok"] * 10_000
    assert len({row["id"] for row in rows}) == 10_000
