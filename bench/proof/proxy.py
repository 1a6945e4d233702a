"""What the front door costs per streamed token, beside nginx: ``python -m bench.proof.proxy``, or ``make bench-proxy``.

A fake engine (``tests/fakes``) sends chunks at a fixed pace. The same load generator reads them directly from the fake's Unix socket,
through llmctl, and through nginx (one worker, ``proxy_buffering off``, no access log: as one runs it for streams). All run at once,
idle but for the one whose turn it is, and everything is compared within a turn, in an order that rotates, because a shared machine
is never the same twice. So: believe the ratios, not the microseconds.

- **CPU per chunk**: nanoseconds from ``schedstat`` of all threads of all the target's processes (llmctl's tree without the fake engine;
  nginx's master and worker) over a window in which all streams run, through the number of events that arrived in it. What idles in
  a target during the window counts; starting and ending streams doesn't.
- **gap p99**: of the times between one event and the next of a stream, as the client sees them. *Added*: minus direct's, of the same
  turn.
- **first byte**: from sending a request on an open connection to its first ``data:``. *Added*: the quantile minus direct's. One after
  the other (or one burst of eight after the other), in blocks that take turns, rotating.
- Of turns the median is shown.

With ``--check`` the exit status is 1 when a bound of :data:`BOUNDS` is exceeded. Only loopback and Unix sockets are used, and all
processes are ended however the run ends. It runs from a checkout: the fake engine isn't part of the wheel.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop

from bench.proof.paced import Cost, Load, Target, first_bytes, measure, quantile, request
from supervisor import render
from tests import fakes
from tests.fakes import gguf

LOADS = (Load(8, 100), Load(32, 50), Load(64, 50))
SLOTS = 64
BURST = 8
BLOCKS = 10
"""Into so many the requests for the first byte are cut, one target after the other."""
START_S = 30.0
STOP_S = 10.0
PAUSE_S = 0.15
"""Between turns, so that the end of one target's streams isn't in the next one's window."""

BOUNDS = {
    "ratio 8 × 100": 2.1,
    "ratio 32 × 50": 1.7,
    "ratio 64 × 50": 1.7,
    "added first byte p50, one at a time, ms": 0.5,
    "added first byte p50, bursts, ms": 2.0,
    "added gap p99, ms": 2.0,
}
"""What llmctl may cost (issue 2): CPU as a multiple of nginx's, milliseconds over direct."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    turns: int
    chunks: int
    """Of a target under a load in one turn."""
    singles: int
    bursts: int


FULL = Size(turns=5, chunks=4200, singles=300, bursts=50)
QUICK = Size(turns=2, chunks=1000, singles=60, bursts=10)


@dataclass(slots=True)
class Result:
    """Everything measured, in turns."""

    costs: dict[str, dict[str, list[Cost]]] = field(default_factory=dict)
    """By load and target, a list of turns."""
    singles: dict[str, list[float]] = field(default_factory=dict)
    bursts: dict[str, list[float]] = field(default_factory=dict)

    def median(self, load: Load, target: str, what: str) -> float:
        """Over turns."""
        found: float = statistics.median(getattr(cost, what) for cost in self.costs[str(load)][target])
        return found

    def ratio(self, load: Load, target: str, base: str = "nginx") -> list[float]:
        """CPU per chunk as a multiple of another target's, turn by turn; empty when one of them wasn't there."""
        turns = self.costs[str(load)]
        if target not in turns or base not in turns:
            return []
        return [mine.cpu_us / its.cpu_us for mine, its in zip(turns[target], turns[base], strict=True)]

    def added_gap_ms(self, load: Load, target: str) -> float:
        """Over direct."""
        turns = self.costs[str(load)]
        return statistics.median(m.gap_p99_ms - d.gap_p99_ms for m, d in zip(turns[target], turns["direct"], strict=True))

    def added_first_ms(self, waits: dict[str, list[float]], target: str, at: float) -> float:
        """Over direct, at a quantile."""
        return (quantile(waits[target], at) - quantile(waits["direct"], at)) * 1e3

    def judged(self) -> dict[str, float]:
        """What :data:`BOUNDS` speaks of, as far as it was measured."""
        if "llmctl" not in self.singles:
            return {}
        found = {f"ratio {load}": statistics.median(ratios) for load in LOADS if (ratios := self.ratio(load, "llmctl"))}
        found["added first byte p50, one at a time, ms"] = self.added_first_ms(self.singles, "llmctl", 0.5)
        found["added first byte p50, bursts, ms"] = self.added_first_ms(self.bursts, "llmctl", 0.5)
        found["added gap p99, ms"] = max(self.added_gap_ms(load, "llmctl") for load in LOADS)
        return found


async def run(targets: list[Target], size: Size, model: str) -> Result:
    """Measure all targets in turns."""
    result = Result()
    with render.progress() as progress:
        done, total = 0, size.turns * len(LOADS) * len(targets)
        for turn in range(size.turns):
            for load in LOADS:
                for target in rotated(targets, turn):
                    progress("turns", done, total)
                    cost = await measure(target, load, model, size.chunks)
                    result.costs.setdefault(str(load), {}).setdefault(target.name, []).append(cost)
                    await asyncio.sleep(PAUSE_S)
                    done += 1
        for waits, count, rounds in ((result.singles, 1, size.singles), (result.bursts, BURST, size.bursts)):
            for number in range(BLOCKS):
                progress(f"first byte of {count}", number, BLOCKS)
                for target in rotated(targets, number):
                    waits.setdefault(target.name, []).extend(await first_bytes(target, request(model), count, rounds // BLOCKS))
    return result


def rotated(targets: list[Target], by: int) -> list[Target]:
    """Another one first each time."""
    by %= len(targets)
    return targets[by:] + targets[:by]


# The targets. Each is a process that ends with its block.


@contextmanager
def process(argv: list[str], log: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start in a session of its own, so that Ctrl-C reaches only us; end it and what it left in that session."""
    with log.open("wb") as out:
        started = subprocess.Popen(
            argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=os.environ | env, start_new_session=True
        )
    try:
        yield started
    finally:
        started.terminate()
        with suppress(subprocess.TimeoutExpired):
            started.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def tree(root: int, without: Collection[int] = ()) -> list[int]:
    """A process and its descendants, less some."""
    found = [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]
    return [pid for pid in found if pid not in without]


