"""``llmctl top``: what two looks say together, what is drawn of it for a size, and the command on a terminal while requests stream."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from supervisor import dashboard
from supervisor.dashboard import ASCII, BLOCKS, Scene, bars, draw, plain
from supervisor.errors import Exit
from supervisor.glance import SPAN_S, Glance, History, Rates, Tokens
from supervisor.record import Record
from supervisor.running import Running
from tests import console
from tests.conftest import WAIT_S, Box, Client, press, until
from tests.traffic import CHAT, HELLO, Boxes, ask, command, up

NOW = 1e9

# What is said, made up


def preset(name: str, state: str = "ready", **other: Any) -> dict[str, Any]:
    """One of a card's, as the route has it."""
    lives = state not in ("stopped", "failed", "backoff")
    return {
        "name": name,
        "state": state,
        "pid": 7 if lives else None,
        "slots": {"busy": 2, "total": 4},
        "waiting": 0,
        "restarts": 0,
        "cause": None,
        "try": None,
        "try_again_s": None,
        "held": False,
        "loaded": None,
        "used_mib": {"host": 812, "card": 6210},
        "memory": {
            "device": "CUDA0",
            "planned_mib": {"device": {"weights": 6000.0, "kv": 400.4}, "host": {"process": 500.0}},
        },
        "tokens": {"prompt": 0, "completion": 0},
    } | other


def work(number: int, phase: str = "decode", **other: Any) -> dict[str, Any]:
    made = {"tokens": 1234, "tokens_per_s": 41.27} if phase == "decode" else {"tokens": 0, "tokens_per_s": None}
    fixed = {"id": f"req_1a22f33745{number:09x}", "preset": "tiny", "route": "/v1/chat/completions", "phase": phase}
    return {**fixed, "age_s": 3.0 + number, **made, **other}


def glance(at_s: float = 100.0, *presets: dict[str, Any], **other: Any) -> Glance:
    said = {
        "at_s": at_s,
        "pid": 77,
        "address": "http://127.0.0.1:8080",
        "engine": "b11312",
        "version": "0.1.0",
        "power_w": None,
        "cpu_s": at_s / 1000,
        "records_lost": 0,
        "presets": presets,
        "in_work": (),
    }
    return Glance.read(said | other)


def counted(at_s: float, pid: int = 77, **completion: int) -> Glance:
    tokens = {name: {"prompt": 10 * count, "completion": count} for name, count in completion.items()}
    return glance(at_s, *(preset(name, tokens=each) for name, each in tokens.items()), pid=pid)


def record(number: int, **other: Any) -> Record:
    fixed: dict[str, Any] = {
        "id": f"req_0a22f33745{number:09x}",
        "preset": "tiny",
        "route": "/v1/chat/completions",
        "status": "ok",
    }
    times = {"opened_at": NOW - 20 - number, "closed_at": NOW - 10 - number, "total_ms": 9876.0, "ttft_ms": 432.1}
    return Record(**fixed | times | {"completion_tokens": 312, "decode_tps": 41.3, "prompt_tokens": 5321} | other)


def scene(seen: Glance, *ended: Record, rates: Rates | None = None, **other: Any) -> Scene:
    return Scene(seen, rates, History(), History(), ended, NOW, **other)


def busy() -> Scene:
    """Everything that there can be."""
    presets = (
        preset("tiny", waiting=3, tokens={"prompt": 900, "completion": 82}),
        preset("a_preset_of_a_long_name", "starting", loaded=0.45),
        preset("gone", "stopped"),
        preset("bad", "failed", cause="the file is too old", **{"try": "llmctl pull bad", "try_again_s": 590.0}),
    )
    in_work = [work(number, ("decode", "prefill", "waits")[number % 3]) for number in range(30)]
    now = glance(100.0, *presets, in_work=in_work, power_w=187.3, records_lost=12)
    before = glance(99.0, *(each | {"tokens": {"prompt": 0, "completion": 0}} for each in presets))
    found = scene(now, *(record(number) for number in range(50)), rates=Rates.between(before, now), note="a note")
    for at in range(45):
        found.made.add(55.0 + at, 1.0, float(at))
    return found


# What two looks say


def test_a_rate_is_the_difference_of_two_counters_over_that_of_the_clock() -> None:
    rates = Rates.between(counted(100.0, tiny=50, other=7), counted(102.0, tiny=150, other=7))
    assert rates is not None
    assert rates.by_preset == {"tiny": Tokens(500, 50), "other": Tokens(0, 0)}
    assert rates.all == Tokens(500, 50)
    assert rates.cpu_share == pytest.approx(0.001)


