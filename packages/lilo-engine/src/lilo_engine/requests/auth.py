"""API keys at the door: every request under /api/v1 but the health check needs one in `X-API-Key`.

A bare ASGI layer, because it runs on every request. Which keys there are is known by whatever implements
`KeyCheck` (`control/keys.py`); here only the header is read. Who the caller is goes along with the request, for
`front.view_of`.
"""

from __future__ import annotations

import time
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from lilo_engine.control.access import Caller, KeyLimits
from lilo_engine.control.links import LINK_PREFIX
from lilo_engine.errors import Saturated, Unauthorized
from lilo_engine.requests.error_response import error_response
from lilo_engine.requests.quotas import Quotas

_NO_LIMITS = KeyLimits()
OPEN_PATHS = frozenset({"/api/v1/healthz", "/api/v1/openapi.json"})
"""Can be looked at without a key: what a load balancer or a waiting script asks, and the description of the API."""


class KeyCheck(Protocol):
    """Knows the keys."""

    async def caller(self, key: str) -> Caller | None:
        """Whose request it is; None if the key is unknown or revoked. Takes the same time for any wrong key."""
        ...


class ApiKeyLayer:
    """Answers 401 to a request without a known key, and 429 to one over its key's limits, before its body is read."""

    def __init__(self, app: ASGIApp, keys: KeyCheck) -> None:
        self._app = app
        self._keys = keys
        self._quotas = Quotas()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer it."""
        if scope["type"] == "http" and not _is_open(scope["method"], scope["path"]):
            key = Headers(scope=scope).get("x-api-key", "")
            caller = await self._keys.caller(key)
            if caller is None:
                given = "this server does not know the key" if key else "there is none"
                refusal = Unauthorized(
                    f"a request needs a known API key in X-API-Key, {given}; "
                    "`lilo keys create` makes one, TINKER_API_KEY hands it to the SDK"
                )
                await error_response(refusal)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
            await self._within_quotas(caller, scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _within_quotas(
        self, caller: Caller, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Let a request of a key with limits through, or have it come again later."""
        if caller.limits == _NO_LIMITS:
            await self._app(scope, receive, send)
            return
        stated = Headers(scope=scope).get("content-length", "")
        size_bytes = int(stated) if stated.isdecimal() else None
        if scope["method"] in ("GET", "HEAD"):
            size_bytes = size_bytes or 0
        try:
            self._quotas.check_rate(caller, scope["path"], time.monotonic())
            with self._quotas.reading(caller, size_bytes):
                await self._app(scope, receive, send)
        except Saturated as error:
            await error_response(error)(scope, receive, send)


def _is_open(method: str, path: str) -> bool:
    """Below `LINK_PREFIX` a signature in the address stands for the key; its routes check it."""
    if method not in ("GET", "HEAD"):
        return False
    return path in OPEN_PATHS or path.startswith(LINK_PREFIX)
