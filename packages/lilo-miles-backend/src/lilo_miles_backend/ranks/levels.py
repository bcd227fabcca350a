"""LayerLevels: what each layer keeps for its backward in one microbatch, and the peak of memory that was planned for it.

Fixed by the definition, or (`auto`) the most that fits beside what a rank holds throughout: weights, all slots, and the
sampler where it shares the GPU. It is computed with the planner's own functions from the definition, the tokens of the
microbatch and the smallest GPU of the world, never from what happens to be allocated: ranks that compute a layer again
gather keys and values again, so all of them must choose alike.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from lilo_definitions import Definition
from lilo_definitions.planner import Job, beside_sampler, levels_of
from lilo_definitions.planner.memory import held_bytes, memory_of
from lilo_definitions.trainer import Keep, KeepActivations, Levels

from lilo_miles_backend.ranks.collectives import Axis, collected
from lilo_miles_backend.ranks.memory import DeviceMemory

_REMEMBERED = 256
"""Lengths of streams whose levels are not computed again; there are fewer where streams have few lengths."""


class LayerLevels:
    """Chooses for one rank."""

    def __init__(self, definition: Definition, memory: DeviceMemory, world: Axis) -> None:
        """Ask all ranks for the size of their GPU, and plan for the smallest."""
        sizes: list[int | None] = collected(memory.total_bytes, world)
        job = Job.of(definition)
        known = [size for size in sizes if size is not None]
        if job.gpu is not None and known:
            job = replace(job, gpu=replace(job.gpu, memory_bytes=min(known)))
        self._job = beside_sampler(job, definition)
        self._keep: KeepActivations = definition.trainer.keep_activations
        self.of = lru_cache(_REMEMBERED)(self._of)
        """The level of each layer for a stream of so many tokens on this rank."""
        self.planned_bytes = lru_cache(_REMEMBERED)(self._planned_bytes)
        """The peak that is planned for it; None on CPU, where nobody counts allocations."""

    @property
    def pass_bytes(self) -> float | None:
        """Most that a pass is planned to add to what a rank holds throughout; None on CPU."""
        if self._job.gpu is None:
            return None
        tokens = self._job.tokens_per_rank
        return memory_of(self._job, "lilo", self.of(tokens)).peak - held_bytes(self._job)

    def _of(self, tokens: int) -> Levels:
        if self._keep == "auto":
            return levels_of(self._job_of(tokens))
        fixed: Keep = self._keep
        return (fixed,) * self._job.architecture.layers

    def _planned_bytes(self, tokens: int) -> float | None:
        if self._job.gpu is None:
            return None
        return memory_of(self._job_of(tokens), "lilo", self.of(tokens)).peak

    def _job_of(self, tokens: int) -> Job:
        context = min(self._job.context, tokens * self._job.cp)
        return replace(self._job, tokens_per_rank=tokens, context=context)
