"""StreamShards: the residual stream divided over tensor-parallel ranks: sequence parallelism.

Korthikanti et al., arXiv:2205.05198, section 4.2.2: between the parallel linears each rank has a part of the tokens, on
which it does norms and residuals, and which is what it keeps. All tokens are gathered before a linear whose output is
cut; what a linear whose input is cut gives in part on each rank is summed into the ranks' tokens.

Any number of tokens works: the last rank's part ends with rows of zeros, which stay zeros through norms and residuals
and are no linear's input. On an axis of one rank every method gives what it is given.

Shapes: T tokens of a stream, t = ceil(T / ranks) of a part, H hidden size.
"""

from __future__ import annotations

from typing import cast

import torch
from torch.nn.functional import pad

from lilo_miles_backend.ranks.autograd import AutogradContext, AutogradGrads
from lilo_miles_backend.ranks.collectives import Axis, stacking, summing_parts


class StreamShards:
    """One rank's parts of streams."""

    def __init__(self, tp: Axis) -> None:
        """Divide over these ranks."""
        self._tp = tp

    @property
    def is_split(self) -> bool:
        """Whether there are other parts."""
        return self._tp.is_split

    def own(self, whole_TH: torch.Tensor) -> torch.Tensor:
        """This rank's part [t, H] of what all ranks have."""
        if not self._tp.is_split:
            return whole_TH
        return self._parts(whole_TH)[self._tp.rank].clone()

    def whole(self, part_tH: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """All ranks' parts one after another [T, H]; a tensor of its own where there are several."""
        if not self._tp.is_split:
            return part_tH
        parts = stacking(part_tH.contiguous(), self._tp).wait()
        return parts.flatten(0, 1)[:num_tokens]

    def summed(self, partial_TH: torch.Tensor) -> torch.Tensor:
        """This rank's part [t, H] of the sum of what the ranks have."""
        if not self._tp.is_split:
            return partial_TH
        return summing_parts(self._parts(partial_TH), self._tp).wait()

    def gathered(self, part_tH: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """As `whole`, differentiable: the gradients that the ranks have of all tokens are summed."""
        if not self._tp.is_split:
            return part_tH
        return cast(torch.Tensor, _Gathered.apply(part_tH, num_tokens, self))

    def _parts(self, whole_TH: torch.Tensor) -> torch.Tensor:
        """[ranks, t, H]; copied only where the tokens do not divide."""
        ranks = self._tp.size
        missing = -whole_TH.shape[0] % ranks
        padded = pad(whole_TH, (0, 0, 0, missing)) if missing else whole_TH.contiguous()
        return padded.unflatten(0, (ranks, -1))


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, part_tH: torch.Tensor, num_tokens: int, shards: StreamShards
    ) -> torch.Tensor:
        ctx.shards = shards
        whole = shards.whole(part_tH, num_tokens)
        # The same memory, but no view to autograd: the caller writes the gradient over it.
        return whole.new_empty(0).set_(
            whole.untyped_storage(), whole.storage_offset(), whole.shape, whole.stride()
        )

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> AutogradGrads:
        return ctx.shards.summed(grads[0]), None, None
