"""Serving, from a claimed port to the last child reaped: sockets, signals, the front door, and the order in which they end.

The first SIGINT or SIGTERM drains: no new connection is taken, what is in work may end within :data:`DRAIN_S`. A second one, or the
end of that time, cuts what is left. SIGHUP stops a foreground llmctl, so that a closed terminal leaves no hidden server; a detached
one goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self

import psutil
import uvloop
from starlette.types import ASGIApp
from uvicorn.config import Config as Protocol
from uvicorn.server import ServerState

from supervisor import app, gate, logfile, rundir
from supervisor.app import TurnAway
from supervisor.arbiter import Arbiter
from supervisor.catalog import Catalog
from supervisor.config import Config
from supervisor.connection import KEEP_ALIVE_S, Connection
from supervisor.control import Control
from supervisor.errors import Error, Exit
from supervisor.ledger import Ledger, Reader
from supervisor.meter import Reading
from supervisor.metrics import Metrics
from supervisor.order import Order
from supervisor.paths import Home
from supervisor.proxy import Proxy
from supervisor.record import Record, Run
from supervisor.rundir import RunDir
from supervisor.units import MIB

log = logging.getLogger("llmctl.serve")

DEFAULT_PORT: Final = 8080
DRAIN_S: Final = 30.0
DRAIN_POLL_S: Final = 0.02
TIDY_S: Final = 2.0
"""Between two looks at the run folder and our own log; one costs some 20 µs."""
OWN_LOG: Final = "llmctl.log"
"""Of a detached llmctl; no preset may be called so."""
FLUSH_S: Final = 1.0
"""For the last words to a client that is being cut."""
BACKLOG: Final = 1024
GC_THRESHOLD: Final = 20_000
"""Allocations between two looks for cycles. A request makes none, so at Python's 700 they are found out of hand, in the way of a chunk."""
SWITCH_S: Final = 0.0005
"""How long the ledger's thread may keep the loop from running once the loop has something to do (Python's default is 5 ms)."""


Ready = Callable[[str], None]
"""Told the address."""


@dataclass(frozen=True, slots=True)
class Service:
    """What is to be served, and where."""

    home: Home
    orders: tuple[Order, ...]
    """What is to run from the start, planned."""
    engine: str
    host: str
    port: int
    foreground: bool
    config: Config


def run(service: Service, *, ready: Ready) -> None:
    """Serve until told to stop. ``ready`` gets the address when the first request can be answered.

    Raises :class:`Error`: exit code 2 for a host that isn't loopback, 7 for a busy port or home, 8 when a child can't be started.
    """
    with ExitStack() as stack:
        stops = stack.enter_context(Stops(foreground=service.foreground))
        sockets = stack.enter_context(bind(service.host, service.port))
        stops.heed()
        names = tuple(order.name for order in service.orders)
        owned = stack.enter_context(rundir.claim(service.home.run, names, secrets.token_urlsafe(24)))
        sys.setswitchinterval(SWITCH_S)
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two descriptors a request; the usual soft limit is 1,024
        _, largest = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, largest))  # a dump of us, or of an engine, would hold prompts and keys
        config = service.config
        ledger = Ledger(service.home.ledger, keep_days=config.records_days, keep_bytes=config.records_mib * MIB)
        stack.callback(ledger.shut)
        stops.heed()
        try:
            uvloop.run(_serve(service, sockets, owned, ledger, stops, ready))
        except BaseExceptionGroup as group:
            ours = group.subgroup(Error)
            if ours is None:
                raise
            raise _first(ours) from group


def _first(group: BaseExceptionGroup[Error]) -> Error:
    inner = group.exceptions[0]
    return inner if isinstance(inner, Error) else _first(inner)


