"""Reloading: every node's view brought up to date before anybody reads, for a bounded time, and by one rank of it.

A reload is refused while a file is open in the container, and empties the view while it runs: so only the first rank
of a node does it, while its other ranks wait. Writers never call this.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lilo_volume.agreement import done_by_every_rank
from lilo_volume.errors import InvalidPath, VolumeBusy
from lilo_volume.group import Group
from lilo_volume.log import warn
from lilo_volume.manifest import Manifest, attempt_folder
from lilo_volume.node import is_leader
from lilo_volume.volume import Volume

DEFAULT_BUSY_S = 30.0
"""How long a view may be held busy: a loader closes its files within seconds; what stays open, stays open."""
_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 2.0
"""There is no event for a file being closed by another process, so it is tried again."""


def on_every_node(
    group: Group,
    action: Callable[[], None],
    *,
    label: str,
    node: str,
    timeout_s: float,
    step: str,
) -> None:
    """Run `action` on the first rank of each node; returns on every rank when it is done on all nodes.

    Raises:
        VolumeError: on every rank, what `action` raised on one; see `done_by_every_rank`.
        GroupTimeout: a rank did not come.
    """
    if group.world_size == 1:
        action()
        return
    nodes = group.all_gather(node, timeout_s=timeout_s, step=step)

    def act() -> None:
        if is_leader(nodes, group.rank):
            action()

    done_by_every_rank(group, act, label=label, node=node, timeout_s=timeout_s, step=f"{step} done")


def reload_when_free(volume: Volume, *, busy_timeout_s: float = DEFAULT_BUSY_S) -> None:
    """Bring this container's view up to date, as soon as no file is open in it.

    Raises:
        VolumeBusy: it stayed busy; the text has what the medium says is open, and how long it was tried.
    """
    deadline = time.monotonic() + busy_timeout_s
    delay_s = _FIRST_DELAY_S
    while True:
        try:
            volume.reload()
        except VolumeBusy as error:
            if time.monotonic() + delay_s > deadline:
                raise VolumeBusy(
                    f"the view at {volume.root} cannot be brought up to date: {error}; tried for "
                    f"{busy_timeout_s:g} s; close the file, or leave the folder, and load again"
                ) from error
            warn("reload is refused and tried again in %s s: %s", delay_s, error)
        else:
            return
        time.sleep(delay_s)
        delay_s = min(_LONGEST_DELAY_S, delay_s * 2)


def in_view(volume: Volume, manifest: Manifest) -> bool:
    """Whether all files of a checkpoint are in this container's view, with their sizes."""
    folder = attempt_folder(manifest.publication)
    try:
        return all(
            volume.local_path(f"{folder}/{entry.path}").stat().st_size == entry.size_bytes
            for entry in manifest.files
        )
    except (OSError, InvalidPath):
        return False
