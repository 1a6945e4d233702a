"""Which presets are up, seen from outside: started by a request, swapped by memory, unloaded, pinned; and nobody is dropped by it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from supervisor.errors import Exit
from tests import fakes
from tests.conftest import WAIT_S, Client, press, until
from tests.traffic import CHAT, HELLO, TOO_OLD, Boxes, Streaming, ask, command, crowd, crowded, endless, said, starts, up


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as found:
        yield found


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
    until(lambda: [row["preset"] for row in several.box.closed_records(2)].count("fresh") == 2)


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
    assert [row["status"] for row in client.box.closed_records(2)] == ["cancelled", "ok"]
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
