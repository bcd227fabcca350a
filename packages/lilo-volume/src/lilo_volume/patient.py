"""Patient: a volume whose server-side calls are tried again when the medium is busy or does not answer.

Call by call, so that a step of many calls does not start over for one of them. All of them are safe to repeat:
a removal or copy that was applied, although it failed, is found done. Commits are tried again by their steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lilo_volume.errors import FileMissing, VolumeBusy, VolumeUnavailable
from lilo_volume.steps import FIRST_DELAY_S, TRIES
from lilo_volume.volume import Entry, Volume

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PatientVolume:
    """A `Volume` around another one."""

    volume: Volume

    @property
    def root(self) -> Path:
        """Where this container's view is mounted."""
        return self.volume.root

    def local_path(self, path: str) -> Path:
        """The place of `path` in this container's view."""
        return self.volume.local_path(path)

    def commit(self) -> None:
        """Once: see `Steps.retried`."""
        self.volume.commit()

    def reload(self) -> None:
        """Once; writers never reload."""
        self.volume.reload()

    def exclusive(self, path: str, *, timeout_s: float) -> AbstractContextManager[None]:
        """Hold off other publishers of `path`."""
        return self.volume.exclusive(path, timeout_s=timeout_s)

    def list_committed(self, prefix: str) -> list[Entry]:
        """All files below `prefix` in the committed state."""
        return _patiently(lambda: self.volume.list_committed(prefix))

    def read_committed(self, path: str) -> bytes:
        """The bytes of one committed file."""
        return _patiently(lambda: self.volume.read_committed(path))

    def copy_committed(self, sources: Sequence[str], folder: str) -> None:
        """Copy committed files into a committed folder."""
        _patiently(lambda: self.volume.copy_committed(sources, folder))

    def remove_committed(self, path: str, *, recursive: bool = False) -> None:
        """Remove from the committed state.

        Raises:
            FileMissing: there was nothing at the first try; later, it was removed by an earlier one.
        """
        failed: list[bool] = []

        def remove() -> None:
            try:
                self.volume.remove_committed(path, recursive=recursive)
            except FileMissing:
                if not failed:
                    raise
            except (VolumeBusy, VolumeUnavailable):
                failed.append(True)
                raise

        _patiently(remove)


def _patiently(call: Callable[[], T]) -> T:
    for number in range(TRIES - 1):
        try:
            return call()
        except (VolumeBusy, VolumeUnavailable):
            time.sleep(FIRST_DELAY_S * (number + 1))
    return call()
