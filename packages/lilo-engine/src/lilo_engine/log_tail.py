"""The last words of a child process in its log, for the error that tells why it ended."""

from __future__ import annotations

import os
from pathlib import Path

LINES = 12
"""The end of a Python traceback fits."""
_BYTES = 16384
_FAULT = "Fatal Python error"
"""How `faulthandler` begins."""


def log_tail(path: Path, start: int, num_lines: int | None = None) -> str:
    """The last lines (`LINES` of them) that were written from `start` (bytes) on; empty if there are none, or no log."""
    try:
        with path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(start, log.tell() - _BYTES))
            lines = log.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return "\n".join(_without_stack(lines)[-(num_lines or LINES) :])


def _without_stack(lines: list[str]) -> list[str]:
    """Lines up to the fault of a crash below Python: the stacks after it are for the log, what came before tells more."""
    faults = [number for number, line in enumerate(lines) if line.startswith(_FAULT)]
    return lines[: faults[0] + 1] if faults else lines


def last_words(path: Path, start: int, num_lines: int | None = None) -> str:
    """The same as a clause that ends an error."""
    tail = log_tail(path, start, num_lines)
    return f"the last lines of {path}:\n{tail}" if tail else "it said nothing"
