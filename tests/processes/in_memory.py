"""Parts of an engine with trainer and sampler in memory. Not a test."""

from __future__ import annotations

from lilo_definitions import get
from lilo_engine.commands.launcher import MemoryLauncher
from lilo_engine.config import DataFolder
from lilo_engine.control.lease import Lease
from lilo_engine.control.records import Records
from lilo_engine.parts import Parts, open_control
from lilo_engine.sampling.launcher import MemorySamplerLauncher


def parts(data: DataFolder, records: Records, lease: Lease, slots: int = 1024) -> Parts:
    """For many tests at once, few of which end their sessions: a slot for each of their models."""
    definition = get("tiny").derive(lora={"slots": slots})
    return Parts(
        definition=definition,
        data=data,
        launcher=MemoryLauncher(definition=definition, checkpoints_root=data.checkpoints),
        sampler_launcher=MemorySamplerLauncher(definition),
        control=open_control(data, records=records),
        lease=lease,
    )
