"""Marks: small files beside the attempts of a name that say how long they stay, as pins and leases do.

A mark's file name says all there is to decide by, so that one listing tells every mark; its content is for people.
Marks are never changed, only made and removed, and each has a name of its own, so that no two makers can undo each
other's. They lie in the name's folder, where no attempt can have such a name: COLLECTION/KIND/NAME/.KIND-....

Used by `pins.py`, `quarantines.py`, `leases.py`, `ttl.py` and `gc.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from lilo_volume.config import node_id
from lilo_volume.errors import FileMissing, InvalidPath, VolumeBusy, VolumeError, VolumeUnavailable
from lilo_volume.files import flush_folder
from lilo_volume.naming import decode, encode
from lilo_volume.steps import Steps
from lilo_volume.volume import Entry, Volume

MarkKind: TypeAlias = Literal["pin", "lease", "ttl", "doom", "quarantine"]
NEVER = 0
"""As `expires_unix_ms`: it does not end by itself."""
_NAME = re.compile(
    r"\.(?P<kind>pin|lease|ttl|doom|quarantine)-(?P<attempt>.+)-(?P<created>\d{1,15})-(?P<expires>\d{1,15})"
    r"-(?P<id>[0-9a-f]{16})"
)
_DEPTH = 3
"""Collection, kind, name: the folder of a mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One mark."""

    kind: MarkKind
    home: str
    """Folder of the name, relative to the root."""
    attempt: str
    """Whom it is about; "" for whatever is published under the name."""
    created_unix_ms: int
    expires_unix_ms: int
    """When it ends; `NEVER` if it does not. Of a `ttl`: when the checkpoint ends."""
    id: str

    @property
    def path(self) -> str:
        """Of its file, relative to the root."""
        return (
            f"{self.home}/.{self.kind}-{encode(self.attempt)}-{self.created_unix_ms}-{self.expires_unix_ms}"
            f"-{self.id}"
        )

    def runs(self, now_unix_ms: int) -> bool:
        """Whether it has not ended."""
        return self.expires_unix_ms == NEVER or self.expires_unix_ms > now_unix_ms


def new_mark(
    kind: MarkKind, home: str, attempt: str, *, now_unix_ms: int, expires_unix_ms: int = NEVER
) -> Mark:
    """A mark that is on no volume yet."""
    return Mark(
        kind=kind,
        home=home,
        attempt=attempt,
        created_unix_ms=now_unix_ms,
        expires_unix_ms=expires_unix_ms,
        id=os.urandom(8).hex(),
    )


def marks_of(entries: Iterable[Entry]) -> list[Mark]:
    """The marks among listed files, sorted by path."""
    found = [mark for entry in entries if (mark := _mark_at(entry.path)) is not None]
    return sorted(found, key=lambda mark: mark.path)


def marks_in(volume: Volume, home: str) -> list[Mark]:
    """The marks of one name, from the committed state."""
    return [mark for mark in marks_of(volume.list_committed(home)) if mark.home == home]


def put_marks(volume: Volume, marks: Sequence[Mark], note: str, steps: Steps) -> None:
    """Make marks, in one commit; on an error none of them is left in this view.

    Raises:
        VolumeError: they could not be committed.
    """
    try:
        for mark in marks:
            _write(volume, mark, note)
        try:
            steps.retried("commit marks", volume.commit)
        except (VolumeBusy, VolumeUnavailable):
            # It may have been applied all the same.
            if not _committed(volume, marks):
                raise
    except BaseException:
        for mark in marks:
            with contextlib.suppress(OSError, InvalidPath):
                volume.local_path(mark.path).unlink()
        raise


def remove_marks(volume: Volume, marks: Iterable[Mark]) -> None:
    """Remove marks from the committed state; already gone: nothing."""
    for mark in marks:
        with contextlib.suppress(FileMissing):
            volume.remove_committed(mark.path)


def _mark_at(path: str) -> Mark | None:
    home, _, name = path.rpartition("/")
    match = _NAME.fullmatch(name)
    if match is None or home.count("/") != _DEPTH - 1:
        return None
    try:
        attempt = decode(match["attempt"])
    except InvalidPath:
        return None
    if attempt is None:
        return None
    return Mark(
        kind=cast("MarkKind", match["kind"]),
        home=home,
        attempt=attempt,
        created_unix_ms=int(match["created"]),
        expires_unix_ms=int(match["expires"]),
        id=match["id"],
    )


def _write(volume: Volume, mark: Mark, note: str) -> None:
    place = volume.local_path(mark.path)
    place.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": 1, "kind": mark.kind, "node": node_id(), "note": note}
    with place.open("xb") as file:
        file.write(json.dumps(content, sort_keys=True).encode("ascii"))
        file.flush()
        os.fsync(file.fileno())
    flush_folder(place.parent)


def _committed(volume: Volume, marks: Sequence[Mark]) -> bool:
    try:
        return all(
            any(entry.path == mark.path for entry in volume.list_committed(mark.home))
            for mark in marks
        )
    except VolumeError:
        return False
