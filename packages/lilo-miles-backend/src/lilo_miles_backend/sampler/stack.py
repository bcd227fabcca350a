"""AdapterStack: some adapters side by side, so that a projection costs two products however many adapters a batch has.

On a GPU a step is as long as the number of its kernels, which `groups.py` multiplies by that of the adapters. Here the
factors of all of them are one pair; of what A makes of a row, only its own adapter's columns are kept and the others set
to zero, not multiplied by it, so that nothing that one adapter does to another's rows, overflow included, is ever seen.
Axes: B rows, C columns, the LoRA ranks of all adapters one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from lilo_miles_backend.sampler.adapters import Adapter, Place


class AdapterStack:
    """Copies of adapters, made place by place when first needed."""

    def __init__(self, adapters: Sequence[Adapter], device: torch.device) -> None:
        """Nothing is copied yet."""
        self.adapters = tuple(adapters)
        self.device = device
        self._pairs: dict[Place, tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None] = {}
        self._owners: dict[tuple[int, ...], torch.Tensor] = {}

    def at(self, place: Place) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """A [C, in], B [out, C] and whose each column is [C]; None where no adapter acts."""
        if place not in self._pairs:
            self._pairs[place] = self._stacked(place)
        return self._pairs[place]

    def _stacked(self, place: Place) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        pairs = [adapter.factors.get(place) for adapter in self.adapters]
        found = [pair for pair in pairs if pair is not None]
        if not found:
            return None
        ranks = tuple(0 if pair is None else len(pair[0]) for pair in pairs)
        if ranks not in self._owners:
            owners = [index for index, rank in enumerate(ranks) for _ in range(rank)]
            self._owners[ranks] = torch.tensor(owners, device=self.device)
        return (
            torch.cat([a for a, _ in found]),
            torch.cat([b for _, b in found], dim=1),
            self._owners[ranks],
        )


class StackedRows:
    """Which rows use which adapter of a stack; lives for one forward pass, in place of `AdapterGroups`."""

    def __init__(self, stack: AdapterStack, adapters: Sequence[Adapter | None]) -> None:
        """`adapters` has one entry per row, all of them of the stack, None for the base model."""
        self._stack = stack
        index = {adapter: place for place, adapter in enumerate(stack.adapters)}
        rows = [-1 if adapter is None else index[adapter] for adapter in adapters]
        self._rows_B1 = torch.tensor(rows, device=stack.device)[:, None]
        # By the columns' owners, which most places share.
        self._foreign: dict[int, torch.Tensor] = {}

    def add(self, out: torch.Tensor, x: torch.Tensor, place: Place) -> torch.Tensor:
        """As `AdapterGroups.add`."""
        found = self._stack.at(place)
        if found is None:
            return out
        a, b, owners = found
        if id(owners) not in self._foreign:
            self._foreign[id(owners)] = owners[None] != self._rows_B1
        foreign = self._foreign[id(owners)]
        made = functional.linear(x, a)
        foreign = foreign.view(len(foreign), *[1] * (made.ndim - 2), -1)
        out += functional.linear(made.masked_fill(foreign, 0), b)
        return out
