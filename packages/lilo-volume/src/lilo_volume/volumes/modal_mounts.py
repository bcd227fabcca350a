"""What a Modal function mounts, told from its definition: no account, no network. For tests of deployments.

A function that writes checkpoints must mount their volume, writable, where the configuration says; on every node of
a cluster that is one definition, so that one look is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from lilo_volume.errors import VolumeUnavailable

if TYPE_CHECKING:
    import modal


@dataclass(frozen=True, slots=True, kw_only=True)
class ModalMount:
    """One volume of a function."""

    path: str
    """Where it is mounted."""
    name: str | None
    """Of the volume; None if it was made without one."""
    read_only: bool
    sub_path: str | None
    """What part of the volume is mounted; None: all of it."""


def mounts_of(function: modal.Function[..., object, object]) -> tuple[ModalMount, ...]:
    """The volumes that a function mounts, sorted by path."""
    info = cast(Any, function).info()
    return tuple(
        ModalMount(
            path=str(path),
            name=volume.name,
            read_only=bool(volume.read_only),
            sub_path=None if volume.sub_path is None else str(volume.sub_path),
        )
        for path, volume in sorted(info.volumes.items())
    )


def check_mounts(function: modal.Function[..., object, object], expected: dict[str, str]) -> None:
    """See that a function mounts these volumes (name by path), writable and whole.

    Raises:
        VolumeUnavailable: with the first difference, and what is mounted.
    """
    mounts = {mount.path: mount for mount in mounts_of(function)}
    for path, name in sorted(expected.items()):
        mount = mounts.get(path)
        fault = None
        if mount is None:
            fault = f"nothing is mounted at {path!r}"
        elif mount.name != name:
            fault = f"{path!r} mounts {mount.name!r}, expected {name!r}"
        elif mount.read_only:
            fault = f"{path!r} mounts {name!r} for reading only"
        elif mount.sub_path is not None:
            fault = f"{path!r} mounts only {mount.sub_path!r} of {name!r}"
        if fault is not None:
            there = ", ".join(f"{m.name!r} at {m.path!r}" for m in mounts.values()) or "none"
            raise VolumeUnavailable(f"{fault}; the function's volumes: {there}")
