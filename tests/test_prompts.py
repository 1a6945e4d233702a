"""Prompts are as long as they are to be, by the server's own count, and begin alike as far as they are to."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bench import target
from bench.ask import Answer, Ask, Words
from bench.prompts import Writer
from bench.target import Target
from bench.workload import APIS, Api
from supervisor import engine, paths
from supervisor.errors import Error, Exit
from tests.conftest import Client, bare_engine
from tests.fakes import peers
from tests.fakes.peers import Peer

GO_ON = "Go on."
ASKED = "What is said here? Answer in one sentence."


async def made(url: str, home: paths.Home, api: Api, said: list[str] | None = None) -> Writer:
    found = await target.find(url, home=home)
    return await Writer.of(found, api, (said if said is not None else []).append, (GO_ON, ASKED))


def prompt(number: int, tokens: int, *pieces: Words | Answer, **more: Any) -> Ask:
    return Ask(number=number, prompt=tokens, answer=8, pieces=(*pieces, Words(f"own {number}", tokens)), **more)


@pytest.fixture
def home(tmp_path: Path) -> paths.Home:
    return paths.home({"LLMCTL_HOME": str(tmp_path)})


@pytest.fixture(params=APIS)
def writer(request: pytest.FixtureRequest, home: paths.Home) -> Iterator[Writer]:
    """For a toy tokenizer that shows its tokens."""
    with Peer(peers.vllm("m")).served() as peer:
        yield asyncio.run(made(peer.url, home, request.param))


def tokens(writer: Writer, ask: Ask, answers: dict[int, list[str]] | None = None) -> list[int]:
    return peers.prompt_tokens(writer.body(ask, answers or {})[1])


def test_words_that_are_two_tokens_are_not_used(writer: Writer) -> None:
    assert not peers.SPLIT & set(writer.known)
    assert len(writer.known) > 400


def test_a_prompt_is_as_long_as_it_is_to_be(writer: Writer) -> None:
    draw = random.Random(1)
    for number in range(50):
        length = draw.randint(40, 2000)
        ask = prompt(number, length, instruction=draw.choice(("", GO_ON, ASKED)), api=writer.api)
        assert len(tokens(writer, ask)) == length
        if ask.instruction:
            assert ask.instruction in json.dumps(writer.body(ask, {})[1])


def test_prompts_with_equal_pieces_begin_alike_so_far(writer: Writer) -> None:
    for shared in (30, 100, 151):
        one, other = (tokens(writer, prompt(number, 200, Words("shared", shared))) for number in (0, 1))
        assert one[:shared] == other[:shared]
        assert one[shared : shared + 8] != other[shared : shared + 8]
        long = tokens(writer, Ask(number=0, prompt=400, answer=1, pieces=(Words("shared", 400),)))
        assert long[:shared] == one[:shared]


def test_a_dialogue_goes_on_from_its_answer(writer: Writer) -> None:
    answer = [" one", " two", " three", " four"] if writer.api == "text" else ["one", " two", " three", " four"]
    first = prompt(0, 90)
    second = prompt(1, 150, *first.pieces, Answer(0, 3))
    third = prompt(2, 190, *second.pieces, Answer(1, 4))
    before = tokens(writer, first)
    after = tokens(writer, second, {0: answer})
    last = tokens(writer, third, {0: answer, 1: answer})
    assert [len(before), len(after), len(last)] == [90, 150, 190]
    assert after[:93] == before + peers.tokens("".join(answer[:3]))
    assert last[:154] == after + peers.tokens("".join(answer))


def test_an_answer_that_is_not_there_yet_is_as_long_as_it_is(writer: Writer) -> None:
    for so_far in ([], ["one"]):
        ask = prompt(1, 150, Words("own 0", 90), Answer(0, 30))
        assert len(tokens(writer, ask, {0: so_far})) == pytest.approx(150, abs=1)
    assert len(tokens(writer, ask)) == 150


def test_what_leaves_no_room_goes_and_less_than_a_template_is_refused(writer: Writer) -> None:
    least = writer.frame.head + writer.frame.tail
    assert len(tokens(writer, prompt(0, least, instruction=ASKED))) == least
    with pytest.raises(Error) as caught:
        writer.body(prompt(0, least - 1), {})
    assert caught.value.exit == Exit.USAGE
    assert f"{least} tokens" in caught.value.message


def test_a_request_says_how_long_its_answer_is_to_be(writer: Writer) -> None:
    path, body = writer.body(prompt(0, 60), {})
    assert path == {"chat": "/v1/chat/completions", "text": "/v1/completions"}[writer.api]
    told = {name: value for name, value in body.items() if name not in ("messages", "prompt")}
    options = {"max_tokens": 8, "min_tokens": 8, "ignore_eos": True, "temperature": 0, "seed": 0}
    assert told == {"model": "m", "stream": True, "stream_options": {"include_usage": True}, **options}
    _, whole = writer.body(prompt(0, 60, stream=False, preset="other"), {})
    assert (whole["stream"], whole["model"], "stream_options" in whole) == (False, "other", False)


def test_a_recorded_body_goes_as_it_was(writer: Writer) -> None:
    body: dict[str, object] = {"model": "x", "input": "Hi", "stream": False}
    ask = Ask(number=0, prompt=9, answer=1, pieces=(), body=body, path="/v1/responses", preset="m2")
    assert writer.body(ask, {}) == ("/v1/responses", {"model": "m2", "input": "Hi", "stream": True})
    assert body["stream"] is False


@pytest.mark.parametrize("api", APIS)
def test_without_a_tokenizer_lengths_are_near(api: Api, home: paths.Home) -> None:
    said: list[str] = []
    with Peer(peers.ollama("m")).served() as peer:
        writer = asyncio.run(made(peer.url, home, api, said))
    assert [line.partition(": ")[0] for line in said] == [
        "ollama m can't be made to ignore an answer's end",
        "ollama m shows no tokens",
    ]
    for length in (100, 500, 2000):
        ask = prompt(0, length, Words("shared", 60), instruction=ASKED, api=api)
        assert len(tokens(writer, ask)) == pytest.approx(length, rel=0.05)
    assert not {"ignore_eos", "min_tokens"} & writer.body(ask, {})[1].keys()


def test_a_server_that_tells_no_usage_is_asked_for_words(home: paths.Home) -> None:
    routes = peers.openai("m") | {"/v1/chat/completions": lambda _: (200, {"choices": []})}
    with Peer(routes).served() as peer:
        writer = asyncio.run(made(peer.url, home, "chat"))
    content = writer.body(prompt(0, 100), {})[1]["messages"][0]["content"]
    assert len(content.split()) == 101


async def usage(there: Target, writer: Writer, ask: Ask) -> tuple[int, int]:
    """Prompt tokens of a request and those that were in the cache, as the server says."""
    path, body = writer.body(ask, {})
    async with httpx2.AsyncClient(timeout=60) as http:
        told = (await http.post(there.url + path, json=body | {"max_tokens": 1})).json()
    return told["usage"]["prompt_tokens"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def one_slot(real_engine: engine.Engine, tiny_model: Path) -> Iterator[str]:
    """The address of a llama-server whose cache is the last request's."""
    with bare_engine(real_engine.server, tiny_model, "-np", "1", "--no-warmup") as http:
        yield str(http.base_url).rstrip("/")