def test_a_preset_that_is_new_began_at_0() -> None:
    rates = Rates.between(counted(100.0), counted(101.0, tiny=5))
    assert rates is not None
    assert rates.by_preset == {"tiny": Tokens(50, 5)}


def test_a_counter_that_went_back_says_nothing_and_the_others_go_on() -> None:
    rates = Rates.between(counted(100.0, tiny=50, other=7), counted(101.0, tiny=3, other=8))
    assert rates is not None
    assert rates.by_preset == {"other": Tokens(10, 1)}


@pytest.mark.parametrize("now", [counted(101.0, pid=78, tiny=60), counted(100.0, tiny=60), counted(99.0, tiny=60)])
def test_two_llmctl_have_no_rate_together(now: Glance) -> None:
    assert Rates.between(counted(100.0, tiny=50), now) is None


def test_of_a_history_each_part_has_its_mean() -> None:
    """Beside the difference of two sums from the beginning on."""
    chance = random.Random(6)
    for _ in range(50):
        history, at_s, kept = History(), 1000.0, list[tuple[float, float, float]]()
        for _ in range(chance.randint(1, 90)):
            over_s, rate = chance.uniform(0.1, 3.0), chance.choice([0.0, chance.uniform(0, 100)])
            at_s += over_s
            history.add(at_s, over_s, rate)
            kept.append((at_s - over_s, over_s, rate))

        def until_then(moment_s: float, kept: list[tuple[float, float, float]] = kept) -> tuple[float, float]:
            """Seconds that were looked at, and tokens."""
            seen = [(min(max(moment_s - begin_s, 0.0), over_s), rate) for begin_s, over_s, rate in kept]
            return sum(each for each, _ in seen), sum(each * rate for each, rate in seen)

        width = chance.randint(1, 130)
        for number, found in enumerate(history.spread(width)):
            begin_s = at_s - SPAN_S + number * SPAN_S / width
            before, after = until_then(begin_s), until_then(begin_s + SPAN_S / width)
            looked_s = after[0] - before[0]
            assert (found is None) == (looked_s < 1e-6)
            if found is not None:
                assert found == pytest.approx((after[1] - before[1]) / looked_s, abs=1e-3)


def test_a_history_forgets_what_is_older_than_its_span() -> None:
    history = History()
    history.add(10.0, 1.0, 1000.0)
    for at in range(200):
        history.add(11.0 + at, 1.0, 2.0)
    assert history.mean == pytest.approx(2.0)
    assert history.spread(3) == pytest.approx([2.0] * 3)
    assert History().mean is None
    assert History().spread(2) == [None, None]


def test_memory_is_the_cards_where_there_is_one() -> None:
    of_card, on_cpu, down = glance(
        1.0,
        preset("card"),
        preset("cpu", memory={"device": "CPU", "planned_mib": {"device": {"a": 10.0}, "host": {"b": 20.0}}}),
        preset("down", "stopped"),
    ).presets
    assert (of_card.card_mib, of_card.host_mib, of_card.planned_mib) == (6210, 812, 6400)
    assert (on_cpu.card_mib, on_cpu.host_mib, on_cpu.planned_mib) == (None, 812, 30)
    assert (down.card_mib, down.host_mib, down.planned_mib) == (None, None, None)


# What is drawn


@pytest.mark.parametrize("size", [(80, 24), (160, 50), (120, 40), (64, 18), (50, 14), (300, 100)])
def test_a_picture_keeps_to_its_size(size: tuple[int, int]) -> None:
    width, height = size
    screen = Console(width=width, height=height, color_system=None)
    with screen.capture() as drawn:
        screen.print(draw(busy(), width, height))
    lines = drawn.get().splitlines()
    assert len(lines) <= height
    assert len(lines) >= height - 3  # there is more than enough to fill it
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "82.0 tokens/s" in text
    assert "bad is down: the file is too old" in text
    assert "in work (30" in text
    assert "req_1a22f33745" in text
    assert not re.search(r"\d…", text.replace("45% r…", ""))  # a number that is cut is a wrong one


def test_eighty_columns_tell_what_matters() -> None:
    text = plain(busy(), 80)
    assert "12 records lost" in text
    assert "187 W" in text
    assert "6,210 of 6,400" in text
    assert re.search(r"tiny +ready +82\.0 +2/4 +3 ", text)
    assert re.search(r"req_1a22f3374500000001d +tiny +waits +32 s +– +–", text)
    assert re.search(r"req_0a22f33745000000000 +tiny +ok +9\.9 s +312 +41\.3", text)


