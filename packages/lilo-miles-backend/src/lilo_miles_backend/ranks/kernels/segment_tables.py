"""Segment tables: what the kernels of `triton_lora.py` must know of a batch's adapters, as small tensors on the device.

    tiles    which tokens one program has: (line, first, end); a tile never crosses an adapter
    table    where an adapter's factors and gradients lie, their lora_rank and scale: adapters keep buffers of their own
    columns  which output features one program has: (module, first, end); a block never crosses a module

Each is made on the host, sent once without waiting, and kept: tiles for a microbatch's cut,
tables for a site and its adapters, columns for a site's modules.

Two segments may be of one adapter, as two passes of a model in one batch are. They have one line of the table, and their
chunks lie together: what is added to a gradient is added by one program.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import torch

from lilo_miles_backend.ranks.lora import Segment
from lilo_miles_backend.ranks.transfer import sent

CHUNK = 1024
"""Tokens whose outer products one program sums. Counted from a segment's first token, and the same for all batches:
the order in which a gradient is summed depends on its own tokens alone."""
FIELDS = 6
"""Of a line: a, b, grad_a, grad_b, lora_rank, bits of the float32 scale."""

Line: TypeAlias = tuple[int, int, int, int, int, float]
"""An adapter at one site: the addresses of a, b, grad_a and grad_b, lora_rank, scale."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """A microbatch's cut into pieces of several sizes."""

    pieces: Mapping[int, torch.Tensor]
    """int32 [n, 3], by the tokens of a piece."""
    chunks: torch.Tensor
    """int32 [n, 3]: pieces of `CHUNK`."""
    first_chunk: torch.Tensor
    """int32 [lines + 1]: chunks of a line are those from its entry to the next one's."""
    most_chunks: int
    """Of one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The adapters of one site."""

    lines: torch.Tensor
    """int64 [adapters, FIELDS]."""
    widest_rank: int
    equal_ranks: bool
    rank_divisor: int
    """8 where it divides every lora_rank, else 1: whether 16 bytes of a row of B can be read at once."""
    alignment: int
    """16 where every pointer is a multiple of it, else 2: bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The modules of one site."""

    blocks: torch.Tensor
    """int32 [n, 3]."""
    bounds: torch.Tensor
    """int32 [modules + 1]: the first feature of each, and their sum."""
    features: int
    """Their sum."""
    divisor: int
    """16 where every module has a multiple of it, else 1."""


class Cache(Generic[Value]):
    """The most recently used values by key."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of `key`, made now if it is not there."""
        if key in self._held:
            self._held.move_to_end(key)
        else:
            self._held[key] = make()
            if len(self._held) > self._size:
                self._held.popitem(last=False)
        return self._held[key]


def make_tiles(
    ranges: Sequence[tuple[int, int]],
    lines: Sequence[int],
    sizes: Sequence[int],
    device: torch.device,
) -> Tiles:
    """Cut the tokens [first, end) of each segment into pieces of each size; an empty one has none.

    Args:
        ranges: of each segment.
        lines: of each segment, which line of the table is its adapter's.
        sizes: tokens of a piece.
        device: where the kernels run.
    """
    cuts = [
        sorted(((lines[index], *here) for index, *here in pieces(ranges, size)), key=_line)
        for size in (*sizes, CHUNK)
    ]
    counts = [0] * (max(lines) + 1)
    for line, *_ in cuts[-1]:
        counts[line] += 1
    first_chunk = list(accumulate(counts, initial=0))
    whole = _sent([n for cut in cuts for piece in cut for n in piece] + first_chunk, device)
    *parts, bounds = whole.split([3 * len(cut) for cut in cuts] + [len(first_chunk)])
    *tiles, chunks = (part.view(-1, 3) for part in parts)
    return Tiles(
        pieces=dict(zip(sizes, tiles, strict=True)),
        chunks=chunks,
        first_chunk=bounds,
        most_chunks=max(counts),
    )


def _line(piece: Sequence[int]) -> int:
    return piece[0]


def pieces(ranges: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int, int]]:
    """(index, first, end) of pieces of at most `size`, none of which crosses a range. Pure."""
    return [
        (index, start, min(start + size, end))
        for index, (first, end) in enumerate(ranges)
        for start in range(first, end, size)
    ]


def make_columns(parts: Sequence[int], size: int, device: torch.device) -> Columns:
    """Cut each module's features into blocks of at most `size`."""
    bounds = [0]
    for width in parts:
        bounds.append(bounds[-1] + width)
    blocks = pieces(list(pairwise(bounds)), size)
    whole = _sent([n for block in blocks for n in block] + bounds, device)
    lines, ends = whole.split([3 * len(blocks), len(bounds)])
    divisor = 16 if all(bound % 16 == 0 for bound in bounds) else 1
    return Columns(blocks=lines.view(-1, 3), bounds=ends, features=bounds[-1], divisor=divisor)


def table_key(segments: Sequence[Segment]) -> tuple[tuple[Line, ...], tuple[int, ...]]:
    """The adapters of some segments, each once, and which of them each segment has.

    All that a table says: buffers that are freed and taken again by another adapter give no stale one.
    """
    found = [
        (
            factors.a.data_ptr(),
            factors.b.data_ptr(),
            factors.grad_a.data_ptr(),
            factors.grad_b.data_ptr(),
            factors.lora_rank,
            factors.scale,
        )
        for factors in (segment.factors for segment in segments)
    ]
    places = {line: place for place, line in enumerate(dict.fromkeys(found))}
    return tuple(places), tuple(places[line] for line in found)


def make_table(lines: Sequence[Line], device: torch.device) -> Table:
    """Of the adapters that `table_key` found."""
    ranks = [line[4] for line in lines]
    pointers = [pointer for line in lines for pointer in line[:4]]
    numbers = [n for line in lines for n in (*line[:5], _bits(line[5]))]
    return Table(
        lines=sent(np.array(numbers, dtype=np.int64), device).view(-1, FIELDS),
        widest_rank=max(ranks),
        equal_ranks=len(set(ranks)) == 1,
        rank_divisor=8 if all(rank % 8 == 0 for rank in ranks) else 1,
        alignment=16 if all(pointer % 16 == 0 for pointer in pointers) else 2,
    )


def _sent(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    return sent(np.array(numbers, dtype=np.int32), device)


def _bits(scale: float) -> int:
    return struct.unpack("<i", struct.pack("<f", scale))[0]
