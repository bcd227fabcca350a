"""ViewGuard: this node's view of the volume is not brought up to date while something is being written into it.

A reload empties a view while it runs, and may take away what was written and is not committed yet; so it and
publications hold each other off. Loading is rare and takes seconds, hence whoever loads has the view alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from lilo_engine.errors import CommandFailed


class ViewGuard:
    """Any number that write, or one that loads; one per rank, since the first rank of a node is who reloads."""

    def __init__(self, limit_s: float) -> None:
        """Wait for each other for at most `limit_s`."""
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._writing = 0
        self._loading = False

    @contextmanager
    def writing(self) -> Generator[None]:
        """While something is published.

        Raises:
            CommandFailed: a load did not end within the limit.
        """
        with self._changed:
            self._wait(lambda: not self._loading, "a checkpoint is being loaded")
            self._writing += 1
        try:
            yield
        finally:
            with self._changed:
                self._writing -= 1
                self._changed.notify_all()

    @contextmanager
    def loading(self) -> Generator[None]:
        """While a view is brought up to date and read.

        Raises:
            CommandFailed: what is being published did not end within the limit.
        """
        with self._changed:
            self._wait(lambda: not self._loading, "another checkpoint is being loaded")
            # From here on nobody begins to write, or a load would never have its turn.
            self._loading = True
            try:
                self._wait(
                    lambda: self._writing == 0, f"{self._writing} publications are under way"
                )
            except CommandFailed:
                self._loading = False
                self._changed.notify_all()
                raise
        try:
            yield
        finally:
            with self._changed:
                self._loading = False
                self._changed.notify_all()

    def _wait(self, until: Callable[[], bool], why: str) -> None:
        if not self._changed.wait_for(until, self._limit_s):
            raise CommandFailed(
                f"the view of the checkpoint volume was not free within {self._limit_s:g} s: {why}; try again"
            )