def test_the_oldest_request_in_work_stands_first() -> None:
    text = plain(scene(glance(1.0, in_work=[work(1), work(3), work(2)])), 100)
    assert re.findall(r"req_1a22f33745\d+(\d)", text) == ["3", "2", "1"]


def test_what_is_stopped_gives_way_to_what_ails() -> None:
    presets = (*(preset(f"stopped{number}", "stopped") for number in range(20)), preset("bad", "failed", cause="it broke"))
    screen = Console(width=80, height=14, color_system=None)
    with screen.capture() as drawn:
        screen.print(draw(scene(glance(1.0, *presets)), 80, 14))
    assert re.search(r"^bad +failed", drawn.get(), re.MULTILINE)
    assert "bad is down: it broke" in drawn.get()


def test_a_cause_gives_the_terminal_no_orders() -> None:
    text = plain(scene(glance(1.0, preset("bad", "failed", cause="\x1b]0;title\x07[red]\nx"))), 80)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red] x" in text


def test_few_colours() -> None:
    def colours(*presets: dict[str, Any], **other: Any) -> set[str]:
        screen = Console(width=120, height=40, force_terminal=True, color_system="standard", no_color=False)
        with screen.capture() as drawn:
            screen.print(draw(scene(glance(1.0, *presets, **other)), 120, 40))
        return set(re.findall(r"\x1b\[(3\d)m", drawn.get()))

    red, yellow = "31", "33"
    assert colours(preset("tiny"), in_work=[work(1)]) == set()
    assert colours(preset("tiny", waiting=1)) == {yellow}
    assert colours(preset("tiny"), in_work=[work(1, "waits")]) == {yellow}
    assert colours(preset("tiny", "failed")) == {red}


def test_unknown_is_a_dash_and_a_first_look_has_no_rate() -> None:
    refused = record(1, preset="", status="refused", error="missing_model", total_ms=None)
    text = plain(scene(glance(1.0, preset("tiny")), refused), 160)
    assert text.splitlines()[1].startswith("– tokens/s")
    assert " W " not in text.splitlines()[1]
    assert re.search(r"req_0a22f33745000000001 +– .* refused \(missing_model\) +– ", text)


@pytest.mark.parametrize("marks", [BLOCKS, ASCII])
def test_bars(marks: str) -> None:
    low, most = marks[1], marks[-1]
    assert bars([None, 0.0, 8.0], 1, marks) == [f" {low}{most}"]
    assert bars([0.0, 0.0], 2, marks) == ["  ", low * 2]
    assert bars([], 2, marks) == ["", ""]
    chance = random.Random(1)
    values = [chance.uniform(0, 50) for _ in range(200)]
    rows = bars(values, 4, marks)
    tall = [sum(marks.index(row[at]) for row in rows) for at in range(len(values))]
    assert max(tall) == 4 * (len(marks) - 1)
    for value, height in zip(values, tall, strict=True):
        assert height == max(1, round(value / max(values) * 4 * (len(marks) - 1)))


# The command


