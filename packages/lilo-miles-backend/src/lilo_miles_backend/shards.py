"""FactorShard: which part of one LoRA factor a tensor-parallel rank holds. No torch: plain numbers.

A factor is either whole on every rank (its gradient is summed over them) or cut along one dimension into consecutive
parts. Context- and data-parallel ranks hold the same parts as their peers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorShard:
    """One factor's part on one rank."""

    full: tuple[int, int]
    """Shape of the whole factor: A is (lora_rank, in), B is (out, lora_rank)."""
    dim: int | None = None
    """The dimension that is cut; None: every rank holds the whole."""
    start: int = 0
    """First index along `dim` that this rank holds."""
    stop: int = 0
    """One past the last."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the part."""
        if self.dim is None:
            return self.full
        sizes = list(self.full)
        sizes[self.dim] = self.stop - self.start
        return sizes[0], sizes[1]

    @property
    def offsets(self) -> tuple[int, int]:
        """Where the part begins in the whole."""
        return (self.start, 0) if self.dim == 0 else (0, self.start)

    @property
    def index(self) -> tuple[slice, slice]:
        """The part as an index into the whole."""
        rows, columns = self.shape
        first, left = self.offsets
        return slice(first, first + rows), slice(left, left + columns)


def shard(full: tuple[int, int], dim: int | None, rank: int, size: int) -> FactorShard:
    """The part of rank `rank` of `size`: consecutive parts of ceil(n / size), the last ones shorter."""
    if dim is None or size == 1:
        return FactorShard(full=full)
    width = -(-full[dim] // size)
    start = min(rank * width, full[dim])
    return FactorShard(full=full, dim=dim, start=start, stop=min(start + width, full[dim]))
