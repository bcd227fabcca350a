"""Microbatches: rows of one item cut into padded pieces that fit the activation memory. Pure: numpy only.

A microbatch holds rows of one model only, sorted by length so that little is padded. Losses are sums over tokens, so
that no result depends on the cut; positions after a row's end are padding that causality hides from its tokens.

Shapes: B rows, S tokens of the longest, N = tokens of all rows, k targets per position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lilo_miles_backend.ranks.rows import Array, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Some rows of an item, as arrays. Per-token arrays are the rows one after another, without padding."""

    rows: tuple[int, ...]
    """Index of each row in its item; first row first in every array."""
    lengths: tuple[int, ...]
    tokens_BS: Array
    """int64, right-padded with 0."""
    positions_N: Array
    """int64: where each real token lies in the model's [S, B] order, `position * B + row`."""
    targets_Nk: Array
    """int64; a row with fewer targets per position than another is padded with target 0 of weight 0."""
    inputs: dict[str, Array]
    """float32, [N, k] each."""

    @property
    def is_full(self) -> bool:
        """Whether no position is padding."""
        return self.tokens_BS.size == self.positions_N.size


def cut(lengths: Sequence[int], max_tokens: int) -> list[tuple[int, ...]]:
    """Group rows under `max_tokens` padded tokens, longest first; a longer row has a group of its own.

    Equal lengths keep the client's order, so the cut depends on nothing but the lengths.
    """
    groups: list[tuple[int, ...]] = []
    current: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[current[0]] if current else lengths[index]
        if current and longest * (len(current) + 1) > max_tokens:
            groups.append(tuple(current))
            current = []
        current.append(index)
    if current:
        groups.append(tuple(current))
    return groups


def assemble(rows: Sequence[Row], group: tuple[int, ...]) -> Microbatch:
    """The arrays of one group."""
    chosen = [rows[index] for index in group]
    lengths = tuple(row.length for row in chosen)
    tokens = np.zeros((len(chosen), max(lengths)), dtype=np.int64)
    for place, row in zip(tokens, chosen, strict=True):
        place[: row.length] = row.tokens
    width = max(row.targets.shape[1] for row in chosen)
    return Microbatch(
        rows=group,
        lengths=lengths,
        tokens_BS=tokens,
        positions_N=np.concatenate(
            [np.arange(length) * len(chosen) + place for place, length in enumerate(lengths)]
        ),
        targets_Nk=np.concatenate([_widen(row.targets, width) for row in chosen]),
        inputs={name: _input(name, chosen, width) for name in _names(chosen)},
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


def in_order(parts: Sequence[tuple[Microbatch, Array]], rows: Sequence[Row]) -> list[Array]:
    """Take per-token results [N, k] apart again: one array per row, in the item's order and target shapes."""
    results: dict[int, Array] = {}
    for microbatch, values in parts:
        ends = np.cumsum(microbatch.lengths)[:-1]
        for index, part in zip(microbatch.rows, np.split(values, ends), strict=True):
            row = rows[index]
            results[index] = part[:, : row.targets.shape[1]].reshape(row.target_shape)
    return [results[index] for index in range(len(rows))]
