"""One request from its head to its record: body → ask → preset → place at a ready child → forward → release, record.

The clean-ups hang on one ``try``, so success, the child's death, a client that leaves while queued and one that leaves
mid-stream are one path. Leaving is a cancellation: :mod:`~supervisor.connection` cancels the request's task.

A child that dies takes the requests with it that it had. One of which nothing was sent yet is put to the next child, once; one that was
begun is told so. Who was in flight when a child died of itself is a suspect and runs alone; at the second death it is refused
(``suspects``).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from starlette.types import Receive, Scope, Send

from supervisor import length, likeness, logs, reply, routing
from supervisor.admission import Ticket
from supervisor.arbiter import Arbiter
from supervisor.ask import Ask
from supervisor.connection import KEY, Connection
from supervisor.errors import Error, Exit
from supervisor.gate import request_id
from supervisor.ledger import Ledger
from supervisor.likeness import Trails
from supervisor.meter import Reading
from supervisor.power import Power
from supervisor.reply import Reply
from supervisor.routes import ROUTES, Route
from supervisor.row import Measured, Row
from supervisor.suspects import Standing, fingerprint
from supervisor.units import MIB, size
from supervisor.upstream import Broken, Exchange, Upstream
from supervisor.ward import Ward

BODY_LIMIT: Final = 32 * MIB
"""A 256k-token prompt is about 1 MiB; the engine takes 100 MiB."""
BODY_IDLE_S: Final = 30.0
"""A body of which nothing comes for so long is given up."""
CLASS_HEADER: Final = b"x-request-class"
"""``interactive`` or ``batch``; OpenAI's ``"service_tier": "flex"`` is batch, too."""
REFUSALS: Final = 3
"""So often a child may turn out not to take a connection. It ended in the moment in which it let us in, or is about to be looked after."""
DROPPED_HEADER: Final = b"x-llmctl-dropped-turns"
"""How many turns of a dialogue were left out, on the answer of a preset with ``truncate: oldest``."""


class _Guest(NamedTuple):
    """A request's client in the line of a child."""

    client: Connection
    answer: Reply
    comments: bool

    def keep_alive(self) -> None:
        if self.comments:
            self.answer.keep_alive()

    def stalled_s(self, now_s: float) -> float:
        return self.client.stalled_s(now_s)

    def give_up(self) -> None:
        self.client.give_up()


