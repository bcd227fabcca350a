"""plain_post: routes without the framework's machinery, for the calls that a client makes all the time.

A handler reads its own body and takes nothing but the request. `PlainRoutes`, the innermost layer, finds it by one look
into a table; routers, declared parameters, dependencies and exit stacks, which the framework goes through for every
call, would be 0.1 ms for nothing. Errors become the same answers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lilo_engine.errors import LiloError
from lilo_engine.requests.error_response import answer_for

Handler = Callable[[Request], Awaitable[Response]]


def plain_post(router: APIRouter, path: str) -> Callable[[Handler], Handler]:
    """Have `path` of the router answered by the decorated handler, for POST."""

    def add(handler: Handler) -> Handler:
        router.add_route(path, handler, methods=["POST"])
        return handler

    return add


class PlainRoutes:
    """Answers the plain routes; everything else goes on to the framework."""

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter], prefix: str) -> None:
        self._app = app
        self._handlers: dict[str, Handler] = {
            prefix + route.path: route.endpoint
            for router in routers
            for route in router.routes
            # The framework's own kind of route is a subclass.
            if type(route) is Route
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, or pass it on."""
        handler = None
        if scope["type"] == "http" and scope["method"] == "POST":
            handler = self._handlers.get(scope["path"])
        if handler is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await handler(request)
        except LiloError as error:
            response = answer_for(request, error)
        await response(scope, receive, send)
