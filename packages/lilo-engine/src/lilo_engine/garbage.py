"""Garbage: when a server looks through everything in its memory for cycles that nobody needs any more.

Python does so whenever what lives has grown by a quarter, in the middle of anything, and every client is held up
meanwhile: for 0.1 to 0.3 s when requests of many data are in memory. Here Python looks only through what is young, which
takes a millisecond, and all of it is looked through at a moment when nothing is asked, if there is one soon enough.
`WebServer` runs it; it knows nothing of what is served.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable

import anyio

SHARE = 1e-3
"""Of the time that looks through everything may take, as long as `MOST_S` allows it."""
LEAST_S, MOST_S = 10.0, 60.0
"""Between two of them, before a quiet moment is waited for; and for that at most the larger one again."""
PATIENCE = 6
"""Times as long as between two of them a quiet moment is waited for."""
QUIET = 5
"""Looks in a row that make one: between a request and the client's first poll nothing is asked either."""
YOUNG, MIDDLE = 2000, 10
"""Objects more than there were before the youngest are looked through; times that they were before the next older are."""


class Garbage:
    """Of this process; there is one."""

    def __init__(
        self, quiet: Callable[[], bool], least_s: float = LEAST_S, most_s: float = MOST_S
    ) -> None:
        """Leave everything as it is.

        Args:
            quiet: whether nothing is asked just now; polls that wait ask nothing.
            least_s: between two looks through everything.
            most_s: the same, however long they take; also how long a quiet moment is waited for.
        """
        self._quiet = quiet
        self._least_s = least_s
        self._most_s = most_s

    async def run(self) -> None:
        """Look until cancelled; then Python does it again."""
        before = gc.get_threshold()
        wait_s = self._least_s
        try:
            # What is there now stays until the end, and is never looked through again.
            gc.collect()
            gc.freeze()
            gc.set_threshold(YOUNG, MIDDLE, sys.maxsize >> 32)
            while True:
                await anyio.sleep(wait_s)
                await self._quiet_moment(min(PATIENCE * wait_s, self._most_s))
                began = time.perf_counter()
                gc.collect()
                took_s = time.perf_counter() - began
                wait_s = min(max(self._least_s, took_s / SHARE), self._most_s)
        finally:
            gc.unfreeze()
            gc.set_threshold(*before)

    async def _quiet_moment(self, limit_s: float) -> None:
        """Return in one, or when there was none for so long."""
        ends_s = anyio.current_time() + limit_s
        quiet = 0
        while True:
            quiet = quiet + 1 if self._quiet() else 0
            if quiet == QUIET or anyio.current_time() >= ends_s:
                return
            await anyio.sleep(self._least_s / 100)
