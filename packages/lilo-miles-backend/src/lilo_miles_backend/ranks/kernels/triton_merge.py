# pyright: reportMissingImports=false, reportIndexIssue=false
"""Merging attention over two disjoint sets of keys on a GPU: one pass over both outputs.

The formula is that of `attention_merge.py`. A program merges one query head of one token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lilo_miles_backend.ranks.kernels.attention_kernel import Attended


@triton.jit
def _merge(
    out,
    lse,
    part,
    part_lse,
    length,
    out_row,
    out_token,
    lse_row,
    lse_head,
    lse_token,
    part_row,
    part_token,
    part_lse_row,
    part_lse_head,
    part_lse_token,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0)
    row, token = (place // length).to(tl.int64), (place % length).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    feature = tl.arange(0, BLOCK)
    inside = feature < SIZE
    lse += row * lse_row + head * lse_head + token * lse_token
    part_lse += row * part_lse_row + head * part_lse_head + token * part_lse_token
    left, right = tl.load(lse), tl.load(part_lse)
    most = tl.maximum(left, right)
    total = most + tl.log(tl.exp(left - most) + tl.exp(right - most))
    out += row * out_row + token * out_token + head * SIZE + feature
    part += row * part_row + token * part_token + head * SIZE + feature
    merged = tl.load(out, mask=inside).to(tl.float32) * tl.exp(left - total)
    merged += tl.load(part, mask=inside).to(tl.float32) * tl.exp(right - total)
    tl.store(out, merged.to(out.dtype.element_ty), mask=inside)
    tl.store(lse, total)


def merge_(whole: Attended, part: Attended) -> None:
    """See `Merge`; heads of both outputs lie one after another in a token."""
    rows, length, heads, size = whole.out.shape
    for out in (whole.out, part.out):
        assert out.stride(2) == size, f"heads of a token are {out.stride(2)} apart, not {size}"
        assert out.stride(3) == 1, f"features of a head are {out.stride(3)} apart"
    _merge[(rows * length, heads)](
        whole.out,
        whole.lse,
        part.out,
        part.lse,
        length,
        *whole.out.stride()[:2],
        *whole.lse.stride(),
        *part.out.stride()[:2],
        *part.lse.stride(),
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=1,
    )
