"""AdapterGroups: the rows of one forward pass by the adapter they use.

Each projection adds, per adapter of the batch, `(x @ A^T) @ B^T` to that adapter's rows only. Rows of other adapters
never enter the product, so nothing that one adapter does, overflow included, can reach another's rows; nothing is
copied or stacked, so a batch may change its adapters at every step. Work grows with rows x lora_rank, plus two small
products per adapter. Measured on a model of 0.8 M parameters with 64 rows on a CPU, it beats stacking the adapters and
masking (`stack.py`, for GPUs) everywhere but with 32 adapters and more of lora_rank 8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from lilo_miles_backend.sampler.adapters import Adapter, Place


class AdapterGroups:
    """Which rows use which adapter; lives for one forward pass."""

    def __init__(self, adapters: Sequence[Adapter | None], device: torch.device) -> None:
        """Group the rows; `adapters` has one entry per row, None for the base model."""
        rows: dict[Adapter, list[int]] = {}
        for row, adapter in enumerate(adapters):
            if adapter is not None:
                rows.setdefault(adapter, []).append(row)
        # None: all rows, which then need no gathering.
        self._groups = [
            (adapter, None if len(of) == len(adapters) else torch.tensor(of, device=device))
            for adapter, of in rows.items()
        ]

    def add(self, out: torch.Tensor, x: torch.Tensor, place: Place) -> torch.Tensor:
        """Add what the adapters contribute at `place` to `out`, in place.

        Args:
            out: the base projection of `x`, [rows, ..., out].
            x: [rows, ..., in].
            place: which projection.
        """
        for adapter, rows in self._groups:
            pair = adapter.factors.get(place)
            if pair is None:
                continue
            a, b = pair
            if rows is None:
                out += functional.linear(functional.linear(x, a), b)
            else:
                added = functional.linear(functional.linear(x[rows], a), b)
                out.index_add_(0, rows, added.to(out.dtype))
        return out