def free_port() -> int:
    """A loopback port that nobody has just now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def direct(folder: Path) -> Iterator[Target]:
    """The fake engine itself."""
    wrapper, sock = fakes.install(folder), folder / "engine.sock"
    argv = [str(wrapper), "-m", "none", "--host", str(sock), "-np", str(SLOTS), "-c", str(SLOTS * 1024)]
    with process(argv, folder / "log") as engine:
        fakes.wait_event(folder, "loaded")
        yield Target("direct", str(sock), lambda: [engine.pid])


NGINX = """
{user}worker_processes 1; daemon off; pid {folder}/pid; error_log stderr;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream engine {{ server unix:{sock}; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }}
  }}
}}
"""


@contextmanager
def nginx(binary: str, folder: Path, sock: str) -> Iterator[Target]:
    """One nginx worker in front of the fake engine's socket."""
    folder.mkdir()
    port = free_port()
    user = "user root; " if os.geteuid() == 0 else ""  # else root's worker is `nobody`, who may not open the socket
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, sock=sock, port=port, user=user))
    with process([binary, "-c", str(config), "-p", str(folder), "-e", "stderr"], folder / "log") as master:
        wait_http(port, "/health", folder / "log", master)
        yield Target("nginx", ("127.0.0.1", port), lambda: tree(master.pid))


@contextmanager
def llmctl(folder: Path) -> Iterator[Target]:
    """``llmctl up`` over a fake engine of its own."""
    engine = fakes.install(folder / "engine")
    model = gguf.minimal(folder / "model.gguf")
    port = free_port()
    argv = [
        sys.executable,
        "-m",
        "supervisor",
        "up",
        "tiny",
        "--port",
        str(port),
        "--model",
        str(model),
        "--set",
        f"slots={SLOTS}",
    ]
    env = {"LLMCTL_HOME": str(folder / "home"), "LLMCTL_ENGINE": str(engine)}
    with process(argv, folder / "log", **env) as front:
        wait_http(port, "/health", folder / "log", front)
        engines = {event["pid"] for event in fakes.events(folder / "engine", "start")}
        yield Target("llmctl", ("127.0.0.1", port), lambda: tree(front.pid, without=engines))


