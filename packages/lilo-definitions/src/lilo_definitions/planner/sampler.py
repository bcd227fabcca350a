"""SamplerMemory: what the embedded sampler holds on a GPU that it shares with a trainer's rank.

Trainer and sampler are processes that do not talk, so both compute this from the definition: the trainer leaves so much
free, the sampler takes no more. Not the memory of an external engine's replicas, which have GPUs of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lilo_definitions.architecture import Architecture
from lilo_definitions.definition import Definition
from lilo_definitions.planner.adapters import adapter_parameters
from lilo_definitions.planner.job import Job
from lilo_definitions.planner.memory import CONTEXT_BYTES, USABLE_SHARE, memory_of

WORKING_BYTES = 2e9
"""Activations of a piece of prompt, and float32 and float64 logits of a full batch."""
_CACHE_SHARE = 0.25
"""Of what is left beside the leanest trainer; the rest lets its layers keep more."""
STACKED_ADAPTERS = 8
"""Of those that it holds, so many are held a second time, side by side, while a batch uses several of them."""
_FUSED_SHARE = 1.5
"""Of an adapter's numbers, what it takes to hold them: the factors of fused projections hold zeros too."""
_LEAST_ROWS = 2
"""Whole contexts that always fit: one that is computed, and one that generates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerMemory:
    """Bytes on one GPU."""

    weights: float
    """The whole base model, whatever the trainer's layout."""
    adapters: float
    """As many as it holds, of the largest rank."""
    cache: float
    """Most that keys, values and states of rows may take."""
    row_bytes: int
    """Of a row's state, whatever its length."""
    token_bytes: int
    """Of the keys and values of one token."""

    @property
    def total(self) -> float:
        """With what it works in and its CUDA context."""
        return self.weights + self.adapters + self.cache + WORKING_BYTES + CONTEXT_BYTES


def sampler_memory(definition: Definition, *, device_bytes: float) -> SamplerMemory | None:
    """The sampler's share of a GPU; None where it is on no GPU of the trainer's.

    Args:
        definition: of trainer and sampler.
        device_bytes: all memory of the GPU.

    Raises:
        InvalidSource: the model's sizes are neither known nor readable here.
    """
    if definition.sampler.engine != "embedded" or definition.topology.device != "cuda":
        return None
    job = Job.of(definition)
    weights = job.architecture.parameters * job.dtype_bytes
    held = definition.sampler.max_adapters
    held += min(held, STACKED_ADAPTERS)
    adapters = held * adapter_parameters(job) * job.dtype_bytes * _FUSED_SHARE
    row, token = _row_bytes(job.architecture, job.dtype_bytes), _token_bytes(job)
    whole = row + definition.context * token
    left = (
        device_bytes * USABLE_SHARE
        - 2 * CONTEXT_BYTES
        - WORKING_BYTES
        - weights
        - adapters
        - memory_of(job, "lilo", "input").peak
    )
    most = definition.sampler.sequences * whole
    cache = min(most, max(_LEAST_ROWS * whole, _CACHE_SHARE * left))
    return SamplerMemory(
        weights=weights, adapters=adapters, cache=cache, row_bytes=row, token_bytes=token
    )


def beside_sampler(job: Job, definition: Definition) -> Job:
    """The job with the sampler's share of its GPU reserved.

    Raises:
        InvalidSource: see `sampler_memory`.
    """
    if job.gpu is None:
        return job
    sampler = sampler_memory(definition, device_bytes=job.gpu.memory_bytes)
    return job if sampler is None else replace(job, reserved_bytes=sampler.total)


def _token_bytes(job: Job) -> int:
    model = job.architecture
    return 2 * model.softmax_layers * model.kv_width * job.dtype_bytes


def _row_bytes(model: Architecture, dtype_bytes: int) -> int:
    """A float32 state per value head, and the inputs that the next convolution looks back on."""
    line = model.linear
    if line is None:
        return 0
    state = 4 * line.value_heads * line.key_dim * line.value_dim
    window = (line.conv_kernel - 1) * line.conv_channels * dtype_bytes
    return model.linear_layers * (state + window)
