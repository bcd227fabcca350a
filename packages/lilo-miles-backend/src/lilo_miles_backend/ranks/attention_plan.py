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

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from lilo_miles_backend.ranks.kernels.attention_kernel import PackedBounds
from lilo_miles_backend.ranks.rows import Array
from lilo_miles_backend.ranks.transfer import sent


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


def dense_rows(lengths: Sequence[int], dense_from: int | None) -> list[tuple[int, bool]]:
    """Cut rows into stretches: how many rows each has, and whether it is a dense call or a packed one.

    Args:
        lengths: of each row on this rank.
        dense_from: see `AttentionKernels`; None: there are only dense calls.
    """
    stretches: list[tuple[int, bool]] = []
    for length, group in groupby(lengths):
        rows = sum(1 for _ in group)
        is_dense = dense_from is None or rows * length**2 >= dense_from**2
        if stretches and not is_dense and not stretches[-1][1]:
            stretches[-1] = (stretches[-1][0] + rows, False)
        else:
            stretches.append((rows, is_dense))
    return stretches


def plan_calls(
    lengths: Sequence[int],
    padded: Sequence[int],
    *,
    cp_rank: int,
    cp_size: int,
    dense_from: int | None,
    device: torch.device,
) -> tuple[DenseCall | PackedCall, ...]:
    """Choose the calls of a stream.

    Args:
        lengths: real tokens of each row.
        padded: its tokens with padding, over all ranks.
        cp_rank: this rank.
        cp_size: ranks that cut the rows.
        dense_from: see `dense_rows`.
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
            for rows, is_dense in dense_rows(here[first : first + count], dense_from):
                ends = starts[first : first + rows + 1]
                tokens = slice(ends[0], ends[-1])
                if is_dense:
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
