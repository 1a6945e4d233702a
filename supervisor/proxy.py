"""One request from its head to its record: body → ask → place → ready child → forward → release, record.

The clean-ups hang on one ``try``, so success, the child's death, a client that leaves while queued and one that leaves
mid-stream are one path. Leaving is a cancellation: :mod:`~supervisor.connection` cancels the request's task.
"""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.types import Receive, Scope, Send

from supervisor import assemble, reply
from supervisor.admission import Offer, Ticket
from supervisor.arbiter import Arbiter, Ward
from supervisor.ask import Ask, fields
from supervisor.connection import KEY, Connection
from supervisor.errors import Error, Exit
from supervisor.ledger import Ledger
from supervisor.units import MIB, size
from supervisor.upstream import Broken

BODY_LIMIT: Final = 32 * MIB
"""A 256k-token prompt is about 1 MiB; the engine takes 100 MiB."""
BODY_IDLE_S: Final = 30.0
"""A body of which nothing comes for so long is given up."""


KIND_OF: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "chat",
    "/v1/embeddings": "embedding",
    "/v1/rerank": "rerank",
}
"""The routes that go to a child, and the kind of preset that serves each."""


class Proxy:
    """The generating routes, as an ASGI application."""

    def __init__(self, arbiter: Arbiter, ledger: Ledger) -> None:
        self._arbiter = arbiter
        self._ledger = ledger
        self._grants: dict[Ticket, asyncio.Future[None]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. An :class:`Error` becomes its envelope; none is raised once a reply has begun."""
        client: Connection = scope[KEY]
        try:
            body = client.whole_body()
            if body is None:
                body = await read_body(scope, receive)
            await self._answer(client, scope["path"], body, send)
        except Error as error:
            await reply.refuse(client, send, error)

    async def _answer(self, client: Connection, route: str, body: bytes, send: Send) -> None:
        ask = Ask.parse(body)
        ward = self._arbiter.ward(ask.model)
        self._check_kind(ward, route)
        row = self._ledger.open(ward.name, route, stream=ask.streams)
        answer = _choose(ask, body, route)(client, send, row)
        ticket = Ticket(ask.cost)
        try:
            await self._enter(ward, ticket)
            upstream = await self._arbiter.ensure_ready(ward)
            row.attempts += 1
            exchange = upstream.request(route, answer.asked(ask.spliced(body, ward.launch.preset.most_tokens)), answer.begin)
            try:
                await answer.forward(exchange)
            finally:
                exchange.abort()
        except Broken as exc:
            row.status = "truncated" if answer.begun else "error"
            answer.fail(_engine_died(ward.name, str(exc)))
        except asyncio.CancelledError:
            if not client.was_cut:
                row.status = "cancelled"
                raise
            row.status = "interrupted"
            answer.fail(_stopping())
        except Error as error:
            row.status = "refused" if error.status in (429, 503) else "error"
            raise
        finally:
            self._leave(ward, ticket)
            self._ledger.close(row, answer.measure)

    def _check_kind(self, ward: Ward, route: str) -> None:
        """Raise :class:`Error` (HTTP 400) when the preset is of another kind than the route, naming one that fits."""
        kind, wanted = ward.launch.preset.kind, KIND_OF[route]
        if kind == wanted:
            return
        fit = next((name for name, other in self._arbiter.wards.items() if other.launch.preset.kind == wanted), None)
        raise Error(
            f"{ward.name} is a preset for {kind}, and {route} wants one for {wanted}",
            exit=Exit.USAGE,
            hint=f'"model": "{fit}"' if fit else next(path for path, each in KIND_OF.items() if each == kind),
            status=400,
            code="wrong_kind",
        )

    async def _enter(self, ward: Ward, ticket: Ticket) -> None:
        """Wait for a place at the child. Raises :class:`Error` (HTTP 429) when the queue is full."""
        offer = ward.admission.offer(ticket)
        if offer is Offer.SHED:
            raise Error(
                f"{ward.name} has {ward.admission.busy} requests in work and {ward.admission.waiting} waiting, the most it takes",
                exit=Exit.BUSY,
                hint="send it again in a moment",
                status=429,
                code="queue_full",
            )
        if offer is Offer.QUEUED:
            self._grants[ticket] = grant = asyncio.get_running_loop().create_future()
            await grant

    def _leave(self, ward: Ward, ticket: Ticket) -> None:
        """Give the place, or the one in the queue, back, and let in who comes next."""
        self._grants.pop(ticket, None)
        for admitted in ward.admission.release(ticket):
            grant = self._grants[admitted]
            if not grant.done():  # its client may be leaving in this very turn: then it gives the place back itself
                grant.set_result(None)


def _engine_died(name: str, why: str) -> Error:
    said = f"the engine of {name} ended before its answer did ({why})"
    return Error(said, exit=Exit.CHILD, hint="send it again", status=502, code="engine_died")


def _stopping() -> Error:
    return Error(
        "llmctl stops and can't wait any longer", exit=Exit.CHILD, hint="send it again later", status=503, code="stopping"
    )


def _choose(ask: Ask, body: bytes, route: str) -> reply.Kind:
    if KIND_OF[route] != "chat":
        return reply.Passed
    if ask.streams:
        return reply.Streamed
    if assemble.must_pass_unstreamed(fields(body)):
        return reply.Passed
    return reply.AssembledChat if route == "/v1/chat/completions" else reply.AssembledText


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
