"""Catalogue: what is on a volume: published checkpoints, broken ones, and what attempts left behind.

Everything is told from the volume alone, so that any index kept elsewhere can be rebuilt from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeAlias

from lilo_volume.checkpoint import Checkpoint
from lilo_volume.errors import CheckpointMissing
from lilo_volume.manifest import attempt_folder, name_folder
from lilo_volume.naming import encode
from lilo_volume.scan import Found, newest, remove_attempt, scan, settled_scan
from lilo_volume.volume import Volume

LOCK_TIMEOUT_S = 60.0
"""A publisher holds the lock of a name only while it writes a manifest and removes what that replaces."""

LeftoverState: TypeAlias = Literal["unpublished", "replaced", "broken", "foreign"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A folder that is no checkpoint."""

    label: str
    folder: str
    """Relative to the root."""
    state: LeftoverState
    """`unpublished`: an attempt that runs, or died; `replaced`: overwritten, not yet removed; `broken`: its
    manifest cannot be believed; `foreign`: not made by lilo-volume, and never touched by it."""
    size_bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A volume at one look."""

    checkpoints: tuple[Checkpoint, ...]
    leftovers: tuple[Leftover, ...]


def survey(volume: Volume, *, collection: str | None = None, kind: str | None = None) -> Survey:
    """Look at everything, or at one collection, or at one kind of it; only manifests are read.

    Checkpoints come sorted by collection, kind, order and time.
    """
    assert collection is not None or kind is None, "a kind is looked up within a collection"
    prefix = "" if collection is None else encode(collection)
    if kind is not None:
        prefix = f"{prefix}/{encode(kind)}"
    checkpoints: list[Checkpoint] = []
    leftovers: list[Leftover] = []
    for _, group in groupby(settled_scan(volume, prefix), key=_home):
        attempts = list(group)
        current = newest(attempts)
        for found in attempts:
            if found is current and found.manifest is not None:
                checkpoints.append(Checkpoint.of(volume, found.manifest))
            else:
                leftovers.append(_leftover(found))
    return Survey(checkpoints=tuple(sorted(checkpoints, key=_order)), leftovers=tuple(leftovers))


def catalogue(
    volume: Volume, *, collection: str | None = None, kind: str | None = None
) -> list[Checkpoint]:
    """The published checkpoints, sorted by collection, kind, order and time; their files are not opened."""
    return list(survey(volume, collection=collection, kind=kind).checkpoints)


def remove(volume: Volume, checkpoint: Checkpoint) -> None:
    """Remove a checkpoint; gone at once for whoever looks, then its files. Already gone: nothing."""
    publication = checkpoint.publication
    home = name_folder(publication.collection, publication.kind, publication.name)
    with volume.exclusive(home, timeout_s=LOCK_TIMEOUT_S):
        remove_attempt(volume, attempt_folder(publication))


def remove_named(volume: Volume, collection: str, kind: str, name: str) -> None:
    """Remove all that is published under a name, also when it is broken.

    Raises:
        CheckpointMissing: nothing is.
    """
    home = name_folder(collection, kind, name)
    with volume.exclusive(home, timeout_s=LOCK_TIMEOUT_S):
        published = [found for found in scan(volume, home) if found.published]
        if not published:
            raise CheckpointMissing(f"no checkpoint {name!r} of kind {kind!r} in {collection!r}")
        for found in published:
            remove_attempt(volume, found.folder)


def _home(found: Found) -> str:
    return found.folder.rpartition("/")[0]


def _order(checkpoint: Checkpoint) -> tuple[str, str, int, int]:
    where = checkpoint.publication
    return (where.collection, where.kind, where.order, checkpoint.manifest.created_unix_ms)


def _leftover(found: Found) -> Leftover:
    state: LeftoverState
    if found.manifest is not None:
        state, why = "replaced", "a later attempt published the same name"
    elif found.fault is not None:
        state, why = "broken", found.fault
    elif found.ours:
        state, why = "unpublished", "the attempt is still running, or it died"
    else:
        state, why = "foreign", "it has neither a manifest nor an attempt record"
    return Leftover(
        label=found.label,
        folder=found.folder,
        state=state,
        size_bytes=sum(found.sizes.values()),
        why=why,
    )
