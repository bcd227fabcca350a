"""LocalVolume: a directory of this machine, or of a shared file system that everybody sees alike.

The simple case of a volume: everybody's view is the committed state, so commit and reload have nothing to move.
What must survive a crash is flushed by the publisher, file by file, before it is relied on.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import stat
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from lilo_volume.errors import FileMissing, InvalidPath, VolumeFull, VolumeUnavailable
from lilo_volume.files import remove_tree
from lilo_volume.locks import exclusive_file
from lilo_volume.naming import check_relative
from lilo_volume.volume import Entry

LOCKS = ".lilo-locks"
"""Folder of the lock files; no part of the committed state."""


class LocalVolume:
    """A directory as a `Volume`; made if it is not there. Any number of threads and processes may use it."""

    def __init__(self, root: Path | str) -> None:
        """Open `root`.

        Raises:
            InvalidPath: it is a file.
            VolumeUnavailable: it cannot be made.
        """
        self._root = Path(os.path.abspath(root))
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise InvalidPath(f"{str(root)!r} is a file; a volume needs a directory") from error
        except OSError as error:
            raise _translated(error) from error
        self._real = os.path.realpath(self._root)

    @property
    def root(self) -> Path:
        """The directory, absolute."""
        return self._root

    def local_path(self, path: str) -> Path:
        """The place of `path`; never outside the root, also not through a link.

        Raises:
            InvalidPath: it would be.
        """
        place = self._root / check_relative(path)
        real = os.path.realpath(place)
        if not real.startswith(self._real.rstrip(os.sep) + os.sep):
            raise InvalidPath(f"{path!r} leads out of the volume through a link")
        return place

    def commit(self) -> None:
        """Nothing to move: what is written is visible, and flushed by whoever relies on it."""

    def reload(self) -> None:
        """Nothing to fetch."""

    @contextlib.contextmanager
    def exclusive(self, path: str, *, timeout_s: float) -> Generator[None]:
        """Hold off other publishers of `path`, in all processes of this machine.

        Raises:
            LockTimeout: the holder did not finish in time.
        """
        folder = self._root / LOCKS
        # Some shared file systems say that it exists before it can be seen to be a folder.
        with translating(), contextlib.suppress(FileExistsError):
            folder.mkdir()
        with exclusive_file(folder, check_relative(path), timeout_s=timeout_s):
            yield

    def list_committed(self, prefix: str) -> list[Entry]:
        """All regular files below the folder `prefix` ("" = the root), sorted by path; links are not followed."""
        start = self.local_path(prefix) if prefix else self._root
        with translating():
            entries = list(_walk(str(start), f"{prefix}/" if prefix else ""))
        return sorted(entries, key=lambda entry: entry.path)

    def read_committed(self, path: str) -> bytes:
        """The bytes of one file.

        Raises:
            FileMissing: there is no such file, or it is no regular one.
        """
        place = self.local_path(path)
        with translating(path):
            if not stat.S_ISREG(place.lstat().st_mode):
                raise FileMissing(f"{path!r} is no regular file")
            return place.read_bytes()

    def copy_committed(self, sources: Sequence[str], folder: str) -> None:
        """Copy files into `folder`, which is made if it is not there.

        Raises:
            FileMissing: a source is not there; what came before it is copied.
        """
        target = self.local_path(folder)
        for source in sources:
            place = self.local_path(source)
            with translating(source):
                target.mkdir(parents=True, exist_ok=True)
                # Not at the top: see `files`.
                copy = importlib.import_module("shutil").copyfile
                copy(place, target / place.name, follow_symlinks=False)

    def remove_committed(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, or a folder with `recursive`; folders that become empty above it stay.

        Raises:
            FileMissing: there is nothing at `path`.
            InvalidPath: it is a folder and `recursive` was not given.
        """
        place = self.local_path(path)
        with translating(path):
            if not stat.S_ISDIR(place.lstat().st_mode):
                place.unlink()
            elif recursive:
                remove_tree(place)
            else:
                raise InvalidPath(f"{path!r} is a folder; pass recursive=True to remove it")


def _walk(folder: str, prefix: str) -> Iterator[Entry]:
    try:
        with os.scandir(folder) as found:
            items = list(found)
    except (FileNotFoundError, NotADirectoryError):
        return
    for item in items:
        if item.is_dir(follow_symlinks=False):
            if prefix or item.name != LOCKS:
                yield from _walk(item.path, f"{prefix}{item.name}/")
        elif item.is_file(follow_symlinks=False):
            # A publisher may remove or rename files while this runs.
            with contextlib.suppress(FileNotFoundError):
                size = item.stat(follow_symlinks=False).st_size
                yield Entry(path=f"{prefix}{item.name}", size_bytes=size)


@contextlib.contextmanager
def translating(path: str = "") -> Generator[None]:
    """Turn the file system's errors into ours."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise FileMissing(f"there is no file {path!r} in the volume") from error
    except OSError as error:
        raise _translated(error) from error


def _translated(error: OSError) -> VolumeFull | VolumeUnavailable:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return VolumeFull(f"the volume has no room left: {error}")
    return VolumeUnavailable(f"the volume cannot be used: {error}")
