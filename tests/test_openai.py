"""The OpenAI Python SDK against the real engine with ``tiny``: what a user's own program sees."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from tests.conftest import WAIT_S, Client, until

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


def test_errors_are_the_sdks_own_classes(sdk: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        sdk.chat.completions.create(model="gpt-4", messages=HELLO)
    with pytest.raises(openai.BadRequestError):
        sdk.chat.completions.create(model="tiny", messages=HELLO, n=50)
