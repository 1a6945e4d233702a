"""Start and stop, over and over, ended at random instants by every signal: no process, socket or lock stays.

Most rounds fork a process that has the program loaded already, since what is tried is what it does and not its imports; five go through
the command line. What ``kill -9`` leaves can only be cleared by the next one: that is part of the promise, so it is part of the round.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from supervisor import rundir
from supervisor.commands.up import Start
from supervisor.errors import Error
from supervisor.order import Order
from tests import fakes
from tests.conftest import WAIT_S, Box, until

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)
Boxes = Callable[..., Box]
pytestmark = pytest.mark.filterwarnings("ignore:.* is multi-threaded, use of fork:DeprecationWarning")
"""A worker of pytest-xdist has a thread that reads what to run next (Python 3.12 warns; the fork touches nothing of it)."""


def serve_in_a_fork(box: Box, order: Start) -> int:
    """The pid of a process that serves ``order`` in the foreground."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored, as it should
        log = os.open(box.root / "up.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        order.serve(foreground=True, ready=lambda _: None)
        code = 0
    except SystemExit as exc:
        code = int(exc.code or 0)
    except KeyboardInterrupt:
        code = 130
    except Error:
        code = 8
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    """The exit code of a child of ours, negative for a signal."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"{pid} did not end within {WAIT_S} s")


def rounds(box: Box, count: int, seed: int) -> None:
    dice = random.Random(seed)
    box.root.mkdir(parents=True)
    start = Start((Order("tiny", model=box.model, overrides=("slots=2",), home=box.home),), "127.0.0.1", 0)
    order = start.fitted()  # the engine is asked once, not in each round
    for number in range(count):
        pid = serve_in_a_fork(box, order)
        until_s = time.monotonic() + dice.uniform(0, 0.5)
        while time.monotonic() < until_s:
            time.sleep(0.002)
        ending = dice.choice(SIGNALS)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, ending)
        code = ended(pid)
        said = f"round {number}, {ending.name}, exit {code}: {Path(box.root, 'up.log').read_text()[-2000:]}"
        if ending is signal.SIGKILL:
            assert code == -signal.SIGKILL, said
            until(lambda: not running_from(box))
            rundir.clear(box.home.run)
        else:
            assert code in (0, 128 + ending, -ending), said  # the last: before it had claimed anything
        assert box.left_behind() == [], said


def running_from(box: Box) -> list[str]:
    return [line for line in box.left_behind() if line[0].isdigit()]


@pytest.fixture
def box(fake_box: Boxes, monkeypatch: pytest.MonkeyPatch) -> Box:
    made = fake_box(load_s=0.02)
    monkeypatch.setenv("LLMCTL_ENGINE", str(made.engine))
    return made


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_of_the_claim_leaves_nothing(
    box: Box, monkeypatch: pytest.MonkeyPatch, ending: signal.Signals
) -> None:
    """In the moment after the description was written and before anybody would remove it."""
    describe = rundir.RunDir.describe

    def and_a_signal(owned: rundir.RunDir, **changes: Any) -> None:
        describe(owned, **changes)
        os.kill(os.getpid(), ending)

    monkeypatch.setattr(rundir.RunDir, "describe", and_a_signal)
    box.root.mkdir(parents=True)
    order = Start((Order("tiny", model=box.model, overrides=("slots=2",), home=box.home),), "127.0.0.1", 0)
    assert ended(serve_in_a_fork(box, order)) == 128 + ending
    assert box.left_behind() == []


def test_rounds_leave_nothing(box: Box) -> None:
    rounds(box, count=15, seed=1)


@pytest.mark.slow
def test_many_rounds_leave_nothing(box: Box) -> None:
    rounds(box, count=95, seed=2)


@pytest.mark.slow
def test_rounds_through_the_command_line_leave_nothing(fake_box: Boxes) -> None:
    box = fake_box()
    words = ("--port", "0", "--model", str(box.model))
    for _ in range(5):
        up = box.llmctl("up", "tiny", "--detach", *words)
        assert up.returncode == 0, up.stderr
        down = box.llmctl("down")
        assert down.returncode == 0, down.stderr
        assert box.left_behind() == []


def test_a_child_that_outlives_a_killed_llmctl_is_reaped_by_the_next(fake_box: Boxes) -> None:
    box = fake_box()
    first = box.up()
    orphan = first.child_pid()
    os.kill(orphan, signal.SIGSTOP)  # a stopped process takes no death signal but KILL; and this one must be gone all the same
    first.process.kill()
    first.process.wait()
    box.up()
    until(lambda: not any(line.startswith(f"{orphan} ") for line in running_from(box)))


def test_ctrl_c_lets_a_stream_end_and_takes_no_more(fake_box: Boxes) -> None:
    import threading

    box = fake_box(tokens=60, pace_s=0.01)
    client = box.up()
    got: list[bytes] = []

    def read() -> None:
        body = {"model": "tiny", "messages": [], "stream": True}
        with client.http as http, http.stream("POST", "/v1/chat/completions", json=body) as reply:
            got.extend(reply.iter_raw())

    reader = threading.Thread(target=read)
    reader.start()
    fakes.wait_event(box.engine.parent, "first_byte")
    assert client.stop() == 0
    reader.join(WAIT_S)
    assert b"".join(got).endswith(b"data: [DONE]\n\n")
    assert box.closed_records(1)[0]["status"] == "ok"


def test_a_drain_waits_for_the_last_byte_of_a_slow_reader(fake_box: Boxes) -> None:
    box = fake_box(tokens=2, text="x" * 3_000_000, pace_s=0.3)
    client = box.up()
    host, _, port = client.address.removeprefix("http://").rpartition(":")
    body = b'{"model": "tiny", "messages": []}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        door.connect((host, int(port)))
        door.sendall(head.encode() + body)
        fakes.wait_event(box.engine.parent, "request", path="/v1/chat/completions")
        client.process.send_signal(signal.SIGINT)
        until(lambda: box.closed_records(1))
        got = 0
        while piece := door.recv(1 << 20):
            got += len(piece)
    assert got > 6_000_000
    assert client.process.wait(WAIT_S) == 0


def test_a_second_ctrl_c_forces(fake_box: Boxes) -> None:
    box = fake_box(tokens=100_000, pace_s=0.01)
    client = box.up()
    with (
        client.http as http,
        http.stream("POST", "/v1/chat/completions", json={"model": "tiny", "messages": [], "stream": True}) as reply,
    ):
        pieces = reply.iter_raw()
        next(pieces)
        client.process.send_signal(signal.SIGINT)
        until(lambda: "draining" in (box.root / "up.log").read_text())
        assert client.stop() == 0
        rest = b""
        with contextlib.suppress(httpx2.RemoteProtocolError):  # cut: it never ends cleanly
            for piece in pieces:
                rest += piece
            pytest.fail("the stream ended as if it were whole")
    assert (
        json.loads(rest.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]["code"] == "stopping"
    )  # told, and not ended cleanly
    assert box.closed_records(1)[0]["status"] == "interrupted"
    assert box.left_behind() == []


@pytest.mark.slow  # the ladder's own 7 s; tests/test_child.py has it with shorter ones
def test_a_child_that_ignores_sigterm_is_killed(fake_box: Boxes) -> None:
    box = fake_box(ignore_sigterm=True)
    client = box.up()
    assert client.stop() == 0
    assert box.left_behind() == []
