"""AdapterStack: the adapters of one batch side by side, so that all rows pay two matrix products per projection.

    delta = where(mask, x @ A_all, 0) @ B_all

A_all holds the A of every active adapter in its columns; the mask keeps each row's own columns. There is no gather
and no loop over adapters. `where` and not a product: what another adapter makes of this row may overflow, and
infinity times 0 is not 0. Cost grows with the sum of ranks in the batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from lilo_miles_backend.sampler.adapters import Adapter, Place

_MAX_STACKS = 4
"""Sets of adapters remembered; each is a copy of its adapters' factors."""


class AdapterStack:
    """Stacked factors of one ordered set of adapters."""

    def __init__(self, adapters: tuple[Adapter, ...]) -> None:
        """Copy the factors together; transposed, as the products read them."""
        self.adapters = adapters
        self._index = {id(adapter): i for i, adapter in enumerate(adapters)}
        self._factors: dict[Place, tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]] = {}
        for place in {place for adapter in adapters for place in adapter.factors}:
            pairs = [adapter.factors.get(place) for adapter in adapters]
            present = [pair for pair in pairs if pair is not None]
            self._factors[place] = (
                torch.cat([a for a, _ in present]).t().contiguous(),
                torch.cat([b for _, b in present], dim=1).t().contiguous(),
                tuple(0 if pair is None else pair[0].shape[0] for pair in pairs),
            )

    def rows(self, adapters: Sequence[Adapter | None]) -> StackedRows:
        """The stack as these rows see it."""
        owner = [-1 if a is None else self._index[id(a)] for a in adapters]
        return StackedRows(self._factors, owner)


class StackedRows:
    """A stack together with which row owns which adapter; lives for one forward pass."""

    def __init__(
        self,
        factors: dict[Place, tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]],
        owner: list[int],
    ) -> None:
        """Masks are made when first needed; places with equal widths share one."""
        self._factors = factors
        self._owner = owner
        self._masks: dict[tuple[int, ...], torch.Tensor | None] = {}

    def delta(self, x_BTI: torch.Tensor, place: Place) -> torch.Tensor | None:
        """What the adapters add at a place, [B, T, out]; None when none has anything there."""
        found = self._factors.get(place)
        if found is None:
            return None
        down, up, widths = found
        hidden = x_BTI @ down
        mask = self._mask(widths, x_BTI.device)
        if mask is not None:
            hidden = hidden.masked_fill(mask, 0.0)
        return hidden @ up

    def _mask(self, widths: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
        """True where a row does not own the column, [B, 1, columns]; None when every row owns all."""
        if widths not in self._masks:
            columns = [i for i, width in enumerate(widths) for _ in range(width)]
            needed = any(owner != column for owner in set(self._owner) for column in set(columns))
            self._masks[widths] = (
                torch.tensor(self._owner, device=device)[:, None, None]
                != torch.tensor(columns, device=device)[None, None]
                if needed
                else None
            )
        return self._masks[widths]


class StackCache:
    """The last few stacks, by the set of adapters: a batch keeps its set for many steps."""

    def __init__(self) -> None:
        """Empty."""
        self._stacks: OrderedDict[tuple[int, ...], AdapterStack] = OrderedDict()

    def rows(self, adapters: Sequence[Adapter | None]) -> StackedRows | None:
        """The stack for these rows; None when all of them use the base model."""
        active = {id(a): a for a in adapters if a is not None}
        if not active:
            return None
        # A stack holds its adapters, so an id in a key cannot be reused while the key is here.
        key = tuple(sorted(active))
        if key not in self._stacks:
            self._stacks[key] = AdapterStack(tuple(active[i] for i in key))
            if len(self._stacks) > _MAX_STACKS:
                self._stacks.popitem(last=False)
        self._stacks.move_to_end(key)
        return self._stacks[key].rows(adapters)

    def forget(self, adapter: Adapter) -> None:
        """Drop copies of an adapter's factors; rows that still use it make them again."""
        for key in [key for key in self._stacks if id(adapter) in key]:
            del self._stacks[key]
