"""``llmctl up``: plan → fetch → start → serve. ``--dry-run`` stops after the plan."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shlex
import subprocess
import sys
from typing import Final

import click

from supervisor import argv, planning, render, rundir, serve
from supervisor.arbiter import Launch
from supervisor.errors import Error, Exit
from supervisor.order import Order
from supervisor.preset import Preset
from supervisor.rundir import RunDir


@dataclasses.dataclass(frozen=True)
class Start:
    """An order, and where it is to be served."""

    order: Order
    host: str
    port: int

    def words(self) -> list[str]:
        """The same as arguments of ``llmctl up``."""
        return [*self.order.words(), "--port", str(self.port), "--host", self.host]

    def prepare(self) -> Start:
        """Have everything here that a start needs. What would refuse it anyway is looked at before the download."""
        order = self.order
        _ = order.preset, order.engine  # in this order: what is wrong with a preset can be said without an engine
        order.plan.require()
        _ = order.argv
        if running := rundir.read(order.home.run):
            raise rundir.busy(order.home.run, running)
        with serve.bind(self.host, self.port):
            pass
        with render.progress() as progress:
            order.fetch(progress)
        if not order.plan.header.assumed:
            return self
        again = dataclasses.replace(order)  # the true header is here now
        again.plan.require()
        return dataclasses.replace(self, order=again)

    def launch(self, owned: RunDir) -> Launch:
        """How to start the child."""
        order = self.order
        folder, log = owned.child_folder(order.name), order.home.logs / f"{order.name}.log"
        return Launch(order.plan, order.argv, argv.environment(os.environ, folder), folder, log, order.remember)

    def serve(self, *, foreground: bool, ready: serve.Ready) -> None:
        """Serve until told to stop."""
        order = self.order
        order.plan.require()  # what was free when it was prepared may be taken since
        _ = order.argv  # the engine and what it can do, before anything is claimed
        title, names = order.engine.title, (order.name,)
        service = serve.Service(order.home, lambda owned: [self.launch(owned)], names, title, self.host, self.port, foreground)
        serve.run(service, ready=ready)


@click.command("up", short_help="Serve a preset.")
@planning.ordered
@click.option("--port", default=serve.DEFAULT_PORT, show_default=True, type=click.IntRange(0, 65535), help="0 picks a free one.")
@click.option("--host", default="localhost", show_default=True, help="Loopback only, until llmctl has keys.")
@click.option("--detach", is_flag=True, help="Return when it is ready; it goes on in the background.")
@click.option("--dry-run", is_flag=True, help="Print the plan and the llama-server command line, and stop.")
@click.option("--json", "as_json", is_flag=True, help="With --detach or --dry-run: the result as JSON.")
@click.option("--ready-fd", type=int, hidden=True, help="Where --detach's other half says how it went.")
def command(
    order: Order,
    port: int,
    host: str,
    detach: bool,
    dry_run: bool,
    as_json: bool,
    ready_fd: int | None,
) -> None:
    """Serve PRESET as an OpenAI endpoint, in the foreground. Ctrl-C drains, twice forces.

    \b
    llmctl up tiny
    llmctl up tiny --port 9000 --set slots=2
    llmctl up turbo_4b --context long
    """
    start = Start(dataclasses.replace(order, online=not dry_run), host, port)
    if ready_fd is not None:
        _log_to_stderr()
        _report(ready_fd, start)
        return
    serve.check_host(host)
    if as_json and not (detach or dry_run):
        raise click.UsageError("--json goes with --detach or --dry-run")
    if dry_run:
        _dry_run(start.order, as_json=as_json)
        return
    start = start.prepare()
    if detach:
        render.say(f"starting {order.name}, llmctl logs {order.name} says how far it is")
        address = _detach(start)
        if as_json:
            render.as_json({"address": address, "model": order.name})
        else:
            _welcome(start.order.preset, address, "llmctl down stops it.")
        return
    _log_to_stderr()
    start.serve(foreground=True, ready=lambda address: _welcome(start.order.preset, address, "Ctrl-C stops it."))


def _dry_run(order: Order, *, as_json: bool) -> None:
    found = order.plan
    if as_json:
        render.as_json(planning.as_dict(found, order.argv))
    else:
        planning.show(found)
        render.out(f"\n{shlex.join(order.argv)}")
    found.require()


SAMPLES: Final[dict[str, tuple[str, dict[str, object]]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "stream": True}),
    "embedding": ("/v1/embeddings", {"input": "Hello"}),
    "rerank": ("/v1/rerank", {"query": "greetings", "documents": ["Hello", "Stone"]}),
}
"""A request to try, for each kind of preset."""


def _welcome(preset: Preset, address: str, ending: str) -> None:
    route, body = SAMPLES[preset.kind]
    sample = json.dumps({"model": preset.name, **body})
    render.say(
        f"""{preset.name} is ready at {address}/v1

  curl {address}{route} -H 'Content-Type: application/json' \\
    -d '{sample}'

{ending}"""
    )


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    for name in ("httpx2", "httpcore2", "uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _detach(start: Start) -> str:
    """Start the serving half in a session of its own and wait for its word; returns the address. Its error becomes ours."""
    logs = start.order.home.logs
    logs.mkdir(parents=True, exist_ok=True)
    read_fd, write_fd = os.pipe()
    with (logs / "llmctl.log").open("ab") as log, os.fdopen(read_fd) as reader:
        other = subprocess.Popen(
            [sys.executable, "-m", "supervisor", "up", *start.words(), "--ready-fd", str(write_fd)],
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


def _report(fd: int, start: Start) -> None:
    """Serve; the address or the error goes to ``fd`` as one line of JSON."""
    with os.fdopen(fd, "w") as pipe:

        def tell(**word: object) -> None:
            if not pipe.closed:
                with contextlib.suppress(OSError):  # the other half was killed: we serve all the same
                    pipe.write(json.dumps(word) + "\n")
                    pipe.close()

        try:
            start.serve(foreground=False, ready=lambda address: tell(address=address))
        except Error as error:
            tell(message=error.message, hint=error.hint, exit=int(error.exit))
            raise
