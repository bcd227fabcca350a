"""Mlp: norm, gated MLP and residual of a layer, forward and backward piece by piece.

    y = m + fc2(swiglu(fc1(norm(m))))

The inside is several times as wide as the stream, so it exists for one piece of the tokens at a time (`pieces.py`). The
forward's and the backward's pieces are the same, and so are the numbers that are computed again.

Shapes: T tokens of this rank's part of a stream, H hidden size, F inner size (this rank's).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from lilo_definitions.planner.activations import MLP_PIECE_TOKENS

from lilo_miles_backend.ranks.collectives import Axis, sum_in_place
from lilo_miles_backend.ranks.kernels.kernels import Elementwise
from lilo_miles_backend.ranks.layers.linear import Linear
from lilo_miles_backend.ranks.layers.pieces import cut_pieces, inside
from lilo_miles_backend.ranks.lora import Segment

GateUps = list[torch.Tensor]
"""The product of fc1 [piece, gate | up] of each piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpAdapters:
    """The adapters that act on the two linears."""

    fc1: Sequence[Segment]
    fc2: Sequence[Segment]

    def inside(self, piece: slice, num_tokens: int) -> MlpAdapters:
        """Those of a piece."""
        return MlpAdapters(
            fc1=inside(self.fc1, piece, num_tokens), fc2=inside(self.fc2, piece, num_tokens)
        )


class Mlp:
    """The second half of a layer; its weights are the layer's."""

    def __init__(
        self,
        *,
        norm_H: torch.Tensor,
        eps: float,
        fc1: Linear,
        fc2: Linear,
        elementwise: Elementwise,
        tp: Axis,
        piece_tokens: int = MLP_PIECE_TOKENS,
    ) -> None:
        """Compute with these; `tp` are the ranks with other parts of the inner features."""
        self._norm, self._eps = norm_H, eps
        self._fc1, self._fc2 = fc1, fc2
        self._elementwise = elementwise
        self._tp = tp
        self._piece_tokens = piece_tokens

    def forward(
        self, middle_TH: torch.Tensor, adapters: MlpAdapters, *, keep: bool
    ) -> tuple[torch.Tensor, GateUps | None]:
        """The layer's output [T, H], and what `backward` need not compute again if it is to be kept."""
        kept: GateUps = []
        y_TH = torch.empty_like(middle_TH)
        for piece in self._pieces(middle_TH, adapters):
            here = adapters.inside(piece, middle_TH.shape[0])
            middle = middle_TH[piece]
            normed, _ = self._elementwise.rms_norm(middle, self._norm, self._eps)
            gate_up = self._fc1.forward(normed, here.fc1)
            del normed
            if keep:
                kept.append(gate_up)
            activated = self._elementwise.swiglu(gate_up)
            del gate_up
            self._down(activated, here.fc2, middle, y_TH[piece])
        return y_TH, kept if keep else None

    def backward(
        self,
        grad_TH: torch.Tensor,
        middle_TH: torch.Tensor,
        kept: GateUps | None,
        adapters: MlpAdapters,
    ) -> torch.Tensor:
        """Gradient of `middle` [T, H], the residual's in it; adds to the adapters' gradients, and empties `kept`."""
        grad_middle_TH = torch.empty_like(middle_TH)
        for piece in self._pieces(middle_TH, adapters):
            here = adapters.inside(piece, middle_TH.shape[0])
            grad = self._piece_back(
                grad_TH[piece], middle_TH[piece], kept.pop(0) if kept else None, here
            )
            torch.add(grad, grad_TH[piece], out=grad_middle_TH[piece])
        return grad_middle_TH

    def _piece_back(
        self,
        grad: torch.Tensor,
        middle: torch.Tensor,
        gate_up: torch.Tensor | None,
        adapters: MlpAdapters,
    ) -> torch.Tensor:
        """Gradient of a piece of `middle` through the MLP alone."""
        normed, inverse = self._elementwise.rms_norm(middle, self._norm, self._eps)
        if gate_up is None:
            gate_up = self._fc1.forward(normed, adapters.fc1)
        activated = self._elementwise.swiglu(gate_up)
        grad_activated = self._fc2.backward(grad, activated, adapters.fc2)
        del activated
        grad_gate_up = self._elementwise.swiglu_backward_(gate_up, grad_activated)
        del grad_activated, gate_up
        grad_normed = self._fc1.backward(grad_gate_up, normed, adapters.fc1)
        del grad_gate_up, normed
        sum_in_place(grad_normed, self._tp)
        return self._elementwise.rms_norm_backward(grad_normed, middle, inverse, self._norm)

    def _down(
        self,
        activated: torch.Tensor,
        segments: Sequence[Segment],
        middle: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write a piece of the output, the sum of all ranks' products and the residual."""
        if self._tp.is_split:
            self._fc2.forward(activated, segments, out=out)
            sum_in_place(out, self._tp).add_(middle)
        else:
            self._fc2.forward(activated, segments, middle, out)

    def _pieces(self, middle_TH: torch.Tensor, adapters: MlpAdapters) -> list[slice]:
        segments = adapters.fc1 or adapters.fc2
        return cut_pieces(middle_TH.shape[0], segments, self._piece_tokens)
