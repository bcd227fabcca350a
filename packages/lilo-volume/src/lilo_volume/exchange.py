"""Exchange: whole checkpoints in and out of a volume.

    pull     a checkpoint of a volume -> a plain folder, with its manifest
    push     a plain folder           -> a checkpoint of a volume
    adopt    a folder on the volume that lilo-volume did not make -> a checkpoint of it

Every byte is digested on its way and compared with the manifest, if there is one: nothing unverified becomes a
checkpoint, and nothing that was pulled is short. Not for writing a checkpoint in the first place: that is `begin`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lilo_volume.attempt import Attempt, begin
from lilo_volume.checkpoint import Checkpoint
from lilo_volume.digest import new_hasher
from lilo_volume.errors import CheckpointCorrupt, CheckpointMissing, InvalidPath
from lilo_volume.files import flush_folder, make_folders, write_durably
from lilo_volume.group import SoloGroup
from lilo_volume.manifest import (
    MANIFEST_NAME,
    RECORD_NAME,
    FileEntry,
    Manifest,
    attempt_folder,
    parse,
)
from lilo_volume.naming import check_relative
from lilo_volume.transfer import Meter, Tell, blocks, each, file_blocks, file_fault
from lilo_volume.volume import Entry, Volume

_OURS = frozenset({MANIFEST_NAME, f"{MANIFEST_NAME}.tmp", RECORD_NAME})


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a folder is published as; what is None comes from the folder's own manifest."""

    collection: str | None = None
    kind: str | None = None
    name: str | None = None
    order: int | None = None
    metadata: Mapping[str, str] | None = None
    overwrite: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A folder somewhere: its files, how to read them, and what is known of them."""

    label: str
    files: tuple[Entry, ...]
    """Paths inside the folder."""
    read: Callable[[str], Iterator[bytes | memoryview]]
    manifest: Manifest | None


def pull(
    volume: Volume,
    checkpoint: Checkpoint,
    destination: Path,
    *,
    workers: int | None = None,
    tell: Tell | None = None,
) -> Path:
    """Copy a checkpoint into a plain folder, checked; its manifest comes last, so that `push` can take it back.

    What is already there and equal is kept, so that a broken pull goes on where it was.

    Raises:
        CheckpointCorrupt: a file is not what the manifest says; what was good so far stays.
        InvalidPath: `destination` is a file, or holds another checkpoint.
    """
    manifest = checkpoint.manifest
    folder = attempt_folder(manifest.publication)
    if destination.exists() and not destination.is_dir():
        raise InvalidPath(f"{str(destination)!r} is a file; a checkpoint is pulled into a folder")
    stored = destination / MANIFEST_NAME
    if stored.exists() and stored.read_bytes() != manifest.to_bytes():
        raise InvalidPath(f"{str(destination)!r} holds another checkpoint; name an empty folder")
    destination.mkdir(parents=True, exist_ok=True)
    meter = Meter((entry.size_bytes for entry in manifest.files), tell)

    def take(entry: FileEntry) -> None:
        place = destination / check_relative(entry.path)
        if not _is_equal(place, entry):
            _take(place, entry, lambda: blocks(volume, f"{folder}/{entry.path}"), meter)
        else:
            meter.add(entry.size_bytes)
        meter.add(0, num_files=1)

    for entry in manifest.files:
        if parent := entry.path.rpartition("/")[0]:
            make_folders(destination, parent)
    each(manifest.files, take, workers=workers)
    for place in {(destination / entry.path).parent for entry in manifest.files}:
        flush_folder(place)
    write_durably(stored, manifest.to_bytes())
    return destination


def push(
    volume: Volume,
    folder: Path,
    target: Target,
    *,
    workers: int | None = None,
    tell: Tell | None = None,
) -> Checkpoint:
    """Publish a plain folder; with a manifest in it, only if every file is what that says.

    Raises:
        CheckpointCorrupt: a file is not what the manifest says; InvalidPath: the folder has no files, or a link.
        PublishRefused: nothing was published.
    """
    if not folder.is_dir():
        raise InvalidPath(f"{str(folder)!r} is no folder")
    files = tuple(_walk(folder, ""))
    manifest = None
    if (stored := folder / MANIFEST_NAME).is_file():
        manifest = parse(stored.read_bytes())
    source = _Source(
        label=str(folder),
        files=files,
        read=lambda path: file_blocks(folder / path),
        manifest=manifest,
    )
    return _publish(volume, source, target, workers, tell)


def adopt(
    volume: Volume,
    folder: str,
    target: Target,
    *,
    workers: int | None = None,
    tell: Tell | None = None,
) -> Checkpoint:
    """Publish a folder that is on the volume already but was not made by lilo-volume; it is copied, and stays.

    Raises:
        CheckpointMissing: there is nothing at `folder` in the committed state.
        CheckpointCorrupt, PublishRefused: as `push`.
    """
    prefix = f"{check_relative(folder)}/"
    files = tuple(
        Entry(path=entry.path.removeprefix(prefix), size_bytes=entry.size_bytes)
        for entry in volume.list_committed(folder)
    )
    if not files:
        raise CheckpointMissing(f"there is nothing in {folder!r} in the committed state")
    manifest = None
    if any(entry.path == MANIFEST_NAME for entry in files):
        manifest = parse(volume.read_committed(prefix + MANIFEST_NAME))
    source = _Source(
        label=folder,
        files=files,
        read=lambda path: blocks(volume, prefix + path),
        manifest=manifest,
    )
    return _publish(volume, source, target, workers, tell)


def _publish(
    volume: Volume, source: _Source, target: Target, workers: int | None, tell: Tell | None
) -> Checkpoint:
    expected = _expected(source)
    manifest = source.manifest
    known = None if manifest is None else manifest.publication
    collection = target.collection or (known and known.collection)
    kind = target.kind or (known and known.kind)
    name = target.name or (known and known.name)
    order = target.order if target.order is not None else (known and known.order)
    if collection is None or kind is None or name is None or order is None:
        raise InvalidPath(
            f"{source.label!r} has no manifest that says what it is; give collection, kind, name and order"
        )
    metadata = target.metadata
    if metadata is None and manifest is not None:
        metadata = manifest.metadata
    layout = None if manifest is None else manifest.layout
    meter = Meter((entry.size_bytes for entry in expected), tell)
    with begin(
        volume,
        SoloGroup(),
        collection=collection,
        kind=kind,
        name=name,
        order=order,
        overwrite=target.overwrite,
    ) as attempt:
        each(expected, lambda entry: _give(attempt, source, entry, meter), workers=workers)
        return attempt.publish(
            expected=[entry.path for entry in expected], layout=layout, metadata=metadata
        )


def _expected(source: _Source) -> tuple[Entry, ...]:
    """The files to publish: those of the manifest, or all that are there."""
    if source.manifest is not None:
        return tuple(
            Entry(path=entry.path, size_bytes=entry.size_bytes) for entry in source.manifest.files
        )
    files = tuple(entry for entry in source.files if entry.path not in _OURS)
    if not files:
        raise InvalidPath(f"{source.label!r} has no files; a checkpoint has at least one")
    return files


def _give(attempt: Attempt, source: _Source, entry: Entry, meter: Meter) -> None:
    """Copy one file into the attempt; compared with the source's manifest, if there is one."""
    known = source.manifest and next(e for e in source.manifest.files if e.path == entry.path)
    with attempt.create(entry.path) as file:

        def read() -> Iterator[bytes | memoryview]:
            for block in source.read(entry.path):
                file.write(block)
                yield block

        if known is None:
            for block in read():
                meter.add(len(block))
        elif fault := file_fault(known, read, meter.add):
            raise CheckpointCorrupt(f"{source.label!r}: {fault}")
    meter.add(0, num_files=1)


