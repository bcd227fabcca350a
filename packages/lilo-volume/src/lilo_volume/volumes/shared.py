"""SharedVolume: a directory that several hosts mount, as NFS, Lustre or a cluster's own file system.

Like `LocalVolume`, everybody's view is the committed state, but a host may see it late. What differs:

- Close-to-open: what another host wrote and closed is certain to be seen only by whoever opens it after that. So
  every look opens all folders on its way from the root, and files that changed lately, instead of asking a cache.
- Locks hold between hosts, by lock files (`lock_file`). Do not mix with `LocalVolume` on one root: each would not see
  the other's locks.
- A file that is removed while this host has it open stays for a while as `.nfs...`: no file, and no reason to fail.
- Where names show up late all the same (FUSE mounts of object stores), publish with `settle_s` above that lag.

All hosts must mount the same folder; `begin` finds out when they do not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TypeVar

from lilo_volume.config import node_id, process_id
from lilo_volume.errors import FileMissing, InvalidPath
from lilo_volume.files import remove_tree
from lilo_volume.manifest import RECORD_NAME
from lilo_volume.naming import check_relative
from lilo_volume.volume import Entry
from lilo_volume.volumes.local import LOCKS, LocalVolume, translating
from lilo_volume.volumes.lock_file import LEASE_S, held_file

T = TypeVar("T")
_RECENT_S = 600.0
"""Attributes are cached for 60 s unless a mount says otherwise; ten times that, for clocks that differ."""
_GHOST = ".nfs"
_STALE_TRIES = 3
"""A folder that another host replaced gives ESTALE once per cached handle."""


class SharedVolume(LocalVolume):
    """A directory that several hosts share, as a `Volume`. Any number of threads, processes and hosts may use it."""

    def __init__(self, root: Path | str, *, lease_s: float = LEASE_S) -> None:
        """Open `root`, made if it is not there; a lock whose holder gives no sign for `lease_s` is free.

        Raises:
            InvalidPath: it is a file; VolumeUnavailable: it cannot be made.
        """
        super().__init__(root)
        self._lease_s = lease_s

    def reload(self) -> None:
        """Make this host ask the server about the root anew; folders below are asked about when they are looked at."""
        with translating():
            _look(self.root)

    @contextlib.contextmanager
    def exclusive(self, path: str, *, timeout_s: float) -> Generator[None]:
        """Hold off other publishers of `path` on all hosts.

        Raises:
            LockTimeout: the holder neither finished nor died in time.
        """
        folder = self.root / LOCKS
        with translating():
            folder.mkdir(exist_ok=True)
            _look(folder)
        owner = f"process {process_id()} on {node_id()}"
        with held_file(
            folder,
            check_relative(path),
            owner=owner,
            timeout_s=timeout_s,
            lease_s=self._lease_s,
        ):
            yield

    def list_committed(self, prefix: str) -> list[Entry]:
        """All regular files below the folder `prefix` ("" = the root), sorted by path; links are not followed."""
        start = self.local_path(prefix) if prefix else self.root

        def look() -> list[Entry]:
            self._look_down_to(start)
            return list(_walk(start, f"{prefix}/" if prefix else ""))

        with translating():
            return sorted(_without_stale(look), key=lambda entry: entry.path)

    def read_committed(self, path: str) -> bytes:
        """The bytes of one file.

        Raises:
            FileMissing: there is no such file, or it is no regular one.
        """
        place = self.local_path(path)

        def read() -> bytes:
            self._look_down_to(place.parent)
            if not stat.S_ISREG(place.lstat().st_mode):
                raise FileMissing(f"{path!r} is no regular file")
            return place.read_bytes()

        with translating(path):
            return _without_stale(read)

    def remove_committed(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, or a folder with `recursive`; what a process of this host has open goes when it is closed.

        Raises:
            FileMissing: there is nothing at `path`.
            InvalidPath: it is a folder and `recursive` was not given.
        """
        place = self.local_path(path)
        with translating(path):
            self._look_down_to(place.parent)
            if not stat.S_ISDIR(place.lstat().st_mode):
                place.unlink()
            elif not recursive:
                raise InvalidPath(f"{path!r} is a folder; pass recursive=True to remove it")
            else:
                _remove_tree(place)

    def _look_down_to(self, folder: Path) -> None:
        """Open every folder from the root down: a name that was looked for too early is then looked for again."""
        _look(self.root)
        place = self.root
        for part in folder.relative_to(self.root).parts:
            place = place / part
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                _look(place)


def _look(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    os.close(descriptor)


def _walk(folder: Path, prefix: str) -> Iterator[Entry]:
    try:
        with os.scandir(folder) as found:
            items = [item for item in found if not item.name.startswith(_GHOST)]
    except (FileNotFoundError, NotADirectoryError):
        return
    for item in items:
        if item.is_dir(follow_symlinks=False):
            if prefix or item.name != LOCKS:
                yield from _walk(Path(item.path), f"{prefix}{item.name}/")
        elif item.is_file(follow_symlinks=False):
            # Another host may remove files while this runs.
            with contextlib.suppress(FileNotFoundError):
                yield Entry(path=f"{prefix}{item.name}", size_bytes=_size(item))


def _size(item: os.DirEntry[str]) -> int:
    found = item.stat(follow_symlinks=False)
    if abs(time.time() - found.st_mtime) > _RECENT_S:
        return found.st_size
    descriptor = os.open(item.path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _without_stale(action: Callable[[], T]) -> T:
    for _ in range(_STALE_TRIES):
        try:
            return action()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return action()


def _remove_tree(place: Path) -> None:
    """Remove a folder; what of it is open on this host keeps it there, with its note, for a later collection."""
    try:
        remove_tree(place)
    except OSError as error:
        ghosts_only = all(
            name.startswith(_GHOST) or name == RECORD_NAME
            for _, _, names in os.walk(place)
            for name in names
        )
        if error.errno not in (errno.ENOTEMPTY, errno.EBUSY) or not ghosts_only:
            raise
