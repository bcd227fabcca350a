"""KeyValueCache: keys and values of the rows of a batch, growing as they need.

Rows are kept dense: row i of the cache is row i of the batch, so that attention reads a plain view and never
gathers. Memory follows the largest batch seen since it was last empty, not `sequences x context`.
Axes: L layers, R rows, H key-value heads, S positions, D head dim.
"""

from __future__ import annotations

import torch

from lilo_miles_backend.families.shape import ModelShape

_MIN_ROWS = 4
_MIN_LENGTH = 64


class KeyValueCache:
    """Room for up to `max_rows` rows of up to `max_length` positions."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        max_rows: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate nothing yet."""
        self.max_rows = max_rows
        self.max_length = max_length
        self._shape = shape
        self._dtype, self._device = dtype, device
        self._keys_LRHSD = self._empty(0, 0)
        self._values_LRHSD = self._empty(0, 0)

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` positions, keeping what is there.

        Capacities double, so the copies cost as much as the final size in all.
        """
        assert rows <= self.max_rows, (rows, self.max_rows)
        assert length <= self.max_length, (length, self.max_length)
        have_rows, have_length = self._keys_LRHSD.shape[1], self._keys_LRHSD.shape[3]
        if rows <= have_rows and length <= have_length:
            return
        new_rows = _grown(have_rows, rows, _MIN_ROWS, self.max_rows)
        new_length = _grown(have_length, length, _MIN_LENGTH, self.max_length)
        for name in ("_keys_LRHSD", "_values_LRHSD"):
            old: torch.Tensor = getattr(self, name)
            new = self._empty(new_rows, new_length)
            new[:, :have_rows, :, :have_length] = old
            setattr(self, name, new)

    def write(
        self, layer: int, keys_BHTD: torch.Tensor, values_BHTD: torch.Tensor, start_B: torch.Tensor
    ) -> None:
        """Put T new positions of rows 0..B-1, row b from `start_B[b]` on."""
        rows = torch.arange(keys_BHTD.shape[0], device=self._device)[:, None]
        places = start_B[:, None] + torch.arange(keys_BHTD.shape[2], device=self._device)
        self._keys_LRHSD[layer][rows, :, places] = keys_BHTD.transpose(1, 2)
        self._values_LRHSD[layer][rows, :, places] = values_BHTD.transpose(1, 2)

    def read(self, layer: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the first `rows` rows and `length` positions, each [rows, H, length, D]."""
        return (
            self._keys_LRHSD[layer, :rows, :, :length],
            self._values_LRHSD[layer, :rows, :, :length],
        )

    def copy_from(self, other: KeyValueCache, source: int, row: int, length: int) -> None:
        """Copy the first `length` positions of a row of another cache (or of this one) into `row`."""
        self._keys_LRHSD[:, row, :, :length] = other._keys_LRHSD[:, source, :, :length]
        self._values_LRHSD[:, row, :, :length] = other._values_LRHSD[:, source, :, :length]

    def clear(self, row: int) -> None:
        """Zero a row: one that overflowed must not leave NaN where a shorter row is masked later."""
        self._keys_LRHSD[:, row] = 0
        self._values_LRHSD[:, row] = 0

    def release(self) -> None:
        """Give all memory back; nothing may be live."""
        self._keys_LRHSD = self._empty(0, 0)
        self._values_LRHSD = self._empty(0, 0)

    @property
    def size_bytes(self) -> int:
        """Bytes allocated."""
        return 2 * self._keys_LRHSD.numel() * self._keys_LRHSD.element_size()

    def _empty(self, rows: int, length: int) -> torch.Tensor:
        # Zeros, not uninitialised memory: masked positions still multiply by a weight of exactly 0.
        s = self._shape
        return torch.zeros(
            (s.num_hidden_layers, rows, s.num_key_value_heads, length, s.head_dim),
            dtype=self._dtype,
            device=self._device,
        )


def _grown(have: int, need: int, least: int, most: int) -> int:
    return have if need <= have else min(most, max(least, need, 2 * have))
