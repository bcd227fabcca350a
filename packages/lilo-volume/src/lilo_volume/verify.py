"""Verify: whether a checkpoint's files are what its manifest says.

Levels: `names` (every file is there), `size` (and has its length), `full` (and its digest). Names and sizes come
from the committed state; `full` reads the files through this container's view. Stray files are no fault.
"""

from __future__ import annotations

import stat
from typing import Literal, TypeAlias

from lilo_volume.digest import Hasher, new_hasher
from lilo_volume.errors import VolumeError
from lilo_volume.manifest import FileEntry, Manifest
from lilo_volume.scan import Found
from lilo_volume.volume import Volume

Verify: TypeAlias = Literal["names", "size", "full"]

_BLOCK_BYTES = 4 * 1024 * 1024
"""Bounds memory; larger blocks hash no faster."""


def find_fault(volume: Volume, found: Found, level: Verify) -> str | None:
    """The first fault of a published attempt in words, or None."""
    if found.manifest is None:
        return found.fault or "it was never published"
    fault = _listing_fault(found, found.manifest, level)
    if fault is None and level == "full":
        fault = _content_fault(volume, found.folder, found.manifest)
    return fault


def _listing_fault(found: Found, manifest: Manifest, level: Verify) -> str | None:
    for entry in manifest.files:
        size = found.sizes.get(entry.path)
        if size is None:
            return f"{entry.path} is missing"
        if level != "names" and size != entry.size_bytes:
            return f"{entry.path} has {size} bytes, the manifest says {entry.size_bytes}"
    return None


def _content_fault(volume: Volume, folder: str, manifest: Manifest) -> str | None:
    for entry in manifest.files:
        hasher = new_hasher(entry.algorithm)
        if hasher is None:
            # Not being able to look is no pass.
            return f"{entry.path} is unverifiable: this process cannot compute {entry.algorithm!r}"
        try:
            fault = _file_fault(volume, f"{folder}/{entry.path}", entry, hasher)
        except (OSError, VolumeError) as error:
            fault = f"{entry.path} cannot be read: {error}"
        if fault is not None:
            return fault
    return None


def _file_fault(volume: Volume, path: str, entry: FileEntry, hasher: Hasher) -> str | None:
    place = volume.local_path(path)
    if not stat.S_ISREG(place.lstat().st_mode):
        return f"{entry.path} is no regular file"
    size = 0
    with place.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            hasher.update(block)
            size += len(block)
    if size != entry.size_bytes:
        return f"{entry.path} has {size} bytes, the manifest says {entry.size_bytes}"
    if (digest := hasher.hexdigest()) != entry.digest:
        return f"{entry.path} has {entry.algorithm} {digest}, the manifest says {entry.digest}"
    return None
