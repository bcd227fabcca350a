"""LoRA: one adapter's factors at one site, and the tokens it acts on. Plain views; the products are kernels.

Hu et al., "LoRA" (arXiv:2106.09685): y = W x + (alpha / lora_rank) B A x. What the factors of a site are, and which part
of them a rank holds, is `sites.py`. Usually one adapter acts on all tokens of a microbatch; where rows of several
models share one, each acts on its own segment.

Shapes: T tokens, I and O features of the linear (this rank's), k modules of a site, r lora_rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """One adapter's numbers at one site, as far as this rank holds them: contiguous views into its flat buffers.

    Products are computed in the model's dtype, with copies of the weights that are made once per step (`Adapter.refresh`);
    gradients are float32.
    """

    scale: float
    """alpha / lora_rank."""
    lora_rank: int
    a: torch.Tensor
    """[k * r, I]: the k modules one after another."""
    b: torch.Tensor
    """[O, r], likewise."""
    grad_a: torch.Tensor
    """[k * r, I]."""
    grad_b: torch.Tensor
    """[O, r]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The tokens of a microbatch that one adapter acts on, at one site."""

    factors: Factors
    tokens: slice
