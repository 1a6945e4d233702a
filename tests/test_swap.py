"""Which presets are up, seen from outside: started by a request, swapped by memory, unloaded, pinned; and nobody is dropped by it.

Two presets don't fit together here because each has a prompt cache of more than half of what is free. Those are the plan's bytes, the
same that decide on a real box; the fake engine allocates none of them.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from supervisor import memory
from supervisor.errors import Exit
from supervisor.units import MIB
from tests import console, fakes
from tests.conftest import WAIT_S, Box, Client, press, until

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
TOO_OLD = {"start_exit": 1, "start_log": "llama_model_load: error loading model: unknown model architecture: 'new'"}
"""A start that fails, and would again."""

Boxes = Callable[..., Box]


def crowd() -> int:
    """MiB of a prompt cache of which two don't fit, and one does."""
    return memory.read().available_bytes * 6 // 10 // MIB


def up(box: Box, *options: str) -> Client:
    """``tiny`` with these options."""
    return box.up(*(word for option in options for word in ("--set", option)))


def crowded(box: Box, *options: str, **others: Any) -> Client:
    """``tiny`` and, beside it in name only, ``other``."""
    size = crowd()
    box.preset("other", **{"cache_ram": size, "hold": 0} | others)
    return up(box, f"cache_ram={size}", *(options or ("hold=0",)))


def ask(client: Client, model: str, path: str = CHAT, **fields: Any) -> httpx2.Response:
    with client.http as http:
        return http.post(path, json={"model": model, "messages": HELLO} | fields)


def said(reply: httpx2.Response) -> tuple[int, str]:
    """Status and code of a refusal."""
    return reply.status_code, reply.json()["error"]["code"]


class Streaming:
    """A stream that is in work, read on a thread of its own."""

    def __init__(self, pool: ThreadPoolExecutor, client: Client, model: str, path: str = CHAT, **fields: Any) -> None:
        self.got = b""
        self.status = 0
        self.clean = False
        body = {"model": model, "messages": HELLO, "stream": True} | fields
        self.done: Future[None] = pool.submit(self._read, client, path, body)

    def _read(self, client: Client, path: str, body: dict[str, Any]) -> None:
        try:
            with client.http as http, http.stream("POST", path, json=body) as reply:
                self.status = reply.status_code
                for piece in reply.iter_raw():
                    self.got += piece
                self.clean = True
        except httpx2.RemoteProtocolError:
            pass

    def whole(self) -> bytes:
        """All of it; it must have come to a clean end."""
        self.done.result(WAIT_S)
        assert (self.status, self.clean) == (200, True), self.got
        assert self.got.endswith(b"data: [DONE]\n\n")
        return self.got

    def last(self) -> tuple[str, dict[str, Any]]:
        """Name and payload of the last event of one that was cut."""
        self.done.result(WAIT_S)
        assert (self.status, self.clean) == (200, False), self.got
        *names, data = self.got.decode().split("\n\n")[-2].split("\n")
        return "".join(names), json.loads(data.removeprefix("data: "))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as found:
        yield found


def starts(box: Box) -> list[str]:
    """Which presets' children were started, in order."""
    return [event["argv"][event["argv"].index("--alias") + 1] for event in fakes.events(box.engine.parent, "start")]


def command(box: Box, *words: str) -> subprocess.CompletedProcess[str]:
    return console.llmctl({"LLMCTL_HOME": str(box.root), "LLMCTL_ENGINE": str(box.engine)}, *words)


# Started by a request


@pytest.fixture(scope="module")
def several(module_fake_box: Boxes) -> Client:
    """``tiny`` up, others that a request may start."""
    box = module_fake_box(tokens=4)
    box.preset("other", aliases=["gpt-4o", "a/b:c"])
    box.preset("words", kind="embedding", pooling="mean")
    box.preset("gone", model={"path": str(box.root / "no-such.gguf")})
    return up(box)


@pytest.mark.parametrize("name", ["other", "gpt-4o", "a/b:c"])
def test_a_request_starts_its_preset_and_fits_it_beside_what_runs(several: Client, name: str) -> None:
    assert ask(several, name).status_code == 200
    assert several.box.closed_records(1)[-1]["preset"] == "other"
    shown = several.presets()
    assert (shown["tiny"]["state"], shown["other"]["state"]) == ("ready", "ready")
    assert starts(several.box).count("other") == 1
    assert starts(several.box).count("tiny") == 1


