"""Intervals: the pieces of a stream that a rank has, as recurrences see them: where each begins and what came before.

Without context parallelism an interval is a row. With it, it is one of a row's two chunks that this rank has (zigzag,
`stream.py`): rank r has chunks r and 2 cp - 1 - r of every row, one after the other. What enters a chunk was computed
on other ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lilo_miles_backend.ranks.transfer import sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """One microbatch's, on one rank; T tokens in all. Made once per shape and shared by all layers."""

    lengths: tuple[int, ...]
    """Tokens of each, padding included; their sum is T."""
    bounds: torch.Tensor
    """int64 [I + 1] on the device: where each begins, and T."""
    host_bounds: torch.Tensor
    """The same on the CPU, so that no kernel has to ask the device for it."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Intervals:
        """Of consecutive lengths."""
        return _made(tuple(lengths), device)


@functools.lru_cache(maxsize=4)
def _made(lengths: tuple[int, ...], device: torch.device) -> Intervals:
    bounds = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    return Intervals(
        lengths=lengths, bounds=sent(bounds, device), host_bounds=torch.from_numpy(bounds)
    )


def interval_lengths(padded: Sequence[int], cp_size: int) -> tuple[int, ...]:
    """Lengths of a rank's intervals, from those of whole padded rows; the same on every rank."""
    if cp_size == 1:
        return tuple(padded)
    return tuple(length // (2 * cp_size) for length in padded for _ in range(2))


def chunk_place(chunk: int, cp_size: int) -> tuple[int, int]:
    """Which rank has a chunk of every row, and which of its two it is there."""
    return (chunk, 0) if chunk < cp_size else (2 * cp_size - 1 - chunk, 1)


@functools.lru_cache(maxsize=4)
def tail_tokens(lengths: tuple[int, ...], count: int, device: torch.device) -> torch.Tensor:
    """int64 [intervals * count]: which of a rank's tokens its tails are; of one too short, some that nobody reads."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return sent((ends[:, None] - count + np.arange(count)).clip(min=0).reshape(-1), device)


@functools.lru_cache(maxsize=4)
def tail_places(
    padded: tuple[int, ...], count: int, cp_rank: int, cp_size: int, device: torch.device
) -> torch.Tensor:
    """Where the `count` tokens before each of this rank's intervals lie among the tails that all ranks send.

    A tail is an interval's last `count` tokens, as many as it has, at the end of `count` places. A chunk may be
    shorter than that; then what came before it lies in several tails.

    Returns:
        int64 [intervals, count] into [ranks * intervals * count]; -1 where there is no such token.
    """
    rows = len(padded)
    places = np.full((2 * rows, count), -1, dtype=np.int64)
    for row, length in enumerate(padded):
        size = length // (2 * cp_size)
        for half, chunk in enumerate((cp_rank, 2 * cp_size - 1 - cp_rank)):
            for slot in range(count):
                token = chunk * size - (count - slot)
                if token >= 0:
                    rank, its = chunk_place(token // size, cp_size)
                    interval = (rank * rows + row) * 2 + its
                    from_end = size - token % size
                    places[2 * row + half, slot] = interval * count + count - from_end
    return sent(places, device)
