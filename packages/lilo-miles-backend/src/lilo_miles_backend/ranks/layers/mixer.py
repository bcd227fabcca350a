"""Mixer: what mixes tokens inside a layer, between its projection in and its projection out, as a protocol.

Softmax attention and the gated delta net are the two. The layer around them does the norms, both projections with
their adapters, the residuals and the choice of what is kept; a mixer has no linears of its own and so no adapters.

Shapes: T tokens of this rank's part of a stream, O features of the projection in, W of the mixer's output (this
tensor-parallel rank's of both).
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import torch

from lilo_miles_backend.ranks.attention import PackedRows

Saved: TypeAlias = tuple[torch.Tensor, ...]
"""What a mixer's backward needs besides the projection and its own output, as log-sum-exps; small against both."""


class Mixer(Protocol):
    """One kind of token mixing, with the frozen small weights that belong to it."""

    def forward(self, projected_TO: torch.Tensor, rows: PackedRows) -> tuple[torch.Tensor, Saved]:
        """The mixed tokens [T, W]; runs without autograd. Collectives along the context-parallel axis happen here."""
        ...

    def backward(
        self,
        grad_TW: torch.Tensor,
        projected_TO: torch.Tensor,
        out_TW: torch.Tensor,
        saved: Saved,
        rows: PackedRows,
    ) -> torch.Tensor:
        """Gradient of the projection [T, O]; may be written into `projected_TO`, which is not read afterwards."""
        ...
