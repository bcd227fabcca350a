"""TTL: when a checkpoint's life ends by itself. Garbage collection removes it then, also if it is the newest.

An end of life is about one attempt: what overwrites the checkpoint does not inherit it. Pins and leases hold it up.
"""

from __future__ import annotations

from collections.abc import Iterable

from lilo_volume.checkpoint import Checkpoint
from lilo_volume.clock import unix_ms
from lilo_volume.manifest import name_folder
from lilo_volume.marks import NEVER, Mark, marks_in, new_mark, put_marks, remove_marks
from lilo_volume.steps import Steps
from lilo_volume.volume import Volume


def set_expiry(volume: Volume, checkpoint: Checkpoint, expires_unix_ms: int | None) -> None:
    """Set when a checkpoint's life ends, or that it does not (None). The last setting counts.

    Raises:
        VolumeError: it could not be committed; the former one still counts.
    """
    where = checkpoint.publication
    home = name_folder(where.collection, where.kind, where.name)
    former = [mark for mark in marks_in(volume, home) if _is_about(mark, where.attempt)]
    if expires_unix_ms is None and not former:
        return
    # Later than what it replaces, also if the clock went back: the latest of them counts.
    now = max([unix_ms(), *(mark.created_unix_ms + 1 for mark in former)])
    expires = NEVER if expires_unix_ms is None else max(1, expires_unix_ms)
    put_marks(
        volume,
        [new_mark("ttl", home, where.attempt, now_unix_ms=now, expires_unix_ms=expires)],
        "",
        Steps(),
    )
    remove_marks(volume, former)


def expiry(volume: Volume, checkpoint: Checkpoint) -> int | None:
    """When a checkpoint's life ends, in milliseconds of Unix time; None: it does not."""
    where = checkpoint.publication
    home = name_folder(where.collection, where.kind, where.name)
    return expiry_among(marks_in(volume, home), where.attempt)


def expiry_among(marks: Iterable[Mark], attempt: str) -> int | None:
    """The same, told from the marks of its name."""
    about = [mark for mark in marks if _is_about(mark, attempt)]
    if not about:
        return None
    last = max(about, key=lambda mark: (mark.created_unix_ms, mark.id))
    return None if last.expires_unix_ms == NEVER else last.expires_unix_ms


def _is_about(mark: Mark, attempt: str) -> bool:
    return mark.kind == "ttl" and mark.attempt == attempt
