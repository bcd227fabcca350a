"""Restore: which checkpoint to read. Decided once, on rank 0, from verified manifests; every rank gets the same.

A checkpoint asked for by name is that one or an error, never another one. Presence of files proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lilo_volume.agreement import decided_by_rank_zero
from lilo_volume.checkpoint import Checkpoint
from lilo_volume.config import node_id
from lilo_volume.errors import CheckpointCorrupt, CheckpointMissing
from lilo_volume.group import Group, SoloGroup
from lilo_volume.log import warn
from lilo_volume.manifest import Manifest, attempt_folder, name_folder
from lilo_volume.naming import encode
from lilo_volume.scan import Found, newest, scan
from lilo_volume.transfer import bring
from lilo_volume.verify import Verify, find_fault
from lilo_volume.volume import Volume

_T = TypeVar("_T")
DEFAULT_TIMEOUT_S = 1800.0
"""For other ranks to come, and for rank 0 to read every byte when it verifies in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A newer checkpoint that was passed over, and why."""

    label: str
    folder: str
    """Relative to the root."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest:
    """The newest good checkpoint, or None, and what was passed over to find it."""

    checkpoint: Checkpoint | None
    skipped: tuple[Skipped, ...]


def open_named(
    volume: Volume,
    collection: str,
    kind: str,
    name: str,
    *,
    verify: Verify = "size",
    group: Group | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Checkpoint:
    """The checkpoint of this name. Brings this container's view up to date first.

    Raises:
        CheckpointMissing: there is none; the message lists names that there are.
        CheckpointCorrupt: it is there and fails `verify`; nothing else is tried.
        VolumeBusy: the view cannot be brought up to date while files are open.
    """
    label = f"{collection}/{kind}/{name}"

    def choose() -> Manifest:
        published = [f for f in scan(volume, name_folder(collection, kind, name)) if f.published]
        if not published:
            raise CheckpointMissing(_missing(volume, collection, kind, name))
        # An unreadable manifest may be the newest one: then an older one is not what was asked for.
        found = next((f for f in published if f.fault is not None), None) or newest(published)
        assert found is not None, "published attempts have a manifest or a fault"
        if fault := find_fault(volume, found, verify):
            raise CheckpointCorrupt(
                f"checkpoint {label!r} ({found.folder}): {fault}; remove it, or load another one by name"
            )
        assert found.manifest is not None, "a good checkpoint has a manifest"
        return found.manifest

    volume.reload()
    return _brought(volume, _decide(group or SoloGroup(), choose, label, timeout_s))


def latest(
    volume: Volume,
    collection: str,
    kind: str,
    *,
    verify: Verify = "size",
    group: Group | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Latest:
    """The checkpoint with the largest order (then the latest time) that passes `verify`.

    Newer ones that do not pass, and attempts that were never published, are skipped and said.
    """

    def choose() -> tuple[Manifest | None, tuple[Skipped, ...]]:
        skipped: list[Skipped] = []
        for found in _newest_first(scan(volume, f"{encode(collection)}/{encode(kind)}")):
            fault = find_fault(volume, found, verify)
            if fault is None:
                return found.manifest, tuple(skipped)
            skipped.append(Skipped(label=found.label, folder=found.folder, why=fault))
            warn("skipped checkpoint %s (%s): %s", found.label, found.folder, fault)
        return None, tuple(skipped)

    volume.reload()
    label = f"{collection}/{kind}"
    manifest, skipped = _decide(group or SoloGroup(), choose, label, timeout_s)
    checkpoint = None if manifest is None else _brought(volume, manifest)
    return Latest(checkpoint=checkpoint, skipped=skipped)


def _brought(volume: Volume, manifest: Manifest) -> Checkpoint:
    """The checkpoint, with its files in this container's view."""
    checkpoint = Checkpoint.of(volume, manifest)
    bring(volume, attempt_folder(manifest.publication), [entry.path for entry in manifest.files])
    return checkpoint


def _newest_first(found: list[Found]) -> list[Found]:
    """Unreadable and unpublished attempts first, since they may be the newest; then by order and time."""

    def key(item: Found) -> tuple[int, int, int]:
        if item.manifest is None:
            return (1, 0, 0)
        return (0, item.manifest.publication.order, item.manifest.created_unix_ms)

    return sorted((item for item in found if item.ours), key=key, reverse=True)


def _missing(volume: Volume, collection: str, kind: str, name: str) -> str:
    found = scan(volume, f"{encode(collection)}/{encode(kind)}")
    names = sorted({item.name_part(2) for item in found if item.manifest is not None})
    there = (
        f"there are {', '.join(map(repr, names[:10]))}" if names else "there are none of this kind"
    )
    unpublished = [item for item in found if item.name_part(2) == name and not item.published]
    note = (
        f"; {len(unpublished)} attempts under this name were never published" if unpublished else ""
    )
    return f"no checkpoint {name!r} of kind {kind!r} in {collection!r}; {there}{note}"


def _decide(group: Group, choose: Callable[[], _T], label: str, timeout_s: float) -> _T:
    return decided_by_rank_zero(
        group, choose, label=label, node=node_id(), timeout_s=timeout_s, step="restore"
    )
