"""Guesses ahead, counted by the real engine: what a client is told, what the record keeps, and a child that is changed for them."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from supervisor import accounts, engine, rundir, speculation
from supervisor.admission import Ticket
from supervisor.arbiter import Arbiter
from supervisor.catalog import Catalog
from supervisor.lifecycle import State
from supervisor.record import Record, Run
from supervisor.sse import Parser
from supervisor.ward import Ward
from tests.conftest import WAIT_S, Box, Client, until
from tests.shelf import Visitor
from tests.shelf import state as becomes

OVER_AND_OVER = "Repeat this line twenty times: the quick brown fox jumps over the lazy dog and runs home again to sleep.\n" * 12
CHAT = {"messages": [{"role": "user", "content": OVER_AND_OVER}], "max_tokens": 100, "temperature": 0}
COMPLETION = {"prompt": OVER_AND_OVER, "max_tokens": 100, "temperature": 0, "cache_prompt": False}


@pytest.fixture(scope="module")
def guessing(real_box: Box, tiny: Client) -> Client:
    """``tiny`` beside two presets that guess ahead: by itself, and by what was said before."""
    common = {"threads": 1, "slots": 1, "sampling": "benchmark", "batch": 512, "ubatch": 512, "cache_ram": 0}
    itself = {"path": str(real_box.model)}
    real_box.preset("itself", **common, speculative="draft", draft_model=itself, draft_length=3, speculative_next=["ngram"])
    real_box.preset("quoting", **common, speculative="ngram")
    return tiny


def timings(client: Client, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The request's id, and the engine's timings as the client sees them, streamed or not."""
    with client.http as http:
        reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        return reply.headers["x-request-id"], reply.json()["timings"]
    payloads = [json.loads(each) for each in Parser().feed(reply.content) if each != b"[DONE]"]
    return reply.headers["x-request-id"], next(each["timings"] for each in reversed(payloads) if "timings" in each)


def record(client: Client, id_: str) -> tuple[Record, Run]:
    """What is kept of it, once it is closed."""

    def kept() -> tuple[Record, Run] | None:
        found = accounts.find(client.box.home.ledger, id_)
        return (found[0][0], found[0][1]) if found and found[0][0].status != "open" and found[0][1] is not None else None

    found: tuple[Record, Run] = until(kept)
    return found


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("itself", "/v1/chat/completions", CHAT | {"max_tokens": 20}),
        ("itself", "/v1/completions", COMPLETION | {"max_tokens": 20}),
        ("quoting", "/v1/completions", COMPLETION),  # which goes on with the text, and is guessed from it
    ],
    ids=["itself-chat", "itself-text", "quoting-text"],
)
def test_the_record_has_the_drafts_that_the_client_is_told_of(
    guessing: Client, name: str, path: str, body: dict[str, Any], stream: bool
) -> None:
    id_, seen = timings(guessing, path, {"model": name, "stream": stream, **body})
    kept, ran = record(guessing, id_)
    assert kept.preset == name
    assert (kept.draft_tokens, kept.draft_accepted) == (seen["draft_n"], seen["draft_n_accepted"])
    assert kept.completion_tokens == seen["predicted_n"]
    assert 0 < seen["draft_n_accepted"] <= seen["draft_n"]
    assert ran.speculative == {"itself": "draft", "quoting": "ngram"}[name]


def test_what_guesses_nothing_has_no_drafts(guessing: Client) -> None:
    id_, seen = timings(guessing, "/v1/chat/completions", {"model": "tiny", **CHAT, "max_tokens": 5})
    kept, ran = record(guessing, id_)
    assert "draft_n" not in seen
    assert (kept.draft_tokens, kept.draft_accepted, ran.speculative) == (None, None, "off")


def test_the_status_tells_how_it_guesses_and_how_well(guessing: Client) -> None:
    _, seen = timings(guessing, "/v1/completions", {"model": "itself", **COMPLETION, "max_tokens": 30})
    assert seen["draft_n"] > 0

    def told() -> dict[str, Any] | None:
        found: dict[str, Any] = guessing.presets()["itself"]["speculative"]
        return found if found["acceptance"] is not None else None

    found = until(told)
    assert (found["method"], found["asked"], found["why"]) == ("draft", "draft", None)
    assert 0 < found["acceptance"] <= 1


