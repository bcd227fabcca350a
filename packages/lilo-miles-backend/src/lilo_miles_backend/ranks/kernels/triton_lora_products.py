# pyright: reportMissingImports=false
"""Products of tokens with their adapters' factors: the programs behind `triton_lora.py` that read or write every token.

`table` has a line per adapter, `tiles` and `blocks` a line per piece, as `segment_tables.py` writes them. Not to be
called elsewhere.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lilo_miles_backend.ranks.kernels.triton_lora_lines import pointer_of, rank_of, scale_of


@triton.jit
def shrink(
    x,
    products,
    table,
    tiles,
    features,
    x_stride,
    width,
    modules,
    FIELDS: tl.constexpr,
    ALIGN: tl.constexpr,
    RANK_DIVISOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Products of one tile with A^T."""
    tile = tiles + tl.program_id(0) * 3
    line = tl.load(tile)
    row = tl.load(tile + 1) + tl.arange(0, ROWS)
    in_rows = (row < tl.load(tile + 2))[:, None]
    here = x + row.to(tl.int64)[:, None] * x_stride
    a = pointer_of(table, line, 0, x.dtype.element_ty, ALIGN, FIELDS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_columns = column < modules * rank_of(table, line, RANK_DIVISOR, FIELDS)
    there = a + column.to(tl.int64)[None, :] * features
    k = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, features, DEPTH):
        in_depth = first + k < features
        left = tl.load(here + (first + k)[None, :], mask=in_rows & in_depth[None, :], other=0.0)
        right = tl.load(
            there + (first + k)[:, None], mask=in_depth[:, None] & in_columns[None, :], other=0.0
        )
        total = tl.dot(left, right, total, input_precision=PRECISION)
    place = products + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(place, total.to(products.dtype.element_ty), mask=in_rows & in_columns[None, :])


@triton.jit
def expand(
    y,
    products,
    table,
    tiles,
    blocks,
    y_stride,
    width,
    FIELDS: tl.constexpr,
    ALIGN: tl.constexpr,
    RANK_DIVISOR: tl.constexpr,
    COLUMN_DIVISOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add one tile's products with B^T to the columns of one module."""
    block = blocks + tl.program_id(0) * 3
    module = tl.load(block)
    column = tl.multiple_of(tl.load(block + 1), COLUMN_DIVISOR) + tl.arange(0, COLUMNS)
    in_columns = column < tl.multiple_of(tl.load(block + 2), COLUMN_DIVISOR)
    tile = tiles + tl.program_id(1) * 3
    line = tl.load(tile)
    row = tl.load(tile + 1) + tl.arange(0, ROWS)
    in_rows = (row < tl.load(tile + 2))[:, None]
    rank = rank_of(table, line, RANK_DIVISOR, FIELDS)
    b = pointer_of(table, line, 1, y.dtype.element_ty, ALIGN, FIELDS)
    here = products + row.to(tl.int64)[:, None] * width + module * rank
    there = b + column.to(tl.int64)[None, :] * rank
    place = y + row.to(tl.int64)[:, None] * y_stride + column[None, :]
    mask = in_rows & in_columns[None, :]
    before = tl.load(place, mask=mask, other=0.0)  # on its way during the product
    n = tl.arange(0, RANKS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, rank, RANKS):
        in_rank = first + n < rank
        left = tl.load(here + (first + n)[None, :], mask=in_rows & in_rank[None, :], other=0.0)
        right = tl.load(
            there + (first + n)[:, None], mask=in_rank[:, None] & in_columns[None, :], other=0.0
        )
        total = tl.dot(left, right, total, input_precision=PRECISION)
    total = total * scale_of(table, line, FIELDS) + before.to(tl.float32)
    tl.store(place, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def grad_products(
    grad,
    result,
    table,
    tiles,
    bounds,
    grad_stride,
    width,
    FIELDS: tl.constexpr,
    ALIGN: tl.constexpr,
    RANK_DIVISOR: tl.constexpr,
    COLUMN_DIVISOR: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of one tile's products of one module, scaled."""
    tile = tiles + tl.program_id(0) * 3
    module = tl.program_id(1)
    line = tl.load(tile)
    row = tl.load(tile + 1) + tl.arange(0, ROWS)
    in_rows = (row < tl.load(tile + 2))[:, None]
    rank = rank_of(table, line, RANK_DIVISOR, FIELDS)
    n = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    in_rank = (n < rank)[None, :]
    b = pointer_of(table, line, 1, grad.dtype.element_ty, ALIGN, FIELDS)
    begin = tl.multiple_of(tl.load(bounds + module), COLUMN_DIVISOR)
    end = tl.multiple_of(tl.load(bounds + module + 1), COLUMN_DIVISOR)
    here = grad + row.to(tl.int64)[:, None] * grad_stride + begin
    there = b + begin.to(tl.int64) * rank + n[None, :]
    k = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, RANKS), tl.float32)
    for first in range(0, end - begin, DEPTH):
        in_depth = first + k < end - begin
        left = tl.load(here + (first + k)[None, :], mask=in_rows & in_depth[None, :], other=0.0)
        right = tl.load(
            there + (first + k).to(tl.int64)[:, None] * rank,
            mask=in_depth[:, None] & in_rank,
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision=PRECISION)
    total = total * scale_of(table, line, FIELDS)
    place = result + row.to(tl.int64)[:, None] * width + module * rank + n[None, :]
    tl.store(place, total.to(result.dtype.element_ty), mask=in_rows & in_rank)


@triton.jit
def add_grad_x(
    grad_x,
    grad_products,
    table,
    tiles,
    features,
    x_stride,
    width,
    modules,
    FIELDS: tl.constexpr,
    ALIGN: tl.constexpr,
    RANK_DIVISOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add one tile's part of the input's gradient."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = (column < features)[None, :]
    tile = tiles + tl.program_id(1) * 3
    line = tl.load(tile)
    row = tl.load(tile + 1) + tl.arange(0, ROWS)
    in_rows = (row < tl.load(tile + 2))[:, None]
    a = pointer_of(table, line, 0, grad_x.dtype.element_ty, ALIGN, FIELDS)
    end = modules * rank_of(table, line, RANK_DIVISOR, FIELDS)
    here = grad_products + row.to(tl.int64)[:, None] * width
    there = a + column[None, :]
    place = grad_x + row.to(tl.int64)[:, None] * x_stride + column[None, :]
    mask = in_rows & in_columns
    before = tl.load(place, mask=mask, other=0.0)  # on its way during the product
    n = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, end, DEPTH):
        in_depth = first + n < end
        left = tl.load(here + (first + n)[None, :], mask=in_rows & in_depth[None, :], other=0.0)
        right = tl.load(
            there + (first + n).to(tl.int64)[:, None] * features,
            mask=in_depth[:, None] & in_columns,
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision=PRECISION)
    total += before.to(tl.float32)
    tl.store(place, total.to(grad_x.dtype.element_ty), mask=mask)
