"""DeltaKernels: what a gated delta net asks of a device, as a protocol. `delta_reference.py` and `delta_fla.py` are the two.

Yang et al., "Gated Delta Networks", arXiv:2412.06464. Per value head a state S [K, V]; one token does

    S <- exp(g) S;  S <- S + beta k (v - k^T S)^T;  o = q^T S

with k and q of length one and q divided by sqrt(K) besides. So a run of tokens is an affine map of the state, and so are
runs one after another: S_out = M S_in + B. That is what context-parallel ranks tell each other.

All functions are differentiable by autograd. Tokens come as a stream of *intervals* (`intervals.py`): convolution and
state begin anew at each.

Shapes: T tokens, I intervals, G key heads, H value heads (this rank's), K and V their sizes, C channels, W the kernel of
the convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch

from lilo_miles_backend.ranks.layers.intervals import Intervals

Enter: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""From the map of each interval, [M | B] as [I, H, K, K + V] in float32, to the state that enters it [I, H, K, V]."""


class DeltaKernels(Protocol):
    """The three parts of a gated delta net that are no linears."""

    def convolve(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        before: torch.Tensor | None,
        intervals: Intervals,
    ) -> torch.Tensor:
        """Causal convolution of each channel by itself, then SiLU, [T, C].

        Args:
            x_TC: any stride over T.
            weight_CW: the last column is the current token's.
            before: [I, W - 1, C], the tokens before each interval; None: there are none.
            intervals: of the T tokens.
        """
        ...

    def rule(
        self,
        q_TGK: torch.Tensor,
        k_TGK: torch.Tensor,
        v_THV: torch.Tensor,
        g_TH: torch.Tensor,
        beta_TH: torch.Tensor,
        intervals: Intervals,
        enter: Enter | None,
    ) -> torch.Tensor:
        """The gated delta rule, [T, H, V] in the dtype of `v`; queries and keys are made unit vectors here.

        Args:
            q_TGK: queries; value head h uses key head h // (H / G).
            k_TGK: keys.
            v_THV: values.
            g_TH: log of the decay, float32, at most 0.
            beta_TH: in (0, 1), float32.
            intervals: of the T tokens.
            enter: told the intervals' maps, answers the states that enter them; None: all enter with zero.
        """
        ...

    def gated_norm(
        self, x_THV: torch.Tensor, gate_THV: torch.Tensor, weight_V: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """RMSNorm per head times SiLU of the gate, [T, H, V]; arithmetic in float32."""
        ...
