# pyright: reportMissingImports=false, reportIndexIssue=false
"""What adapters add to a linear, for all segments of a packed batch at once: `kernels.LoraProducts` on a GPU.

    shrink    h = x A^T        expand_   y += scale h B^T
    backward  dh = scale dy B  dx += dh A  dA += dh^T x  dB += scale dy^T h

Six kernels (`triton_lora_products.py`, `triton_lora_gradients.py`), so that 32 adapters cost what one costs: every program
has tokens of one adapter and finds its factors by the tables of `segment_tables.py`. Bound by memory: x, y and their
gradients are read once each. A gradient is a sum of outer products over chunks of its adapter's own tokens, added in
their order by one program: no atomics, so it repeats and does not depend on what else is in the batch.

Shapes: T tokens, I and O features of the linear, k modules of a site, r lora_rank (each segment has its own).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from lilo_miles_backend.ranks.kernels import triton_lora_gradients, triton_lora_products
from lilo_miles_backend.ranks.kernels.launches import Launch, Launches
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
class _Plan:
    """What all kernels of one call share."""

    tiles: Tiles
    table: Table
    features: torch.dtype

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
            triton_lora_products.shrink[(len(tiles), triton.cdiv(width, block))](
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
            triton_lora_products.expand[(len(columns.blocks), len(tiles))](
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
        triton_lora_products.grad_products[(len(tiles), modules, blocks)](
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
        triton_lora_products.add_grad_x[(triton.cdiv(features, launch.columns), len(tiles))](
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
        triton_lora_gradients.outer[(len(columns.blocks), len(chunks), triton.cdiv(width, block))](
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
        grid = (triton.cdiv(features * width, SUM_BLOCK), len(plan.table.lines))
        triton_lora_gradients.sum_chunks[grid](
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
        lines, owners = table_key(segments)
        sizes = self._launches.tile_sizes
        return _Plan(
            tiles=self._tiles.get((cut, owners), lambda: make_tiles(cut, owners, sizes, device)),
            table=self._tables.get(lines, lambda: make_table(lines, device)),
            features=rows.dtype,
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
