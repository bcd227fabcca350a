"""Deployment: what `lilo deploy` asks a provider for, beyond the GPUs that the topology and the sampler name.

`lilo serve` on a machine of your own reads none of it.
"""

from __future__ import annotations

from pydantic import Field

from lilo_definitions.part import Part


class Deployment(Part):
    """Rented containers and what is attached to them."""

    trainer_timeout_hours: float = Field(default=24.0, gt=0, le=24)
    """Longest life of a trainer container; 24 h is the provider's own limit. A run goes on from its newest verified
    state in the next one."""
    single_use_containers: bool = True
    """Whether a trainer container ends with its call: a process group that failed leaves nothing behind for the next."""
    cpus_per_node: float = Field(default=8.0, gt=0)
    """Physical cores of a trainer node: driver, front and one thread per rank."""
    memory_gib_per_node: int = Field(default=64, gt=0)
    """Host memory of a trainer node: weights while they are read, captures until they are published."""
    models_volume: str = Field(default="lilo-models", min_length=1)
    """Volume with base models, mounted read-only."""
    checkpoints_volume: str = Field(default="lilo-checkpoints", min_length=1)
    """Volume that training states are published to; the ranks get it as LILO_CHECKPOINT_VOLUME."""
    bulletin_volume: str = Field(default="lilo-bulletin", min_length=1)
    """Volume that sampler states are published to; the ranks get it as LILO_BULLETIN_VOLUME."""
    kernel_cache_volume: str | None = Field(default=None, min_length=1)
    """Volume with compiled kernels, which otherwise are compiled again in every new container; None: no such volume."""
    secrets: tuple[str, ...] = Field(default=("lilo-api-keys",), strict=False)
    """Names of the provider's secrets whose variables the containers get; never the values."""
