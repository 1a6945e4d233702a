"""The ASGI application: which path is whose. A request's own way is in ``proxy``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from supervisor import gate, reply
from supervisor.connection import KEY, Connection
from supervisor.control import Control
from supervisor.errors import Error, Exit
from supervisor.proxy import Proxy
from supervisor.routes import ROUTES

TurnAway = Callable[[str, str], None]
"""Counts a request that was refused at the door, by the code of its error and the class of its client's address."""


def make(proxy: Proxy, control: Control, turn_away: TurnAway) -> ASGIApp:
    """Put the routes together."""
    own = {
        "/v1/models": ("GET", control.models),
        "/v1/models/{model:path}": ("GET", control.model),
        "/health": ("GET", control.health),
        "/metrics": ("GET", control.metrics),
        "/llmctl/status": ("GET", control.status),
        "/llmctl/top": ("GET", control.top),
        "/llmctl/events": ("GET", control.events),
        "/llmctl/texts": ("GET", control.texts),
        "/llmctl/openapi.json": ("GET", control.openapi),
        "/llmctl/switch": ("POST", control.switch),
        "/llmctl/unload": ("POST", control.unload),
        "/llmctl/restart": ("POST", control.restart),
        "/llmctl/drain": ("POST", control.drain),
    }
    routes = [
        *(Route(path, proxy, methods=["POST"]) for path in ROUTES),
        *(Route(path, answer, methods=[method]) for path, (method, answer) in own.items()),
    ]

    async def refused(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, Error)
        if exc.status == 401:
            turn_away(exc.code, _where(request.scope))
        return JSONResponse(reply.envelope(exc, request.url.path), exc.status)

    async def no_route(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        path, status = request.url.path, exc.status_code
        message, code = (
            (f"there is no {path}", "not_found") if status == 404 else (f"{path} doesn't take {request.method}", "method")
        )
        turn_away(code, _where(request.scope))
        error = Error(message, exit=Exit.USAGE, hint="/v1/chat/completions", status=status, code=code)
        return JSONResponse(reply.envelope(error, path), status, headers=exc.headers)

    return _Outermost(proxy, Starlette(routes=routes, exception_handlers={HTTPException: no_route, Error: refused}), turn_away)


def _where(scope: Scope) -> str:
    client: Connection = scope[KEY]
    return client.whereabouts or "unknown"


class _Outermost:
    """What holds for every route: the gate, ``OPTIONS``, ``X-Request-Id``, and that a client's leaving is no error.

    A request for a child doesn't go through Starlette's layers, which cost it as much again as all of ours.
    """

    def __init__(self, proxy: Proxy, rest: Starlette, turn_away: TurnAway) -> None:
        self._proxy = proxy
        self._rest = rest
        self._turn_away = turn_away

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            try:
                gate.check(scope["method"], scope["headers"])
            except Error as error:
                self._turn_away(error.code, _where(scope))
                await reply.refuse(scope[KEY], _answering(scope, send), error, scope["path"])
                return
            if scope["method"] == "POST" and scope["path"] in ROUTES:
                await self._proxy(scope, receive, send)
            elif scope["method"] == "OPTIONS":
                await self._options(scope, receive, _answering(scope, send))
            else:
                await self._rest(scope, receive, _answering(scope, send))
        except asyncio.CancelledError:
            pass  # by its connection's loss, or because llmctl stops: a normal return

    async def _options(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What a path takes. No ``Access-Control-`` header: a page of another origin may not."""
        allowed: set[str] = set()
        for route in self._rest.routes:
            assert isinstance(route, Route)
            if route.path_regex.fullmatch(scope["path"]) is not None and route.methods:
                allowed |= route.methods
        if not allowed:
            await self._rest(scope, receive, send)
            return
        allow = ", ".join(sorted({*allowed, "OPTIONS"}))
        await Response(status_code=204, headers={"allow": allow})(scope, receive, send)


def _answering(scope: Scope, send: Send) -> Send:
    """The same, with the ``X-Request-Id`` that the request came with; one that has a record gets its from the proxy."""
    named = gate.request_id(scope["headers"])
    if named is None:
        return send

    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (reply.REQUEST_ID, named.encode())]
        await send(message)

    return answer
