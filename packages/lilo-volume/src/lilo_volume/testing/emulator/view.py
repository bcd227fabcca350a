"""View: the files of one container on disk, and what of them differs from what it last had in common with the server.

A view is a plain folder that any process may use with plain file calls. A file counts as changed when its inode,
size or time is not what was noted; times are set to an odd value when noted, so that a later write always shows,
however coarse the clock of the file system is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from typing import NamedTuple

_ODD_NS = 123_457
_MILLISECOND_NS = 1_000_000


class Seen(NamedTuple):
    """One path of a view as it lies on disk."""

    kind: str
    """`f` file, `l` link."""
    size: int
    mtime_ns: int
    inode: int
    links: int


def look(root: str) -> dict[str, Seen]:
    """Every file and link below `root`."""
    return dict(_walk(root, ""))


def _walk(folder: str, prefix: str) -> Iterator[tuple[str, Seen]]:
    try:
        with os.scandir(folder) as found:
            items = list(found)
    except (FileNotFoundError, NotADirectoryError):
        return
    for item in items:
        path = f"{prefix}{item.name}"
        if item.is_dir(follow_symlinks=False):
            yield from _walk(item.path, f"{path}/")
        else:
            with contextlib.suppress(FileNotFoundError):
                yield path, _seen(item.stat(follow_symlinks=False))


def _seen(state: os.stat_result) -> Seen:
    kind = "l" if stat.S_ISLNK(state.st_mode) else "f"
    return Seen(kind, state.st_size, state.st_mtime_ns, state.st_ino, state.st_nlink)


def note(root: str, path: str) -> list[int | str] | None:
    """Mark a path as unchanged from here on; returns what identifies it, or None if it is gone."""
    place = f"{root}/{path}"
    try:
        state = os.lstat(place)
        odd = state.st_mtime_ns // _MILLISECOND_NS * _MILLISECOND_NS + _ODD_NS
        os.utime(place, ns=(odd, odd), follow_symlinks=False)
        return identity(_seen(os.lstat(place)))
    except FileNotFoundError:
        return None


def identity(seen: Seen) -> list[int | str]:
    """What tells a changed path from an unchanged one."""
    return [seen.kind, seen.size, seen.mtime_ns, seen.inode]


def read(root: str, path: str, seen: Seen) -> bytes:
    """The bytes of a file, or the target of a link."""
    place = f"{root}/{path}"
    if seen.kind == "l":
        return os.fsencode(os.readlink(place))
    with open(place, "rb") as file:
        return file.read()


def write(root: str, path: str, kind: str, data: bytes) -> None:
    """Put a file or link in place of whatever is there."""
    place = f"{root}/{path}"
    remove(root, path)
    try:
        os.makedirs(os.path.dirname(place), exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        _clear_way(root, path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
    if kind == "l":
        os.symlink(os.fsdecode(data), place)
    else:
        with open(place, "wb") as file:
            file.write(data)


def _clear_way(root: str, path: str) -> None:
    """A file where a folder must be goes."""
    parts = path.split("/")[:-1]
    for length in range(1, len(parts) + 1):
        place = "/".join([root, *parts[:length]])
        if os.path.lexists(place) and not os.path.isdir(place):
            os.unlink(place)


def remove(root: str, path: str) -> None:
    """Remove whatever is at `path`."""
    place = f"{root}/{path}"
    try:
        os.unlink(place)
    except (IsADirectoryError, PermissionError):
        shutil.rmtree(place, ignore_errors=True)
    except (FileNotFoundError, NotADirectoryError):
        pass


def prune(root: str) -> None:
    """Remove folders without files: only paths live on a server."""
    for folder, _, _ in os.walk(root, topdown=False):
        if folder != root:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
