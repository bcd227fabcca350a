"""Volume: the medium a checkpoint is written to, and what may be believed about it.

A medium may show each container its own view: writes are private until `commit`, and others' commits appear only
after `reload`. Server-side calls act on the committed state alone and never on anybody's view. A plain local
directory is the simple case where all of these coincide.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file in the committed state."""

    path: str
    """Relative to the root, with forward slashes."""
    size_bytes: int


class Volume(Protocol):
    """All paths are relative to the root, with forward slashes, never absolute, never with `..`."""

    @property
    def root(self) -> Path:
        """Where this container's view is mounted."""
        ...

    def local_path(self, path: str) -> Path:
        """The place of `path` in this container's view, for reading and writing files."""
        ...

    def commit(self) -> None:
        """Make this container's changes part of the committed state.

        Raises:
            VolumeUnavailable: it may still have been applied; look before deciding.
        """
        ...

    def reload(self) -> None:
        """Bring this container's view up to the committed state; refused while a file is open.

        Raises:
            VolumeBusy: with the open path where the medium tells it.
        """
        ...

    def exclusive(self, path: str, *, timeout_s: float) -> AbstractContextManager[None]:
        """Hold off other publishers of `path`, as far as the medium can.

        That may be on all of it, on this machine, or only in this process. Never needed for old-or-new; it
        makes two publishers of one name take turns.

        Raises:
            LockTimeout: the holder did not finish in time.
        """
        ...

    def list_committed(self, prefix: str) -> list[Entry]:
        """All files below `prefix` in the committed state, recursively; empty when there are none."""
        ...

    def read_committed(self, path: str) -> bytes:
        """The bytes of one committed file.

        Raises:
            FileMissing: there is no such file.
        """
        ...

    def copy_committed(self, sources: Sequence[str], folder: str) -> None:
        """Copy committed files into a committed folder, server-side."""
        ...

    def remove_committed(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file or folder from the committed state (and from this view, where they are one).

        Raises:
            FileMissing: there is nothing at `path`.
        """
        ...
