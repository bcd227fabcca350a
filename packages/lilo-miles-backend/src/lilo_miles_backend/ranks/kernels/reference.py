"""Reference: the kernels in torch alone, for any device and float64: what runs on CPUs, and what others are held to.

On a CPU these functions are bound by memory, and torch's composite forms read and write every activation several times
more often: so backwards are written out for frozen weights, and results go where they belong at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from lilo_engine.operations.operation import AdamParams

from lilo_miles_backend.ranks.kernels.kernels import AdamBuffers, Kernels
from lilo_miles_backend.ranks.kernels.short_segments import Division, divided
from lilo_miles_backend.ranks.lora import Factors, Segment


class ReferenceElementwise:
    """`Elementwise` in torch."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the protocol."""
        wide = _wide(x)
        inverse = _inverse_rms(wide, eps)
        return (wide * inverse).mul_(weight).to(x.dtype), inverse

    def rms_norm_backward(
        self, grad: torch.Tensor, x: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """See the protocol."""
        return _norm_gradient(_wide(grad) * weight, _wide(x), inverse).to(x.dtype)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See the protocol."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(_wide(gate)).mul_(up).to(gate_up.dtype)

    def swiglu_backward_(self, gate_up: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """See the protocol."""
        # With s = sigmoid(gate): d up = g gate s, d gate = g up s (1 + gate (1 - s)).
        gate, up = gate_up.chunk(2, -1)
        wide, wide_grad = _wide(gate), _wide(grad)
        grad_silu = wide_grad * up
        silu = F.silu(wide)
        if wide is gate:
            torch.mul(silu, grad, out=up)
            torch.ops.aten.silu_backward.grad_input(grad_silu, gate, grad_input=gate)
        else:
            up.copy_(silu.mul_(wide_grad))
            gate.copy_(torch.ops.aten.silu_backward(grad_silu, wide))
        return gate_up

    def rotate(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """See the protocol."""
        wide = _wide(x)
        if weight is not None:
            wide = (wide * _inverse_rms(wide, eps)).mul_(weight)
        return _rotated(wide, cos, sin, 1).to(x.dtype)

    def rotate_backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See the protocol."""
        unrotated = _rotated(_wide(grad), cos, sin, -1)
        if weight is not None:
            wide = _wide(x)
            unrotated = _norm_gradient(unrotated.mul_(weight), wide, _inverse_rms(wide, eps))
        out.copy_(unrotated)


class ReferenceLora:
    """`LoraProducts` in torch: one product per segment and module, or per run of short segments and module."""

    def shrink(self, x: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        """See the protocol."""
        if len(segments) == 1 and x[segments[0].tokens].shape == x.shape:
            return x @ segments[0].factors.a.t()
        division = _divided(x, segments)
        runs = division.runs
        if len(runs) == 1 and x[runs[0].tokens].shape == x.shape:
            return runs[0].shrink(x)
        width = max(segment.factors.a.shape[0] for segment in segments)
        products = x.new_empty(x.shape[0], width)
        for run in runs:
            products[run.tokens, : run.width] = run.shrink(x)
        for segment in division.others:
            a = segment.factors.a
            here = products[segment.tokens, : a.shape[0]]
            torch.mm(x[segment.tokens], a.t(), out=here)
        return products

    def expand_(
        self,
        y: torch.Tensor,
        products: torch.Tensor,
        segments: Sequence[Segment],
        parts: Sequence[int],
    ) -> None:
        """See the protocol."""
        division = _divided(y, segments)
        for run in division.runs:
            run.expand_(y, products, parts)
        for segment in division.others:
            factors, here = segment.factors, segment.tokens
            for out, ranks in _modules(factors, parts):
                y[here, out].addmm_(products[here, ranks], factors.b[out].t(), alpha=factors.scale)

    def backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        products: torch.Tensor,
        segments: Sequence[Segment],
        parts: Sequence[int],
        grad_x: torch.Tensor | None,
    ) -> None:
        """See the protocol."""
        division = _divided(x, segments)
        for run in division.runs:
            run.backward(grad, x, products, parts, grad_x)
        for segment in division.others:
            factors, here = segment.factors, segment.tokens
            grad_h = x.new_empty(x[here].shape[0], factors.a.shape[0])
            for out, ranks in _modules(factors, parts):
                torch.mm(grad[here, out], factors.b[out], out=grad_h[:, ranks])
                _accumulate(
                    factors.grad_b[out], grad[here, out].t(), products[here, ranks], factors.scale
                )
            grad_h *= factors.scale
            _accumulate(factors.grad_a, grad_h.t(), x[here], 1.0)
            if grad_x is not None:
                grad_x[here].addmm_(grad_h, factors.a)


class ReferenceLogits:
    """`Logits` in torch."""

    def statistics(
        self, logits: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the protocol."""
        at_places = logits.gather(1, places.clamp(min=0)).masked_fill_(places < 0, 0)
        return torch.logsumexp(logits, 1, keepdim=True), at_places

    def gradient(
        self,
        logits: torch.Tensor,
        lse: torch.Tensor,
        places: torch.Tensor,
        grad: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """See the protocol."""
        result = logits.sub_(lse).exp_().mul_(-grad.sum(1, keepdim=True))
        result.scatter_add_(1, places.clamp(min=0), grad.masked_fill(places < 0, 0))
        return result.to(dtype)


class ReferenceOptimizer:
    """`Optimizer` in torch."""

    def adamw_(
        self, buffers: AdamBuffers, params: AdamParams, *, step: int, norm: torch.Tensor
    ) -> None:
        """See the protocol; waits for the norm, which is free on a CPU."""
        value = norm.item()
        if math.isfinite(value):
            if 0 < params.grad_clip_norm < value:
                buffers.gradients.mul_(params.grad_clip_norm / value)
            _adamw(buffers, params, step)
        buffers.gradients.zero_()


def _adamw(buffers: AdamBuffers, params: AdamParams, step: int) -> None:
    """Gradients come out as something else."""
    gradients, weights = buffers.gradients, buffers.weights
    buffers.exp_avg.lerp_(gradients, 1.0 - params.beta1)
    buffers.exp_avg_sq.mul_(params.beta2).addcmul_(gradients, gradients, value=1.0 - params.beta2)
    correction1 = 1.0 - params.beta1**step
    correction2 = 1.0 - params.beta2**step
    # No other tensor of their size is needed, since they are cleared afterwards.
    # Roots of zeros and subnormals take a CPU 25 times as long; those of the least normal number are far below eps.
    least = torch.finfo(gradients.dtype).tiny
    denominator = torch.clamp(buffers.exp_avg_sq, min=least, out=gradients).sqrt_()
    denominator.div_(math.sqrt(correction2)).add_(params.eps)
    if params.weight_decay != 0:
        weights.mul_(1.0 - params.learning_rate * params.weight_decay)
    weights.addcdiv_(buffers.exp_avg, denominator, value=-params.learning_rate / correction1)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return x in the dtype that arithmetic is done in; itself where it has that already."""
    return x if x.dtype == torch.float64 else x.float()


def _inverse_rms(wide: torch.Tensor, eps: float) -> torch.Tensor:
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return norm.square_().div_(wide.shape[-1]).add_(eps).rsqrt_()


def _norm_gradient(scaled: torch.Tensor, wide: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Gradient of x / rms(x) from that of its product with the weight, times the weight; takes `scaled` over."""
    # With n = x * inverse: dx = inverse * (g w - n * mean(g w n)).
    dot = torch.linalg.vecdot(scaled, wide).unsqueeze(-1)
    factor = dot.mul_(inverse).mul_(inverse).div_(-wide.shape[-1])
    return scaled.addcmul_(wide, factor).mul_(inverse)


def _rotated(
    wide: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int
) -> torch.Tensor:
    """[T, N, D] with its first R features turned by the angles times `direction`, contiguous; a tensor of its own."""
    half = cos.shape[-1]
    cos_T11h, sin_T1h = cos.to(wide.dtype)[:, None, None], sin.to(wide.dtype)[:, None]
    pairs = wide[..., : 2 * half].unflatten(-1, (2, half))
    if 2 * half == wide.shape[-1]:
        turned = pairs * cos_T11h  # dense, whatever the strides of x were
        result = turned.flatten(-2)
    else:
        result = wide.clone(memory_format=torch.contiguous_format)
        turned = result[..., : 2 * half].unflatten(-1, (2, half)).mul_(cos_T11h)
    turned[:, :, 0].addcmul_(pairs[:, :, 1], sin_T1h, value=-direction)
    turned[:, :, 1].addcmul_(pairs[:, :, 0], sin_T1h, value=direction)
    return result


def _divided(x: torch.Tensor, segments: Sequence[Segment]) -> Division:
    """Short segments side by side where x is on a CPU."""
    return Division(runs=(), others=tuple(segments)) if x.is_cuda else divided(segments)


def _modules(factors: Factors, parts: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Of each module of a site: its output features, and its columns of A's products."""
    start = 0
    for index, width in enumerate(parts):
        rank = factors.lora_rank
        yield slice(start, start + width), slice(index * rank, (index + 1) * rank)
        start += width


def _accumulate(
    buffer: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float
) -> None:
    """Do buffer += scale * left @ right, summed in the buffer's float32 whatever the activations are."""
    if left.dtype == buffer.dtype:
        buffer.addmm_(left, right, alpha=scale)
    elif left.is_cuda:
        buffer.add_(torch.mm(left, right, out_dtype=buffer.dtype), alpha=scale)
    else:
        buffer.addmm_(left.to(buffer.dtype), right.to(buffer.dtype), alpha=scale)


REFERENCE = Kernels(
    elementwise=ReferenceElementwise(),
    lora=ReferenceLora(),
    logits=ReferenceLogits(),
    optimizer=ReferenceOptimizer(),
)
"""All of them."""
