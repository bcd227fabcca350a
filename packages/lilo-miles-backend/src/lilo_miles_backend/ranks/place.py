"""RankPlace: which member of the trainer a process is, and where it meets the others. Chosen by the launcher.

Picklable and free of torch, so that a driver can make one and send it before any rank exists.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One rank's place among all ranks."""

    rank: int
    """0 to `world_size` - 1."""
    world_size: int
    """tp x cp x dp of the definition's topology."""
    rendezvous: str
    """Where the ranks meet, as torch's `init_method`: `tcp://host:port` or `file:///path`; the same on all ranks."""
    node: str = "local"
    """Identity of the machine, for people and for placement; never read from a hostname alone."""
    local_rank: int = 0
    """Position among the ranks of the same node: chooses the device."""
    num_devices: int = 1
    """GPUs that every process of the node must see, where ranks run on GPUs: all of its ranks', or its own alone where
    the cluster shows each process only that."""

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size, (
            f"rank {self.rank} is not one of the {self.world_size} ranks of its world"
        )
