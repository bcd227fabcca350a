"""Reduction: what ranks exchange about one adapter before its step: gradients, and the norm over all of them.

During a window every rank adds up the gradients of its own tokens, and of its own part of the matrices. Once per step
they are summed in flat buffers: factors that tensor-parallel ranks cut, over the ranks with the same part; factors
that are whole on every rank, over all of them, since each rank's share of the model contributes a partial sum.
Afterwards replicas are equal bit for bit, and so is every step that is computed from them.
"""

from __future__ import annotations

import torch

from lilo_miles_backend.ranks.adapter import Adapter
from lilo_miles_backend.ranks.collectives import sum_in_place
from lilo_miles_backend.ranks.parallel import Parallel


def sum_gradients(adapter: Adapter, parallel: Parallel | None) -> None:
    """Make the gradients of this window complete; every rank must call it, once per window. None: a world of one."""
    if parallel is None or parallel.world_size == 1:
        return
    if not parallel.tp.is_split:
        sum_in_place(adapter.gradients, parallel.dp_cp)
        return
    sum_in_place(adapter.gradients[: adapter.num_replicated], parallel.world)
    sum_in_place(adapter.gradients[adapter.num_replicated :], parallel.dp_cp)


def gradient_norm(adapter: Adapter, parallel: Parallel | None) -> torch.Tensor:
    """Euclidean norm of the complete gradients over all factors, each counted once; equal on all ranks.

    float64 without axes, on the device. Accumulated in float64: it must neither overflow nor depend on the order of summation visibly.
    """
    if parallel is None or not parallel.tp.is_split:
        return torch.linalg.vector_norm(adapter.gradients, dtype=torch.float64)
    whole, cut = (
        torch.linalg.vector_norm(part, dtype=torch.float64).square()
        for part in adapter.gradients.tensor_split([adapter.num_replicated])
    )
    return (whole + sum_in_place(cut, parallel.tp)).sqrt()
