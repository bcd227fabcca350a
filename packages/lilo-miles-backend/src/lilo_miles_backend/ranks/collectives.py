"""Collectives: what ranks exchange while they compute, each along one axis of the grid of ranks.

The only file that calls torch.distributed on tensors. On an axis of one rank every function is the identity and costs
nothing, so the code above has one path. All ranks of an axis must call the same functions in the same order.

Nothing here is seen by autograd: layers write their backwards out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The ranks that differ from this one along some axes of the grid only."""

    name: str
    """As `tp`; for messages."""
    rank: int
    """This rank's place along the axis."""
    size: int
    group: dist.ProcessGroup | None
    """None only where `size` is 1."""

    @property
    def is_split(self) -> bool:
        """Whether there is anybody to talk to."""
        return self.size > 1


ALONE = Axis(name="none", rank=0, size=1, group=None)
"""An axis of one rank."""


def sum_in_place(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Add up a contiguous tensor over the axis, bit-equal on all its ranks afterwards."""
    if axis.is_split and tensor.numel():
        dist.all_reduce(tensor, group=axis.group)
    return tensor


def stacked(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Every rank's tensor (all of one shape) in rank order along a new first dimension."""
    if not axis.is_split or not tensor.numel():
        return tensor.detach().expand(axis.size, *tensor.shape)
    result = tensor.new_empty((axis.size, *tensor.shape))
    dist.all_gather(list(result.unbind()), tensor.detach().contiguous(), group=axis.group)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """What a collective will have written, which runs beside what this rank computes."""

    result: torch.Tensor
    work: dist.Work

    def wait(self) -> torch.Tensor:
        """The result, ready for what this rank queues next; the group's limit is the limit of this wait."""
        self.work.wait()
        return self.result


def stacking(tensor: torch.Tensor, axis: Axis) -> Pending:
    """Start `stacked` of a contiguous tensor, which must stay as it is meanwhile, on an axis of several ranks."""
    result = tensor.new_empty((axis.size, *tensor.shape))
    work = _named("all_gather_single", "all_gather_into_tensor")(
        result.view(-1, *tensor.shape[1:]), tensor, group=axis.group, async_op=True
    )
    return Pending(result=result, work=work)


def summing_parts(tensor: torch.Tensor, axis: Axis) -> Pending:
    """Start the sum over ranks of tensor[rank], for each rank its own: contiguous, one entry per rank, several ranks."""
    result = torch.empty_like(tensor[0])
    work = _named("reduce_scatter_single", "reduce_scatter_tensor")(
        result, tensor.view(-1, *tensor.shape[2:]), group=axis.group, async_op=True
    )
    return Pending(result=result, work=work)


def _named(name: str, former: str) -> Any:  # noqa: ANN401 - torch's functions are typed by what they take
    """Torch 2.13 renames some collectives and warns of the names before; goes when the floor is 2.13."""
    return getattr(dist, name, None) or getattr(dist, former)


def collected(value: object, axis: Axis) -> list[Any]:
    """Every rank's small picklable value, in rank order."""
    if not axis.is_split:
        return [value]
    values: list[Any] = [None] * axis.size
    dist.all_gather_object(values, value, group=axis.group)
    return values
