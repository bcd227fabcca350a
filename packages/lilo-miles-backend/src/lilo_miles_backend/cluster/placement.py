"""Placement: room for all ranks on distinct machines, taken whole or not at all.

One bundle per machine, so that the ranks of a tensor-parallel group, which are neighbours, stay on one.
"""

from __future__ import annotations

import time

import ray
from lilo_engine.errors import Unavailable
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from lilo_miles_backend.cluster.nodes import Needed, found_words, nodes_of

PLACE_LIMIT_S = 20.0
"""For room on machines that are there: it is free, or somebody else has it."""
REMOVE_LIMIT_S = 5.0
LOOK_S = 0.05


def place(needed: Needed) -> PlacementGroup:
    """Take the room; waits for all of it.

    Raises:
        Unavailable: it is not free; nothing is kept.
    """
    group = placement_group(
        [{name: float(number) for name, number in needed.devices.items()}] * needed.nodes,
        strategy="STRICT_SPREAD" if needed.nodes > 1 else "STRICT_PACK",
    )
    if not group.wait(PLACE_LIMIT_S):
        there = found_words(nodes_of(ray.nodes()), needed)
        free = ", ".join(
            f"{ray.available_resources().get(name, 0):g} {name}" for name in needed.devices
        )
        give_back(group)
        raise Unavailable(
            f"there was no room for {needed.words} within {PLACE_LIMIT_S:g} s: the cluster has {there}, and {free} "
            "are free; end what else runs there"
        )
    return group


def bundles_in_order(group: PlacementGroup) -> list[int]:
    """Indices of the bundles, that of this driver's machine first.

    Rank 0 publishes what samplers beside the driver read: in one view of the volume that is there at once.
    """
    nodes: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    ours = ray.get_runtime_context().get_node_id()
    return sorted(nodes, key=lambda index: (nodes[index] != ours, index))


def give_back(group: PlacementGroup) -> None:
    """Free the room; returns when Ray says so, or after `REMOVE_LIMIT_S`."""
    remove_placement_group(group)
    end_s = time.monotonic() + REMOVE_LIMIT_S
    while time.monotonic() < end_s:
        state = ray.util.placement_group_table(group).get("state", "REMOVED")
        if state == "REMOVED":
            return
        time.sleep(LOOK_S)  # Ray has no event for it
