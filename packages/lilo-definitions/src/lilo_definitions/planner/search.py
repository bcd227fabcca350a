"""Other layouts of a job: the nearest one that fits, and the fastest ones of a number of GPUs. Pure enumeration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from lilo_definitions.planner.job import Job, TrainerName
from lilo_definitions.planner.plan import Plan, make_plan, ways_of
from lilo_definitions.trainer import KEEPS

GPUS_PER_NODE = 8
_MOST_GPUS = 128
"""Where the look for a nearest fit ends."""


def layouts(job: Job, num_gpus: int) -> Iterator[Job]:
    """The job on every way of splitting `num_gpus` into tp x cp x dp that the model can be split by.

    Tensor-parallel ranks stay inside a node and share out the key-value heads; a row's share is whole in zigzag halves.
    """
    model = job.architecture
    nodes = -(-num_gpus // GPUS_PER_NODE)
    if num_gpus % nodes:
        return
    per_node = num_gpus // nodes
    for tp in _divisors(per_node):
        if model.kv_heads % tp or model.heads % tp or model.inner % tp:
            continue
        for cp in _divisors(num_gpus // tp):
            if cp > 1 and job.context % (2 * cp):
                continue
            share = job.context // cp
            yield replace(
                job,
                nodes=nodes,
                tp=tp,
                cp=cp,
                dp=num_gpus // (tp * cp),
                tokens_per_rank=share,
                rows_per_microbatch=1,
            )


def ranked_layouts(job: Job, num_gpus: int, trainer: TrainerName = "lilo") -> list[Plan]:
    """Plans that fit on so many GPUs, fastest first; each with the most that it can keep.

    Speed is counted for as many rows as there are GPUs, so that layouts with few and with many data-parallel ranks are
    compared on equal work.
    """
    found: list[Plan] = []
    for candidate in layouts(job, num_gpus):
        for keep in reversed(ways_of(trainer)):
            plan = make_plan(replace(candidate, keep=keep), trainer, rows=num_gpus)
            if plan.fits:
                found.append(plan)
                break
    return sorted(found, key=lambda plan: (plan.step.seconds, plan.memory.peak))


def nearest_fit(job: Job, trainer: TrainerName = "lilo") -> Plan | None:
    """The layout that fits and is nearest to the job's: fewest GPUs from its own number on, then fewest changes.

    What is kept counts as a change too; None if nothing of up to 128 GPUs fits, or the job runs on CPU.
    """
    if job.gpu is None:
        return None
    for num_gpus in _numbers_from(job.world_size):
        fitting: list[Plan] = []
        for candidate in layouts(job, num_gpus):
            for keep in ways_of(trainer):
                plan = make_plan(replace(candidate, keep=keep), trainer)
                if plan.fits:
                    fitting.append(plan)
        if fitting:
            return min(fitting, key=lambda plan: (_distance(job, plan), plan.step.seconds))
    return None


def _distance(job: Job, plan: Plan) -> float:
    """Doublings of each degree, and levels of what is kept."""
    other = plan.job
    degrees = ((job.tp, other.tp), (job.cp, other.cp), (job.dp, other.dp))
    doublings = sum(abs(math.log2(a / b)) for a, b in degrees)
    if job.keep == "auto" or plan.keep == "auto":
        return doublings
    return doublings + abs(KEEPS.index(job.keep) - KEEPS.index(plan.keep))


def _numbers_from(start: int) -> Iterator[int]:
    """Numbers of GPUs worth trying: the job's own, then powers of two."""
    yield start
    number = 1 << start.bit_length()
    while number <= _MOST_GPUS:
        yield number
        number *= 2


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
