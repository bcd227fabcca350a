"""The crash sweep: publishing protocols against every fault at every step in every mode of an emulated volume."""

from lilo_volume.testing.sweep.case import (
    NODES,
    WORLD_SIZE,
    Case,
    Setting,
    all_settings,
    cases,
    pairwise_settings,
)
from lilo_volume.testing.sweep.invariants import INVARIANTS
from lilo_volume.testing.sweep.protocols import PROTOCOLS, Save, Saving, copying, in_place
from lilo_volume.testing.sweep.sweep import SweepReport, named_steps, sweep
from lilo_volume.testing.sweep.world import Violation, old_checkpoint, run_case

__all__ = [
    "INVARIANTS",
    "NODES",
    "PROTOCOLS",
    "WORLD_SIZE",
    "Case",
    "Save",
    "Saving",
    "Setting",
    "SweepReport",
    "Violation",
    "all_settings",
    "cases",
    "copying",
    "in_place",
    "named_steps",
    "old_checkpoint",
    "pairwise_settings",
    "run_case",
    "sweep",
]
