"""CaptureFiles: captures that wait for their publication as files on the checkpoint volume, not in the host's memory.

    .captures/<time>-<random>/OWNER                 who they belong to
    .captures/<time>-<random>/<capture id>.safetensors

Every rank has a folder of its own in its view. The files are no checkpoints: nobody looks for any below a name that
begins with a dot, and nobody but their writer reads them. What a dead owner left is swept when the next trainer on
this volume starts: at once where it can be known to be dead, else by age.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Mapping

import torch
from lilo_engine.control.process_identity import is_dead, process_identity
from lilo_volume import Volume, VolumeError
from safetensors.torch import load, save_file

CAPTURES = ".captures"
"""Folder of all of them, below the root of the volume."""
ORPHAN_AGE_S = 24 * 3600.0
"""Captures live for minutes; one of another machine is swept when no publication could still want it."""
_OWNER = "OWNER"
_SUFFIX = ".safetensors"
_log = logging.getLogger(__name__)


class CaptureFiles:
    """One rank's captures on the volume; used by one thread at a time for each capture."""

    def __init__(self, volume: Volume) -> None:
        """Make the rank's folder."""
        self._volume = volume
        self._folder = f"{CAPTURES}/{time.time_ns() // 1_000_000}-{os.urandom(6).hex()}"
        self._make()

    def put(self, capture_id: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a capture; it is private to this view until the volume commits for some other reason.

        Raises:
            OSError: there is no room, or the volume is gone.
        """
        self._make()
        place = self._volume.local_path(self._path(capture_id))
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        try:
            save_file(contiguous, place)
        except Exception as error:
            place.unlink(missing_ok=True)
            raise OSError(f"the capture could not be written to {place}: {error}") from error

    def settle(self) -> None:
        """To be called before this view is brought up to date, which may take away what was never committed."""
        with contextlib.suppress(VolumeError):  # one that raises may have been applied
            self._volume.commit()

    def take(self, capture_id: str) -> dict[str, torch.Tensor]:
        """Read a capture and remove it from this view, so that no commit of its publication carries it along.

        Raises:
            OSError: it is gone, or cannot be read.
        """
        place = self._volume.local_path(self._path(capture_id))
        try:
            # Not `load_file`: that maps the file, which counts as open for as long as a tensor of it lives.
            return load(place.read_bytes())
        except Exception as error:
            raise OSError(f"the capture in {place} cannot be read: {error}") from error
        finally:
            place.unlink(missing_ok=True)

    def forget(self, capture_id: str) -> None:
        """Remove what the volume has committed of a capture on its own; never fails."""
        with contextlib.suppress(VolumeError, OSError):
            self._volume.remove_committed(self._path(capture_id))

    def close(self) -> None:
        """Remove all that is left of this rank's; never fails."""
        _remove(self._volume, self._folder)

    def _make(self) -> None:
        """The folder and whose it is; a view that was brought up to date may have lost both."""
        place = self._volume.local_path(self._folder)
        place.mkdir(parents=True, exist_ok=True)
        if not (place / _OWNER).exists():
            (place / _OWNER).write_text(process_identity(os.getpid()), encoding="utf-8")

    def _path(self, capture_id: str) -> str:
        return f"{self._folder}/{capture_id}{_SUFFIX}"


def sweep(volume: Volume, *, committed: bool, now_ms: int | None = None) -> list[str]:
    """Remove captures that nobody will publish any more, from this view and with `committed` for everybody.

    Returns the folders that were removed. Never fails: what stays is swept another time.
    """
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    gone: list[str] = []
    try:
        for folder in sorted(_in_view(volume) | (_committed(volume) if committed else set())):
            if _is_orphaned(volume, folder, now_ms):
                _remove(volume, folder, committed=committed)
                gone.append(folder)
    except (VolumeError, OSError) as error:
        _log.warning("captures of ended trainers are left for later: %s", error)
    if gone:
        _log.warning("removed what %d ended trainers had captured and not published", len(gone))
    return gone


def _is_orphaned(volume: Volume, folder: str, now_ms: int) -> bool:
    began = folder.rpartition("/")[2].partition("-")[0]
    if not began.isdecimal() or now_ms - int(began) > ORPHAN_AGE_S * 1000:
        return True
    try:
        owner = volume.local_path(f"{folder}/{_OWNER}").read_text("utf-8")
    except OSError:
        return False  # of another view, or it is just being made
    return owner.count(" ") == 2 and is_dead(owner)


def _in_view(volume: Volume) -> set[str]:
    try:
        return {f"{CAPTURES}/{entry.name}" for entry in os.scandir(volume.local_path(CAPTURES))}
    except FileNotFoundError:
        return set()


def _committed(volume: Volume) -> set[str]:
    paths = (entry.path.split("/") for entry in volume.list_committed(CAPTURES))
    return {"/".join(parts[:2]) for parts in paths if len(parts) > 2}


def _remove(volume: Volume, folder: str, *, committed: bool = True) -> None:
    shutil.rmtree(volume.local_path(folder), ignore_errors=True)
    if committed:
        with contextlib.suppress(VolumeError):
            volume.remove_committed(folder, recursive=True)
