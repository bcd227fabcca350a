"""Gather: the whole adapter out of the parts that tensor-parallel neighbours hold, for publishing it for sampling."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lilo_miles_backend.ranks.collectives import Axis, stacked
from lilo_miles_backend.shards import FactorShard, shard


def whole_tensors(
    named: Mapping[str, torch.Tensor], shards: Mapping[str, FactorShard], tp: Axis
) -> dict[str, torch.Tensor]:
    """The whole tensors, detached on the CPU; one exchange, however many there are. Called by all ranks of `tp`.

    Args:
        named: what this rank holds, by name, on its device; in the same order on all ranks.
        shards: which part each of them is; those not named are whole on every rank.
        tp: this rank's tensor-parallel neighbours.
    """
    cut = {name: part for name, part in shards.items() if part.dim is not None and name in named}
    whole = {name: t.detach().to("cpu", copy=True) for name, t in named.items() if name not in cut}
    if not cut:
        return whole
    pieces = [
        {name: shard(part.full, part.dim, rank, tp.size) for name, part in cut.items()}
        for rank in range(tp.size)
    ]
    assert pieces[tp.rank] == cut, "ranks hold consecutive parts, by their place among neighbours"
    first = next(iter(named.values()))
    flat = first.new_zeros(max(_count(parts) for parts in pieces))
    _fill(flat, [named[name].detach() for name in cut])
    rows = stacked(flat, tp).cpu()
    whole |= {name: torch.empty(part.full, dtype=first.dtype) for name, part in cut.items()}
    for row, parts in zip(rows, pieces, strict=True):
        start = 0
        for name, part in parts.items():
            rank_rows, columns = part.shape
            block = row[start : start + rank_rows * columns].view(part.shape)
            whole[name][part.index] = block
            start += rank_rows * columns
    return {name: whole[name] for name in named}


def _count(parts: Mapping[str, FactorShard]) -> int:
    return sum(part.shape[0] * part.shape[1] for part in parts.values())


def _fill(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    start = 0
    for tensor in tensors:
        flat[start : start + tensor.numel()] = tensor.reshape(-1)
        start += tensor.numel()
