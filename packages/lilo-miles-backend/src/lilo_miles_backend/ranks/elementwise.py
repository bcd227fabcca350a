"""RMSNorm and SwiGLU: our modules for what Megatron would do with kernels that need CUDA.

Each is one autograd node with its backward written out for frozen weights: on the CPU these functions are bound by
memory, and torch's composite forms read and write every activation several times more often.
"""

from __future__ import annotations

from typing import cast

import torch

from lilo_miles_backend.ranks.autograd import AutogradContext, AutogradGrads
from lilo_miles_backend.ranks.megatron import TransformerConfig


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last axis with a frozen weight: Zhang and Sennrich, arXiv:1910.07467."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, **_: object
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x / rms(x) * weight, in float32 inside, returned in the dtype of x."""
        return cast(torch.Tensor, _RMSNorm.apply(x, self.weight, self._eps))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        wide = x.float()
        mean_square = (
            torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        )
        inverse = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> AutogradGrads:
        # With n = x * inverse: dx = inverse * (g w - n * mean(g w n)).
        (grad,) = grads
        x, weight, inverse = ctx.saved_tensors
        wide, scaled = x.float(), grad.float() * weight
        dot = torch.linalg.vecdot(scaled, wide).unsqueeze(-1)
        factor = dot.mul_(inverse).mul_(inverse).div_(-x.shape[-1])
        return scaled.addcmul_(wide, factor).mul_(inverse).to(x.dtype), None, None


class SwiGLU(torch.nn.Module):
    """silu(gate) * up of a fused [..., gate | up]: Shazeer, arXiv:2002.05202."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Halve the last axis."""
        return cast(torch.Tensor, _SwiGLU.apply(gate_up))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        ctx.save_for_backward(gate_up)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> AutogradGrads:
        # With s = sigmoid(gate): d gate = g up s (1 + gate (1 - s)), d up = g gate s.
        (grad,) = grads
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        result = torch.empty_like(gate_up)
        grad_gate, grad_up = result.chunk(2, -1)
        torch.mul(torch.nn.functional.silu(gate), grad, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return result
