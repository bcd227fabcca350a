"""Seconds and dollars of a step, from operations and stated rates.

Communication is counted as if none of it were hidden, at what collectives of these sizes reach; the miles rate contains
its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from lilo_definitions.gpus import BF16_FLOPS_PER_S
from lilo_definitions.planner.flops import flops_of
from lilo_definitions.planner.job import Job, TrainerName
from lilo_definitions.planner.rates import rates_of
from lilo_definitions.planner.traffic import traffic_of
from lilo_definitions.trainer import Keep, Levels

NVLINK_BYTES_PER_S = 150e9
"""Of one GPU in collectives of some 16 MiB inside a node, measured; 243e9 at 256 MiB."""
NETWORK_BYTES_PER_S = 45e9
"""Of one GPU between nodes, with a 400 Gbit/s adapter each; a data sheet's figure."""


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
    keep: Keep | Levels,
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


def seconds_per_row(job: Job, trainer: TrainerName, keep: Keep | Levels) -> float:
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


def _seconds_of_traffic(job: Job, keep: Keep | Levels) -> float:
    traffic = traffic_of(job, keep)
    inside = job.tp * job.cp * job.nodes <= job.world_size  # a row's ranks share a node
    between = NVLINK_BYTES_PER_S if inside else NETWORK_BYTES_PER_S
    return traffic.tp / NVLINK_BYTES_PER_S + (traffic.kv + traffic.delta) / between
