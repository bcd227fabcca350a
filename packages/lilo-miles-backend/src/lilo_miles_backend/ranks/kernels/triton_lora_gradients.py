# pyright: reportMissingImports=false
"""Gradients of adapters' factors: the programs behind `triton_lora.py` that sum over tokens.

`table` has a line per adapter, `chunks` and `blocks` a line per piece, as `segment_tables.py` writes them. Not to be
called elsewhere.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lilo_miles_backend.ranks.kernels.triton_lora_lines import pointer_of, rank_of, scale_of


@triton.jit
def outer(
    wide,
    narrow,
    partial,
    table,
    chunks,
    first_chunk,
    blocks,
    features,
    wide_stride,
    narrow_stride,
    width,
    modules,
    FIELDS: tl.constexpr,
    ALIGN: tl.constexpr,
    RANK_DIVISOR: tl.constexpr,
    COLUMN_DIVISOR: tl.constexpr,
    OF_A: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum of one chunk's outer products, [width, features] for A and [features, width] for B; added to the gradient."""
    block = blocks + tl.program_id(0) * 3
    column = tl.multiple_of(tl.load(block + 1), COLUMN_DIVISOR) + tl.arange(0, COLUMNS)
    in_columns = column < tl.multiple_of(tl.load(block + 2), COLUMN_DIVISOR)
    index = tl.program_id(1)
    chunk = chunks + index * 3
    line = tl.load(chunk)
    begin = tl.load(chunk + 1)
    end = tl.load(chunk + 2)
    rank = rank_of(table, line, RANK_DIVISOR, FIELDS)
    n = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    in_rank = n < modules * rank
    offset = tl.load(block) * rank
    step = tl.arange(0, STEP)
    total = tl.zeros((COLUMNS, BLOCK), tl.float32)
    for first in range(begin, end, STEP):
        row = first + step
        in_rows = (row < end)[:, None]
        left = tl.load(
            wide + row.to(tl.int64)[:, None] * wide_stride + column[None, :],
            mask=in_rows & in_columns[None, :],
            other=0.0,
        )
        right = tl.load(
            narrow + row.to(tl.int64)[:, None] * narrow_stride + offset + n[None, :],
            mask=in_rows & in_rank[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
    # Of one chunk, the sum is the gradient; those of several are added up in order by `sum_chunks`.
    if tl.load(first_chunk + line + 1) - tl.load(first_chunk + line) == 1:
        grad = pointer_of(table, line, 2 if OF_A else 3, tl.float32, ALIGN, FIELDS)
        if OF_A:
            place = grad + n.to(tl.int64)[:, None] * features + column[None, :]
            mask = in_rank[:, None] & in_columns[None, :]
            total_T = tl.trans(total)
            tl.store(place, tl.load(place, mask=mask, other=0.0) + total_T, mask=mask)
        else:
            place = grad + column.to(tl.int64)[:, None] * rank + n[None, :]
            mask = in_columns[:, None] & in_rank[None, :]
            total = total * scale_of(table, line, FIELDS)
            tl.store(place, tl.load(place, mask=mask, other=0.0) + total, mask=mask)
    else:
        chunk_sum = partial + index.to(tl.int64) * features * width
        if OF_A:
            place = chunk_sum + n.to(tl.int64)[:, None] * features + column[None, :]
            tl.store(place, tl.trans(total), mask=in_rank[:, None] & in_columns[None, :])
        else:
            place = chunk_sum + column.to(tl.int64)[:, None] * width + n[None, :]
            tl.store(place, total, mask=in_columns[:, None] & in_rank[None, :])


@triton.jit
def sum_chunks(
    partial,
    table,
    first_chunk,
    features,
    width,
    modules,
    FIELDS: tl.constexpr,
    ALIGN: tl.constexpr,
    RANK_DIVISOR: tl.constexpr,
    OF_A: tl.constexpr,
    EQUAL_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the chunks of an adapter that has several to its gradient, one after another."""
    line = tl.program_id(1)
    begin = tl.load(first_chunk + line)
    end = tl.load(first_chunk + line + 1)
    rank = rank_of(table, line, RANK_DIVISOR, FIELDS)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (element < features * modules * rank) & (end - begin > 1)
    place = element if OF_A or EQUAL_RANKS else (element // rank) * width + element % rank
    grad = pointer_of(table, line, 2 if OF_A else 3, tl.float32, ALIGN, FIELDS) + element
    here = partial + begin.to(tl.int64) * features * width + place
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(begin, end):
        total += tl.load(here, mask=inside, other=0.0)
        here += features * width
    if not OF_A:
        total = total * scale_of(table, line, FIELDS)
    tl.store(grad, tl.load(grad, mask=inside, other=0.0) + total, mask=inside)
