"""Mlp: norm, gated MLP and residual of a layer, forward and backward piece by piece.

    y = m + fc2(swiglu(fc1(norm(m))))

The inside is several times as wide as the stream, so it exists for one piece of the tokens at a time (`pieces.py`). The
forward's and the backward's pieces are the same, and so are the numbers that are computed again. What a piece gives is
written over its input, which nobody needs any more.

Shapes: T tokens of this rank's part of a stream, t of its share among tensor-parallel ranks (`stream_shards.py`), H hidden
size, F inner size (this rank's).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from lilo_definitions.planner.activations import MLP_PIECE_TOKENS

from lilo_miles_backend.ranks.kernels.kernels import Elementwise
from lilo_miles_backend.ranks.layers.linear import Linear
from lilo_miles_backend.ranks.layers.pieces import cut_pieces, inside
from lilo_miles_backend.ranks.layers.stream_shards import StreamShards
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
        shards: StreamShards,
        piece_tokens: int = MLP_PIECE_TOKENS,
    ) -> None:
        """Compute with these; `shards` divides the stream over the ranks with other inner features."""
        self._norm, self._eps = norm_H, eps
        self._fc1, self._fc2 = fc1, fc2
        self._elementwise = elementwise
        self._shards = shards
        self._piece_tokens = piece_tokens

    def forward(
        self, middle_tH: torch.Tensor, num_tokens: int, adapters: MlpAdapters, *, keep: bool
    ) -> tuple[torch.Tensor, GateUps | None]:
        """The layer's output [t, H], and what `backward` need not compute again if it is to be kept.

        Args:
            middle_tH: the stream after the mixer.
            num_tokens: T.
            adapters: on all T.
            keep: whether to keep.
        """
        kept: GateUps = []
        normed, _ = self._elementwise.rms_norm(middle_tH, self._norm, self._eps)
        stream_TH = self._shards.whole(normed, num_tokens)
        del normed
        for piece in self._pieces(num_tokens, adapters):
            here = adapters.inside(piece, num_tokens)
            gate_up = self._fc1.forward(stream_TH[piece], here.fc1)
            if keep:
                kept.append(gate_up)
            activated = self._elementwise.swiglu(gate_up)
            del gate_up
            residual = None if self._shards.is_split else middle_tH[piece]
            self._fc2.forward(activated, here.fc2, residual, stream_TH[piece])
        y_tH = self._shards.summed(stream_TH)
        if self._shards.is_split:
            y_tH.add_(middle_tH)
        return y_tH, kept if keep else None

    def backward(
        self,
        grad_tH: torch.Tensor,
        middle_tH: torch.Tensor,
        num_tokens: int,
        kept: GateUps | None,
        adapters: MlpAdapters,
    ) -> torch.Tensor:
        """Gradient of `middle` [t, H], the residual's in it; adds to the adapters' gradients, and empties `kept`."""
        normed, inverse = self._elementwise.rms_norm(middle_tH, self._norm, self._eps)
        stream_TH = self._shards.whole(normed, num_tokens)
        del normed
        grad_TH = self._shards.whole(grad_tH, num_tokens)
        for piece in self._pieces(num_tokens, adapters):
            here = adapters.inside(piece, num_tokens)
            stream = stream_TH[piece]
            stream.copy_(
                self._piece_back(grad_TH[piece], stream, kept.pop(0) if kept else None, here)
            )
        del grad_TH
        grad_normed = self._shards.summed(stream_TH)
        del stream_TH
        grad = self._elementwise.rms_norm_backward(grad_normed, middle_tH, inverse, self._norm)
        return grad.add_(grad_tH)

    def _piece_back(
        self,
        grad: torch.Tensor,
        normed: torch.Tensor,
        gate_up: torch.Tensor | None,
        adapters: MlpAdapters,
    ) -> torch.Tensor:
        """Gradient of a piece of the norm's result."""
        if gate_up is None:
            gate_up = self._fc1.forward(normed, adapters.fc1)
        activated = self._elementwise.swiglu(gate_up)
        grad_activated = self._fc2.backward(grad, activated, adapters.fc2)
        del activated
        grad_gate_up = self._elementwise.swiglu_backward_(gate_up, grad_activated)
        del grad_activated, gate_up
        return self._fc1.backward(grad_gate_up, normed, adapters.fc1)

    def _pieces(self, num_tokens: int, adapters: MlpAdapters) -> list[slice]:
        return cut_pieces(num_tokens, adapters.fc1 or adapters.fc2, self._piece_tokens)
