"""Kernels: what a layer asks of a device, as protocols. No implementation; `choose.py` picks those of a device.

Every function is explicit about its backward, since a layer is one autograd node that decides itself what it keeps
(`layers/`). Frozen weights get no gradient; what says "in place" writes into its first argument.

Shapes: T tokens of a microbatch on this rank, H hidden size, F inner size of the MLP, N heads, D head size, I and O
features of a linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from lilo_engine.operations.operation import AdamParams

from lilo_miles_backend.ranks.lora import Segment


class Elementwise(Protocol):
    """Norms, activation and rotation. Arithmetic in float32 (float64 for float64 inputs), results in the input's dtype."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute x / rms(x) * weight over the last axis: Zhang and Sennrich, arXiv:1910.07467.

        Args:
            x: [..., H].
            weight: [H], as it multiplies (models that store weights minus one have one added when they are read).
            eps: added to the mean square.

        Returns:
            The result, and 1 / rms [..., 1] in float32 for the backward.
        """
        ...

    def rms_norm_backward(
        self, grad: torch.Tensor, x: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Gradient of x."""
        ...

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Compute silu(gate) * up of a fused [T, gate | up], [T, F]: Shazeer, arXiv:2002.05202."""
        ...

    def swiglu_backward_(self, gate_up: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of the fused input [T, 2 F], in place of it."""
        ...

    def rotate(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """Norm per head where there is a weight, then the rotary embedding of the first R features.

        Half-split form of Su et al., arXiv:2104.09864: of the R rotated features, the pair of i is i + R / 2.

        Args:
            x: [T, N, D], any strides over T.
            weight: [D], or None: no norm.
            eps: of the norm.
            cos: [T, R / 2] float32; R <= D.
            sin: likewise.

        Returns:
            [T, N, D], contiguous.
        """
        ...

    def rotate_backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write the gradient of x into `out`, of x's shape and strides; `out` may be x itself."""
        ...


class LoraProducts(Protocol):
    """What the active adapters add to a linear, for all their segments at once.

    `parts` are the output features of each module of the site, one after another along O; their sum is O.
    """

    def shrink(self, x: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        """A's products of every token, [T, width] for the widest segment; unused places are arbitrary."""
        ...

    def expand_(
        self,
        y: torch.Tensor,
        products: torch.Tensor,
        segments: Sequence[Segment],
        parts: Sequence[int],
    ) -> None:
        """Add scale * B (A x) to y [T, O], in place."""
        ...

    def backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        products: torch.Tensor,
        segments: Sequence[Segment],
        parts: Sequence[int],
        grad_x: torch.Tensor | None,
    ) -> None:
        """Add to the factors' float32 gradients, and to `grad_x` [T, I] in place where it is given.

        A segment's gradients are sums over its own tokens in their order, whatever else is in the batch.
        """
        ...


class Logits(Protocol):
    """The two passes over a chunk of float32 logits [C, V] that a loss needs. V entries are this rank's."""

    def statistics(
        self, logits: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-sum-exp [C, 1], and the logits at `places` (int64 [C, k]; 0 where it is below 0), [C, k]: float32."""
        ...

    def gradient(
        self,
        logits: torch.Tensor,
        lse: torch.Tensor,
        places: torch.Tensor,
        grad: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Gradient of the logits [C, V] in `dtype`, from that of the k logprobs `grad` [C, k]; may reuse `logits`.

        d logprob_j / d logit_v = [v is target j] - softmax_v; places below 0 are another rank's targets.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamBuffers:
    """What a step of one adapter reads and writes: flat, of equal length, float32 but for the last."""

    weights: torch.Tensor
    gradients: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    copy: torch.Tensor | None
    """The weights in the model's dtype; None: it computes with the weights themselves."""


class Optimizer(Protocol):
    """AdamW of one adapter."""

    def adamw_(
        self, buffers: AdamBuffers, params: AdamParams, *, step: int, norm: torch.Tensor
    ) -> None:
        """One step: Loshchilov and Hutter, arXiv:1711.05101, algorithm 2 with bias correction.

        Does not wait for the device: what depends on the norm is decided there.

        Args:
            buffers: changed in place. The gradients are zero afterwards; `copy` may be left to who reads it.
            params: `grad_clip_norm` 0: never clipped.
            step: which one this is, from 1.
            norm: of the gradients, float64, no axes, on their device. Above `grad_clip_norm` they are scaled down to
                it first; not finite: only the gradients change.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """All of a device but attention and the delta rule, which the mixers hold themselves."""

    elementwise: Elementwise
    lora: LoraProducts
    logits: Logits
    optimizer: Optimizer
