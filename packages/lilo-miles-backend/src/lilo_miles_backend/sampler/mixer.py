"""Mixer: what mixes the tokens of a row inside a layer, and what it remembers of a row, as protocols.

Softmax attention (`softmax.py`) remembers keys and values, the gated delta net (`delta.py`) a state. Projections in and
out, which carry adapters, are the model's. Not the trainer's mixers: those have a backward and no cache.
"""

from __future__ import annotations

from typing import Protocol, Self

import torch

from lilo_miles_backend.sampler.places import Places


class LayerCache(Protocol):
    """What one layer remembers of the rows of a batch."""

    def reserve(self, rows: int, length: int) -> None:
        """Have room for exactly so many rows of so many positions, keeping what both have."""
        ...

    def copy_from(self, other: Self, source: int, row: int, length: int) -> None:
        """Put a row of another cache (or of this one), `length` positions of it, into `row`."""
        ...

    def clear(self, row: int) -> None:
        """Zero a row: one that overflowed must not leave NaN where a shorter row is masked later."""
        ...

    @property
    def row_bytes(self) -> int:
        """Of a row, whatever its length."""
        ...

    @property
    def position_bytes(self) -> int:
        """Of each position of a row, beside that."""
        ...


class Mixer(Protocol):
    """One kind of token mixing, with the small weights that belong to it."""

    def new_cache(self) -> LayerCache:
        """An empty one."""
        ...

    def forward(
        self, projected_BTO: torch.Tensor, places: Places, cache: LayerCache
    ) -> torch.Tensor:
        """Mix the new tokens with all that the rows remember, and remember them; [B, T, W]."""
        ...


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis (arXiv:1910.07467), in float32 where the weight is."""
    if weight.dtype == x.dtype:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    normed = torch.nn.functional.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps)
    return normed.to(x.dtype)
