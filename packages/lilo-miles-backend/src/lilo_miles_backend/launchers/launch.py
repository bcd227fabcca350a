"""launch: choose the launcher that a definition's topology asks for, or say what this version offers."""

from __future__ import annotations

from lilo_definitions import Definition
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.errors import InvalidRequest

from lilo_miles_backend.config import BackendSettings
from lilo_miles_backend.launchers.in_process import InProcessRanks


def check_topology(definition: Definition) -> None:
    """Refuse a layout that no launcher of this version can start.

    Raises:
        InvalidRequest: names the layout asked for and the one offered.
    """
    topology = definition.topology
    if topology.device != "cpu" or topology.nodes != 1 or topology.world_size != 1:
        raise InvalidRequest(
            f"definition {definition.name!r} asks for device {topology.device}, nodes {topology.nodes}, "
            f"tp {topology.tp}, cp {topology.cp}, dp {topology.dp}; this version of lilo-miles-backend trains "
            "with one in-process rank: device cpu, nodes 1, tp 1, cp 1, dp 1"
        )


def launch(config: BackendConfig, settings: BackendSettings) -> InProcessRanks:
    """Start all ranks; returns when each holds the base model.

    Raises:
        InvalidRequest: the layout cannot be started, or the model's files do not fit the definition.
    """
    check_topology(config.definition)
    return InProcessRanks(config, settings)
