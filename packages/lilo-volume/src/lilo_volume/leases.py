"""Leases: a reader's word that it reads a checkpoint, which garbage collection respects until it ends.

    reader                                garbage collection
    1. put the lease, commit              1. put the doom, commit
    2. is there a doom, or no manifest?   2. is there a lease?
       then give the lease up                then withdraw the doom
    3. read                               3. remove

Whoever is second in its first step is seen in the other's second, so never do both go on to their third. A reader
that cannot write to the volume has the age guard of garbage collection instead.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from lilo_volume.checkpoint import Checkpoint
from lilo_volume.clock import unix_ms
from lilo_volume.errors import CheckpointMissing, VolumeError
from lilo_volume.log import warn
from lilo_volume.manifest import MANIFEST_NAME, attempt_folder, name_folder
from lilo_volume.marks import Mark, marks_in, marks_of, new_mark, put_marks, remove_marks
from lilo_volume.naming import encode
from lilo_volume.steps import OnStep, Steps
from lilo_volume.volume import Volume

DEFAULT_LEASE_S = 3600.0
"""Long enough to load any checkpoint; a reader that dies holds its checkpoint for this long at most."""


class Lease:
    """A lease that is held; as a context manager it is released at the end."""

    def __init__(self, volume: Volume, checkpoint: Checkpoint, mark: Mark, note: str) -> None:
        """Made by `lease`."""
        self._volume = volume
        self._mark = mark
        self._note = note
        self.checkpoint = checkpoint
        """What is held."""

    @property
    def expires_unix_ms(self) -> int:
        """When it ends unless it is renewed."""
        return self._mark.expires_unix_ms

    def renew(self, duration_s: float = DEFAULT_LEASE_S) -> None:
        """Hold on for `duration_s` from now.

        Raises:
            CheckpointMissing: the lease had ended, and the checkpoint is gone.
            VolumeError: the lease could not be committed.
        """
        former = self._mark
        self._mark = _taken(self._volume, self.checkpoint, duration_s, self._note, Steps())
        remove_marks(self._volume, [former])

    def release(self) -> None:
        """Let go. Failing is no harm: the lease ends by itself."""
        try:
            remove_marks(self._volume, [self._mark])
        except VolumeError as error:
            warn("a lease of %s could not be released: %s", self.checkpoint.label, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def lease(
    volume: Volume,
    checkpoint: Checkpoint,
    *,
    duration_s: float = DEFAULT_LEASE_S,
    note: str = "",
    on_step: OnStep | None = None,
) -> Lease:
    """Hold a checkpoint; `note` says who does, for people.

    Raises:
        CheckpointMissing: it is gone, or is being removed.
        VolumeError: the lease could not be committed.
    """
    mark = _taken(volume, checkpoint, duration_s, note, Steps(on_step))
    return Lease(volume, checkpoint, mark, note)


def _taken(
    volume: Volume, checkpoint: Checkpoint, duration_s: float, note: str, steps: Steps
) -> Mark:
    where = checkpoint.publication
    home = name_folder(where.collection, where.kind, where.name)
    now = unix_ms()
    expires = now + max(1, round(duration_s * 1000))
    mark = new_mark("lease", home, where.attempt, now_unix_ms=now, expires_unix_ms=expires)
    put_marks(volume, [mark], note, steps)
    entries = steps.retried("look for dooms", lambda: volume.list_committed(home))
    manifest = f"{attempt_folder(where)}/{MANIFEST_NAME}"
    gone = all(entry.path != manifest for entry in entries)
    if gone or any(m.kind == "doom" and m.attempt == where.attempt for m in marks_of(entries)):
        remove_marks(volume, [mark])
        what = "is gone" if gone else "is being removed"
        raise CheckpointMissing(f"checkpoint {checkpoint.label!r} {what}; choose another one")
    return mark


def is_leased(volume: Volume, folder: str) -> bool:
    """Whether a reader holds the attempt in `folder`."""
    home, _, attempt = folder.rpartition("/")
    now = unix_ms()
    return any(
        mark.kind == "lease" and mark.runs(now) and encode(mark.attempt) == attempt
        for mark in marks_in(volume, home)
    )
