"""Snapshots: the records of a run, copied from the head's own disk to the volume, and back in the next container.

SQLite on a network volume would be slow and could tear; a copy made by SQLite itself is whole, and lilo-volume makes
it visible whole. What happened since the last copy is in the manifests of the checkpoints, which decide in any case.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

from lilo_volume import Checkpoint, SoloGroup, Volume, begin, catalogue, latest, remove

KIND = "records"
FILE = "records.sqlite3"
KEPT = 3
"""Snapshots that stay: the newest, and two to fall back on should it be damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """The snapshots of one run."""

    volume: Volume
    run: str

    def take(self, records: Path) -> Checkpoint:
        """Publish a copy of the database as it is now; older ones beyond `KEPT` go.

        Raises:
            VolumeError: nothing was published; the one before it stays the newest.
            sqlite3.Error: the database cannot be read.
        """
        # Nanoseconds since 1970: later containers of the run go on counting upwards.
        order = time.time_ns()
        attempt = begin(
            self.volume, SoloGroup(), collection=self.run, kind=KIND, name=str(order), order=order
        )
        with attempt:
            copy = records.with_suffix(".copy")
            _copy_database(records, copy)
            with copy.open("rb") as source, attempt.create(FILE) as target:
                shutil.copyfileobj(source, target)
            copy.unlink()
            taken = attempt.publish(expected=[FILE])
        self._drop_old()
        return taken

    def restore(self, records: Path) -> Checkpoint | None:
        """Put the newest verified snapshot in place; None if there is none. A damaged one is passed over.

        Records that are there already are left alone: they are newer than any snapshot of them.
        """
        if records.exists():
            return None
        newest = latest(self.volume, self.run, KIND, verify="full").checkpoint
        if newest is None:
            return None
        records.parent.mkdir(parents=True, exist_ok=True)
        partial = records.with_suffix(".partial")
        partial.touch(mode=0o600)
        shutil.copyfile(newest.folder / FILE, partial)
        partial.rename(records)
        return newest

    def _drop_old(self) -> None:
        ours = [c for c in catalogue(self.volume) if c.publication.collection == self.run]
        for old in sorted(ours, key=lambda c: c.publication.order)[:-KEPT]:
            remove(self.volume, old)


def _copy_database(source: Path, target: Path) -> None:
    """A whole copy, whatever writes to the source meanwhile."""
    target.unlink(missing_ok=True)
    with (
        contextlib.closing(sqlite3.connect(source)) as reading,
        contextlib.closing(sqlite3.connect(target)) as writing,
    ):
        reading.backup(writing)
