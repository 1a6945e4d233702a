"""Requests across their engine's death: who is answered by the next one, who is told, who is refused; one record each.

An engine that is stopped (SIGSTOP) has whatever is asked of it in work for as long as a test wants, and has said nothing of it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from supervisor import accounts
from tests import fakes
from tests.conftest import WAIT_S, Box, Client, until

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
KILLER = [{"role": "user", "content": "Please fall over"}]
SLOW = {"pace_s": 0.02, "tokens": 100_000}
"""A stream that ends only with its engine."""

Boxes = Callable[..., Box]


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as found:
        yield found


@pytest.fixture(scope="module")
def served(module_fake_box: Boxes) -> Client:
    """Whoever asks with the word ``fall`` ends the engine; it comes back in a quarter of a second."""
    return module_fake_box(tokens=4, killer="fall", healthy_requests=1).up("--set", "slots=4")


def ask(client: Client, path: str = CHAT, **fields: Any) -> httpx2.Response:
    with client.http as http:
        return http.post(path, json={"model": "tiny", "messages": HELLO} | fields)


def tiny(client: Client) -> dict[str, Any]:
    return client.presets()["tiny"]


def rows(client: Client) -> list[dict[str, Any]]:
    """Every record, in the order in which they were opened."""
    return list(accounts.records(client.box.home.ledger, 100_000))


def new_rows(client: Client, before: int, count: int) -> list[dict[str, Any]]:
    """The records after the first ``before``, closed: so many and no more."""

    def closed() -> list[dict[str, Any]] | None:
        found = rows(client)[before:]
        return found if len(found) >= count and all(row["status"] != "open" for row in found) else None

    found: list[dict[str, Any]] = until(closed)
    assert len(found) == count
    return found


@contextmanager
def stopped(client: Client, requests: int) -> Iterator[Callable[[], int]]:
    """An engine that stands still. Call it when ``requests`` are on their way: it returns the pid when all are in work."""
    until(lambda: tiny(client)["state"] == "ready")
    pid = tiny(client)["pid"]
    os.kill(pid, signal.SIGSTOP)

    def in_work() -> int:
        until(lambda: tiny(client)["slots"]["busy"] == requests)
        return int(pid)

    try:
        yield in_work
    finally:
        if tiny(client)["pid"] == pid:
            os.kill(pid, signal.SIGCONT)


class Raw:
    """A stream over a plain socket, as it came."""

    def __init__(self, client: Client, path: str = CHAT, **fields: Any) -> None:
        body = json.dumps({"model": "tiny", "messages": HELLO, "stream": True} | fields).encode()
        host, _, port = client.address.removeprefix("http://").rpartition(":")
        self.door = socket.create_connection((host, int(port)), timeout=WAIT_S)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.door.sendall(head.encode() + body)
        self.got = b""

    def until(self, word: bytes) -> None:
        """Read until it has said so."""
        while word not in self.got:
            piece = self.door.recv(65536)
            assert piece, self.got
            self.got += piece

    def rest(self) -> bytes:
        """All of it, to the connection's end."""
        with self.door:
            while piece := self.door.recv(65536):
                self.got += piece
        return self.got

    def whole(self) -> bytes:
        """All of it, which came to a clean end."""
        self.until(b"0\r\n\r\n")
        self.door.close()
        assert b"data: [DONE]\n\n" in self.got
        return self.got

    def error(self) -> dict[str, Any]:
        """The error event that ended it: the connection was cut behind it, without the last chunk of HTTP."""
        got = self.rest()
        assert got.startswith(b"HTTP/1.1 200 "), got
        assert not got.endswith(b"0\r\n\r\n")
        assert b"[DONE]" not in got
        line = next(line for line in reversed(got.splitlines()) if line.startswith(b"data: "))
        found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))["error"]
        return found


# Nothing of the answer was sent


