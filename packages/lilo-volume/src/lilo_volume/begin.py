"""Begin: who takes part is settled, and the attempt's folder is made, before anybody writes a byte of it.

1. identities   every rank says who it is; duplicates and ranks without a volume are refused with a table
2. record       rank 0 makes the folder with a note, and commits it: leftovers can always be told from others' files
3. join         one rank per node sees that note in the committed state (or it has another volume), and puts it
                into its own view
4. probe        every rank sees the note in its view (or it claims a node that it is not on)
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lilo_volume.agreement import decided_by_rank_zero, done_by_every_rank
from lilo_volume.checkpoint import label_of
from lilo_volume.discard import clear_view, discard, remove_committed_attempt
from lilo_volume.errors import (
    GroupTimeout,
    IdentityRefused,
    NameTaken,
    RankFailed,
    VolumeError,
    VolumeUnavailable,
)
from lilo_volume.files import make_folders, write_durably
from lilo_volume.group import Group
from lilo_volume.manifest import RECORD_NAME, attempt_folder, name_folder
from lilo_volume.node import Identity, NamedGroup, identify, identity_fault, is_leader, table
from lilo_volume.patient import PatientVolume
from lilo_volume.publication import Publication
from lilo_volume.record import encode_record
from lilo_volume.scan import scan
from lilo_volume.steps import OnStep, Steps
from lilo_volume.volume import Volume

DEFAULT_TIMEOUT_S = 1800.0
"""For each collective: as long as the slowest rank may take to write its shards to slow storage."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """What all ranks know once an attempt has begun."""

    volume: Volume
    group: NamedGroup
    publication: Publication
    overwrite: bool
    retry: bool
    timeout_s: float
    settle_s: float
    steps: Steps
    changed: tuple[Path, ...]
    """Folders of this view that got a new entry, and must be flushed for it to last."""


def open_attempt(
    volume: Volume | None,
    group: Group,
    wanted: Publication,
    *,
    overwrite: bool,
    retry: bool,
    timeout_s: float,
    settle_s: float,
    node: str | None,
    on_step: OnStep | None,
) -> Beginning:
    """Settle who takes part and make the folder; `wanted` gets its attempt drawn.

    Raises:
        IdentityRefused, NameTaken, RankFailed, GroupTimeout, VolumeError: on every rank; nothing is left behind
            unless ranks did not come.
    """
    label, steps = label_of(wanted), Steps(on_step)
    identities = _introduced(volume, group, label, steps, node=node, timeout_s=timeout_s)
    assert volume is not None, "ranks without one were refused"
    volume = PatientVolume(volume)
    nodes = tuple(identity.node for identity in identities)
    named = NamedGroup(group, nodes)
    opening = _Opening(volume, steps, len(nodes), overwrite=overwrite or retry)
    publication = decided_by_rank_zero(
        named,
        lambda: opening.run(replace(wanted, attempt=os.urandom(8).hex())),
        label=label,
        node=nodes[0],
        timeout_s=timeout_s,
        step="record",
    )
    beginning = Beginning(
        volume=volume,
        group=named,
        publication=publication[0],
        overwrite=overwrite,
        retry=retry,
        timeout_s=timeout_s,
        settle_s=settle_s,
        steps=steps,
        changed=tuple(opening.changed),
    )
    if len(nodes) == 1:
        return beginning
    joined = _joined(beginning, publication[1], identities)
    return replace(beginning, changed=(*beginning.changed, *joined))


def _joined(
    beginning: Beginning, record: bytes, identities: Sequence[Identity]
) -> tuple[Path, ...]:
    """As `_join`; an attempt that is refused there leaves nothing behind."""
    try:
        return _join(beginning, record, identities)
    except GroupTimeout:
        raise
    except VolumeError:
        discard(
            beginning.volume,
            beginning.group,
            beginning.publication,
            beginning.steps,
            timeout_s=beginning.timeout_s,
        )
        raise


def _introduced(
    volume: Volume | None,
    group: Group,
    label: str,
    steps: Steps,
    *,
    node: str | None,
    timeout_s: float,
) -> Sequence[Identity]:
    """The identities of all ranks, if they can be right."""
    failure = None
    try:
        with steps.named("begin"):
            identity = identify(volume, group, node=node)
    except Exception as error:  # the other ranks wait for this one, whatever happened
        failure = f"{type(error).__name__}: {error}"
        identity = identify(volume, group, node=node, failure=failure)
    identities = group.all_gather(identity, timeout_s=timeout_s, step="begin")
    if fault := identity_fault(identities):
        raise IdentityRefused(label, fault, table(identities))
    for peer in identities:
        if peer.failure is not None:
            raise RankFailed(label, peer.rank, peer.node, peer.failure)
    return identities


class _Opening:
    """Rank 0 makes the folder and its note, unless the name is taken."""

    def __init__(self, volume: Volume, steps: Steps, world_size: int, *, overwrite: bool) -> None:
        self._volume = volume
        self._steps = steps
        self._world_size = world_size
        self._overwrite = overwrite
        self.changed: list[Path] = []

    def run(self, publication: Publication) -> tuple[Publication, bytes]:
        """The publication and the bytes of its note."""
        home = name_folder(publication.collection, publication.kind, publication.name)
        if not self._overwrite and self._steps.retried("look", lambda: _taken(self._volume, home)):
            raise NameTaken(
                f"checkpoint {label_of(publication)!r} exists; choose another name, or save with overwrite=True"
            )
        record = encode_record(publication, self._world_size, time.time_ns() // 1_000_000)
        try:
            self._put(publication, record)
        except Exception:
            clear_view(self._volume, publication, note_too=True)
            with contextlib.suppress(VolumeError):
                remove_committed_attempt(self._volume, publication)
            raise
        return publication, record

    def _put(self, publication: Publication, record: bytes) -> None:
        self.changed.extend(
            self._steps.retried("record", lambda: put_record(self._volume, publication, record))
        )
        try:
            self._steps.retried("commit record", self._volume.commit)
        except VolumeError as error:
            # It may have been applied all the same.
            if not _is_committed(self._volume, publication, record):
                raise VolumeUnavailable(
                    f"checkpoint {label_of(publication)!r}: the volume takes no commit ({error}); nothing was written"
                ) from error


def put_record(volume: Volume, publication: Publication, record: bytes) -> list[Path]:
    """Put an attempt's note into this view, unless it is there; returns the folders to flush."""
    folder = attempt_folder(publication)
    changed = make_folders(volume.root, folder)
    place = volume.local_path(f"{folder}/{RECORD_NAME}")
    if not place.exists():
        try:
            write_durably(place, record)
        except FileNotFoundError:
            # A node that goes by two names: another of its ranks was quicker.
            if not place.exists():
                raise
    return changed


