"""Launches: how the adapters' kernels are cut into programs. Changes no number, only the time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


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
