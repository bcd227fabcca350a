"""Publish: the files of all ranks become one checkpoint, or nothing does.

    1. report    every rank tells what it wrote, or that it failed
    2. commit    one rank per node commits the files
    3. check     rank 0: reports against the expected set, and against the committed state
    4. manifest  rank 0: written last, in a commit of its own, so that it can never be visible before a file
    5. replace   rank 0: what the new checkpoint overwrites is removed
    6. outcome   every rank returns the checkpoint, or raises the same error

No step renames, copies or reloads; a commit that raises proves nothing, so rank 0 looks before it decides. Each step
may be taken twice. All ranks take part in the same collectives on every path.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from lilo_volume.agreement import decided_by_rank_zero
from lilo_volume.begin import Beginning
from lilo_volume.checkpoint import Checkpoint, label_of
from lilo_volume.discard import discard
from lilo_volume.errors import (
    GroupTimeout,
    MissingFiles,
    NameTaken,
    OutcomeUnknown,
    PublishRefused,
    RankFailed,
    VolumeError,
)
from lilo_volume.log import warn
from lilo_volume.manifest import FileEntry, Manifest, Receipt, attempt_folder, name_folder, parse
from lilo_volume.node import NamedGroup, is_leader
from lilo_volume.publication import Publication
from lilo_volume.reports import Report, checked_files, expected_by, sources_of, without_repeats
from lilo_volume.scan import Found, newest, remove_attempt, scan
from lilo_volume.send import send_manifest
from lilo_volume.steps import Steps
from lilo_volume.volume import Volume

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class _Notes:
    """What rank 0 adds to the manifest on the caller's behalf."""

    layout: Mapping[str, int]
    metadata: Mapping[str, str]
    lineage: Mapping[str, str]


