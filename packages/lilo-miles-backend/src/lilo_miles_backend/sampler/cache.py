"""Cache: what all layers remember of the rows of a batch, growing as it needs and never beyond its limit.

Rows are kept dense: row i of the cache is row i of the batch, so that attention reads a plain view and never
gathers. Memory follows the largest batch seen since it was last empty, not `sequences x context`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lilo_miles_backend.sampler.mixer import LayerCache, Mixer

_MIN_ROWS = 4
_MIN_LENGTH = 64


class Cache:
    """Room for up to `max_rows` rows of up to `max_length` positions."""

    def __init__(
        self,
        mixers: Sequence[Mixer],
        *,
        max_rows: int,
        max_length: int,
        limit_bytes: int | None = None,
    ) -> None:
        """Allocate nothing yet.

        Args:
            mixers: of the layers, in order.
            max_rows: most rows.
            max_length: most positions of a row.
            limit_bytes: most that is allocated; one row is always allowed. None: only the two above count.
        """
        self.layers: tuple[LayerCache, ...] = tuple(mixer.new_cache() for mixer in mixers)
        self.max_rows = max_rows
        self.max_length = max_length
        self._limit_bytes = limit_bytes
        self._mixers = mixers
        self._rows = 0
        self._length = 0
        self._row_bytes = sum(layer.row_bytes for layer in self.layers)
        self._position_bytes = sum(layer.position_bytes for layer in self.layers)

    def bytes_of(self, rows: int, length: int) -> int:
        """Of so many rows of so many positions."""
        return rows * (self._row_bytes + length * self._position_bytes)

    def rows_of(self, length: int) -> int:
        """How many rows of this length may be held at once; at least one."""
        if self._limit_bytes is None:
            return self.max_rows
        return max(1, min(self.max_rows, self._limit_bytes // max(1, self.bytes_of(1, length))))

    @property
    def size_bytes(self) -> int:
        """Bytes allocated."""
        return self.bytes_of(self._rows, self._length)

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` positions; rows beyond `rows` may be lost.

        Capacities double, so the copies cost as much as the final size in all.
        """
        assert rows <= self.max_rows, (rows, self.max_rows)
        assert length <= self.max_length, (length, self.max_length)
        if rows <= self._rows and length <= self._length:
            return
        new_length = _grown(self._length, length, _MIN_LENGTH, self.max_length)
        if self.rows_of(new_length) < rows:
            new_length = length
        new_rows = _grown(self._rows, rows, _MIN_ROWS, self.max_rows)
        new_rows = max(rows, min(new_rows, self.rows_of(new_length)))
        for layer in self.layers:
            layer.reserve(new_rows, new_length)
        self._rows, self._length = new_rows, new_length

    def copy_from(self, other: Cache, source: int, row: int, length: int) -> None:
        """Copy the first `length` positions of a row of another cache (or of this one) into `row`."""
        for mine, its in zip(self.layers, other.layers, strict=True):
            mine.copy_from(its, source, row, length)

    def clear(self, row: int) -> None:
        """Zero a row."""
        for layer in self.layers:
            layer.clear(row)

    def release(self) -> None:
        """Give all memory back, to the device too: others compute on it; nothing may be live."""
        self.layers = tuple(mixer.new_cache() for mixer in self._mixers)
        self._rows = self._length = 0
        if self._limit_bytes is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()


def _grown(have: int, need: int, least: int, most: int) -> int:
    return have if need <= have else min(most, max(least, need, 2 * have))