class Stops:
    """Stop signals, from before anything is claimed until everything is given back.

    Python's own handlers and not the loop's, which end with the loop and would leave a moment in which SIGTERM kills. Before the loop
    runs, a signal is only noted, and :meth:`heed` ends the start where nothing is half-claimed: an exception out of a handler could fall
    between a claim and its clean-up. While the loop runs, it is told; after it, we are stopping anyway.
    """

    def __init__(self, *, foreground: bool) -> None:
        self._foreground = foreground
        self._before: dict[signal.Signals, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._early = 0
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup means what it says
                self._before[number] = signal.signal(number, self._got)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def listen(self) -> None:
        """From here on signals set ``first``, then ``second``, in the running loop; one that came just before, too."""
        self._loop = asyncio.get_running_loop()
        if self._early:
            self._note()

    def heed(self) -> None:
        """End by SystemExit (128 + the signal) if one came by now."""
        if self._early:
            sys.exit(128 + self._early)

    def _got(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP and not self._foreground:
            return  # files are looked at again every few seconds anyway (arbiter)
        if self._loop is None:
            self._early = number
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._note)

    def _note(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


def check_host(host: str) -> None:
    """Raise :class:`Error` (exit code 2) for a host that isn't loopback: there are no keys yet that could guard it."""
    if host not in gate.LOOPBACK:
        raise Error(
            f"llmctl has no keys yet, so it listens on this machine only, not on {host}",
            exit=Exit.USAGE,
            hint="leave out --host, and reach it through an SSH tunnel",
        )


@contextmanager
def bind(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Listening sockets on loopback; ``localhost`` is both 127.0.0.1 and ::1 where the machine has that.

    Raises :class:`Error`: exit code 2 for another host, 7 naming the process that has the port.
    """
    check_host(host)
    hosts = ("127.0.0.1", "::1") if host == "localhost" else (host,)
    with ExitStack() as stack:
        found: list[socket.socket] = []
        for each in hosts:
            family = socket.AF_INET6 if ":" in each else socket.AF_INET
            try:
                door = stack.enter_context(socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
                door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                door.bind((each, port if not found else found[0].getsockname()[1]))
                door.listen(BACKLOG)
            except OSError as exc:
                if exc.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL) and found:
                    continue  # a machine without IPv6
                raise _cannot_bind(each, port, exc) from exc
            found.append(door)
        yield found


def _cannot_bind(host: str, port: int, exc: OSError) -> Error:
    if exc.errno == errno.EADDRINUSE:
        return Error(f"port {port} is taken{_holder(port)}", exit=Exit.BUSY, hint=f"--port {_free_port(port)}")
    return Error(f"can't listen on {host}:{port}: {exc.strerror}", exit=Exit.BUSY, hint=f"--port {DEFAULT_PORT}")


def _holder(port: int) -> str:
    """``" by nginx (pid 12)"``; empty where the system doesn't let us see it."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and getattr(connection.laddr, "port", 0) == port and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass
    return ""


def _free_port(beside: int) -> int:
    for port in range(beside + 1, min(beside + 100, 65535)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    return 0


async def _serve(
    service: Service,
    sockets: Sequence[socket.socket],
    owned: RunDir,
    ledger: Ledger,
    stops: Stops,
    ready: Ready,
) -> None:
    stops.listen()
    host, port = sockets[0].getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    owned.describe(address=address)
    loop = asyncio.get_running_loop()
    ledger.soon = loop.call_soon
    metrics = Metrics(service.engine)
    arbiter = Arbiter(Catalog(service.home, service.orders, owned), children_changed=owned.note_children)
    ledger.readers += [metrics.observe, _learning(arbiter, loop)]
    proxy = Proxy(arbiter, ledger, metrics.spend)
    control = Control(arbiter, ledger, proxy, metrics, engine=service.engine, address=address, token=owned.instance.token)

    def turn_away(code: str, client: str) -> None:
        ledger.turn_away(code, client)
        metrics.turned_away(code)

    door = Door(app.make(proxy, control, turn_away), sockets, turn_away)
    async with asyncio.TaskGroup() as around:
        forcing = around.create_task(_force(stops, door, arbiter), name="force")
        weighing = around.create_task(proxy.power.tend(), name="power")
        tidying = around.create_task(_tidy(owned, None if service.foreground else service.home.logs / OWN_LOG), name="tidy")
        async with arbiter.run():
            await door.open()
            try:
                async with asyncio.TaskGroup() as group:
                    announcing = group.create_task(_announce(arbiter, address, ready), name="announce")
                    await stops.first.wait()
                    announcing.cancel()
                log.info("draining: requests in work: %d, at most %.0f s; a second signal cuts them", door.busy, DRAIN_S)
                control.end_events()
                await door.drain(DRAIN_S, stops.second)
            finally:
                await door.shut()
        for task in (forcing, tidying, weighing):
            task.cancel()


def _learning(arbiter: Arbiter, loop: asyncio.AbstractEventLoop) -> Reader:
    """Tells the arbiter, on its loop, how well each request's drafts were guessed."""

    def learn(record: Record, run: Run | None, _: Reading) -> None:
        if run is not None and record.draft_tokens and record.draft_accepted is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(
                    arbiter.learn, record.preset, run.speculative, record.draft_tokens, record.draft_accepted
                )

    return learn


async def _tidy(owned: RunDir, own_log: Path | None) -> None:
    """Keep what is ours on disk as it should be: the run folder there, our own log within its bounds."""
    lost = False
    while True:
        await asyncio.sleep(TIDY_S)
        try:
            owned.mend()
            lost = False
        except (Error, OSError) as exc:  # another llmctl has it by now: what runs here is served to its end
            if not lost:
                log.warning("%s", exc)
            lost = True
        if own_log is not None:
            await asyncio.to_thread(_keep_log, own_log)


def _keep_log(own_log: Path) -> None:
    """Within its bounds, and there: where its folder was removed, what is written goes to a new file."""
    if own_log.exists():
        logfile.trim(own_log)
        return
    with contextlib.suppress(OSError):
        own_log.parent.mkdir(parents=True, exist_ok=True)
        with own_log.open("ab") as fresh:
            for stream in (1, 2):
                os.dup2(fresh.fileno(), stream)


async def _announce(arbiter: Arbiter, address: str, ready: Ready) -> None:
    for ward in [ward for ward in arbiter.wards.values() if ward.ordered]:
        await arbiter.ensure_ready(ward)
    with contextlib.suppress(OSError):  # who wanted to hear it has left; it serves all the same
        ready(address)


async def _force(stops: Stops, door: Door, arbiter: Arbiter) -> None:
    """At the second signal no child is asked politely any more, once the clients were told."""
    await stops.second.wait()
    await door.closed.wait()
    arbiter.kill()


class Door:
    """The listening side: uvicorn's protocol on our sockets, without its server, so that signals and draining are ours."""

    def __init__(
        self, application: ASGIApp, sockets: Sequence[socket.socket], turn_away: TurnAway = lambda code, client: None
    ) -> None:
        self._config = Protocol(
            application,
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            timeout_keep_alive=KEEP_ALIVE_S,
            proxy_headers=False,
        )
        self._config.load()
        self._state = ServerState()
        self._sockets = sockets
        self._turn_away = turn_away
        self._servers: list[asyncio.Server] = []
        self.closed = asyncio.Event()
        """No request is in work, and none can come."""

    def __repr__(self) -> str:
        return f"<Door {len(self._state.connections)} connections, {len(self._state.tasks)} requests>"

    @property
    def busy(self) -> int:
        """Requests in work."""
        return len(self._state.tasks)

    async def open(self) -> None:
        """Take connections."""
        loop = asyncio.get_running_loop()
        for door in self._sockets:
            self._servers.append(await loop.create_server(self._connection, sock=door))

    def _connection(self) -> Connection:
        return Connection(self._config, self._state, {}, turn_away=self._turn_away)

    async def drain(self, limit_s: float, forced: asyncio.Event) -> None:
        """Take no more, and let what is in work end and reach its client, until the limit or ``forced``."""
        for server in self._servers:
            server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        await self._gone(limit_s, forced)

    async def shut(self) -> None:
        """Cut what is left: each client is told, and has a moment to take it."""
        for connection in list(self._state.connections):
            assert isinstance(connection, Connection)
            connection.cut()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)
        await self._gone(FLUSH_S)
        for connection in list(self._state.connections):
            connection.transport.abort()
        self.closed.set()

    async def _gone(self, limit_s: float, forced: asyncio.Event | None = None) -> None:
        # A connection tells nobody that its last byte is out: hence the polling.
        until = time.monotonic() + limit_s
        while self._state.connections and time.monotonic() < until and not (forced and forced.is_set()):  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_S)
