"""Staged: a volume whose files are written to a local folder and sent to a store by `commit`.

    view (staging folder)  --commit: what changed-->  store (committed state)
                           <--fetch: what is asked--

Not for media that are mounted. The folder is this node's view: all ranks of a node share it, nodes do not. What was
sent or fetched is noted beside it, so that a commit by any process sends only what changed since, and never brings
back what others removed. A file that is removed from the folder stays in the store: only `remove_committed` removes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from lilo_volume.errors import VolumeUnavailable
from lilo_volume.locks import exclusive_file
from lilo_volume.naming import check_relative
from lilo_volume.transfer import each
from lilo_volume.volume import Entry
from lilo_volume.volumes.local import LOCKS, LocalVolume

_NOTES = ".lilo-sent"

_FETCH_TIMEOUT_S = 1800.0
"""For another process of this node that fetches the same file: 100 GB at 60 MB/s."""


class Store(Protocol):
    """The committed state of a staged volume. Paths are those of the volume; errors are lilo-volume's."""

    def entries(self, prefix: str) -> list[Entry]:
        """All files below the folder `prefix` ("" = everything), in any order; none is an empty list."""
        ...

    def blocks(self, path: str) -> Iterator[bytes]:
        """The bytes of one file, in blocks of bounded size.

        Raises:
            FileMissing: there is no such file.
        """
        ...

    def send(self, place: Path, path: str) -> None:
        """Store one local file, in place of what is at `path`."""
        ...

    def copy(self, source: str, path: str) -> None:
        """Copy one stored file, without moving its bytes through here where the store can do that.

        Raises:
            FileMissing: there is no such file.
        """
        ...

    def remove(self, path: str, *, recursive: bool) -> None:
        """Remove a file, or a folder with `recursive`.

        Raises:
            FileMissing: there is nothing; InvalidPath: it is a folder and `recursive` was not given.
        """
        ...


class StagedVolume:
    """A store and a staging folder as a `Volume` (and `Streaming`). Any number of threads may use it."""

    def __init__(self, store: Store, staging: Path, *, workers: int | None = None) -> None:
        """Use `staging` (made if it is not there) as this node's view; `workers` threads move files."""
        self._store = store
        self._view = LocalVolume(staging)
        self._staging = self._view.root
        self._workers = workers
        self._commit_lock = threading.Lock()

    @property
    def root(self) -> Path:
        """The staging folder, absolute."""
        return self._staging

    def local_path(self, path: str) -> Path:
        """The place of `path` in the staging folder."""
        return self._view.local_path(path)

    def commit(self) -> None:
        """Send what changed in the staging folder since it was sent last.

        Raises:
            VolumeUnavailable, VolumeFull: some of it may have been sent.
        """
        with self._commit_lock:
            changed = [path for path in self._files() if self._note(path) != self._state(path)]
            each(changed, self._send, workers=self._workers)

    def reload(self) -> None:
        """Nothing to fetch: listings are of the store, and files are fetched when they are chosen."""

    @contextlib.contextmanager
    def exclusive(self, path: str, *, timeout_s: float) -> Generator[None]:
        """Hold off other publishers of `path` that share this staging folder; a store has no locks.

        Raises:
            LockTimeout: the holder did not finish in time.
        """
        folder = self._view.root / LOCKS
        folder.mkdir(exist_ok=True)
        with exclusive_file(folder, check_relative(path), timeout_s=timeout_s):
            yield

    def list_committed(self, prefix: str) -> list[Entry]:
        """All files below `prefix` in the store, sorted by path."""
        found = self._store.entries(check_relative(prefix) if prefix else "")
        return sorted(found, key=lambda entry: entry.path)

    def read_committed(self, path: str) -> bytes:
        """The bytes of one stored file, in memory: for small ones.

        Raises:
            FileMissing: there is no such file.
        """
        return b"".join(self.blocks_committed(path))

    def blocks_committed(self, path: str) -> Iterator[bytes]:
        """The bytes of one stored file, in blocks."""
        return self._store.blocks(check_relative(path))

    def fetch(self, paths: Sequence[str]) -> None:
        """Bring stored files into the staging folder; each appears whole. What is there already is kept.

        Raises:
            FileMissing: one of them is not stored.
        """
        absent = [path for path in paths if not self.local_path(path).exists()]
        each(absent, self._fetch, workers=self._workers)

    def copy_committed(self, sources: Sequence[str], folder: str) -> None:
        """Copy stored files into a folder of the store.

        Raises:
            FileMissing: a source is not there; what came before it is copied.
        """
        check_relative(folder)
        for source in sources:
            name = check_relative(source).rpartition("/")[2]
            self._store.copy(source, f"{folder}/{name}")

    def remove_committed(self, path: str, *, recursive: bool = False) -> None:
        """Remove from the store, and from the staging folder, or the next commit would bring it back.

        Raises:
            FileMissing: there is nothing at `path` in the store.
        """
        self._store.remove(check_relative(path), recursive=recursive)
        for place in (self._staging / path, self._staging / _NOTES / path):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                shutil.rmtree(place) if place.is_dir() else place.unlink()

    def _files(self) -> list[str]:
        """What is in the staging folder, without our own notes and locks."""
        entries = self._view.list_committed("")
        return [
            entry.path
            for entry in entries
            if not entry.path.startswith(f"{_NOTES}/") and not _is_part(entry.path)
        ]

    def _send(self, path: str) -> None:
        try:
            state = self._state(path)  # before the bytes: a later change is then sent again
            self._store.send(self._staging / path, path)
        except FileNotFoundError:
            return  # removed since it was listed: there is nothing to publish
        self._write_note(path, state)

    def _fetch(self, path: str) -> None:
        # Ranks of one node ask for the same files at once.
        with self.exclusive(f"fetch/{path}", timeout_s=_FETCH_TIMEOUT_S):
            if not self.local_path(path).exists():
                self._fetch_alone(path)

    def _fetch_alone(self, path: str) -> None:
        place = self.local_path(path)
        part = place.with_name(f"{place.name}.{os.urandom(4).hex()}.fetching")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                for block in self._store.blocks(path):
                    file.write(block)
            os.replace(part, place)
        except OSError as error:
            raise VolumeUnavailable(f"{path!r} cannot be fetched: {error}") from error
        finally:
            part.unlink(missing_ok=True)
        self._write_note(path, self._state(path))

    def _state(self, path: str) -> str:
        """Changes whenever the file is written."""
        found = (self._staging / path).stat()
        return f"{found.st_size} {found.st_mtime_ns} {found.st_ino}"

    def _note(self, path: str) -> str | None:
        try:
            return (self._staging / _NOTES / path).read_text(encoding="ascii")
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _write_note(self, path: str, state: str) -> None:
        note = self._staging / _NOTES / path
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(state, encoding="ascii")


def _is_part(path: str) -> bool:
    """Whether it is a file that is just being fetched, or a manifest before it is renamed."""
    return path.endswith((".fetching", "manifest.json.tmp"))