# The policy, with the real catalog, plans and engine; only how much evidence it takes and how long it is quiet are less.


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch, real_engine: engine.Engine) -> None:
    """Each request is a lot, eight of them are enough, and an idle moment is short."""
    monkeypatch.setenv("LLMCTL_ENGINE", str(real_engine.server))
    monkeypatch.setattr(speculation, "LOT", 1)
    monkeypatch.setattr(speculation, "LOTS", 8)
    monkeypatch.setattr(speculation, "LONG_S", 0.0)
    monkeypatch.setattr("supervisor.ward.QUIET_S", 0.1)
    monkeypatch.setattr(speculation, "QUIET_S", 0.1)


async def ask(arbiter: Arbiter, name: str, **fields: Any) -> None:
    """A request whose drafts are learnt."""
    ward, ticket = arbiter.ward(name), Ticket()
    await ward.line.enter(ticket, Visitor())
    try:
        assert ward.upstream is not None
        assert ward.launch is not None
        method = ward.launch.preset.speculative
        body = {"prompt": "Once upon a time", "max_tokens": 4, "cache_prompt": False, "stream": True, **fields}
        exchange, answer = ward.upstream.request("/v1/completions", json.dumps(body).encode()), bytearray()
        try:
            assert await exchange.head() == 200
            exchange.pipe(answer.extend)
            await exchange.ended()
        finally:
            exchange.abort()
    finally:
        ward.line.leave(ticket, served=True)
    payloads = [json.loads(each) for each in Parser().feed(bytes(answer)) if each != b"[DONE]"]
    last = payloads[-1]["timings"]
    arbiter.learn(name, method, last.get("draft_n", 0), last.get("draft_n_accepted", 0))


def with_children(box: Box, test: Callable[[Arbiter], Awaitable[None]]) -> None:
    async def run() -> None:
        with rundir.claim(box.home.run, (), "token") as owned:
            arbiter = Arbiter(Catalog(box.home, (), owned), children_changed=owned.note_children)
            async with asyncio.timeout(WAIT_S), arbiter.run():
                await test(arbiter)

    uvloop.run(run())


@pytest.fixture
def box(tmp_path: Path, real_engine: engine.Engine, tiny_model: Path) -> Iterator[Box]:
    made = Box(tmp_path / "home", real_engine.server, tiny_model)
    common = {"threads": 1, "slots": 1, "batch": 512, "ubatch": 512, "cache_ram": 0, "context": 512, "sampling": "benchmark"}
    made.preset(
        "a", **common, speculative="draft", draft_model={"path": str(tiny_model)}, draft_length=3, speculative_next=["ngram"]
    )
    yield made
    made.close()


def words(ward: Ward) -> str:
    """What the running child was told, by the machine's own account."""
    assert ward.child is not None
    return Path(f"/proc/{ward.child.pid}/cmdline").read_text().replace("\0", " ")


def test_a_model_that_guesses_for_itself_is_always_right_and_stays(box: Box, hasty: None) -> None:
    async def test(arbiter: Arbiter) -> None:
        for _ in range(speculation.LOTS + 3):
            await ask(arbiter, "a", temperature=0)
        ward = arbiter.ward("a")
        assert ward.guessing["acceptance"] is not None
        assert ward.guessing["acceptance"] > speculation.GOOD
        assert ward.changes_s(time.monotonic()) == math.inf  # nothing is due, however long it is idle
        assert (ward.state, ward.watch.method) == (State.READY, "draft")
        assert "draft-simple" in words(ward)

    with_children(box, test)


def test_one_whose_guesses_are_wrong_is_changed_while_it_is_idle(box: Box, hasty: None) -> None:
    """At a temperature of 5 what is said is chance, and what it guesses of it is wrong."""

    async def test(arbiter: Arbiter) -> None:
        chance = {"temperature": 5, "top_k": 0, "top_p": 1, "min_p": 0}
        await ask(arbiter, "a", **chance)
        ward = arbiter.ward("a")
        assert "draft-simple" in words(ward)
        while ward.watch.method == "draft":
            if ward.state is State.READY:
                await ask(arbiter, "a", **chance)
            await asyncio.sleep(0.3 if ward.watch.due_s < 0 else 0)
        await becomes(ward, State.STARTING)
        await becomes(ward, State.READY)
        assert "ngram-mod" in words(ward)
        assert "--model-draft" not in words(ward)
        assert (ward.guessing["method"], ward.guessing["asked"], ward.restarts) == ("ngram", "draft", 0)
        assert str(ward.guessing["why"]).endswith("% of what draft guessed was right")
        await ask(arbiter, "a", **chance)

    with_children(box, test)
