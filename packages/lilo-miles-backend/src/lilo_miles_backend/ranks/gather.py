"""Gather: the whole adapter out of the parts that tensor-parallel neighbours hold, for publishing it for sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lilo_miles_backend.ranks.collectives import Axis, collected, stacked
from lilo_miles_backend.ranks.frozen import Freezer, Frozen
from lilo_miles_backend.shards import FactorShard

_ROWS = "rows"


def whole_tensors(
    named: Mapping[str, torch.Tensor],
    shards: Mapping[str, FactorShard],
    tp: Axis,
    freezer: Freezer,
) -> Frozen | None:
    """The whole tensors as they are now, for the first rank; one exchange of numbers, however many there are.

    Called by all ranks of `tp`.

    Args:
        named: what this rank holds, by name, on its device; in the same order on all ranks.
        shards: which part each of them is; those not named are whole on every rank.
        tp: this rank's tensor-parallel neighbours.
        freezer: of the device.
    """
    cut = {name: part for name, part in shards.items() if part.dim is not None and name in named}
    if not cut:
        return freezer.freeze(named) if tp.rank == 0 else None
    pieces: list[dict[str, FactorShard]] = collected(cut, tp)
    first = next(iter(named.values()))
    flat = first.new_zeros(max(_count(parts) for parts in pieces))
    _fill(flat, [named[name].detach() for name in cut])
    rows = stacked(flat, tp)
    if tp.rank != 0:
        return None
    others = freezer.freeze({name: t for name, t in named.items() if name not in cut})
    gathered = freezer.keep(rows, _ROWS)
    order = tuple(named)

    def put_together() -> dict[str, torch.Tensor]:
        whole = others.on_host() | _assembled(gathered.on_host()[_ROWS], pieces)
        return {name: whole[name] for name in order}

    return Frozen(put_together)


def _assembled(
    rows: torch.Tensor, pieces: Sequence[Mapping[str, FactorShard]]
) -> dict[str, torch.Tensor]:
    """Whole tensors out of what each rank sent: its parts one after another."""
    full = {name: part.full for parts in pieces for name, part in parts.items()}
    whole = {name: torch.empty(size, dtype=rows.dtype) for name, size in full.items()}
    for row, parts in zip(rows, pieces, strict=True):
        start = 0
        for name, part in parts.items():
            count = part.shape[0] * part.shape[1]
            whole[name][part.index] = row[start : start + count].view(part.shape)
            start += count
    return whole


def _count(parts: Mapping[str, FactorShard]) -> int:
    return sum(part.shape[0] * part.shape[1] for part in parts.values())


def _fill(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    start = 0
    for tensor in tensors:
        flat[start : start + tensor.numel()] = tensor.reshape(-1)
        start += tensor.numel()
