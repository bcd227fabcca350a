"""Progress: how far one worker has come: written by the thread that works, read by any other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressView:
    """One consistent reading."""

    completed_commands: int
    last_completed: str | None
    running: str | None
    age_s: float
    """Seconds since a command last started, got on, or ended."""


class Progress:
    """Counts commands; a command that raised has completed too, since the worker is free again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._completed = 0
        self._last: str | None = None
        self._running: list[str] = []
        self._changed_at = time.monotonic()

    @contextmanager
    def of(self, command: str) -> Iterator[None]:
        """Mark `command` as running for the length of the block."""
        with self._lock:
            self._running.append(command)
            self._changed_at = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._running.remove(command)
                self._completed += 1
                self._last = command
                self._changed_at = time.monotonic()

    def moved(self) -> None:
        """The running command got on: a part of it is done. Whoever waits for it does not give it up."""
        with self._lock:
            self._changed_at = time.monotonic()

    def view(self) -> ProgressView:
        """Read all counters at once."""
        with self._lock:
            return ProgressView(
                completed_commands=self._completed,
                last_completed=self._last,
                running=self._running[0] if self._running else None,
                age_s=time.monotonic() - self._changed_at,
            )
