"""Nodes: whether a Ray cluster has the machines that a topology needs, and waiting until it does.

Ray tells of a missing machine by waiting for ever, and registers machines one by one after they were started. So what
is needed is counted here first: machines, each with enough devices of its own; sixteen GPUs of one are not two of
eight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lilo_definitions import Topology
from lilo_engine.errors import Unavailable

LOOK_S = 0.25
"""Between looks: Ray offers no event for a node that joins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of a cluster."""

    node_id: str
    """Ray's; never the hostname, which may be the same on all."""
    address: str
    devices: Mapping[str, float]
    """How many it registered, by Ray's name of the resource."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """What a trainer needs."""

    nodes: int
    devices: Mapping[str, int]
    """On each of them, by Ray's name of the resource."""

    @classmethod
    def of(cls, topology: Topology) -> Needed:
        """A rank takes one core, and on CUDA one GPU."""
        ranks = topology.world_size // topology.nodes
        devices = {"CPU": ranks} | ({"GPU": ranks} if topology.device == "cuda" else {})
        return cls(nodes=topology.nodes, devices=devices)

    def can_use(self, node: Node) -> bool:
        """Whether the machine has enough of each."""
        return all(node.devices.get(name, 0) >= number for name, number in self.devices.items())

    @property
    def words(self) -> str:
        """For people."""
        plural = "" if self.nodes == 1 else "s"
        each = " and ".join(f"{number} {name}" for name, number in self.devices.items())
        return f"{self.nodes} node{plural} with {each} each"


def nodes_of(listed: Sequence[Mapping[str, Any]]) -> tuple[Node, ...]:
    """The machines that are alive, from what `ray.nodes()` lists."""
    return tuple(
        Node(
            node_id=str(entry["NodeID"]),
            address=str(entry["NodeManagerAddress"]),
            devices={name: float(n) for name, n in entry.get("Resources", {}).items()},
        )
        for entry in listed
        if entry["Alive"]
    )


def found_words(nodes: Sequence[Node], needed: Needed) -> str:
    """What is there, machine by machine, for people."""
    plural = "" if len(nodes) == 1 else "s"
    each = "; ".join(
        f"{node.address}: "
        + ", ".join(f"{node.devices.get(name, 0):g} {name}" for name in needed.devices)
        for node in nodes
    )
    return f"{len(nodes)} node{plural} ({each})" if nodes else "no node"


def require_cluster_nodes(
    needed: Needed, look: Callable[[], Sequence[Node]], *, limit_s: float
) -> tuple[Node, ...]:
    """Wait until enough distinct machines with enough devices are alive; those that can be used.

    Args:
        needed: By the trainer.
        look: Lists the machines that are alive now.
        limit_s: For late ones to join.

    Raises:
        Unavailable: they did not come in time; names what was needed and what was there.
    """
    end_s = time.monotonic() + limit_s
    while True:
        nodes = look()
        usable = tuple({node.node_id: node for node in nodes if needed.can_use(node)}.values())
        if len(usable) >= needed.nodes:
            return usable
        if time.monotonic() >= end_s:
            raise Unavailable(
                f"the trainer needs {needed.words}; after {limit_s:g} s the cluster has {found_words(nodes, needed)}, "
                f"of which {len(usable)} can be used; start the missing ones with `lilo cluster join`"
            )
        time.sleep(min(LOOK_S, max(end_s - time.monotonic(), 0.01)))