def _take(
    place: Path,
    entry: FileEntry,
    read: Callable[[], Iterator[bytes | memoryview]],
    meter: Meter,
) -> None:
    """Write one file under a temporary name and rename it once its digest was seen to be right."""
    temporary = place.with_name(f"{place.name}.part")
    with temporary.open("wb", buffering=0) as file:

        def written() -> Iterator[bytes | memoryview]:
            for block in read():
                view = memoryview(block)
                while view.nbytes:
                    view = view[file.write(view) or 0 :]
                yield block

        fault = file_fault(entry, written, meter.add)
        os.fsync(file.fileno())
    if fault is not None:
        temporary.unlink()
        raise CheckpointCorrupt(f"it cannot be pulled: {fault}")
    os.replace(temporary, place)


def _is_equal(place: Path, entry: FileEntry) -> bool:
    """Whether the file is there already, every byte of it."""
    if not place.is_file() or place.stat().st_size != entry.size_bytes:
        return False
    if new_hasher(entry.algorithm) is None:
        return False
    return file_fault(entry, lambda: file_blocks(place), lambda _: None) is None


def _walk(folder: Path, prefix: str) -> Iterator[Entry]:
    """All regular files, sorted. A link is refused: what it points to may change, or lie elsewhere."""
    for item in sorted(os.scandir(folder), key=lambda found: found.name):
        path = f"{prefix}{item.name}"
        if item.is_symlink():
            raise InvalidPath(f"{item.path!r} is a link; copy what it points to")
        if item.is_dir(follow_symlinks=False):
            yield from _walk(Path(item.path), f"{path}/")
        elif item.is_file(follow_symlinks=False):
            yield Entry(path=path, size_bytes=item.stat(follow_symlinks=False).st_size)
