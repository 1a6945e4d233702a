"""A request is heard as it came: what was recorded from the real engine, cut anywhere, and servers that misbehave. Over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.exchange import Address, Heard, Wires
from tests.test_meter import RECORDED, truth

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nX-Request-Id: r1\r\n\r\n"
END = b"0\r\n\r\n"
Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


def piece(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunk(text: str, **more: Any) -> bytes:
    return piece(b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}], **more}).encode() + b"\n\n")


@asynccontextmanager
async def server(answer: Answer, left: asyncio.Event | None = None) -> AsyncIterator[Wires]:
    """Answers each request on a connection by ``answer``, which is given the request's body; ``left`` is set when a client has left."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await answer(await reader.readexactly(length), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            if left is not None:
                left.set()
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        wires = Wires(Address.of(f"http://127.0.0.1:{port}", "secret"))
        yield wires
        wires.close()
        await asyncio.sleep(0)


async def ask(wires: Wires, leaves_s: float | None = None, timeout_s: float = 20.0) -> Heard:
    heard = Heard()
    await wires.exchange("/v1/chat/completions", {"a": 1}, heard, timeout_s=timeout_s, leaves_s=leaves_s)
    return heard


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize("size", [7, 100_000])
def test_what_the_engine_says_is_heard_however_it_is_cut(path: Path, size: int) -> None:
    stream = path.read_bytes()

    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"".join(piece(stream[at : at + size]) for at in range(0, len(stream), size)) + END)

    async def hear() -> Heard:
        async with server(answer) as wires:
            return await ask(wires)

    heard = asyncio.run(hear())
    assert (heard.error, heard.status, heard.id) == (None, 200, "r1")
    prompt, cached, completion = truth(stream)
    read = heard.reading
    assert (read.prompt_tokens, read.cached_tokens, read.completion_tokens) == (prompt, cached, completion)
    assert heard.arrivals_s
    assert heard.first_s == heard.arrivals_s[0]
    assert heard.output_s is not None
    assert heard.sent_s < heard.first_s <= heard.output_s <= heard.arrivals_s[-1] <= (heard.ended_s or 0)


def test_a_servers_words_are_heard_that_speaks_otherwise() -> None:
    """Ollama says who speaks in every event; thoughts have several names; lines may end by CRLF, and the last event not at all."""
    events = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "", "reasoning": "Hm"}}]},
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hello"}}]},
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}},
    ]
    lines = [b": ping", *(b"data: " + json.dumps(event).encode() for event in events), b"data: [DONE]"]

    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + piece(b"\r\n\r\n".join(lines)) + END)

    async def hear() -> Heard:
        async with server(answer) as wires:
            return await ask(wires)

    heard = asyncio.run(hear())
    assert heard.texts == ["Hello"]
    assert len(heard.arrivals_s) == 2
    read = heard.reading
    assert (read.prompt_tokens, read.cached_tokens, read.completion_tokens, read.finish_reason) == (9, 4, 2, "stop")


def test_a_connection_is_used_again_and_the_key_and_body_arrive() -> None:
    seen: list[tuple[int, bytes]] = []

    async def answer(body: bytes, writer: asyncio.StreamWriter) -> None:
        seen.append((writer.get_extra_info("peername")[1], body))
        writer.write(HEAD + chunk("a") + END)

    async def hear() -> None:
        async with server(answer) as wires:
            for _ in range(3):
                assert (await ask(wires)).error is None

    asyncio.run(hear())
    assert len({port for port, _ in seen}) == 1
    assert seen[0][1] == b'{"a":1}'


def test_a_connection_that_was_closed_meanwhile_is_no_error() -> None:
    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk("a") + END)
        writer.write_eof()  # it was promised to stay

    async def hear() -> list[str | None]:
        async with server(answer) as wires:
            return [(await ask(wires)).error for _ in range(4)]

    assert asyncio.run(hear()) == [None] * 4


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (HEAD + chunk("a"), "the connection was cut"),
        (b"", "the connection was closed unanswered"),
        (b"SSH-2.0\r\n", "no HTTP: "),
        (HEAD + piece(b'data: {"error":{"message":"Compute error.\\n","code":500}}\n\n') + END, "Compute error."),
        (b"HTTP/1.1 503 X\r\nContent-Length: 33\r\n\r\n" + b'{"error":{"message":"Loading m"}}', "503 Loading m"),
        (b"HTTP/1.1 404 X\r\nContent-Length: 3\r\n\r\nabc", "404"),
    ],
)
def test_what_goes_wrong_is_in_what_is_heard(sent: bytes, error: str) -> None:
    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await writer.drain()
        writer.close()

    async def hear() -> Heard:
        async with server(answer) as wires:
            return await ask(wires)

    heard = asyncio.run(hear())
    assert heard.error is not None
    assert heard.error.startswith(error)
    assert heard.ended_s is not None


def test_nobody_there_is_said() -> None:
    async def hear() -> Heard:
        async with server(lambda *_: asyncio.sleep(0)) as wires:
            address = wires.address
        return await ask(Wires(address))

    heard = asyncio.run(hear())
    assert heard.error is not None
    assert heard.error.startswith("no connection: ")


def test_a_client_leaves_when_it_was_to_and_takes_what_had_come() -> None:
    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk("a") + chunk("b"))

    async def hear() -> Heard:
        left = asyncio.Event()
        async with server(answer, left) as wires:
            heard = await ask(wires, leaves_s=0.2)
            await asyncio.wait_for(left.wait(), 20)
            return heard

    heard = asyncio.run(hear())
    assert (heard.left, heard.error, heard.texts) == (True, None, ["a", "b"])


def test_silence_has_an_end() -> None:
    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)

    async def hear() -> Heard:
        async with server(answer) as wires:
            return await ask(wires, timeout_s=0.1)

    assert asyncio.run(hear()).error == "no whole answer within 0.1 s"


def test_addresses() -> None:
    assert Address.of("https://[::1]/gate") == Address("::1", 443, True, "/gate")
    request = Address.of("http://[::1]:9", "k").request("/v1/x", {})
    assert request.startswith(b"POST /v1/x HTTP/1.1\r\nHost: [::1]:9\r\n")
    assert b"Authorization: Bearer k\r\n" in request
    assert "k" not in repr(Address("h", 1, False, "", "k")).replace("key", "")