def wait_http(port: int, path: str, log: Path, started: subprocess.Popen[bytes]) -> None:
    """Until the address answers 200; RuntimeError with the log's end if the process ends first or the time does."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and started.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.02)
    raise RuntimeError(f"{started.args!r} isn't serving; its log ends:\n{log.read_text()[-2000:]}")


# The report.


def report(result: Result, names: list[str], load_average: float) -> None:
    """Tables, each with its terms."""
    render.out(
        f"{os.cpu_count()} CPUs; {load_average:.1f} processes were running when it began: the fewer, the more this is worth.\n"
    )
    rows: list[list[Any]] = []
    for load in LOADS:
        for name in names:
            ratios = result.ratio(load, name) if name != "direct" else []
            spread = [statistics.median(ratios), min(ratios), max(ratios)] if ratios else [None] * 3
            gap = [result.median(load, name, "gap_p99_ms"), result.added_gap_ms(load, name)]
            passed = sum(cost.chunks for cost in result.costs[str(load)][name])
            cells: list[float | None] = [
                result.median(load, name, "cpu_us"),
                *spread,
                *gap,
                passed,
                result.median(load, name, "client_us"),
            ]
            rows.append([str(load), name, *map(rounded, cells)])
    columns = ["load", "through", "CPU", "× nginx", "low", "high", "gap p99", "added", "chunks", "client CPU"]
    render.table(columns, rows, title="While streaming")
    render.out(
        "load: streams × chunks a second. CPU: µs per event, of all the target's processes (direct: the fake engine's).\n"
        "× nginx: that through nginx's in the same turn; median, lowest and highest of the turns. gap: ms from one event of a\n"
        "stream to its next, at the client; added: less direct's. client CPU: µs per event of this load generator, beside the rest.\n"
    )
    rows = []
    for label, waits in (("one at a time", result.singles), (f"bursts of {BURST}", result.bursts)):
        for name in names:
            cells = []
            for at in (0.5, 0.99):
                cells += [quantile(waits[name], at) * 1e3, result.added_first_ms(waits, name, at)]
            rows.append([label, name, *map(rounded, cells), len(waits[name])])
    render.table(["requests", "through", "p50", "added", "p99", "added", "count"], rows, title="First byte")
    render.out("ms from sending a request on an open connection to its first `data:`; added: the same quantile less direct's.\n")
    if judged := result.judged():
        verdicts = [
            [name, rounded(value), BOUNDS[name], "yes" if value <= BOUNDS[name] else "NO"] for name, value in judged.items()
        ]
        render.table(["llmctl", "measured", "bound", "kept"], verdicts)


def rounded(value: float | None) -> float | None:
    """As much as these numbers are worth; counts stay whole."""
    return round(value, 2) if isinstance(value, float) else value


def as_json(result: Result, names: list[str], size: Size, load_average: float) -> dict[str, Any]:
    """The same for a script, with each turn."""
    return {
        "machine": {
            "cpus": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "load_average": load_average,
        },
        "size": asdict(size),
        "turns": {
            load: {name: [asdict(cost) for cost in costs] for name, costs in by.items()} for load, by in result.costs.items()
        },
        "ratio_to_nginx": {str(load): {name: result.ratio(load, name) for name in names if name != "direct"} for load in LOADS},
        "first_byte_s": {"singles": result.singles, "bursts": result.bursts},
        "judged": result.judged(),
        "bounds": BOUNDS,
    }


def main() -> int:
    """Parse, start the targets, measure, print; the exit status."""
    parser = argparse.ArgumentParser(
        prog="bench.proof.proxy", description="CPU per chunk, jitter and first byte: direct, llmctl, nginx."
    )
    parser.add_argument("--quick", action="store_true", help="under 40 s, for a look")
    parser.add_argument("--turns", type=int, help="turns of each target and load (default 5)")
    parser.add_argument("--chunks", type=int, help="chunks of each target and load in a turn (default 4200)")
    parser.add_argument("--without", action="append", default=[], choices=["llmctl", "nginx"], help="leave a target out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bound is exceeded")
    args = parser.parse_args()
    base = QUICK if args.quick else FULL
    size = Size(args.turns or base.turns, args.chunks or base.chunks, base.singles, base.bursts)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-proxy-")))
        targets = [stack.enter_context(direct(folder / "direct"))]
        if "llmctl" not in args.without:
            targets.append(stack.enter_context(llmctl(folder / "llmctl")))
        binary = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if "nginx" not in args.without and binary:
            targets.append(stack.enter_context(nginx(binary, folder / "nginx", str(targets[0].address))))
        elif "nginx" not in args.without:
            render.say("nginx isn't installed, so there is nothing to compare CPU with: no ratios.")
        load_average = os.getloadavg()[0]
        result = uvloop.run(run(targets, size, "tiny"))

    names = [target.name for target in targets]
    report(result, names, load_average)
    if args.json:
        args.json.write_text(json.dumps(as_json(result, names, size, load_average), indent=1))
    return int(args.check and any(value > BOUNDS[name] for name, value in result.judged().items()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
