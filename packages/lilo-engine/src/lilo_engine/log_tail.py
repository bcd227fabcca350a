"""The last words of a child process in its log, for the error that tells why it ended."""

from __future__ import annotations

import os
import re
from pathlib import Path

LINES = 12
"""The end of a Python traceback fits."""
COMPLAINT_LINES = 3
_BYTES = 16384
_FAULT = "Fatal Python error"
"""How `faulthandler` begins."""
_HEAD = re.compile(r"^[\d-]{10} [\d:,]{12} [A-Z]+ [\w.]+: ")
"""How a line of `logging` begins, as `log.py` has it."""
_NEWS = re.compile(r"^[\d-]{10} [\d:,]{12} (DEBUG|INFO) ")


def last_words(path: Path, start: int) -> str:
    """The last lines that were written from `start` (bytes) on, as a clause that ends an error."""
    tail = "\n".join(_lines(path, start)[-LINES:])
    return f"the last lines of {path}:\n{tail}" if tail else "it said nothing"


def complaint(path: Path, start: int) -> str:
    """What a process that worked well for a while said before it ended, in one line to append; mostly nothing.

    News of its work are left out: every client of a lost trainer reads this, and looks for the cause.
    """
    lines = [line for line in _lines(path, start) if line.strip() and not _NEWS.match(line)]
    words = [_HEAD.sub("", line).strip() for line in lines[-COMPLAINT_LINES:]]
    return f"; its last words: {' | '.join(words)}" if words else ""


def _lines(path: Path, start: int) -> list[str]:
    """The end of what was written; nothing if there is no log.

    The stacks after a crash below Python are left in the log: what came before them tells more.
    """
    try:
        with path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(start, log.tell() - _BYTES))
            lines = log.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    faults = [number for number, line in enumerate(lines) if line.startswith(_FAULT)]
    return lines[: faults[0] + 1] if faults else lines
