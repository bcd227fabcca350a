"""Quarantine: a checkpoint that somebody found to be bad is kept, and never loaded, until it is released.

It is about what is published under the name now: what overwrites it is not quarantined. Readers skip it, or refuse it
when it is asked for by name; no policy and no end of life removes it. Removing by name is not held up.
"""

from __future__ import annotations

from lilo_volume.clock import unix_ms
from lilo_volume.errors import CheckpointMissing
from lilo_volume.manifest import name_folder
from lilo_volume.marks import marks_in, new_mark, put_marks, remove_marks
from lilo_volume.scan import newest, settled_scan
from lilo_volume.steps import Steps
from lilo_volume.volume import Volume


def quarantine(volume: Volume, collection: str, kind: str, name: str, *, note: str = "") -> bool:
    """Keep a published checkpoint from being loaded; `note` says why, for people. Whether that changed anything.

    Raises:
        CheckpointMissing: there is none of this name.
        VolumeError: it could not be committed.
    """
    home = name_folder(collection, kind, name)
    found = newest(settled_scan(volume, home))
    if found is None or found.manifest is None:
        raise CheckpointMissing(
            f"no checkpoint {name!r} of kind {kind!r} in {collection!r} to quarantine"
        )
    if found.quarantined:
        return False
    attempt = found.manifest.publication.attempt
    mark = new_mark("quarantine", home, attempt, now_unix_ms=unix_ms())
    put_marks(volume, [mark], note, Steps())
    return True


def release(volume: Volume, collection: str, kind: str, name: str) -> bool:
    """Let the checkpoint of a name be loaded again; whether it was quarantined."""
    home = name_folder(collection, kind, name)
    marks = [mark for mark in marks_in(volume, home) if mark.kind == "quarantine"]
    remove_marks(volume, marks)
    return bool(marks)
