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
from supervisor.proxy import KIND_OF, Proxy


def make(proxy: Proxy, control: Control) -> ASGIApp:
    """Put the routes together."""
    routes = [
        *(Route(path, proxy, methods=["POST"]) for path in KIND_OF),
        Route("/v1/models", control.models, methods=["GET"]),
        Route("/health", control.health, methods=["GET"]),
        Route("/llmctl/status", control.status, methods=["GET"]),
    ]
    return _Outermost(proxy, Starlette(routes=routes, exception_handlers={HTTPException: _no_route}))


class _Outermost:
    """What holds for every route: the gate, and that a client's leaving is no error.

    A generating request doesn't go through Starlette's layers, which cost it as much again as all of ours.
    """

    def __init__(self, proxy: Proxy, rest: ASGIApp) -> None:
        self._proxy = proxy
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            try:
                gate.check(scope["method"], scope["headers"])
            except Error as error:
                await reply.refuse(scope[KEY], send, error)
                return
            generating = scope["method"] == "POST" and scope["path"] in KIND_OF
            await (self._proxy if generating else self._rest)(scope, receive, send)
        except asyncio.CancelledError:
            pass  # by its connection's loss, or because llmctl stops: a normal return


async def _no_route(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    path, status = request.url.path, exc.status_code
    message = f"there is no {path}" if status == 404 else f"{path} doesn't take {request.method}"
    error = Error(
        message, exit=Exit.USAGE, hint="/v1/chat/completions", status=status, code="not_found" if status == 404 else "method"
    )
    return JSONResponse(reply.envelope(error), status, headers=exc.headers)
