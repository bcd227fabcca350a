"""Holding: the latest checkpoint, leased while it is being read, so that no retention takes it away."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from lilo_volume.checkpoint import Checkpoint
from lilo_volume.errors import CheckpointMissing
from lilo_volume.group import Group, SoloGroup
from lilo_volume.leases import DEFAULT_LEASE_S, Lease, lease
from lilo_volume.manifest import Manifest, attempt_folder
from lilo_volume.reloading import DEFAULT_BUSY_S
from lilo_volume.restore import DEFAULT_TIMEOUT_S, Latest, Ranks, Skipped, newest_good
from lilo_volume.verify import Verify
from lilo_volume.volume import Volume


@contextlib.contextmanager
def held_latest(
    volume: Volume,
    collection: str,
    kind: str,
    *,
    verify: Verify = "size",
    group: Group | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    busy_timeout_s: float = DEFAULT_BUSY_S,
    node: str | None = None,
    lease_s: float = DEFAULT_LEASE_S,
) -> Generator[Latest]:
    """`latest`, held by a lease for as long as the block runs, so that no retention removes what is being loaded.

    Every rank runs the block; the lease ends when all have left it.
    """
    group = group or SoloGroup()
    held: list[Lease] = []

    def choose() -> tuple[Manifest | None, tuple[Skipped, ...]]:
        passed: list[Skipped] = []
        while True:
            without = {skip.folder for skip in passed}
            manifest, skipped = newest_good(
                volume, collection, kind, verify, busy_timeout_s, without=without
            )
            if manifest is None:
                return None, (*passed, *skipped)
            try:
                held.append(lease(volume, Checkpoint.of(volume, manifest), duration_s=lease_s))
            except CheckpointMissing as error:
                folder = attempt_folder(manifest.publication)
                label = Checkpoint.of(volume, manifest).label
                passed.append(Skipped(label=label, folder=folder, why=str(error)))
            else:
                return manifest, (*passed, *skipped)

    ranks = Ranks(volume, group, f"{collection}/{kind}", timeout_s, busy_timeout_s, node)
    try:
        manifest, skipped = ranks.decide(choose)
        checkpoint = None if manifest is None else ranks.brought(manifest)
        try:
            yield Latest(checkpoint=checkpoint, skipped=skipped)
        finally:
            group.barrier(timeout_s=timeout_s, step="release")
    finally:
        for each in held:
            each.release()
