"""EmulatedVolume: a container's side of an emulated volume as a `Volume`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from lilo_volume.errors import VolumeUnavailable
from lilo_volume.locks import exclusive_file
from lilo_volume.naming import check_relative
from lilo_volume.testing.emulator.container import Container
from lilo_volume.testing.emulator.server import EmulatedFault, Server
from lilo_volume.volume import Entry


class EmulatedVolume:
    """Local paths are the container's view; `..._committed` act on the server alone (R12)."""

    def __init__(self, container: Container, *, evict: Callable[[], None], version: int) -> None:
        """Made by `Emulator.volume`."""
        self.container = container
        self._evict = evict
        self._version = version
        self._root = container.root
        self._locks = container.root.parent / "locks"
        self._locks.mkdir(exist_ok=True)

    @property
    def root(self) -> Path:
        """Where the view is mounted."""
        return self._root

    def local_path(self, path: str) -> Path:
        """The place of `path` in the view.

        Raises:
            InvalidPath: it would be outside.
        """
        return self._root / check_relative(path)

    def commit(self) -> None:
        """Make the container's changes part of the committed state; see `Container.commit`."""
        self.container.commit()
        self._evict()

    def reload(self) -> None:
        """Bring the container's view up to the committed state; see `Container.reload`."""
        self.container.reload()

    def exclusive(self, path: str, *, timeout_s: float) -> AbstractContextManager[None]:
        """Hold off other publishers of `path` in this container; the medium has no lock between containers.

        Raises:
            LockTimeout: the holder did not finish in time.
        """
        return exclusive_file(self._locks, check_relative(path), timeout_s=timeout_s)

    def list_committed(self, prefix: str) -> list[Entry]:
        """All files below `prefix` in the committed state."""
        with self._call("list", prefix):
            viewer = self.container.task_id
            return self.container.server.list(prefix, viewer=viewer, lag_s=self.container.lag_s)

    def read_committed(self, path: str) -> bytes:
        """The bytes of one committed file.

        Raises:
            FileMissing: there is none.
        """
        with self._call("read", path):
            viewer = self.container.task_id
            return self.container.server.read(path, viewer=viewer, lag_s=self.container.lag_s)

    def copy_committed(self, sources: Sequence[str], folder: str) -> None:
        """Copy committed files into a committed folder, as `cp` does (R13).

        Raises:
            FileMissing: a source is not there.
            InvalidPath: there is no such folder for several sources; one source becomes a file of that name.
        """
        with self._call("copy", " ".join([*sources, folder])) as stop_after:
            self.container.server.copy(sources, folder, stop_after=stop_after)

    def remove_committed(self, path: str, *, recursive: bool = False) -> None:
        """Remove from the committed state alone; views keep what they have (R14).

        Raises:
            FileMissing: there is nothing at `path`.
        """
        with self._call("remove", path):
            self.container.server.remove(path, recursive=recursive)

    @contextlib.contextmanager
    def _call(self, call: str, key: str) -> Generator[int | None]:
        """One call to the server, with the fault that is due; gives how many paths may be copied, if not all."""
        self.container.calls[call] += 1
        self.container.background()
        when, count = self.container.due(call, key)
        if when == "before" or (when == "mid" and call != "copy"):
            raise EmulatedFault(f"{call} {key}: no answer")
        yield count if when == "mid" else None
        self._evict()
        if when == "after":
            raise EmulatedFault(f"{call} {key}: no answer, after it was applied")


class OutsideVolume:
    """The volume as a client outside has it: the committed state, and no view (R19)."""

    def __init__(self, server: Server, nowhere: Path) -> None:
        """Made by `Emulator.outside`; `nowhere` is a folder that does not exist."""
        self._server = server
        self._nowhere = nowhere

    @property
    def root(self) -> Path:
        """Where a view would be."""
        return self._nowhere

    def local_path(self, path: str) -> Path:
        """Where `path` would be in a view."""
        return self._nowhere / check_relative(path)

    def commit(self) -> None:
        """Refused.

        Raises:
            VolumeUnavailable: always.
        """
        raise VolumeUnavailable("the volume is not mounted here: there is nothing to commit")

    def reload(self) -> None:
        """Nothing to do: there is no view."""

    @contextlib.contextmanager
    def exclusive(self, path: str, *, timeout_s: float) -> Generator[None]:
        """Holds nobody off."""
        check_relative(path)
        yield

    def list_committed(self, prefix: str) -> list[Entry]:
        """All files below `prefix` in the committed state."""
        return self._server.list(prefix)

    def read_committed(self, path: str) -> bytes:
        """The bytes of one committed file."""
        return self._server.read(path)

    def copy_committed(self, sources: Sequence[str], folder: str) -> None:
        """Copy committed files, as `cp` does."""
        self._server.copy(sources, folder)

    def remove_committed(self, path: str, *, recursive: bool = False) -> None:
        """Remove from the committed state."""
        self._server.remove(path, recursive=recursive)
