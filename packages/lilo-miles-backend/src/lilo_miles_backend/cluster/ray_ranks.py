"""Ray ranks: one actor per rank on the machines of a cluster. Whatever fails on the way, everything is given back.

connect -> enough machines -> room on all of them -> actors -> each tells where it is -> the core of all launchers
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, cast

import ray
import ray.exceptions
from lilo_definitions import Definition
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.errors import BackendLost
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lilo_miles_backend.cluster.actor import RankActor, Whereabouts
from lilo_miles_backend.cluster.connect import connect, disconnect
from lilo_miles_backend.cluster.nodes import Needed, nodes_of, require_cluster_nodes
from lilo_miles_backend.cluster.placement import bundles_in_order, give_back, place
from lilo_miles_backend.cluster.ray_member import RayMember
from lilo_miles_backend.config import BackendSettings, handed_over
from lilo_miles_backend.launchers.driver import DrivenRanks
from lilo_miles_backend.launchers.facts import local_facts
from lilo_miles_backend.launchers.limits import DriverLimits
from lilo_miles_backend.ranks.place import RankPlace

NOWHERE = "tcp://0.0.0.0:0"
"""Until rank 0 has told where the ranks meet."""


def start_ray_ranks(config: BackendConfig, settings: BackendSettings, address: str) -> DrivenRanks:
    """Start all ranks on a cluster; returns when each holds the base model.

    Raises:
        InvalidRequest: the address is none.
        Unavailable: the cluster does not answer, or has not the machines or the room in time.
        LiloError: the ranks could not start; everything is given back.
    """
    definition = config.definition
    needed = Needed.of(definition.topology)
    with ExitStack() as held:
        connect(address)
        held.callback(disconnect)
        require_cluster_nodes(
            needed, lambda: nodes_of(ray.nodes()), limit_s=settings.cluster_wait_s
        )
        group = place(needed)
        held.callback(give_back, group)
        actors = _actors(config, settings, group)
        where = _locate(actors, definition)
        members = [
            RayMember(rank, actor, whereabouts, definition.limits.publication_workers)
            for rank, (actor, whereabouts) in enumerate(zip(actors, where, strict=True))
        ]
        ranks = DrivenRanks(
            definition,
            members,
            DriverLimits(limits=definition.limits, silence_s=settings.rank_silence_s),
            facts=local_facts(config, settings),
            give_back=held.pop_all().close,
        )
    ranks.begin(f"tcp://{_host(where[0].address)}:{where[0].free_port}")
    return ranks


def _actors(config: BackendConfig, settings: BackendSettings, group: PlacementGroup) -> list[Any]:
    """One actor per rank, neighbours on one machine."""
    topology = config.definition.topology
    per_node = topology.world_size // topology.nodes
    bundles = bundles_in_order(group)
    workers = config.definition.limits.publication_workers
    # Applied here, so that the number of publications at once can be the definition's.
    groups = {"train": 1, "persist": 1, "publish": workers, "beat": 1}
    make: Any = cast(Any, ray.remote)(concurrency_groups=groups)(RankActor)
    return [
        make.options(
            num_cpus=1,
            num_gpus=1 if topology.device == "cuda" else 0,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundles[rank // per_node]
            ),
            runtime_env={"env_vars": dict(handed_over())},
        ).remote(config.definition, (config.checkpoints_root, config.epoch), settings)
        for rank in range(topology.world_size)
    ]


def _locate(actors: Sequence[Any], definition: Definition) -> list[Whereabouts]:
    """Tell every actor its place; where each runs."""
    limit_s = definition.limits.startup_timeout_s
    per_node = definition.topology.world_size // definition.topology.nodes
    places = [
        RankPlace(
            rank=rank,
            world_size=len(actors),
            rendezvous=NOWHERE,
            # With Ray a process sees the one GPU that it was given.
            local_rank=0 if definition.topology.device == "cuda" else rank % per_node,
        )
        for rank in range(len(actors))
    ]
    try:
        return ray.get(
            [actor.locate.remote(one) for actor, one in zip(actors, places, strict=True)],
            timeout=limit_s,
        )
    except ray.exceptions.RayError as error:
        text = " ".join(str(error).split())
        raise BackendLost(
            f"the ranks' processes did not start within limits.startup_timeout_s of {limit_s:g} s: {text[:600]}"
        ) from error


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
