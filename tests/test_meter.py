"""The figures of a reply are read off its bytes exactly, however the network cut them. The streams were recorded from the pin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from supervisor import meter
from supervisor.meter import Meter, Reading

RECORDED = sorted((Path(__file__).with_name("data") / "assembly").glob("*.sse"))
TIMINGS = {"cache_n": 4, "prompt_n": 8, "prompt_ms": 16.0, "predicted_n": 11, "predicted_ms": 100.0}


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def chunk(index: int = 0, text: str | None = "x", reason: str | None = None, **more: Any) -> bytes:
    """A chat chunk in the engine's order of keys."""
    return event({"choices": [{"finish_reason": reason, "index": index, "delta": {"content": text} if text else {}}], **more})


def usage(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": {"cached_tokens": cached}}


DONE = b"data: [DONE]\n\n"


def read(*parts: bytes) -> Reading:
    found = Meter()
    for part in parts:
        found.feed(part)
    return found.read()


def truth(stream: bytes) -> tuple[int, int, int]:
    """Prompt, cached and completion tokens: every event parsed, the last timings of each choice summed."""
    last: dict[int, dict[str, Any]] = {}
    choice = 0
    for text in stream.decode().split("\n\n"):
        body = json.loads(text[6:]) if text.startswith("data: {") else {}
        for each in body.get("choices") or []:
            choice = each["index"]
        if "timings" in body:
            last[choice] = body["timings"]
    cached = sum(each["cache_n"] for each in last.values())
    return cached + sum(each["prompt_n"] for each in last.values()), cached, sum(each["predicted_n"] for each in last.values())


def figures(found: Reading) -> tuple[int | None, int | None, int | None]:
    return found.prompt_tokens, found.cached_tokens, found.completion_tokens


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_stream_gives_the_figures_that_parsing_all_of_it_gives(path: Path) -> None:
    stream = path.read_bytes()
    whole = read(stream)
    assert figures(whole) == truth(stream)
    assert whole.finish_reason in ("stop", "length", "tool_calls")
    assert not whole.counted


@pytest.mark.parametrize("name", ["n", "progress"])
def test_a_recorded_stream_reads_the_same_cut_at_every_byte(name: str) -> None:
    stream = next(path for path in RECORDED if path.stem == name).read_bytes()
    whole = read(stream)
    for at in range(1, len(stream)):
        assert read(stream[:at], stream[at:]) == whole, at


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_stream_reads_the_same_byte_by_byte_and_in_odd_pieces(path: Path) -> None:
    stream = path.read_bytes()
    for size in (1, 2, 3, 97, 1000):
        found = Meter()
        for at in range(0, len(stream), size):
            found.feed(stream[at : at + size])
        assert found.read() == read(stream)
        assert found.sent_bytes == len(stream)
        lines = [line for line in stream.split(b"\n") if line.startswith(b"data: {")]
        assert found.events == sum(b'"delta":{"role":' not in line for line in lines)  # who speaks is no token


def test_rates_come_from_the_timings_and_the_first_token_is_free() -> None:
    found = read(chunk(), chunk(text=None, reason="stop", timings=TIMINGS), DONE)
    assert found == Reading(12, 4, 11, prefill_tps=500.0, decode_tps=100.0, finish_reason="stop")


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
        found.feed(part)
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
        found.feed(part)
    assert found.failed


def test_an_error_event_cut_in_two_is_noticed() -> None:
    for at in range(1, len(ERROR)):
        found = Meter()
        found.feed(ERROR[:at])
        found.feed(ERROR[at:])
        assert found.failed


@pytest.mark.parametrize(
    "body", ["null", "[1]", '{"timings":7}', '{"timings":null}', '{"choices":null,"timings":{}}', '{"timings":{']
)
def test_a_strange_event_breaks_nothing(body: str) -> None:
    found = Meter()
    found.feed(f'data: {body}\n\ndata: {{"usage":{{}}}}\n\n'.encode())
    assert found.read().finish_reason is None


def test_an_unstreamed_body_reads_alike() -> None:
    body = {"choices": [{"finish_reason": "stop", "index": 0}], "usage": usage(12, 4, 11), "timings": TIMINGS}
    assert figures(meter.reading([body])) == (12, 4, 11)
    del body["timings"]
    assert meter.reading([body]) == Reading(12, 4, 11, finish_reason="stop")
    assert meter.reading([]) == Reading()
    assert meter.reading([{"object": "list", "usage": {"prompt_tokens": 5}}]) == Reading(prompt_tokens=5)
