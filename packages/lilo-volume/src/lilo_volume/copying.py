"""Copying mode: for writers that insist on a folder of their own, which they would rename when they are done.

    every rank   writes below `source`                 _tmp/__2_0.distcp
    each node    commits
    rank 0       copies its own node's files in its view (so that it can read them back), the others' server-side
    rank 0       commits, checks, and writes the manifest in a later commit, as always

A rename would move what rank 0's view shows, which is its own node's files. Copies cost the bytes twice; write in
place (`Attempt.create`) where you can. Called by `Attempt.publish_from`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from lilo_volume.digest import new_hasher
from lilo_volume.errors import FileMissing, MissingFiles, PublishRefused, VolumeError
from lilo_volume.files import make_folders, remove_tree
from lilo_volume.log import warn
from lilo_volume.manifest import FileEntry, attempt_folder, check_file_name
from lilo_volume.node import is_leader
from lilo_volume.publish import Publisher
from lilo_volume.reports import Report
from lilo_volume.volume import Volume

_BLOCK_BYTES = 4 * 1024 * 1024
_PLACE_HOLDER = ".lilo-folder"
"""Keeps an otherwise empty folder in the committed state: a copy of one file into no folder becomes a file."""


def read_report(
    publisher: Publisher,
    source: str,
    files: Collection[str] | None,
    expected: tuple[str, ...] | None,
    algorithm: str,
) -> Report:
    """What this rank wrote below `source`, digested; without `files`, one rank per node reports all of its view.

    Raises:
        GroupTimeout: a rank did not come.
    """
    # Whoever tells what its whole node wrote must wait until all have written.
    publisher.group.barrier(timeout_s=publisher.timeout_s, step="written")
    try:
        folder = publisher.volume.local_path(source)
        if files is None:
            mine = is_leader(publisher.nodes, publisher.group.rank)
            files = list(_files_below(folder)) if mine else []
        with publisher.steps.named("digest"):
            entries = [_digested(folder, check_file_name(path), algorithm) for path in files]
    except Exception as error:  # the other ranks wait for a report, whatever happened
        return Report.of((), expected, f"reading {source!r}: {type(error).__name__}: {error}")
    return Report.of(entries, expected, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyInstall:
    """Rank 0's part: brings the files of all nodes from `source` into the attempt's folder."""

    publisher: Publisher
    source: str
    """Relative to the volume's root."""
    shards: str
    """Pattern of the names of those files of which every rank writes at least one."""

    def bring(self, reports: list[Report], files: tuple[FileEntry, ...]) -> None:
        """Guard, copy, commit; what arrived is checked by the caller.

        Raises:
            PublishRefused: there are fewer shards than ranks.
            MissingFiles: not all files of all nodes are in the committed state.
        """
        publisher, steps = self.publisher, self.publisher.steps
        committed = steps.retried("check", self._committed)
        self._guard(committed, files)
        own = self._own(reports)
        target = attempt_folder(publisher.publication)
        placeholders = _folders_of(files) - _folders_of(e for e in files if e.path in own)
        steps.retried("install own", lambda: self._install_own(target, own, placeholders))
        try:
            steps.retried("commit own", publisher.volume.commit)
        except VolumeError as error:  # what arrived is looked at, not believed
            warn("commit of %s raised: %s", publisher.label, error)
        peers = [entry.path for entry in files if entry.path not in own]
        for folder, group in itertools.groupby(sorted(peers, key=_folder_of), key=_folder_of):
            sources = [f"{self.source}/{path}" for path in group]
            into = f"{target}/{folder}" if folder else target
            steps.retried(
                "copy peers", lambda s=sources, i=into: publisher.volume.copy_committed(s, i)
            )
        for folder in placeholders:
            _remove_file(publisher.volume, f"{target}/{folder}/{_PLACE_HOLDER}")

    def tidy(self) -> None:
        """Remove the source from the committed state; never raises for that."""
        volume = self.publisher.volume
        try:
            self.publisher.steps.retried(
                "remove source", lambda: _remove_folder(volume, self.source)
            )
        except Exception as error:  # two copies are no reason to refuse
            warn("%s was copied, and is left: %s", self.source, error)

    def _committed(self) -> dict[str, int]:
        """Sizes of all files below the source, at any depth, by path."""
        entries = self.publisher.volume.list_committed(self.source)
        return {e.path.removeprefix(f"{self.source}/"): e.size_bytes for e in entries}

    def _guard(self, committed: dict[str, int], files: tuple[FileEntry, ...]) -> None:
        label, world_size = self.publisher.label, self.publisher.group.world_size
        wrong = [entry.path for entry in files if committed.get(entry.path) != entry.size_bytes]
        if wrong:
            raise MissingFiles(label, tuple(wrong), len(files))
        reported = sum(self._is_shard(entry.path) for entry in files)
        if reported < world_size:
            raise PublishRefused(
                f"checkpoint {label!r}: {self.source!r} holds {reported} files like {self.shards!r}, expected at least "
                f"one per rank, {world_size}; nothing was published; save again, or give the pattern of its shards"
            )

    def _is_shard(self, path: str) -> bool:
        return fnmatch.fnmatchcase(path.rpartition("/")[2], self.shards)

    def _own(self, reports: list[Report]) -> set[str]:
        """Files that rank 0's view has, since its own node wrote them."""
        nodes = self.publisher.nodes
        return {
            entry.path
            for rank, report in enumerate(reports)
            if nodes[rank] == nodes[0]
            for entry in report.files
        }

    def _install_own(self, target: str, own: set[str], placeholders: Iterable[str]) -> None:
        volume = self.publisher.volume
        for path in sorted(own):
            place = _made(volume, f"{target}/{path}")
            _copy_durably(volume.local_path(f"{self.source}/{path}"), place)
        for folder in placeholders:
            _made(volume, f"{target}/{folder}/{_PLACE_HOLDER}").write_bytes(b"\n")


