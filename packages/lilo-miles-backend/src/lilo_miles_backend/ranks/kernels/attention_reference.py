"""Attention without a GPU: torch's flash kernel for CPUs, and plain formulas that every other kernel is checked against.

`CpuAttention` is the op behind torch's `scaled_dot_product_attention` on a CPU, called directly since that keeps its
log-sum-exp. `PlainAttention` holds all scores at once: for checks, and for devices and dtypes that no kernel serves.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from lilo_miles_backend.ranks.kernels.attention_kernel import (
    Attended,
    AttentionGrads,
    PackedBounds,
)

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuAttention:
    """torch's flash attention for CPUs: float64, float32, bfloat16; grouped heads as they are."""

    name = "aten flash for CPU"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Attended:
        """See `DenseAttention`."""
        out, lse = _flash(*map(_heads_first, (q, k, v)), 0.0, causal, scale=scale)
        return Attended(_heads_first(out), lse)

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
        tensors = map(_heads_first, (grad, q, k, v, attended.out))
        grads = _flash_backward(*tensors, attended.lse, 0.0, causal, scale=scale)
        return AttentionGrads(*map(_heads_first, grads))


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[B, S, N, D] as [B, N, S, D], and back."""
    return x.transpose(1, 2)


class PlainAttention:
    """The formulas, in the dtype of the inputs or in float32 for shorter ones; scores are [B, N, S, K]."""

    name = "plain"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Attended:
        """See `DenseAttention`; where K is above S, the last query sees the last key."""
        scores = _scores(q, k, causal, scale)
        lse = torch.logsumexp(scores, -1)
        weights = (scores - lse[..., None]).exp()
        out = torch.einsum("bnsk,bknd->bsnd", weights, _repeated(v, q.shape[2]))
        return Attended(out.to(q.dtype).contiguous(), lse)

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
        """See `DenseAttention`. With p = exp(s - lse): ds = p (g v - sum(g out)); dq = ds k, dk = ds q, dv = p g."""
        heads = q.shape[2]
        weights = (_scores(q, k, causal, scale) - attended.lse[..., None]).exp()
        wide = _wide(grad)
        grad_v = torch.einsum("bnsk,bsnd->bknd", weights, wide)
        dots = (wide * _wide(attended.out)).sum(-1).transpose(1, 2)[..., None]
        products = torch.einsum("bsnd,bknd->bnsk", wide, _repeated(v, heads))
        grad_scores = weights * (products - dots) * scale
        return AttentionGrads(
            torch.einsum("bnsk,bknd->bsnd", grad_scores, _repeated(k, heads)).to(q.dtype),
            _grouped(torch.einsum("bnsk,bsnd->bknd", grad_scores, _wide(q)), k),
            _grouped(grad_v, v),
        )


class PlainPackedAttention:
    """Packed rows one by one with the plain formulas. Reads the bounds on the host: a check, not for training."""

    name = "plain"

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
        parts = [
            PlainAttention().forward(
                q[None, here], k[None, seen], v[None, seen], causal=True, scale=scale
            )
            for here, seen in _rows(bounds)
        ]
        return Attended(
            torch.cat([part.out[0] for part in parts]),
            torch.cat([part.lse[0] for part in parts], 1),
        )

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
        parts = [
            PlainAttention().backward(
                grad[None, here],
                q[None, here],
                k[None, seen],
                v[None, seen],
                Attended(attended.out[None, here], attended.lse[None, :, here]),
                causal=True,
                scale=scale,
            )
            for here, seen in _rows(bounds)
        ]
        return AttentionGrads(*(torch.cat(some, 1)[0] for some in zip(*parts, strict=True)))


def _rows(bounds: PackedBounds) -> list[tuple[slice, slice]]:
    queries, keys = bounds.queries.tolist(), bounds.keys.tolist()
    return [
        (slice(*here), slice(*seen))
        for here, seen in zip(pairwise(queries), pairwise(keys), strict=True)
    ]


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    scores = torch.einsum("bsnd,bknd->bnsk", _wide(q), _repeated(k, q.shape[2])) * scale
    if causal:
        num_queries, num_keys = scores.shape[-2:]
        hidden = scores.new_ones((num_queries, num_keys), dtype=torch.bool)
        scores.masked_fill_(hidden.triu(num_keys - num_queries + 1), float("-inf"))
    return scores


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values once per query head."""
    return _wide(x).repeat_interleave(heads // x.shape[2], 2)


def _grouped(grad: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """The sum over the query heads that share a key/value head."""
    return grad.unflatten(2, (of.shape[2], -1)).sum(3).to(of.dtype)
