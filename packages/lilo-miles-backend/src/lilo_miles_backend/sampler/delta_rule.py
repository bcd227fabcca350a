"""The gated delta rule with a state that comes in and goes out: one token, or a piece of many. Numbers only.

Per value head the state is S [K, V], and a token does S <- exp(g) S, then S <- S + beta k (v - k^T S)^T, and answers
o = q^T S: Yang et al., arXiv:2412.06464. A token with g = 0 and beta = 0 leaves the state as it is, which is how padding
is passed over. All float32; queries and keys come normalised, queries scaled.

Axes: B rows, T tokens, N chunks of C tokens, H key heads, R value heads per key head, K and V features.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def one_token(
    q_BHK: torch.Tensor,
    k_BHK: torch.Tensor,
    v_BHRV: torch.Tensor,
    g_BHR: torch.Tensor,
    beta_BHR: torch.Tensor,
    state_BHRKV: torch.Tensor,
) -> torch.Tensor:
    """Advance the state by one token, in place; the answer [B, H, R, V]."""
    state_BHRKV *= g_BHR.exp()[..., None, None]
    k = k_BHK[:, :, None, None]
    error = (v_BHRV - (k @ state_BHRKV)[..., 0, :]) * beta_BHR[..., None]
    state_BHRKV += k.transpose(-1, -2) * error[..., None, :]
    return (q_BHK[:, :, None, None] @ state_BHRKV)[..., 0, :]


def many_tokens(
    q_BTHK: torch.Tensor,
    k_BTHK: torch.Tensor,
    v_BTHRV: torch.Tensor,
    g_BTHR: torch.Tensor,
    beta_BTHR: torch.Tensor,
    state_BHRKV: torch.Tensor,
    *,
    chunk: int = 64,
) -> torch.Tensor:
    """Advance the state by T tokens, in place; the answers [B, T, H, R, V].

    In chunks: what a chunk's tokens do to each other is one triangular system for all chunks at once (the WY form of
    the reference above), so that only one small product per chunk is left to do in order.
    """
    batch, count, heads, width = k_BTHK.shape
    values = v_BTHRV.shape[-1]
    padding = -count % chunk

    def chunked(x: torch.Tensor) -> torch.Tensor:
        """[B, T, H, ...] to [B, H, ..., N, C, last] with T padded."""
        x = functional.pad(x, (0, 0) * (x.ndim - 2) + (0, padding))
        x = x.unflatten(1, (-1, chunk))
        return x.permute(0, 3, *range(4, x.ndim - 1), 1, 2, x.ndim - 1)

    q, k = chunked(q_BTHK)[:, :, None], chunked(k_BTHK)[:, :, None]
    v = chunked(v_BTHRV)
    g, beta = chunked(g_BTHR[..., None])[..., 0], chunked(beta_BTHR[..., None])
    since = g.cumsum(-1)
    into = since.exp()[..., None]
    seen = torch.ones(chunk, chunk, dtype=torch.bool, device=k.device).tril()
    decay = (since[..., :, None] - since[..., None, :]).masked_fill(~seen, float("-inf")).exp()
    # Only the strict lower triangle of the system is read; its diagonal is one.
    system = (k @ k.transpose(-1, -2)) * decay * beta
    right = torch.cat([v * beta, k * into * beta], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    fresh, stale = solved.split([values, width], dim=-1)
    outgoing = (k * (since[..., -1:] - since).exp()[..., None]).transpose(-1, -2)
    kept = since[..., -1].exp()
    between, asked = (q @ k.transpose(-1, -2)) * decay, q * into
    answers: list[torch.Tensor] = []
    for i in range(since.shape[-2]):
        written = fresh[..., i, :, :] - stale[..., i, :, :] @ state_BHRKV
        answers.append(asked[..., i, :, :] @ state_BHRKV + between[..., i, :, :] @ written)
        state_BHRKV *= kept[..., i, None, None]
        state_BHRKV += outgoing[..., i, :, :] @ written
    # The answers lie head by head and chunk by chunk.
    out = torch.stack(answers, dim=3)
    return out.permute(0, 3, 4, 1, 2, 5).reshape(batch, -1, heads, v.shape[2], values)[:, :count]
