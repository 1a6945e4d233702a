"""``llmctl up``: preset → engine → model → command line → serve. ``--dry-run`` stops before anything is fetched or started."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from supervisor import argv, engine, gguf, hardware, paths, preset, render, rundir, serve, store
from supervisor.arbiter import Launch
from supervisor.engine import Engine
from supervisor.errors import Error, Exit
from supervisor.paths import Home
from supervisor.preset import Preset
from supervisor.rundir import RunDir


@dataclass(frozen=True)
class Order:
    """What the command line asks for, and what it comes to."""

    name: str
    port: int
    host: str
    model: Path | None
    overrides: tuple[str, ...]
    home: Home = field(default_factory=paths.home)

    @functools.cached_property
    def preset(self) -> Preset:
        """The preset, with ``--set`` applied."""
        return preset.load(self.name, self.home, self.overrides)

    @functools.cached_property
    def engine(self) -> Engine:
        """The engine that will run it."""
        return engine.locate(self.home)

    @property
    def file(self) -> Path:
        """The model file, which may not be here yet."""
        return self.model.absolute() if self.model else store.path(self.home, self.preset.model)

    @functools.cached_property
    def argv(self) -> tuple[str, ...]:
        """The llama-server command line."""
        chosen = self.preset  # before the engine: what is wrong with a preset can be said without one
        flags = engine.capabilities(self.engine)
        return argv.render(chosen, self.engine.server, self.file, threads=hardware.physical_cores(), flags=flags)

    def words(self) -> list[str]:
        """The same order as arguments of ``llmctl up``."""
        given = [self.name, "--port", str(self.port), "--host", self.host]
        given += [word for override in self.overrides for word in ("--set", override)]
        return given + (["--model", str(self.model.absolute())] if self.model else [])

    def fetch(self) -> None:
        """Have the model here and see that it is one. What would refuse the start anyway is looked at before the download."""
        if running := rundir.read(self.home.run):
            raise rundir.busy(self.home.run, running)
        with serve.bind(self.host, self.port):
            pass
        if self.model is None:
            with render.progress() as progress:
                store.pull(self.home, self.preset.model, progress)
        gguf.read(self.file)

    def serve(self, *, foreground: bool, ready: serve.Ready) -> None:
        """Serve until told to stop."""

        def launches(owned: RunDir) -> Sequence[Launch]:
            folder = owned.child_folder(self.name)
            environment = argv.environment(os.environ, folder)
            return [Launch(self.preset, self.argv, environment, folder, self.home.logs / f"{self.name}.log")]

        title = self.engine.title
        serve.run(serve.Service(self.home, launches, (self.name,), title, self.host, self.port, foreground), ready=ready)


@click.command("up")
@click.argument("name", metavar="PRESET")
@click.option("--port", default=serve.DEFAULT_PORT, show_default=True, type=click.IntRange(0, 65535), help="0 picks a free one.")
@click.option("--host", default="localhost", show_default=True, help="Loopback only, until llmctl has keys.")
@click.option("--model", type=click.Path(path_type=Path), help="Another GGUF file in the place of the preset's.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override an option of the preset; may be repeated.")
@click.option("--detach", is_flag=True, help="Return when it is ready; it goes on in the background.")
@click.option("--dry-run", is_flag=True, help="Print the llama-server command line and stop.")
@click.option("--json", "as_json", is_flag=True, help="With --detach or --dry-run: the result as JSON.")
@click.option("--ready-fd", type=int, hidden=True, help="Where --detach's other half says how it went.")
def command(
    name: str,
    port: int,
    host: str,
    model: Path | None,
    overrides: tuple[str, ...],
    detach: bool,
    dry_run: bool,
    as_json: bool,
    ready_fd: int | None,
) -> None:
    """Serve PRESET as an OpenAI endpoint, in the foreground. Ctrl-C drains, twice forces.

    \b
    llmctl up tiny
    llmctl up tiny --port 9000 --set slots=2
    """
    order = Order(name, port, host, model, overrides)
    if ready_fd is not None:
        _log_to_stderr()
        _report(ready_fd, order)
        return
    serve.check_host(host)
    if as_json and not (detach or dry_run):
        raise click.UsageError("--json goes with --detach or --dry-run")
    if dry_run:
        render.as_json({"argv": list(order.argv)}) if as_json else render.out(shlex.join(order.argv))
        return
    _ = order.argv  # a preset or an engine that can't do is known before anything is fetched
    order.fetch()
    if detach:
        render.say(f"starting {name}, llmctl logs {name} says how far it is")
        address = _detach(order)
        render.as_json({"address": address, "model": name}) if as_json else _welcome(name, address, "llmctl down stops it.")
        return
    _log_to_stderr()
    order.serve(foreground=True, ready=lambda address: _welcome(name, address, "Ctrl-C stops it."))


def _welcome(name: str, address: str, ending: str) -> None:
    render.say(
        f"""{name} is ready at {address}/v1

  curl {address}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}], "stream": true}}'

{ending}"""
    )


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    for name in ("httpx2", "httpcore2", "uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _detach(order: Order) -> str:
    """Start the serving half in a session of its own and wait for its word; returns the address. Its error becomes ours."""
    logs = order.home.logs
    logs.mkdir(parents=True, exist_ok=True)
    read_fd, write_fd = os.pipe()
    with (logs / "llmctl.log").open("ab") as log, os.fdopen(read_fd) as reader:
        other = subprocess.Popen(
            [sys.executable, "-m", "supervisor", "up", *order.words(), "--ready-fd", str(write_fd)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(write_fd,),
            start_new_session=True,
        )
        os.close(write_fd)
        try:
            said = reader.readline()
        except KeyboardInterrupt:
            other.terminate()
            other.wait()
            raise
    if not said:
        raise Error("llmctl ended before it was ready", exit=Exit.CHILD, hint="llmctl logs llmctl")
    word = json.loads(said)
    if "address" in word:
        return str(word["address"])
    other.wait()
    raise Error(word["message"], exit=Exit(word["exit"]), hint=word["hint"])


def _report(fd: int, order: Order) -> None:
    """Serve; the address or the error goes to ``fd`` as one line of JSON."""
    with os.fdopen(fd, "w") as pipe:

        def tell(**word: object) -> None:
            if not pipe.closed:
                with contextlib.suppress(OSError):  # the other half was killed: we serve all the same
                    pipe.write(json.dumps(word) + "\n")
                    pipe.close()

        try:
            order.serve(foreground=False, ready=lambda address: tell(address=address))
        except Error as error:
            tell(message=error.message, hint=error.hint, exit=int(error.exit))
            raise
