"""Places: where the new tokens of one forward pass stand, made once and read by every layer.

Built from what the host knows, so that no layer waits for the device. Axes as in `model.py`; R rotated features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Positions of T tokens in each of B rows."""

    rows_B1: torch.Tensor
    """Rows of the cache, int64."""
    places_BT: torch.Tensor
    """Position of each token in its row, int64."""
    length: int
    """Positions of the cache that any of them may look at."""
    mask_B1QS: torch.Tensor | None
    """0 where a query looks and minus infinity where not, in the model's type: attention would otherwise make it again
    in every layer. The heads that share a key and value head stand below each other. None: every row begins here, so
    that token t looks at the first t + 1 positions, which kernels know without a mask, and skip the other half."""
    cos_B1TR: torch.Tensor
    sin_B1TR: torch.Tensor
    real_BT: torch.Tensor | None
    """Which tokens are no padding; None: all of them."""
    counts_B: torch.Tensor
    """How many of each row's tokens are no padding, int64; they stand first."""


def make_places(
    starts: Sequence[int],
    counts: Sequence[int],
    *,
    width: int,
    frequencies: torch.Tensor,
    shared_by: int,
    dtype: torch.dtype,
) -> Places:
    """Lay `width` tokens from `starts[b]` on in each row b, the first `counts[b]` of them real.

    Args:
        starts: first position of each row.
        counts: real tokens of each row, at most `width`.
        width: T.
        frequencies: of the rotary embedding, float32 [R / 2]; names the device.
        shared_by: query heads that share a key and value head.
        dtype: of the model.
    """
    device = frequencies.device
    length = max(starts) + width
    table = torch.tensor([list(starts), list(counts)], device=device)
    steps = torch.arange(width, device=device)
    places_BT = table[0][:, None] + steps
    angles = places_BT[:, None, :, None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    whole = all(count == width for count in counts)
    return Places(
        rows_B1=torch.arange(len(starts), device=device)[:, None],
        places_BT=places_BT,
        length=length,
        mask_B1QS=_mask(places_BT, length, shared_by, dtype) if any(starts) else None,
        cos_B1TR=angles.cos().to(dtype),
        sin_B1TR=angles.sin().to(dtype),
        real_BT=None if whole else steps[None] < table[1][:, None],
        counts_B=table[1],
    )


def _mask(places_BT: torch.Tensor, length: int, shared_by: int, dtype: torch.dtype) -> torch.Tensor:
    seen = torch.arange(length, device=places_BT.device)
    hidden_BTS = seen[None, None] > places_BT[:, :, None]
    mask_BTS = hidden_BTS.to(dtype).masked_fill(hidden_BTS, float("-inf"))
    return mask_BTS[:, None].repeat(1, 1, shared_by, 1)
