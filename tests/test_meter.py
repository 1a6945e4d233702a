"""The figures of a reply are read off its bytes exactly, however the network cut them. The streams were recorded from the pin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from supervisor import meter, sse
from supervisor.meter import Meter, Reading
from supervisor.routes import Api

RECORDED = sorted((Path(__file__).with_name("data") / "assembly").glob("*.sse"))


def api_of(path: Path) -> Api:
    """Whose stream it is, by the name of its case."""
    words = {"response": Api.RESPONSES, "message": Api.ANTHROPIC, "native": Api.NATIVE}
    return words.get(path.stem.partition("_")[0], Api.CHAT)


TIMINGS = {"cache_n": 4, "prompt_n": 8, "prompt_ms": 16.0, "predicted_n": 11, "predicted_ms": 100.0}


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def chunk(index: int = 0, text: str | None = "x", reason: str | None = None, **more: Any) -> bytes:
    """A chat chunk in the engine's order of keys."""
    return event({"choices": [{"finish_reason": reason, "index": index, "delta": {"content": text} if text else {}}], **more})


def usage(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": {"cached_tokens": cached}}


DONE = b"data: [DONE]\n\n"


def read(*parts: bytes, api: Api = Api.CHAT) -> Reading:
    found = Meter(api)
    for part in parts:
        found.feed(part, 1.0)
    return found.read()


def truth(stream: bytes) -> tuple[int, int, int]:
    """Prompt, cached and completion tokens: every event parsed, the last timings of each choice summed; Anthropic's usage."""
    last: dict[int, dict[str, Any]] = {}
    choice = 0
    usage: dict[str, int] = {}
    for text in stream.decode().split("\n\n"):
        _, _, data = text.partition("data: ")
        body = json.loads(data) if data.startswith("{") else {}
        for each in body.get("choices") or ([body] if "stop" in body else []):
            choice = each["index"]
        if "timings" in body:
            last[choice] = body["timings"]
        if body.get("type", "").startswith("message_"):
            usage |= body.get("message", body).get("usage", {})
    if usage:
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached, usage["output_tokens"]
    cached = sum(each["cache_n"] for each in last.values())
    return cached + sum(each["prompt_n"] for each in last.values()), cached, sum(each["predicted_n"] for each in last.values())


def texts(path: Path) -> int:
    """How many events of its stream have text or a piece of a call."""
    count = 0
    for text in path.read_text().split("\n\n"):
        name, _, data = text.rpartition("data: ")
        if api_of(path) in (Api.CHAT, Api.NATIVE):
            count += data.startswith("{") and '"delta":{"role":' not in data  # who speaks is no token
        else:
            count += "delta\n" in name and "message_delta" not in name and "signature_delta" not in data
    return count


def figures(found: Reading) -> tuple[int | None, int | None, int | None]:
    return found.prompt_tokens, found.cached_tokens, found.completion_tokens


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_stream_gives_the_figures_that_parsing_all_of_it_gives(path: Path) -> None:
    stream = path.read_bytes()
    whole = read(stream, api=api_of(path))
    assert figures(whole) == truth(stream)
    ends = {Api.RESPONSES: (None,), Api.ANTHROPIC: ("max_tokens", "tool_use"), Api.NATIVE: ("limit",)}
    assert whole.finish_reason in ends.get(api_of(path), ("stop", "length", "tool_calls"))
    assert not whole.counted


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_unstreamed_reply_gives_the_same_figures(path: Path) -> None:
    """But of several choices OpenAI's body tells the first one's alone."""
    streamed, whole = read(path.read_bytes(), api=api_of(path)), meter.whole(path.with_suffix(".json").read_bytes())
    if path.stem in ("n", "text_n", "prompts"):
        assert (whole.completion_tokens or 0) * 2 == streamed.completion_tokens
    else:
        assert figures(whole) == figures(streamed)
        assert whole.finish_reason == streamed.finish_reason


@pytest.mark.parametrize("name", ["n", "progress", "message", "response_reasoning", "native_prompts"])
def test_a_recorded_stream_reads_the_same_cut_at_every_byte(name: str) -> None:
    path = next(path for path in RECORDED if path.stem == name)
    stream, api = path.read_bytes(), api_of(path)
    whole = read(stream, api=api)
    for at in range(1, len(stream)):
        assert read(stream[:at], stream[at:], api=api) == whole, at


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_stream_reads_the_same_byte_by_byte_and_in_odd_pieces(path: Path) -> None:
    stream = path.read_bytes()
    for size in (1, 2, 3, 97, 1000):
        found = Meter(api_of(path))
        for at in range(0, len(stream), size):
            found.feed(stream[at : at + size], 1.0)
        assert found.read() == read(stream, api=api_of(path))
        assert found.sent_bytes == len(stream)
        assert found.events == texts(path)


def test_rates_come_from_the_timings_and_the_first_token_is_free() -> None:
    found = read(chunk(), chunk(text=None, reason="stop", timings=TIMINGS), DONE)
    assert found == Reading(
        12, 4, 11, prefill_tps=500.0, decode_tps=100.0, finish_reason="stop", prefill_ms=16.0, decode_ms=100.0
    )


def test_one_token_has_no_decode_rate() -> None:
    found = read(chunk(text=None, reason="stop", timings=TIMINGS | {"predicted_n": 1}), DONE)
    assert (found.completion_tokens, found.decode_tps) == (1, None)


def test_a_zero_time_gives_no_rate() -> None:
    found = read(chunk(text=None, reason="stop", timings=TIMINGS | {"prompt_ms": 0, "predicted_ms": 0.0}), DONE)
    assert (found.prefill_tps, found.decode_tps) == (None, None)


def test_drafts_are_read_when_there_were_any() -> None:
    drafted = TIMINGS | {"draft_n": 20, "draft_n_accepted": 15}
    found = read(chunk(text=None, reason="stop", timings=drafted), DONE)
    assert (found.draft_tokens, found.draft_accepted) == (20, 15)
    assert read(chunk(text=None, reason="stop", timings=TIMINGS)).draft_tokens is None


def test_choices_are_summed() -> None:
    """``usage`` counts one sequence, whatever n was."""
    last = [chunk(index, None, "stop", timings=TIMINGS) for index in (1, 0)]
    found = read(chunk(0), chunk(1), *last, DONE)
    assert figures(found) == (24, 8, 22)
    assert found.decode_tps == 100.0


def test_choices_are_summed_with_usage_chunks_too() -> None:
    """With include_usage the timings sit in a chunk without choices behind each choice's last, so they say no index."""
    said = event({"choices": [], "usage": usage(12, 4, 11), "timings": TIMINGS})
    found = read(chunk(0), chunk(1), chunk(1, None, "stop") + said, chunk(0, None, "length") + said, DONE)
    assert figures(found) == (24, 8, 22)


def test_timings_per_token_count_once() -> None:
    """Each token's timings replace those before."""
    tokens = [chunk(timings=TIMINGS | {"predicted_n": count}) for count in range(1, 11)]
    assert figures(read(*tokens)) == (12, 4, 10)  # cut: exact, not counted
    assert figures(read(*tokens, chunk(text=None, reason="stop", timings=TIMINGS), DONE)) == (12, 4, 11)


def test_timings_per_token_with_a_usage_chunk_count_once() -> None:
    tokens = [chunk(timings=TIMINGS | {"predicted_n": count}) for count in range(1, 11)]
    said = event({"choices": [], "usage": usage(12, 4, 11), "timings": TIMINGS})
    assert figures(read(*tokens, chunk(text=None, reason="stop") + said, DONE)) == (12, 4, 11)


def test_without_timings_usage_serves() -> None:
    found = read(chunk(), chunk(text=None, reason="length"), event({"choices": [], "usage": usage(9, 2, 3)}), DONE)
    assert found == Reading(9, 2, 3, finish_reason="length")


def test_with_neither_the_events_that_passed_are_counted() -> None:
    found = read(b":\n\n", chunk(), chunk(), chunk())
    assert found == Reading(completion_tokens=3, counted=True)
    assert read() == Reading(completion_tokens=0, counted=True)


def named(name: str, **body: Any) -> bytes:
    """An event of an API that names them."""
    return sse.event({"type": name, **body}, name=name)


HEAD = named("message_start", message={"usage": {"cache_read_input_tokens": 3, "input_tokens": 4, "output_tokens": 0}})
PIECE = named("content_block_delta", index=0, delta={"type": "text_delta", "text": "a"})
SIGNATURE = named("content_block_delta", index=0, delta={"type": "signature_delta", "signature": ""})


def test_a_message_that_was_cut_knows_its_prompt_and_counts_its_answer() -> None:
    assert read(HEAD, PIECE, PIECE, SIGNATURE, api=Api.ANTHROPIC) == Reading(7, 3, 2, counted=True)


def test_a_message_without_its_head_still_tells_its_answer() -> None:
    end = (
        b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":5}}\n\n'
    )
    assert read(PIECE, end, api=Api.ANTHROPIC) == Reading(None, None, 5, finish_reason="end_turn")


def test_a_response_that_was_cut_counts_its_text() -> None:
    begun = named("response.created", response={"id": "resp_1"})
    piece = named("response.output_text.delta", delta="x")
    call = named("response.function_call_arguments.delta", delta="{")
    assert read(begun, piece, piece, call, api=Api.RESPONSES) == Reading(completion_tokens=3, counted=True)


@pytest.mark.parametrize(
    "text", ["event: content_block_delta\n", "event: error\n", '"usage":{"output_tokens":9}', ".delta\ndata: "]
)
@pytest.mark.parametrize("api", [Api.ANTHROPIC, Api.RESPONSES])
def test_text_of_other_apis_is_never_taken_for_events(api: Api, text: str) -> None:
    names = {Api.ANTHROPIC: "content_block_delta", Api.RESPONSES: "response.output_text.delta"}
    found = Meter(api)
    for _ in range(2):
        found.feed(named(names[api], delta={"text": text}), 1.0)
    assert (found.read(), found.failed) == (Reading(completion_tokens=2, counted=True), False)


def test_an_event_that_was_cut_is_not_counted() -> None:
    assert read(chunk(), chunk()[:-1]).completion_tokens == 1


@pytest.mark.parametrize(
    "text",
    [
        '"timings":{"predicted_n":99}',
        '{"index": 7}',
        "data: {",
        '\n\ndata: {"error":{}}\n\n',
        '"finish_reason":"length"',
        '"usage":{',
        "\\",
    ],
)
def test_text_is_never_taken_for_figures(text: str) -> None:
    """Inside a JSON string quotes and line ends are escaped."""
    found = Meter()
    for part in (chunk(text=text), chunk(text=text), chunk(text=None, reason="stop", timings=TIMINGS), DONE):
        found.feed(part, 1.0)
    assert not found.failed
    assert found.events == 3
    assert figures(found.read()) == (12, 4, 11)
    assert read(chunk(text=text), chunk(text=text)) == Reading(completion_tokens=2, counted=True)


ERROR = event({"error": {"code": 500, "message": "Compute error.", "type": "server_error"}})


@pytest.mark.parametrize("before", [b"", chunk(), chunk(timings=TIMINGS), chunk(text=None, reason="stop")])
@pytest.mark.parametrize("together", [True, False])
def test_an_error_event_is_noticed_whatever_came_with_it(before: bytes, together: bool) -> None:
    found = Meter()
    for part in [before + ERROR] if together else [before, ERROR]:
        found.feed(part, 1.0)
    assert found.failed


ANTHROPIC_ERROR = b'event: error\ndata: {"code":500,"message":"Compute error.","type":"server_error"}\n\n'


@pytest.mark.parametrize(
    ("api", "event"),
    [
        *((api, ERROR) for api in (Api.CHAT, Api.TEXT, Api.NATIVE, Api.RESPONSES)),
        (Api.ANTHROPIC, ANTHROPIC_ERROR),
    ],
)
def test_every_apis_error_event_is_noticed_wherever_it_is_cut(api: Api, event: bytes) -> None:
    for at in range(1, len(event)):
        found = Meter(api)
        found.feed(event[:at], 1.0)
        found.feed(event[at:], 1.0)
        assert found.failed


@pytest.mark.parametrize(
    "body", ["null", "[1]", '{"timings":7}', '{"timings":null}', '{"choices":null,"timings":{}}', '{"timings":{']
)
def test_a_strange_event_breaks_nothing(body: str) -> None:
    found = Meter()
    found.feed(f'data: {body}\n\ndata: {{"usage":{{}}}}\n\n'.encode(), 1.0)
    assert found.read().finish_reason is None


def test_an_unstreamed_body_reads_alike() -> None:
    body = {"choices": [{"finish_reason": "stop", "index": 0}], "usage": usage(12, 4, 11), "timings": TIMINGS}
    assert figures(meter.reading([body])) == (12, 4, 11)
    del body["timings"]
    assert meter.reading([body]) == Reading(12, 4, 11, finish_reason="stop")
    assert meter.reading([]) == Reading()
    assert meter.reading([{"object": "list", "usage": {"prompt_tokens": 5}}]) == Reading(prompt_tokens=5)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"", Reading()),
        (b"[1, null]", Reading()),
        (b"{", Reading()),
        (b'{"input_tokens": 7}', Reading()),  # a count, of which nothing was computed
        (b'{"object":"list","data":[],"usage":{"prompt_tokens":5,"total_tokens":5}}', Reading(prompt_tokens=5)),
        (
            b'{"stop_reason":"end_turn","usage":{"cache_read_input_tokens":3,"input_tokens":4,"output_tokens":5}}',
            Reading(7, 3, 5, finish_reason="end_turn"),
        ),
        (
            b'{"object":"response","usage":{"input_tokens":7,"output_tokens":5,"input_tokens_details":{"cached_tokens":3}}}',
            Reading(7, 3, 5),
        ),
    ],
)
def test_every_apis_whole_body_is_read(body: bytes, found: Reading) -> None:
    assert meter.whole(body) == found


