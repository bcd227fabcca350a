"""Waiting: clients that wait for futures, woken by events. Knows nothing of results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from lilo_engine.operations.operation import RequestId


@dataclass(slots=True)
class Waiters:
    """One event per future that somebody waits on; the cost of a future that nobody waits on is nothing."""

    _events: dict[RequestId, anyio.Event] = field(default_factory=dict[RequestId, anyio.Event])

    async def wait(self, request_id: RequestId, is_done: Callable[[], bool], wait_s: float) -> None:
        """Return when it is done, at most `wait_s` later."""
        if is_done() or wait_s <= 0:
            return
        event = self._events.setdefault(request_id, anyio.Event())
        with anyio.move_on_after(wait_s):
            await event.wait()

    def wake(self, request_id: RequestId) -> None:
        """The future is finished."""
        event = self._events.pop(request_id, None)
        if event is not None:
            event.set()
