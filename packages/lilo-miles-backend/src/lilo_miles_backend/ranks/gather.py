"""Gather: the whole adapter out of the parts that tensor-parallel neighbours hold, for publishing it for sampling."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lilo_miles_backend.ranks.collectives import Axis, collected, stacked
from lilo_miles_backend.ranks.transfer import fetched, frozen
from lilo_miles_backend.shards import FactorShard


def whole_tensors(
    named: Mapping[str, torch.Tensor], shards: Mapping[str, FactorShard], tp: Axis
) -> dict[str, torch.Tensor]:
    """The whole tensors, detached on the CPU; one exchange of numbers, however many there are.

    Called by all ranks of `tp`.

    Args:
        named: what this rank holds, by name, on its device; in the same order on all ranks.
        shards: which part each of them is; those not named are whole on every rank.
        tp: this rank's tensor-parallel neighbours.
    """
    cut = {name: part for name, part in shards.items() if part.dim is not None and name in named}
    whole = frozen({name: t for name, t in named.items() if name not in cut})
    if not cut:
        return whole
    pieces: list[dict[str, FactorShard]] = collected(cut, tp)
    first = next(iter(named.values()))
    flat = first.new_zeros(max(_count(parts) for parts in pieces))
    _fill(flat, [named[name].detach() for name in cut])
    (rows,) = fetched(stacked(flat, tp))
    whole |= {name: torch.empty(part.full, dtype=first.dtype) for name, part in cut.items()}
    for row, parts in zip(rows, pieces, strict=True):
        start = 0
        for name, part in parts.items():
            count = part.shape[0] * part.shape[1]
            whole[name][part.index] = row[start : start + count].view(part.shape)
            start += count
    return {name: whole[name] for name in named}


def _count(parts: Mapping[str, FactorShard]) -> int:
    return sum(part.shape[0] * part.shape[1] for part in parts.values())


def _fill(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    start = 0
    for tensor in tensors:
        flat[start : start + tensor.numel()] = tensor.reshape(-1)
        start += tensor.numel()
