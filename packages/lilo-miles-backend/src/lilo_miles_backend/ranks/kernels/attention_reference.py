"""Attention without a GPU: torch's flash kernel for CPUs, and plain formulas that every other kernel is checked against.

`CpuAttention` is the op behind torch's `scaled_dot_product_attention` on a CPU, called directly since that keeps its
log-sum-exp. `PlainAttention` is for checks, and for GPUs and dtypes that no kernel serves: slow, its memory grows with a row's length.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from lilo_miles_backend.ranks.kernels.attention_kernel import (
    Attended,
    AttentionGrads,
    PackedBounds,
)

QUERIES_AT_ONCE = 512
"""Of the plain formulas: their scores are [B, N, this, K]."""

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
    """The formulas, in the dtype of the inputs or in float32 for shorter ones, some queries at a time."""

    name = "plain"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Attended:
        """See `DenseAttention`; where K is above S, the last query sees the last key."""
        parts = [
            _attend(q[:, here], k[:, seen], v[:, seen], causal, scale)
            for here, seen in _blocks(q.shape[1], k.shape[1], causal)
        ]
        outs, lses = zip(*parts, strict=True)
        return Attended(torch.cat(outs, 1), torch.cat(lses, 2))

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
        grad_k, grad_v = torch.zeros_like(_wide(k)), torch.zeros_like(_wide(v))
        grads_q: list[torch.Tensor] = []
        for here, seen in _blocks(q.shape[1], k.shape[1], causal):
            block, back, keys = _wide(q[:, here]), _wide(grad[:, here]), k[:, seen]
            heads = block.shape[2]
            scores = _scores(block, keys, causal, scale)
            weights = (scores - attended.lse[:, :, here, None]).exp()
            grad_v[:, seen] += _grouped(torch.einsum("bnsk,bsnd->bknd", weights, back), v)
            dots = (back * _wide(attended.out[:, here])).sum(-1).transpose(1, 2)[..., None]
            products = torch.einsum("bsnd,bknd->bnsk", back, _repeated(v[:, seen], heads))
            grad_scores = weights * (products - dots) * scale
            grads_q.append(torch.einsum("bnsk,bknd->bsnd", grad_scores, _repeated(keys, heads)))
            grad_k[:, seen] += _grouped(torch.einsum("bnsk,bsnd->bknd", grad_scores, block), k)
        return AttentionGrads(
            torch.cat(grads_q, 1).to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)
        )


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(q, k, causal, scale)
    lse = torch.logsumexp(scores, -1)
    weights = scores.sub_(lse[..., None]).exp_()
    out = torch.einsum("bnsk,bknd->bsnd", weights, _repeated(v, q.shape[2]))
    return out.to(q.dtype).contiguous(), lse


def _blocks(queries: int, keys: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Queries that are computed together, and the keys that any of them may see."""
    for start in range(0, queries, QUERIES_AT_ONCE):
        stop = min(start + QUERIES_AT_ONCE, queries)
        yield slice(start, stop), slice(0, keys - queries + stop if causal else keys)


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
    return grad.unflatten(2, (of.shape[2], -1)).sum(3)
