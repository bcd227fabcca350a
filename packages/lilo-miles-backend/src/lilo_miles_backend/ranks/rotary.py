"""Rotary: the tables of the rotary position embedding, one per model. The rotation itself is a kernel.

Half-split form of Su et al., "RoFormer" (arXiv:2104.09864), as Hugging Face models store their weights: the pair of
feature i is i + R / 2, angle = position / base^(2i / R). Models that rotate a part of each head have R below its size.
"""

from __future__ import annotations

import torch


class Rotary:
    """Cosines and sines of every position, computed once and shared by the layers of a model."""

    def __init__(
        self, *, rotary_dim: int, base: float, max_positions: int, device: torch.device
    ) -> None:
        """Compute the tables.

        Args:
            rotary_dim: R, the leading features of a head that are rotated.
            base: of the angles.
            max_positions: positions above this are never asked for.
            device: where the tables lie.
        """
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
        positions = torch.arange(max_positions, dtype=torch.float32, device=device)
        angles_PF = torch.outer(positions, 1.0 / (base**exponents))
        self._cos, self._sin = angles_PF.cos(), angles_PF.sin()
        self._last: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def at(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, float32 [T, R / 2] each; picked once for all layers of a microbatch."""
        if self._last is None or self._last[0] is not positions_T:
            self._last = (positions_T, self._cos[positions_T], self._sin[positions_T])
        return self._last[1], self._last[2]
