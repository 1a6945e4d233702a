"""The command line as a person meets it: a sentence and a ``try:`` line, the exit code, nothing left behind; the JSON scripts read."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor import logfile, paths, rundir
from supervisor.cli import COMMANDS
from supervisor.errors import Exit
from tests import console, fakes
from tests.conftest import WAIT_S, Box, until

Boxes = Callable[..., Box]
TOO_OLD = {"start_exit": 1, "start_log": "llama_model_load: error loading model: unknown model architecture: 'new'"}
"""A start that fails, and would again."""


def refused(box: Box, code: Exit, *words: str) -> str:
    """Run a command that must fail so; returns its sentence."""
    return _sentence(box, code, box.llmctl(*words))


def unstarted(box: Box, *words: str) -> subprocess.CompletedProcess[str]:
    """Run one that is refused before anything is started; detached in this process, where a start would be seen all the same."""
    if "--detach" not in words:
        return box.llmctl(*words)
    done = console.llmctl({"LLMCTL_HOME": str(box.root), "LLMCTL_ENGINE": str(box.engine)}, *words)
    assert not (box.home.logs / "llmctl.log").exists()  # the other half's
    return done


def refused_unstarted(box: Box, code: Exit, *words: str) -> str:
    """Its sentence."""
    return _sentence(box, code, unstarted(box, *words))


def _sentence(box: Box, code: Exit, done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == code, done.stderr
    lines = done.stderr.rstrip().splitlines()
    at = max(number for number, line in enumerate(lines) if line.startswith("error: "))
    assert lines[at + 1].startswith("try: "), done.stderr
    assert all(line.startswith("    ") for line in lines[at + 2 :]), done.stderr  # what the engine said last
    assert "Traceback" not in done.stderr
    assert box.left_behind() == []
    return lines[at]


@pytest.fixture
def box(fake_box: Boxes) -> Box:
    return fake_box(tokens=3)


def up(box: Box, *words: str) -> tuple[str, ...]:
    return ("up", "tiny", "--port", "0", "--model", str(box.model), *words)


@pytest.mark.parametrize("mode", [(), ("--detach",)])
class TestUpRefuses:
    """In the foreground and detached alike."""

    def test_a_preset_that_is_not_there(self, box: Box, mode: tuple[str, ...]) -> None:
        assert "tinny" in refused_unstarted(box, Exit.CONFIG, "up", "tinny", *mode)

    def test_an_option_out_of_bounds(self, box: Box, mode: tuple[str, ...]) -> None:
        assert "slots is '0'" in refused_unstarted(box, Exit.CONFIG, *up(box, "--set", "slots=0", *mode))

    def test_a_taken_port_and_names_who_has_it(self, box: Box, mode: tuple[str, ...]) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            said = refused_unstarted(box, Exit.BUSY, "up", "tiny", "--model", str(box.model), "--port", port, *mode)
        assert port in said
        assert f"(pid {os.getpid()})" in said

    def test_a_host_that_others_reach(self, box: Box, mode: tuple[str, ...]) -> None:
        assert "0.0.0.0" in refused_unstarted(box, Exit.USAGE, *up(box, "--host", "0.0.0.0", *mode))

    def test_a_model_that_is_not_there(self, box: Box, mode: tuple[str, ...]) -> None:
        refused_unstarted(box, Exit.MODEL, "up", "tiny", "--port", "0", "--model", "/no/such.gguf", *mode)

    def test_a_file_that_is_no_model(self, box: Box, tmp_path: Path, mode: tuple[str, ...]) -> None:
        page = tmp_path / "page.gguf"
        page.write_text("<!DOCTYPE html><html>Not found</html>" * 3)
        assert "a web page" in refused_unstarted(box, Exit.MODEL, "up", "tiny", "--port", "0", "--model", str(page), *mode)

    def test_an_engine_that_is_not_there(self, box: Box, mode: tuple[str, ...]) -> None:
        box.engine = box.engine.with_name("nothing")
        refused_unstarted(box, Exit.ENGINE, *up(box, *mode))

    def test_a_child_that_can_never_start(self, fake_box: Boxes, mode: tuple[str, ...]) -> None:
        box = fake_box(**TOO_OLD)
        done = box.llmctl(*up(box, *mode))
        said = _sentence(box, Exit.CHILD, done)
        assert "too old for this model" in said
        assert "'new'" in said
        *_, last = done.stderr.splitlines()
        assert last.startswith("    srv ")  # its own last words stand below
        assert "\n    llama_model_load: error loading model: unknown model architecture: 'new'\n" in done.stderr
        assert len(fakes.events(box.engine.parent, "start")) == 1  # what comes back at once isn't tried again

    def test_a_home_that_has_its_llmctl(self, box: Box, mode: tuple[str, ...]) -> None:
        running = box.up()
        done = unstarted(box, *up(box, *mode))
        assert done.returncode == Exit.BUSY
        assert f"(pid {running.process.pid})" in done.stderr
        assert running.stop() == 0


def test_detached_it_returns_when_ready_and_down_ends_it(box: Box) -> None:
    done = box.llmctl(*up(box, "--detach", "--json"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["address"].startswith("http://127.0.0.1:")
    status = json.loads(box.llmctl("status", "--json").stdout)
    (tiny,) = status["presets"]
    assert (tiny["name"], tiny["state"], tiny["slots"]) == ("tiny", "ready", {"busy": 0, "total": 4})
    assert tiny["cause"] is None
    down = box.llmctl("down", "--json")
    assert json.loads(down.stdout) == {"stopped": True, "presets": ["tiny"]}
    assert box.left_behind() == []
    assert box.llmctl("status").returncode == 0


def test_down_now_cuts_what_is_in_work(fake_box: Boxes) -> None:
    box = fake_box(tokens=100_000, pace_s=0.01)
    client = box.up()
    body = {"model": "tiny", "messages": [], "stream": True}
    with client.http as http, http.stream("POST", "/v1/chat/completions", json=body) as reply:
        pieces = reply.iter_raw()  # kept: without a reader httpx closes the connection
        next(pieces)
        assert box.llmctl("down", "--now").returncode == 0
    assert client.process.wait(WAIT_S) == 0  # by its own will, and not killed
    assert box.closed_records(1)[0]["status"] == "interrupted"


def test_down_clears_what_a_killed_llmctl_left(box: Box) -> None:
    client = box.up()
    client.process.kill()
    client.process.wait()
    assert rundir.read(box.home.run) is None
    assert json.loads(box.llmctl("down", "--json").stdout) == {"stopped": False, "cleared": True}
    assert box.left_behind() == []


def test_a_dry_run_prints_the_command_line_and_starts_nothing(box: Box) -> None:
    done = unstarted(box, "up", "tiny", "--dry-run", "--detach", "--set", "slots=3", "--json")
    argv = json.loads(done.stdout)["argv"]
    assert argv[0] == str(box.engine)
    assert argv[argv.index("--parallel") + 1] == "3"
    assert fakes.events(box.engine.parent, "start") == []
    assert not box.home.models.exists()


def test_logs_are_the_engines_words(box: Box) -> None:
    assert box.up().stop() == 0
    done = box.llmctl("logs", "tiny")
    assert "model loaded" in done.stdout
    assert "there are: tiny" in refused(box, Exit.USAGE, "logs", "nobody")


def test_a_log_that_was_deleted_comes_back_with_the_next_start(box: Box) -> None:
    client = box.up()
    (box.home.logs / "tiny.log").unlink()
    done = box.llmctl("logs", "tiny")
    assert (done.returncode, done.stderr.splitlines()[1]) == (Exit.USAGE, "try: llmctl restart tiny")
    assert box.llmctl("restart", "tiny").returncode == 0
    assert "model loaded" in box.llmctl("logs", "tiny").stdout
    assert client.stop() == 0


def test_logs_are_followed_when_the_log_is_emptied_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what becomes of one that grew too long; the engine goes on writing to the same file."""
    monkeypatch.setattr(logfile, "LOG_LIMIT", 100)
    log = paths.home({"LLMCTL_HOME": str(tmp_path)}).logs / "tiny.log"
    log.parent.mkdir(parents=True)
    log.write_text("early\n" * 100)
    words = [sys.executable, "-m", "supervisor", "logs", "tiny", "-f", "-n", "1"]
    env = os.environ | {"LLMCTL_HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(words, env=env, text=True, stdout=subprocess.PIPE) as follows, log.open("a", buffering=1) as engine:
        try:
            assert follows.stdout is not None
            assert follows.stdout.readline() == "early\n"
            for turn in range(3):
                engine.write(f"before {turn} {'x' * 100}\n")
                assert follows.stdout.readline().startswith(f"before {turn} ")
                assert logfile.trim(log) > 100
                engine.write(f"after {turn}\n")
                assert follows.stdout.readline() == f"after {turn}\n"
        finally:
            follows.terminate()  # not SIGINT, which is ignored by all that a shell started in its background


def test_status_says_why_one_is_down_and_when_it_is_tried_again(fake_box: Boxes) -> None:
    box = fake_box(tokens=2)
    for name in ("broken", "lost", "shaky"):
        box.preset(name, max_wait=1)
    client = box.up()

    def status(word: str) -> str:
        shown = until(lambda: word in (text := box.llmctl("status").stdout) and text)
        return str(shown)

    def ask(name: str) -> int:
        with client.http as http:
            return http.post("/v1/chat/completions", json={"model": name, "messages": []}).status_code

    text = status("tiny")
    tiny = next(line.split() for line in text.splitlines() if line.startswith("tiny "))
    assert tiny[1] == "ready"
    assert int(tiny[8]) > 0  # MiB planned
    assert "is down" not in text
    assert "tiny ended" not in text

    def used() -> str | None:
        row = next(line.split() for line in box.llmctl("status").stdout.splitlines() if line.startswith("tiny "))
        return row[7] if row[7] != "–" else None  # its memory is looked at every few seconds

    assert int(until(used)) > 0  # of the machine's memory, where it has no card
    os.kill(int(tiny[2]), signal.SIGKILL)
    assert re.search(r"\ntiny ended [\d.]+ m?s ago: it was killed from outside", status("tiny ended "))

    fakes.tune(box.engine.parent, **TOO_OLD)
    assert ask("broken") == 503
    text = status("broken")
    row = next(line for line in text.splitlines() if line.startswith("broken "))
    assert row.split()[1:3] == ["failed", "–"]  # for good
    assert "\nbroken is down: the engine is too old for this model: " in text
    assert "\ntry: llmctl build\nbroken said last:\n" in text
    assert "\n    llama_model_load: error loading model: unknown model architecture: 'new'\n" in text

    fakes.tune(box.engine.parent, start_exit=-6, start_log="CUDA error: no CUDA-capable device is detected")
    assert ask("lost") == 503
    assert "failed, again in 10 min" in status("failed, again in ")

    fakes.tune(box.engine.parent, start_exit=-6, start_log="GGML_ASSERT(x > 0) failed")
    assert ask("shaky") in (429, 503)
    text = status("backoff, again in ")
    assert "\n    GGML_ASSERT(x > 0) failed\n" in text


def test_usage_sums_what_was_answered(box: Box) -> None:
    client = box.up()
    with client.http as http:
        for _ in range(3):
            assert http.post("/v1/completions", json={"model": "tiny", "prompt": "a b", "max_tokens": 2}).status_code == 200
    assert client.stop() == 0
    (row,) = json.loads(box.llmctl("usage", "--json").stdout)["rows"]
    assert (row["preset"], row["requests"], row["ok"], row["completion_tokens"]) == ("tiny", 3, 3, 6)
    assert "tiny" in box.llmctl("usage").stdout


def test_usage_of_an_empty_home_is_empty(tmp_path: Path) -> None:
    home = {"LLMCTL_HOME": str(tmp_path)}
    assert json.loads(console.llmctl(home, "usage", "--json").stdout)["rows"] == []
    assert console.llmctl(home, "usage", "--records", "--json").stdout == ""


def test_every_command_has_help_and_stands_in_the_readme() -> None:
    readme = Path(__file__).parent.parent.joinpath("README.md").read_text()
    for name in COMMANDS:
        done = console.llmctl({}, name, "--help")
        assert (done.returncode, done.stderr) == (0, "")
        assert f"llmctl {name} " in done.stdout
        assert f"llmctl {name}" in readme


def test_wrong_usage_is_exit_code_2(box: Box) -> None:
    assert box.llmctl("nothing").returncode == Exit.USAGE
