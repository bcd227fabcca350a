"""Protocols that are broken on purpose, each in a way that real systems were. The sweep must catch every one."""

import contextlib
import os
import shutil
from dataclasses import fields

from lilo_volume.copying import CopyInstall, read_report
from lilo_volume.manifest import attempt_folder
from lilo_volume.publish import Publisher
from lilo_volume.reports import Report
from lilo_volume.testing.sweep import NODES, WORLD_SIZE
from lilo_volume.testing.sweep.protocols import (
    content,
    files_of,
    write_aside,
    write_in_place,
)


def _as(kind, attempt):
    """Let an attempt be published by another publisher."""
    publisher = attempt._publisher
    attempt._publisher = kind(**{f.name: getattr(publisher, f.name) for f in fields(publisher)})


class ManifestWithShards(Publisher):
    """Rank 0's node does not commit its shards before: they go with the manifest."""

    def _commit_node(self):
        return None if self.nodes[self.group.rank] == self.nodes[0] else super()._commit_node()

    def _check_committed(self, files, reports, commits):
        """Only the peers' files can be there already."""
        own = {
            e.path
            for r, report in enumerate(reports)
            if self.nodes[r] == self.nodes[0]
            for e in report.files
        }
        super()._check_committed(tuple(e for e in files if e.path not in own), reports, commits)


class OneNodeCommits(Publisher):
    """All hosts have one name, so that the rank that commits for its node is global rank 0 alone."""

    def _commit_node(self):
        return super()._commit_node() if self.group.rank == 0 else None

    def _check_committed(self, files, reports, commits):
        """Nobody looks."""


class ReloadAfterCommit(Publisher):
    """A node refreshes its view after its commit, as if writers needed their peers' shards."""

    def _commit_node(self):
        failure = super()._commit_node()
        self.volume.reload()
        return failure


class RenameFromOneView(Publisher):
    """Every node commits `_tmp`; rank 0 renames it, in a view that shows its own node's files alone."""

    def _check_committed(self, files, reports, commits):
        folder = self.volume.local_path(attempt_folder(self.publication))
        for name in os.listdir(folder / "work" / "_tmp"):
            shutil.move(folder / "work" / "_tmp" / name, folder / name)
        with contextlib.suppress(Exception):
            self.volume.commit()


class OneLevelGuard(CopyInstall):
    """The capture of rank 0's own view is installed; the guard that counts shards lists one level, and finds none."""

    def _guard(self, committed, files):
        found = [path for path in committed if "/" not in path and self._is_shard(path)]
        if found and len(found) < WORLD_SIZE:
            raise AssertionError("it would be refused here")


def _in_place(kind):
    def save(save):
        with save.begin() as attempt:
            _as(kind, attempt)
            write_in_place(save, attempt)
            return attempt.publish(expected=content("").keys(), metadata={"text": save.text})

    return save


def rename_from_one_view(save):
    with save.begin() as attempt:
        _as(RenameFromOneView, attempt)
        source = write_aside(save, attempt)
        report = read_report(attempt._publisher, source, files_of(save.group.rank), None, "sha256")
        return attempt._end(report, {}, {"text": save.text}, {})


def guard_that_lists_one_level(save):
    with save.begin() as attempt:
        source = write_aside(save, attempt)
        publisher = attempt._publisher
        # What rank 0's node wrote is all that it knows of.
        mine = files_of(save.group.rank) if NODES[save.group.rank] == NODES[0] else []
        report = read_report(publisher, source, mine, None, "sha256")
        assert isinstance(report, Report)
        install = OneLevelGuard(publisher=publisher, source=source, shards="*.distcp")
        return attempt._end(report, {}, {"text": save.text}, {}, install=install)


BROKEN = {
    "manifest in the same commit as rank 0's shards": (_in_place(ManifestWithShards), "I2"),
    "only one node commits": (_in_place(OneNodeCommits), "I2"),
    "rename from one view": (rename_from_one_view, "I2"),
    "reload after commit": (_in_place(ReloadAfterCommit), "I7"),
    "guard that lists one level": (guard_that_lists_one_level, "I1"),
}
"""By name: how it saves, and the invariant that it must be seen to break."""
