"""Work: the useful operations of rows, for what passes report and for sharing rows out. Pure arithmetic.

Counted as the planner counts (`lilo_definitions.planner.flops`): 2 per weight and token forward and 2 backward, since
frozen linears need no gradient of their own; causal softmax attention 2 x width x n^2 forward and twice that backward.
Nothing for what is computed again, for adapters, for elementwise work and for the recurrence of delta nets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from lilo_definitions import Architecture

from lilo_miles_backend.ranks.filling import RowCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Operations of a forward, of one model."""

    layers: float
    """Per token, of all layers' linears."""
    head: float
    """Per token."""
    attention: float
    """Per token and token it sees in the middle of a row: n^2 of them in a row of n."""

    @classmethod
    def of(cls, model: Architecture) -> Self:
        """Of one model."""
        return cls(
            layers=2.0 * model.layer_weights,
            head=2.0 * model.head_weights,
            attention=2.0 * model.softmax_layers * model.attention_width,
        )

    @property
    def cost(self) -> RowCost:
        """What a row costs relative to others, forward and backward."""
        return RowCost(per_token=2 * (self.layers + self.head), per_pair=3 * self.attention)

    def flops(self, lengths: Sequence[int], *, backward: bool, decoder: bool) -> float:
        """Useful operations of rows.

        Args:
            lengths: tokens of each row.
            backward: whether gradients are made.
            decoder: whether they reach the layers, not the head alone.
        """
        tokens, pairs = sum(lengths), sum(length * length for length in lengths)
        walked = backward and decoder
        return tokens * (
            self.layers * (2 if walked else 1) + self.head * (2 if backward else 1)
        ) + pairs * self.attention * (3 if walked else 1)
