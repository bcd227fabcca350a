"""launch: choose the launcher that a definition's topology and this machine's settings ask for."""

from __future__ import annotations

from lilo_engine.commands.backend import BackendConfig
from lilo_engine.errors import InvalidRequest

from lilo_miles_backend.config import BackendSettings
from lilo_miles_backend.launchers.in_process import InProcessRanks
from lilo_miles_backend.launchers.offered import check_offered
from lilo_miles_backend.launchers.ranks import Ranks
from lilo_miles_backend.launchers.spawned import spawn_ranks


def launch(config: BackendConfig, settings: BackendSettings) -> Ranks:
    """Start all ranks; returns when each holds the base model.

    Raises:
        InvalidRequest: the definition asks for what is not built, or the model's files do not fit it.
        Unavailable: the cluster has not the machines that it asks for.
        BackendLost: the ranks could not be started; names the first cause.
    """
    check_offered(config.definition)
    topology = config.definition.topology
    if settings.ray_address is not None:
        # Ray takes a second to import, which only those pay who use it.
        from lilo_miles_backend.cluster.ray_ranks import start_ray_ranks  # noqa: PLC0415

        return start_ray_ranks(config, settings, settings.ray_address)
    if topology.nodes > 1:
        raise InvalidRequest(
            f"definition {config.definition.name!r} runs on {topology.nodes} nodes, and no cluster is named; start "
            "one with `lilo cluster head` and `lilo cluster join`, and serve with --ray ADDRESS"
        )
    if topology.world_size == 1:
        return InProcessRanks(config, settings)
    return spawn_ranks(config, settings)
