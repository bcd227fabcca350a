"""The one table from an error to an HTTP status and body; nothing else turns errors into HTTP.

Every body is `{"detail": text, "kind": ...}` with a Content-Length: the SDK takes a 400 without one for a
proxy's fault and tries again. 408 is sent again at once, with the same number. 409 is never answered, because the SDK repeats it for five minutes, and 5xx is
answered only where trying again can help or where the fault is ours.
"""

from __future__ import annotations

import logging
import math
import secrets

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lilo_engine.errors import (
    BackendLost,
    CommandFailed,
    Gone,
    InvalidRequest,
    LiloError,
    NotFound,
    RateLimited,
    Saturated,
    ServerError,
    TooLarge,
    TooSlow,
    Unauthorized,
    Unavailable,
    UnsupportedMedia,
    UserError,
)
from lilo_engine.requests.json_response import json_response

_log = logging.getLogger(__name__)

STATUS: dict[type[LiloError], int] = {
    InvalidRequest: 400,
    Unauthorized: 401,
    NotFound: 404,
    Gone: 410,
    TooLarge: 413,
    UnsupportedMedia: 415,
    UserError: 400,
    TooSlow: 408,
    Saturated: 429,
    Unavailable: 503,
    CommandFailed: 500,
    BackendLost: 500,
    ServerError: 500,
}
"""Looked up along the class's ancestors, so that a new kind of error falls into its group."""


def status_of(error: LiloError) -> int:
    """The HTTP status of an error."""
    return next((STATUS[c] for c in type(error).__mro__ if c in STATUS), 500)


def error_response(error: LiloError) -> Response:
    """Status and body of an error."""
    response = detail_response(status_of(error), error.message, error.kind)
    if isinstance(error, TooSlow):
        # The rest of the body is of no use to anyone.
        response.headers["connection"] = "close"
    if isinstance(error, RateLimited):
        # The SDK waits for as long as the second one says; other clients know the first.
        response.headers["retry-after"] = str(math.ceil(error.retry_after_s))
        response.headers["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
    return response


def detail_response(status: int, detail: str, kind: str) -> Response:
    """A body that the SDK shows to its user."""
    return json_response({"detail": detail or "no further detail", "kind": kind}, status)


def install(app: FastAPI) -> None:
    """Route every error of the app through this file, the framework's own included."""
    app.add_exception_handler(LiloError, _lilo)
    app.add_exception_handler(HTTPException, _framework)
    app.add_exception_handler(RequestValidationError, _validation)
    # Added before the layers that answer by themselves, so that it is the innermost.
    app.add_middleware(UnexpectedLayer)


class UnexpectedLayer:
    """Turns a fault of ours into a 500 with a number, and logs its cause once.

    A handler for `Exception` would be called by the framework's outermost layer, which raises the fault again after
    it: the server would log it a second time and cut the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through; answer for it if it fails before it has answered."""
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except ClientDisconnect:
            # Its body never came to an end, so nothing was begun; and nobody is there to hear an answer.
            _log.debug("%s %s: the client went away", scope["method"], scope["path"])
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            await _unexpected(scope, error)(scope, receive, send)


async def _lilo(request: Request, error: Exception) -> Response:
    assert isinstance(error, LiloError)
    return answer_for(request, error)


def answer_for(request: Request, error: LiloError) -> Response:
    """The answer to a request that an error of ours ended; what is not the client's fault is logged."""
    if isinstance(error, ServerError):
        _log.warning("%s %s: %s: %s", request.method, request.url.path, error.kind, error)
    return error_response(error)


async def _framework(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code in (404, 405):
        detail = f"this server does not offer {request.method} {request.url.path}"
    response = detail_response(error.status_code, detail, "http")
    response.headers.update(error.headers or {})
    return response


async def _validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = "; ".join(
        f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()
    )
    return detail_response(422, f"{request.method} {request.url.path}: {found}", "invalid_request")


def _unexpected(scope: Scope, error: Exception) -> Response:
    number = secrets.token_hex(4)
    _log.error("%s %s failed, error %s", scope["method"], scope["path"], number, exc_info=error)
    detail = f"internal error {number}; the server's log has its cause"
    return detail_response(500, detail, "internal")
