"""The last words of a child process in its log, for the error that tells why it ended."""

from __future__ import annotations

import os
from pathlib import Path

LINES = 12
"""The end of a Python traceback fits."""
_BYTES = 16384


def log_tail(path: Path, start: int) -> str:
    """The last lines that were written from `start` (bytes) on; empty if there are none, or no log."""
    try:
        with path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(start, log.tell() - _BYTES))
            lines = log.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-LINES:])


def last_words(path: Path, start: int) -> str:
    """The same as a clause that ends an error."""
    tail = log_tail(path, start)
    return f"the last lines of {path}:\n{tail}" if tail else "it said nothing"
