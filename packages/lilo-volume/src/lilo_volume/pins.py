"""Pins: a checkpoint that is pinned is removed by no policy and no end of life, until it is unpinned.

A pin is about a name: what overwrites a pinned checkpoint is pinned in its place. Removing by name is not held up.
"""

from __future__ import annotations

from lilo_volume.clock import unix_ms
from lilo_volume.errors import CheckpointMissing
from lilo_volume.manifest import name_folder
from lilo_volume.marks import marks_in, new_mark, put_marks, remove_marks
from lilo_volume.scan import scan
from lilo_volume.steps import Steps
from lilo_volume.volume import Volume


def pin(volume: Volume, collection: str, kind: str, name: str, *, note: str = "") -> None:
    """Pin a published checkpoint; `note` says why, for people. Pinned already: nothing.

    Raises:
        CheckpointMissing: there is none of this name.
        VolumeError: the pin could not be committed.
    """
    home = name_folder(collection, kind, name)
    if not any(found.published for found in scan(volume, home)):
        raise CheckpointMissing(f"no checkpoint {name!r} of kind {kind!r} in {collection!r} to pin")
    if not is_pinned(volume, collection, kind, name):
        put_marks(volume, [new_mark("pin", home, "", now_unix_ms=unix_ms())], note, Steps())


def unpin(volume: Volume, collection: str, kind: str, name: str) -> bool:
    """Take the pins of a name away; whether there were any."""
    home = name_folder(collection, kind, name)
    pins = [mark for mark in marks_in(volume, home) if mark.kind == "pin"]
    remove_marks(volume, pins)
    return bool(pins)


def is_pinned(volume: Volume, collection: str, kind: str, name: str) -> bool:
    """Whether a name is pinned."""
    home = name_folder(collection, kind, name)
    return any(mark.kind == "pin" for mark in marks_in(volume, home))
