"""One step of the delta rule's backward in torch: the gradients inside chunks, given the states between them.

What the kernel of `triton_delta.py` is compared with, in any dtype on any device, and what runs where that one is wrong
or does not compile (`delta_fla.py`): batched products of chunks of 64 tokens, a slice of chunks at a time.

With the decays of a chunk d_i (sums of g from its start; in powers of two, as fla has them), S the state that enters it
and S' the gradient of the one that leaves it,

    P = scale (dO V^T) 2^(d_i - d_j), j <= i
    dQ = scale (dO S^T) 2^d_i + P K         dK = (V S'^T) 2^(d_last - d_i) + P^T Q        dW = -dV S^T
    dd_i = sum(dQ Q) - sum(dK K), and at the last token + sum(S S') 2^d_last + sum((V S'^T) 2^(d_last - d_i) K)

Shapes: N chunks of a slice, H value heads, C tokens of a chunk, K and V the heads' sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SLICE_TOKENS = 8192
"""At once: at 24 heads of 128, 100 MB for each float32 tensor in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkInputs:
    """What fla's function is given, [1, T, heads, size]; `v` is what the rule writes, dv its gradient."""

    q: torch.Tensor
    """[1, T, G, K], unit vectors, not scaled."""
    k: torch.Tensor
    v: torch.Tensor
    """[1, T, H, V]."""
    do: torch.Tensor
    dv: torch.Tensor
    g: torch.Tensor
    """[1, T, H], summed inside each chunk."""
    h: torch.Tensor
    """[1, chunks, H, K, V]: the state that enters each chunk."""
    dh: torch.Tensor
    """Gradient of the state that leaves it."""


def chunk_gradients(
    given: ChunkInputs,
    *,
    scale: float,
    bounds: torch.Tensor,
    chunks: torch.Tensor,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q and k [1, T, G, K], of w [1, T, H, K], and of the summed g [1, T, H].

    Args:
        given: of one stream.
        scale: of queries.
        bounds: int64 [I + 1], where each interval begins.
        chunks: [N, 2]: the interval of each chunk, and its place in it.
        chunk_size: C.
    """
    tokens, heads = given.v.shape[1:3]
    size = given.k.shape[-1]
    # One row more: what is computed for padding is written there.
    dq, dk = (given.k.new_empty(tokens + 1, *given.k.shape[2:]) for _ in range(2))
    dw = given.v.new_empty(tokens + 1, heads, size)
    dg = given.g.new_empty(tokens + 1, heads)
    step = max(1, SLICE_TOKENS // chunk_size)
    within = torch.arange(chunk_size, device=bounds.device)
    for start in range(0, len(chunks), step):
        here = chunks[start : start + step].long()
        ends = bounds[here[:, 0] + 1]
        places = bounds[here[:, 0], None] + here[:, 1:] * chunk_size + within
        real = places < ends[:, None]
        picked = torch.minimum(places, ends[:, None] - 1)
        found = _slice(given, slice(start, start + step), picked, real, scale)
        where = torch.where(real, places, tokens).flatten()
        for whole, values in zip((dq, dk, dw, dg), found, strict=True):
            whole.index_copy_(0, where, values.flatten(0, 1).to(whole.dtype))
    return dq[None, :tokens], dk[None, :tokens], dw[None, :tokens], dg[None, :tokens]


def _slice(
    given: ChunkInputs,
    chunks: slice,
    picked: torch.Tensor,
    real: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """The same for some chunks, [N, C, ...]; padding repeats the last token and counts as nothing."""
    groups, heads = given.k.shape[2], given.v.shape[2]

    def cut(x: torch.Tensor) -> torch.Tensor:
        """[N, H, C, size] of a [1, T, heads, size]; key heads once for each of their value heads."""
        part = x[0].index_select(0, picked.flatten()).unflatten(0, picked.shape)
        part = (part * real[..., None, None]).transpose(1, 2)
        return part if part.shape[1] == heads else part.repeat_interleave(heads // groups, 1)

    q, k, v, do, dv = (cut(x) for x in (given.q, given.k, given.v, given.do, given.dv))
    decay = given.g[0].index_select(0, picked.flatten()).unflatten(0, picked.shape).movedim(2, 1)
    last = decay[..., -1:]
    state, dstate = given.h[0, chunks].to(q.dtype), given.dh[0, chunks].to(q.dtype)
    causal = torch.ones(decay.shape[-1], decay.shape[-1], dtype=torch.bool, device=q.device).tril()
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(~causal, -torch.inf)
    attention = (_product(do, v.transpose(-1, -2)) * between.exp2_().mul_(scale)).to(q.dtype)
    del between
    dq = _product(do, state.transpose(-1, -2)) * (decay.exp2() * scale)[..., None]
    dq += _product(attention, k)
    to_last = torch.exp2(last - decay) * real[:, None]
    dk = _product(v, dstate.transpose(-1, -2)) * to_last[..., None]
    of_last = (dk * k).sum((-1, -2)) + (state.to(dk.dtype) * dstate).sum((-1, -2)) * last[
        ..., 0
    ].exp2()
    dk += _product(attention.transpose(-1, -2), q)
    dg = (dq * q).sum(-1) - (dk * k).sum(-1)
    is_last = real & ~torch.nn.functional.pad(real[:, 1:], (0, 1))
    dg += of_last[..., None] * is_last[:, None]
    dw = -_product(dv, state.transpose(-1, -2))
    shared = (groups, heads // groups)
    dq, dk = (x.unflatten(1, shared).sum(2) for x in (dq, dk))
    return tuple(x.transpose(1, 2) for x in (dq, dk, dw, dg))


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Batched product that leaves the sums in float32; float64 stays."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.device.type != "cuda":
        return left.float() @ right.float()
    flat = torch.bmm(left.flatten(0, 1), right.flatten(0, 1), out_dtype=torch.float32)
    return flat.unflatten(0, left.shape[:2])
