# pyright: reportMissingImports=false, reportIndexIssue=false
"""AdamW as one Triton kernel: `kernels.Optimizer` on a GPU.

Gradients are read and moments and weights changed in one pass, which writes the copy that the model computes with along:
a step of many adapters is bound by memory. Whether a gradient is clipped, or the step left out, is decided on the
device. Imported only where Triton is.

The gradients are cleared by an operation of their own, which moves no more bytes. Inside, other threads may store to an
element than loaded it (the narrower copy makes loads wider than stores are), and only a value that was computed from
the load is sure to be stored after it: zeros are not, and would be what slower threads load.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from lilo_engine.operations.operation import AdamParams

from lilo_miles_backend.ranks.kernels.kernels import AdamBuffers

BLOCK = 2048
UNCLIPPED = 3e38
"""A norm that is finite in float32 and that no gradient has."""
LEAST = tl.constexpr(torch.finfo(torch.float32).tiny)
"""Of a second moment under the root: with an eps of 0, what never had a gradient would be 0 / 0."""


class TritonOptimizer:
    """Implements `kernels.Optimizer`."""

    def adamw_(
        self, buffers: AdamBuffers, params: AdamParams, *, step: int, norm: torch.Tensor
    ) -> None:
        """One step in place; the copy is up to date afterwards if it was before."""
        count = buffers.weights.numel()
        correction1 = 1.0 - params.beta1**step
        correction2 = 1.0 - params.beta2**step
        _adamw[(triton.cdiv(count, BLOCK),)](
            buffers.weights,
            buffers.gradients,
            buffers.exp_avg,
            buffers.exp_avg_sq,
            buffers.weights if buffers.copy is None else buffers.copy,
            norm,
            count,
            # Differences from 1 are taken in float64: float32 has three digits of 1 - 0.9999.
            1.0 - params.beta1,
            params.beta2,
            1.0 - params.beta2,
            params.learning_rate / correction1,
            1.0 / math.sqrt(correction2),
            params.eps,
            1.0 - params.learning_rate * params.weight_decay,
            params.grad_clip_norm or UNCLIPPED,
            COPY=buffers.copy is not None,
            BLOCK=BLOCK,
            num_warps=8,
        )
        buffers.gradients.zero_()


@triton.jit
def _adamw(
    weights,
    gradients,
    exp_avg,
    exp_avg_sq,
    copy,
    norm,
    count,
    one_less_beta1,
    beta2,
    one_less_beta2,
    rate,
    correction,
    eps,
    decay,
    clip_norm,
    BLOCK: tl.constexpr,
    COPY: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = tl.load(norm).to(tl.float32)
    # Below infinity is neither an infinity nor NaN.
    inside = place < tl.where(size < float("inf"), count, 0)
    g = tl.load(gradients + place, mask=inside, other=0.0)
    g *= tl.where(size > clip_norm, clip_norm / size, 1.0)
    m = tl.load(exp_avg + place, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + place, mask=inside, other=0.0)
    w = tl.load(weights + place, mask=inside, other=0.0)
    m += one_less_beta1 * (g - m)
    v = v * beta2 + one_less_beta2 * g * g
    w = w * decay - rate * m / (tl.sqrt(tl.maximum(v, LEAST)) * correction + eps)
    tl.store(exp_avg + place, m, mask=inside)
    tl.store(exp_avg_sq + place, v, mask=inside)
    tl.store(weights + place, w, mask=inside)
    if COPY:
        tl.store(copy + place, w.to(copy.dtype.element_ty), mask=inside)
