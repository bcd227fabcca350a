"""FlashAttention-2 as torch carries it (Dao, arXiv:2307.08691): dense and packed rows on any recent NVIDIA GPU.

Private torch ops, called with keywords as their schema names them; `attention_choice.py` checks their numbers at start,
so that a torch which changed them is noticed there. The generator state that the backward takes is read only where
there is dropout, and there is none.
"""

from __future__ import annotations

import torch

from lilo_miles_backend.ranks.kernels.attention_kernel import (
    Attended,
    AttentionGrads,
    PackedBounds,
)

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


class FlashAttention:
    """Rows of one length."""

    name = "FA2"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Attended:
        """See `DenseAttention`."""
        out, lse, *_ = _forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
        )
        return Attended(out, lse)

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attended: Attended,
        *,
        causal: bool,
        scale: float,
    ) -> AttentionGrads:
        """See `DenseAttention`."""
        lengths = (None, None, q.shape[1], k.shape[1])
        return _grads(grad, (q, k, v), attended, lengths, causal=causal, scale=scale)


class FlashPackedAttention:
    """Rows of any lengths in one call."""

    name = "FA2 packed"

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bounds: PackedBounds,
        *,
        scale: float,
    ) -> Attended:
        """See `PackedAttention`."""
        out, lse, *_ = _forward(
            q,
            k,
            v,
            bounds.queries,
            bounds.keys,
            bounds.most_queries,
            bounds.most_keys,
            0.0,
            True,
            False,
            scale=scale,
        )
        return Attended(out, lse)

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attended: Attended,
        bounds: PackedBounds,
        *,
        scale: float,
    ) -> AttentionGrads:
        """See `PackedAttention`."""
        lengths = (bounds.queries, bounds.keys, bounds.most_queries, bounds.most_keys)
        return _grads(grad, (q, k, v), attended, lengths, causal=True, scale=scale)


def _grads(
    grad: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    attended: Attended,
    lengths: tuple[torch.Tensor | None, torch.Tensor | None, int, int],
    *,
    causal: bool,
    scale: float,
) -> AttentionGrads:
    state = torch.empty(2, dtype=torch.uint64, device=grad.device)
    unused = torch.empty((), dtype=torch.uint64, device=grad.device)
    return AttentionGrads(
        *_backward(
            grad,
            *inputs,
            attended.out,
            attended.lse.contiguous(),
            *lengths,
            0.0,
            causal,
            state,
            unused,
            scale=scale,
        )
    )