@pytest.mark.parametrize("api", APIS)
def test_the_real_engine_counts_and_caches_what_was_meant(api: Api, one_slot: str, home: paths.Home) -> None:
    async def go(url: str) -> None:
        writer = await made(url, home, api)
        assert len(writer.known) > 400
        draw = random.Random(2)
        for number in range(3):
            length = draw.randint(45, 90)
            ask = prompt(number, length, instruction=draw.choice(("", GO_ON, ASKED)), stream=False)
            assert (await usage(writer.target, writer, ask))[0] == length
        (_, _), (_, cached) = [
            await usage(writer.target, writer, prompt(number, 120, Words("shared", 64), stream=False)) for number in (8, 9)
        ]
        assert 63 <= cached < 66
        # A dialogue: what was said and answered is all there when it goes on.
        first = prompt(10, 60)
        _, body = writer.body(first, {})
        said: list[str] = []
        async with (
            httpx2.AsyncClient(timeout=60) as http,
            http.stream("POST", url + writer.body(first, {})[0], json=body) as reply,
        ):
            async for line in reply.aiter_lines():
                choice = (json.loads(line[6:])["choices"] or [{}])[0] if line.startswith("data: {") else {}
                if text := choice.get("text") or choice.get("delta", {}).get("content"):
                    said.append(text)
        path, body = writer.body(prompt(11, 100, *first.pieces, Answer(10, 8), stream=False), {10: said})
        async with httpx2.AsyncClient(timeout=60) as http:
            told = (await http.post(url + path, json=body | {"max_tokens": 1})).json()["usage"]
        assert told["prompt_tokens_details"]["cached_tokens"] >= 60 + 8 - 2
        assert abs(told["prompt_tokens"] - 100) <= 1

    asyncio.run(go(one_slot))


def test_llmctl_counts_what_was_meant(tiny: Client, home: paths.Home) -> None:
    async def go() -> None:
        writer = await made(tiny.address, home, "chat")
        for number, length in enumerate((50, 77)):
            ask = prompt(number, length, instruction=GO_ON, stream=False)
            assert (await usage(writer.target, writer, ask))[0] == length

    asyncio.run(go())
