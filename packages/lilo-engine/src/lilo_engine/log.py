"""Log: how every process of ours writes what it does to its standard error. One record begins one line.

What clients call things, and why they say a session ends, stands in it: none of their texts can look like a record of
its own, or move the cursor of whoever reads.
"""

from __future__ import annotations

import logging
import sys

_FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_BELOW = "\n    "
"""Before what else a record says, as the last words of a trainer."""


class RecordFormatter(logging.Formatter):
    """A line for each record, and what follows it further in."""

    def __init__(self) -> None:
        """Form of all processes."""
        super().__init__(_FORM)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Without a traceback, which is ours and follows as it is."""
        record.message = _BELOW.join(map(_printable, record.message.split("\n")))
        return super().formatMessage(record)


def begin_log(level: int | str) -> None:
    """Write records from this level on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RecordFormatter())
    logging.basicConfig(level=level, handlers=[handler])


def _printable(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in line
    )
