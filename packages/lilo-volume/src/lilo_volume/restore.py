"""Restore: which checkpoint to read. Decided once, on rank 0, from verified manifests; every rank gets the same.

A checkpoint asked for by name is that one or an error, never another one. Presence of files proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from lilo_volume.agreement import decided_by_rank_zero
from lilo_volume.checkpoint import Checkpoint
from lilo_volume.config import node_id
from lilo_volume.errors import CheckpointCorrupt, CheckpointMissing, VolumeUnavailable
from lilo_volume.group import Group, SoloGroup
from lilo_volume.log import warn
from lilo_volume.manifest import MANIFEST_NAME, Manifest, attempt_folder, name_folder
from lilo_volume.naming import encode
from lilo_volume.reloading import DEFAULT_BUSY_S, in_view, on_every_node, reload_when_free
from lilo_volume.scan import Found, newest, scan, settled_scan
from lilo_volume.transfer import bring
from lilo_volume.verify import Verify, find_fault
from lilo_volume.volume import Volume

_T = TypeVar("_T")
DEFAULT_TIMEOUT_S = 1800.0
"""For other ranks to come, and for rank 0 to read every byte when it verifies in full."""
_LOOKS = 20
"""How often what was chosen may be replaced while it is verified, before that is an error."""


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
    busy_timeout_s: float = DEFAULT_BUSY_S,
    node: str | None = None,
) -> Checkpoint:
    """The checkpoint of this name. Brings every node's view up to date first.

    Args:
        volume: the medium.
        collection: as it was published.
        kind: as it was published.
        name: as it was published.
        verify: what it must pass.
        group: the ranks that load together; the decision is made once, for all of them.
        timeout_s: limit of each wait for other ranks.
        busy_timeout_s: how long a view may be busy with open files.
        node: which node this rank is on; told by the environment if it is not given.

    Raises:
        CheckpointMissing: there is none; the message lists names that there are.
        CheckpointCorrupt: it is there and fails `verify`; nothing else is tried.
        VolumeBusy: a view cannot be brought up to date while files are open.
    """
    label = f"{collection}/{kind}/{name}"

    def choose() -> Manifest:
        home = name_folder(collection, kind, name)
        fault, found = None, None
        for _ in range(_LOOKS):
            published = [f for f in settled_scan(volume, home) if f.published]
            if not published:
                raise CheckpointMissing(_missing(volume, collection, kind, name))
            # An unreadable manifest may be the newest one: then an older one is not what was asked for.
            found = next((f for f in published if f.fault is not None), None) or newest(published)
            assert found is not None, "published attempts have a manifest or a fault"
            fault = _fault(volume, found, verify, busy_timeout_s)
            if fault is None:
                assert found.manifest is not None, "a good checkpoint has a manifest"
                return found.manifest
            if _is_there(volume, found):
                break
        assert found is not None, "it was looked for"
        raise CheckpointCorrupt(
            f"checkpoint {label!r} ({found.folder}): {fault}; remove it, or load another one by name"
        )

    ranks = Ranks(volume, group or SoloGroup(), label, timeout_s, busy_timeout_s, node)
    return ranks.brought(ranks.decide(choose))


def latest(
    volume: Volume,
    collection: str,
    kind: str,
    *,
    verify: Verify = "size",
    group: Group | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    busy_timeout_s: float = DEFAULT_BUSY_S,
    node: str | None = None,
) -> Latest:
    """The checkpoint with the largest order (then the latest time) that passes `verify`.

    Newer ones that do not pass, and attempts that were never published, are skipped and said. Arguments and errors
    are those of `open_named`, but nothing is missing: then there is no checkpoint.
    """
    ranks = Ranks(
        volume, group or SoloGroup(), f"{collection}/{kind}", timeout_s, busy_timeout_s, node
    )
    manifest, skipped = ranks.decide(
        lambda: newest_good(volume, collection, kind, verify, busy_timeout_s)
    )
    checkpoint = None if manifest is None else ranks.brought(manifest)
    return Latest(checkpoint=checkpoint, skipped=skipped)


def resume(
    volume: Volume,
    collection: str,
    kind: str,
    *,
    from_scratch: bool = False,
    verify: Verify = "size",
    group: Group | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    busy_timeout_s: float = DEFAULT_BUSY_S,
    node: str | None = None,
) -> Checkpoint | None:
    """What a run should go on from; None only where there is nothing at all.

    Attempts of which none is good are no fresh start, but a run that went wrong; `from_scratch` says to begin anew.

    Raises:
        CheckpointMissing: there is something, and nothing of it is good; the text says what and why.
    """
    found = latest(
        volume,
        collection,
        kind,
        verify=verify,
        group=group,
        timeout_s=timeout_s,
        busy_timeout_s=busy_timeout_s,
        node=node,
    )
    if found.checkpoint is None and found.skipped and not from_scratch:
        reasons = "; ".join(f"{skip.folder}: {skip.why}" for skip in found.skipped[:5])
        raise CheckpointMissing(
            f"no checkpoint of {collection}/{kind} is good, and {len(found.skipped)} attempts are there ({reasons}); "
            "look at them, or say that the run starts from scratch"
        )
    return found.checkpoint


def newest_good(
    volume: Volume,
    collection: str,
    kind: str,
    verify: Verify,
    busy_timeout_s: float = DEFAULT_BUSY_S,
    *,
    without: Collection[str] = (),
) -> tuple[Manifest | None, tuple[Skipped, ...]]:
    """The newest that passes, and what was passed over for it; `without` are folders not to look at."""
    prefix = f"{encode(collection)}/{encode(kind)}"
    chosen: tuple[Manifest | None, tuple[Skipped, ...]] | None = None
    for _ in range(_LOOKS):
        attempts = [f for f in settled_scan(volume, prefix) if f.folder not in without]
        chosen = _choice(volume, attempts, verify, busy_timeout_s)
        if chosen is not None:
            break
    if chosen is None:
        raise VolumeUnavailable(f"{prefix}: checkpoints vanish while they are verified; try again")
    for skip in chosen[1]:
        warn("skipped checkpoint %s (%s): %s", skip.label, skip.folder, skip.why)
    return chosen


def _choice(
    volume: Volume, attempts: list[Found], verify: Verify, busy_timeout_s: float
) -> tuple[Manifest | None, tuple[Skipped, ...]] | None:
    """The first that passes; None if one was removed meanwhile, so that what replaced it must be looked for."""
    skipped: list[Skipped] = []
    for found in _newest_first(attempts):
        fault = _fault(volume, found, verify, busy_timeout_s)
        if fault is None:
            return found.manifest, tuple(skipped)
        if found.published and not _is_there(volume, found):
            return None
        skipped.append(Skipped(label=found.label, folder=found.folder, why=fault))
    return None, tuple(skipped)


def _fault(volume: Volume, found: Found, verify: Verify, busy_timeout_s: float) -> str | None:
    """The fault of an attempt, told from a view that has it."""
    fault = find_fault(volume, found, verify)
    listed = verify == "full" and find_fault(volume, found, "size") is None
    if fault is None or not listed or found.manifest is None or in_view(volume, found.manifest):
        return fault
    # Published since this view was brought up to date: passing over it would be going back.
    reload_when_free(volume, busy_timeout_s=busy_timeout_s)
    return find_fault(volume, found, verify)


def _is_there(volume: Volume, found: Found) -> bool:
    """Whether it is still published."""
    path = f"{found.folder}/{MANIFEST_NAME}"
    return any(entry.path == path for entry in volume.list_committed(found.folder))


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


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that load together; also used by `holding.py`."""

    volume: Volume
    group: Group
    label: str
    timeout_s: float
    busy_timeout_s: float
    node: str | None

    def decide(self, choose: Callable[[], _T]) -> _T:
        """Bring every view up to date, then let rank 0 choose for all."""
        on_every_node(
            self.group,
            lambda: reload_when_free(self.volume, busy_timeout_s=self.busy_timeout_s),
            label=self.label,
            node=self.node or node_id(),
            timeout_s=self.timeout_s + self.busy_timeout_s,
            step="reload",
        )
        return decided_by_rank_zero(
            self.group,
            choose,
            label=self.label,
            node=self.node or node_id(),
            timeout_s=self.timeout_s,
            step="restore",
        )

    def brought(self, manifest: Manifest) -> Checkpoint:
        """The checkpoint, with its files in the view of every node."""
        folder = attempt_folder(manifest.publication)

        def act() -> None:
            bring(self.volume, folder, [entry.path for entry in manifest.files])
            if not in_view(self.volume, manifest):
                # Published after this node's view was brought up to date, and before rank 0 chose.
                reload_when_free(self.volume, busy_timeout_s=self.busy_timeout_s)

        on_every_node(
            self.group,
            act,
            label=self.label,
            node=self.node or node_id(),
            timeout_s=self.timeout_s + self.busy_timeout_s,
            step="bring",
        )
        return Checkpoint.of(self.volume, manifest)
