"""The committed state of a Modal Volume, by the calls that work from anywhere. Not the mount: see `modal.py`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lilo_volume.errors import FileMissing, InvalidPath, VolumeUnavailable
from lilo_volume.volume import Entry
from lilo_volume.volumes.modal_errors import translating

if TYPE_CHECKING:
    import modal

_FILE = 1
"""`FileEntryType.FILE` of the client; links and pipes are no files of a checkpoint."""


def named_volume(name: str) -> modal.Volume:
    """The volume of this name; never made if it is not there, which the first call then says.

    Raises:
        VolumeUnavailable: modal is not installed.
    """
    try:
        client = importlib.import_module("modal")
    except ImportError as error:
        raise VolumeUnavailable(
            f"the volume {name!r} needs the Modal client; install lilo-volume[modal]"
        ) from error
    with translating(f"volume {name!r}"):
        return client.Volume.from_name(name)


class ModalStore:
    """Server-side calls on one volume, as a `Store`."""

    def __init__(self, volume: modal.Volume, *, sub_path: str | None = None) -> None:
        """Use the volume, or only what is below `sub_path` of it."""
        # The client builds its methods at run time: there is nothing for a type checker to see.
        self._volume = cast(Any, volume)
        self._prefix = f"{sub_path.strip('/')}/" if sub_path and sub_path.strip("/") else ""

    def entries(self, prefix: str) -> list[Entry]:
        """All regular files below the prefix.

        Raises:
            FileMissing: there is no such volume.
        """
        start = f"{self._prefix}{prefix}".rstrip("/")
        found: list[Entry] = []
        with translating("volume"):
            self._volume.hydrate()  # a volume that is not there is an error; a folder that is not is empty
        try:
            with translating(prefix):
                for item in self._volume.iterdir(f"/{start}", recursive=True):
                    path = str(item.path).lstrip("/")
                    inside = not start or path.startswith(f"{start}/")
                    if inside and int(item.type) == _FILE:
                        relative = path.removeprefix(self._prefix)
                        found.append(Entry(path=relative, size_bytes=int(item.size)))
        except FileMissing:
            return []
        return found

    def blocks(self, path: str) -> Iterator[bytes]:
        """The bytes of one file, in blocks of 8 MiB, a few of which are asked for ahead."""
        with translating(path):
            yield from self._volume.read_file(f"{self._prefix}{path}")

    def send(self, place: Path, path: str) -> None:
        """Upload one file, in place of what is there; blocks that the server has are not sent."""
        if not place.is_file():
            raise FileNotFoundError(place)
        with translating(path), self._volume.batch_upload(force=True) as batch:
            batch.put_file(str(place), f"/{self._prefix}{path}")

    def copy(self, source: str, path: str) -> None:
        """Copy one file. A folder at `path` would take it in, as `cp` does; there is none in a checkpoint."""
        with translating(source):
            self._volume.copy_files([f"{self._prefix}{source}"], f"{self._prefix}{path}")

    def copy_into(self, sources: Sequence[str], folder: str) -> None:
        """Copy files into a folder that may not be there yet, in as few calls as that takes.

        `cp` of several files needs the folder; the first one makes it.
        """
        rest = list(sources)
        if rest and not self.entries(folder):
            first = rest.pop(0)
            self.copy(first, f"{folder}/{first.rpartition('/')[2]}")
        if rest:
            with translating(", ".join(rest[:3])):
                self._volume.copy_files(
                    [f"{self._prefix}{path}" for path in rest], f"{self._prefix}{folder}"
                )

    def remove(self, path: str, *, recursive: bool) -> None:
        """Remove a file, or a folder with `recursive`."""
        if not recursive and self.entries(path):
            raise InvalidPath(f"{path!r} is a folder; pass recursive=True to remove it")
        with translating(path):
            self._volume.remove_file(f"{self._prefix}{path}", recursive=recursive)