def test_who_has_heard_nothing_is_answered_by_the_next_child(served: Client, pool: ThreadPoolExecutor) -> None:
    before, restarts = len(rows(served)), tiny(served)["restarts"]
    with stopped(served, 4) as in_work:
        asked = [
            pool.submit(ask, served),
            pool.submit(ask, served, stream=True),
            pool.submit(ask, served, logprobs=True),  # passed whole
            pool.submit(ask, served, "/v1/messages", max_tokens=4, stream=True),
        ]
        os.kill(in_work(), signal.SIGKILL)
        whole, streamed, passed, message = (each.result(WAIT_S) for each in asked)
    assert [each.status_code for each in (whole, streamed, passed, message)] == [200] * 4
    assert whole.json()["choices"][0]["message"]["content"].split() == ["t0", "t1", "t2", "t3"]
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert streamed.text.count('"role"') == 1  # from one engine only
    assert passed.json()["choices"][0]["message"]["content"]
    assert "event: message_stop" in message.text
    found = new_rows(served, before, 4)
    assert [(row["status"], row["attempts"], row["completion_tokens"]) for row in found] == [("ok", 2, 4)] * 4
    assert tiny(served)["restarts"] == restarts + 1
    assert "killed from outside" in tiny(served)["cause"]


def test_an_embedding_is_answered_by_the_next_child(served: Client, pool: ThreadPoolExecutor) -> None:
    served.box.preset("words", kind="embedding", pooling="mean")
    assert ask(served, "/v1/embeddings", model="words", input="one").status_code == 200
    before = len(rows(served))
    pid = served.presets()["words"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    waits = pool.submit(ask, served, "/v1/embeddings", model="words", input=["one two", "three"])
    until(lambda: served.presets()["words"]["slots"]["busy"])
    os.kill(pid, signal.SIGKILL)
    assert len(waits.result(WAIT_S).json()["data"]) == 2
    (row,) = new_rows(served, before, 1)
    assert (row["status"], row["attempts"], row["prompt_tokens"]) == ("ok", 2, 3)


def test_killed_twice_under_a_request_it_is_an_error_that_sdks_send_again(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    box = fake_box(healthy_requests=1, prefill_s=600)
    client = box.up()
    folder = box.engine.parent
    once, again = (
        openai.OpenAI(base_url=f"{client.address}/v1", api_key="-", timeout=WAIT_S, max_retries=most) for most in (0, 2)
    )
    asked = [pool.submit(each.chat.completions.create, model="tiny", messages=HELLO) for each in (once, again)]
    for deaths in (1, 2):
        fakes.wait_event(folder, "request", path=CHAT, count=2 * deaths)
        if deaths == 2:
            fakes.tune(folder, tokens=3)
        os.kill(tiny(client)["pid"], signal.SIGKILL)
    with pytest.raises(openai.InternalServerError) as raised:
        asked[0].result(WAIT_S)
    assert (raised.value.status_code, raised.value.code) == (502, "engine_died")
    assert "x-should-retry" not in raised.value.response.headers
    assert asked[1].result(WAIT_S).choices[0].message.content  # its SDK asked a second time
    for each in (once, again):
        each.close()
    found = new_rows(client, 0, 3)
    assert sorted((row["status"], row["attempts"]) for row in found) == [("error", 2), ("error", 2), ("ok", 1)]


# Some of it was


def test_a_stream_cut_in_the_middle_is_told_in_every_tongue(served: Client, pool: ThreadPoolExecutor) -> None:
    until(lambda: tiny(served)["state"] == "ready")
    before = len(rows(served))
    plain = Raw(served, fake=SLOW)
    with (
        openai.OpenAI(base_url=f"{served.address}/v1", api_key="-", timeout=WAIT_S) as sdk,
        anthropic.Anthropic(base_url=served.address, api_key="-", timeout=WAIT_S) as claude,
    ):
        chunks = iter(sdk.chat.completions.create(model="tiny", messages=HELLO, stream=True, extra_body={"fake": SLOW}))
        events = iter(
            claude.messages.create(model="tiny", messages=HELLO, max_tokens=99_999, stream=True, extra_body={"fake": SLOW})
        )
        plain.until(b"t5")
        seen = [next(chunks) for _ in range(5)], [next(events) for _ in range(5)]
        whole = pool.submit(ask, served, fake={"tokens": 4, "pace_s": 0.1})
        until(lambda: tiny(served)["slots"]["busy"] == 4)
        os.kill(tiny(served)["pid"], signal.SIGKILL)
        with pytest.raises(openai.APIError, match="ended before its answer did") as raised:
            list(chunks)
        with pytest.raises(anthropic.APIStatusError, match="ended before its answer did") as told:
            list(events)
    assert all(seen)
    assert raised.value.code == "engine_died"
    assert told.value.body["error"]["code"] == "engine_died"
    error = plain.error()
    assert (error["code"], error["source"], error["try"]) == ("engine_died", "llmctl", "send it again")
    assert "killed from outside llmctl (SIGKILL)" in error["message"]
    assert whole.result(WAIT_S).status_code == 200  # of that one nothing was out
    found = new_rows(served, before, 4)
    assert sorted(row["status"] for row in found) == ["ok", "truncated", "truncated", "truncated"]
    assert all(row["attempts"] == 1 and row["completion_tokens"] >= 4 for row in found if row["status"] == "truncated")
    assert plain.got.count(b'"content":"') - 1 <= max(row["completion_tokens"] for row in found)


# Who brought it about


@contextmanager
def neighbours(client: Client, threads: int = 3) -> Iterator[list[int]]:
    """Innocent traffic without a pause, none of which may be refused; yields the statuses as they come."""
    over = threading.Event()
    came: list[int] = []
    wrong: list[str] = []

    def run(number: int) -> None:
        for turn in range(1_000_000):
            if over.is_set():
                return
            message = [{"role": "user", "content": f"innocent {number} {turn}"}]
            reply = ask(client, messages=message, fake={"tokens": 3, "pace_s": 0.02})
            came.append(reply.status_code)
            if reply.status_code != 200:
                wrong.append(reply.text)

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for each in workers:
        each.start()
    try:
        until(lambda: len(came) > threads)
        yield came
        before = len(came)
        until(lambda: len(came) > before + threads)  # it still answers
    finally:
        over.set()
        for each in workers:
            each.join(WAIT_S)
    assert wrong == []


def deaths(client: Client) -> int:
    return len(fakes.events(client.box.engine.parent, "exit"))


def test_one_killer_prompt_with_sdk_retries_takes_nobody_along(served: Client) -> None:
    until(lambda: tiny(served)["state"] == "ready")
    before, died = len(rows(served)), deaths(served)
    with (
        neighbours(served) as came,
        openai.OpenAI(base_url=f"{served.address}/v1", api_key="-", timeout=WAIT_S, max_retries=2) as sdk,
    ):
        for _ in range(3):
            with pytest.raises(openai.InternalServerError) as raised:
                sdk.chat.completions.create(model="tiny", messages=KILLER)
            assert (raised.value.status_code, raised.value.code) == (500, "engine_crashed")
            assert raised.value.response.headers["x-should-retry"] == "false"
            assert deaths(served) == died + 2
    assert "died twice while this request was in work" in raised.value.message
    found = new_rows(served, before, len(came) + 3)
    ended = [row["status"] for row in found]
    assert (ended.count("ok"), ended.count("error")) == (len(came), 3)  # one record for each that was sent
    assert sorted(row["attempts"] for row in found if row["status"] == "error") == [0, 0, 2]
    assert "-> failed" not in (served.box.root / "up.log").read_text()


def test_a_killer_that_speaks_first_is_refused_the_third_time(served: Client) -> None:
    until(lambda: tiny(served)["state"] == "ready")
    before, died = len(rows(served)), deaths(served)
    with neighbours(served, 2) as came:
        said = [Raw(served, fake={"die_after_tokens": 3}).error()["code"] for _ in range(2)]
        assert said == ["engine_died", "engine_crashed"]
        refused = Raw(served, fake={"die_after_tokens": 3})
        refused.until(b"engine_crashed")
        assert refused.got.startswith(b"HTTP/1.1 500 ")
        assert b"x-should-retry: false\r\n" in refused.got
        refused.door.close()
        assert deaths(served) == died + 2
        assert ask(served, stream=True, fake={"die_after_tokens": 300}).status_code == 200  # another one
    found = new_rows(served, before, len(came) + 4)
    assert sorted(row["status"] for row in found if row["status"] != "ok") == ["error", "truncated", "truncated"]


def spans(client: Client, pid: int) -> list[tuple[float, float, str]]:
    """When each completion of a child was in work, and its body; the warm-up's first."""
    journal = fakes.events(client.box.engine.parent, pid=pid)
    ends = {event["id"]: event["t"] for event in journal if event["event"] in ("finished", "client_closed")}
    asked = [event for event in journal if event["event"] == "request" and event["path"] == CHAT]
    return [(event["t"], ends[event["id"]], event["body"]) for event in asked]


def test_suspects_run_alone(served: Client, pool: ThreadPoolExecutor) -> None:
    def question(word: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": word}], "fake": {"tokens": 3, "pace_s": 0.02}}

    before = len(rows(served))
    with stopped(served, 3) as in_work:
        asked = [pool.submit(ask, served, **question(f"suspect {number}")) for number in range(3)]
        counted = [pool.submit(ask, served, "/tokenize", content="one two") for _ in range(3)]
        dead = in_work()
        until(lambda: len(rows(served)) == before + 6)
        os.kill(dead, signal.SIGSEGV)  # nobody says so of a kill from outside
        os.kill(dead, signal.SIGCONT)
        until(lambda: tiny(served)["pid"] not in (dead, None))
        asked += [pool.submit(ask, served, **question(f"newcomer {number}")) for number in range(8)]
        assert [each.result(WAIT_S).status_code for each in (*asked, *counted)] == [200] * 14
    found = spans(served, tiny(served)["pid"])
    suspects = [span for span in found if "suspect" in span[2]]
    assert len(suspects) == 3
    for begun, ended, body in suspects:
        beside = [span[2] for span in found if span[2] != body and span[0] < ended and begun < span[1]]
        assert beside == [], body
    assert tiny(served)["slots"] == {"busy": 0, "total": 4}
    # As many as there are slots fit again, and no more: those that took no slot were alone, too.
    with stopped(served, 4) as in_work:
        many: list[Future[httpx2.Response]] = [pool.submit(ask, served, **question(f"later {number}")) for number in range(7)]
        pid = in_work()
        until(lambda: tiny(served)["waiting"] == 3)
        os.kill(pid, signal.SIGCONT)
        assert [each.result(WAIT_S).status_code for each in many] == [200] * 7


# Stopped from outside


def test_told_to_stop_from_outside_a_busy_child_is_replaced_at_the_next_request(served: Client) -> None:
    """It closed its listener and waits for its clients for ever; the first who finds the door closed has it looked after."""
    until(lambda: tiny(served)["state"] == "ready")
    folder, pid = served.box.engine.parent, tiny(served)["pid"]
    stream = Raw(served, fake=SLOW)
    stream.until(b"t5")
    os.kill(pid, signal.SIGTERM)
    fakes.wait_event(folder, "signal", pid=pid)
    assert ask(served).status_code == 200
    error = stream.error()
    assert error["code"] == "engine_died"
    assert "takes no connections any more" in error["message"]
    assert tiny(served)["pid"] != pid


@pytest.mark.slow
def test_who_has_heard_comments_only_is_answered_by_the_next_child(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    """A busy child that somebody stops is found after some seconds; the next one takes longer to load than a client waits in silence."""
    box = fake_box(tokens=4, healthy_requests=1)
    client = box.up("--set", "slots=2")
    fakes.tune(box.engine.parent, tokens=4, load_s=6.5)
    pid = tiny(client)["pid"]
    os.kill(pid, signal.SIGSTOP)
    stream = Raw(client)
    whole = pool.submit(ask, client)
    got = stream.whole()
    assert got.index(b"\r\n:") < got.index(b"data: ")
    assert whole.result(WAIT_S).status_code == 200
    assert [(row["status"], row["attempts"]) for row in new_rows(client, 0, 2)] == [("ok", 2)] * 2
    assert "stopped from outside (SIGSTOP)" in tiny(client)["cause"]
    assert tiny(client)["pid"] != pid


def test_many_equal_killers_at_once_cost_two_deaths(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    """The first takes those with it that run beside it; its likes that wait are judged again when their turn comes."""
    client = fake_box(tokens=4, killer="fall", healthy_requests=1, prefill_s=0.2).up("--set", "slots=4")
    asked = [pool.submit(ask, client, messages=KILLER) for _ in range(12)]
    assert {each.result(WAIT_S).json()["error"]["code"] for each in asked} == {"engine_crashed"}
    assert ask(client).status_code == 200
    assert tiny(client)["restarts"] == 2


def test_what_is_given_up_and_cannot_be_written_down_is_given_up_all_the_same(fake_box: Boxes) -> None:
    """Else the same plan is started, and runs out of memory, for ever."""
    box = fake_box(tokens=4, oom_above_ctx=1024)
    box.preset("small", context=2048, fallback=[{"context": 1024}])
    box.home.data.mkdir(parents=True)
    (box.home.data / "conceded").write_text("no folder")
    client = box.up("--set", "context=1024")
    assert ask(client, model="small").status_code == 200
    assert client.presets()["small"]["memory"]["given_up"]
