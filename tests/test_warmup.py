"""What a fresh child is asked, and that the first client finds it in the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from supervisor import preset, warmup
from supervisor.preset import Preset
from tests import fakes
from tests.conftest import Box, until
from tests.plans import NOWHERE

LIBRARIAN = "You are a careful librarian who answers in one short sentence and never forgets to be polite to the reader."


def load(name: str, *overrides: str) -> Preset:
    return preset.load(name, NOWHERE, overrides=overrides)


def test_on_the_cpu_a_few_tokens_do() -> None:
    (question,) = warmup.questions(load("tiny"))
    assert question.path == "/completion"
    assert (len(question.body["prompt"]), question.body["n_predict"]) == (8, 8)


@pytest.mark.parametrize(
    ("overrides", "prompt", "answer"),
    [((), 512, 4), (("speculative=off",), 512, 2), (("ubatch=1024", "draft_length=5"), 1024, 7), (("context=256",), 252, 4)],
)
def test_on_a_card_a_whole_computed_batch_and_one_draft(overrides: tuple[str, ...], prompt: int, answer: int) -> None:
    (question,) = warmup.questions(load("turbo_4b", *overrides))
    assert (len(question.body["prompt"]), question.body["n_predict"]) == (prompt, answer)


@pytest.mark.parametrize(("kind", "path"), [("embedding", "/v1/embeddings"), ("rerank", "/v1/rerank")])
def test_each_kind_by_its_own_route(kind: str, path: str) -> None:
    assert [question.path for question in warmup.questions(load("tiny", f"kind={kind}"))] == [path]


def test_the_warm_prompt_comes_last_by_the_route_that_clients_use() -> None:
    *_, question = warmup.questions(load("tiny", "warm_prompt=Be brief."))
    assert question.path == "/v1/chat/completions"
    assert question.body["messages"][0] == {"role": "system", "content": "Be brief."}


def chat(box: Box, *overrides: str) -> dict[str, Any]:
    """The ``timings`` of the first chat behind :data:`LIBRARIAN`."""
    client = box.up(*(word for override in (*overrides, f"warm_prompt={LIBRARIAN}") for word in ("--set", override)))
    messages = [{"role": "system", "content": LIBRARIAN}, {"role": "user", "content": "Which book?"}]
    with client.http as http:
        reply = http.post("/v1/chat/completions", json={"model": "tiny", "max_tokens": 2, "messages": messages}).json()
        rest = {"cache_prompt": False}
        tokens = http.post(
            "/v1/chat/completions", json={"model": "tiny", "max_tokens": 1, "messages": messages[:1]} | rest
        ).json()
    assert client.stop() == 0
    return reply["timings"] | {"system_tokens": tokens["usage"]["prompt_tokens"]}


def test_the_first_request_finds_the_warm_prompt_in_the_cache(real_box: Box) -> None:
    timings = chat(real_box, "threads=1", "slots=2", "context=4096")
    assert timings["cache_n"] >= timings["system_tokens"] - 4  # the turn's end is the next message's
    assert timings["prompt_n"] < timings["cache_n"]


def test_a_warm_prompt_that_does_not_fit_is_given_up_at_once(fake_box: Callable[..., Box]) -> None:
    error = {"code": 400, "message": "request (5031 tokens) exceeds the available context size (2048 tokens)", "type": "x"}
    box = fake_box(healthy_requests=1, error_status=400, error_body=error)
    process = box.start("--set", "warm_prompt=long")
    assert process.wait(60) == 8
    log = (box.root / "up.log").read_text()
    assert "tiny refused its warm_prompt: request (5031 tokens) exceeds the available context size (2048 tokens)" in log
    assert len(fakes.events(box.engine.parent, "start")) == 1
    until(lambda: box.left_behind() == [])
