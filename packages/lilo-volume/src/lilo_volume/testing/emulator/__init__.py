"""A volume with a view per container, on one machine: the rules, the modes, the test vectors."""

from lilo_volume.testing.emulator.container import Container
from lilo_volume.testing.emulator.emulator import Emulator
from lilo_volume.testing.emulator.modes import SWEPT, Modes, every, pairwise
from lilo_volume.testing.emulator.server import EmulatedFault, Server
from lilo_volume.testing.emulator.vectors import (
    VECTORS,
    InProcess,
    OneProcessEach,
    Vector,
    parse_vectors,
    run_vector,
)
from lilo_volume.testing.emulator.volume import EmulatedVolume

__all__ = [
    "SWEPT",
    "VECTORS",
    "Container",
    "EmulatedFault",
    "EmulatedVolume",
    "Emulator",
    "InProcess",
    "Modes",
    "OneProcessEach",
    "Server",
    "Vector",
    "every",
    "pairwise",
    "parse_vectors",
    "run_vector",
]
