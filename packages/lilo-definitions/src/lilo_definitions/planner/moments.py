"""Moments: the points of a step that can be its peak, and what each holds beyond what the layers keep.

Every layer has two, the backwards of its blocks; the loss comes once, when all layers keep what they keep.
"""

from __future__ import annotations

from dataclasses import dataclass

from lilo_definitions.architecture import Kind
from lilo_definitions.planner import activations, cpu
from lilo_definitions.planner.job import Job
from lilo_definitions.trainer import Keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a moment of the step holds beyond weights, adapters and kept activations."""

    name: str
    kv_gather: float = 0.0
    logits: float = 0.0
    working: float = 0.0

    @property
    def total(self) -> float:
        """Their sum."""
        return self.kv_gather + self.logits + self.working


def loss_moment(job: Job) -> Moment:
    """Head and loss."""
    if job.gpu is None:
        working = cpu.table_bytes(job) + cpu.head_bytes(job)
        return Moment(name="loss", logits=cpu.chunk_logits_bytes(job), working=working)
    return Moment(
        name="loss",
        logits=activations.chunk_logits_bytes(job),
        working=activations.head_bytes(job),
    )


def layer_moments(job: Job, kind: Kind, keep: Keep) -> tuple[Moment, Moment]:
    """Both backwards of one layer."""
    if job.gpu is None:
        return _cpu_moments(job, kind, keep)
    mlp = Moment(name="mlp backward", working=activations.mlp_backward_bytes(job, keep))
    if kind == "linear":
        working = activations.linear_backward_bytes(job, keep)
        return mlp, Moment(name="delta net backward", working=working)
    return mlp, Moment(
        name="attention backward",
        kv_gather=activations.gathered_kv_bytes(job),
        working=activations.softmax_backward_bytes(job, keep),
    )


def _cpu_moments(job: Job, kind: Kind, keep: Keep) -> tuple[Moment, Moment]:
    tables = cpu.table_bytes(job)
    mlp = Moment(name="mlp backward", working=tables + cpu.mlp_backward_bytes(job, keep))
    if kind == "linear":
        working = tables + activations.linear_backward_bytes(job, keep)
        return mlp, Moment(name="delta net backward", working=working)
    working = tables + cpu.softmax_backward_bytes(job, keep)
    return mlp, Moment(name="attention backward", working=working)
