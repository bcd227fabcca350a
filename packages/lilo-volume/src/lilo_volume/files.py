"""Files: written once, digested while they are written, and flushed before anybody relies on them."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from lilo_volume.digest import Hasher
from lilo_volume.flusher import Flusher
from lilo_volume.manifest import RECORD_NAME, FileEntry
from lilo_volume.reserve import Reserve

_REMOVALS = 5
"""How often a folder into which somebody still writes is emptied before that is an error."""
_BLOCK_BYTES = 512 * 1024
"""Small pieces (pickles, zip records) are gathered to one block; large ones go out in blocks of this size, which
are still in the processor's cache when they are digested after the kernel has copied them. Copying reads memory
while it writes; digesting first would wait for it alone, at three times the cost."""


class DigestingFile:
    """A file being written: binary, sequential, no seeking. `close` reports it, and sees to it that it is flushed.

    Holds one block at most. Left through an error, it is closed but never reported, and so cannot be published.
    """

    def __init__(
        self,
        place: Path,
        path: str,
        algorithm: str,
        hasher: Hasher,
        report: Callable[[FileEntry], None],
        *,
        flusher: Flusher | None,
    ) -> None:
        """Create `place`, which must not be there; `path` is its name in the checkpoint.

        `flusher` waits for the medium; without one, nobody does.
        """
        self._file = place.open("xb", buffering=0)
        self._room = Reserve(self._file.fileno())
        self._written = 0
        self._gathered = bytearray()
        self._path = path
        self._algorithm = algorithm
        self._hasher = hasher
        self._report = report
        self._flusher = flusher
        self._closed = False
        self._size = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append `data`; returns the number of bytes."""
        view = memoryview(data).cast("B")
        if view.nbytes < _BLOCK_BYTES:
            self._gathered += view
            if len(self._gathered) >= _BLOCK_BYTES:
                self.flush()
        else:
            self.flush()
            for start in range(0, view.nbytes, _BLOCK_BYTES):
                self._put(view[start : start + _BLOCK_BYTES])
        self._size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Hand over to the operating system."""
        if self._gathered:
            with memoryview(self._gathered) as view:
                self._put(view)
            self._gathered = bytearray()

    def writable(self) -> bool:
        """True until closed."""
        return not self.closed

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._closed

    def close(self) -> None:
        """Hand everything over to be flushed, and report it. Again: nothing."""
        if self.closed:
            return
        self._closed = True
        try:
            self.flush()
            self._room.give_back(self._size)
        except BaseException:
            self._file.close()
            raise
        if self._flusher is None:
            self._file.close()
        else:
            self._flusher.take(self._file, self._path)
        self._report(
            FileEntry(
                path=self._path,
                size_bytes=self._size,
                algorithm=self._algorithm,
                digest=self._hasher.hexdigest(),
            )
        )

    def _put(self, view: memoryview) -> None:
        """Write, whole (the system may take less than it is given), and digest."""
        self._written += view.nbytes
        self._room.up_to(self._written)
        left = view
        while left.nbytes:
            left = left[self._file.write(left) or 0 :]
        self._hasher.update(view)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._closed = True
            with contextlib.suppress(OSError):
                self._file.close()


def write_durably(place: Path, data: bytes) -> None:
    """Put `data` at `place` in one step: temporary name, flush, rename, flush of the folder."""
    temporary = place.with_name(f"{place.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, place)
    flush_folder(place.parent)


def make_folders(root: Path, relative: str) -> list[Path]:
    """Make `root/relative`; returns the folders that got a new entry, which must be flushed for it to last."""
    changed: list[Path] = []
    place = root
    for part in relative.split("/"):
        parent, place = place, place / part
        try:
            place.mkdir()
        except FileExistsError:
            # Some shared file systems say so before the folder can be seen; what follows fails if it is none.
            continue
        changed.append(parent)
    return changed


def remove_tree(place: Path) -> None:
    """Remove a folder and all below it, the note of an attempt last: what a crash leaves still tells what it was.

    A rank that does not know yet that the attempt is over may write a file meanwhile; then it starts again.

    Raises:
        OSError: it is not there, or cannot be removed.
    """
    note = place / RECORD_NAME
    kept = note.read_bytes() if note.is_file() and not note.is_symlink() else None
    for _ in range(_REMOVALS):
        _remove_all_but(place, RECORD_NAME)
        with contextlib.suppress(FileNotFoundError):
            note.unlink()
        try:
            place.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if kept is not None:
                note.write_bytes(kept)
        else:
            return
    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(place))


def _remove_all_but(place: Path, kept: str) -> None:
    with os.scandir(place) as found:
        items = [item for item in found if item.name != kept]
    for item in items:
        with contextlib.suppress(FileNotFoundError):
            if item.is_dir(follow_symlinks=False):
                remove_all(item.path)
            else:
                os.unlink(item.path)


def remove_all(folder: str | Path) -> None:
    """Remove a folder and all below it.

    Raises:
        OSError: it is not there, or cannot be removed.
    """
    # Not at the top: with its archive formats, `shutil` costs as much as half of this package.
    importlib.import_module("shutil").rmtree(folder)


def flush_folder(folder: Path) -> None:
    """Make the names in `folder` last over a crash, where the file system can do that."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)