class Terminal:
    """The command as a person has it: in a terminal of its own, which is the controlling one."""

    def __init__(self, box: Box, *words: str, lines: int = 24, columns: int = 80, **env: str) -> None:
        self.master, slave = pty.openpty()
        self.size(lines, columns)
        self.mode = termios.tcgetattr(self.master)
        begin = (  # in a terminal of its own, by somebody who ignores Ctrl-C
            "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.open(sys.argv[1], os.O_RDWR);"
            "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
        )
        kept = {name: value for name, value in box.env.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", begin, os.ttyname(slave), "-m", "supervisor", "top", *words],
            env=kept | {"TERM": "xterm-256color", "PYTHONUTF8": "1"} | env,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.said = b""

    def size(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def read(self) -> str:
        """All that it has said so far."""
        while select.select([self.master], [], [], 0)[0]:
            try:
                self.said += os.read(self.master, 1 << 16)
            except OSError:  # nobody has the other end any more
                break
        return self.said.decode(errors="replace")

    def frame(self) -> str:
        """The last picture, as it stands on the screen."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.read().rpartition("\x1b[H")[2]).replace("\r", "")

    def shows(self, pattern: str) -> re.Match[str]:
        found: re.Match[str] = until(lambda: re.search(pattern, self.frame()))
        return found

    def ended(self) -> tuple[int, str]:
        """Its exit code, and what it said after it had given the screen back; the terminal must be as it was."""
        until(lambda: (self.read(), self.process.poll() is not None)[1])
        _, gave_back, after = self.read().rpartition("\x1b[?1049l")
        assert gave_back
        assert "\x1b[?25h" in self.read().rpartition("\x1b[?25l")[2]  # the cursor, too
        assert termios.tcgetattr(self.master) == self.mode
        return self.process.returncode, after.replace("\r", "")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)
        os.close(self.master)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def make(box: Box, *words: str, **other: Any) -> Terminal:
        made.append(Terminal(box, *words, **other))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def served(module_fake_box: Boxes) -> Client:
    return up(module_fake_box(tokens=3), "slots=2")


@contextmanager
def streaming(client: Client, count: int) -> Iterator[None]:
    """So many requests in work, each with a token every 10 ms; their clients leave when the block ends."""
    over = threading.Event()

    def read() -> None:
        body = {"model": "tiny", "messages": HELLO, "stream": True, "fake": {"tokens": 100_000, "pace_s": 0.01}}
        with client.http as http, http.stream("POST", CHAT, json=body) as reply:
            assert reply.status_code == 200
            assert any(over.is_set() for _ in reply.iter_raw())

    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(read) for _ in range(count)]
        try:
            yield
        finally:
            over.set()
        for each in running:
            each.result(WAIT_S)


def test_live_while_requests_stream(served: Client, terminal: Callable[..., Terminal]) -> None:
    assert ask(served, "tiny").status_code == 200
    with streaming(served, 3):
        shown = terminal(served.box, "--interval", "0.2")
        shown.shows(r"[1-9][\d.]* tokens/s  2 of 2 slots busy  1 waiting")
        shown.shows(r"req_\w{19} +tiny +decode .* [1-9][\d,]* +[1-9][\d.]* *\n")
        shown.shows(r"tiny +waits ")
        shown.shows(r"ended last.*\n.*tiny +ok ")
        assert all(len(line) <= 80 for line in shown.frame().splitlines())
        shown.size(45, 150)
        shown.shows(r"/v1/chat/completions +decode")  # a column that 80 have no room for
    shown.shows(r"\n0\.0 tokens/s  0 of 2 slots busy  0 waiting")
    shown.shows(r"ended last.*\n.*tiny +/v1/chat/completions +cancelled ")
    shown.type(b"\x1bOq")  # a key of the keypad
    shown.shows(r"tiny +/v1/chat/completions +cancelled .* [1-9]\S* (s|min)")  # a second later it is there still
    shown.type(b"xq")
    assert shown.ended() == (0, "")


@pytest.mark.parametrize(("key", "code"), [(b"\x03", 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_it_gives_the_terminal_back(
    served: Client, terminal: Callable[..., Terminal], key: bytes | signal.Signals, code: int
) -> None:
    shown = terminal(served.box)
    shown.shows("tiny +ready")
    shown.process.send_signal(key) if isinstance(key, signal.Signals) else shown.type(key)
    assert shown.ended() == (code, "")


def test_ctrl_z_gives_it_back_for_a_while(served: Client, terminal: Callable[..., Terminal]) -> None:
    shown = terminal(served.box, "--interval", "0.2")
    shown.shows("tiny +ready")
    shown.type(b"\x1a")
    until(lambda: psutil.Process(shown.process.pid).status() == psutil.STATUS_STOPPED)
    assert shown.read().endswith("\x1b[?1049l")
    assert termios.tcgetattr(shown.master) == shown.mode
    shown.process.send_signal(signal.SIGCONT)
    shown.shows("tiny +ready")
    shown.type(b"q")
    assert shown.ended() == (0, "")


def test_no_colour_where_none_is_wanted(served: Client, terminal: Callable[..., Terminal]) -> None:
    shown = terminal(served.box, NO_COLOR="1")
    shown.shows("tiny +ready")
    shown.type(b"q")
    assert shown.ended() == (0, "")
    assert not re.search(r"\x1b\[[\d;]*[349]\d", shown.read())


def test_a_dumb_terminal_gets_one_picture_as_text(served: Client, terminal: Callable[..., Terminal]) -> None:
    shown = terminal(served.box, "--interval", "0.1", TERM="dumb")
    until(lambda: (shown.read(), shown.process.poll() is not None)[1])
    assert shown.process.returncode == 0
    assert "\x1b" not in shown.read()
    assert re.search(r"tiny +ready", shown.read())


def test_it_goes_on_with_an_llmctl_that_was_started_anew_and_ends_with_one_that_ends(
    fake_box: Boxes, terminal: Callable[..., Terminal]
) -> None:
    box = fake_box(tokens=3)
    first = box.up()
    shown = terminal(box, "--interval", "0.2", columns=120)
    shown.shows(f"pid {first.process.pid}")
    shown.process.send_signal(signal.SIGSTOP)  # so that it doesn't see that there is none for a moment
    until(lambda: psutil.Process(shown.process.pid).status() == psutil.STATUS_STOPPED)
    press(first.process)
    second = box.up()
    shown.process.send_signal(signal.SIGCONT)
    shown.shows(rf"pid {second.process.pid}[^\0]*llmctl was started anew \(pid {second.process.pid}\)")
    shown.shows("[0-9] tokens/s")
    assert "-" not in shown.frame()  # as a rate below 0 has it
    press(second.process)
    code, said = shown.ended()
    assert code == Exit.BUSY
    assert said.splitlines() == [f"error: llmctl (pid {second.process.pid}) has ended", "try: llmctl up tiny"]


def test_without_a_terminal_it_is_one_picture_as_text(served: Client) -> None:
    assert ask(served, "tiny").status_code == 200
    done = command(served.box, "top", "--interval", "0.2")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert re.search(r"^[\d.,]+ tokens/s  0 of 2 slots busy  0 waiting", done.stdout, re.MULTILINE)
    assert re.search(r"^tiny +ready +[\d.,]+ +0/2 +0 ", done.stdout, re.MULTILINE)
    assert len(re.findall(r"^req_\w{19} ", done.stdout, re.MULTILINE)) <= 10
    assert re.search(r"^req_\w{19} +tiny +/v1/chat/completions +ok ", done.stdout, re.MULTILINE)


def test_json_has_the_answer_and_the_rates(served: Client) -> None:
    with served.admin as http:
        told = http.get("/llmctl/top").json()
    with streaming(served, 1):
        until(lambda: _in_work(served) == ["decode"])
        done = command(served.box, "top", "--json", "--interval", "0.5")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said.keys() - told.keys() == {"over_s", "cpu_share", "tokens_per_s", "ended"}
    assert told.keys() <= said.keys()
    assert said["over_s"] >= 0.5
    (tiny,) = said["presets"]
    assert tiny["tokens_per_s"]["completion"] == said["tokens_per_s"]["completion"] > 0
    assert said["cpu_share"] > 0
    (going,) = said["in_work"]
    assert (going["preset"], going["phase"]) == ("tiny", "decode")
    assert said["tokens_per_s"]["completion"] * said["over_s"] <= going["tokens"]  # it alone made them

    def ended() -> list[dict[str, Any]] | None:
        rows: list[dict[str, Any]] = json.loads(command(served.box, "top", "--json", "--interval", "0.1").stdout)["ended"]
        return rows if rows[0]["id"] == going["id"] else None

    rows = until(ended)
    assert rows[0]["status"] == "cancelled"
    assert [each["closed_at"] for each in rows] == sorted((each["closed_at"] for each in rows), reverse=True)


def _in_work(client: Client) -> list[str]:
    with client.admin as http:
        return [each["phase"] for each in http.get("/llmctl/top").json()["in_work"]]


def test_looks_are_asked_for_over_one_connection(served: Client) -> None:
    port = int(served.address.rpartition(":")[2])

    def mine() -> list[int]:
        return [each.laddr.port for each in psutil.Process().net_connections("tcp") if each.raddr and each.raddr.port == port]

    before = set(mine())
    with Running.of(served.box.home).polling("/llmctl/top") as look:
        look()
        first = set(mine()) - before
        look()
        assert set(mine()) - before == first
        assert len(first) == 1


def test_a_ledger_that_can_not_be_read_is_told_and_the_rest_goes_on(fake_box: Boxes) -> None:
    box = fake_box(tokens=3)
    client = box.up()
    for path in box.home.ledger.parent.glob(f"{box.home.ledger.name}*"):
        path.unlink()
    box.home.ledger.write_bytes(b"no database, " * 1000)
    done = command(box, "top", "--interval", "0.1")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^the ledger .* can't be read: ", done.stdout, re.MULTILINE)
    assert re.search(r"^tiny +ready", done.stdout, re.MULTILINE)
    client.stop()


def test_top_without_a_running_llmctl(tmp_path: Path) -> None:
    for words in ((), ("--json",), ("--once",)):
        done = console.llmctl({"LLMCTL_HOME": str(tmp_path)}, "top", *words)
        assert done.returncode == Exit.USAGE
        assert done.stderr.splitlines() == ["error: nothing runs", "try: llmctl up tiny --detach"]


def test_the_screen_shows_as_many_as_it_reads() -> None:
    """The tallest picture has room for all that is read of the ledger, and no more is read than that."""
    ended = [record(number) for number in range(dashboard.ENDED)]
    screen = Console(width=120, height=100, color_system=None)
    with screen.capture() as drawn:
        screen.print(draw(scene(glance(1.0, preset("tiny")), *ended), 120, 100))
    assert drawn.get().count("req_0a22f33745") == dashboard.ENDED
