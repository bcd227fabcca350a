# pyright: reportMissingImports=false, reportIndexIssue=false
"""What adapters add to a linear, for all segments of a packed batch at once: `kernels.LoraProducts` on a GPU.

    shrink    h = x A^T        expand_   y += scale h B^T
    backward  dh = scale dy B  dx += dh A  dA += dh^T x  dB += scale dy^T h

Six kernels, so that 32 adapters cost what one costs: every program has tokens of one adapter and finds its factors by
the tables of `segment_tables.py`. Bound by memory: x, y and their gradients are read once each. A gradient is a sum of
outer products over chunks of its adapter's own tokens, added in their order by one program: no atomics, so it repeats
and does not depend on what else is in the batch. Imported only where Triton is.

Shapes: T tokens, I and O features of the linear, k modules of a site, r lora_rank (each segment has its own).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from lilo_miles_backend.ranks.kernels.segment_tables import (
    FIELDS,
    Cache,
    Columns,
    Table,
    Tiles,
    make_columns,
    make_table,
    make_tiles,
    table_key,
)
from lilo_miles_backend.ranks.lora import Segment

WIDEST = 128
"""Columns of A's products that one program has; wider ones are split."""
NARROWEST = 32
"""Ranks up to it share one compiled kernel: nothing is gained by less, and fewer have to be compiled."""
SUM_BLOCK = 1024
KEPT_CUTS = 64
KEPT_TABLES = 16384
"""Sites times combinations of adapters that are remembered; each takes 512 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How the programs of one kernel are cut; does not change what it computes."""

    rows: int
    """Tokens: of a program, or for gradients of one step of it."""
    columns: int
    """Features: of a program, or for narrow products of one step of it."""
    warps: int
    stages: int
    """Steps whose reads are under way at once."""

    def narrowed(self, dtype: torch.dtype) -> Launch:
        """For operands twice as wide as bfloat16: what one program holds must still fit."""
        if dtype != torch.float32:
            return self
        return replace(self, columns=min(self.columns, 32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """Chosen on an H200 (`benchmarks/gpu/adapter_launches.py`)."""

    shrink: Launch = Launch(rows=64, columns=128, warps=4, stages=3)
    expand: Launch = Launch(rows=64, columns=128, warps=4, stages=1)
    grad_products: Launch = Launch(rows=64, columns=128, warps=4, stages=3)
    grad_x: Launch = Launch(rows=64, columns=128, warps=4, stages=1)
    outer: Launch = Launch(rows=64, columns=128, warps=4, stages=3)

    @property
    def tile_sizes(self) -> tuple[int, ...]:
        """Tokens of all programs that have tiles."""
        return tuple(
            {
                launch.rows: None
                for launch in (self.shrink, self.expand, self.grad_products, self.grad_x)
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What all kernels of one call share."""

    tiles: Tiles
    table: Table
    features: torch.dtype
    num_segments: int

    @property
    def precision(self) -> str:
        """Of the products: float32 operands are multiplied as such, not as tf32."""
        return "ieee" if self.features == torch.float32 else "tf32"

    @property
    def rank_block(self) -> int:
        return _block(self.table.widest_rank)


class TritonLora:
    """Implements `kernels.LoraProducts` for bfloat16, float16 and float32."""

    def __init__(self, launches: Launches | None = None) -> None:
        self._launches = launches or Launches()
        self._tiles: Cache[Tiles] = Cache(KEPT_CUTS)
        self._tables: Cache[Table] = Cache(KEPT_TABLES)
        self._columns: Cache[Columns] = Cache(KEPT_TABLES)

    def shrink(self, x: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        """A's products of every token, [T, width]; what no segment has is arbitrary."""
        plan = self._plan(x, segments)
        modules = _num_modules(segments)
        width = modules * plan.table.widest_rank
        products = x.new_empty(x.shape[0], width)
        block = _block(width)
        launch = self._launches.shrink.narrowed(x.dtype)
        tiles = plan.tiles.pieces[launch.rows]
        if len(tiles):
            _shrink[(len(tiles), triton.cdiv(width, block))](
                x,
                products,
                plan.table.lines,
                tiles,
                x.shape[1],
                x.stride(0),
                width,
                modules,
                FIELDS=FIELDS,
                ALIGN=plan.table.alignment,
                RANK_DIVISOR=plan.table.rank_divisor,
                ROWS=launch.rows,
                BLOCK=block,
                DEPTH=launch.columns,
                PRECISION=plan.precision,
                num_warps=launch.warps,
                num_stages=launch.stages,
            )
        return products

    def expand_(
        self,
        y: torch.Tensor,
        products: torch.Tensor,
        segments: Sequence[Segment],
        parts: Sequence[int],
    ) -> None:
        """Add scale * B (A x) to y [T, O], in place."""
        plan = self._plan(products, segments)
        launch = self._launches.expand.narrowed(y.dtype)
        columns = self._columns_of(tuple(parts), launch, y.device)
        tiles = plan.tiles.pieces[launch.rows]
        if len(tiles):
            _expand[(len(columns.blocks), len(tiles))](
                y,
                products,
                plan.table.lines,
                tiles,
                columns.blocks,
                y.stride(0),
                products.stride(0),
                FIELDS=FIELDS,
                ALIGN=plan.table.alignment,
                RANK_DIVISOR=plan.table.rank_divisor,
                COLUMN_DIVISOR=columns.divisor,
                ROWS=launch.rows,
                COLUMNS=launch.columns,
                RANKS=plan.rank_block,
                PRECISION=plan.precision,
                num_warps=launch.warps,
                num_stages=launch.stages,
            )

    def backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        products: torch.Tensor,
        segments: Sequence[Segment],
        parts: Sequence[int],
        grad_x: torch.Tensor | None,
    ) -> None:
        """Add to the factors' float32 gradients, and to `grad_x` [T, I] in place where it is given."""
        plan = self._plan(products, segments)
        if not plan.tiles.most_chunks:
            return
        outer = self._launches.outer
        columns = self._columns_of(tuple(parts), outer, x.device)
        inputs = self._columns_of((x.shape[1],), outer, x.device)
        grad_products = self._grad_products(grad, products, plan, columns)
        if grad_x is not None:
            self._add_grad_x(grad_x, grad_products, plan, len(parts))
        self._add_outer(x, grad_products, plan, inputs, modules=len(parts), of_a=True)
        self._add_outer(grad, products, plan, columns, modules=1, of_a=False)

    def _grad_products(
        self, grad: torch.Tensor, products: torch.Tensor, plan: _Plan, columns: Columns
    ) -> torch.Tensor:
        """Gradient of A's products, scaled."""
        result = torch.empty_like(products)
        modules, block = len(columns.bounds) - 1, plan.rank_block
        launch = self._launches.grad_products.narrowed(grad.dtype)
        tiles = plan.tiles.pieces[launch.rows]
        blocks = triton.cdiv(plan.table.widest_rank, block)
        _grad_products[(len(tiles), modules, blocks)](
            grad,
            result,
            plan.table.lines,
            tiles,
            columns.bounds,
            grad.stride(0),
            result.stride(0),
            FIELDS=FIELDS,
            ALIGN=plan.table.alignment,
            RANK_DIVISOR=plan.table.rank_divisor,
            COLUMN_DIVISOR=columns.divisor,
            ROWS=launch.rows,
            RANKS=block,
            DEPTH=launch.columns,
            PRECISION=plan.precision,
            num_warps=launch.warps,
            num_stages=launch.stages,
        )
        return result

    def _add_grad_x(
        self, grad_x: torch.Tensor, grad_products: torch.Tensor, plan: _Plan, modules: int
    ) -> None:
        features, launch = grad_x.shape[1], self._launches.grad_x.narrowed(grad_x.dtype)
        tiles = plan.tiles.pieces[launch.rows]
        _add_grad_x[(triton.cdiv(features, launch.columns), len(tiles))](
            grad_x,
            grad_products,
            plan.table.lines,
            tiles,
            features,
            grad_x.stride(0),
            grad_products.stride(0),
            modules,
            FIELDS=FIELDS,
            ALIGN=plan.table.alignment,
            RANK_DIVISOR=plan.table.rank_divisor,
            ROWS=launch.rows,
            COLUMNS=launch.columns,
            DEPTH=32,
            PRECISION=plan.precision,
            num_warps=launch.warps,
            num_stages=launch.stages,
        )

    def _add_outer(
        self,
        wide: torch.Tensor,
        narrow: torch.Tensor,
        plan: _Plan,
        columns: Columns,
        *,
        modules: int,
        of_a: bool,
    ) -> None:
        """Add wide^T narrow of each segment to its gradient of A (transposed) or B."""
        width = modules * plan.table.widest_rank
        block, launch = _block(width), self._launches.outer
        chunks, features = plan.tiles.chunks, columns.features
        several = plan.tiles.most_chunks > 1
        room = (len(chunks), features * width) if several else (1,)
        partial = wide.new_empty(room, dtype=torch.float32)
        _outer[(len(columns.blocks), len(chunks), triton.cdiv(width, block))](
            wide,
            narrow,
            partial,
            plan.table.lines,
            chunks,
            plan.tiles.first_chunk,
            columns.blocks,
            features,
            wide.stride(0),
            narrow.stride(0),
            width,
            modules,
            FIELDS=FIELDS,
            ALIGN=plan.table.alignment,
            RANK_DIVISOR=plan.table.rank_divisor,
            COLUMN_DIVISOR=columns.divisor,
            OF_A=of_a,
            STEP=launch.rows // 2 if plan.features == torch.float32 else launch.rows,
            COLUMNS=launch.columns,
            BLOCK=block,
            PRECISION=plan.precision,
            num_warps=launch.warps if block <= 64 else 2 * launch.warps,
            num_stages=launch.stages,
        )
        if not several:
            return
        _sum_chunks[(triton.cdiv(features * width, SUM_BLOCK), plan.num_segments)](
            partial,
            plan.table.lines,
            plan.tiles.first_chunk,
            features,
            width,
            modules,
            FIELDS=FIELDS,
            ALIGN=plan.table.alignment,
            RANK_DIVISOR=plan.table.rank_divisor,
            OF_A=of_a,
            EQUAL_RANKS=plan.table.equal_ranks,
            BLOCK=SUM_BLOCK,
        )

    def _plan(self, rows: torch.Tensor, segments: Sequence[Segment]) -> _Plan:
        num_tokens, device = rows.shape[0], rows.device
        assert rows.stride(1) == 1, "features lie next to each other"
        cut = tuple(segment.tokens.indices(num_tokens)[:2] for segment in segments)
        key = table_key(segments)
        return _Plan(
            tiles=self._tiles.get(cut, lambda: make_tiles(cut, self._launches.tile_sizes, device)),
            table=self._tables.get(key, lambda: make_table(key, device)),
            features=rows.dtype,
            num_segments=len(segments),
        )

    def _columns_of(self, parts: tuple[int, ...], launch: Launch, device: torch.device) -> Columns:
        size = launch.columns
        return self._columns.get((parts, size), lambda: make_columns(parts, size, device))


def _num_modules(segments: Sequence[Segment]) -> int:
    factors = segments[0].factors
    return factors.a.shape[0] // factors.lora_rank


def _block(width: int) -> int:
    """Columns of one program for products of this width."""
    return min(WIDEST, max(NARROWEST, triton.next_power_of_2(width)))


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
def _shrink(
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
def _expand(
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
def _grad_products(
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
def _add_grad_x(
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
def _outer(
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
    # Of one chunk, the sum is the gradient; those of several are added up in order by `_sum_chunks`.
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
def _sum_chunks(
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
