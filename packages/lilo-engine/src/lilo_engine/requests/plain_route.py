"""plain_post: a route without the framework's argument machinery, for the calls that a client makes all the time.

The handler reads its own body and takes nothing but the request, so that declared parameters, dependencies and exit
stacks, which the framework prepares for every call, would be 0.05 ms for nothing. Errors take the same way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from starlette.responses import Response

Handler = Callable[[Request], Awaitable[Response]]


def plain_post(router: APIRouter, path: str) -> Callable[[Handler], Handler]:
    """Have `path` of the router answered by the decorated handler, for POST."""

    def add(handler: Handler) -> Handler:
        router.add_route(path, handler, methods=["POST"])
        return handler

    return add
