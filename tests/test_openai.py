"""The OpenAI Python SDK against the real engine with ``tiny``: what a user's own program sees. The engine's faults are the fake's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.conftest import WAIT_S, Box, Client, until

HELLO = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def sdk(tiny: Client) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{tiny.address}/v1", api_key="-", timeout=WAIT_S, max_retries=0) as client:
        yield client


def test_a_stream_brings_tokens_and_ends_with_their_speed(sdk: OpenAI) -> None:
    chunks = list(sdk.chat.completions.create(model="tiny", messages=HELLO, stream=True, max_tokens=12, temperature=0))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text.strip()
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert chunks[-1].model_extra["timings"]["predicted_per_second"] > 0


def test_one_reply_says_what_the_stream_says(sdk: OpenAI) -> None:
    stream = sdk.chat.completions.create(model="tiny", messages=HELLO, stream=True, max_tokens=12, temperature=0)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    whole = sdk.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, temperature=0)
    assert whole.choices[0].message.content == streamed
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_usage_in_a_stream_when_asked_for(sdk: OpenAI) -> None:
    stream = sdk.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, max_tokens=5, stream_options={"include_usage": True}
    )
    usages = [chunk.usage for chunk in stream if chunk.usage]
    assert usages[-1].completion_tokens == 5


def test_cancelling_a_stream_frees_the_slot(sdk: OpenAI, tiny: Client) -> None:
    log = tiny.box.home.logs / "tiny.log"
    released = log.read_text().count("stop processing")
    before = len(tiny.box.records())
    stream = sdk.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, max_tokens=3000, extra_body={"ignore_eos": True}
    )
    for number, _ in enumerate(stream):
        if number == 5:
            stream.close()
            break
    row = tiny.box.closed_records(before + 1)[-1]
    assert row["status"] == "cancelled"
    assert row["completion_tokens"] >= 5
    until(lambda: log.read_text().count("stop processing") > released)


def test_completions(sdk: OpenAI) -> None:
    reply = sdk.completions.create(model="tiny", prompt="Once upon a time", max_tokens=5)
    assert reply.choices[0].text
    assert reply.usage.completion_tokens == 5


def test_the_list_of_models(sdk: OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["tiny"]


def test_a_response_streams_and_is_one_reply(sdk: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "Say hello.", "max_output_tokens": 12, "temperature": 0}
    events = list(sdk.responses.create(**asked, stream=True))
    streamed = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].type == "response.completed"
    whole = sdk.responses.create(**asked)
    assert whole.output_text == streamed == events[-1].response.output_text
    assert whole.usage.output_tokens == 12
    assert whole.status == "completed"


def test_a_response_that_begins_with_an_emoji(sdk: OpenAI) -> None:
    """The engine then tells before every piece that the response was created (server-task.cpp:1008)."""
    asked: dict[str, Any] = {
        "model": "tiny",
        "input": "Hi.",
        "max_output_tokens": 9,
        "extra_body": {"grammar": 'root ::= "🎉 hi"'},
    }
    events = list(sdk.responses.create(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "🎉 hi"
    assert sdk.responses.create(**asked).output_text == "🎉 hi"


def test_the_tokens_of_a_prompt_are_counted(sdk: OpenAI) -> None:
    counted = sdk.responses.input_tokens.count(model="tiny", input="Say hello.")
    assert counted.input_tokens == sdk.responses.create(model="tiny", input="Say hello.", max_output_tokens=1).usage.input_tokens


def test_cancelling_a_response_frees_the_slot(sdk: OpenAI, tiny: Client) -> None:
    before = len(tiny.box.records())
    stream = sdk.responses.create(
        model="tiny", input="Count.", stream=True, max_output_tokens=3000, extra_body={"ignore_eos": True}
    )
    deltas = (event for event in stream if event.type == "response.output_text.delta")
    for _ in range(3):
        next(deltas)
    stream.close()
    row = tiny.box.closed_records(before + 1)[-1]
    assert (row["status"], row["route"], row["counted"]) == ("cancelled", "/v1/responses", True)
    assert row["completion_tokens"] >= 3


def test_a_model_that_does_not_exist(sdk: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-4") as raised:
        sdk.chat.completions.create(model="gpt-4", messages=HELLO)
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        list(sdk.responses.create(model="gpt-4", input="Hi.", stream=True))


PICTURE: list[Any] = [
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
]
WORDS = "word " * 5000


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda sdk: sdk.chat.completions.create(model="tiny", messages=HELLO, n=50), id="n"),
        pytest.param(lambda sdk: sdk.chat.completions.create(model="tiny", messages=PICTURE), id="image"),
        pytest.param(
            lambda sdk: list(sdk.chat.completions.create(model="tiny", messages=PICTURE, stream=True)), id="image_stream"
        ),
        pytest.param(lambda sdk: sdk.chat.completions.create(model="tiny", messages=[{"content": "x"}]), id="no_role"),
        pytest.param(lambda sdk: sdk.completions.create(model="tiny", prompt="a", extra_body={"grammar": "frog"}), id="grammar"),
        pytest.param(lambda sdk: sdk.responses.create(model="tiny", input="a", previous_response_id="r"), id="previous"),
        pytest.param(lambda sdk: sdk.responses.input_tokens.count(model="tiny"), id="no_input"),
        pytest.param(lambda sdk: sdk.embeddings.create(model="tiny", input="a"), id="embeddings"),
        pytest.param(
            lambda sdk: sdk.post("/rerank", body={"model": "tiny", "query": "a", "documents": ["b"]}, cast_to=object), id="rerank"
        ),
        pytest.param(
            lambda sdk: sdk.chat.completions.create(model="tiny", messages=HELLO, extra_body={"stream": "no"}), id="type"
        ),
    ],
)
def test_a_fault_of_the_request_is_a_bad_request_and_is_sent_once(tiny: Client, call: Callable[[OpenAI], object]) -> None:
    """The SDK would send a 5xx twice more."""
    before = len(tiny.box.records())
    with (
        OpenAI(base_url=f"{tiny.address}/v1", api_key="-", timeout=WAIT_S, max_retries=2) as sdk,
        pytest.raises(openai.BadRequestError),
    ):
        call(sdk)
    assert len(tiny.box.closed_records(before + 1)) == before + 1


@pytest.mark.parametrize(
    "call",
    [
        lambda sdk: sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": WORDS}]),
        lambda sdk: list(sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": WORDS}], stream=True)),
        lambda sdk: sdk.completions.create(model="tiny", prompt=WORDS),
        lambda sdk: sdk.responses.create(model="tiny", input=WORDS),
    ],
    ids=["chat", "stream", "text", "response"],
)
def test_a_prompt_too_long_is_told_in_openais_words(sdk: OpenAI, call: Callable[[OpenAI], object]) -> None:
    with pytest.raises(
        openai.BadRequestError, match=r"maximum context length is \d+ tokens.*resulted in 50\d\d tokens"
    ) as raised:
        call(sdk)
    assert raised.value.code == "context_length_exceeded"


@pytest.fixture(scope="module")
def faulty(module_fake_box: Callable[..., Box]) -> Iterator[OpenAI]:
    """The SDK before a fake engine, one slot, no queue. What goes wrong stands in a request's field ``fake``."""
    client = module_fake_box(tokens=4).up("--set", "slots=1", "--set", "queue=0")
    with OpenAI(base_url=f"{client.address}/v1", api_key="-", timeout=WAIT_S, max_retries=0) as sdk:
        yield sdk


