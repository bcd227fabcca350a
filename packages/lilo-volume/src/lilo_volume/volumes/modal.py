"""ModalVolume: a Modal Volume that this container mounts. Needs the extra `modal`, which is imported when it is used.

    mount (this container's view)  --commit-->  committed state  --reload-->  mount
    server-side calls (list, read, copy, remove) act on the committed state alone, from anywhere

Facts this relies on (client 1.6): `commit` may reload in the same call if the server says so, and then raises though
the data is published; `reload` is refused while a file is open or a process stands in the mount; during a reload the
mount looks empty; an error of a call proves nothing about whether it was applied. Background commits may publish any
file at any moment. There is no rename on the server, no lock, no compare-and-swap.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lilo_volume.errors import FileMissing, InvalidPath, VolumeUnavailable
from lilo_volume.locks import exclusive_file
from lilo_volume.naming import check_relative
from lilo_volume.volume import Entry
from lilo_volume.volumes.local import LocalVolume
from lilo_volume.volumes.modal_errors import translating
from lilo_volume.volumes.modal_store import ModalStore, named_volume
from lilo_volume.volumes.staged import StagedVolume

if TYPE_CHECKING:
    import modal

_RELOAD_TIMEOUT_S = 600.0
"""For another process of this container that reloads."""


class ModalVolume:
    """A mounted Modal Volume as a `Volume` (and `Streaming`). One per container; its processes may each make one."""

    def __init__(
        self, volume: modal.Volume | str, mount: Path | str, *, sub_path: str | None = None
    ) -> None:
        """Use `volume` (a handle, or its name), which this container mounts at `mount`.

        Args:
            volume: the handle, or the name of a volume that exists; it is never made here.
            mount: where the function mounts it.
            sub_path: what part of it is mounted, if `with_mount_options(sub_path=...)` was used.

        Raises:
            VolumeUnavailable: modal is not installed, or `mount` is no folder: it is not mounted here.
        """
        if not Path(mount).is_dir():
            raise VolumeUnavailable(
                f"{str(mount)!r} is no folder; expected the path at which this container mounts the volume"
            )
        handle = named_volume(volume) if isinstance(volume, str) else volume
        self._volume = handle
        self._store = ModalStore(handle, sub_path=sub_path)
        self._view = LocalVolume(mount)

    @property
    def root(self) -> Path:
        """The mount."""
        return self._view.root

    def local_path(self, path: str) -> Path:
        """The place of `path` in the mount."""
        return self._view.local_path(path)

    def commit(self) -> None:
        """Publish what this container changed. It may take 90 s to fail: the client tries again for that long.

        Raises:
            VolumeBusy: the server made it reload, and a file is open; the data is published all the same.
            VolumeConflict, VolumeFull, VolumeUnavailable: it may have been applied; look before deciding.
        """
        with translating("commit"):
            self._volume.commit()

    def reload(self) -> None:
        """Bring the mount up to the committed state. One process of the container at a time: it looks empty meanwhile.

        Raises:
            VolumeBusy: a file is open, or a process stands in the mount; the text says which, where it is known.
        """
        with self._container_wide("reload", _RELOAD_TIMEOUT_S), translating("reload"):
            self._volume.reload()

    @contextlib.contextmanager
    def exclusive(self, path: str, *, timeout_s: float) -> Generator[None]:
        """Hold off other publishers of `path` in this container; between containers the medium has no lock.

        Raises:
            LockTimeout: the holder did not finish in time.
        """
        with self._container_wide(check_relative(path), timeout_s):
            yield

    def list_committed(self, prefix: str) -> list[Entry]:
        """All files below `prefix` in the committed state, sorted by path."""
        found = self._store.entries(check_relative(prefix) if prefix else "")
        return sorted(found, key=lambda entry: entry.path)

    def read_committed(self, path: str) -> bytes:
        """The bytes of one committed file, in memory: for small ones.

        Raises:
            FileMissing: there is no such file.
        """
        return b"".join(self.blocks_committed(path))

    def blocks_committed(self, path: str) -> Iterator[bytes]:
        """The bytes of one committed file, in blocks; never through the mount, where it would hold a file open."""
        return self._store.blocks(check_relative(path))

    def fetch(self, paths: Sequence[str]) -> None:
        """Nothing to do: `reload` has brought them."""

    def copy_committed(self, sources: Sequence[str], folder: str) -> None:
        """Copy committed files into a committed folder, on the server; the mount does not show it until a reload.

        Raises:
            FileMissing: a source is not there; what came before it may have been copied.
        """
        self._store.copy_into([check_relative(path) for path in sources], check_relative(folder))

    def remove_committed(self, path: str, *, recursive: bool = False) -> None:
        """Remove from the committed state, and from the mount, or the next commit might bring it back.

        Raises:
            FileMissing: there is nothing at `path` in the committed state.
        """
        self._store.remove(check_relative(path), recursive=recursive)
        with contextlib.suppress(FileMissing, InvalidPath):
            self._view.remove_committed(path, recursive=recursive)

    @contextlib.contextmanager
    def _container_wide(self, name: str, timeout_s: float) -> Generator[None]:
        """A lock outside the mount: a lock file in it would be committed, and open while it reloads."""
        folder = Path(tempfile.gettempdir()) / "lilo-volume-locks"
        folder.mkdir(exist_ok=True)
        with exclusive_file(folder, f"{self.root}//{name}", timeout_s=timeout_s):
            yield


def unmounted(
    volume: modal.Volume | str, staging: Path | str, *, workers: int | None = None
) -> StagedVolume:
    """A Modal Volume from a place that does not mount it, as a laptop: written through a staging folder.

    Raises:
        VolumeUnavailable: modal is not installed.
    """
    handle = named_volume(volume) if isinstance(volume, str) else volume
    return StagedVolume(ModalStore(handle), Path(staging), workers=workers)
