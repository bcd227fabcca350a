"""Seconds and dollars of a step, from operations and stated rates.

The rates are measurements on H200, not peaks: what a layer's products reach with norms, adapters and elementwise work
included. Another GPU's are scaled by its data sheet. Communication is counted as if none of it were hidden, at what
collectives of these sizes reach; the miles rate contains its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lilo_definitions.gpus import BF16_FLOPS_PER_S
from lilo_definitions.planner.flops import flops_of
from lilo_definitions.planner.job import Job, TrainerName
from lilo_definitions.planner.traffic import traffic_of
from lilo_definitions.trainer import Keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Operations a second of one GPU, by kind of work."""

    layers: float
    head: float
    scores_forward: float
    scores_backward: float
    delta: float


_LAYERS, _HEAD = 510e12, 645e12
_DELTA = 40e12
"""Not measured: 0.015 s of a 27B layer's 32k tokens a rank at TP2, an estimate."""
_ATTENTION: Mapping[int, tuple[float, float]] = MappingProxyType(
    {128: (612e12, 612e12), 256: (690e12, 370e12)}
)
"""Forward and backward by head size; the backward at 256 is bound by registers in every kernel there is."""
_MILES = 340e12
"""Of all work with full recompute: 17.4 s a pass of 250,400 tokens over 16 H200 in the published run."""
NVLINK_BYTES_PER_S = 150e9
"""Of one GPU in collectives of some 16 MiB inside a node, measured; 243e9 at 256 MiB."""
NETWORK_BYTES_PER_S = 45e9
"""Of one GPU between nodes, with a 400 Gbit/s adapter each; a data sheet's figure."""
_CPU = 80e9
"""One thread, float32, adapters counted: 64, 89 and 98 measured with 0.8M, 11M and 59M parameters on one server core;
differs by machine."""


def rates_of(job: Job, trainer: TrainerName) -> Rates:
    """The rates of one rank of this job."""
    if job.gpu is None:
        return Rates(layers=_CPU, head=_CPU, scores_forward=_CPU, scores_backward=_CPU, delta=_CPU)
    if trainer == "miles":
        return _scaled(_MILES, _MILES, _MILES, _MILES, _MILES, speed=job.gpu.speed)
    forward, backward = _ATTENTION[128 if job.architecture.head_dim <= 128 else 256]
    return _scaled(_LAYERS, _HEAD, forward, backward, _DELTA, speed=job.gpu.speed)


def _scaled(
    layers: float, head: float, forward: float, backward: float, delta: float, *, speed: float
) -> Rates:
    return Rates(
        layers=layers * speed,
        head=head * speed,
        scores_forward=forward * speed,
        scores_backward=backward * speed,
        delta=delta * speed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step of so many full rows."""

    rows: int
    tokens: int
    seconds: float
    tokens_per_s_per_rank: float
    useful_share: float | None
    """Useful operations over the GPU's dense bf16 peak; None on CPU."""
    usd: float | None
    """Price of the trainer's GPUs for that time; None on CPU."""


def step_of(
    job: Job,
    trainer: TrainerName,
    keep: Keep,
    *,
    rows: int | None = None,
    usd_per_gpu_hour: float | None = None,
) -> Step:
    """Time and price of a step.

    Args:
        job: what is planned.
        trainer: whose rates.
        keep: what layers keep.
        rows: rows of the job's context in the step; None: one per data-parallel rank.
        usd_per_gpu_hour: instead of the list price.
    """
    count = job.dp if rows is None else rows
    # Data-parallel ranks that have no row wait for those that have.
    rows_in_turn = -(-count // job.dp)
    seconds = rows_in_turn * seconds_per_row(job, trainer, keep)
    speed = count * job.context / seconds / job.world_size
    share, usd = None, None
    if job.gpu is not None:
        share = flops_of(job, keep).useful * speed / (BF16_FLOPS_PER_S * job.gpu.speed)
        price = job.gpu.usd_per_hour if usd_per_gpu_hour is None else usd_per_gpu_hour
        usd = seconds / 3600 * price * job.world_size
    return Step(
        rows=count,
        tokens=count * job.context,
        seconds=seconds,
        tokens_per_s_per_rank=speed,
        useful_share=share,
        usd=usd,
    )


def seconds_per_row(job: Job, trainer: TrainerName, keep: Keep) -> float:
    """Time of one row of the job's context on the tp x cp ranks that share it."""
    flops, rates = flops_of(job, keep), rates_of(job, trainer)
    per_token = (
        (flops.layers + flops.layers_again) / rates.layers
        + flops.head / rates.head
        + flops.scores_forward / rates.scores_forward
        + flops.scores_backward / rates.scores_backward
        + flops.delta / rates.delta
    )
    if trainer == "miles" or job.gpu is None:
        # The rates of lilo's layers on GPUs were measured with adapters in them.
        per_token += flops.adapters / rates.layers
    seconds = per_token * job.context / (job.tp * job.cp)
    if trainer == "lilo" and job.gpu is not None:
        seconds += _seconds_of_traffic(job, keep)
    return seconds


def _seconds_of_traffic(job: Job, keep: Keep) -> float:
    traffic = traffic_of(job, keep)
    inside = job.tp * job.cp * job.nodes <= job.world_size  # a row's ranks share a node
    between = NVLINK_BYTES_PER_S if inside else NETWORK_BYTES_PER_S
    return traffic.tp / NVLINK_BYTES_PER_S + (traffic.kv + traffic.delta) / between