def test_the_first_text_and_the_gaps_after_it_are_timed() -> None:
    found = Meter()
    for at_s, data in ((10.0, chunk()), (10.5, chunk()), (10.75, chunk() + chunk()), (11.0, b": ping\n\n"), (11.25, chunk())):
        found.feed(data, at_s)
    reading = found.read()
    assert reading.first_s == 10.0
    assert sum(reading.gaps.values()) == 3  # what came in one read is one arrival, and a comment is none
    assert reading.itl_ms(0.5) == pytest.approx(500, rel=0.1)


def test_who_speaks_is_not_the_first_text() -> None:
    found = Meter()
    role = event({"choices": [{"finish_reason": None, "index": 0, "delta": {"role": "assistant", "content": None}}]})
    found.feed(role, 1.0)
    found.feed(chunk(), 2.0)
    assert found.first_s == 2.0


def test_choices_that_were_cut_are_counted_beside_those_that_ended() -> None:
    found = Meter(sequences=2)
    for at_s, data in enumerate(
        (chunk(0), chunk(1), chunk(0) + chunk(1), chunk(0, None, "stop", timings=TIMINGS), chunk(1), chunk(1)), start=1
    ):
        found.feed(data, float(at_s))
    reading = found.read()
    assert (reading.completion_tokens, reading.counted) == (TIMINGS["predicted_n"] + 4, True)
    assert (reading.prompt_tokens, reading.finish_reason) == (None, None)  # of the other one it isn't known
    assert (reading.first_s, dict(reading.gaps)) == (1.0, {})  # arrivals of several answers mingle


