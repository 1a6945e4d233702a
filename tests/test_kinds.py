"""Presets for embeddings and for ranking on the real engine, started by the OpenAI SDK's first request beside a chat preset.

``tiny`` has no head to rank with: the engine ranks all the same, by scores that mean nothing and differ from start to start.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest

from supervisor import engine
from tests.conftest import Box, Client, bare_engine

KINDS = {
    "words": "kind: embedding\npooling: mean\n",
    "ranker": "kind: rerank\n",
}
TEXTS = ["The quick brown fox", "Rome is a city", "é"]
QUESTION = {"query": "a city", "documents": ["Rome", "a stone", "Oslo"]}


@pytest.fixture(scope="module")
def client(real_box: Box, tiny_model: Path) -> Client:
    real_box.home.presets.mkdir(parents=True)
    for name, kind in KINDS.items():
        text = f"{kind}model: {{path: {json.dumps(str(tiny_model))}}}\ncontext: 1024\nthreads: 1\n"
        (real_box.home.presets / f"{name}.yaml").write_text(text)
    return real_box.up("--set", "threads=1", "--set", "context=1024", "--set", "slots=1")


@pytest.fixture(scope="module")
def sdk(client: Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{client.address}/v1", api_key="-", max_retries=0) as found:
        yield found


def test_embeddings_are_the_engines_own(sdk: openai.OpenAI, real_engine: engine.Engine, tiny_model: Path) -> None:
    ours = sdk.embeddings.create(model="words", input=TEXTS, encoding_format="float")
    with bare_engine(real_engine.server, tiny_model, "--embeddings", "--pooling", "mean") as engine_client:
        theirs = engine_client.post("/v1/embeddings", json={"input": TEXTS}).json()
    assert [each.index for each in ours.data] == [0, 1, 2]
    for each, other in zip(ours.data, theirs["data"], strict=True):
        assert each.embedding == pytest.approx(other["embedding"], abs=1e-4)
    assert sum(value * value for value in ours.data[0].embedding) == pytest.approx(1, abs=1e-3)  # normalised
    assert ours.data[0].embedding != pytest.approx(ours.data[1].embedding, abs=1e-2)
    packed = sdk.embeddings.create(model="words", input=TEXTS[0])  # which the SDK asks for, and unpacks, in base64
    assert packed.data[0].embedding == pytest.approx(ours.data[0].embedding, abs=1e-4)


def test_base64_passes_as_the_engine_wrote_it(client: Client) -> None:
    body = {"model": "words", "input": TEXTS[1]}
    with client.http as http:
        packed = http.post("/v1/embeddings", json={**body, "encoding_format": "base64"}).json()
        plain = http.post("/v1/embeddings", json=body).json()
    raw = base64.b64decode(packed["data"][0]["embedding"])
    assert struct.unpack(f"<{len(raw) // 4}f", raw) == pytest.approx(plain["data"][0]["embedding"], abs=1e-4)


def test_documents_are_ranked_best_first(sdk: openai.OpenAI) -> None:
    reply = sdk.post("/rerank", body={"model": "ranker", **QUESTION}, cast_to=httpx2.Response).json()
    assert sorted(each["index"] for each in reply["results"]) == [0, 1, 2]
    scores = [each["relevance_score"] for each in reply["results"]]
    assert scores == sorted(scores, reverse=True)


def test_all_three_run_beside_one_another(client: Client, sdk: openai.OpenAI) -> None:
    sdk.embeddings.create(model="words", input="a")
    sdk.post("/rerank", body={"model": "ranker", **QUESTION}, cast_to=object)
    sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=2)
    states = json.loads(client.box.llmctl("status", "--json").stdout)["presets"]
    assert {each["name"]: each["state"] for each in states} == {"tiny": "ready", "words": "ready", "ranker": "ready"}
    with pytest.raises(openai.BadRequestError) as raised:
        sdk.chat.completions.create(model="words", messages=[{"role": "user", "content": "Hello"}])
    assert raised.value.code == "wrong_kind"
    assert raised.value.body["try"] == '"model": "tiny"'  # type: ignore[index]
