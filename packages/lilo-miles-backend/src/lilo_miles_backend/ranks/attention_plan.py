"""Attention plan: which kernel calls a stream's rows become on one rank. Index arithmetic, no attention.

    dense    rows of one length that are neighbours, in one call; context-parallel ranks hold two chunks of each and add
             what the other ranks' keys contribute
    packed   many short rows in one call; context-parallel ranks make one for the first and one for the second chunks,
             each with all keys that its queries may see

Made once per microbatch by `attention.py` and read by every layer. Rows without a real token are padding of the stream
and become no call.

Shapes: T tokens of this rank, cp ranks along a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from lilo_miles_backend.ranks.kernels.attention_kernel import AttentionKernels, PackedBounds
from lilo_miles_backend.ranks.rows import Array
from lilo_miles_backend.ranks.transfer import sent

REMEMBERED = 64
"""Shapes that `DenseRule` knows again: many more than a microbatch has, far fewer than there are lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseCall:
    """Neighbouring rows of one length."""

    tokens: slice
    """Of this rank's T."""
    rows: int
    length: int
    """Tokens of each row on this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPart:
    """The queries of one call over packed rows, and their keys."""

    queries: torch.Tensor | None
    """int64: which of the stretch's tokens; None: all."""
    keys: torch.Tensor | None
    """int64: which of all ranks' tokens, one rank's T after another's; None: the stretch itself."""
    bounds: PackedBounds


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCall:
    """A stretch of short rows."""

    tokens: slice
    """Of this rank's T."""
    parts: tuple[PackedPart, ...]
    """One, or two where ranks cut rows."""


class DenseRule:
    """Which rows become a dense call. Remembers the shapes it was asked about last; see `AttentionKernels`."""

    def __init__(self, kernels: AttentionKernels) -> None:
        self._always = kernels.packed is None
        self._least, self._at_once = kernels.dense_from, kernels.dense_at_once_from
        self._seen: deque[tuple[int, int]] = deque(maxlen=REMEMBERED)

    def __call__(self, rows: int, length: int) -> bool:
        """Whether so many rows of this length here, which are neighbours, are a dense call."""
        work = rows * length**2
        if self._always or work >= self._at_once**2:
            return True
        if work < self._least**2:
            return False
        is_known = (rows, length) in self._seen
        self._seen.append((rows, length))
        return is_known


def stretches(
    lengths: Sequence[int], is_dense: Callable[[int, int], bool]
) -> list[tuple[int, bool]]:
    """Cut rows into stretches: how many rows each has, and whether it is a dense call or a packed one.

    Args:
        lengths: of each row on this rank.
        is_dense: as `DenseRule`.
    """
    found: list[tuple[int, bool]] = []
    for length, group in groupby(lengths):
        rows = sum(1 for _ in group)
        dense = is_dense(rows, length)
        if found and not dense and not found[-1][1]:
            found[-1] = (found[-1][0] + rows, False)
        else:
            found.append((rows, dense))
    return found


def plan_calls(
    lengths: Sequence[int],
    padded: Sequence[int],
    *,
    cp_rank: int,
    cp_size: int,
    is_dense: Callable[[int, int], bool],
    device: torch.device,
) -> tuple[DenseCall | PackedCall, ...]:
    """Choose the calls of a stream.

    Args:
        lengths: real tokens of each row.
        padded: its tokens with padding, over all ranks.
        cp_rank: this rank.
        cp_size: ranks that cut the rows.
        is_dense: see `stretches`.
        device: for the indices.
    """
    here = [size // cp_size for size in padded]
    starts = np.concatenate(([0], np.cumsum(here))).tolist()
    total = starts[-1]
    calls: list[DenseCall | PackedCall] = []
    first = 0
    for is_real, group in groupby(lengths, bool):
        count = sum(1 for _ in group)
        if is_real:
            for rows, dense in stretches(here[first : first + count], is_dense):
                ends = starts[first : first + rows + 1]
                tokens = slice(ends[0], ends[-1])
                if dense:
                    calls.append(DenseCall(tokens=tokens, rows=rows, length=here[first]))
                else:
                    parts = _parts(ends, total, cp_rank, cp_size, device)
                    calls.append(PackedCall(tokens=tokens, parts=parts))
                first += rows
        else:
            first += count
    return tuple(calls)


def _parts(
    ends: Sequence[int], total: int, cp_rank: int, cp_size: int, device: torch.device
) -> tuple[PackedPart, ...]:
    lengths = np.diff(ends)
    if cp_size == 1:
        bounds = _bounds(lengths, lengths, device)
        return (PackedPart(queries=None, keys=None, bounds=bounds),)
    parts: list[PackedPart] = []
    chunks = [(start, int(size) // 2) for start, size in zip(ends[:-1], lengths, strict=True)]
    for half, chunk in enumerate((cp_rank, 2 * cp_size - 1 - cp_rank)):
        queries = [np.arange(size) + start - ends[0] + half * size for start, size in chunks]
        keys = [
            _chunk(index, start, size, total, cp_size)
            for start, size in chunks
            for index in range(chunk + 1)
        ]
        parts.append(
            PackedPart(
                queries=sent(np.concatenate(queries), device),
                keys=sent(np.concatenate(keys), device),
                bounds=_bounds(lengths // 2, lengths // 2 * (chunk + 1), device),
            )
        )
    return tuple(parts)


def _chunk(index: int, start: int, size: int, total: int, cp_size: int) -> Array:
    """Places of a row's chunk among all ranks' tokens; the row is at `start` on each."""
    rank, half = (index, 0) if index < cp_size else (2 * cp_size - 1 - index, 1)
    return rank * total + start + half * size + np.arange(size)


def _bounds(queries: Array, keys: Array, device: torch.device) -> PackedBounds:
    return PackedBounds(
        queries=sent(_ends(queries), device),
        keys=sent(_ends(keys), device),
        most_queries=int(queries.max()),
        most_keys=int(keys.max()),
    )


def _ends(lengths: Array) -> Array:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
