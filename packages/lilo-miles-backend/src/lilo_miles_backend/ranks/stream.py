"""Stream: rows packed one after another, and which part of each a context-parallel rank has. Pure: numpy only.

    row a (padded to a multiple of 2 x cp)   row b
    a0 a1 a2 a3 | b0 b1 b2 b3                chunks, for cp = 2
    rank 0: a0 a3 b0 b3     rank 1: a1 a2 b1 b2

Zigzag: rank r has chunks r and 2 cp - 1 - r of every row, so that causal attention costs all ranks the same. Without
context parallelism the one rank has whole rows. What mixes tokens never crosses a row's bounds.

Shapes: T tokens of this rank, all ranks' together T * cp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lilo_miles_backend.ranks.rows import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Packed rows as one rank sees them."""

    places: Array
    """int64 [T]: where in the stream each of this rank's tokens lies."""
    positions: Array
    """int64 [T]: place of each token in its row; a padded token has its row's last, which no one reads."""
    is_real: Array
    """bool [T]."""
    lengths: tuple[int, ...]
    """Real tokens of each row; 0: the row is padding of the stream and has none."""
    padded: tuple[int, ...]
    """Tokens of each row with its padding, on all ranks together; each has an equal share."""


def pack(lengths: Sequence[int], padded: Sequence[int], cp_rank: int, cp_size: int) -> Stream:
    """Lay rows one after another.

    Args:
        lengths: real tokens of each row; 0 for a row that only fills the stream up.
        padded: with padding; each a multiple of 2 * cp_size where that is above 2.
        cp_rank: which part to describe.
        cp_size: number of parts.
    """
    starts = np.concatenate(([0], np.cumsum(padded)[:-1])).astype(np.int64)
    places = _places(starts, padded, cp_rank, cp_size)
    ends = starts + np.asarray(lengths)
    last = np.maximum(ends - 1, starts)
    row = np.searchsorted(starts, places, side="right") - 1
    return Stream(
        places=places,
        positions=np.minimum(places, last[row]) - starts[row],
        is_real=places < ends[row],
        lengths=tuple(lengths),
        padded=tuple(padded),
    )


def _chunks(cp_rank: int, cp_size: int) -> tuple[tuple[int, ...], int]:
    """This rank's chunks of a row, and into how many a row is cut."""
    return ((0,), 1) if cp_size == 1 else ((cp_rank, 2 * cp_size - 1 - cp_rank), 2 * cp_size)


def _places(starts: Array, padded: Sequence[int], cp_rank: int, cp_size: int) -> Array:
    chunks, count = _chunks(cp_rank, cp_size)
    assert all(length % count == 0 for length in padded), (padded, count)
    return np.concatenate(
        [
            start + chunk * (length // count) + np.arange(length // count)
            for start, length in zip(starts, padded, strict=True)
            for chunk in chunks
        ]
    )
