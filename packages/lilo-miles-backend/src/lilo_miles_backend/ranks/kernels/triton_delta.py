# pyright: reportMissingImports=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalSubscript=false, reportArgumentType=false
"""`delta_gradients.py` as one Triton kernel: a program has a chunk, a value head and a block of the key's size.

Products are of bfloat16 with float32 sums. Each sum begins at zero and is used when it is whole: fla's own kernel of this
step scales sums and adds products to them afterwards, which Triton from 3.4 to before 3.7.1 makes wrong code for on Hopper
GPUs. With two warps it takes the matrix instructions that need no waiting for. `delta_fla.py` compares it with the torch
form once per process before it is used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lilo_miles_backend.ranks.kernels.delta_gradients import ChunkInputs

WARPS, STAGES = 2, 3
BLOCK_K, BLOCK_V = 64, 32


def chunk_gradients(
    given: ChunkInputs,
    *,
    scale: float,
    bounds: torch.Tensor,
    chunks: torch.Tensor,
    chunk_size: int,
    warps: int = WARPS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q and k [1, T, G, K], of w [1, T, H, K], and of the summed g [1, T, H].

    Args:
        given: of one stream, contiguous.
        scale: of queries.
        bounds: int64 [I + 1], where each interval begins.
        chunks: [N, 2]: the interval of each chunk, and its place in it.
        chunk_size: C, at least 16.
        warps: of a program.
    """
    tokens, heads, width = given.v.shape[1:]
    groups, size = given.k.shape[2:]
    block = min(BLOCK_K, triton.next_power_of_2(size))
    blocks = triton.cdiv(size, block)
    dq, dk, dw = (given.k.new_empty(1, tokens, heads, size) for _ in range(3))
    dg = given.g.new_empty(blocks, tokens, heads, dtype=torch.float32)
    _gradients[blocks, heads, len(chunks)](
        given.q,
        given.k,
        given.v,
        given.do,
        given.dv,
        given.g,
        given.h,
        given.dh,
        dq,
        dk,
        dw,
        dg,
        bounds,
        chunks,
        scale,
        tokens,
        GROUPS=groups,
        HEADS=heads,
        SIZE=size,
        WIDTH=width,
        CHUNK=chunk_size,
        BLOCK_K=block,
        BLOCK_V=min(BLOCK_V, triton.next_power_of_2(width)),
        num_warps=warps,
        num_stages=STAGES,
    )
    if heads != groups:
        dq, dk = (x.unflatten(2, (groups, -1)).sum(3) for x in (dq, dk))
    return dq, dk, dw, dg.sum(0, keepdim=True)


