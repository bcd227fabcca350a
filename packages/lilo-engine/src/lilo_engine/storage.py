"""Storage: the medium behind a folder of checkpoints: the one that is named, else a plain directory.

Every process that publishes or reads checkpoints opens them here (front, trainer ranks), so that all agree.

    NAME, modal://NAME      a provider's volume, mounted where the folder lies
    shared://               the folder itself, which several hosts mount (NFS, Lustre)
    s3://..., gs://...      an object store that fsspec reaches; the folder is where files wait to be sent
    emulator:///FOLDER      lilo-volume's emulator of a volume with a view per container, for trying several hosts on one
                            machine; `MODAL_TASK_ID` says which container a process is in
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

from lilo_volume import FsspecVolume, LocalVolume, SharedVolume, Volume
from lilo_volume.config import node_id
from lilo_volume.errors import InvalidPath
from lilo_volume.volumes.modal import ModalVolume

from lilo_engine.config import checkpoint_volume_name


def open_checkpoints(root: Path) -> Volume:
    """The published checkpoints below `root`; `LILO_CHECKPOINT_VOLUME` names the medium, as above.

    Raises:
        VolumeUnavailable: a medium is named, but what it needs is not installed, or nothing is mounted.
        InvalidPath: what is named is no medium.
    """
    return open_folder(checkpoint_volume_name(), root)


def open_folder(volume: str | None, root: Path) -> Volume:
    """The folder `root` on the medium `volume`, as a volume of its own; made if missing.

    A provider's volume is mounted at the folder that `root` is a direct child of.

    Raises:
        VolumeUnavailable, InvalidPath: see `open_checkpoints`.
    """
    root.mkdir(parents=True, exist_ok=True)
    if volume is None:
        return LocalVolume(root)
    scheme, separator, rest = volume.partition("://")
    match scheme if separator else "modal":
        case "modal":
            return ModalVolume(rest or volume, root, sub_path=root.name)
        case "shared":
            if rest:
                raise InvalidPath(
                    f"{volume!r}: expected shared:// alone; the folder is that of the checkpoints"
                )
            return SharedVolume(root)
        case "emulator":
            return _emulated(volume)
        case _:
            return FsspecVolume(volume, root)


def _emulated(url: str) -> Volume:
    """This container's view of an emulated volume; `?commit_reload=on` and the like are its modes."""
    parts = urlsplit(url)
    if parts.netloc or not parts.path.startswith("/"):
        raise InvalidPath(f"{url!r}: expected emulator:///ABSOLUTE/FOLDER")
    # Not at the top: a server that emulates nothing need not load it.
    found: Any = importlib.import_module("lilo_volume.testing.emulator")
    try:
        modes = found.Modes(**dict(parse_qsl(parts.query)))
    except TypeError as error:
        raise InvalidPath(f"{url!r}: {error}") from error
    emulator = found.Emulator(Path(parts.path), modes=modes, shared=True)
    return cast("Volume", emulator.volume(emulator.attach(node_id())))
