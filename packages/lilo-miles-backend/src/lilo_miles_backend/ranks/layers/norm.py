"""Norm: the model's last norm, as the module that Megatron puts behind its layers; those inside layers are theirs."""

from __future__ import annotations

from typing import cast

import torch

from lilo_miles_backend.ranks.autograd import AutogradContext, AutogradGrads
from lilo_miles_backend.ranks.kernels.kernels import Elementwise


class FinalNorm(torch.nn.Module):
    """Root-mean-square norm over the last axis with a frozen float32 weight, as one autograd node."""

    def __init__(
        self, *, elementwise: Elementwise, hidden_size: int, eps: float, **_: object
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.empty(hidden_size, dtype=torch.float32), requires_grad=False
        )
        self._elementwise = elementwise
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H]."""
        return cast(torch.Tensor, _Norm.apply(x, self.weight, self._eps, self._elementwise))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        elementwise: Elementwise,
    ) -> torch.Tensor:
        result, inverse = elementwise.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        ctx.elementwise = elementwise
        return result

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> AutogradGrads:
        x, weight, inverse = ctx.saved_tensors
        return ctx.elementwise.rms_norm_backward(grads[0], x, inverse, weight), None, None, None