def test_an_embedding_preset_runs_beside_a_chat(several: Client) -> None:
    reply = ask(several, "words", "/v1/embeddings", input="one two")
    assert reply.json()["data"][0]["object"] == "embedding"
    assert ask(several, "tiny").status_code == 200
    assert said(ask(several, "words")) == (400, "wrong_kind")


def test_an_unknown_name_lists_what_is_here_and_only_that(several: Client) -> None:
    reply = ask(several, "nobody")
    assert said(reply) == (404, "model_not_found")
    for name, told in {"tiny": True, "other": True, "turbo_4b": False, "gone": False}.items():
        assert (name in reply.json()["error"]["message"]) is told, name


@pytest.mark.parametrize("name", ["turbo_4b", "gone"])
def test_a_request_never_starts_a_download(several: Client, name: str) -> None:
    reply = ask(several, name)
    assert said(reply) == (503, "model_not_downloaded")
    assert reply.json()["error"]["try"] == f"llmctl pull {name}"
    assert reply.headers["x-should-retry"] == "false"
    assert not several.box.home.models.exists()


def test_a_preset_that_was_written_just_now_needs_no_restart(several: Client) -> None:
    several.box.preset("fresh", default=True)
    assert ask(several, "fresh").status_code == 200
    assert ask(several, "whatever").status_code == 200  # it is the default one, too
    assert several.box.closed_records(1)[-1]["preset"] == "fresh"


