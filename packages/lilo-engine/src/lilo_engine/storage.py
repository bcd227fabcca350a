"""Storage: the medium behind a folder of checkpoints: the provider's volume where one is named, else a plain directory.

Every process that publishes or reads checkpoints opens them here (front, trainer ranks), so that all agree.
"""

from __future__ import annotations

from pathlib import Path

from lilo_volume import LocalVolume, Volume
from lilo_volume.volumes.modal import ModalVolume

from lilo_engine.config import checkpoint_volume_name


def open_checkpoints(root: Path) -> Volume:
    """The published checkpoints below `root`; `LILO_CHECKPOINT_VOLUME` names the volume that is mounted there.

    Raises:
        VolumeUnavailable: a volume is named, but its client is not installed or nothing is mounted.
    """
    return open_folder(checkpoint_volume_name(), root)


def open_folder(volume: str | None, root: Path) -> Volume:
    """The folder `root`, a direct child of where `volume` is mounted, as a volume of its own; made if missing.

    Raises:
        VolumeUnavailable: see `open_checkpoints`.
    """
    root.mkdir(parents=True, exist_ok=True)
    if volume is None:
        return LocalVolume(root)
    return ModalVolume(volume, root, sub_path=root.name)
