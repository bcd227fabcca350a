"""LongPolls: the requests that wait for something to happen, and their end when the server stops.

A server that stops answers them at once with what there is ("not ready"): nothing may hold up its end, and a request
that is cut off by the web server instead leaves a traceback on the console.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

T = TypeVar("T")


class LongPolls:
    """Those of one server."""

    def __init__(self) -> None:
        """None waits."""
        self._waiting: set[anyio.CancelScope] = set()
        self._ended = False

    async def answer(self, look: Callable[[float], Awaitable[T]], wait_s: float) -> T:
        """What `look(wait_s)` gives, or `look(0)` as soon as the server stops.

        Args:
            look: gives the state, waiting for the given seconds at most if it is not final; may be cancelled.
            wait_s: how long it may wait while the server runs.
        """
        if not self._ended:
            with anyio.CancelScope() as scope:
                self._waiting.add(scope)
                try:
                    return await look(wait_s)
                finally:
                    self._waiting.discard(scope)
        return await look(0.0)

    def end(self) -> None:
        """Have those that wait answered now, and later ones at once."""
        self._ended = True
        for scope in self._waiting:
            scope.cancel()
