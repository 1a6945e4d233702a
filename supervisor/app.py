"""The ASGI application: which path is whose. A request's own way is in ``proxy``."""

from __future__ import annotations

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


def make(proxy: Proxy, control: Control) -> ASGIApp:
    """Put the routes together."""
    routes = [
        Route("/v1/chat/completions", proxy, methods=["POST"]),
        Route("/v1/completions", proxy, methods=["POST"]),
        Route("/v1/models", control.models, methods=["GET"]),
        Route("/health", control.health, methods=["GET"]),
        Route("/llmctl/status", control.status, methods=["GET"]),
    ]
    return _Outermost(Starlette(routes=routes, exception_handlers={HTTPException: _no_route}))


class _Outermost:
    """What holds for every route: the gate for those that read no body, and that a client's leaving is no error."""

    def __init__(self, inner: ASGIApp) -> None:
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            try:
                gate.check(scope["method"], scope["headers"])
            except Error as error:
                await reply.refuse(send, error)
                return
            await self._inner(scope, receive, send)
        except BaseException:
            # Cancelled by its connection's loss: a normal return. Anything else is ours to hear about.
            if not scope[KEY].gone:
                raise


async def _no_route(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    path, status = request.url.path, exc.status_code
    message = f"there is no {path}" if status == 404 else f"{path} doesn't take {request.method}"
    error = Error(
        message, exit=Exit.USAGE, hint="/v1/chat/completions", status=status, code="not_found" if status == 404 else "method"
    )
    return JSONResponse(reply.envelope(error), status, headers=exc.headers)
