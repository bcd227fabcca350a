"""Microbatch: rows that are computed together, as the arrays of one rank's part of their stream. Pure: numpy only.

Losses are sums over tokens, so that no result depends on which rows lie together (`filling.py`); rows never see each
other (`stream.py`), and no output of a padded position is ever read.

Shapes: T tokens of this rank's part of the stream, n of them real, k targets per position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lilo_miles_backend.ranks.alignment import Alignment
from lilo_miles_backend.ranks.filling import bucket
from lilo_miles_backend.ranks.rows import Array, Row
from lilo_miles_backend.ranks.stream import Stream, pack

WHOLE = Alignment(mode="auto", multiple=1)
"""The rule of a layout that cuts no rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How rows become a stream on one rank."""

    alignment: Alignment = WHOLE
    cp_rank: int = 0
    cp_size: int = 1
    bucket_tokens: int | None = None
    """Streams are padded at their end to few lengths, up to this one over all context-parallel ranks; None: never."""

    def padding(self, tokens: int) -> int:
        """Positions added to the end of a stream of so many."""
        if self.bucket_tokens is None:
            return 0
        return bucket(tokens, self.alignment.multiple, self.bucket_tokens) - tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Some rows as arrays. Per-token arrays have this rank's real tokens in the stream's order."""

    rows: tuple[int, ...]
    """Index of each row among those it was chosen from, in the stream's order."""
    lengths: tuple[int, ...]
    """Whole rows' tokens."""
    padding: int
    """Positions after the last row on this rank."""
    tokens_T: Array
    """int64; 0 where padded."""
    stream: Stream
    places_n: Array
    """int64: where each real token lies among the T."""
    rows_n: Array
    """int64: which of `rows` each real token belongs to."""
    targets_nk: Array
    """int64; a row with fewer targets per position than another is padded with target 0 of weight 0."""
    inputs: dict[str, Array]
    """float32, [n, k] each."""
    answers_nk: Array
    """int64: where each logprob goes in the flat array of all answers; -1: nowhere."""

    @property
    def is_prefix(self) -> bool:
        """Whether the real tokens are the first ones of the T."""
        return not self.places_n.size or int(self.places_n[-1]) == self.places_n.size - 1


def assemble(
    rows: Sequence[Row], group: tuple[int, ...], layout: Layout, first_answers: Sequence[int]
) -> Microbatch:
    """The arrays of one group.

    Args:
        rows: all rows that groups are chosen from.
        group: indices of the chosen ones, in the order they are to lie in.
        layout: this rank's.
        first_answers: for each of `rows`, where its first logprob goes in the flat array of answers.
    """
    chosen = [rows[index] for index in group]
    lengths = [row.length for row in chosen]
    padded = [layout.alignment.padded(length) for length in lengths]
    extra = layout.padding(sum(padded))
    # The stream's own padding is a row without tokens, so that nothing needs to know of it.
    spans = ([*lengths, 0], [*padded, extra]) if extra else (lengths, padded)
    stream = pack(*spans, layout.cp_rank, layout.cp_size)
    places = np.flatnonzero(stream.is_real)
    row_of, token_of = _tokens_of(stream.places[places], lengths, padded)
    width = max(row.targets.shape[1] for row in chosen)
    tokens = np.zeros(stream.places.size, dtype=np.int64)
    tokens[places] = np.concatenate([row.tokens for row in chosen])[token_of]
    return Microbatch(
        rows=group,
        lengths=tuple(lengths),
        padding=extra // layout.cp_size,
        tokens_T=tokens,
        stream=stream,
        places_n=places,
        rows_n=row_of,
        targets_nk=np.concatenate([_widen(row.targets, width) for row in chosen])[token_of],
        inputs={name: _input(name, chosen, width)[token_of] for name in _names(chosen)},
        answers_nk=_answers(chosen, width, [first_answers[index] for index in group])[token_of],
    )


def _tokens_of(
    places: Array, lengths: Sequence[int], padded: Sequence[int]
) -> tuple[Array, Array | slice]:
    """Of each real token in the stream: its row, and its place among all rows' tokens one after another."""
    starts = np.cumsum([0, *padded[:-1]])
    row_of = np.searchsorted(starts, places, side="right") - 1
    if places.size == sum(lengths):
        return row_of, slice(None)  # all of them, in order: no copies
    firsts = np.cumsum([0, *lengths[:-1]])
    return row_of, places - starts[row_of] + firsts[row_of]


def _answers(rows: Sequence[Row], width: int, firsts: Sequence[int]) -> Array:
    parts: list[Array] = []
    for row, first in zip(rows, firsts, strict=True):
        here = first + np.arange(row.targets.size).reshape(row.targets.shape)
        parts.append(_widen(here, width, -1))
    return np.concatenate(parts)


def _names(rows: Sequence[Row]) -> list[str]:
    names = {name for row in rows for name in row.inputs}
    if len({row.targets.shape[1] for row in rows}) > 1:
        names.add("weights")  # what tells a narrow row's padding from its targets
    return sorted(names)


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


def _widen(array: Array, width: int, value: int = 0) -> Array:
    """Pad [n, k] to [n, width]."""
    missing = width - array.shape[1]
    if missing == 0:
        return array
    return np.pad(array, ((0, 0), (0, missing)), constant_values=value)
