"""What commands print: tables and progress for people, one JSON object for scripts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from lilo_volume.catalogue import Leftover
from lilo_volume.checkpoint import Checkpoint
from lilo_volume.transfer import Progress

GOOD, WRONG, USAGE = 0, 1, 2
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_REDRAW_S = 0.1
_BAR_WIDTH = 30


def say(line: str) -> None:
    """A line on stdout."""
    sys.stdout.write(f"{printable(line)}\n")


def complain(line: str) -> None:
    """A line on stderr."""
    sys.stderr.write(f"lilo-volume: {printable(line)}\n")


def printable(text: str) -> str:
    """As a terminal may have it: names on a volume are anybody's, and may hold what moves a cursor or is no text at all."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def say_json(parts: Mapping[str, object]) -> None:
    """One JSON object on a line of its own."""
    say(json.dumps(parts, sort_keys=True))


def say_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows under their heads, aligned; sizes and numbers to the right. No rows: nothing."""
    if not rows:
        return
    right = {"SIZE", "ORDER", "FILES"}
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if head[i] in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        say("  ".join(cells).rstrip())


def size_text(num_bytes: float) -> str:
    """A size for people, as `1.5 GiB`."""
    unit = 0
    while num_bytes >= 1024 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.0f} B" if unit == 0 else f"{num_bytes:.1f} {_UNITS[unit]}"


def time_text(unix_ms: int) -> str:
    """A moment, in UTC."""
    moment = datetime.fromtimestamp(unix_ms / 1000, tz=UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%SZ")


def describe(item: Checkpoint) -> dict[str, Any]:
    """A checkpoint for scripts."""
    where = item.publication
    return {
        "collection": where.collection,
        "kind": where.kind,
        "name": where.name,
        "order": where.order,
        "attempt": where.attempt,
        "folder": str(item.folder),
        "size_bytes": item.size_bytes,
        "num_files": len(item.manifest.files),
        "world_size": item.manifest.world_size,
        "layout": dict(item.manifest.layout),
        "lineage": dict(item.manifest.lineage),
        "created_unix_ms": item.manifest.created_unix_ms,
        "metadata": dict(item.manifest.metadata),
        "algorithms": sorted({entry.algorithm for entry in item.manifest.files}),
        "digest": item.manifest.digest,
    }


def describe_leftover(left: Leftover) -> dict[str, Any]:
    """A leftover for scripts."""
    return {
        "label": left.label,
        "folder": left.folder,
        "state": left.state,
        "size_bytes": left.size_bytes,
        "why": left.why,
    }


class Bar:
    """Progress on stderr while it is a terminal, else nothing; a context manager that clears its line."""

    def __init__(self, what: str, *, shown: bool = True) -> None:
        """Begin; `shown=False` for scripts."""
        self._what = what
        self._shown = shown and sys.stderr.isatty()
        self._started = time.monotonic()
        self._drawn = 0.0

    def tell(self, progress: Progress) -> None:
        """Draw, unless it was drawn just now."""
        now = time.monotonic()
        done = progress.done_bytes == progress.total_bytes
        if self._shown and (done or now - self._drawn > _REDRAW_S):
            self._drawn = now
            sys.stderr.write(f"\r{bar_text(self._what, progress, now - self._started)}\x1b[K")
            sys.stderr.flush()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def bar_text(what: str, progress: Progress, elapsed_s: float) -> str:
    """The line that is drawn; pure."""
    share = progress.done_bytes / progress.total_bytes if progress.total_bytes else 1.0
    filled = int(share * _BAR_WIDTH)
    rate = progress.done_bytes / elapsed_s if elapsed_s > 0 else 0.0
    return (
        f"{what} [{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {share:4.0%}  "
        f"{size_text(progress.done_bytes)} of {size_text(progress.total_bytes)}, "
        f"{progress.done_files} of {progress.total_files} files, {size_text(rate)}/s"
    )
