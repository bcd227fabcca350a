"""launch: choose the launcher that a definition's topology asks for, or say what this version offers."""

from __future__ import annotations

from lilo_engine.commands.backend import BackendConfig

from lilo_miles_backend.config import BackendSettings
from lilo_miles_backend.launchers.in_process import InProcessRanks
from lilo_miles_backend.launchers.offered import check_offered
from lilo_miles_backend.launchers.ranks import Ranks


def launch(config: BackendConfig, settings: BackendSettings) -> Ranks:
    """Start all ranks; returns when each holds the base model.

    Raises:
        InvalidRequest: the definition asks for what is not built, or the model's files do not fit it.
    """
    check_offered(config.definition)
    return InProcessRanks(config, settings)
