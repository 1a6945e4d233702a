"""What a user tells an llmctl that runs: switch, unload, restart, drain, edited presets; and nobody is dropped by it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from supervisor.errors import Exit
from tests import console, fakes
from tests.conftest import WAIT_S, Box, Client, press, until
from tests.traffic import CHAT, HELLO, TOO_OLD, Boxes, Streaming, ask, command, crowd, crowded, endless, said, starts, up


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as found:
        yield found


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


def test_the_log_of_a_detached_one_comes_back_when_its_folder_was_removed(fake_box: Boxes) -> None:
    box = fake_box(tokens=2)
    done = box.llmctl("up", "tiny", "--port", "0", "--model", str(box.model), "--detach")
    assert done.returncode == 0, done.stderr
    own = box.home.logs / "llmctl.log"
    shutil.rmtree(box.home.logs)
    until(own.exists)
    os.kill(json.loads(command(box, "status", "--json").stdout)["presets"][0]["pid"], signal.SIGKILL)
    until(lambda: "tiny starting -> ready" in own.read_text())
    assert "killed from outside" in own.read_text()


def test_a_reader_of_events_reads_to_a_clean_end_when_llmctl_stops(fake_box: Boxes) -> None:
    """And isn't waited for: after the drain's time it would be cut."""
    client = fake_box(tokens=2).up()
    with client.admin as http, http.stream("GET", "/llmctl/events") as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        client.process.send_signal(signal.SIGTERM)
        assert all(not line or line.startswith("data: ") for line in lines)
    assert client.process.wait(WAIT_S) == 0
