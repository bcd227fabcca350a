"""Share: which of the tensors that a rank holds it freezes for a checkpoint, where others hold the same ones. Pure.

Sixteen ranks that all copied what they have would hold each tensor up to sixteen times, and write it once. So each
takes a share of about equal size, told from the order of the buffers alone, without asking anybody.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from lilo_miles_backend.shards import FactorShard


def share_of(
    shards: Mapping[str, FactorShard], *, everybody: tuple[int, int], peers: tuple[int, int]
) -> frozenset[str]:
    """Names of this rank's share.

    Args:
        shards: what this rank holds of each tensor; the same names in the same order on all ranks.
        everybody: this rank's place among all ranks, and their number: they hold the same whole tensors.
        peers: its place among those with the same part of the model, and their number: they hold the same parts.
    """
    whole = {name: math.prod(s.shape) for name, s in shards.items() if s.dim is None}
    parts = {name: math.prod(s.shape) for name, s in shards.items() if s.dim is not None}
    return frozenset((*_run(whole, *everybody), *_run(parts, *peers)))


def _run(sizes: Mapping[str, int], index: int, count: int) -> list[str]:
    """Consecutive names that make up about 1 / count of all elements: those whose middle falls into it."""
    total, start, names = sum(sizes.values()), 0, list[str]()
    for name, size in sizes.items():
        if (2 * start + size) * count // max(1, 2 * total) == index:
            names.append(name)
        start += size
    return names