def chat(sdk: OpenAI, **fake: Any) -> list[Any]:
    return list(sdk.chat.completions.create(model="tiny", messages=HELLO, stream=True, extra_body={"fake": fake}))


def response(sdk: OpenAI, **fake: Any) -> list[Any]:
    return list(sdk.responses.create(model="tiny", input="Hi.", stream=True, extra_body={"fake": fake}))


def text(sdk: OpenAI, **fake: Any) -> list[Any]:
    return list(sdk.completions.create(model="tiny", prompt="Hi.", stream=True, extra_body={"fake": fake}))


@pytest.mark.parametrize("call", [chat, response, text])
def test_the_engines_own_fault_before_headers(faulty: OpenAI, call: Callable[..., object]) -> None:
    with pytest.raises(openai.InternalServerError, match=r"Compute error\.") as raised:
        call(faulty, error_status=500)
    assert raised.value.body["source"] == "engine"


@pytest.mark.parametrize("call", [chat, response, text])
def test_the_engines_own_fault_after_headers(faulty: OpenAI, call: Callable[..., object]) -> None:
    with pytest.raises(openai.APIError, match=r"Compute error\.") as raised:
        call(faulty, error_after_tokens=2)
    assert raised.value.code == "500"


@pytest.mark.parametrize("call", [chat, response, text])
def test_an_engine_that_ends_in_the_middle(faulty: OpenAI, call: Callable[..., object]) -> None:
    with pytest.raises(openai.APIError, match="ended before its answer did") as raised:
        call(faulty, cut_after_tokens=2)
    assert raised.value.code == "engine_died"
    assert raised.value.body["source"] == "llmctl"


def test_an_engine_that_ends_before_an_unstreamed_answer(faulty: OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as raised:
        faulty.chat.completions.create(model="tiny", messages=HELLO, extra_body={"fake": {"cut_after_tokens": 2}})
    assert (raised.value.status_code, raised.value.code) == (502, "engine_died")


def test_a_full_queue_is_a_rate_limit(faulty: OpenAI) -> None:
    held = faulty.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, extra_body={"fake": {"stall_after_tokens": 1}}
    )
    next(held)
    with pytest.raises(openai.RateLimitError) as raised:
        chat(faulty)
    held.close()
    assert raised.value.code == "queue_full"
    assert int(raised.value.response.headers["retry-after"]) >= 1


def test_a_body_too_large(faulty: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        faulty.completions.create(model="tiny", prompt="x" * (33 << 20))
    assert (raised.value.status_code, raised.value.code) == (413, "body_too_large")
