"""The Anthropic Python SDK against the real engine with ``tiny``: what a user's own program sees. The engine's faults are the fake's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from tests import fakes
from tests.conftest import WAIT_S, Box, Client, until

HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]
PICTURE: list[Any] = [
    {
        "role": "user",
        "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}],
    }
]
WORDS: list[Any] = [{"role": "user", "content": "word " * 5000}]


@pytest.fixture(scope="module")
def sdk(tiny: Client) -> Iterator[Anthropic]:
    with Anthropic(base_url=tiny.address, api_key="-", timeout=WAIT_S, max_retries=0) as client:
        yield client


def test_a_message_streams_and_is_one_reply(sdk: Anthropic) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "extra_body": {"temperature": 0}}
    with sdk.messages.stream(**asked) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = sdk.messages.create(**asked)
    assert whole.content[0].text == streamed == final.content[0].text
    assert whole.stop_reason == final.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == final.usage.output_tokens == 12
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens > 20
    assert (whole.type, whole.role) == ("message", "assistant")


def test_its_events_are_the_apis(sdk: Anthropic) -> None:
    events = list(sdk.messages.create(model="tiny", messages=HELLO, max_tokens=3, stream=True, extra_body={"temperature": 0}))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_an_answer_that_begins_with_an_emoji_is_read_like_any_other(sdk: Anthropic) -> None:
    """Its stream lacks the first event, and the SDK gives up on it (``messages``)."""
    turns: list[Any] = [
        turn
        for word in ("party", "cake", "star")
        for turn in ({"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": f"🎉 {word}"})
    ]
    asked: dict[str, Any] = {"model": "tiny", "messages": [*turns, {"role": "user", "content": "Say moon."}], "max_tokens": 8}
    with sdk.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
        final = stream.get_final_message()
    assert final.content[0].text.startswith("🎉")
    assert final.usage.input_tokens is None  # that is how one sees that it was such an answer
    whole = sdk.messages.create(**asked, extra_body={"temperature": 0})
    assert whole.content[0].text == final.content[0].text
    assert whole.id.startswith("req_")


def test_the_tokens_of_a_prompt_are_counted(sdk: Anthropic) -> None:
    counted = sdk.messages.count_tokens(model="tiny", messages=HELLO)
    usage = sdk.messages.create(model="tiny", messages=HELLO, max_tokens=1, extra_body={"temperature": 0}).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_a_message_has_its_record(sdk: Anthropic, tiny: Client) -> None:
    before = len(tiny.box.records())
    usage = sdk.messages.create(model="tiny", messages=HELLO, max_tokens=5, extra_body={"temperature": 0}).usage
    row = tiny.box.closed_records(before + 1)[-1]
    assert (row["status"], row["completion_tokens"], row["counted"]) == ("ok", 5, False)
    assert (row["prompt_tokens"], row["cached_tokens"]) == (
        usage.input_tokens + usage.cache_read_input_tokens,
        usage.cache_read_input_tokens,
    )


def test_cancelling_a_stream_frees_the_slot(sdk: Anthropic, tiny: Client) -> None:
    log = tiny.box.home.logs / "tiny.log"
    released, before = log.read_text().count("stop processing"), len(tiny.box.records())
    turns: list[Any] = [{"role": "user", "content": "Count from one to a thousand, in words, without leaving any out."}]
    stream = sdk.messages.create(model="tiny", messages=turns, stream=True, max_tokens=3000, extra_body={"temperature": 0})
    deltas = (event for event in stream if event.type == "content_block_delta")
    for _ in range(3):
        next(deltas)
    stream.close()
    row = tiny.box.closed_records(before + 1)[-1]
    assert (row["status"], row["counted"]) == ("cancelled", True)
    assert row["completion_tokens"] >= 3
    assert row["prompt_tokens"] > 0  # told in the first event
    until(lambda: log.read_text().count("stop processing") > released)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda sdk: sdk.messages.create(model="tiny", messages=PICTURE, max_tokens=3), id="image"),
        pytest.param(lambda sdk: sdk.messages.count_tokens(model="tiny", messages=PICTURE), id="image_count"),
        pytest.param(
            lambda sdk: list(sdk.messages.create(model="tiny", messages=PICTURE, max_tokens=3, stream=True)), id="stream"
        ),
        pytest.param(lambda sdk: sdk.messages.create(model="tiny", messages=[{"content": "x"}], max_tokens=3), id="no_role"),
        pytest.param(lambda sdk: sdk.messages.create(model="tiny", messages=HELLO, max_tokens=-5), id="max_tokens"),
        pytest.param(lambda sdk: sdk.post("/v1/messages", body={"model": "tiny"}, cast_to=object), id="no_messages"),
        pytest.param(lambda sdk: sdk.post("/v1/messages", body={"model": 7}, cast_to=object), id="type"),
    ],
)
def test_a_fault_of_the_request_is_a_bad_request_and_is_sent_once(tiny: Client, call: Callable[[Anthropic], object]) -> None:
    """The SDK would send a 5xx twice more."""
    before = len(tiny.box.records())
    with (
        Anthropic(base_url=tiny.address, api_key="-", timeout=WAIT_S, max_retries=2) as sdk,
        pytest.raises(anthropic.BadRequestError) as raised,
    ):
        call(sdk)
    assert raised.value.type == "invalid_request_error"
    assert len(tiny.box.closed_records(before + 1)) == before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_too_long_is_told_in_anthropics_words(sdk: Anthropic, stream: bool) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: 50\d\d tokens > \d+ maximum") as raised:
        sdk.messages.create(model="tiny", messages=WORDS, max_tokens=3, stream=stream)
    assert raised.value.body["error"]["code"] == "context_length_exceeded"


def test_a_model_that_does_not_exist(sdk: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="claude") as raised:
        sdk.messages.create(model="claude", messages=HELLO, max_tokens=3)
    assert raised.value.type == "not_found_error"


@pytest.fixture(scope="module")
def faulty_box(module_fake_box: Callable[..., Box]) -> Client:
    """A fake engine, one slot, no queue. What goes wrong stands in a request's field ``fake``."""
    return module_fake_box(tokens=4).up("--set", "slots=1", "--set", "queue=0")


