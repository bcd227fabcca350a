# pyright: reportMissingImports=false
"""The programs behind `triton_lora.py`: six kernels over tiles of tokens, each of one adapter. Not to be called elsewhere.

`table` has a line per segment, `tiles`, `chunks` and `blocks` a line per piece, as `segment_tables.py` writes them.
Numbers from memory are given their divisors, without which the compiler would read two bytes at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _field(table, segment, index: tl.constexpr, FIELDS: tl.constexpr):
    return tl.load(table + segment * FIELDS + index)


@triton.jit
def _pointer(
    table,
    segment,
    index: tl.constexpr,
    dtype: tl.constexpr,
    ALIGN: tl.constexpr,
    FIELDS: tl.constexpr,
):
    # The compiler knows nothing of a number from memory, and would read two bytes at a time.
    pointer = _field(table, segment, index, FIELDS).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, ALIGN)


@triton.jit
def _rank(table, segment, DIVISOR: tl.constexpr, FIELDS: tl.constexpr):
    return tl.multiple_of(_field(table, segment, 4, FIELDS).to(tl.int32), DIVISOR)


@triton.jit
def _scale(table, segment, FIELDS: tl.constexpr):
    return _field(table, segment, 5, FIELDS).to(tl.int32).to(tl.float32, bitcast=True)


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
    segment = tl.load(tile)
    row = tl.load(tile + 1) + tl.arange(0, ROWS)
    in_rows = (row < tl.load(tile + 2))[:, None]
    here = x + row.to(tl.int64)[:, None] * x_stride
    a = _pointer(table, segment, 0, x.dtype.element_ty, ALIGN, FIELDS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_columns = column < modules * _rank(table, segment, RANK_DIVISOR, FIELDS)
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
    segment = tl.load(tile)
    row = tl.load(tile + 1) + tl.arange(0, ROWS)
    in_rows = (row < tl.load(tile + 2))[:, None]
    rank = _rank(table, segment, RANK_DIVISOR, FIELDS)
    b = _pointer(table, segment, 1, y.dtype.element_ty, ALIGN, FIELDS)
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
    total = total * _scale(table, segment, FIELDS) + before.to(tl.float32)
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
    segment = tl.load(tile)
    row = tl.load(tile + 1) + tl.arange(0, ROWS)
    in_rows = (row < tl.load(tile + 2))[:, None]
    rank = _rank(table, segment, RANK_DIVISOR, FIELDS)
    n = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    in_rank = (n < rank)[None, :]
    b = _pointer(table, segment, 1, grad.dtype.element_ty, ALIGN, FIELDS)
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
    total = total * _scale(table, segment, FIELDS)
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
    segment = tl.load(tile)
    row = tl.load(tile + 1) + tl.arange(0, ROWS)
    in_rows = (row < tl.load(tile + 2))[:, None]
    a = _pointer(table, segment, 0, grad_x.dtype.element_ty, ALIGN, FIELDS)
    end = modules * _rank(table, segment, RANK_DIVISOR, FIELDS)
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
    segment = tl.load(chunk)
    begin = tl.load(chunk + 1)
    end = tl.load(chunk + 2)
    rank = _rank(table, segment, RANK_DIVISOR, FIELDS)
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
    if tl.load(first_chunk + segment + 1) - tl.load(first_chunk + segment) == 1:
        grad = _pointer(table, segment, 2 if OF_A else 3, tl.float32, ALIGN, FIELDS)
        if OF_A:
            place = grad + n.to(tl.int64)[:, None] * features + column[None, :]
            mask = in_rank[:, None] & in_columns[None, :]
            total_T = tl.trans(total)
            tl.store(place, tl.load(place, mask=mask, other=0.0) + total_T, mask=mask)
        else:
            place = grad + column.to(tl.int64)[:, None] * rank + n[None, :]
            mask = in_columns[:, None] & in_rank[None, :]
            total = total * _scale(table, segment, FIELDS)
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
    """Add the chunks of a segment that has several to its gradient, one after another."""
    segment = tl.program_id(1)
    begin = tl.load(first_chunk + segment)
    end = tl.load(first_chunk + segment + 1)
    rank = _rank(table, segment, RANK_DIVISOR, FIELDS)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (element < features * modules * rank) & (end - begin > 1)
    place = element if OF_A or EQUAL_RANKS else (element // rank) * width + element % rank
    grad = _pointer(table, segment, 2 if OF_A else 3, tl.float32, ALIGN, FIELDS) + element
    here = partial + begin.to(tl.int64) * features * width + place
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(begin, end):
        total += tl.load(here, mask=inside, other=0.0)
        here += features * width
    if not OF_A:
        total = total * _scale(table, segment, FIELDS)
    tl.store(grad, tl.load(grad, mask=inside, other=0.0) + total, mask=inside)