def clear_source(publisher: Publisher, source: str) -> None:
    """After a publication, on every rank: what was copied goes from every view. Never raises for that."""
    try:
        if is_leader(publisher.nodes, publisher.group.rank):
            # Nodes of a shared directory have one view: somebody else may have been quicker.
            with publisher.steps.named("clear source"), contextlib.suppress(FileNotFoundError):
                remove_tree(publisher.volume.local_path(source))
    except Exception as error:  # the checkpoint is published: nothing may be refused from here on
        warn("%s was copied, and is left in a view: %s", source, error)


def _files_below(folder: Path) -> Iterable[str]:
    for place, _, names in os.walk(folder):
        for name in names:
            yield str((Path(place) / name).relative_to(folder)).replace(os.sep, "/")


def _digested(folder: Path, path: str, algorithm: str) -> FileEntry:
    hasher = new_hasher(algorithm)
    assert hasher is not None, "checked by begin"
    size = 0
    with (folder / path).open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            hasher.update(block)
            size += len(block)
    return FileEntry(path=path, size_bytes=size, algorithm=algorithm, digest=hasher.hexdigest())


def _copy_durably(source: Path, target: Path) -> None:
    with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
        while block := reader.read(_BLOCK_BYTES):
            view = memoryview(block)
            while view.nbytes:
                view = view[writer.write(view) or 0 :]
        os.fsync(writer.fileno())


def _made(volume: Volume, path: str) -> Path:
    make_folders(volume.root, path.rpartition("/")[0])
    return volume.local_path(path)


def _folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def _folders_of(files: Iterable[FileEntry]) -> set[str]:
    """Folders inside the checkpoint that hold files directly."""
    return {_folder_of(entry.path) for entry in files} - {""}


def _remove_file(volume: Volume, path: str) -> None:
    volume.local_path(path).unlink(missing_ok=True)
    try:
        volume.remove_committed(path)
    except VolumeError as error:  # a stray file is no harm
        warn("%s is left: %s", path, error)


def _remove_folder(volume: Volume, path: str) -> None:
    try:
        volume.remove_committed(path, recursive=True)
    except FileMissing:
        return
