"""FactorShard: which part of a tensor a tensor-parallel rank holds. No torch: plain numbers.

A tensor is either whole on every rank (a factor's gradient is summed over them) or cut along one dimension. What is
cut is a row of *sections*, each divided over ranks by itself: of a projection to queries, keys and values together a
rank holds its heads' queries, then their keys, then their values, which are three ranges of the file's rows.
Context- and data-parallel ranks hold the same parts as their peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Range: TypeAlias = tuple[int, int]
"""First index, and one past the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Units along a dimension that are divided over ranks together, as the heads of all queries."""

    start: int
    """First index of the first unit."""
    width: int
    """Indices of a unit."""
    count: int
    """Units."""
    stride: int = 0
    """From one unit's first index to the next one's; 0: they are adjacent."""

    @property
    def size(self) -> int:
        """Indices of all units."""
        return self.width * self.count

    def ranges(self, rank: int, size: int) -> list[Range]:
        """What rank `rank` of `size` holds: consecutive parts of ceil(count / size) units, the last ones fewer."""
        each = -(-self.count // size)
        first = min(rank * each, self.count)
        last = min(first + each, self.count)
        stride = self.stride or self.width
        if stride == self.width:
            return [(self.start + first * stride, self.start + last * stride)]
        starts = [self.start + unit * stride for unit in range(first, last)]
        return [(start, start + self.width) for start in starts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A rectangle of a tensor."""

    offsets: tuple[int, int]
    """Where it begins in the whole."""
    shape: tuple[int, int]
    place: tuple[slice, slice]
    """Where it lies in the part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorShard:
    """One factor's part on one rank."""

    full: tuple[int, int]
    """Shape of the whole factor: A is (lora_rank, in), B is (out, lora_rank)."""
    dim: int | None = None
    """The dimension that is cut; None: every rank holds the whole."""
    ranges: tuple[Range, ...] = ()
    """Along `dim`, what this rank holds, in the order in which it holds it."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the part."""
        if self.dim is None:
            return self.full
        sizes = list(self.full)
        sizes[self.dim] = sum(stop - start for start, stop in self.ranges)
        return sizes[0], sizes[1]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The part as rectangles of the whole, without empty ones."""
        if self.dim is None:
            return (Block(offsets=(0, 0), shape=self.full, place=(slice(None), slice(None))),)
        found: list[Block] = []
        here = 0
        for start, stop in self.ranges:
            if stop > start:
                found.append(self._block(start, stop, here))
            here += stop - start
        return tuple(found)

    @property
    def index(self) -> tuple[slice | list[int], slice | list[int]]:
        """The part as an index into the whole."""
        if self.dim is None:
            return slice(None), slice(None)
        along: slice | list[int]
        if len(self.ranges) == 1:
            along = slice(*self.ranges[0])
        else:
            along = [place for start, stop in self.ranges for place in range(start, stop)]
        return (along, slice(None)) if self.dim == 0 else (slice(None), along)

    def _block(self, start: int, stop: int, here: int) -> Block:
        there, held, other = slice(here, here + stop - start), slice(None), 1 - (self.dim or 0)
        whole = self.full[other]
        if self.dim == 0:
            return Block(offsets=(start, 0), shape=(stop - start, whole), place=(there, held))
        return Block(offsets=(0, start), shape=(whole, stop - start), place=(held, there))


def shard(
    full: tuple[int, int],
    dim: int | None,
    rank: int,
    size: int,
    sections: Sequence[Section] = (),
) -> FactorShard:
    """The part of rank `rank` of `size`; without `sections` the dimension is one of single indices."""
    if dim is None:
        return FactorShard(full=full)
    along = tuple(sections) or (Section(start=0, width=1, count=full[dim]),)
    ranges = joined([r for section in along for r in section.ranges(rank, size)])
    if size == 1 and ranges == ((0, full[dim]),):
        return FactorShard(full=full)
    return FactorShard(full=full, dim=dim, ranges=ranges)


def joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The same indices in the same order, ranges that continue each other made one."""
    found: list[Range] = []
    for start, stop in ranges:
        if found and found[-1][1] == start and start < stop:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)
