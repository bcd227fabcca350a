"""Verify: whether a checkpoint's files are what its manifest says.

Levels: `names` (every file is there), `size` (and has its length), `full` (and its digest). Names and sizes come
from the committed state; `full` reads every
byte, from there where the volume can stream it, else through this container's view. Stray files are no fault. What is
quarantined passes no level.
"""

from __future__ import annotations

import os
from typing import Literal, TypeAlias

from lilo_volume.manifest import FileEntry, Manifest
from lilo_volume.scan import Found
from lilo_volume.transfer import Tell, check_files
from lilo_volume.volume import Volume

Verify: TypeAlias = Literal["names", "size", "full"]


def find_fault(
    volume: Volume, found: Found, level: Verify, *, share: float = 1.0, tell: Tell | None = None
) -> str | None:
    """The first fault of a published attempt in words, or None.

    Args:
        volume: the medium.
        found: the attempt.
        level: what it must pass.
        share: of the files, how many `full` reads, in (0, 1]: at least one, drawn anew each time.
        tell: hears how far reading is.
    """
    if found.manifest is None:
        return found.fault or "it was never published"
    if found.quarantined:
        return "it is quarantined; release it to load it again"
    fault = _listing_fault(found, found.manifest, level)
    if fault is None and level == "full":
        files = drawn(found.manifest.files, share)
        faults = check_files(volume, found.folder, files, tell=tell)
        fault = faults[0] if faults else None
    return fault


def drawn(files: tuple[FileEntry, ...], share: float) -> tuple[FileEntry, ...]:
    """So many of the files, drawn at random and in their order; at least one."""
    assert 0 < share <= 1, share
    if share == 1:
        return files
    count = max(1, round(share * len(files)))
    chosen = sorted(range(len(files)), key=lambda _: os.urandom(8))[:count]
    return tuple(files[index] for index in sorted(chosen))


def _listing_fault(found: Found, manifest: Manifest, level: Verify) -> str | None:
    for entry in manifest.files:
        size = found.sizes.get(entry.path)
        if size is None:
            return f"{entry.path} is missing"
        if level != "names" and size != entry.size_bytes:
            return f"{entry.path} has {size} bytes, the manifest says {entry.size_bytes}"
    return None
