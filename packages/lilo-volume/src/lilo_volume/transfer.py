"""Transfer: reading, checking and moving many files at once: a few threads, bounded memory, progress told.

    each          one action per item, on a few threads
    blocks        the bytes of one committed file, block by block
    check_files   a checkpoint's files against its manifest

Memory is one block per thread, whatever the size of the files. Bytes come from the committed state where the volume
can stream it, else through this container's view. `lilo_volume.exchange` moves whole checkpoints with this.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

from lilo_volume.digest import new_hasher
from lilo_volume.errors import FileMissing, VolumeError
from lilo_volume.manifest import FileEntry
from lilo_volume.volume import Volume

T = TypeVar("T")

BLOCK_BYTES = 512 * 1024
"""What is read stays in the processor's cache until it is digested; larger blocks go no faster."""
MAX_WORKERS = 4
"""More threads than this were slower on two cores, and one disk is busy with four."""


@runtime_checkable
class Streaming(Protocol):
    """What a volume offers beside `Volume` when its committed files are not simply in the view."""

    def blocks_committed(self, path: str) -> Iterator[bytes]:
        """The bytes of one committed file, in blocks of bounded size.

        Raises:
            FileMissing: there is no such file.
        """
        ...

    def fetch(self, paths: Sequence[str]) -> None:
        """Put committed files into this container's view, whole or not at all; what is there stays.

        Raises:
            FileMissing: one of them is not there.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a transfer is."""

    done_bytes: int
    total_bytes: int
    done_files: int
    total_files: int


Tell: TypeAlias = Callable[[Progress], None]
"""Called often, by any thread, never by two at once."""


class Meter:
    """Adds up what all threads have done, and tells."""

    def __init__(self, sizes: Iterable[int], tell: Tell | None) -> None:
        """Start at nothing of files of these sizes."""
        known = list(sizes)
        self._total_bytes, self._total_files = sum(known), len(known)
        self._tell = tell
        self._lock = threading.Lock()
        self._bytes = self._files = 0

    def add(self, num_bytes: int, *, num_files: int = 0) -> None:
        """So many bytes more are done, and so many files."""
        with self._lock:
            self._bytes += num_bytes
            self._files += num_files
            if self._tell is not None:
                self._tell(
                    Progress(
                        done_bytes=self._bytes,
                        total_bytes=self._total_bytes,
                        done_files=self._files,
                        total_files=self._total_files,
                    )
                )


def default_workers() -> int:
    """How many threads move bytes unless the caller says otherwise."""
    return min(MAX_WORKERS, 2 * (os.cpu_count() or 1))


def each(items: Iterable[T], action: Callable[[T], None], *, workers: int | None = None) -> None:
    """Call `action` once per item, on a few threads; returns when all of them have ended.

    The first error, in time, is raised; what was not begun by then is left out.
    """
    todo = list(items)
    waiting = iter(todo)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work() -> None:
        while True:
            with lock:
                item = None if failures else next(((value,) for value in waiting), None)
            if item is None:
                return
            try:
                action(item[0])
            except BaseException as error:
                failures.append(error)

    count = min(workers or default_workers(), len(todo))
    helpers = [threading.Thread(target=work) for _ in range(count - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]


def blocks(volume: Volume, path: str) -> Iterator[bytes | memoryview]:
    """The bytes of one committed file, in order. A block may be overwritten when the next one is asked for.

    Raises:
        FileMissing: there is no such regular file; VolumeUnavailable: the medium does not answer.
    """
    if isinstance(volume, Streaming):
        return volume.blocks_committed(path)
    return file_blocks(volume.local_path(path))


def bring(volume: Volume, folder: str, paths: Iterable[str]) -> None:
    """See to it that files of `folder` are in this container's view, where a reload alone does not do that."""
    if isinstance(volume, Streaming):
        volume.fetch([f"{folder}/{path}" for path in paths])


def file_blocks(place: Path) -> Generator[memoryview]:
    """The bytes of one regular file, in blocks that share one buffer; links are not followed.

    Raises:
        FileMissing: there is no such file, or it is no regular one; OSError: it cannot be read.
    """
    try:
        descriptor = os.open(place, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError as error:
        raise FileMissing(f"there is no file {str(place)!r}") from error
    with open(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileMissing(f"{str(place)!r} is no regular file")
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # advice only; not every file system takes it
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        buffer = memoryview(bytearray(BLOCK_BYTES))
        while count := file.readinto(buffer):
            yield buffer[:count]


def check_files(
    volume: Volume,
    folder: str,
    entries: Sequence[FileEntry],
    *,
    workers: int | None = None,
    tell: Tell | None = None,
) -> list[str]:
    """Compare every byte of a checkpoint's files with its manifest; the faults in words, in order of `entries`."""
    meter = Meter((entry.size_bytes for entry in entries), tell)
    faults: dict[str, str] = {}

    def check(entry: FileEntry) -> None:
        try:
            fault = file_fault(entry, lambda: blocks(volume, f"{folder}/{entry.path}"), meter.add)
        except (OSError, VolumeError) as error:
            fault = f"{entry.path} cannot be read: {error}"
        if fault is not None:
            faults[entry.path] = fault
        meter.add(0, num_files=1)

    each(entries, check, workers=workers)
    return [faults[entry.path] for entry in entries if entry.path in faults]


def file_fault(
    entry: FileEntry,
    read: Callable[[], Iterator[bytes | memoryview]],
    done: Callable[[int], None],
) -> str | None:
    """What is wrong with one file, in words, or None; `done` is told the bytes of each block."""
    hasher = new_hasher(entry.algorithm)
    if hasher is None:
        # Not being able to look is no pass.
        return f"{entry.path} is unverifiable: this process cannot compute {entry.algorithm!r}"
    size = 0
    for block in read():
        hasher.update(block)
        size += len(block)
        done(len(block))
    if size != entry.size_bytes:
        return f"{entry.path} has {size} bytes, the manifest says {entry.size_bytes}"
    if (digest := hasher.hexdigest()) != entry.digest:
        return f"{entry.path} has {entry.algorithm} {digest}, the manifest says {entry.digest}"
    return None
