"""Bulletin: versions of one thing, as the adapter that samplers load, and which of them is the current one.

- A version never changes: it is published once and never overwritten.
- The current version never goes back, in any reader's eyes: it is the largest that was announced. If that one is gone
  or broken, readers are told so, and are not handed an older one.
- Whoever publishes a version can read what it wrote at once, from its own view.

Announcements are empty files beside the versions, COLLECTION/KIND/.head-ORDER-ID, of which the largest counts: several
writers cannot undo each other's, and a late one moves nothing back. A version is a checkpoint like any other, named
by its number, so retention and verification apply.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from lilo_volume.agreement import decided_by_rank_zero, done_by_every_rank
from lilo_volume.attempt import Attempt, begin
from lilo_volume.checkpoint import Checkpoint
from lilo_volume.config import node_id
from lilo_volume.errors import (
    CheckpointMissing,
    FileMissing,
    StaleVersion,
    VolumeError,
    VolumeUnavailable,
)
from lilo_volume.files import flush_folder, make_folders
from lilo_volume.group import Group, SoloGroup
from lilo_volume.naming import encode
from lilo_volume.restore import DEFAULT_TIMEOUT_S, latest, open_named
from lilo_volume.steps import Steps
from lilo_volume.verify import Verify
from lilo_volume.volume import Volume

T = TypeVar("T")
_HEAD = re.compile(r"\.head-(\d{20})-[0-9a-f]{16}")


class Bulletin:
    """One rank's end of a bulletin; for readers, `group` is the ranks that read together."""

    def __init__(
        self,
        volume: Volume,
        *,
        collection: str,
        kind: str,
        group: Group | None = None,
        verify: Verify = "size",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Look at nothing yet.

        Args:
            volume: the medium.
            collection: whose versions these are.
            kind: which sort of state.
            group: the ranks that publish or read together.
            verify: what a version must pass to be read.
            timeout_s: limit of each wait for other ranks.
        """
        self._volume = volume
        self._group = group or SoloGroup()
        self._collection = collection
        self._kind = kind
        self._verify: Verify = verify
        self._timeout_s = timeout_s
        self._seen: Checkpoint | None = None

    def publish(
        self,
        version: int,
        write: Callable[[Attempt], Collection[str] | None],
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> Checkpoint:
        """Publish a version and announce it; called by every rank with the same number.

        Args:
            version: larger than every version before.
            write: writes this rank's files into the attempt; returns the files that must be there over all ranks, or
                None for whatever was written.
            metadata: kept in the manifest.

        Raises:
            StaleVersion: an equal or larger one was announced; nothing was written.
            PublishRefused: nothing was published; see `Attempt.publish`.
        """
        self._on_rank_zero(lambda: self._check_newer(version), step="version")
        with begin(
            self._volume,
            self._group,
            collection=self._collection,
            kind=self._kind,
            name=str(version),
            order=version,
            timeout_s=self._timeout_s,
        ) as attempt:
            expected = write(attempt)
            checkpoint = attempt.publish(expected=expected, metadata=metadata)
            mine = dict(attempt.files)
        self._on_every_rank(
            lambda: _check_readable(checkpoint, {path: e.size_bytes for path, e in mine.items()})
        )
        self._on_rank_zero(lambda: self._announce(version), step="announce version")
        self._seen = checkpoint
        return checkpoint

    def current(self) -> Checkpoint | None:
        """The current version; None before the first. Never an older one than was returned before.

        Looks at the announcements first, and brings the view up to date only if there is something new.

        Raises:
            CheckpointMissing: a newer version was announced and is gone or broken.
            VolumeBusy: the view cannot be brought up to date.
        """
        head = self._on_rank_zero(self._head, step="head")
        if self._seen is not None and head == self._seen.publication.order:
            return self._seen
        found = latest(
            self._volume,
            self._collection,
            self._kind,
            verify=self._verify,
            group=self._group,
            timeout_s=self._timeout_s,
        ).checkpoint
        order = None if found is None else found.publication.order
        least = max(
            (n for n in (head, self._seen and self._seen.publication.order) if n is not None),
            default=None,
        )
        if least is not None and (order is None or order < least):
            raise CheckpointMissing(
                f"version {least} of {self._collection}/{self._kind} was announced and is gone or broken; the newest "
                f"good one is {order}, and a bulletin does not go back; publish a version above {least}"
            )
        self._seen = found
        return found

    def at(self, version: int) -> Checkpoint:
        """A version by its number.

        Raises:
            CheckpointMissing: it is not there; CheckpointCorrupt: it fails verification.
        """
        return open_named(
            self._volume,
            self._collection,
            self._kind,
            str(version),
            verify=self._verify,
            group=self._group,
            timeout_s=self._timeout_s,
        )

    @property
    def _home(self) -> str:
        return f"{encode(self._collection)}/{encode(self._kind)}"

    def _heads(self) -> dict[str, int]:
        """The announcements: order by path."""
        heads: dict[str, int] = {}
        for entry in self._volume.list_committed(self._home):
            folder, _, name = entry.path.rpartition("/")
            if folder == self._home and (match := _HEAD.fullmatch(name)):
                heads[entry.path] = int(match[1])
        return heads

    def _head(self) -> int | None:
        return max(self._heads().values(), default=None)

    def _check_newer(self, version: int) -> None:
        if version < 0:
            raise StaleVersion(f"version {version}: versions are numbers from 0")
        newest = latest(self._volume, self._collection, self._kind, verify="names").checkpoint
        head = self._head()
        if newest is not None and newest.publication.order > (-1 if head is None else head):
            # Its publisher ended between publishing and announcing it.
            head = newest.publication.order
            self._announce(head)
        if head is not None and version <= head:
            raise StaleVersion(
                f"version {version} of {self._collection}/{self._kind}: version {head} was announced; publish a "
                "larger one"
            )

    def _announce(self, version: int) -> None:
        """Put the announcement, then take smaller ones away."""
        path = f"{self._home}/.head-{version:020d}-{os.urandom(8).hex()}"
        make_folders(self._volume.root, self._home)
        place = self._volume.local_path(path)
        place.write_bytes(b"")
        flush_folder(place.parent)
        steps = Steps()
        try:
            steps.retried("commit head", self._volume.commit)
        except VolumeError:
            # It may have been applied all the same.
            if path not in self._heads():
                raise
        for old in [path for path, order in self._heads().items() if order < version]:
            try:
                self._volume.remove_committed(old)
            except FileMissing:
                continue

    def _on_rank_zero(self, action: Callable[[], T], *, step: str) -> T:
        return decided_by_rank_zero(
            self._group,
            action,
            label=f"{self._collection}/{self._kind}",
            node=node_id(),
            timeout_s=self._timeout_s,
            step=step,
        )

    def _on_every_rank(self, action: Callable[[], None]) -> None:
        done_by_every_rank(
            self._group,
            action,
            label=f"{self._collection}/{self._kind}",
            node=node_id(),
            timeout_s=self._timeout_s,
            step="read back",
        )


def _check_readable(checkpoint: Checkpoint, sizes: Mapping[str, int]) -> None:
    """Whether this rank's own files are in its own view."""
    for path, size in sizes.items():
        place = checkpoint.folder / path
        try:
            found = place.stat().st_size
        except FileNotFoundError:
            found = None
        if found != size:
            raise VolumeUnavailable(
                f"{checkpoint.label}: {path} was published and is not readable where it was written: {found} bytes "
                f"instead of {size}"
            )