def test_one_start_for_all_who_ask_for_it(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    box = fake_box(tokens=2)
    client = up(box)
    box.preset("other", slots=2)
    fakes.tune(box.engine.parent, tokens=2, load_s=0.5)
    replies = list(pool.map(lambda _: ask(client, "other").status_code, range(10)))
    assert replies == [200] * 10
    assert starts(box) == ["tiny", "other"]


def test_queue_0_refuses_who_finds_all_slots_taken_and_loads_all_the_same(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    box = fake_box(tokens=100_000, pace_s=0.01)
    client = up(box)
    box.preset("other", queue=0)
    first = Streaming(pool, client, "other")
    until(lambda: first.got)
    assert first.status == 200
    reply = ask(client, "other")
    assert said(reply) == (429, "queue_full")
    assert int(reply.headers["retry-after"]) >= 1
    press(client.process)  # which ends the stream


def test_max_wait_ends_a_wait_for_a_load_that_takes_too_long(fake_box: Boxes) -> None:
    box = fake_box(tokens=2)
    client = up(box)
    box.preset("other", max_wait=1)
    fakes.tune(box.engine.parent, never_healthy=True)
    reply = ask(client, "other")
    assert said(reply) == (429, "queue_timeout")
    assert "within 1.0 s" in reply.json()["error"]["message"]
    assert int(reply.headers["retry-after"]) >= 1


# Swapped


def test_a_swap_ends_what_is_in_work_and_answers_all_who_wait(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    box = fake_box(tokens=4)
    client = crowded(box)
    running = Streaming(pool, client, "tiny", fake={"tokens": 30, "pace_s": 0.02})
    until(lambda: running.got)
    held = [pool.submit(ask, client, model) for model in ["other"] * 6 + ["tiny"] * 6]
    assert [each.result(WAIT_S).status_code for each in held] == [200] * 12
    assert running.whole().count(b'"content"') == 31  # with the role's
    journal = [event["event"] for event in fakes.events(box.engine.parent) if event["event"] in ("start", "loaded", "exit")]
    assert journal == ["start", "loaded", "exit"] * (len(journal) // 3) + ["start", "loaded"]  # never two at once
    assert starts(box)[:2] == ["tiny", "other"]
    assert sorted(row["status"] for row in box.closed_records(13)) == ["ok"] * 13


def test_there_and_back_again(fake_box: Boxes) -> None:
    client = crowded(fake_box(tokens=2))
    for model in ("other", "tiny", "other"):
        assert ask(client, model).status_code == 200
    assert starts(client.box) == ["tiny", "other", "tiny", "other"]
    shown = client.presets()
    assert (shown["tiny"]["state"], shown["tiny"]["pid"], shown["other"]["state"]) == ("stopped", None, "ready")
    assert shown["tiny"]["cause"] is None  # nothing is wrong with it


@contextmanager
def endless(client: Client, model: str, threads: int = 3) -> Iterator[list[float]]:
    """Traffic without a pause; yields when each answer came. All of them must be good ones."""
    over = threading.Event()
    came: list[float] = []
    wrong: list[object] = []

    def run() -> None:
        while not over.is_set():
            reply = ask(client, model, fake={"tokens": 4, "pace_s": 0.02})
            if reply.status_code != 200:
                wrong.append(reply.text)
            came.append(time.monotonic())

    workers = [threading.Thread(target=run) for _ in range(threads)]
    for each in workers:
        each.start()
    try:
        until(lambda: len(came) > threads)
        yield came
    finally:
        over.set()
        for each in workers:
            each.join(WAIT_S)
    assert wrong == []


def test_endless_traffic_for_one_preset_does_not_keep_another_out(fake_box: Boxes) -> None:
    client = crowded(fake_box(), "hold=1", "slots=2")
    with endless(client, "tiny") as came:
        before = len(came)
        assert ask(client, "other").status_code == 200
        assert len(came) - before >= 2  # it went on for its hold
        back = len(came)
        until(lambda: len(came) > back + 3)  # and is back when its turn has come


def test_the_hold_is_held_and_over_when_the_preset_is_idle(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    """What is idle for a moment gives way then; so one answer goes on all the time, and others come and go beside it."""
    client = crowded(fake_box(tokens=4), "hold=3600", "slots=2")
    running = Streaming(pool, client, "tiny", fake={"tokens": 150, "pace_s": 0.02})
    until(lambda: running.got)
    waits = pool.submit(ask, client, "other")
    until(lambda: client.presets().get("other", {}).get("waiting"))
    for _ in range(5):
        assert ask(client, "tiny").status_code == 200
    assert (running.done.done(), starts(client.box)) == (False, ["tiny"])
    running.whole()
    assert waits.result(WAIT_S).status_code == 200
    assert starts(client.box) == ["tiny", "other"]


def test_who_leaves_before_the_swap_leaves_everything_as_it_was(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    client = crowded(fake_box(tokens=2), "hold=0", "slots=2")
    running = Streaming(pool, client, "tiny", fake={"tokens": 100_000, "pace_s": 0.02})
    until(lambda: running.got)
    with client.http as http, pytest.raises(httpx2.ReadTimeout):
        http.post(CHAT, json={"model": "other", "messages": HELLO}, timeout=1)
    assert until(lambda: client.presets()["tiny"]["state"] == "ready")
    assert ask(client, "tiny").status_code == 200  # beside the one that still runs
    assert starts(client.box) == ["tiny"]
    assert [row["status"] for row in client.box.closed_records(2)] == ["open", "cancelled", "ok"]
    press(client.process)  # which ends the stream


def test_a_pinned_preset_gives_way_to_none(fake_box: Boxes) -> None:
    client = crowded(fake_box(tokens=2), "pin=on")
    reply = ask(client, "other")
    assert said(reply) == (503, "does_not_fit")
    assert reply.headers["x-should-retry"] == "false"
    assert "tiny" in reply.json()["error"]["message"]
    assert reply.json()["error"]["try"]
    assert ask(client, "tiny").status_code == 200
    assert client.presets()["tiny"]["pinned"] is True
    assert starts(client.box) == ["tiny"]


def test_ttl_unloads_what_nobody_asks_for_and_the_next_request_loads_it_again(fake_box: Boxes) -> None:
    box = fake_box(tokens=2)
    client = up(box)
    box.preset("other", ttl=1)
    assert ask(client, "other").status_code == 200
    until(lambda: client.presets()["other"]["state"] == "stopped")
    with client.http as http:
        assert http.get("/health").status_code == 200  # unloaded is not ill
    assert client.presets()["tiny"]["state"] == "ready"
    assert ask(client, "other").status_code == 200
    assert starts(box) == ["tiny", "other", "other"]


def test_ttl_never_cuts_an_answer(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    box = fake_box(tokens=2)
    client = up(box)
    box.preset("other", ttl=1)
    Streaming(pool, client, "other", fake={"tokens": 80, "pace_s": 0.02}).whole()
    assert starts(box) == ["tiny", "other"]


def test_also_has_two_up_from_the_start(fake_box: Boxes) -> None:
    box = fake_box(tokens=2)
    box.preset("other")
    client = box.up("--also", "other")
    assert {name: each["state"] for name, each in client.presets().items()} == {"tiny": "ready", "other": "ready"}
    assert (ask(client, "tiny").status_code, ask(client, "other").status_code) == (200, 200)
    assert client.stop() == 0


def test_also_refuses_two_that_do_not_fit_together(fake_box: Boxes) -> None:
    box = fake_box(tokens=2)
    size = crowd()
    box.preset("other", cache_ram=size)
    words = ("up", "tiny", "--model", str(box.model), "--set", f"cache_ram={size}", "--port", "0", "--also", "other")
    done = command(box, *words)
    assert done.returncode == Exit.NO_FIT
    assert "beside tiny" in done.stderr
    assert starts(box) == []


# Waiting clients


def test_who_waits_for_a_load_hears_comments_and_how_it_ends(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    """One box for all of them, since the first comment comes after 5 s."""
    box = fake_box(tokens=4)
    folder = box.engine.parent
    client = up(box)
    box.preset("other")
    box.preset("quiet", wait_comments=False)
    box.preset("broken")
    fakes.tune(folder, tokens=4, load_s=6.5)
    loads = Streaming(pool, client, "other")
    silent = Streaming(pool, client, "quiet")
    until(lambda: len(starts(box)) == 3)
    fakes.tune(folder, load_s=6.5, **TOO_OLD)
    failing = Streaming(pool, client, "broken")
    anthropic = Streaming(pool, client, "broken", "/v1/messages", max_tokens=4)
    refused = pool.submit(ask, client, "broken")

    got = loads.whole()
    assert got.startswith(b":")
    assert got.index(b"data: ") > got.index(b":")
    assert b":" not in silent.whole()[:1]
    name, payload = failing.last()
    assert (name, payload["error"]["code"], payload["error"]["source"]) == ("", "engine_unavailable", "llmctl")
    assert failing.got.startswith(b":")
    name, payload = anthropic.last()
    assert (name, payload["type"]) == ("event: error", "error")
    assert "'new'" in payload["error"]["message"]
    assert said(refused.result(WAIT_S)) == (503, "engine_unavailable")  # no comment for whoever wants one whole answer
    rows = box.closed_records(5)
    assert sorted(row["status"] for row in rows) == ["ok", "ok", "refused", "refused", "refused"]


def test_a_preset_that_can_not_start_is_a_503_with_its_cause(fake_box: Boxes) -> None:
    box = fake_box(tokens=2)
    client = up(box)
    box.preset("other")
    fakes.tune(box.engine.parent, **TOO_OLD)
    for _ in range(2):  # the second finds it failed
        reply = ask(client, "other")
        assert said(reply) == (503, "engine_unavailable")
        assert "too old for this model" in reply.json()["error"]["message"]
        assert reply.headers["x-should-retry"] == "false"
    assert starts(box).count("other") == 1
    assert ask(client, "tiny").status_code == 200


# Ended in the middle


def test_killed_in_the_middle_of_a_swap_it_leaves_no_orphan(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    box = fake_box(tokens=2)
    client = crowded(box)
    fakes.tune(box.engine.parent, never_healthy=True)
    waits = Streaming(pool, client, "other")
    until(lambda: starts(box) == ["tiny", "other"])
    client.process.kill()
    client.process.wait(WAIT_S)
    assert not waits.clean
    assert json.loads(command(box, "down", "--json").stdout) == {"stopped": False, "cleared": True}
    assert until(lambda: box.left_behind() == [])


def test_killed_while_one_gives_way_it_leaves_no_orphan(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    box = fake_box()
    client = crowded(box)
    running = Streaming(pool, client, "tiny", fake={"tokens": 100_000, "pace_s": 0.02})
    until(lambda: running.got)
    Streaming(pool, client, "other")
    until(lambda: client.presets()["tiny"]["state"] == "draining")
    client.process.kill()
    client.process.wait(WAIT_S)
    command(box, "down")
    assert until(lambda: box.left_behind() == [])


def test_told_to_stop_in_the_middle_of_a_swap_it_answers_both(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    box = fake_box(tokens=2)
    client = crowded(box)
    running = Streaming(pool, client, "tiny", fake={"tokens": 50, "pace_s": 0.02})
    until(lambda: running.got)
    waits = Streaming(pool, client, "other")
    until(lambda: client.presets()["tiny"]["state"] == "draining")
    client.process.send_signal(signal.SIGTERM)
    running.whole()
    waits.whole()  # its drain has time for it
    assert client.process.wait(WAIT_S) == 0
    assert box.left_behind() == []
    assert [row["status"] for row in box.closed_records(2)] == ["ok", "ok"]


def test_told_twice_it_refuses_who_waits_for_a_load(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    box = fake_box(tokens=2)
    client = crowded(box)
    fakes.tune(box.engine.parent, never_healthy=True)
    waits = pool.submit(ask, client, "other")
    until(lambda: starts(box) == ["tiny", "other"])
    client.process.send_signal(signal.SIGTERM)
    until(lambda: "draining: " in (box.root / "up.log").read_text())
    client.process.send_signal(signal.SIGTERM)
    assert said(waits.result(WAIT_S)) == (503, "stopping")
    assert client.process.wait(WAIT_S) == 0
    assert box.left_behind() == []


# From the command line


def test_switch_lets_what_is_in_work_end_and_drops_nobody(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    box = fake_box(tokens=2)
    client = crowded(box, "hold=3600")
    running = Streaming(pool, client, "tiny", fake={"tokens": 40, "pace_s": 0.02})
    until(lambda: running.got)
    done = command(box, "switch", "other", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"preset": "other", "state": "ready", "address": client.address}
    running.whole()
    assert {name: each["state"] for name, each in client.presets().items()} == {"tiny": "stopped", "other": "ready"}
    again = command(box, "switch", "other")  # it is up already
    assert (again.returncode, again.stdout) == (0, "")
    assert f"other is ready at {client.address}/v1" in again.stderr
    assert starts(box) == ["tiny", "other"]


@pytest.fixture(scope="module")
def refusing(module_fake_box: Boxes) -> Client:
    box = module_fake_box(tokens=2)
    box.preset("wide", cache_ram=crowd())
    return up(box, "pin=on", f"cache_ram={crowd()}")


@pytest.mark.parametrize("verb", ["switch", "unload"])
def test_a_command_that_names_nobody_says_who_there_is(refusing: Client, verb: str) -> None:
    done = command(refusing.box, verb, "nobody")
    assert done.returncode == Exit.CONFIG
    error, hint = done.stderr.splitlines()[-2:]
    assert "there is no preset 'nobody'; there are: tiny, " in error
    assert hint == "try: llmctl presets"


def test_what_was_never_fetched_can_not_be_switched_to_and_is_unloaded_already(refusing: Client) -> None:
    done = command(refusing.box, "switch", "turbo_4b")
    assert done.returncode == Exit.MODEL
    error, hint = done.stderr.splitlines()[-2:]
    assert "is not on this machine" in error
    assert hint == "try: llmctl pull turbo_4b"
    done = command(refusing.box, "unload", "turbo_4b")
    assert (done.returncode, done.stderr) == (0, "turbo_4b is not loaded\n")


def test_switch_to_what_does_not_fit_beside_a_pinned_one_is_exit_code_4(refusing: Client) -> None:
    for _ in range(2):
        done = command(refusing.box, "switch", "wide")
        assert done.returncode == Exit.NO_FIT, done.stderr
        error, hint = done.stderr.splitlines()[-2:]
        assert "wide" in error
        assert "tiny" in error
        assert hint == "try: llmctl unload tiny"
    assert refusing.presets()["tiny"]["state"] == "ready"


def test_a_switch_that_failed_can_be_tried_again(fake_box: Boxes) -> None:
    """What it failed of the last time is old news then."""
    box = fake_box(tokens=2)
    client = up(box)
    box.preset("other")
    fakes.tune(box.engine.parent, **TOO_OLD)
    done = command(box, "switch", "other")
    assert done.returncode == Exit.CHILD
    assert "too old for this model" in done.stderr
    fakes.tune(box.engine.parent, tokens=2)
    done = command(box, "switch", "other", "--json")
    assert done.returncode == 0, done.stderr
    assert client.presets()["other"]["cause"] is None


def test_switch_and_unload_without_a_running_llmctl(tmp_path: Path) -> None:
    for verb in ("switch", "unload"):
        done = console.llmctl({"LLMCTL_HOME": str(tmp_path)}, verb, "tiny")
        assert done.returncode == Exit.USAGE
        assert done.stderr.splitlines()[-2:] == ["error: nothing runs", "try: llmctl up tiny --detach"]


def test_unload_gives_the_memory_back_after_what_is_in_work(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    box = fake_box(tokens=2)
    client = up(box)
    running = Streaming(pool, client, "tiny", fake={"tokens": 40, "pace_s": 0.02})
    until(lambda: running.got)
    done = command(box, "unload", "tiny", "--json")
    assert json.loads(done.stdout) == {"preset": "tiny", "state": "draining"}
    running.whole()
    until(lambda: client.presets()["tiny"]["state"] == "stopped")
    assert client.presets()["tiny"]["pid"] is None
    assert "tiny is not loaded" in command(box, "unload", "tiny").stderr
    with client.http as http:
        assert http.get("/health").status_code == 200
    assert ask(client, "tiny").status_code == 200
    assert starts(box) == ["tiny", "tiny"]


def test_pull_has_the_files_here_and_starts_nothing(fake_box: Boxes) -> None:
    box = fake_box()
    box.preset("other")
    box.preset("gone", model={"path": str(box.root / "no-such.gguf")})
    done = command(box, "pull", "other", "--json")
    assert json.loads(done.stdout) == {"preset": "other", "files": [str(box.model)]}
    assert command(box, "pull", "other").stderr.strip() == f"other: {box.model}"
    assert command(box, "pull", "nobody").returncode == Exit.CONFIG
    assert command(box, "pull", "gone").returncode == Exit.MODEL
    assert starts(box) == []


# What changes while it runs


def test_a_switch_that_another_one_overtakes_says_so(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    box = fake_box(tokens=2)
    client = crowded(box)
    running = Streaming(pool, client, "tiny", fake={"tokens": 150, "pace_s": 0.02})
    until(lambda: running.got)
    overtaken = subprocess.Popen(
        [sys.executable, "-m", "supervisor", "switch", "other"],
        env=box.env,
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    until(lambda: client.presets()["tiny"]["state"] == "draining")
    assert command(box, "switch", "tiny").returncode == 0
    _, error = overtaken.communicate(timeout=WAIT_S)
    assert overtaken.returncode == Exit.CHILD
    assert "error: other is not running: it is no longer wanted\ntry: llmctl switch other" in error
    assert client.presets()["tiny"]["state"] == "ready"
    running.whole()


def test_a_default_preset_does_not_hide_a_new_one(fake_box: Boxes) -> None:
    box = fake_box(tokens=2)
    client = up(box, "default=on")
    assert ask(client, "new").json()["model"] == "tiny"
    box.preset("new")
    assert ask(client, "new").json()["model"] == "new"
    (box.home.presets / "odd.yaml").write_text("slotz: 1\n")
    reply = ask(client, "odd")
    assert said(reply) == (503, "faulty_preset")
    assert "odd.yaml:1: " in reply.json()["error"]["message"]


def test_a_preset_whose_file_is_gone_can_still_be_unloaded(fake_box: Boxes) -> None:
    box = fake_box(tokens=2)
    client = up(box)
    box.preset("other")
    assert ask(client, "other").status_code == 200
    (box.home.presets / "other.yaml").unlink()
    assert said(ask(client, "nobody")) == (404, "model_not_found")  # the folder was read anew
    with client.http as http:
        assert http.get("/v1/models/other").status_code == 200  # it answers
    assert command(box, "unload", "other").returncode == 0
    until(lambda: client.presets()["other"]["state"] == "stopped")
    with client.http as http:
        assert http.get("/v1/models/other").status_code == 404
    gone = command(box, "unload", "nobody")
    assert gone.returncode == Exit.CONFIG
    assert "error: there is no preset 'nobody'; there are: " in gone.stderr
    assert gone.stderr.endswith("try: llmctl presets\n")


def test_an_edited_preset_is_heeded_at_its_next_start(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    box = fake_box(tokens=2)
    client = up(box)
    box.preset("other")
    assert ask(client, "other").status_code == 200
    assert command(box, "unload", "other").returncode == 0
    until(lambda: client.presets()["other"]["state"] == "stopped")
    box.preset("other", slots=1, queue=0)
    running = Streaming(pool, client, "other", fake={"tokens": 400, "pace_s": 0.02})
    until(lambda: running.got)
    assert said(ask(client, "other")) == (429, "queue_full")
    press(client.process)


def test_a_preset_that_a_client_asked_for_and_that_fails_makes_nothing_else_ill(fake_box: Boxes) -> None:
    box = fake_box(tokens=2)
    client = up(box)
    box.preset("other")
    fakes.tune(box.engine.parent, **TOO_OLD)
    assert said(ask(client, "other")) == (503, "engine_unavailable")
    with client.http as http:
        reply = http.get("/health")
    assert (reply.status_code, reply.json()["presets"]) == (200, {"tiny": "ready", "other": "failed"})


# Restarted, drained


def test_restart_starts_all_anew_and_drops_nobody(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    box = fake_box(tokens=2)
    box.preset("other", slots=2)
    client = box.up("--also", "other", "--set", "slots=3")
    pids = {name: each["pid"] for name, each in client.presets().items()}
    with endless(client, "tiny", 2), endless(client, "other", 2):
        running = Streaming(pool, client, "tiny", fake={"tokens": 40, "pace_s": 0.02})
        until(lambda: running.got)
        done = command(box, "restart", "--json")
        assert json.loads(done.stdout) == {
            "presets": [{"preset": "tiny", "state": "ready"}, {"preset": "other", "state": "ready"}]
        }
        assert running.whole().count(b'"content"') == 41
        shown = client.presets()
        done = command(box, "restart", "other")
        assert (done.returncode, done.stdout) == (0, "")
        assert "other is ready" in done.stderr
    assert starts(box).count("tiny") == 2
    assert starts(box).count("other") == 3
    assert {shown[name]["pid"] for name in shown}.isdisjoint(pids.values())
    assert client.presets()["tiny"]["pid"] == shown["tiny"]["pid"]
    assert [each["restarts"] for each in client.presets().values()] == [0, 0]  # those are for deaths


def test_drain_holds_who_asks_until_a_restart(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    box = fake_box(tokens=2)
    client = up(box, "slots=2")
    box.preset("other")
    running = Streaming(pool, client, "tiny", fake={"tokens": 150, "pace_s": 0.02})
    until(lambda: running.got)
    draining = pool.submit(box.llmctl, "drain", "--json")
    until(lambda: client.presets()["tiny"]["state"] == "draining")
    held = [pool.submit(ask, client, model) for model in ("tiny", "tiny", "other")]
    assert json.loads(draining.result(WAIT_S).stdout)["presets"][0] == {"preset": "tiny", "state": "stopped"}
    running.whole()
    until(lambda: sum(each["waiting"] for each in client.presets().values()) == 3)
    shown = client.presets()
    assert {name: (each["state"], each["held"], each["cause"]) for name, each in shown.items()} == {
        "tiny": ("stopped", True, None),
        "other": ("stopped", True, None),
    }
    assert "held" in command(box, "status").stdout
    assert starts(box) == ["tiny"]
    with client.http as http:
        assert http.get("/health").status_code == 200  # that is as the user wants it
    done = command(box, "restart", "--json")
    assert {each["preset"] for each in json.loads(done.stdout)["presets"]} == {"tiny", "other"}
    assert [each.result(WAIT_S).status_code for each in held] == [200] * 3
    assert sorted(starts(box)) == ["other", "tiny", "tiny"]
    assert not any(each["held"] for each in client.presets().values())


def test_one_preset_is_drained_alone_and_switch_releases_it(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    box = fake_box(tokens=2)
    box.preset("other")
    client = box.up("--also", "other")
    done = command(box, "drain", "other")
    assert done.returncode == 0
    assert "other runs no more; requests wait, llmctl restart other lets them go on" in done.stderr
    held = pool.submit(ask, client, "other")
    until(lambda: client.presets()["other"]["waiting"])
    assert ask(client, "tiny").status_code == 200
    assert not held.done()
    assert command(box, "switch", "other").returncode == 0
    assert held.result(WAIT_S).status_code == 200
    assert starts(box).count("tiny") == 1


@pytest.mark.parametrize("verb", ["restart", "drain"])
def test_restart_and_drain_say_what_they_can_not_do(refusing: Client, tmp_path: Path, verb: str) -> None:
    done = command(refusing.box, verb, "nobody")
    assert done.returncode == Exit.CONFIG
    assert "there is no preset 'nobody'; there are: tiny, " in done.stderr
    done = console.llmctl({"LLMCTL_HOME": str(tmp_path)}, verb)
    assert (done.returncode, done.stderr.splitlines()[-2]) == (Exit.USAGE, "error: nothing runs")


def test_a_restart_of_what_was_given_up_tries_it_again_and_says_what_came_of_it(fake_box: Boxes) -> None:
    box = fake_box(tokens=2)
    client = up(box)
    box.preset("other")
    fakes.tune(box.engine.parent, **TOO_OLD)
    assert said(ask(client, "other")) == (503, "engine_unavailable")
    done = command(box, "restart", "other")
    assert done.returncode == Exit.CHILD
    assert "too old for this model" in done.stderr
    fakes.tune(box.engine.parent, tokens=2)
    assert command(box, "restart", "other").returncode == 0
    assert ask(client, "other").status_code == 200


# A preset's file is edited while it runs


def argv_of(box: Box, number: int) -> list[str]:
    found: list[str] = fakes.events(box.engine.parent, "start")[number]["argv"]
    return found


def option_of(box: Box, number: int, flag: str) -> str:
    argv = argv_of(box, number)
    return argv[argv.index(flag) + 1]


def test_a_changed_file_restarts_its_own_child_only_and_refuses_nobody(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    box = fake_box(tokens=2)
    box.preset("tiny", slots=3)
    box.preset("other", slots=2)
    client = box.up("--also", "other", "--set", "slots=2")
    with endless(client, "tiny", 2), endless(client, "other", 2):
        running = Streaming(pool, client, "other", fake={"tokens": 150, "pace_s": 0.02})
        until(lambda: running.got)
        box.preset("other", slots=3, context=4096)
        until(lambda: client.presets()["other"]["state"] == "draining")
        running.whole()
        until(lambda: starts(box).count("other") == 2)
        assert (option_of(box, 2, "--parallel"), option_of(box, 2, "--ctx-size")) == ("3", "4096")
        until(lambda: client.presets()["other"]["state"] == "ready")
        assert starts(box).count("tiny") == 1
        box.preset("tiny", slots=4, context=1024)
        until(lambda: starts(box).count("tiny") == 2)
        assert option_of(box, 3, "--parallel") == "2"  # as `up` was told
        assert option_of(box, 3, "--ctx-size") == "1024"
    assert sorted(starts(box)) == ["other", "other", "tiny", "tiny"]
    assert client.presets()["other"]["slots"]["total"] == 3


def brief(client: Client, model: str) -> tuple[int, str] | None:
    """What a client hears that leaves after a moment."""
    with client.http as http, contextlib.suppress(httpx2.ReadTimeout):
        return said(http.post(CHAT, json={"model": model, "messages": HELLO}, timeout=2))
    return None


def test_what_the_command_line_does_not_say_is_heeded_without_a_restart(fake_box: Boxes, pool: ThreadPoolExecutor) -> None:
    box = fake_box(tokens=2)
    box.preset("tiny")
    client = up(box)
    box.preset("other", slots=1)
    running = Streaming(pool, client, "other", fake={"tokens": 100_000, "pace_s": 0.02})
    until(lambda: running.got)
    waits = pool.submit(ask, client, "other")
    until(lambda: client.presets()["other"]["waiting"])
    box.preset("other", slots=1, queue=1, aliases=["gpt-4o"])
    until(lambda: brief(client, "gpt-4o") == (429, "queue_full"))
    box.preset("other", slots=1, queue=5, max_wait=1)
    until(lambda: brief(client, "other") == (429, "queue_timeout"))
    box.preset("tiny", ttl=1)
    until(lambda: client.presets()["tiny"]["state"] == "stopped")
    assert not waits.done()  # it came under the old word
    assert starts(box) == ["tiny", "other"]
    press(client.process)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"slotz": 1}, "stays as it was: "),
        ({"cache_ram": 1_000_000}, "goes on as it was: "),
        ({"model": {"path": "/no/such.gguf"}}, "goes on as it was: "),
    ],
)
def test_a_change_that_is_no_good_leaves_the_child_as_it_is(fake_box: Boxes, words: dict[str, Any], told: str) -> None:
    box = fake_box(tokens=2)
    box.preset("other")
    client = box.up("--also", "other")
    pid = client.presets()["other"]["pid"]
    box.preset("other", **words)
    until(lambda: told in (box.root / "up.log").read_text())
    assert ask(client, "other").status_code == 200
    assert client.presets()["other"]["pid"] == pid
    box.preset("other", slots=2)
    until(lambda: starts(box).count("other") == 2)  # one that is good is heeded
    assert option_of(box, 2, "--parallel") == "2"
    assert ask(client, "other").status_code == 200
    assert starts(box).count("tiny") == 1


def test_an_edit_gives_another_try_to_what_was_given_up_for_good(fake_box: Boxes) -> None:
    box = fake_box(tokens=2)
    client = up(box)
    box.preset("other")
    fakes.tune(box.engine.parent, **TOO_OLD)
    assert said(ask(client, "other")) == (503, "engine_unavailable")
    fakes.tune(box.engine.parent, tokens=2)
    assert said(ask(client, "other")) == (503, "engine_unavailable")
    box.preset("other", slots=2)
    until(lambda: client.presets()["other"]["state"] == "stopped")
    assert ask(client, "other").status_code == 200
    assert starts(box) == ["tiny", "other", "other"]