@pytest.fixture(scope="module")
def faulty(faulty_box: Client) -> Iterator[Anthropic]:
    with Anthropic(base_url=faulty_box.address, api_key="-", timeout=WAIT_S, max_retries=0) as sdk:
        yield sdk


def message(sdk: Anthropic, *, stream: bool = True, **fake: Any) -> object:
    made = sdk.messages.create(model="tiny", messages=HELLO, max_tokens=9, stream=stream, extra_body={"fake": fake})
    return list(made) if stream else made


@pytest.mark.parametrize("stream", [False, True])
def test_the_engines_own_fault_before_headers(faulty: Anthropic, stream: bool) -> None:
    with pytest.raises(anthropic.InternalServerError, match=r"Compute error\.") as raised:
        message(faulty, stream=stream, error_status=500)
    assert raised.value.type == "api_error"
    assert raised.value.body["error"]["source"] == "engine"


def test_the_engines_own_fault_after_headers(faulty: Anthropic) -> None:
    """As it comes: it has no envelope."""
    with pytest.raises(anthropic.APIStatusError, match=r"Compute error\."):
        message(faulty, error_after_tokens=2)


def test_an_engine_that_ends_in_the_middle(faulty: Anthropic) -> None:
    with pytest.raises(anthropic.APIStatusError, match="ended before its answer did") as raised:
        message(faulty, cut_after_tokens=2)
    assert raised.value.type == "api_error"
    assert raised.value.body["error"]["code"] == "engine_died"
    with (
        faulty.messages.stream(
            model="tiny", messages=HELLO, max_tokens=9, extra_body={"fake": {"cut_after_tokens": 2}}
        ) as stream,
        pytest.raises(anthropic.APIStatusError, match="ended before its answer did"),
    ):
        stream.until_done()


def test_an_engine_that_ends_before_an_unstreamed_answer(faulty: Anthropic) -> None:
    with pytest.raises(anthropic.InternalServerError) as raised:
        message(faulty, stream=False, cut_after_tokens=2)
    assert (raised.value.status_code, raised.value.type) == (502, "api_error")


def test_a_full_queue_is_a_rate_limit(faulty: Anthropic) -> None:
    held = faulty.messages.create(
        model="tiny", messages=HELLO, max_tokens=9, stream=True, extra_body={"fake": {"stall_after_tokens": 1}}
    )
    next(held)
    with pytest.raises(anthropic.RateLimitError) as raised:
        message(faulty)
    held.close()
    assert raised.value.type == "rate_limit_error"
    assert int(raised.value.response.headers["retry-after"]) >= 1


def test_a_body_too_large(faulty: Anthropic) -> None:
    with pytest.raises(anthropic.APIStatusError) as raised:
        faulty.messages.create(model="tiny", messages=[{"role": "user", "content": "x" * (33 << 20)}], max_tokens=3)
    assert (raised.value.status_code, raised.value.type) == (413, "request_too_large")


def test_a_model_that_cannot_load(fake_box: Callable[..., Box]) -> None:
    """It was fine once; it is asked for again after its child died for good."""
    box = fake_box(tokens=4)
    client = box.up("--set", "slots=1")
    fakes.tune(box.engine.parent, start_exit=1, start_log="error loading model hyperparameters: no such thing")
    with Anthropic(base_url=client.address, api_key="-", timeout=WAIT_S, max_retries=0) as sdk:
        with pytest.raises(anthropic.APIError):
            message(sdk, die_after_tokens=1)

        def refused() -> anthropic.ServiceUnavailableError | None:
            try:
                message(sdk)
            except anthropic.ServiceUnavailableError as exc:
                return exc
            except anthropic.APIError:
                return None  # its child was just going
            return None

        error = until(refused)
    assert error.type == "overloaded_error"
