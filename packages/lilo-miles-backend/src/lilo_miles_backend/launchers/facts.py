"""Facts: what a rank's process is made of: versions, configuration, variables; compared over all ranks at start."""

from __future__ import annotations

import platform
from importlib.metadata import version

from lilo_definitions import digest
from lilo_engine.commands.backend import BackendConfig

from lilo_miles_backend.config import BackendSettings, handed_over

DISTRIBUTIONS = (
    "lilo-miles-backend",
    "lilo-engine",
    "lilo-volume",
    "lilo-definitions",
    "torch",
    "megatron-core",
)


def local_facts(config: BackendConfig, settings: BackendSettings) -> dict[str, str]:
    """This process's facts, by name."""
    facts = {name: version(name) for name in DISTRIBUTIONS}
    facts["python"] = platform.python_version()
    facts["definition"] = digest(config.definition)
    facts["checkpoints"] = config.checkpoints_root
    facts["threads"] = str(settings.threads_per_rank)
    facts.update(handed_over())
    return facts
