"""CompletionLog: which samples of a client have ended, in the order of ending, for a client that asks for all at once.

Numbers only grow, also over a restart: the first one comes from the clock. A client that saw numbers of an earlier
server is told that it is gone, because it waits for requests that are gone too.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import anyio

from lilo_engine.errors import Gone

CLONE_NUMBERS = 10**9
"""Copy n of a sampling client counts its requests from n times this."""
_CLIENTS = 4096
"""Clients whose waiting event is kept; the log itself is as long as the list of answers."""


class Whose(NamedTuple):
    """One sampling client: its session, and which copy of it."""

    session_id: str
    clone: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A look at the log."""

    request_ids: Sequence[str]
    cursor: int
    """Where the next look starts."""


class CompletionLog:
    """The ends of all clients' samples."""

    def __init__(self, start: int | None = None) -> None:
        """Empty; `start` is the number before the first one."""
        self._start = time.time_ns() // 1000 if start is None else start
        self._last = self._start
        self._ended: dict[Whose, OrderedDict[str, int]] = {}
        self._news: OrderedDict[Whose, anyio.Event] = OrderedDict()

    def add(self, request_id: str) -> None:
        """A request ended."""
        self._last += 1
        whose = whose_is(request_id)
        self._ended.setdefault(whose, OrderedDict())[request_id] = self._last
        news = self._news.pop(whose, None)
        if news is not None:
            news.set()

    def remove(self, request_id: str) -> None:
        """Its answer was forgotten; unknown ids are no error."""
        whose = whose_is(request_id)
        ended = self._ended.get(whose)
        if ended is not None and ended.pop(request_id, None) is not None and not ended:
            del self._ended[whose]

    def after(self, whose: Whose, cursor: int) -> Ended:
        """What ended after `cursor`; what is not after it has been seen, and is forgotten.

        Raises:
            Gone: the cursor is of an earlier server.
        """
        if 0 < cursor < self._start:
            raise Gone(
                "the server was started again and the samples in it are lost; make a new sampling client"
            )
        ended = self._ended.get(whose, OrderedDict[str, int]())
        while ended and next(iter(ended.values())) <= cursor:
            ended.popitem(last=False)
        if not ended:
            self._ended.pop(whose, None)
        last = next(reversed(ended.values())) if ended else max(cursor, self._start)
        return Ended(request_ids=tuple(ended), cursor=last)

    async def wait(self, whose: Whose, wait_s: float) -> None:
        """Until another of this client's samples ends, for `wait_s` at most."""
        news = self._news.setdefault(whose, anyio.Event())
        self._news.move_to_end(whose)
        while len(self._news) > _CLIENTS:
            # Its client looks again when its wait is over.
            self._news.popitem(last=False)
        with anyio.move_on_after(wait_s):
            await news.wait()


def whose_is(request_id: str) -> Whose:
    """The client of a sample request: `sample:{session}:{number}`."""
    session_id, _, number = request_id.partition(":")[2].rpartition(":")
    return Whose(session_id, int(number) // CLONE_NUMBERS)
