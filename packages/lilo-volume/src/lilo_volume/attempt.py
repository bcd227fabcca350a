"""Attempt: one try at publishing one checkpoint: a fresh folder, files digested while written, one outcome.

    begin -> create ... create -> publish     (or abandon)

Every rank calls `begin` and then exactly one of `publish` and `abandon`; if one rank abandons, all are refused.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from lilo_volume.agreement import decided_by_rank_zero
from lilo_volume.checkpoint import Checkpoint, label_of
from lilo_volume.config import node_id
from lilo_volume.digest import best_algorithm, new_hasher
from lilo_volume.errors import InvalidPath, NameTaken, PublishRefused, VolumeError
from lilo_volume.files import DigestingFile, flush_folder, make_folders
from lilo_volume.group import Group
from lilo_volume.log import warn
from lilo_volume.manifest import (
    RECORD_NAME,
    FileEntry,
    attempt_folder,
    check_file_name,
    name_folder,
)
from lilo_volume.publication import Publication
from lilo_volume.publish import Publisher, Report
from lilo_volume.record import encode_record
from lilo_volume.scan import scan
from lilo_volume.volume import Volume

DEFAULT_TIMEOUT_S = 1800.0
"""For each collective: as long as the slowest rank may take to write its shards to slow storage."""


def begin(
    volume: Volume,
    group: Group,
    *,
    collection: str,
    kind: str,
    name: str,
    order: int,
    overwrite: bool = False,
    algorithm: str | None = None,
    durable: bool = True,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_step: Callable[[str], None] | None = None,
) -> Attempt:
    """Start an attempt; called by every rank of `group` with the same arguments.

    Args:
        volume: the medium.
        group: the ranks that write together; `SoloGroup()` for one.
        collection: whose states these are, as the id of a run. Any text.
        kind: which sort of state. Any text.
        name: what readers will ask for. Any text.
        order: decides which of a collection and kind is the latest.
        overwrite: replace a published checkpoint of this name; readers see the old or the new one, never both.
        algorithm: digest of the files: `sha256`, or `xxh3_128` with the extra `fast`; None: the fastest there is.
        durable: wait until every file is on the medium. Without, a power failure can take what was published;
            `verify="full"` finds that, and the manifest is durable all the same.
        timeout_s: limit of each wait for other ranks.
        on_step: told the name of each step before it is begun: progress, and crash tests.

    Raises:
        NameTaken: the name is published and `overwrite` is not set; nothing was written.
        VolumeError: the volume cannot be used; GroupTimeout: a rank did not come.
    """
    algorithm = algorithm or best_algorithm()
    if new_hasher(algorithm) is None:
        raise InvalidPath(
            f"digest algorithm {algorithm!r} is not available; use 'sha256', or install lilo-volume[fast]"
        )
    label = f"{collection}/{kind}/{name}"
    node = node_id()
    peers = group.all_gather((group.rank, node), timeout_s=timeout_s, step="begin")
    if [rank for rank, _ in peers] != list(range(group.world_size)):
        raise PublishRefused(
            f"checkpoint {label!r}: the ranks disagree about who they are: {peers}"
        )

    changed: list[Path] = []
    step = on_step or _ignore
    step("begin")
    wanted = Publication(
        collection=collection, kind=kind, name=name, order=order, attempt=os.urandom(8).hex()
    )
    publication = decided_by_rank_zero(
        group,
        lambda: _open(volume, wanted, len(peers), overwrite=overwrite, changed=changed),
        label=label,
        node=node,
        timeout_s=timeout_s,
        step="attempt",
    )
    publisher = Publisher(
        volume=volume,
        group=group,
        publication=publication,
        nodes=tuple(where for _, where in peers),
        overwrite=overwrite,
        timeout_s=timeout_s,
        on_step=step,
    )
    return Attempt(publisher, algorithm, changed, durable=durable)


def _open(
    volume: Volume, wanted: Publication, world_size: int, *, overwrite: bool, changed: list[Path]
) -> Publication:
    """Rank 0: make the folder and its record, unless the name is taken; `changed` gets the folders to flush."""
    home = name_folder(wanted.collection, wanted.kind, wanted.name)
    if not overwrite and any(found.published for found in scan(volume, home)):
        raise NameTaken(
            f"checkpoint {label_of(wanted)!r} exists; choose another name, or save with overwrite=True"
        )
    folder = attempt_folder(wanted)
    changed.extend(make_folders(volume.root, folder))
    record = encode_record(wanted, world_size, time.time_ns() // 1_000_000)
    volume.local_path(f"{folder}/{RECORD_NAME}").write_bytes(record)
    return wanted


def _ignore(step: str) -> None:
    """Take no notice of a step."""


class Attempt:
    """One rank's part of a try; made by `begin`. As a context manager it abandons what was not published."""

    def __init__(
        self, publisher: Publisher, algorithm: str, changed: list[Path], *, durable: bool = True
    ) -> None:
        """Start with the folder that rank 0 made; `changed` are the folders above it that must be flushed."""
        self._publisher = publisher
        self._algorithm = algorithm
        self._durable = durable
        self._changed = changed
        self._files: dict[str, FileEntry] = {}
        self._begun: set[str] = set()
        self._ended = False

    @property
    def publication(self) -> Publication:
        """What is being published."""
        return self._publisher.publication

    @property
    def folder(self) -> Path:
        """Where the files go, in this container's view."""
        return self._publisher.volume.local_path(attempt_folder(self.publication))

    @property
    def label(self) -> str:
        """Collection, kind and name, for messages."""
        return label_of(self.publication)

    @property
    def node(self) -> str:
        """Which node this rank is on."""
        return self._publisher.nodes[self._publisher.group.rank]

    @property
    def timeout_s(self) -> float:
        """Limit of each wait for other ranks."""
        return self._publisher.timeout_s

    @property
    def files(self) -> Mapping[str, FileEntry]:
        """What this rank has written and closed, by path."""
        return dict(self._files)

    def create(self, file_name: str) -> DigestingFile:
        """Open a new file of the checkpoint for writing; close it, or use it with `with`.

        Raises:
            InvalidPath: it leaves the folder, or was created before.
        """
        assert not self._ended, f"{label_of(self.publication)}: this attempt has ended"
        check_file_name(file_name)
        if file_name in self._begun:
            raise InvalidPath(
                f"{file_name!r} was written before in this attempt; files are written once"
            )
        place = self.folder / file_name
        inner = file_name.rpartition("/")[0]
        self._changed.extend(make_folders(self.folder, inner) if inner else [])
        hasher = new_hasher(self._algorithm)
        assert hasher is not None, "checked by begin"
        self._begun.add(file_name)
        self._publisher.on_step(f"create {file_name}")
        return DigestingFile(
            place, file_name, self._algorithm, hasher, self._report_file, durable=self._durable
        )

    def publish(
        self,
        *,
        expected: Collection[str] | None = None,
        layout: Mapping[str, int] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Checkpoint:
        """Make the files of all ranks one checkpoint, or none at all; every rank gets the same outcome.

        Args:
            expected: the files that the checkpoint must have, no more and no fewer, over all ranks; the union
                of what ranks pass counts. None: whatever was written.
            layout: degrees by axis, for readers that must decide whether they can load it. Rank 0's counts.
            metadata: kept in the manifest. Rank 0's counts.

        Raises:
            PublishRefused: nothing was published; see its subclasses.
            OutcomeUnknown: the medium will not say whether the manifest arrived.
            GroupTimeout: a rank did not come.
        """
        failure = None
        open_files = sorted(self._begun - self._files.keys())
        if open_files:
            failure = (
                f"files were not closed, or failed while being written: {', '.join(open_files[:3])}"
            )
        else:
            try:
                self._flush_folders()
            except OSError as error:
                failure = f"flushing folders: {error}"
        wanted = None if expected is None else tuple(sorted(expected))
        return self._end(
            Report.of(self._files.values(), wanted, failure), layout or {}, metadata or {}
        )

    def abandon(self, cause: str = "it was abandoned") -> None:
        """Give up: every rank is refused with `cause`, and what was written is removed. After an end: nothing.

        Waits for the other ranks, so that they hear of it; never raises because they do not come.
        """
        if self._ended:
            return
        try:
            self._end(Report.of((), None, cause), {}, {})
        except PublishRefused:
            pass
        except VolumeError as error:
            warn("%s: abandoned (%s), and: %s", label_of(self.publication), cause, error)

    def _end(
        self, report: Report, layout: Mapping[str, int], metadata: Mapping[str, str]
    ) -> Checkpoint:
        assert not self._ended, f"{label_of(self.publication)}: this attempt has ended"
        self._ended = True
        return self._publisher.run(report, layout, metadata)

    def _report_file(self, entry: FileEntry) -> None:
        self._files[entry.path] = entry

    def _flush_folders(self) -> None:
        self._publisher.on_step("flush")
        if not self._durable:
            return
        for folder in {*self._changed, *((self.folder / path).parent for path in self._files)}:
            flush_folder(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abandon(f"{type(error).__name__}: {error}")
        else:
            self.abandon("it was left without publishing")
