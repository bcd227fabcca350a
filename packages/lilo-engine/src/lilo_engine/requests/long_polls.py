"""LongPolls: the requests that wait for something to happen, and their end when the server stops or the client leaves.

A server that stops answers them at once with what there is ("not ready"): nothing may hold up its end, and a request
that is cut off by the web server instead leaves a traceback on the console. A client that leaves takes its poll along.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")
UNWATCHED_S = 1.0
"""For so long at most a poll may wait for a client that has left."""
_GOLDEN = 0.6180339887
"""Its multiples, without their whole parts, fill an interval evenly however many there are."""


class LongPolls:
    """Those of one server."""

    def __init__(self) -> None:
        """None waits."""
        self._waiting: set[anyio.CancelScope] = set()
        self._ended = False
        self._share = 0.0
        """Of the moment, from nothing to one, that the next poll does not wait unwatched."""

    @property
    def num_waiting(self) -> int:
        """Polls that wait now."""
        return len(self._waiting)

    async def answer(
        self,
        request: Request,
        look: Callable[[float], Awaitable[T]],
        wait_s: float,
        *,
        pending: Callable[[T], bool],
    ) -> T:
        """What `look(wait_s)` gives, or `look(0)` as soon as the server stops.

        Args:
            request: of the client; its body was read.
            look: gives the state, waiting for the given seconds at most if it is not final; may be cancelled.
            wait_s: how long it may wait while the server runs.
            pending: whether a state is not final.

        Raises:
            ClientDisconnect: nobody waits for the answer any more.
        """
        # Most answers are there in a moment, and watching a client costs as much as the rest of a poll.
        moment_s = min(wait_s, self._moment_s())
        if not self._ended:
            with anyio.CancelScope() as scope, self._noted(scope):
                found = await look(moment_s)
                if wait_s <= moment_s or not pending(found):
                    return found
        if not self._ended:
            told = await self._watched(request, look, wait_s - moment_s)
            if told:
                return told[0]
        return await look(0.0)

    async def _watched(
        self, request: Request, look: Callable[[float], Awaitable[T]], wait_s: float
    ) -> tuple[T] | None:
        """What `look` gives; None if the server stops."""
        told: tuple[T] | None = None
        failed: Exception | None = None
        left = False

        async def leave() -> None:
            nonlocal left
            while (await request.receive())["type"] != "http.disconnect":
                pass
            left = True
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leave)
            try:
                with self._noted(tasks.cancel_scope):
                    told = (await look(wait_s),)
            except Exception as error:
                # Raised below as it is, not in a group.
                failed = error
            tasks.cancel_scope.cancel()
        if failed is not None:
            raise failed
        if left and told is None:
            raise ClientDisconnect
        return told

    def _moment_s(self) -> float:
        # Thousands that came together must not all begin to be watched together: that would hold up everybody else.
        moment_s = UNWATCHED_S * (1.0 - self._share / 2)
        self._share = (self._share + _GOLDEN) % 1.0
        return moment_s

    @contextmanager
    def _noted(self, scope: anyio.CancelScope) -> Generator[None]:
        self._waiting.add(scope)
        try:
            yield
        finally:
            self._waiting.discard(scope)

    def end(self) -> None:
        """Have those that wait answered now, and later ones at once."""
        self._ended = True
        for scope in self._waiting:
            scope.cancel()
