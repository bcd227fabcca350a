"""Sampler: what answers `sample`: the engine inside Lilo, or a pool of GPU replicas beside the trainer."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from lilo_definitions.gpus import GpuName
from lilo_definitions.part import Part, misfit


class Pool(Part):
    """Replicas of an external sampling engine, each on GPUs of its own."""

    gpu: GpuName
    """Which GPU a replica runs on."""
    gpus_per_replica: int = Field(gt=0)
    """GPUs of one replica, its tensor-parallel degree: as few as hold the weights and the running sequences' cache."""
    min_replicas: int = Field(ge=0)
    """Replicas that are always up; 0 lets an unused pool cost nothing."""
    max_replicas: int = Field(gt=0)
    """Replicas that a busy pool grows to."""
    target_sequences: int = Field(gt=0)
    """Sequences per replica that the pool aims at; below the most it can run, so that it grows before it queues."""
    adapters_per_batch: int = Field(default=8, gt=0)
    """Different adapters in one decoding batch; the engine keeps GPU memory for so many."""
    max_queued: int = Field(default=8, gt=0)
    """Sequences that a replica lets wait before it sends callers to another one."""
    memory_fraction: float = Field(default=0.8, gt=0, lt=1)
    """Of GPU memory, for weights and cache; the rest is for activations and adapters."""
    scale_down_s: int = Field(default=300, gt=0)
    """Idle time before a replica is given back; loading the weights again takes minutes."""
    startup_timeout_s: int = Field(default=1200, gt=0)
    """From starting a replica until it answers; reading the weights is most of it."""

    @model_validator(mode="after")
    def _replicas_in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise misfit(
                "min_replicas",
                f"min_replicas {self.min_replicas} is over max_replicas {self.max_replicas}; raise max_replicas",
            )
        return self


class Sampler(Part):
    """The sampling engine beside the trainer."""

    engine: Literal["embedded", "sglang", "vllm"] = "embedded"
    """Name in the entry-point group `lilo.samplers`: Lilo's own, or a pool of servers."""
    sequences: int = Field(default=64, gt=0)
    """Sequences generated at once by one engine; more wait. Bounds the cache of keys and values."""
    max_adapters: int = Field(default=64, gt=0)
    """Adapters held in memory; the least recently used one is dropped and loaded again when asked for."""
    ephemeral_versions: int = Field(default=16, gt=0)
    """Unnamed versions kept per model; older ones are removed and then answer "gone"."""
    pool: Pool | None = None
    """The replicas of an external engine; the embedded one has none."""

    @model_validator(mode="after")
    def _pool_where_one_is_needed(self) -> Self:
        if self.engine == "embedded" and self.pool is not None:
            raise misfit(
                "pool", "engine embedded runs beside the trainer and has no pool; leave pool out"
            )
        if self.engine != "embedded" and self.pool is None:
            raise misfit(
                "pool",
                f"engine {self.engine} needs a pool: gpu, gpus_per_replica, min_replicas, ...",
            )
        if self.pool is not None and self.pool.target_sequences > self.sequences:
            raise misfit(
                "pool.target_sequences",
                f"pool.target_sequences {self.pool.target_sequences} is over sequences {self.sequences}, "
                "what a replica can run; lower it",
            )
        return self
