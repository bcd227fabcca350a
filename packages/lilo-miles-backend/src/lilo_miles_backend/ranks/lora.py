"""LoRA: how the active adapters' factors change a linear's output, and where their gradients go.

Hu et al., "LoRA" (arXiv:2106.09685): y = W x + (alpha / lora_rank) B A x. What the factors of a site are, and which part
of them a rank holds, is `sites.py`. Usually one adapter acts on all tokens of a microbatch; where rows of several
models share one, each acts on its own segment.

Shapes: T tokens, I and O features of the linear (this rank's), k modules of a site, r lora_rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lilo_miles_backend.ranks.autograd import AutogradContext, AutogradGrads
from lilo_miles_backend.ranks.collectives import ALONE, Axis, copied, summed
from lilo_miles_backend.ranks.sites import Cut, LoraSite, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """One adapter's numbers at one site, as far as this rank holds them: contiguous views into its flat buffers.

    Products are computed in the model's dtype, with copies of the weights that are made once per step (`Adapter.refresh`);
    gradients are float32.
    """

    scale: float
    """alpha / lora_rank."""
    lora_rank: int
    a: torch.Tensor
    """[k * r, I]: the k modules one after another."""
    b: torch.Tensor
    """[O, r], likewise."""
    grad_a: torch.Tensor
    """[k * r, I]."""
    grad_b: torch.Tensor
    """[O, r]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The tokens of a microbatch that one adapter acts on, at one site."""

    factors: Factors
    tokens: slice


class LoraLinear(torch.nn.Module):
    """A Megatron linear with the active adapters' contribution; keeps the (output, bias) contract.

    Adapters need no collective of their own: the sums over tensor-parallel ranks that the base linear needs (of its
    input's gradient when the output is cut, of its output when the input is) are done here, after the adapters have
    added their part. What is left partial are the gradients of A, or of B; see `reduction.py`.
    """

    def __init__(self, base: torch.nn.Module, site: LoraSite, tp: Axis) -> None:
        super().__init__()
        self.base = base
        self.site = site.name
        self.segments: tuple[Segment, ...] = ()
        """Of the active adapters that have factors here."""
        self._split = site.split
        self._column, self._row = (tp, ALONE) if site.cut == "out" else (ALONE, tp)
        _leave_sums_to_us(base, site.cut)

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> tuple[torch.Tensor, Any]:
        """The base linear's answer plus the adapters'."""
        x = copied(x, self._column)
        y, bias = self.base(x, *args, **kwargs)
        if self.segments:
            y = _AddLora.apply(y, x, self.segments, self._split)
        return summed(y, self._row), bias

    def backward_dw(self) -> None:
        """Megatron's hook for delayed weight gradients; the base weight is frozen."""


def _leave_sums_to_us(base: Any, cut: Cut) -> None:  # noqa: ANN401 - Megatron's linears are untyped
    """Switch off the collective of Megatron's linear, by the flags that its expert layers use for the same end."""
    if cut == "out":
        base.allreduce_dgrad, base.disable_grad_reduce = False, True
    else:
        base.explicit_expert_comm = True


class _AddLora(torch.autograd.Function):
    """y += scale * B A x, segment by segment and slice by slice; the backward adds to the gradient buffers itself.

    That saves a gradient tensor and an addition per factor and pass, and keeps a pass's cost independent of how many
    adapters are resident.
    """

    @staticmethod
    def forward(
        ctx: AutogradContext,
        y: torch.Tensor,
        x: torch.Tensor,
        segments: tuple[Segment, ...],
        split: Split,
    ) -> torch.Tensor:
        x2, y2 = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        products = [
            _add(y2[segment.tokens], x2[segment.tokens], segment.factors, split)
            for segment in segments
        ]
        ctx.mark_dirty(y)
        ctx.save_for_backward(x2, *products)
        ctx.segments, ctx.split, ctx.x_shape = segments, split, x.shape
        return y

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> AutogradGrads:
        (grad,) = grads
        x2, *products = ctx.saved_tensors
        grad2 = grad.view(-1, grad.shape[-1])
        parts: list[torch.Tensor] = []
        for segment, h in zip(ctx.segments, products, strict=True):
            here, factors = segment.tokens, segment.factors
            grad_h = _back(grad2[here], x2[here], h, factors, ctx.split)
            if ctx.needs_input_grad[1]:
                parts.append(grad_h @ factors.a.to(h.dtype))
        return grad, _whole_grad(parts, x2, ctx), None, None


def _whole_grad(
    parts: list[torch.Tensor], x2: torch.Tensor, ctx: AutogradContext
) -> torch.Tensor | None:
    """The segments' gradients of x put together; zero where no adapter acts."""
    if not ctx.needs_input_grad[1]:
        return None
    if len(parts) == 1 and parts[0].shape == x2.shape:
        return parts[0].view(ctx.x_shape)
    whole = torch.zeros_like(x2)
    for segment, part in zip(ctx.segments, parts, strict=True):
        whole[segment.tokens] = part
    return whole.view(ctx.x_shape)


def _add(y: torch.Tensor, x: torch.Tensor, factors: Factors, split: Split) -> torch.Tensor:
    """Add to y [T, O] in place; A's products [T, k * r]."""
    h = x @ factors.a.to(x.dtype).t()
    parts = split(y)
    bs = _rows(factors.b, parts)
    for part, h_i, b in zip(parts, _columns(h, factors), bs, strict=True):
        _add_product(part, h_i, b.to(x.dtype).t(), factors.scale)
    return h


def _back(
    grad: torch.Tensor, x: torch.Tensor, h: torch.Tensor, factors: Factors, split: Split
) -> torch.Tensor:
    """Add to the factors' gradients; the gradient of A's products, scaled."""
    grad_h = torch.empty_like(h)
    columns = zip(_columns(h, factors), _columns(grad_h, factors), strict=True)
    parts = split(grad)
    bs, grad_bs = _rows(factors.b, parts), _rows(factors.grad_b, parts)
    for part, (h_i, grad_h_i), b, grad_b in zip(parts, columns, bs, grad_bs, strict=True):
        flat = part.reshape(h.shape[0], -1)
        torch.mm(flat, b.to(flat.dtype), out=grad_h_i)
        _accumulate(grad_b, flat.t(), h_i, factors.scale)
    grad_h *= factors.scale
    _accumulate(factors.grad_a, grad_h.t(), x, 1.0)
    return grad_h


def _columns(h: torch.Tensor, factors: Factors) -> tuple[torch.Tensor, ...]:
    return h.split(factors.lora_rank, 1)


def _rows(b: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return b.split([part[0].numel() for part in parts])


def _add_product(
    target: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float
) -> None:
    if target.dim() == 2:
        target.addmm_(left, right, alpha=scale)
    else:
        target.add_((left @ right).view(target.shape), alpha=scale)


def _accumulate(
    buffer: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float
) -> None:
    """Do buffer += scale * left @ right, in the buffer's float32 whatever the activations are."""
    if left.dtype == buffer.dtype:
        buffer.addmm_(left, right, alpha=scale)
    else:
        buffer.add_((left @ right).to(buffer.dtype), alpha=scale)