@triton.jit(do_not_specialize=["tokens"])
def _gradients(
    q,
    k,
    v,
    do,
    dv,
    g,
    h,
    dh,
    dq,
    dk,
    dw,
    dg,
    bounds,
    chunks,
    scale,
    tokens,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    block = tl.program_id(0)
    head = tl.program_id(1)
    chunk = tl.program_id(2).to(tl.int64)
    interval = tl.load(chunks + 2 * chunk).to(tl.int64)
    first = tl.load(bounds + interval) + tl.load(chunks + 2 * chunk + 1).to(tl.int64) * CHUNK
    count = tl.minimum(tl.load(bounds + interval + 1) - first, CHUNK).to(tl.int32)
    within = tl.arange(0, CHUNK)
    at_k = block * BLOCK_K + tl.arange(0, BLOCK_K)
    # From here on places are counted from this chunk's, which 32 bits can hold.
    values = (first * HEADS + head) * WIDTH
    wide_keys = (first * HEADS + head) * SIZE
    keys = (first * GROUPS + head // (HEADS // GROUPS)) * SIZE
    state = (chunk * HEADS + head) * SIZE * WIDTH
    v += values
    do += values
    dv += values
    g += first * HEADS + head
    h += state
    dh += state
    q += keys
    k += keys

    real = within < count
    is_key = real[:, None] & (at_k < SIZE)[None, :]
    key = within[:, None] * (GROUPS * SIZE) + at_k[None, :]
    wide_key = within[:, None] * (HEADS * SIZE) + at_k[None, :]

    products = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK_V):
        value, is_value = _value_places(start, real, HEADS, WIDTH, BLOCK_V)
        do_block = tl.load(do + value, mask=is_value, other=0.0)
        v_block = tl.load(v + value, mask=is_value, other=0.0)
        products = tl.dot(do_block, tl.trans(v_block), products, input_precision="ieee")
    decay = tl.load(g + within * HEADS, mask=real, other=0.0)
    last = tl.load(g + (count - 1) * HEADS)
    seen = (within[:, None] >= within[None, :]) & real[:, None]
    between = tl.exp2(tl.where(seen, decay[:, None] - decay[None, :], 0.0))
    attention = tl.where(seen, products * between * scale, 0.0).to(k.dtype.element_ty)

    from_state = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK_V):
        value, is_value = _value_places(start, real, HEADS, WIDTH, BLOCK_V)
        do_block = tl.load(do + value, mask=is_value, other=0.0)
        h_block = _state_block(h, start, at_k, SIZE, WIDTH, BLOCK_V)
        from_state = tl.dot(do_block, tl.trans(h_block), from_state, input_precision="ieee")
    k_block = tl.load(k + key, mask=is_key, other=0.0)
    inside = tl.dot(attention, k_block, input_precision="ieee")
    dq_block = from_state * (tl.exp2(decay) * scale)[:, None] + inside
    tl.store(dq + wide_keys + wide_key, dq_block.to(dq.dtype.element_ty), mask=is_key)
    q_block = tl.load(q + key, mask=is_key, other=0.0)
    slope = tl.sum(dq_block * q_block.to(tl.float32), 1)

    to_state = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    both = tl.zeros([BLOCK_K], dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK_V):
        value, is_value = _value_places(start, real, HEADS, WIDTH, BLOCK_V)
        v_block = tl.load(v + value, mask=is_value, other=0.0)
        dh_block = _state_block(dh, start, at_k, SIZE, WIDTH, BLOCK_V)
        h_block = _state_block(h, start, at_k, SIZE, WIDTH, BLOCK_V)
        to_state = tl.dot(v_block, tl.trans(dh_block), to_state, input_precision="ieee")
        both += tl.sum(h_block.to(tl.float32) * dh_block.to(tl.float32), 1)
    to_state = to_state * tl.where(real, tl.exp2(last - decay), 0.0)[:, None]
    k_block = tl.load(k + key, mask=is_key, other=0.0)
    k_values = k_block.to(tl.float32)
    of_last = tl.sum(tl.sum(to_state * k_values, 1), 0) + tl.sum(both, 0) * tl.exp2(last)
    dk_block = to_state + tl.dot(tl.trans(attention), q_block, input_precision="ieee")
    tl.store(dk + wide_keys + wide_key, dk_block.to(dk.dtype.element_ty), mask=is_key)
    slope = slope - tl.sum(dk_block * k_values, 1)
    slope = slope + tl.where(within == count - 1, of_last, 0.0)
    dg += block.to(tl.int64) * tokens * HEADS + first * HEADS + head
    tl.store(dg + within * HEADS, slope, mask=real)

    dw_block = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK_V):
        value, is_value = _value_places(start, real, HEADS, WIDTH, BLOCK_V)
        dv_block = tl.load(dv + value, mask=is_value, other=0.0)
        h_block = _state_block(h, start, at_k, SIZE, WIDTH, BLOCK_V)
        dw_block = tl.dot(dv_block, tl.trans(h_block), dw_block, input_precision="ieee")
    tl.store(dw + wide_keys + wide_key, (-dw_block).to(dw.dtype.element_ty), mask=is_key)


@triton.jit
def _value_places(start, real, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_V: tl.constexpr):
    """Where a chunk's values [C, block] of one head lie, and which are there."""
    at_v = start + tl.arange(0, BLOCK_V)
    within = tl.arange(0, real.shape[0])
    return (
        within[:, None] * (HEADS * WIDTH) + at_v[None, :],
        real[:, None] & (at_v < WIDTH)[None, :],
    )


@triton.jit
def _state_block(
    states, start, at_k, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_V: tl.constexpr
):
    """[block of keys, block of values] of one state."""
    at_v = start + tl.arange(0, BLOCK_V)
    there = (at_k < SIZE)[:, None] & (at_v < WIDTH)[None, :]
    return tl.load(states + at_k[:, None] * WIDTH + at_v[None, :], mask=there, other=0.0)
