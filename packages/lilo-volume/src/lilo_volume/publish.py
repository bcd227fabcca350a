"""Publish: the files of all ranks become one checkpoint, or nothing does.

    1. report    every rank tells what it wrote, or that it failed
    2. commit    one rank per node commits the files
    3. check     rank 0: reports against the expected set, and against the committed state
    4. manifest  rank 0: written last, in a commit of its own, so that it can never be visible before a file
    5. replace   rank 0: what the new checkpoint overwrites is removed
    6. outcome   every rank returns the checkpoint, or raises the same error

No step renames, copies or reloads; a commit that raises proves nothing, so rank 0 looks before it decides.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass

from lilo_volume.agreement import decided_by_rank_zero
from lilo_volume.checkpoint import Checkpoint, label_of
from lilo_volume.errors import (
    FileMissing,
    MissingFiles,
    NameTaken,
    OutcomeUnknown,
    PublishRefused,
    RankFailed,
    UnexpectedFiles,
    VolumeError,
)
from lilo_volume.files import write_durably
from lilo_volume.group import Group
from lilo_volume.log import warn
from lilo_volume.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    Receipt,
    attempt_folder,
    name_folder,
    parse,
)
from lilo_volume.publication import Publication
from lilo_volume.scan import Found, remove_attempt, scan
from lilo_volume.volume import Volume

_COMMIT_TRIES = 3
"""A commit is safe to repeat; more tries than this hide an outage."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank brings to the publication."""

    files: tuple[FileEntry, ...]
    """Sorted by path."""
    expected: tuple[str, ...] | None
    failure: str | None

    @classmethod
    def of(
        cls, files: Iterable[FileEntry], expected: tuple[str, ...] | None, failure: str | None
    ) -> Report:
        """A report with its files in order."""
        return cls(tuple(sorted(files, key=lambda entry: entry.path)), expected, failure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """One rank's side of one publication."""

    volume: Volume
    group: Group
    publication: Publication
    nodes: tuple[str, ...]
    """Node of each rank."""
    overwrite: bool
    timeout_s: float
    on_step: Callable[[str], None]

    def run(
        self, report: Report, layout: Mapping[str, int], metadata: Mapping[str, str]
    ) -> Checkpoint:
        """Run the steps; the same outcome on every rank.

        Raises:
            PublishRefused, OutcomeUnknown, GroupTimeout: see `Attempt.publish`.
        """
        self.on_step("report")
        reports = self.group.all_gather(report, timeout_s=self.timeout_s, step="report")
        if all(item.failure is None for item in reports):
            self._commit_node()
            self.group.barrier(timeout_s=self.timeout_s, step="commit")
        manifest = decided_by_rank_zero(
            self.group,
            lambda: self._publish(reports, layout, metadata),
            label=label_of(self.publication),
            node=self.nodes[0],
            timeout_s=self.timeout_s,
            step="outcome",
        )
        return Checkpoint.of(self.volume, manifest)

    def _commit_node(self) -> None:
        """Commit if this is the lowest rank of its node. An error decides nothing: rank 0 looks at what arrived."""
        if self.nodes.index(self.nodes[self.group.rank]) != self.group.rank:
            return
        self.on_step("commit")
        for _ in range(_COMMIT_TRIES):
            try:
                self.volume.commit()
            except VolumeError as error:
                warn("commit of %s raised: %s", label_of(self.publication), error)
            else:
                return

    def _publish(
        self, reports: list[Report], layout: Mapping[str, int], metadata: Mapping[str, str]
    ) -> Manifest:
        """Rank 0's steps; a refusal leaves nothing of the attempt behind."""
        home = name_folder(
            self.publication.collection, self.publication.kind, self.publication.name
        )
        with self._removed_if_refused():
            files = checked_files(label_of(self.publication), self.nodes, reports)
            self.on_step("check")
            self._check_committed(files)
        with self.volume.exclusive(home, timeout_s=self.timeout_s):
            with self._removed_if_refused():
                older = self._replaced(home)
                manifest = self._manifest(files, reports, layout, metadata, _later_than(older))
                data = manifest.to_bytes()
                parse(data)  # what no reader would believe is refused here, and not found out later
                self._send(data)
            self._remove_older(older)
        return manifest

    @contextlib.contextmanager
    def _removed_if_refused(self) -> Generator[None]:
        """Remove the attempt on an error, unless it may be published. A crash leaves it to the catalogue."""
        try:
            yield
        except OutcomeUnknown:
            raise
        except Exception:
            with contextlib.suppress(VolumeError):
                remove_attempt(self.volume, attempt_folder(self.publication))
            raise

    def _check_committed(self, files: tuple[FileEntry, ...]) -> None:
        """Compare names and sizes with the committed state, which is all that readers will see."""
        folder = attempt_folder(self.publication)
        sizes = {
            entry.path.removeprefix(f"{folder}/"): entry.size_bytes
            for entry in self.volume.list_committed(folder)
        }
        wrong = tuple(entry.path for entry in files if sizes.get(entry.path) != entry.size_bytes)
        if wrong:
            raise MissingFiles(label_of(self.publication), wrong, len(files))

    def _replaced(self, home: str) -> list[Found]:
        """What is published under this name now; the caller holds the lock of the name."""
        older = [found for found in scan(self.volume, home) if found.published]
        if older and not self.overwrite:
            raise NameTaken(
                f"checkpoint {label_of(self.publication)!r} was published by another attempt meanwhile; "
                "choose another name, or save with overwrite=True"
            )
        return older

    def _manifest(
        self,
        files: tuple[FileEntry, ...],
        reports: list[Report],
        layout: Mapping[str, int],
        metadata: Mapping[str, str],
        created_unix_ms: int,
    ) -> Manifest:
        return Manifest(
            publication=self.publication,
            world_size=len(reports),
            layout=dict(layout),
            files=files,
            receipts=tuple(
                Receipt(rank=rank, node=self.nodes[rank], files=tuple(e.path for e in report.files))
                for rank, report in enumerate(reports)
            ),
            metadata=dict(metadata),
            created_unix_ms=created_unix_ms,
        )

    def _send(self, data: bytes) -> None:
        """Write the manifest and commit it.

        Raises:
            PublishRefused: the volume refused it each time; it is not there.
            OutcomeUnknown: the volume will not say.
        """
        self.on_step("manifest")
        path = f"{attempt_folder(self.publication)}/{MANIFEST_NAME}"
        place = self.volume.local_path(path)
        write_durably(place, data)
        last: VolumeError | None = None
        for _ in range(_COMMIT_TRIES):
            self.on_step("commit manifest")
            try:
                self.volume.commit()
            except VolumeError as error:
                if self._arrived(path, data, error):
                    warn("commit of %s raised after it was applied: %s", path, error)
                    return
                last = error
            else:
                return
        place.unlink()  # or a later commit of anything else would publish it after all
        raise PublishRefused(
            f"checkpoint {label_of(self.publication)!r}: the volume refused the manifest {_COMMIT_TRIES} times "
            f"(last: {last}); nothing was published"
        ) from last

    def _arrived(self, path: str, data: bytes, cause: VolumeError) -> bool:
        """Whether the manifest is in the committed state."""
        try:
            return self.volume.read_committed(path) == data
        except FileMissing:
            return False
        except VolumeError as error:
            raise OutcomeUnknown(
                f"checkpoint {label_of(self.publication)!r}: commit raised ({cause}), and reading back did too "
                f"({error}); list the checkpoints before saving again"
            ) from error

    def _remove_older(self, older: list[Found]) -> None:
        """Remove what is replaced. Failing is no harm: of one name, the manifest published last counts."""
        for found in older:
            self.on_step("replace")
            try:
                remove_attempt(self.volume, found.folder)
            except VolumeError as error:
                warn("%s is replaced but could not be removed: %s", found.folder, error)


def checked_files(
    label: str, nodes: tuple[str, ...], reports: list[Report]
) -> tuple[FileEntry, ...]:
    """All files of all ranks, sorted; pure.

    Raises:
        RankFailed: a rank says so; the lowest one is named.
        MissingFiles, UnexpectedFiles: they are not what was expected, or two ranks wrote the same.
    """
    for rank, report in enumerate(reports):
        if report.failure is not None:
            raise RankFailed(label, rank, nodes[rank], report.failure)
    files = sorted((e for report in reports for e in report.files), key=lambda e: e.path)
    paths = [entry.path.casefold() for entry in files]
    twice = {path for path, following in itertools.pairwise(paths) if path == following}
    if twice:
        raise UnexpectedFiles(label, tuple(sorted(twice)), "were written twice")
    have = {entry.path for entry in files}
    wanted = [report.expected for report in reports if report.expected is not None]
    expected = frozenset[str]().union(*wanted)
    if missing := sorted(expected - have):
        raise MissingFiles(label, tuple(missing), len(expected))
    if wanted and (extra := sorted(have - expected)):
        raise UnexpectedFiles(label, tuple(extra), "nobody expected")
    if not files:
        raise PublishRefused(f"checkpoint {label!r} has no files; a checkpoint has at least one")
    return tuple(files)


def _later_than(older: list[Found]) -> int:
    """Now, or just after what is replaced if the clock went back."""
    times = [f.manifest.created_unix_ms + 1 for f in older if f.manifest is not None]
    return max([time.time_ns() // 1_000_000, *times])
