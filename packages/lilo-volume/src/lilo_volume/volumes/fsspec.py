"""FsspecVolume: an object store, or whatever else fsspec reaches, as a volume. Needs the extra `fsspec`.

Not a mount: files are written to a staging folder of this node and sent by `commit`; readers fetch what they chose.
One object is replaced whole or not at all on the stores this is for (S3, GCS, Azure); nothing here relies on
renames, on listings that are cached, or on folders being there.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from lilo_volume.errors import (
    FileMissing,
    InvalidPath,
    VolumeError,
    VolumeFull,
    VolumeUnavailable,
)
from lilo_volume.volume import Entry
from lilo_volume.volumes.staged import StagedVolume

_BLOCK_BYTES = 8 * 1024 * 1024
"""One request each: smaller ones are bound by their latency."""


class FsspecVolume(StagedVolume):
    """A folder of a store that fsspec reaches, as `s3://bucket/prefix`."""

    def __init__(
        self,
        url: str,
        staging: Path | str,
        *,
        options: dict[str, Any] | None = None,
        workers: int | None = None,
    ) -> None:
        """Use the folder at `url`; `options` go to the file system, as endpoint and credentials.

        Raises:
            VolumeUnavailable: fsspec, or what it needs for this kind of url, is not installed.
        """
        self.url = url
        super().__init__(FsspecStore(url, options or {}), Path(staging), workers=workers)


class FsspecStore:
    """The committed state: objects below one prefix."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        """Open the file system of `url`; the store itself is not asked yet."""
        try:
            core = importlib.import_module("fsspec.core")
            # A listing that was cached is not the committed state.
            system, path = core.url_to_fs(url, use_listings_cache=False, **options)
        except (ImportError, ValueError) as error:
            raise VolumeUnavailable(
                f"{url!r} cannot be opened: {error}; install lilo-volume[fsspec] and what this kind of url needs"
            ) from error
        self._system: Any = system
        self._root = str(path).rstrip("/")

    def entries(self, prefix: str) -> list[Entry]:
        """All objects below the prefix."""
        start = self._place(prefix) if prefix else self._root
        with _translating(prefix):
            self._system.invalidate_cache()
            found: dict[str, dict[str, Any]] = self._system.find(start, detail=True)
        below = self._root.lstrip("/")
        entries: list[Entry] = []
        for place, item in found.items():
            path = place.lstrip("/").removeprefix(below).lstrip("/")
            # `find` of a file is the file; of `a` some stores also list `ab`.
            if not prefix or path.startswith(f"{prefix}/"):
                entries.append(Entry(path=path, size_bytes=int(item["size"])))
        return entries

    def blocks(self, path: str) -> Iterator[bytes]:
        """The bytes of one object, one request per block."""
        with (
            _translating(path),
            self._system.open(
                self._place(path), "rb", block_size=_BLOCK_BYTES, cache_type="none"
            ) as file,
        ):
            while block := file.read(_BLOCK_BYTES):
                yield block

    def send(self, place: Path, path: str) -> None:
        """Store one file; large ones go in parts of bounded size."""
        target = self._place(path)
        if not place.is_file():
            raise FileNotFoundError(place)
        with _translating(path):
            self._system.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._system.put_file(str(place), target)

    def copy(self, source: str, path: str) -> None:
        """Copy one object inside the store."""
        with _translating(source):
            if not self._system.isfile(self._place(source)):
                raise FileMissing(f"there is no file {source!r} in the store")
            self._system.makedirs(self._place(path).rpartition("/")[0], exist_ok=True)
            self._system.cp_file(self._place(source), self._place(path))

    def remove(self, path: str, *, recursive: bool) -> None:
        """Remove an object, or all below a prefix."""
        below = self.entries(path)
        with _translating(path):
            if below and not recursive:
                raise InvalidPath(f"{path!r} is a folder; pass recursive=True to remove it")
            if not below and not self._system.isfile(self._place(path)):
                raise FileMissing(f"there is nothing at {path!r} in the store")
            self._system.rm(self._place(path), recursive=bool(below))

    def _place(self, path: str) -> str:
        return f"{self._root}/{path}"


@contextlib.contextmanager
def _translating(path: str) -> Generator[None]:
    """Turn what any file system behind fsspec may raise into ours; each has errors of its own."""
    try:
        yield
    except VolumeError:
        raise
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise FileMissing(f"there is no file {path!r} in the store") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise VolumeFull(f"the store has no room left: {error}") from error
        raise VolumeUnavailable(f"the store cannot be used: {error}") from error
    except Exception as error:
        raise VolumeUnavailable(
            f"the store cannot be used: {type(error).__name__}: {error}"
        ) from error
