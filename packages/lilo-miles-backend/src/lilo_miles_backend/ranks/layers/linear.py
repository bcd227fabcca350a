"""Linear: a frozen matrix of a layer and the adapters' part of its product, forward and backward written out.

No collectives: what tensor-parallel ranks sum is up to the layer. Adapters need none of their own; what is left partial
are the gradients of A, or of B (`reduction.py`).

Shapes: T tokens, I and O features (this rank's).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lilo_miles_backend.ranks.kernels.kernels import LoraProducts
from lilo_miles_backend.ranks.lora import Segment


class Linear:
    """One linear of one layer."""

    def __init__(self, weight_OI: torch.Tensor, lora: LoraProducts) -> None:
        """Compute with this weight, which stays the layer's."""
        self._weight = weight_OI
        self._lora = lora
        self.parts: tuple[int, ...] = ()
        """Output features of each module that an adapter may act on, from the first one on; set with the sites."""

    def forward(
        self,
        x_TI: torch.Tensor,
        segments: Sequence[Segment],
        residual_TO: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The product [T, O] with the adapters' part, added to `residual_TO` and written to `out` where they are given."""
        weight_IO = self._weight.t()
        if residual_TO is None:
            y = torch.mm(x_TI, weight_IO, out=out)
        else:
            y = torch.addmm(residual_TO, x_TI, weight_IO, out=out)
        if segments:
            products = self._lora.shrink(x_TI, segments)
            self._lora.expand_(self._adapted(y), products, segments, self.parts)
        return y

    def backward(
        self, grad_TO: torch.Tensor, x_TI: torch.Tensor, segments: Sequence[Segment]
    ) -> torch.Tensor:
        """Gradient of x [T, I]; adds to the gradients of the adapters' factors."""
        grad_x = grad_TO @ self._weight
        if segments:
            # Computed again: a hundred columns, against the thousands that keeping them would stand beside.
            products = self._lora.shrink(x_TI, segments)
            grad = self._adapted(grad_TO)
            self._lora.backward(grad, x_TI, products, segments, self.parts, grad_x)
        return grad_x

    def _adapted(self, y_TO: torch.Tensor) -> torch.Tensor:
        """The columns that adapters act on: the first ones."""
        return y_TO.narrow(1, 0, sum(self.parts))
