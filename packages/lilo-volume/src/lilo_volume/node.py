"""Node: who the ranks are and on which node, told once at the start, so that mistakes are refused and not waited for.

A node is what shares one view of the volume: one container, or one machine. Where two claim the same identity, one
of them would never commit; where one goes by two, it would commit twice, which is no harm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from lilo_volume.config import boot_id, host_name, node_id, process_id
from lilo_volume.errors import GroupTimeout, RankLost
from lilo_volume.group import Group
from lilo_volume.volume import Volume

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What one rank says about itself."""

    rank: int
    world_size: int
    """How many ranks it believes there are."""
    node: str
    """`MODAL_TASK_ID`, or `NCCL_HOSTID`, or host name and boot id."""
    host: str
    boot: str
    """The kernel's boot id; empty where there is none."""
    process: int
    volume: str | None
    """Type and root of its volume; None if it has none."""
    failure: str | None = None
    """Why it cannot take part, if it cannot."""


def identify(
    volume: Volume | None, group: Group, *, node: str | None = None, failure: str | None = None
) -> Identity:
    """This rank's identity; `node` overrides what the environment says."""
    return Identity(
        rank=group.rank,
        world_size=group.world_size,
        node=node or node_id(),
        host=host_name(),
        boot=boot_id(),
        process=process_id(),
        volume=None if volume is None else f"{type(volume).__name__} {volume.root}",
        failure=failure,
    )


def identity_fault(identities: Sequence[Identity]) -> str | None:
    """What is wrong with these identities, which came in the order of the group; None if nothing is. Pure."""
    counts = Counter(identity.rank for identity in identities)
    if twice := sorted(rank for rank, count in counts.items() if count > 1):
        return f"rank {twice[0]} was claimed {counts[twice[0]]} times"
    sizes = {identity.world_size for identity in identities}
    if sizes != {len(identities)} or sorted(counts) != list(range(len(identities))):
        return f"{len(identities)} ranks came; they believe in a world of {sorted(sizes)} and ranks {sorted(counts)}"
    if without := [identity.rank for identity in identities if identity.volume is None]:
        return f"ranks {without} have no volume configured, and would silently write nowhere"
    for node in {identity.node for identity in identities}:
        hosts = {(peer.host, peer.boot) for peer in identities if peer.node == node}
        if len(hosts) > 1:
            return f"{len(hosts)} machines claim to be node {node!r}; give each its own MODAL_TASK_ID or NCCL_HOSTID"
    return None


def table(identities: Sequence[Identity]) -> str:
    """The identities, one line per rank, for people."""
    head = ("rank", "of", "node", "host", "boot", "process", "volume")
    rows = [
        (
            str(i.rank),
            str(i.world_size),
            i.node,
            i.host,
            i.boot[:8],
            str(i.process),
            i.volume or "-",
        )
        for i in identities
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    )


def is_leader(nodes: Sequence[str], rank: int) -> bool:
    """Whether `rank` is the lowest of its node; `nodes` has each rank's."""
    return nodes.index(nodes[rank]) == rank


@dataclass(frozen=True, slots=True)
class NamedGroup:
    """A group whose errors name the nodes of those who did not come, and of who waited."""

    group: Group
    nodes: tuple[str, ...]
    """Of each rank."""

    @property
    def rank(self) -> int:
        """This process's index."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.group.world_size

    def all_gather(self, value: T, *, timeout_s: float, step: str) -> list[T]:
        """Every rank's value, in rank order.

        Raises:
            GroupTimeout: names step, ranks and nodes.
        """
        try:
            return self.group.all_gather(value, timeout_s=timeout_s, step=step)
        except GroupTimeout as error:
            raise self._named(error, step) from error

    def broadcast(self, value: T | None, *, timeout_s: float, step: str) -> T:
        """Rank 0's value on every rank.

        Raises:
            GroupTimeout: names step, ranks and nodes.
        """
        try:
            return self.group.broadcast(value, timeout_s=timeout_s, step=step)
        except GroupTimeout as error:
            raise self._named(error, step) from error

    def barrier(self, *, timeout_s: float, step: str) -> None:
        """Return when every rank has come.

        Raises:
            GroupTimeout: names step, ranks and nodes.
        """
        try:
            self.group.barrier(timeout_s=timeout_s, step=step)
        except GroupTimeout as error:
            raise self._named(error, step) from error

    def _named(self, error: GroupTimeout, step: str) -> GroupTimeout:
        me = f"(said by rank {self.rank} on node {self.nodes[self.rank]})"
        if isinstance(error, RankLost):
            nodes = tuple(self.nodes[rank] for rank in error.ranks)
            return RankLost(error.step, error.ranks, nodes, f"{error.args[3]} {me}")
        return GroupTimeout(f"step {step!r}: {error} {me}")