class Install(Protocol):
    """Rank 0 brings files that were written elsewhere into the attempt's folder."""

    def bring(self, reports: list[Report], files: tuple[FileEntry, ...]) -> None:
        """Between commit and check."""
        ...

    def tidy(self) -> None:
        """Between check and manifest, so that no crash leaves two copies in a published checkpoint."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """One rank's side of one publication."""

    volume: Volume
    group: NamedGroup
    publication: Publication
    overwrite: bool
    retry: bool
    timeout_s: float
    settle_s: float
    steps: Steps

    @classmethod
    def of(cls, beginning: Beginning) -> Publisher:
        """The publisher of an attempt that has begun."""
        return cls(
            volume=beginning.volume,
            group=beginning.group,
            publication=beginning.publication,
            overwrite=beginning.overwrite,
            retry=beginning.retry,
            timeout_s=beginning.timeout_s,
            settle_s=beginning.settle_s,
            steps=beginning.steps,
        )

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node of each rank."""
        return self.group.nodes

    @property
    def label(self) -> str:
        """Collection, kind and name, for messages."""
        return label_of(self.publication)

    def run(
        self,
        report: Report,
        layout: Mapping[str, int],
        metadata: Mapping[str, str],
        lineage: Mapping[str, str],
        *,
        install: Install | None = None,
    ) -> Checkpoint:
        """Run the steps, with `install` for files that were not written in place; one outcome on every rank.

        Raises:
            PublishRefused, OutcomeUnknown, GroupTimeout: see `Attempt.publish`.
        """
        reports = self._reports(report)
        commits: list[str | None] = [None] * len(reports)
        if all(item.failure is None for item in reports):
            failure = self._commit_node()
            commits = self.group.all_gather(failure, timeout_s=self.timeout_s, step="commit")
        notes = _Notes(layout, metadata, lineage)
        try:
            manifest = decided_by_rank_zero(
                self.group,
                lambda: self._publish(reports, commits, notes, install),
                label=self.label,
                node=self.nodes[0],
                timeout_s=self.timeout_s,
                step="outcome",
            )
        except (OutcomeUnknown, GroupTimeout):
            raise  # it may be published: nothing is removed
        except VolumeError:
            self._discard()
            raise
        if manifest.publication != self.publication:
            self._discard()  # an earlier try had published it already
        return Checkpoint.of(self.volume, manifest)

    def _discard(self) -> None:
        discard(self.volume, self.group, self.publication, self.steps, timeout_s=self.timeout_s)

    def _reports(self, report: Report) -> list[Report]:
        try:
            with self.steps.named("report"):
                pass
        except Exception as error:  # the other ranks wait for a report, whatever happened
            report = Report((), None, f"{type(error).__name__}: {error}")
        return self.group.all_gather(report, timeout_s=self.timeout_s, step="report")

    def _commit_node(self) -> str | None:
        """Commit if this is the lowest rank of its node. An error decides nothing: rank 0 looks at what arrived."""
        if not is_leader(self.nodes, self.group.rank):
            return None
        try:
            self.steps.retried("commit", self.volume.commit)
        except Exception as error:  # the other ranks wait for this one
            warn("commit of %s raised: %s", self.label, error)
            return f"commit: {type(error).__name__}: {error}"
        return None

    def _publish(
        self,
        reports: list[Report],
        commits: list[str | None],
        notes: _Notes,
        install: Install | None,
    ) -> Manifest:
        """Rank 0's steps; what it raises, before the manifest is sent, is a refusal."""
        home = name_folder(
            self.publication.collection, self.publication.kind, self.publication.name
        )
        reports = reports if install is None else without_repeats(reports)
        files = checked_files(self.label, self.nodes, reports)
        if install is not None:
            self._bring(install, reports, files, commits)
        self._check_committed(files, reports, commits)
        if install is not None:
            install.tidy()
        with self.volume.exclusive(home, timeout_s=self.timeout_s):
            older = self.steps.retried("look", lambda: self._published(home))
            manifest = self._manifest(files, reports, notes, _later_than(older))
            if older and not self.overwrite:
                return self._already(older, manifest)
            data = manifest.to_bytes()
            parse(data)  # what no reader would believe is refused here, and not found out later
            send_manifest(self.volume, self.publication, data, self.steps)
            self._finish(older)
        return manifest

    def _bring(
        self,
        install: Install,
        reports: list[Report],
        files: tuple[FileEntry, ...],
        commits: list[str | None],
    ) -> None:
        try:
            install.bring(reports, files)
        except MissingFiles as error:
            raise self._missing(set(error.missing), files, reports, commits) from error

    def _check_committed(
        self, files: tuple[FileEntry, ...], reports: list[Report], commits: list[str | None]
    ) -> None:
        """Compare names and sizes with the committed state, which is all that readers will see."""
        deadline = time.monotonic() + self.settle_s
        while wrong := self.steps.retried("check", lambda: self._not_committed(files)):
            if time.monotonic() >= deadline or any(commits):
                break
            time.sleep(_POLL_S)
        if wrong:
            raise self._missing(wrong, files, reports, commits)

    def _missing(
        self,
        wrong: set[str],
        files: tuple[FileEntry, ...],
        reports: list[Report],
        commits: list[str | None],
    ) -> PublishRefused:
        """What to raise for files that are not committed: the failed commit behind it, if there was one."""
        owners = [
            rank for rank, report in enumerate(reports) if wrong & {e.path for e in report.files}
        ]
        for rank in owners:
            leader = self.nodes.index(self.nodes[rank])
            if (failure := commits[leader]) is not None:
                return RankFailed(self.label, leader, self.nodes[leader], failure)
        sources = sources_of(owners, self.nodes)
        return MissingFiles(self.label, tuple(sorted(wrong)), len(files), sources)

    def _not_committed(self, files: tuple[FileEntry, ...]) -> set[str]:
        folder = attempt_folder(self.publication)
        sizes = {
            entry.path.removeprefix(f"{folder}/"): entry.size_bytes
            for entry in self.volume.list_committed(folder)
        }
        return {entry.path for entry in files if sizes.get(entry.path) != entry.size_bytes}

    def _published(self, home: str) -> list[Found]:
        """What is published under this name now; the caller holds the lock of the name."""
        return [found for found in scan(self.volume, home) if found.published]

    def _already(self, older: list[Found], wanted: Manifest) -> Manifest:
        """What an earlier try published, if it is what this one would publish.

        Raises:
            NameTaken: it is not, or this is no retry.
        """
        found = newest(older)
        if self.retry and found is not None and found.manifest is not None:
            if _content(found.manifest) == _content(wanted):
                return found.manifest
            raise NameTaken(
                f"checkpoint {self.label!r} was published before with other content; choose another name, or save "
                "with overwrite=True"
            )
        raise NameTaken(
            f"checkpoint {self.label!r} was published by another attempt meanwhile; choose another name, save with "
            "overwrite=True, or with retry=True if it may be this one"
        )

    def _manifest(
        self,
        files: tuple[FileEntry, ...],
        reports: list[Report],
        notes: _Notes,
        created_unix_ms: int,
    ) -> Manifest:
        written = {entry.path for entry in files}
        return Manifest(
            publication=self.publication,
            world_size=len(reports),
            layout=dict(notes.layout),
            files=files,
            receipts=tuple(
                Receipt(
                    rank=rank,
                    node=self.nodes[rank],
                    files=tuple(e.path for e in report.files if e.path in written),
                )
                for rank, report in enumerate(reports)
            ),
            metadata=dict(notes.metadata),
            created_unix_ms=created_unix_ms,
            expected=tuple(sorted(expected_by(reports))),
            lineage=dict(notes.lineage),
        )

    def _remove_replaced(self, folder: str) -> None:
        """Remove it, unless a reader holds it: then garbage collection does, once the reader is done."""
        # Not at the top: marks are needed by few, and cost what importing this package may not.
        leases = importlib.import_module("lilo_volume.leases")
        if not leases.is_leased(self.volume, folder):
            remove_attempt(self.volume, folder)

    def _finish(self, older: list[Found]) -> None:
        """Remove what is replaced. Failing is no harm: of one name, the manifest published last counts."""
        for found in older:
            try:
                self.steps.retried("replace", lambda f=found: self._remove_replaced(f.folder))
            except (
                Exception
            ) as error:  # the checkpoint is published: nothing may be refused from here on
                warn("%s is replaced but could not be removed: %s", found.folder, error)
        try:
            with self.steps.named("announce"):
                pass
        except Exception as error:  # as above
            warn("%s is published, and then: %s", self.label, error)


def _later_than(older: list[Found]) -> int:
    """Now, or just after what is replaced if the clock went back."""
    times = [f.manifest.created_unix_ms + 1 for f in older if f.manifest is not None]
    return max([time.time_ns() // 1_000_000, *times])


def _content(manifest: Manifest) -> tuple[object, ...]:
    """What two tries at one checkpoint have in common."""
    return (
        manifest.publication.order,
        manifest.files,
        dict(manifest.layout),
        dict(manifest.metadata),
    )