class Proxy:
    """The routes that go to a child, as an ASGI application."""

    def __init__(self, arbiter: Arbiter, ledger: Ledger, spent: Callable[[float, float], None]) -> None:
        """``spent`` is told the joules that cards took for requests, and idle."""
        self.in_work: dict[str, Reply] = {}
        """Requests for a preset that have no end yet, by their ids."""
        self.hearers: set[Callable[[Row, bytes], None]] = set()
        """Are told each request that is admitted, with its body, while somebody asked for texts; mostly there is none."""
        self.power = Power(arbiter.cards, self._credit, self._made)
        self._arbiter = arbiter
        self._ledger = ledger
        self._spent = spent
        self._trails: dict[str, Trails] = {}
        """Of each preset's prompts; the ledger's thread has them."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. An :class:`Error` becomes its envelope; none is raised once a reply has begun."""
        client: Connection = scope[KEY]
        route = ROUTES[scope["path"]]
        row = self._ledger.open(route.path, client=client.whereabouts, client_id=request_id(scope["headers"]))
        logs.request.set(row.id)
        answer: Reply | None = None
        body = b""
        try:
            whole = client.whole_body()
            if whole is None:
                whole = await read_body(scope, receive)
                row.opened_s = time.monotonic()  # what it takes to send a body is the client's time
            body = whole
            ask = Ask.parse(body, route)
            ward = self._up(ask, route) or await self._ward(ask, route)
            row.preset, row.stream = ward.name, ask.streams
            logs.preset.set(ward.name)
            party, row.batch = _rank(scope, client, ask)
            if self.hearers:
                self._tell(row, body)
            ticket = Ticket(ask.cost if route.decodes else 0, party, row.batch)
            answer = reply.choose(route, ask, body)(client, send, row, route, sequences=ask.cost)
            answer.model = ward.name
            self.in_work[row.id] = answer
            await self._answer(client, answer, ask, body, ward, ticket)
        except Error as error:
            if answer is None:
                row.status, row.error = "refused", error.code
            row.http_status = error.status
            await reply.refuse(client, send, error, route.path, reply.request_id(row))
        except asyncio.CancelledError:
            if answer is None:
                row.status = "interrupted" if client.was_cut else "cancelled"
            raise
        finally:
            self.in_work.pop(row.id, None)
            known = body if len(body) <= likeness.LIMIT else b""  # a larger one isn't looked at, and would wait for the disk
            self._ledger.close(row, functools.partial(self._measure, row, answer, known))

    def _tell(self, row: Row, body: bytes) -> None:
        for hear in tuple(self.hearers):
            hear(row, body)

    def _made(self) -> dict[str, int]:
        """Tokens that those in work have made so far."""
        return {request: answer.meter.events for request, answer in self.in_work.items()}

    def _credit(self, joules: Mapping[str, float], idle_j: float) -> None:
        """Add what cards took to the requests that it was for; some have ended since."""
        late: dict[str, float] = {}
        for request, each in joules.items():
            if (answer := self.in_work.get(request)) is not None:
                answer.row.energy_j = (answer.row.energy_j or 0.0) + each
            else:
                late[request] = each
        self._ledger.add_energy(late, idle_j)
        self._spent(sum(joules.values()), idle_j)

    def _measure(self, row: Row, answer: Reply | None, body: bytes) -> Measured:
        """What a request was made of, and which one before it was like it. On the ledger's thread."""
        if answer is None or not row.attempts:
            return Measured(Reading())
        reading = Reading() if row.status == "error" and not answer.answered else answer.measure()
        prompt = likeness.parts(answer.route.api, body)
        if prompt is None:
            return Measured(reading)
        if row.preset not in self._trails:
            self._trails[row.preset] = Trails()
        return Measured(reading, self._trails[row.preset].compare(row.id, prompt))

    def _up(self, ask: Ask, route: Route) -> Ward | None:
        """The ward of the preset that is named and up, as it mostly is; spares the rest of the question."""
        ward = self._arbiter.wards.get(ask.model or "")
        return ward if ward is not None and ward.upstream is not None and route.kind in (None, ward.preset.kind) else None

    async def _ward(self, ask: Ask, route: Route) -> Ward:
        """The ward of the preset it is for. Raises :class:`Error`: 404 an unknown one, 400 a wrong one, 503 one that can't run."""
        catalog = self._arbiter.catalog
        if ask.model is not None and not routing.is_known(
            ask.model, catalog.presets
        ):  # the default preset isn't meant for a new one
            await asyncio.to_thread(catalog.refresh)
            if problem := catalog.faults.get(ask.model):
                raise problem
        try:
            name = routing.resolve(ask.model, route, catalog.presets, catalog.ordered, catalog.here)
        except Error:
            await asyncio.to_thread(catalog.refresh)  # a preset may have been written since
            name = routing.resolve(ask.model, route, catalog.presets, catalog.ordered, catalog.here)
        ward = self._arbiter.ward(name)
        self._arbiter.check(ward)
        return ward

    async def _answer(self, client: Connection, answer: Reply, ask: Ask, body: bytes, ward: Ward, ticket: Ticket) -> None:
        row = answer.row
        try:
            if ward.suspects:
                _judge(ward, ticket, answer.route, body)
            while not await self._attempt(client, answer, ask, body, ward, ticket):
                ward.line.leave(ticket)
        except asyncio.CancelledError:
            if not client.was_cut:
                row.status = "ok" if answer.meter.done else "cancelled"  # some don't wait for what follows the last event
                raise
            row.status = "interrupted"
            answer.fail(_stopping())
        except Error as error:
            refused = error.status in (400, 429, 503)
            row.status = "truncated" if answer.answered else "refused" if refused else "error"
            if not answer.answered:
                answer.waste()
            answer.fail(error)
        finally:
            ward.line.leave(ticket, served=row.status == "ok")
            self.power.leave(row.id, answer.meter.events)

    async def _attempt(self, client: Connection, answer: Reply, ask: Ask, body: bytes, ward: Ward, ticket: Ticket) -> bool:
        """Put it to the child; False when the child died of which the client has had nothing, so that it can be put to the next one.

        Raises :class:`Error`: what is wrong with the request, or that its child died.
        """
        upstream, exchange = await self._open(client, answer, ask, body, ward, ticket)
        answer.exchanging = True
        try:
            await answer.forward(exchange)
            if ward.suspects:
                ward.suspects.served(fingerprint(answer.route.path, ward.name, body))
            return True
        except Broken as exc:
            cause = await upstream.fate()
            ward.line.leave(ticket)  # before it is judged: a ticket's places must not change while it is inside
            if cause is not None and cause.blames_request:
                ward.suspects.died(fingerprint(answer.route.path, ward.name, body), upstream.child.pid, time.monotonic())
                _judge(ward, ticket, answer.route, body)
            if answer.answered or answer.row.attempts > 1 or cause is None:
                raise _engine_died(ward.name, cause.text if cause is not None else str(exc)) from exc
            answer.waste()
            return False
        finally:
            answer.exchanging = False
            exchange.abort()

    async def _open(
        self, client: Connection, answer: Reply, ask: Ask, body: bytes, ward: Ward, ticket: Ticket
    ) -> tuple[Upstream, Exchange]:
        """Put the request to the child when its turn has come; again where the child turns out not to take it."""
        refusals = 0
        while True:
            upstream, fitting = await self._enter(client, answer, ask, body, ward, ticket)
            if ward.suspects and _standing(ward, answer.route, body) is not _supposed(ticket):
                ward.line.leave(ticket)  # its like ended a child while it waited
                _judge(ward, ticket, answer.route, body)
                continue
            asked = answer.asked(ask.spliced(fitting, ward.preset.most_tokens))
            try:
                exchange = upstream.request(answer.route.path, asked, answer.begin)
            except Broken as exc:
                refusals += 1
                cause = await upstream.fate()
                if cause is None and refusals >= REFUSALS:
                    raise _engine_died(ward.name, str(exc)) from exc
                ward.line.leave(ticket)
            else:
                self._note_attempt(answer.row, ward)
                return upstream, exchange

    def _note_attempt(self, row: Row, ward: Ward) -> None:
        """An engine has it."""
        row.attempts += 1
        row.up_s = None if ward.ready_s is None else time.monotonic() - ward.ready_s
        if ward.launch is not None:
            row.run = ward.launch.run
            if ward.launch.plan.budget.cuda:
                self.power.enter(row.id, ward.launch.preset.device)

    async def _enter(
        self, client: Connection, answer: Reply, ask: Ask, body: bytes, ward: Ward, ticket: Ticket
    ) -> tuple[Upstream, bytes]:
        """Wait for a place at a ready child; its face, and the body as it may be sent there."""
        guest = _Guest(client, answer, ward.preset.wait_comments)
        is_long = len(body) > (ward.slot_context or ward.preset.slot_context)
        if is_long and ward.upstream is not None:
            body, is_long = await self._fit(ward.upstream, ward, answer, ask, body), False
        while True:
            await _wait(answer.row, ward, ticket, guest)
            if (upstream := ward.upstream) is not None:
                break
            ward.line.leave(ticket)  # the child ended in the very turn in which it let us in
        if is_long:
            body = await self._fit(upstream, ward, answer, ask, body)
        return upstream, body

    @staticmethod
    async def _fit(upstream: Upstream, ward: Ward, answer: Reply, ask: Ask, body: bytes) -> bytes:
        """The body as it fits a slot. Raises :class:`Error` (HTTP 400) when it can't."""
        context = ward.slot_context or ward.preset.slot_context
        body, dropped = await length.fit(upstream, answer.route, ask, body, ward.preset, context)
        if dropped:
            answer.row.dropped_turns = dropped
            answer.headers = (*reply.request_id(answer.row), (DROPPED_HEADER, str(dropped).encode()))
        return body


