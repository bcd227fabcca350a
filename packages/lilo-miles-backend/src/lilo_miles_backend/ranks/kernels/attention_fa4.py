"""FlashAttention-4, where its package is installed: dense and packed rows on Hopper and later.

An optional extra: the package is imported only when one of these classes is built. It compiles each variant on first
use, in seconds to tens of seconds, which the check at start pays for (`attention_choice.py`). Its compiler is not safe
in two threads of one process, so calls take turns; they only launch, which takes microseconds once compiled.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

import torch

from lilo_miles_backend.ranks.kernels.attention_kernel import (
    Attended,
    AttentionGrads,
    PackedBounds,
)

MODULE = "flash_attn.cute.interface"
"""What is imported."""
_TURN = threading.Lock()


class Fa4Attention:
    """Rows of one length."""

    name = "FA4"

    def __init__(self) -> None:
        """Import the package.

        Raises:
            ImportError: it is not installed.
        """
        self._ops: Any = importlib.import_module(MODULE)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Attended:
        """See `DenseAttention`."""
        with _TURN:
            out, lse, *_ = self._ops._flash_attn_fwd(
                q, k, v, softmax_scale=scale, causal=causal, return_lse=True
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
        with _TURN:
            dq, dk, dv, *_ = self._ops._flash_attn_bwd(
                q,
                k,
                v,
                attended.out,
                grad,
                attended.lse.contiguous(),
                softmax_scale=scale,
                causal=causal,
            )
        return AttentionGrads(dq, dk, dv)


class Fa4PackedAttention:
    """Rows of any lengths in one call."""

    name = "FA4 packed"

    def __init__(self) -> None:
        """Import the package.

        Raises:
            ImportError: it is not installed.
        """
        self._ops: Any = importlib.import_module(MODULE)

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
        with _TURN:
            out, lse, *_ = self._ops._flash_attn_fwd(
                q, k, v, softmax_scale=scale, causal=True, return_lse=True, **_keywords(bounds)
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
        with _TURN:
            dq, dk, dv, *_ = self._ops._flash_attn_bwd(
                q,
                k,
                v,
                attended.out,
                grad,
                attended.lse.contiguous(),
                softmax_scale=scale,
                causal=True,
                **_keywords(bounds),
            )
        return AttentionGrads(dq, dk, dv)


def _keywords(bounds: PackedBounds) -> dict[str, Any]:
    return {
        "cu_seqlens_q": bounds.queries,
        "cu_seqlens_k": bounds.keys,
        "max_seqlen_q": bounds.most_queries,
        "max_seqlen_k": bounds.most_keys,
    }
