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
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import click

from supervisor import config, logs, placement, planning, render, rundir, serve
from supervisor.errors import Error, Exit
from supervisor.order import Order

log = logging.getLogger("llmctl.up")


@dataclasses.dataclass(frozen=True)
class Start:
    """Orders, where they are to be served, and how that is logged."""

    orders: tuple[Order, ...]
    host: str
    port: int
    log_format: logs.Format = "text"
    is_planned: bool = False

    def words(self) -> list[str]:
        """The same as arguments of ``llmctl up``."""
        also = [word for order in self.orders[1:] for word in ("--also", order.name)]
        where = ("--port", str(self.port), "--host", self.host, "--log-format", self.log_format)
        return [*self.orders[0].words(), *also, *where]

    def prepare(self) -> Start:
        """Have everything here that a start needs. What would refuse it anyway is looked at before the download."""
        config.load(self.orders[0].home)
        for order in self.orders:
            _ = order.preset, order.engine  # in this order: what is wrong with a preset can be said without an engine
        start = self.fitted()
        home = start.orders[0].home
        if running := rundir.read(home.run):
            raise rundir.busy(home.run, running)
        with serve.bind(self.host, self.port):
            pass
        with render.progress() as progress:
            for order in start.orders:
                order.fetch(progress)
        return (
            start.fitted() if any(order.plan.header.assumed for order in start.orders) else start
        )  # the true header is here now

    def fitted(self) -> Start:
        """Each planned beside those before it. Raises :class:`Error` (exit code 4) for the first that doesn't fit."""
        orders: list[Order] = []
        for order in _beside(self.orders):
            if orders and not order.plan.fits:
                raise _no_room(order, orders)
            order.plan.require()
            _ = order.argv  # the engine and what it can do, before anything is claimed
            orders.append(order)
        return dataclasses.replace(self, orders=tuple(orders), is_planned=True)

    def serve(self, *, foreground: bool, ready: serve.Ready) -> None:
        """Serve until told to stop, by the user's settings as they are now."""
        settings = config.load(self.orders[0].home)
        start = self if self.is_planned else self.fitted()
        order = start.orders[0]
        serve.run(
            serve.Service(order.home, start.orders, order.engine.title, self.host, self.port, foreground, settings),
            ready=ready,
        )


def _beside(orders: Sequence[Order]) -> Iterator[Order]:
    """The same, each to be planned for the memory that those before it leave."""
    taken: Counter[str] = Counter()
    for order in orders:
        again = dataclasses.replace(order, spare={pool: -count for pool, count in taken.items()})
        yield again
        taken.update(placement.needs(again.plan))


def _no_room(order: Order, before: Sequence[Order]) -> Error:
    beside = " and ".join(each.name for each in before)
    return Error(
        f"{order.name} needs {order.plan.shortage}, beside {beside}",
        exit=Exit.NO_FIT,
        hint=f"llmctl up {order.name}, and let requests swap them",
    )


