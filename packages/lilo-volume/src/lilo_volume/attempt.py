"""Attempt: one try at publishing one checkpoint: a fresh folder, files digested while written, one outcome.

    begin -> create ... create -> publish     (or abandon)

Every rank gets one from `begin` and then calls exactly one of `publish` and `abandon`; if one rank abandons, all
are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from lilo_volume.begin import DEFAULT_TIMEOUT_S, Beginning, open_attempt
from lilo_volume.checkpoint import Checkpoint
from lilo_volume.copying import CopyInstall, clear_source, read_report
from lilo_volume.digest import best_algorithm, new_hasher
from lilo_volume.errors import InvalidPath, PublishRefused, VolumeError
from lilo_volume.files import DigestingFile, flush_folder, make_folders
from lilo_volume.flusher import Flusher
from lilo_volume.group import Group
from lilo_volume.log import warn
from lilo_volume.manifest import FileEntry, attempt_folder, check_file_name
from lilo_volume.publication import Publication
from lilo_volume.publish import Install, Publisher
from lilo_volume.reports import Report
from lilo_volume.steps import OnStep
from lilo_volume.volume import Volume

__all__ = ["DEFAULT_TIMEOUT_S", "Attempt", "begin"]


def begin(
    volume: Volume | None,
    group: Group,
    *,
    collection: str,
    kind: str,
    name: str,
    order: int,
    overwrite: bool = False,
    retry: bool = False,
    algorithm: str | None = None,
    durable: bool = True,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    settle_s: float = 0.0,
    node: str | None = None,
    on_step: OnStep | None = None,
) -> Attempt:
    """Start an attempt; called by every rank of `group` with the same arguments.

    Args:
        volume: the medium. A rank that has none passes None, and every rank is refused.
        group: the ranks that write together; `SoloGroup()` for one.
        collection: whose states these are, as the id of a run. Any text.
        kind: which sort of state. Any text.
        name: what readers will ask for. Any text.
        order: decides which of a collection and kind is the latest.
        overwrite: replace a published checkpoint of this name; readers see the old or the new one, never both.
        retry: this may have been published by an earlier try whose outcome is not known: `publish` then returns
            what is there if it has the same files, layout and metadata, and is refused with NameTaken if not.
        algorithm: digest of the files: `sha256`, or `xxh3_128` with the extra `fast`; None: the fastest there is.
        durable: wait until every file is on the medium. Without, a power failure can take what was published;
            `verify="full"` finds that, and the manifest is durable all the same.
        timeout_s: limit of each wait for other ranks.
        settle_s: how long committed files may take to show up for other nodes; 0 for media that do not lag.
        node: which node this rank is on: all that share one view of the volume are one. None: see `node`.
        on_step: told of each step: progress, and `Faults`. See `steps`.

    Raises:
        NameTaken: the name is published, and neither `overwrite` nor `retry` is set; nothing was written.
        IdentityRefused: two nodes or ranks claim to be one, or not all of them have this volume.
        VolumeError: the volume cannot be used; GroupTimeout: a rank did not come.
    """
    algorithm = algorithm or best_algorithm()
    if new_hasher(algorithm) is None:
        raise InvalidPath(
            f"digest algorithm {algorithm!r} is not available; use 'sha256', or install lilo-volume[fast]"
        )
    wanted = Publication(collection=collection, kind=kind, name=name, order=order, attempt="")
    beginning = open_attempt(
        volume,
        group,
        wanted,
        overwrite=overwrite,
        retry=retry,
        timeout_s=timeout_s,
        settle_s=settle_s,
        node=node,
        on_step=on_step,
    )
    return Attempt(beginning, algorithm, durable=durable)


class Attempt:
    """One rank's part of a try; made by `begin`. As a context manager it abandons what was not published."""

    def __init__(self, beginning: Beginning, algorithm: str, *, durable: bool = True) -> None:
        """Start with the folder that `begin` made, and the folders above it that must be flushed."""
        self._publisher = Publisher.of(beginning)
        self._algorithm = algorithm
        self._flusher = Flusher() if durable else None
        self._changed = list(beginning.changed)
        self._files: dict[str, FileEntry] = {}
        self._begun: set[str] = set()
        self._ended = False
        self._published: Checkpoint | None = None

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
        return self._publisher.label

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
        assert not self._ended, f"{self.label}: this attempt has ended"
        check_file_name(file_name)
        if file_name in self._begun:
            raise InvalidPath(
                f"{file_name!r} was written before in this attempt; files are written once"
            )
        self._begun.add(file_name)
        file: DigestingFile | None = None
        try:
            with self._publisher.steps.named(f"create {file_name}"):
                file = self._opened(file_name)
        except BaseException as error:
            if file is not None:
                file.__exit__(type(error), error, None)  # closed, and never reported
            raise
        return file

    def _opened(self, file_name: str) -> DigestingFile:
        try:
            return self._open(file_name)
        except FileNotFoundError:
            # A commit of somebody else may reload this view just now, and empty folders do not survive that.
            return self._open(file_name)

    def _open(self, file_name: str) -> DigestingFile:
        root = self._publisher.volume.root
        inner = f"{attempt_folder(self.publication)}/{file_name}".rpartition("/")[0]
        self._changed.extend(make_folders(root, inner))
        hasher = new_hasher(self._algorithm)
        assert hasher is not None, "checked by begin"
        place = self.folder / file_name
        return DigestingFile(
            place, file_name, self._algorithm, hasher, self._report_file, flusher=self._flusher
        )

    def publish(
        self,
        *,
        expected: Collection[str] | None = None,
        layout: Mapping[str, int] | None = None,
        metadata: Mapping[str, str] | None = None,
        lineage: Mapping[str, str] | None = None,
    ) -> Checkpoint:
        """Make the files of all ranks one checkpoint, or none at all; every rank gets the same outcome.

        Once it has returned, calling it again returns the same checkpoint and does nothing.

        Args:
            expected: the files that the checkpoint must have, no more and no fewer, over all ranks; the union
                of what ranks pass counts. None: whatever was written.
            layout: degrees by axis, for readers that must decide whether they can load it. Rank 0's counts.
            metadata: kept in the manifest. Rank 0's counts.
            lineage: where it comes from, as `parent`, `config`, `code`; kept in the manifest. Rank 0's counts.

        Raises:
            PublishRefused: nothing was published; see its subclasses.
            OutcomeUnknown: the medium will not say whether the manifest arrived; begin again with `retry`.
            GroupTimeout: a rank did not come; it may have been published: begin again with `retry`.
        """
        if self._published is not None:
            return self._published
        failure = self._failure()
        wanted = None if expected is None else tuple(sorted(expected))
        report = Report.of(self._files.values(), wanted, failure)
        self._published = self._end(report, layout or {}, metadata or {}, lineage or {})
        return self._published

    def publish_from(
        self,
        source: str,
        *,
        files: Collection[str] | None = None,
        shards: str = "*.distcp",
        expected: Collection[str] | None = None,
        layout: Mapping[str, int] | None = None,
        metadata: Mapping[str, str] | None = None,
        lineage: Mapping[str, str] | None = None,
    ) -> Checkpoint:
        """As `publish`, of files that a framework wrote into a folder of its own: see `copying`.

        Give the framework a folder inside `folder`, so that what a crash leaves is collected with the attempt.

        Args:
            source: the folder, relative to the volume's root; removed once its files were copied.
            files: what this rank wrote below it. None: one rank per node tells all that its view shows.
            shards: pattern of names of which every rank writes at least one; fewer than ranks are refused.
            expected: as in `publish`, relative to `source`.
            layout: as in `publish`.
            metadata: as in `publish`.
            lineage: as in `publish`.

        Raises:
            PublishRefused, OutcomeUnknown, GroupTimeout: as in `publish`; the source may be gone.
        """
        if self._published is not None:
            return self._published
        wanted = None if expected is None else tuple(sorted(expected))
        report = read_report(self._publisher, source, files, wanted, self._algorithm)
        install = CopyInstall(publisher=self._publisher, source=source, shards=shards)
        self._published = self._end(
            report, layout or {}, metadata or {}, lineage or {}, install=install
        )
        clear_source(self._publisher, source)
        return self._published

    def abandon(self, cause: str = "it was abandoned") -> None:
        """Give up: every rank is refused with `cause`, and what was written is removed. After an end: nothing.

        Waits for the other ranks, so that they hear of it; never raises because they do not come.
        """
        if self._ended:
            return
        self._flushed()
        try:
            self._end(Report.of((), None, cause), {}, {}, {})
        except PublishRefused:
            pass
        except VolumeError as error:
            warn("%s: abandoned (%s), and: %s", self.label, cause, error)

    def _failure(self) -> str | None:
        """Why this rank has nothing good to report, if so; makes the names of its files last."""
        if (failure := self._flushed()) is not None:
            return failure
        open_files = sorted(self._begun - self._files.keys())
        if open_files:
            return (
                f"files were not closed, or failed while being written: {', '.join(open_files[:3])}"
            )
        try:
            self._publisher.steps.retried("flush", self._flush_folders)
        except Exception as error:  # the other ranks wait for a report, whatever happened
            return f"flushing folders: {type(error).__name__}: {error}"
        return None

    def _end(
        self,
        report: Report,
        layout: Mapping[str, int],
        metadata: Mapping[str, str],
        lineage: Mapping[str, str],
        *,
        install: Install | None = None,
    ) -> Checkpoint:
        if self._ended:
            raise PublishRefused(
                f"checkpoint {self.label!r}: this attempt has ended without being published; begin another one"
            )
        self._ended = True
        return self._publisher.run(report, layout, metadata, lineage, install=install)

    def _report_file(self, entry: FileEntry) -> None:
        self._files[entry.path] = entry

    def _flushed(self) -> str | None:
        """Wait for the files that are still on their way to the medium; why one of them is not there."""
        return None if self._flusher is None else self._flusher.wait()

    def _flush_folders(self) -> None:
        if self._flusher is None:
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
