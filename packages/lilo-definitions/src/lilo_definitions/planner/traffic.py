"""Traffic: bytes that one rank receives while one row is trained, by the axis that they belong to."""

from __future__ import annotations

from dataclasses import dataclass

from lilo_definitions.planner.job import Job
from lilo_definitions.trainer import Keep, Levels

_FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of one row on one rank."""

    tp: float
    """Residual streams gathered before, and scattered after, each block, forward and backward; inside a node."""
    kv: float
    """Keys and values gathered forward and backward, and their float32 gradients; over the context-parallel ranks."""
    delta: float
    """States of the delta nets passed on as affine maps, independent of length; over the context-parallel ranks."""


def traffic_of(job: Job, keep: Keep | Levels) -> Traffic:
    """What one rank receives for one row of the job's context."""
    model, e = job.architecture, job.dtype_bytes
    share = job.context / job.cp
    levels = keep if isinstance(keep, tuple) else (keep,) * model.layers
    again = levels.count("input")
    softmax_again = list(zip(model.kinds, levels, strict=True)).count(("softmax", "input"))
    stream = share * model.hidden * e * (job.tp - 1) / job.tp
    others = (job.cp - 1) / job.cp
    kv_width = 2 * model.kv_width / job.kv_shards
    passes = model.softmax_layers * (2 * e + _FP32) + softmax_again * e
    delta = 0.0
    if model.linear is not None:
        line = model.linear
        state = line.value_heads / job.tp * line.key_dim * (line.key_dim + line.value_dim) * _FP32
        delta_again = list(zip(model.kinds, levels, strict=True)).count(("linear", "input"))
        # Maps of the states forward, of their gradients backward; the former again where recomputed.
        delta = (2 * model.linear_layers + delta_again) * others * 2 * job.cp * state
    return Traffic(
        # A gather and a scatter around each of two blocks, forward and backward; the gathers again where recomputed.
        tp=stream * (8 * model.layers + 2 * again),
        kv=job.context * others * kv_width * passes,
        delta=delta,
    )