@click.command("up", short_help="Serve a preset.")
@planning.ordered
@click.option("--port", default=serve.DEFAULT_PORT, show_default=True, type=click.IntRange(0, 65535), help="0 picks a free one.")
@click.option("--host", default="localhost", show_default=True, help="Loopback only, until llmctl has keys.")
@click.option("--also", multiple=True, metavar="PRESET", help="Serve this one beside it, if both fit; may be repeated.")
@click.option("--detach", is_flag=True, help="Return when it is ready; it goes on in the background.")
@click.option("--dry-run", is_flag=True, help="Print the plan and the llama-server command line, and stop.")
@click.option("--json", "as_json", is_flag=True, help="With --detach or --dry-run: the result as JSON.")
@click.option(
    "--log-format",
    default="text",
    show_default=True,
    type=click.Choice(logs.FORMATS),
    help="Of the lines on stderr, or in llmctl's log where it is detached.",
)
@click.option("--ready-fd", type=int, hidden=True, help="Where --detach's other half says how it went.")
def command(
    order: Order,
    port: int,
    host: str,
    also: tuple[str, ...],
    detach: bool,
    dry_run: bool,
    as_json: bool,
    log_format: logs.Format,
    ready_fd: int | None,
) -> None:
    """Serve PRESET as an OpenAI endpoint, in the foreground. Ctrl-C drains, twice forces.

    \b
    llmctl up tiny
    llmctl up tiny --port 9000 --set slots=2
    llmctl up turbo_4b --context long
    llmctl up turbo_4b --also embedder
    """
    orders = (order, *(Order(name, home=order.home) for name in also))
    start = Start(tuple(dataclasses.replace(each, online=not dry_run) for each in orders), host, port, log_format)
    if twice := next((name for name, count in Counter(each.name for each in orders).items() if count > 1), None):
        raise click.UsageError(f"{twice} is named twice")
    if ready_fd is not None:
        logs.to_stderr(log_format)
        with _logged_end(start):
            _report(ready_fd, start)
        return
    serve.check_host(host)
    if as_json and not (detach or dry_run):
        raise click.UsageError("--json goes with --detach or --dry-run")
    if dry_run:
        _dry_run(start.orders, as_json=as_json)
        return
    start = start.prepare()
    if detach:
        render.say(f"starting {order.name}, llmctl logs {order.name} says how far it is")
        address = _detach(start)
        if as_json:
            render.as_json({"address": address, "model": order.name, "also": list(also)})
        else:
            _welcome(start, address, "llmctl down stops it.")
        return
    logs.to_stderr(log_format)
    with _logged_end(start):
        start.serve(foreground=True, ready=lambda address: _ready(start, address))


def _dry_run(orders: Sequence[Order], *, as_json: bool) -> None:
    plans = list(_beside(orders))
    if as_json:
        said = [planning.as_dict(each.plan, each.argv) for each in plans]
        render.as_json({**said[0], "also": said[1:]} if said[1:] else said[0])
    else:
        for each in plans:
            planning.show(each.plan)
            render.out(f"\n{shlex.join(each.argv)}")
    for each in plans:
        each.plan.require()


SAMPLES: Final[dict[str, tuple[str, dict[str, object]]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "stream": True}),
    "embedding": ("/v1/embeddings", {"input": "Hello"}),
    "rerank": ("/v1/rerank", {"query": "greetings", "documents": ["Hello", "Stone"]}),
}
"""A request to try, for each kind of preset."""


def _welcome(start: Start, address: str, ending: str) -> None:
    presets = [order.plan.preset for order in start.orders]
    samples = []
    for preset in presets:
        route, body = SAMPLES[preset.kind]
        sample = json.dumps({"model": preset.name, **body})
        samples.append(f"  curl {address}{route} -H 'Content-Type: application/json' \\\n    -d '{sample}'")
    names = " and ".join(preset.name for preset in presets)
    said = "\n\n".join((f"{names} {'is' if len(presets) == 1 else 'are'} ready at {address}/v1", *samples, ending))
    render.say(said)


def _ready(start: Start, address: str) -> None:
    """A person is shown what to try; a log of JSON stays one."""
    if start.log_format == "text":
        _welcome(start, address, "Ctrl-C stops it.")
    else:
        log.info("%s ready at %s/v1", " and ".join(order.name for order in start.orders), address)


@contextlib.contextmanager
def _logged_end(start: Start) -> Iterator[None]:
    """In a log of JSON, an error that ends it is the last line, and not a sentence for a person."""
    try:
        yield
    except Error as error:
        if start.log_format == "text":
            raise
        hint = f"; try: {error.hint}" if error.hint else ""
        log.error("%s%s", error.message, "\n  ".join((hint, *error.log)))
        raise click.exceptions.Exit(error.exit) from error


def _detach(start: Start) -> str:
    """Start the serving half in a session of its own and wait for its word; returns the address. Its error becomes ours."""
    logs = start.orders[0].home.logs
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
    raise Error(word["message"], exit=Exit(word["exit"]), hint=word["hint"], log=tuple(word["log"]))


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
            tell(message=error.message, hint=error.hint, exit=int(error.exit), log=error.log)
            raise