def test_several_choices_that_all_ended_are_exact() -> None:
    found = Meter(sequences=2)
    for index in (0, 1):
        found.feed(chunk(index) + chunk(index, None, "stop", timings=TIMINGS), 1.0)
    reading = found.read()
    assert (reading.completion_tokens, reading.counted) == (2 * TIMINGS["predicted_n"], False)
    assert reading.prompt_tokens == 24


def test_the_time_of_prefill_and_decode_is_the_engines() -> None:
    reading = read(chunk(), chunk(text=None, reason="stop", timings=TIMINGS))
    assert (reading.prefill_ms, reading.decode_ms) == (16.0, 100.0)
    assert (read(chunk()).prefill_ms, read(chunk()).decode_ms) == (None, None)


def test_of_a_long_answer_the_last_gaps_are_kept_and_no_more() -> None:
    found = Meter()
    plain = chunk(object="chat.completion.chunk")
    for at in range(meter.NOTED + 100):
        found.feed(plain, 1.0 + at / 64)
    assert sum(found.gaps.values()) == meter.NOTED - 1
    assert len(found.gaps) <= 2
    assert (found.first_s, found.events) == (1.0, meter.NOTED + 100)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize("sequences", [1, 2])
def test_the_short_way_counts_what_the_long_way_counts(path: Path, sequences: int) -> None:
    """An event by itself takes the short way, two in one read the long one; over every API's recorded stream, cut into odd pieces too."""
    whole = path.read_bytes()
    events = [part + b"\n\n" for part in whole.split(b"\n\n") if part]
    pairs = [b"".join(events[at : at + 2]) for at in range(0, len(events), 2)]
    torn = [whole[at : at + 151] for at in range(0, len(whole), 151)]
    long = Meter(api_of(path), sequences=sequences)
    long.feed(b": comment\n\n" + whole, 1.0)
    for pieces in (events, pairs, torn, [*events[:9], *pairs[5:]] if len(events) % 2 and len(events) > 9 else events):
        fed, passed = (Meter(api_of(path), sequences=sequences) for _ in range(2))
        out: list[bytes] = []
        pass_on = passed.passing(out.append, lambda: 1.0)
        for piece in pieces:
            fed.feed(piece, 1.0)
            pass_on(piece)
        assert b"".join(out) == b"".join(pieces)
        assert (fed.events, fed.sent_bytes, fed.done) == (passed.events, passed.sent_bytes, passed.done)
        assert fed.read() == passed.read()
        if b"".join(pieces) == whole:
            assert (fed.events, fed.read()) == (long.events, long.read())


