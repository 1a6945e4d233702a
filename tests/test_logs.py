"""Logging: text and JSON, a line a record, with the request that is in work; as a process writes it, in the foreground and detached."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime

import pytest

from supervisor import logs
from supervisor.commands.up import Start
from supervisor.order import Order
from tests import fakes
from tests.conftest import WAIT_S, Box, until

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
Boxes = Callable[..., Box]


def record(message: str, *args: object, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("llmctl.arbiter", level, "", 0, message, args, None)


def within(request: str, run: Callable[[], str], preset: str = "") -> str:
    """What ``run`` says while a request is in work."""

    async def work() -> str:
        logs.request.set(request)
        logs.preset.set(preset)
        return run()

    return asyncio.run(work())


def failed() -> logging.LogRecord:
    try:
        raise RuntimeError("two\nlines")
    except RuntimeError:
        found = record("%s broke", "tiny", level=logging.ERROR)
        found.exc_info = sys.exc_info()
        return found


def test_text_is_a_time_and_a_message_and_the_request() -> None:
    line = record("%s %s -> %s (%s)", "tiny", "ready", "stopping", "drained")
    assert re.fullmatch(rf"{TIME} tiny ready -> stopping \(drained\)", logs.Text().format(line))
    said = within("req_1", lambda: logs.Text().format(line))
    assert re.fullmatch(rf"{TIME} tiny ready -> stopping \(drained\) \[req_1\]", said)


def test_in_text_the_request_stands_on_the_first_line() -> None:
    said = within("req_1", lambda: logs.Text().format(record("tiny ended\n  its last words")))
    assert said.splitlines()[0].endswith("tiny ended [req_1]")
    assert said.splitlines()[1] == "  its last words"
    said = within("req_1", lambda: logs.Text().format(failed()))
    assert said.splitlines()[0].endswith("tiny broke [req_1]")
    assert said.splitlines()[1].startswith("Traceback")


def test_json_is_one_object_a_line() -> None:
    line = record("tiny ended\n  its last %s: \udcff é \x1b", "words", level=logging.WARNING)
    text = logs.Json().format(line)
    said = json.loads(text)
    assert "\n" not in text
    assert text.isascii()
    assert list(said) == ["time", "level", "logger", "message"]
    assert said["message"] == "tiny ended\n  its last words: \udcff é \x1b"
    assert (said["level"], said["logger"]) == ("warning", "llmctl.arbiter")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", said["time"])
    assert abs(datetime.fromisoformat(said["time"]).timestamp() - line.created) < 0.001


def test_json_has_request_preset_and_exception_where_there_are() -> None:
    text = within("req_1", lambda: logs.Json().format(failed()), preset="tiny")
    said = json.loads(text)
    assert "\n" not in text
    assert (said["request"], said["preset"], said["message"]) == ("req_1", "tiny", "tiny broke")
    assert said["exception"].startswith("Traceback")
    assert said["exception"].endswith("RuntimeError: two\nlines")


def test_each_task_has_its_own_request_and_its_threads_too() -> None:
    async def one(name: str) -> tuple[str, str]:
        logs.request.set(name)
        await asyncio.sleep(0)
        return logs.request.get(), await asyncio.to_thread(logs.request.get)

    async def both() -> list[tuple[str, str]]:
        found = await asyncio.gather(one("req_1"), one("req_2"))
        assert logs.request.get() == ""
        return list(found)

    assert asyncio.run(both()) == [("req_1", "req_1"), ("req_2", "req_2")]


def test_a_task_that_outlives_its_request_is_about_its_preset_only() -> None:
    async def told() -> tuple[str, str]:
        return logs.request.get(), logs.preset.get()

    async def request() -> list[tuple[str, str]]:
        logs.request.set("req_1")
        async with asyncio.TaskGroup() as group:
            kept = group.create_task(told(), context=logs.about("tiny"))
            brought = group.create_task(told(), context=logs.about("tiny", asked_by=logs.request.get()))
        return [kept.result(), brought.result(), await told()]

    assert asyncio.run(request()) == [("", "tiny"), ("req_1", "tiny"), ("req_1", "")]


PROGRAM = """
import logging, sys
from supervisor import logs
logs.to_stderr(sys.argv[1])
logging.getLogger("httpx2").info("one a request")
logging.getLogger("uvicorn.error").info("one a connection")
logging.getLogger("uvicorn.error").error("ASGI callable returned without completing response.")
logging.getLogger("llmctl.x").debug("too much")
logging.getLogger("llmctl.x").info("here")
logging.getLogger("asyncio").warning("and %s", "there")
"""


@pytest.mark.parametrize("written", logs.FORMATS)
def test_what_goes_to_stderr(written: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, written], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    said = [json.loads(line)["message"] for line in lines] if written == "json" else [line.split(" ", 2)[2] for line in lines]
    assert said == ["here", "and there"]
    assert done.stdout == ""


# llmctl


def messages(text: str) -> list[str]:
    """Every line is an object, whatever came."""
    return [json.loads(line)["message"] for line in text.splitlines()]


def test_the_words_of_a_start_say_the_format(fake_box: Boxes) -> None:
    box = fake_box()
    for form in logs.FORMATS:
        words = Start((Order("tiny", home=box.home),), "localhost", 0, form).words()
        assert words[words.index("--log-format") + 1] == form


def test_in_the_foreground_every_line_is_json_to_the_last(fake_box: Boxes) -> None:
    client = fake_box().up("--log-format", "json")
    log = client.box.root / "up.log"
    until(lambda: " ready at " in log.read_text())
    assert client.stop() == 0
    said = messages(log.read_text())
    assert f"tiny ready at {client.address}/v1" in said
    assert any(re.match(r"tiny \w+ -> ready", each) for each in said)
    assert any(each.startswith("draining: ") for each in said)


def test_a_start_that_fails_says_so_in_json(fake_box: Boxes) -> None:
    box = fake_box(start_exit=1, start_log="llama_model_load: error loading model: unknown model architecture: 'new'")
    process = box.start("--log-format", "json")
    assert process.wait(WAIT_S) == 8
    *_, last = (box.root / "up.log").read_text().splitlines()
    messages((box.root / "up.log").read_text())
    said = json.loads(last)
    assert (said["level"], said["logger"]) == ("error", "llmctl.up")
    assert "new" in said["message"]
    assert "; try: " in said["message"]


def test_it_reaches_the_detached_half_and_logs_shows_it_as_it_is(fake_box: Boxes) -> None:
    box = fake_box()
    done = box.llmctl("up", "tiny", "--port", "0", "--model", str(box.model), "--detach", "--json", "--log-format", "json")
    assert done.returncode == 0, done.stderr
    assert box.llmctl("down", "--now").returncode == 0
    text = (box.home.logs / "llmctl.log").read_text()
    assert any(re.match(r"tiny \w+ -> ready", each) for each in messages(text))
    shown = box.llmctl("logs", "llmctl")
    assert shown.stdout == text
    assert fakes.events(box.engine.parent, "start")


def test_text_stays_for_people(fake_box: Boxes) -> None:
    client = fake_box().up()
    until(lambda: "Ctrl-C stops it." in (client.box.root / "up.log").read_text())
    assert client.stop() == 0
    log = (client.box.root / "up.log").read_text()
    assert re.search(rf"^{TIME} tiny \w+ -> ready \(\w+\)$", log, re.MULTILINE)
