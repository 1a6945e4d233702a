"""The ASGI application: which path is whose. A request's own way is in ``proxy``."""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from supervisor import gate, reply
from supervisor.connection import KEY
from supervisor.control import Control
from supervisor.errors import Error, Exit
from supervisor.proxy import Proxy
from supervisor.routes import ROUTES


def make(proxy: Proxy, control: Control) -> ASGIApp:
    """Put the routes together."""
    own = {
        "/v1/models": ("GET", control.models),
        "/v1/models/{model:path}": ("GET", control.model),
        "/health": ("GET", control.health),
        "/llmctl/status": ("GET", control.status),
        "/llmctl/events": ("GET", control.events),
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
    return _Outermost(proxy, Starlette(routes=routes, exception_handlers={HTTPException: _no_route, Error: _refused}))


class _Outermost:
    """What holds for every route: the gate, ``OPTIONS``, and that a client's leaving is no error.

    A request for a child doesn't go through Starlette's layers, which cost it as much again as all of ours.
    """

    def __init__(self, proxy: Proxy, rest: Starlette) -> None:
        self._proxy = proxy
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            try:
                gate.check(scope["method"], scope["headers"])
            except Error as error:
                await reply.refuse(scope[KEY], send, error, scope["path"])
                return
            if scope["method"] == "OPTIONS":
                await self._options(scope, receive, send)
                return
            for_a_child = scope["method"] == "POST" and scope["path"] in ROUTES
            await (self._proxy if for_a_child else self._rest)(scope, receive, send)
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


async def _no_route(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    path, status = request.url.path, exc.status_code
    message = f"there is no {path}" if status == 404 else f"{path} doesn't take {request.method}"
    error = Error(
        message, exit=Exit.USAGE, hint="/v1/chat/completions", status=status, code="not_found" if status == 404 else "method"
    )
    return JSONResponse(reply.envelope(error, path), status, headers=exc.headers)


async def _refused(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, Error)
    return JSONResponse(reply.envelope(exc, request.url.path), exc.status)
