"""What a request's record says, against what its client saw and what the engine did; each request has one, wherever it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from supervisor import accounts
from tests.conftest import WAIT_S, Box, Client, until
from tests.test_proxy import CHAT, HELLO, ask, post, raw, stream

Boxes = Callable[..., Box]
NAME = "X-Request-Id"


def record(client: Client, name: str) -> dict[str, Any]:
    """The closed record of an id, ours or the client's."""

    def closed() -> dict[str, Any] | None:
        rows = accounts.records(client.box.home.ledger, 100_000)
        return next((row for row in rows if name in (row["id"], row["client_id"]) and row["status"] != "open"), None)

    found: dict[str, Any] = until(closed)
    return found


def top(client: Client) -> dict[str, Any]:
    """What ``llmctl top`` is drawn from."""
    with client.admin as http:
        found: dict[str, Any] = http.get("/llmctl/top").json()
    return found


@pytest.fixture(scope="module")
def healthy(module_fake_box: Boxes) -> Client:
    return module_fake_box(tokens=6, pace_s=0.02, prefill_s=0.05, cached=1).up("--set", "slots=2")


@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_names_its_record_and_the_record_says_what_passed(healthy: Client, streamed: bool) -> None:
    began_s = time.monotonic()
    reply = ask(healthy, stream=streamed)
    took_ms = (time.monotonic() - began_s) * 1e3
    found = record(healthy, reply.headers[NAME])
    events = (
        [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")] if streamed else [reply.json()]
    )
    timings = events[-1]["timings"]
    assert (found["status"], found["http_status"], found["stream"], found["error"]) == ("ok", 200, streamed, None)
    assert (found["prompt_tokens"], found["cached_tokens"]) == (timings["cache_n"] + timings["prompt_n"], timings["cache_n"])
    assert (found["completion_tokens"], found["counted"], found["wasted_tokens"]) == (timings["predicted_n"], False, 0)
    assert (found["prefill_ms"], found["decode_ms"]) == (timings["prompt_ms"], timings["predicted_ms"])
    assert 50 <= found["ttft_ms"] <= found["total_ms"] <= took_ms + 1
    assert found["itl_p50_ms"] >= 15
    assert (found["attempts"], found["ahead"], found["load_ms"], found["client"], found["key"]) == (1, 0, 0.0, "loopback", None)
    assert found["queue_ms"] < 50
    assert found["up_ms"] > 0
    assert (found["model"], found["slots"], found["speculative"]) == ("m.gguf", 2, "off")
    assert found["engine"]
    assert found["energy_j"] is None  # no card, no figure


def test_an_id_that_a_client_brings_is_its_own_everywhere(healthy: Client) -> None:
    with openai.OpenAI(base_url=f"{healthy.address}/v1", api_key="-", max_retries=0) as client:
        reply = client.chat.completions.create(model="tiny", messages=HELLO, extra_headers={NAME: "trace-1"})  # type: ignore[arg-type]
        assert reply._request_id == "trace-1"
        with pytest.raises(openai.NotFoundError) as raised:
            client.chat.completions.create(model="nobody", messages=HELLO, extra_headers={NAME: "trace-2"})  # type: ignore[arg-type]
        assert raised.value.request_id == "trace-2"
    assert record(healthy, "trace-1")["status"] == "ok"
    found = record(healthy, "trace-2")
    assert (found["status"], found["http_status"], found["error"], found["preset"]) == ("refused", 404, "model_not_found", "")
    assert (found["attempts"], found["completion_tokens"], found["wasted_tokens"]) == (0, None, None)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/models", 200), ("GET", "/nothing", 404), ("GET", "/llmctl/status", 401), ("POST", CHAT, 415)],
)
def test_every_route_answers_with_the_id_that_it_was_asked_with(healthy: Client, method: str, path: str, status: int) -> None:
    with healthy.http as http:
        reply = http.request(method, path, headers={NAME: "mine"})
    assert (reply.status_code, reply.headers[NAME]) == (status, "mine")


@pytest.mark.parametrize("odd", ["with blank", "x" * 129, "ü"])
def test_an_id_that_can_not_stand_in_a_header_is_not_taken(healthy: Client, odd: str) -> None:
    body = json.dumps({"model": "tiny", "messages": HELLO}).encode()
    with raw(healthy, post(body, CHAT, f"{NAME}: {odd}")) as door:
        head = door.recv(65536).decode("latin-1").lower()
    assert "x-request-id: req_" in head
    assert odd not in head


def test_waiting_for_a_place_is_the_queue(fake_box: Boxes) -> None:
    client = fake_box(tokens=30, pace_s=0.02).up("--set", "slots=1")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, client)
        until(lambda: client.presets()["tiny"]["slots"]["busy"] == 1)
        second = ask(client)
        first.result()
    found = record(client, second.headers[NAME])
    assert (found["ahead"], found["load_ms"]) == (1, 0.0)
    assert found["queue_ms"] > 100
    assert found["ttft_ms"] >= found["queue_ms"]


