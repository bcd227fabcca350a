# pyright: reportMissingImports=false, reportIndexIssue=false
"""What a loss needs of float32 logits, as Triton kernels: `kernels.Logits` on a GPU.

One reading pass for the log-sum-exp and the targets' logits, one for the gradient, which leaves in the dtype of the
product that follows. Not the products themselves: `logprobs.py`. Imported only where Triton is.

Shapes: C tokens of a chunk, V vocabulary entries of this rank, k targets of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Entries that one program has at a time."""


class TritonLogits:
    """Implements `kernels.Logits`."""

    def statistics(
        self, logits: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-sum-exp [C, 1], and the logits at `places` [C, k], 0 where a place is below 0; float32."""
        num_tokens, entries = logits.shape
        places = places.contiguous()
        lse = logits.new_empty((num_tokens, 1), dtype=torch.float32)
        picked = logits.new_empty(places.shape, dtype=torch.float32)
        if num_tokens:
            _statistics[(num_tokens,)](
                logits,
                places,
                lse,
                picked,
                entries,
                logits.stride(0),
                places.shape[1],
                BLOCK=BLOCK,
                num_warps=8,
            )
        return lse, picked

    def gradient(
        self,
        logits: torch.Tensor,
        lse: torch.Tensor,
        places: torch.Tensor,
        grad: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Gradient of the logits [C, V] in `dtype`; in place of the logits where that is theirs."""
        num_tokens, entries = logits.shape
        places, grad = places.contiguous(), grad.contiguous()
        result = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
        if num_tokens:
            _gradient[(num_tokens, triton.cdiv(entries, BLOCK))](
                logits,
                lse.contiguous(),
                places,
                grad,
                result,
                entries,
                logits.stride(0),
                result.stride(0),
                places.shape[1],
                BLOCK=BLOCK,
                num_warps=8,
            )
        return result


@triton.jit
def _statistics(logits, places, lse, picked, entries, stride, num_places, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * stride
    # One running maximum and sum per lane: nothing is exchanged between lanes until the end.
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, entries, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(here + column, mask=column < entries, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, value)
        # A lane that has seen nothing has no finite maximum to subtract.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - base) + tl.exp(value - base)
        highest = higher
    top = tl.max(highest, 0)
    tl.store(lse + row, top + tl.log(tl.sum(total * tl.exp(highest - top), 0)))
    for j in range(0, num_places):
        place = tl.load(places + row * num_places + j)
        value = tl.load(here + place, mask=place >= 0, other=0.0).to(tl.float32)
        tl.store(picked + row * num_places + j, value)


@triton.jit
def _gradient(
    logits,
    lse,
    places,
    grad,
    result,
    entries,
    stride,
    result_stride,
    num_places,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < entries
    value = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    softmax = tl.exp(value - tl.load(lse + row))
    total = 0.0
    at_targets = tl.zeros((BLOCK,), tl.float32)
    for j in range(0, num_places):
        g = tl.load(grad + row * num_places + j).to(tl.float32)
        place = tl.load(places + row * num_places + j)
        total += g
        at_targets += tl.where(column == place, g, 0.0)
    gradient = (at_targets - softmax * total).to(result.dtype.element_ty)
    tl.store(result + row * result_stride + column, gradient, mask=inside)
