"""DeltaKernels: what a gated delta net asks of a device, as a protocol. `delta_reference.py` and `delta_fla.py` are the two.

Yang et al., "Gated Delta Networks", arXiv:2412.06464. Per value head a state S [K, V]; one token does

    S <- exp(g) S;  S <- S + beta k (v - k^T S)^T;  o = q^T S

with k and q of length one and q divided by sqrt(K) besides. So a run of tokens is an affine map of the state, and so are
runs one after another: S_out = M S_in + B. That is what context-parallel ranks tell each other.

Each part has a backward of its own, and nothing here is seen by autograd. The rule is an object, whose steps the caller
puts what ranks tell each other between. Tokens come as a stream of *intervals* (`intervals.py`): convolution and
state begin anew at each.

Shapes: T tokens, I intervals, G key heads, H value heads (this rank's), K and V their sizes, C channels, W the kernel of
the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from lilo_miles_backend.ranks.layers.intervals import Intervals
from lilo_miles_backend.ranks.layers.mixer import Saved

Widths: TypeAlias = tuple[int, int, int]
Three: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of queries, keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleInputs:
    """What the rule is computed from, or the gradient of each."""

    q: torch.Tensor
    """[T, G, K], queries; value head h uses key head h // (H / G)."""
    k: torch.Tensor
    """[T, G, K], keys; the rule makes them and the queries unit vectors."""
    v: torch.Tensor
    """[T, H, V], values."""
    g: torch.Tensor
    """[T, H], log of the decay, at most 0; float32 at least."""
    beta: torch.Tensor
    """[T, H], in (0, 1); float32 at least."""


class DeltaRule(Protocol):
    """The gated delta rule over one stream, forward and backward; keeps what its steps have in common.

    Forward: `outputs`, or where states enter the intervals `maps`, `carry` and `outputs`. Backward, where
    gradients are enabled: `outputs` again, with what was carried, then `gradients`, or where states enter `slopes` and
    `gradients`.
    """

    def maps(self) -> torch.Tensor:
        """The map of each interval, [M | B] as [I, H, K, K + V], float32 at least."""
        ...

    def carry(self, entered: torch.Tensor) -> Saved:
        """What `outputs` needs to know of the states that enter the intervals, [I, H, K, V]; to be kept for the backward."""
        ...

    def outputs(self, carried: Saved) -> torch.Tensor:
        """[T, H, V] in the dtype of the values; with nothing carried, states begin as zero."""
        ...

    def slopes(self, grad_THV: torch.Tensor) -> torch.Tensor:
        """[M^T | N] of each interval, [I, H, K, K + V].

        A map from the gradient of the state that leaves it to that of the one that enters it; N is what the interval's own
        outputs have in that, of which `grad_THV` is the gradient.
        """
        ...

    def gradients(self, grad_THV: torch.Tensor, left: torch.Tensor | None) -> RuleInputs:
        """Of everything that the rule was computed from; ends it.

        Args:
            grad_THV: of the outputs.
            left: of the states that leave the intervals, [I, H, K, V]; None: nothing comes of them.
        """
        ...


class DeltaPieces(Protocol):
    """What is neither a linear nor the rule."""

    def convolve(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        before: torch.Tensor | None,
        intervals: Intervals,
        widths: Widths,
    ) -> Three:
        """Causal convolution of each channel by itself, then SiLU: queries, keys and values, [T, width] each.

        Args:
            x_TC: any stride over T.
            weight_CW: the last column is the current token's.
            before: [I, W - 1, C], the tokens before each interval; None: there are none.
            intervals: of the T tokens.
            widths: channels of each of the three; C in all.
        """
        ...

    def convolve_backward(
        self,
        grads: Three,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        before: torch.Tensor | None,
        intervals: Intervals,
        grad_x: torch.Tensor,
    ) -> torch.Tensor | None:
        """Writes the gradient of x to `grad_x` [T, C], of any stride over T; returns that of `before`, if it is given."""
        ...

    def gated_norm(
        self, x_THV: torch.Tensor, gate_THV: torch.Tensor, weight_V: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """RMSNorm per head times SiLU of the gate, [T, H, V]; arithmetic in float32. The gate has any stride over T."""
        ...

    def gated_norm_backward(
        self,
        grad_THV: torch.Tensor,
        x_THV: torch.Tensor,
        gate_THV: torch.Tensor,
        weight_V: torch.Tensor,
        eps: float,
        grad_gate: torch.Tensor,
    ) -> torch.Tensor:
        """The gradient of x; that of the gate is written to `grad_gate`, of any stride over T."""
        ...


class DeltaKernels(DeltaPieces, Protocol):
    """All of a gated delta net that is no linear."""

    def rule(self, inputs: RuleInputs, intervals: Intervals, *, linked: bool) -> DeltaRule:
        """The gated delta rule over a stream.

        Args:
            inputs: of its tokens.
            intervals: of the T tokens.
            linked: whether states enter them.
        """
        ...