def test_waiting_for_an_engine_is_the_load_and_what_follows_the_queue(fake_box: Boxes) -> None:
    box = fake_box(tokens=10, pace_s=0.02, load_s=0.5)
    box.preset("other", slots=1)
    client = box.up()
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(ask, client, model="other") for _ in range(2)]
        first, second = sorted((record(client, each.result().headers[NAME]) for each in answers), key=lambda row: row["queue_ms"])
    assert first["load_ms"] > 400
    assert first["queue_ms"] < 100
    assert second["load_ms"] > 400
    assert second["queue_ms"] > 100
    assert first["total_ms"] >= first["load_ms"] + first["queue_ms"]


def test_what_a_dead_engine_had_made_is_wasted_and_only_what_arrived_is_billed(fake_box: Boxes) -> None:
    client = fake_box(tokens=100, pace_s=0.02).up()
    pid = client.child_pid()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, client)
        made = until(lambda: next((each["tokens"] for each in top(client)["in_work"] if each["tokens"] >= 5), None))
        os.kill(pid, signal.SIGKILL)
        reply = answer.result()
    assert reply.status_code == 200
    found = record(client, reply.headers[NAME])
    assert (found["status"], found["attempts"], found["completion_tokens"]) == ("ok", 2, 100)
    assert made <= found["wasted_tokens"] < 100
    assert found["load_ms"] > 0  # it waited for the next one


def test_of_an_answer_that_was_cut_what_had_passed_is_billed(fake_box: Boxes) -> None:
    client = fake_box(tokens=8).up()
    got, clean = stream(client, fake={"die_after_tokens": 5, "die_exit": -9})
    assert not clean
    [found] = client.box.closed_records(1)
    assert (found["status"], found["attempts"], found["wasted_tokens"]) == ("truncated", 1, 0)
    assert (found["completion_tokens"], found["counted"], found["prompt_tokens"]) == (5, True, None)
    assert got.count(b'"content":"') == 5


def test_of_an_engines_refusal_there_is_a_code_and_never_its_sentence(healthy: Client) -> None:
    secret = "what the user said"
    refusal = {"error_status": 400, "error_body": {"code": 400, "message": secret, "type": "invalid_request_error"}}
    found = record(healthy, ask(healthy, fake=refusal).headers[NAME])
    assert (found["status"], found["http_status"], found["error"]) == ("error", 400, "engine_400")
    assert (found["completion_tokens"], found["attempts"]) == (None, 1)
    assert secret not in json.dumps(found)


def test_a_client_that_leaves_has_the_tokens_that_were_made_for_it(fake_box: Boxes) -> None:
    client = fake_box(tokens=1000, pace_s=0.01).up()
    with client.http as http, http.stream("POST", CHAT, json={"model": "tiny", "messages": HELLO, "stream": True}) as reply:
        name = reply.headers[NAME]
        seen = sum(line.startswith("data: {") for _, line in zip(range(40), reply.iter_lines(), strict=False))
    found = record(client, name)
    assert (found["status"], found["http_status"], found["counted"]) == ("cancelled", 200, True)
    assert found["completion_tokens"] >= seen - 1 > 10


def test_a_body_that_takes_long_is_no_time_of_ours(healthy: Client) -> None:
    body = json.dumps({"model": "tiny", "messages": HELLO}).encode()
    whole = post(body, CHAT, f"{NAME}: slow-body")
    with raw(healthy, whole[:-10]) as door:
        time.sleep(0.7)
        door.sendall(whole[-10:])
        assert door.recv(65536).startswith(b"HTTP/1.1 200")
    assert record(healthy, "slow-body")["total_ms"] < 700


def test_a_body_that_never_comes_whole_has_a_record_too(healthy: Client) -> None:
    body = json.dumps({"model": "tiny", "messages": HELLO}).encode()
    with raw(healthy, post(body, CHAT, f"{NAME}: half-body")[:-10]):
        until(lambda: [row for row in accounts.records(healthy.box.home.ledger, 10) if row["client_id"] == "half-body"])
    found = record(healthy, "half-body")
    assert (found["status"], found["preset"], found["http_status"]) == ("cancelled", "", None)


def test_the_likest_prompt_before_it_and_where_they_part_are_kept(healthy: Client) -> None:
    system = {"role": "system", "content": "Be brief. " * 200}
    first = ask(healthy, messages=[system, {"role": "user", "content": "One" * 300}]).headers[NAME]
    record(healthy, first)
    second = ask(healthy, messages=[system, {"role": "user", "content": "Two" * 300}]).headers[NAME]
    found = record(healthy, second)
    assert (found["shared_with"], found["parted_in"]) == (first, "message 2 (user)")
    assert 1500 < found["shared_chars"] < 2100 < found["prompt_chars"]


