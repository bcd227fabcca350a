"""Fetches: what the ranks have read for loads that have not come yet. The driver's book of it; bounded.

A load may never come (its model ended meanwhile). What was prepared first is then forgotten on all ranks with the
next fetch, so that no more of it waits than there are slots to load into.
"""

from __future__ import annotations

import threading
from collections import deque

from lilo_engine.operations.reference import CheckpointRef


class Fetches:
    """Prepared loads by what they load; used by threads of two lanes."""

    def __init__(self, limit: int) -> None:
        """Keep at most `limit`."""
        self._limit = limit
        self._lock = threading.Lock()
        self._ready: deque[tuple[CheckpointRef, bool, str]] = deque()

    def add(self, source: CheckpointRef, fetch_id: str, with_optimizer: bool) -> None:
        """The ranks hold it."""
        with self._lock:
            self._ready.append((source, with_optimizer, fetch_id))

    def take(self, source: CheckpointRef, with_optimizer: bool) -> str | None:
        """What was prepared for such a load, the first of several; it is the caller's now."""
        with self._lock:
            for item in self._ready:
                if item[:2] == (source, with_optimizer):
                    self._ready.remove(item)
                    return item[2]
        return None

    def surplus(self) -> tuple[str, ...]:
        """What must be forgotten before one more is added; nobody can take it any more."""
        with self._lock:
            gone: list[str] = []
            while len(self._ready) >= self._limit:
                gone.append(self._ready.popleft()[2])
            return tuple(gone)
