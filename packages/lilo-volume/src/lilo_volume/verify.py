"""Verify: whether a checkpoint's files are what its manifest says.

Levels: `names` (every file is there), `size` (and has its length), `full` (and its digest). Names and sizes come
from the committed state; `full` reads every
byte, from there where the volume can stream it, else through this container's view. Stray files are no fault.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from lilo_volume.manifest import Manifest
from lilo_volume.scan import Found
from lilo_volume.transfer import Tell, check_files
from lilo_volume.volume import Volume

Verify: TypeAlias = Literal["names", "size", "full"]


def find_fault(
    volume: Volume, found: Found, level: Verify, *, tell: Tell | None = None
) -> str | None:
    """The first fault of a published attempt in words, or None; `tell` hears how far reading is."""
    if found.manifest is None:
        return found.fault or "it was never published"
    fault = _listing_fault(found, found.manifest, level)
    if fault is None and level == "full":
        faults = check_files(volume, found.folder, found.manifest.files, tell=tell)
        fault = faults[0] if faults else None
    return fault


def _listing_fault(found: Found, manifest: Manifest, level: Verify) -> str | None:
    for entry in manifest.files:
        size = found.sizes.get(entry.path)
        if size is None:
            return f"{entry.path} is missing"
        if level != "names" and size != entry.size_bytes:
            return f"{entry.path} has {size} bytes, the manifest says {entry.size_bytes}"
    return None
