"""Microbatches: rows cut into pieces that fit the activation memory. Pure: numpy only.

    whole rows    [B, S], right-padded to the longest, sorted by length so that little is padded
    packed rows   one stream (`stream.py`), where context-parallel ranks cut rows or rows of several models run together

Losses are sums over tokens, so that no result depends on the cut; positions after a row's end are padding that
causality hides from its tokens. Data-parallel ranks have different rows (`share`).

Shapes: B rows, S tokens of the longest, T tokens of this rank's part of a stream, N = tokens of all rows, n = those of
them that this rank computes, k targets per position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lilo_miles_backend.ranks.alignment import Alignment
from lilo_miles_backend.ranks.rows import Array, Row
from lilo_miles_backend.ranks.stream import Stream, pack

WHOLE = Alignment(mode="auto", multiple=1)
"""The rule of a layout that cuts no rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How rows become microbatches on one rank."""

    alignment: Alignment = WHOLE
    cp_rank: int = 0
    cp_size: int = 1
    packed: bool = False
    """Rows lie in one stream; always so where context-parallel ranks cut them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Some rows as arrays. Per-token arrays are the rows one after another, without padding."""

    rows: tuple[int, ...]
    """Index of each row among those it was chosen from; first row first in every array."""
    lengths: tuple[int, ...]
    tokens_BS: Array
    """int64, padded with 0; [1, T] of a stream."""
    stream: Stream | None
    positions_n: Array
    """int64: where each real token of this rank lies in the model's [S, B] order."""
    order_N: Array | None
    """int64: where each real token lies in all context-parallel ranks' [T] one after another; None: all are here."""
    targets_nk: Array
    """int64; a row with fewer targets per position than another is padded with target 0 of weight 0."""
    inputs: dict[str, Array]
    """float32, [N, k] each."""

    @property
    def is_full(self) -> bool:
        """Whether the rows are whole and no position is padding."""
        return self.stream is None and self.tokens_BS.size == self.positions_n.size


def cut(
    lengths: Sequence[int], max_tokens: int, layout: Layout | None = None
) -> list[tuple[int, ...]]:
    """Group rows under `max_tokens` padded tokens of this rank, longest first; a longer row has a group of its own.

    Equal lengths keep the client's order, so the cut depends on nothing but the lengths.
    """
    layout = layout or Layout()
    padded = [layout.alignment.padded(length) for length in lengths]
    limit = max_tokens * layout.cp_size
    groups: list[tuple[int, ...]] = []
    current: list[int] = []
    packed_tokens = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = padded[current[0]] if current else padded[index]
        tokens = packed_tokens + padded[index] if layout.packed else longest * (len(current) + 1)
        if current and tokens > limit:
            groups.append(tuple(current))
            current, packed_tokens = [], 0
        current.append(index)
        packed_tokens += padded[index]
    if current:
        groups.append(tuple(current))
    return groups


def share(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Rows of each data-parallel rank, with about equal tokens; ranks beyond the number of rows get none.

    Longest first, each to the rank with the fewest tokens so far (Graham, 1969): depends on nothing but the lengths.
    """
    if ranks == 1:
        return [list(range(len(lengths)))]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        least = loads.index(min(loads))
        shares[least].append(index)
        loads[least] += lengths[index]
    return [sorted(rows) for rows in shares]


def assemble(
    rows: Sequence[Row], group: tuple[int, ...], layout: Layout | None = None
) -> Microbatch:
    """The arrays of one group."""
    layout = layout or Layout()
    chosen = [rows[index] for index in group]
    lengths = tuple(row.length for row in chosen)
    padded = [layout.alignment.padded(length) for length in lengths]
    width = max(row.targets.shape[1] for row in chosen)
    targets = np.concatenate([_widen(row.targets, width) for row in chosen])
    stream, order = None, None
    if layout.packed:
        stream = pack(lengths, padded, layout.cp_rank, layout.cp_size)
        tokens = _streamed(chosen, padded)[stream.places][None]
        positions = np.flatnonzero(stream.is_real)
        if layout.cp_size > 1:
            real = _real_places(lengths, padded)
            order = stream.gathered[real]
            targets = targets[np.searchsorted(real, stream.places[positions])]
    else:
        tokens = np.zeros((len(chosen), max(padded)), dtype=np.int64)
        for place, row in zip(tokens, chosen, strict=True):
            place[: row.length] = row.tokens
        positions = np.concatenate(
            [np.arange(length) * len(chosen) + place for place, length in enumerate(lengths)]
        )
    return Microbatch(
        rows=group,
        lengths=lengths,
        tokens_BS=tokens,
        stream=stream,
        positions_n=positions,
        order_N=order,
        targets_nk=targets,
        inputs={name: _input(name, chosen, width) for name in _names(chosen)},
    )


def _streamed(rows: Sequence[Row], padded: Sequence[int]) -> Array:
    tokens = np.zeros(sum(padded), dtype=np.int64)
    start = 0
    for row, length in zip(rows, padded, strict=True):
        tokens[start : start + row.length] = row.tokens
        start += length
    return tokens


def _real_places(lengths: Sequence[int], padded: Sequence[int]) -> Array:
    starts = np.concatenate(([0], np.cumsum(padded)[:-1])).astype(np.int64)
    return np.concatenate(
        [start + np.arange(length) for start, length in zip(starts, lengths, strict=True)]
    )


def _names(rows: Sequence[Row]) -> list[str]:
    return sorted({name for row in rows for name in row.inputs})


_MISSING: dict[str, float] = {"weights": 1.0}
"""What a row means that leaves out an input which others of its microbatch have; NaN: the setting's value."""


def _input(name: str, rows: Sequence[Row], width: int) -> Array:
    parts = [
        row.inputs[name]
        if name in row.inputs
        else np.full(row.targets.shape, _MISSING.get(name, np.nan), dtype=np.float32)
        for row in rows
    ]
    return np.concatenate([_widen(part, width) for part in parts])


def _widen(array: Array, width: int) -> Array:
    """Pad [n, k] to [n, width] with zeros."""
    missing = width - array.shape[1]
    return array if missing == 0 else np.pad(array, ((0, 0), (0, missing)))


def in_order(parts: Sequence[tuple[Microbatch, Array]], rows: Sequence[Row]) -> dict[int, Array]:
    """Take per-token results [N, k] apart again: each row's by its index, in its target's shape."""
    results: dict[int, Array] = {}
    for microbatch, values in parts:
        ends = np.cumsum(microbatch.lengths)[:-1]
        for index, part in zip(microbatch.rows, np.split(values, ends), strict=True):
            row = rows[index]
            results[index] = part[:, : row.targets.shape[1]].reshape(row.target_shape)
    return results
