"""LongPolls: the requests that wait for something to happen, and their end when the server stops or the client leaves.

A server that stops answers them at once with what there is ("not ready"): nothing may hold up its end, and a request
that is cut off by the web server instead leaves a traceback on the console. A client that leaves takes its poll along.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")


class LongPolls:
    """Those of one server."""

    def __init__(self) -> None:
        """None waits."""
        self._waiting: set[anyio.CancelScope] = set()
        self._ended = False

    @property
    def num_waiting(self) -> int:
        """Polls that wait now."""
        return len(self._waiting)

    async def answer(
        self, request: Request, look: Callable[[float], Awaitable[T]], wait_s: float
    ) -> T:
        """What `look(wait_s)` gives, or `look(0)` as soon as the server stops.

        Args:
            request: of the client; its body was read.
            look: gives the state, waiting for the given seconds at most if it is not final; may be cancelled.
            wait_s: how long it may wait while the server runs.

        Raises:
            ClientDisconnect: nobody waits for the answer any more.
        """
        if self._ended or wait_s <= 0:
            return await look(0.0)
        found: list[T] = []
        failed: list[Exception] = []
        left = False

        async def leave() -> None:
            nonlocal left
            while (await request.receive())["type"] != "http.disconnect":
                pass
            left = True
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            self._waiting.add(tasks.cancel_scope)
            tasks.start_soon(leave)
            try:
                found.append(await look(wait_s))
            except Exception as error:
                # As it is, not in a group.
                failed.append(error)
            finally:
                self._waiting.discard(tasks.cancel_scope)
            tasks.cancel_scope.cancel()
        if failed:
            raise failed[0]
        if left and not found:
            raise ClientDisconnect
        return found[0] if found else await look(0.0)

    def end(self) -> None:
        """Have those that wait answered now, and later ones at once."""
        self._ended = True
        for scope in self._waiting:
            scope.cancel()
