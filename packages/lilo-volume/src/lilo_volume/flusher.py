"""Flusher: waits for files to be on the medium while the next ones are written; what failed is told at the end.

A rank that waits after every file keeps the disk idle while it writes and the processor idle while it waits. Used by
`Attempt`; nothing is reported as written before `wait` has returned.
"""

from __future__ import annotations

import os
import threading
from io import FileIO

MAX_WAITING = 2
"""Files being flushed at once; a writer that is faster than the medium then waits at its next close."""


class Flusher:
    """Flushes and closes files in the background, a few at once. Any number of threads may hand files over."""

    def __init__(self) -> None:
        """Start with nothing to do; no thread runs until a file comes."""
        self._room = threading.Semaphore(MAX_WAITING)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._failures: list[str] = []

    def take(self, file: FileIO, path: str) -> None:
        """Flush and close `file`, whose bytes the system has; `path` names it. Waits while there is no room."""
        self._room.acquire()
        # Not a daemon: what was written should reach the medium also when the interpreter ends.
        thread = threading.Thread(target=self._flush, args=(file, path))
        with self._lock:
            self._threads = [other for other in self._threads if other.is_alive()]
            self._threads.append(thread)
            thread.start()

    def wait(self) -> str | None:
        """Wait for all files; what went wrong with the first that failed, in words, or None."""
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join()
        return self._failures[0] if self._failures else None

    def _flush(self, file: FileIO, path: str) -> None:
        try:
            with file:
                os.fsync(file.fileno())
        except OSError as error:
            self._failures.append(f"flushing {path}: {error}")
        finally:
            self._room.release()
