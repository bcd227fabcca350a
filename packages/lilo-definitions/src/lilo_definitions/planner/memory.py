"""Memory: what one rank holds at the moment of its peak, part by part. Ranks are alike: every layout here is balanced."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from lilo_definitions.planner import activations
from lilo_definitions.planner.adapters import adapter_parameters_on_a_rank
from lilo_definitions.planner.job import Job, TrainerName
from lilo_definitions.planner.levels import fullest_of, moments_by_name
from lilo_definitions.planner.moments import Moment, layer_moments, loss_moment
from lilo_definitions.trainer import Keep, Levels

USABLE_SHARE = 0.93
"""Of a GPU's memory: the allocator's rounding and fragments take a few percent where shapes are bucketed."""
CONTEXT_BYTES = 1.5e9
"""Of the CUDA context and the communication buffers, which no allocator counts."""
_MILES_LOGIT_BYTES = 8
"""Per logit when all are made at once: bfloat16, their float32 copy, and the bfloat16 gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank at its peak."""

    weights: float
    """The frozen base: this rank's share, embedding and head included."""
    adapters: float
    """Float32 masters of all slots, and their copies in the activations' type on GPUs."""
    optimizer: float
    """Two float32 moments of all slots."""
    gradients: float
    """Float32 gradients of all slots."""
    kept: float
    """Activations that the layers keep for their backward."""
    kv_gather: float
    """Keys and values of all context-parallel ranks, for the layer at work."""
    logits: float
    """A chunk of them, or all."""
    working: float
    """Everything else that the moment of the peak holds."""

    @property
    def peak(self) -> float:
        """Their sum: the most that is allocated at once."""
        return sum(getattr(self, field.name) for field in fields(self))

    def parts(self) -> dict[str, float]:
        """Bytes by part, in the order above."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def memory_of(job: Job, trainer: TrainerName, keep: Keep | Levels) -> Memory:
    """One rank's memory.

    Args:
        job: what is planned.
        trainer: whose way of computing.
        keep: what layers keep, all alike or each; the miles trainer keeps inputs whatever this says.
    """
    if isinstance(keep, tuple):
        fullest = fullest_of(job, keep)
        kept, peak = fullest.kept, fullest.moment
    else:
        kept = _kept_by_all(job, trainer, keep)
        peak = max(moments_of(job, trainer, keep), key=lambda moment: moment.total)
    held = job.slots * adapter_parameters_on_a_rank(job)
    copies = 0 if job.gpu is None else job.dtype_bytes
    return Memory(
        weights=_weights(job),
        adapters=held * (4 + copies),
        optimizer=held * 8,
        gradients=held * 4,
        kept=kept,
        kv_gather=peak.kv_gather,
        logits=peak.logits,
        working=peak.working,
    )


def held_bytes(job: Job) -> float:
    """What a rank holds throughout: weights, and all slots with their optimizers."""
    memory = memory_of(job, "lilo", "input")
    return memory.weights + memory.adapters + memory.optimizer + memory.gradients


def _kept_by_all(job: Job, trainer: TrainerName, keep: Keep) -> float:
    if trainer == "miles":
        return activations.kept_bytes(replace(job, offload_inputs=False), "input")
    return activations.kept_bytes(job, keep)


def moments_of(job: Job, trainer: TrainerName, keep: Keep | Levels) -> list[Moment]:
    """The moments that can be the peak: the loss, and the backward of each kind of block.

    Where all layers keep alike, the fullest is while all of them still do, so no other layer needs to be looked at.
    """
    if trainer == "miles":
        return _miles_moments(job)
    if isinstance(keep, tuple):
        return moments_by_name(job, keep)
    return _moments(job, keep)


def limit_bytes(job: Job) -> float | None:
    """What may be allocated on one rank's device; None on CPU, where it is not known."""
    if job.gpu is None:
        return None
    return job.gpu.memory_bytes * USABLE_SHARE - CONTEXT_BYTES - job.reserved_bytes


def _weights(job: Job) -> float:
    model = job.architecture
    sharded = model.parameters * job.dtype_bytes / job.tp
    if job.shard_embedding:
        return sharded
    return sharded + model.head_weights * job.dtype_bytes * (1 - 1 / job.tp)


def _moments(job: Job, keep: Keep) -> list[Moment]:
    moments = [loss_moment(job), *layer_moments(job, "softmax", keep)]
    if job.architecture.linear is not None:
        moments.append(layer_moments(job, "linear", keep)[1])
    return moments


def _miles_moments(job: Job) -> list[Moment]:
    """All logits at once, or one layer computed again."""
    logits = job.tokens_per_rank * job.architecture.vocab / job.tp * _MILES_LOGIT_BYTES
    return [Moment(name="loss", logits=logits), *_moments(job, "input")[1:]]