def test_who_is_turned_away_at_the_door_is_counted_and_not_recorded(fake_box: Boxes) -> None:
    client = fake_box().up()

    def knock() -> None:
        with client.http as http:
            for _ in range(50):
                assert http.post(CHAT, content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
                assert http.get("/llmctl/status").status_code == 401
                assert http.get("/v1/nothing").status_code == 404

    callers = [threading.Thread(target=knock) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(WAIT_S)
    with raw(client, b"this is no HTTP\r\n\r\n") as door:
        assert door.recv(65536).startswith(b"HTTP/1.1 400")
    expected = {"unsupported_media_type": 200, "invalid_api_key": 200, "not_found": 200, "bad_http": 1}
    until(lambda: accounts.turned_away(client.box.home.ledger) == expected)
    assert list(accounts.records(client.box.home.ledger, 10)) == []
    with client.http as http:
        said = http.get("/metrics").text
    for code, count in expected.items():
        assert f'llmctl_turned_away_total{{code="{code}"}} {count}.0' in said


def test_a_scrape_sees_an_answer_in_the_making_and_counts_it_once(fake_box: Boxes) -> None:
    client = fake_box(tokens=100, pace_s=0.02).up()

    def completed(text: str) -> float:
        return float(next(line for line in text.splitlines() if 'kind="completion"' in line).split()[-1])

    with client.http as http, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, client)
        seen = [until(lambda: completed(http.get("/metrics").text) > 10 and completed(http.get("/metrics").text))]
        now = top(client)
        assert [(each["preset"], each["phase"]) for each in now["in_work"]] == [("tiny", "decode")]
        assert now["in_work"][0]["tokens"] > 10
        seen.append(now["presets"][0]["tokens"]["completion"])
        name = answer.result().headers[NAME]
        record(client, name)
        seen.append(completed(http.get("/metrics").text))
        assert top(client)["in_work"] == []
    assert seen == sorted(seen)
    assert seen[-1] == 100


def test_what_a_kill_leaves_open_the_next_start_calls_interrupted(fake_box: Boxes) -> None:
    box = fake_box(tokens=100_000, pace_s=0.05)
    client = box.up()
    with (
        client.http as http,
        contextlib.suppress(httpx2.HTTPError),
        http.stream("POST", CHAT, json={"model": "tiny", "messages": HELLO, "stream": True}, headers={NAME: "killed"}) as reply,
    ):
        passing = reply.iter_raw()
        next(passing)
        until(lambda: [row for row in accounts.records(box.home.ledger, 10) if row["client_id"] == "killed"])
        client.process.kill()
        for _ in passing:
            pass
    client.process.wait()
    client = box.up()
    assert record(client, "killed")["status"] == "interrupted"


def test_a_client_that_closes_at_the_last_event_was_answered(fake_box: Boxes) -> None:
    client = fake_box(tokens=3).up()
    body = json.dumps({"model": "tiny", "messages": HELLO, "stream": True}).encode()
    for number in range(20):
        with raw(client, post(body, CHAT, f"{NAME}: early-{number}")) as door:
            got = b""
            while b"[DONE]" not in got:
                got += door.recv(65536)
    assert {record(client, f"early-{number}")["status"] for number in range(20)} == {"ok"}


def test_anthropics_client_has_the_id_too(healthy: Client) -> None:
    with anthropic.Anthropic(base_url=healthy.address, api_key="-", max_retries=0) as client:
        message = client.messages.create(model="tiny", max_tokens=5, messages=[{"role": "user", "content": "Hello"}])
        assert record(healthy, str(message._request_id))["route"] == "/v1/messages"
        with pytest.raises(anthropic.NotFoundError) as raised:
            client.messages.create(model="nobody", max_tokens=5, messages=[{"role": "user", "content": "Hello"}])
        assert record(healthy, str(raised.value.request_id))["error"] == "model_not_found"


def test_what_was_left_out_is_said_once_however_often_it_is_put_to_an_engine(fake_box: Boxes) -> None:
    client = fake_box(tokens=100, pace_s=0.02).up("--set", "truncate=oldest", "--set", "context=512", "--set", "slots=1")
    pid = client.child_pid()
    turns = [{"role": role, "content": "word " * 150} for _ in range(3) for role in ("user", "assistant")]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, client, messages=[*turns, *HELLO])
        until(lambda: [each for each in top(client)["in_work"] if each["tokens"] >= 5])
        os.kill(pid, signal.SIGKILL)
        reply = answer.result()
    assert reply.status_code == 200
    found = record(client, reply.headers[NAME])
    assert found["attempts"] == 2
    assert reply.headers.get_list("x-llmctl-dropped-turns") == [str(found["dropped_turns"])]
    assert reply.headers.get_list(NAME) == [found["id"]]
