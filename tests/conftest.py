"""What tests share: a home of their own, llmctl as a real process in it, the fake engine and the real one.

The real engine and the model come from the outer home (``make engine`` put them there); everything else a test makes lies in its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import psutil
import pytest

from supervisor import accounts, engine, paths, preset, rundir, store
from supervisor.errors import Error
from tests import fakes
from tests.fakes import gguf

if TYPE_CHECKING:
    from tests.shelf import Shelf

WAIT_S = 60.0
"""Bound on every wait for an event. Generous: the machine may be busy; nothing waits that long when all is well."""


LONGEST = (
    "test_proxy",
    "test_steering",
    "test_swap",
    "test_arbiter",
    "test_keeper",
    "test_assembly",
    "test_bench",
    "test_commands",
    "test_rounds",
    "test_pack",
    "test_front_door",
    "test_fetch",
)
"""Files that take longest, longest first: where two workers share the suite, neither begins one when the other is done."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def until(told: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    """Poll ``told`` until it says something true; AssertionError after ``timeout_s``."""
    end = time.monotonic() + timeout_s
    while not (answer := told()):
        assert time.monotonic() < end, f"nothing within {timeout_s} s"
        time.sleep(0.005)
    return answer


def press(process: subprocess.Popen[str]) -> None:
    """End llmctl by SIGTERM without its drain: again and again, since two signals that are pending together count as one."""
    until_s = time.monotonic() + WAIT_S
    while process.poll() is None:
        process.send_signal(signal.SIGTERM if time.monotonic() < until_s else signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)


@dataclass
class Box:
    """A machine of a test's own: an empty LLMCTL_HOME, an engine, and llmctl as a real process."""

    root: Path
    engine: Path
    model: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def home(self) -> paths.Home:
        return paths.home({"LLMCTL_HOME": str(self.root)})

    @property
    def env(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LLMCTL_")}
        return kept | {"LLMCTL_HOME": str(self.root), "LLMCTL_ENGINE": str(self.engine)}

    def preset(self, name: str, **options: Any) -> None:
        """Write a preset of the user's for the same model file; JSON is YAML."""
        self.home.presets.mkdir(parents=True, exist_ok=True)
        words = {name: {True: "on", False: "off"}[value] if isinstance(value, bool) else value for name, value in options.items()}
        chosen = {"model": {"path": str(self.model)}, "context": 2048, **words}
        (self.home.presets / f"{name}.yaml").write_text(json.dumps(chosen))

    def llmctl(self, *words: str, timeout_s: float = WAIT_S) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [sys.executable, "-m", "supervisor", *words],
            env=self.env,
            text=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        """``llmctl up tiny`` in the foreground, as a process; its stderr goes to ``up.log`` in the home."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "up.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "supervisor", "up", "tiny", "--port", "0", "--model", str(self.model), *words],
                env=self.env,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def up(self, *words: str) -> Client:
        """Start it and wait until it is ready."""
        process = self.start(*words)
        instance = until(lambda: self.ready() or (process.poll() is not None and self.fail(process)))
        return Client(self, process, instance["address"])

    def ready(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError, httpx2.HTTPError):
            instance: dict[str, Any] = json.loads((self.home.run / "instance.json").read_text())
            if instance["address"] and httpx2.get(instance["address"] + "/health", timeout=5).status_code == 200:
                return instance
        return None

    def fail(self, process: subprocess.Popen[str]) -> None:
        raise AssertionError(f"llmctl ended with {process.returncode}: {(self.root / 'up.log').read_text()}")

    def records(self) -> list[dict[str, Any]]:
        """The ledger's rows, through the command a user has."""
        done = self.llmctl("usage", "--records", "--json", "--limit", "100000")
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def closed_records(self, count: int) -> list[dict[str, Any]]:
        """The rows of requests that have ended, once there are ``count``."""

        def closed() -> tuple[list[dict[str, Any]]] | None:
            rows = [row for row in accounts.records(self.home.ledger, 100_000) if row["status"] != "open"]
            return (rows,) if len(rows) >= count else None

        (found,) = until(closed)
        return list(found)

    def close(self) -> None:
        """End what was started, by pid."""
        for process in self.processes:
            press(process)
        if rundir.read(self.home.run) is not None:  # a detached one runs still
            self.llmctl("down", "--now")
        rundir.clear(self.home.run)  # as `down` does where nothing runs
        assert self.left_behind() == []

    def left_behind(self) -> list[str]:
        """Processes that run from this home, and files in its run folder."""
        mine = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("HOME", "").startswith(str(self.home.run)):
                    mine.append(f"{process.pid} {process.cmdline()}")
        files = [str(path) for path in self.home.run.rglob("*")] if self.home.run.exists() else []
        return mine + files


@dataclass
class Client:
    """A started llmctl and its address."""

    box: Box
    process: subprocess.Popen[str]
    address: str

    @property
    def http(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.address, timeout=WAIT_S)

    @property
    def admin(self) -> httpx2.Client:
        """With the admin right of this start."""
        token = json.loads((self.box.home.run / "instance.json").read_text())["token"]
        return httpx2.Client(base_url=self.address, timeout=WAIT_S, headers={"Authorization": f"Bearer {token}"})

    def presets(self) -> dict[str, dict[str, Any]]:
        """What ``status`` says of each preset, by name."""
        with self.admin as http:
            return {each["name"]: each for each in http.get("/llmctl/status").json()["presets"]}

    def child_pid(self) -> int:
        """The pid of the one child."""
        status = json.loads(self.box.llmctl("status", "--json").stdout)
        return int(status["presets"][0]["pid"])

    def stop(self) -> int:
        """Ctrl-C, and its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(WAIT_S)


@pytest.fixture(scope="session")
def outer_home() -> paths.Home:
    return paths.home()


@pytest.fixture(scope="session")
def real_engine(outer_home: paths.Home) -> engine.Engine:
    """The engine that ``make engine`` built."""
    try:
        return engine.locate(outer_home)
    except Error as error:
        pytest.fail(f"{error.message}; try: make engine")


@pytest.fixture(scope="session")
def tiny_model(outer_home: paths.Home) -> Path:
    """The model of ``tiny``, fetched once."""
    chosen = preset.load("tiny", outer_home)
    outer_home.cache.mkdir(parents=True, exist_ok=True)
    with (outer_home.cache / "tests.lock").open("a") as lock:  # two workers may want it at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        return store.pull(outer_home, chosen.model, lambda *_: None)


def _fake_boxes(folder: Path) -> Iterator[Callable[..., Box]]:
    boxes: list[Box] = []

    def make(**knobs: Any) -> Box:
        root = folder / f"box{len(boxes)}"
        boxes.append(Box(root / "home", fakes.install(root / "engine", **knobs), gguf.minimal(root / "m.gguf")))
        return boxes[-1]

    yield make
    for box in boxes:
        box.close()


@pytest.fixture
def fake_box(tmp_path: Path) -> Iterator[Callable[..., Box]]:
    """Makes a :class:`Box` whose engine is the fake with the knobs given; its journal is in ``box.engine.parent``."""
    yield from _fake_boxes(tmp_path)


@pytest.fixture(scope="module")
def module_fake_box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Box]]:
    """The same, shared by a module's tests."""
    yield from _fake_boxes(tmp_path_factory.mktemp("fake"))


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    """An empty :class:`~tests.shelf.Shelf`."""
    from tests.shelf import Shelf

    return Shelf(tmp_path)


@pytest.fixture(scope="module")
def real_box(tmp_path_factory: pytest.TempPathFactory, real_engine: engine.Engine, tiny_model: Path) -> Iterator[Box]:
    """A :class:`Box` with the real engine and ``tiny``."""
    box = Box(tmp_path_factory.mktemp("real") / "home", real_engine.server, tiny_model)
    yield box
    box.close()


@pytest.fixture(scope="module")
def tiny(real_box: Box) -> Client:
    """``llmctl up tiny`` on the real engine, one thread, two slots, greedy, so that it always says the same; shared by a module's tests."""
    return real_box.up(
        *("--set", "threads=1", "--set", "slots=2", "--set", "context=4096", "--set", "sampling=benchmark"),
    )


@contextlib.contextmanager
def bare_engine(server: Path, model: Path, *words: str) -> Iterator[httpx2.Client]:
    """A llama-server without llmctl: what the front door's answers are compared with. Two slots, one thread."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = ("-m", str(model), "--host", "127.0.0.1", "--port", str(port), "-np", "2", "-c", "4096", "-t", "1", "--fit", "off")
    process = subprocess.Popen(
        [str(server), *common, *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as client:

            def healthy() -> bool:
                assert process.poll() is None, f"llama-server ended with {process.returncode}"
                with contextlib.suppress(httpx2.HTTPError):
                    return client.get("/health").status_code == 200
                return False

            until(healthy)
            yield client
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def engine_server(real_engine: engine.Engine, tiny_model: Path) -> Iterator[httpx2.Client]:
    """A client of a bare real llama-server with the model's own chat template."""
    with bare_engine(real_engine.server, tiny_model) as client:
        yield client


@pytest.fixture(scope="session")
def tool_engine_server(real_engine: engine.Engine, tiny_model: Path) -> Iterator[httpx2.Client]:
    """The same with a template that has tools and thoughts."""
    template = Path(__file__).parent / "data" / "hermes_tools.jinja"
    with bare_engine(real_engine.server, tiny_model, "--chat-template-file", str(template)) as client:
        yield client