async def _wait(row: Row, ward: Ward, ticket: Ticket, guest: _Guest) -> None:
    """Wait in the child's line. How long the child couldn't answer meanwhile is the load; the rest is the queue."""
    admission = ward.line.admission
    if row.ahead is None:
        row.ahead = admission.inside + admission.waiting
    began_s, closed_s = time.monotonic(), ward.line.closed_s()
    try:
        await ward.line.enter(ticket, guest)
    finally:
        load_s = ward.line.closed_s() - closed_s
        row.load_s = (row.load_s or 0.0) + load_s
        row.queue_s = (row.queue_s or 0.0) + max(0.0, time.monotonic() - began_s - load_s)


def _rank(scope: Scope, client: Connection, ask: Ask) -> tuple[str, bool]:
    """Whose turn a request takes, and whether it is of the class that may wait.

    Whose: that of the key it comes with, else of its address; never written anywhere. Raises :class:`Error` (HTTP 400) for a class that
    there isn't.
    """
    party, said = "", ""
    for name, value in scope["headers"]:
        if name in (b"authorization", b"x-api-key"):
            party = f"key {hash(value)}"
        elif name == CLASS_HEADER:
            said = value.decode("latin-1")
            if said not in ("interactive", "batch"):
                raise Error(
                    f"X-Request-Class is {said!r}, and there is: interactive, batch",
                    exit=Exit.USAGE,
                    hint="X-Request-Class: batch",
                    status=400,
                    code="invalid_request_error",
                )
    if not party and client.client:
        party = client.client[0]
    return party, (said or ("batch" if ask.service_tier == "flex" else "")) == "batch"


