"""Fit: whether a checkpoint can be loaded in another layout, told from its manifest, before any device is taken."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lilo_volume.checkpoint import Checkpoint

Verdict: TypeAlias = Literal["same", "reshardable", "impossible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a checkpoint fits a layout."""

    verdict: Verdict
    why: str
    """In words, as `needs resharding: dp 4 -> 2`."""

    @property
    def possible(self) -> bool:
        """Whether it can be loaded at all."""
        return self.verdict != "impossible"


def can_load(
    checkpoint: Checkpoint,
    layout: Mapping[str, int],
    *,
    reshardable: Collection[str] | None = None,
    same: Mapping[str, str] | None = None,
) -> Fit:
    """Whether ranks in `layout` can load a checkpoint; pure.

    Args:
        checkpoint: the one to load.
        layout: degrees by axis of the ranks that want it; an axis that is not named has degree 1.
        reshardable: axes over which the reader can reshard; None: over all of them.
        same: metadata that must be equal, as the base model: what no resharding can make up for.
    """
    manifest = checkpoint.manifest
    for key, wanted in sorted((same or {}).items()):
        found = manifest.metadata.get(key)
        if found != wanted:
            what = "does not say it" if found is None else f"has {found!r}"
            return Fit(verdict="impossible", why=f"{key} must be {wanted!r}; the checkpoint {what}")
    if not manifest.layout and manifest.world_size > 1:
        why = f"the checkpoint was written by {manifest.world_size} ranks and does not say in which layout"
        return Fit(verdict="impossible", why=why)
    axes = sorted(manifest.layout.keys() | layout.keys())
    changes = [
        (axis, manifest.layout.get(axis, 1), layout.get(axis, 1))
        for axis in axes
        if manifest.layout.get(axis, 1) != layout.get(axis, 1)
    ]
    if not changes:
        return Fit(verdict="same", why="the layouts are equal")
    text = ", ".join(f"{axis} {before} -> {after}" for axis, before, after in changes)
    stuck = [axis for axis, _, _ in changes if reshardable is not None and axis not in reshardable]
    if stuck:
        why = f"{', '.join(stuck)} cannot be resharded here: {text}"
        return Fit(verdict="impossible", why=why)
    return Fit(verdict="reshardable", why=f"needs resharding: {text}")