@pytest.mark.parametrize("first", [True, False])
def test_an_engines_error_is_no_text(first: bool) -> None:
    found = Meter()
    error = event({"error": {"code": 500, "message": "Compute error.", "type": "server_error"}})
    for data in (error,) if first else (chunk(), error):
        found.feed(data, 1.0)
    assert (found.events, found.failed, found.first_s) == (0 if first else 1, True, None if first else 1.0)


def test_timings_that_lack_a_field_leave_it_unknown() -> None:
    found = read(chunk(), chunk(text=None, reason="stop", timings={"predicted_n": 5}))
    assert (found.completion_tokens, found.counted) == (5, False)
    assert (found.prompt_tokens, found.cached_tokens, found.prefill_ms, found.decode_tps, found.draft_tokens) == (None,) * 5


@pytest.mark.parametrize("odd", [{}, {"predicted_n": "five"}, {"predicted_n": -5}, {"predicted_n": 1e30}, {"predicted_n": None}])
def test_timings_that_say_no_count_of_tokens_leave_the_events(odd: dict[str, Any]) -> None:
    found = read(chunk(), chunk(), chunk(text=None, reason="stop", timings=odd))
    assert (found.completion_tokens, found.counted, found.prompt_tokens) == (3, True, None)


@pytest.mark.parametrize(
    "last", [b'data: {"choices":[null],"timings":{"predicted_n":9}}\n\n', b'data: {"timings":' + b"[" * 100_000 + b"\n\n"]
)
def test_an_odd_final_event_costs_nothing_that_is_known(last: bytes) -> None:
    found = read(chunk(), chunk(), last)
    assert found.completion_tokens in (9, 2, 3)
    assert (found.first_s, found.sent_bytes) == (1.0, len(chunk()) * 2 + len(last))


@pytest.mark.parametrize("path", [path for path in RECORDED if "native" not in path.stem], ids=lambda path: path.stem)
def test_the_last_event_is_known_and_no_other_is_taken_for_it(path: Path) -> None:
    found = Meter(api_of(path))
    *events, last = [part + b"\n\n" for part in path.read_bytes().split(b"\n\n") if part]
    for each in events:
        found.feed(each, 1.0)
        assert not found.done
    found.feed(last, 1.0)
    assert found.done


@pytest.mark.parametrize("first", ["reasoning_content", "content"])
def test_two_short_events_after_a_long_kind_are_two(first: str) -> None:
    def piece(kind: str, text: str) -> bytes:
        return event(
            {
                "choices": [{"finish_reason": None, "index": 0, "delta": {kind: text}}],
                "id": "x" * 40,
                "object": "chat.completion.chunk",
            }
        )

    found = Meter()
    pass_on = found.passing(lambda data: None, lambda: 1.0)
    for data in (piece(first, "word"), piece(first, "word"), piece("content", "") + piece("content", ""), piece("content", "x")):
        pass_on(data)
    assert found.events == 5