def _taken(volume: Volume, home: str) -> bool:
    return any(found.published for found in scan(volume, home))


def _is_committed(volume: Volume, publication: Publication, record: bytes) -> bool:
    try:
        return volume.read_committed(f"{attempt_folder(publication)}/{RECORD_NAME}") == record
    except VolumeError:
        return False


def _join(beginning: Beginning, record: bytes, identities: Sequence[Identity]) -> tuple[Path, ...]:
    """Check on every rank that this is the volume, and the view, that it should be; returns folders to flush."""
    volume, group, publication = beginning.volume, beginning.group, beginning.publication
    label, node = label_of(publication), group.nodes[group.rank]
    changed: list[Path] = []

    def join() -> None:
        if not is_leader(group.nodes, group.rank) or group.rank == 0:
            return
        deadline = time.monotonic() + beginning.settle_s
        while not beginning.steps.retried("join", lambda: _shows(volume, publication)):
            if time.monotonic() >= deadline:
                raise IdentityRefused(
                    label,
                    f"node {node!r} (rank {group.rank}) does not see what rank 0 committed; it has another volume",
                    table(identities),
                )
            time.sleep(_POLL_S)
        changed.extend(put_record(volume, publication, record))

    def probe() -> None:
        place = volume.local_path(f"{attempt_folder(publication)}/{RECORD_NAME}")
        if not beginning.steps.retried("probe", place.exists):
            raise IdentityRefused(
                label,
                f"rank {group.rank} claims to be on node {node!r}, but has another view of the volume than "
                f"rank {group.nodes.index(node)} there",
                table(identities),
            )

    for step, action in (("join", join), ("probe", probe)):
        done_by_every_rank(
            group, action, label=label, node=node, timeout_s=beginning.timeout_s, step=step
        )
    return tuple(changed)


def _shows(volume: Volume, publication: Publication) -> bool:
    """Whether the note is listed; a listing, since some file systems remember for long that a file was not there."""
    folder = attempt_folder(publication)
    return any(entry.path == f"{folder}/{RECORD_NAME}" for entry in volume.list_committed(folder))