def _standing(ward: Ward, route: Route, body: bytes) -> Standing:
    return ward.suspects.standing(fingerprint(route.path, ward.name, body), time.monotonic())


def _supposed(ticket: Ticket) -> Standing:
    return Standing.SUSPECT if ticket.alone else Standing.CLEAR


def _judge(ward: Ward, ticket: Ticket, route: Route, body: bytes) -> None:
    """Let a suspect run alone. Raises :class:`Error` (HTTP 500) for one that is known to end the engine."""
    standing = _standing(ward, route, body)
    ticket.alone = standing is Standing.SUSPECT
    if standing is Standing.POISON:
        raise Error(
            f"the engine of {ward.name} died twice while this request was in work; it is refused for a while",
            exit=Exit.CHILD,
            hint="another request, or llmctl logs",
            status=500,
            code="engine_crashed",
            retry=False,
        )


def _engine_died(name: str, why: str) -> Error:
    said = f"the engine of {name} ended before its answer did ({why})"
    return Error(said, exit=Exit.CHILD, hint="send it again", status=502, code="engine_died")


def _stopping() -> Error:
    return Error(
        "llmctl stops and can't wait any longer", exit=Exit.CHILD, hint="send it again later", status=503, code="stopping"
    )


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """The request's whole body. Raises :class:`Error`: HTTP 413 over the limit, 408 when it doesn't come."""
    announced = next((int(value) for name, value in scope["headers"] if name == b"content-length" and value.isdigit()), 0)
    parts: list[bytes] = []
    held, more = 0, True
    while more:
        if max(announced, held) > BODY_LIMIT:
            raise Error(
                f"a request's body may have {size(BODY_LIMIT)}, this one has {size(max(announced, held))}",
                exit=Exit.USAGE,
                hint="a shorter prompt",
                status=413,
                code="body_too_large",
            )
        try:
            async with asyncio.timeout(BODY_IDLE_S):
                message = await receive()
        except TimeoutError:
            said = f"nothing of the body came for {BODY_IDLE_S:.0f} s"
            raise Error(said, exit=Exit.USAGE, hint="send it again", status=408, code="body_timeout") from None
        if message["type"] != "http.request":
            raise asyncio.CancelledError("the client left before its body was here")
        parts.append(message.get("body", b""))
        held += len(parts[-1])
        more = message.get("more_body", False)
    scope[KEY].watch()
    return parts[0] if len(parts) == 1 else b"".join(parts)
