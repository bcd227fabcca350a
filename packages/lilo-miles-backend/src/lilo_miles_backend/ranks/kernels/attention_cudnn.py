"""cuDNN's attention as torch carries it: dense rows, the fastest without a further dependency on Hopper and later.

Not its packed form: through torch's op that one returned wrong gradients and was slow. It has no causal attention of
fewer queries than keys, which the composition does not ask for. Private torch ops; see `attention_flash.py` on those.
"""

from __future__ import annotations

import torch

from lilo_miles_backend.ranks.kernels.attention_kernel import Attended, AttentionGrads

_forward = torch.ops.aten._scaled_dot_product_cudnn_attention
_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


class CudnnAttention:
    """Rows of one length."""

    name = "cuDNN"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Attended:
        """See `DenseAttention`."""
        out, lse, *_ = _forward(
            *map(_heads_first, (q, k, v)), None, True, 0.0, causal, False, scale=scale
        )
        return Attended(_heads_first(out), lse.reshape(q.shape[0], q.shape[2], q.shape[1]))

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
        state = torch.empty((), dtype=torch.int64, device=q.device)
        grads = _backward(
            *map(_heads_first, (grad, q, k, v, attended.out)),
            attended.lse.contiguous().unsqueeze(-1),  # the op's own form: [B, N, S, 1]
            state,
            state,
            None,
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            causal,
            scale=scale,
        )
        return AttentionGrads(*map(_heads_first, grads))


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[B, S, N, D] as [B, N, S, D], and back."""
    return x.transpose(1, 2)
