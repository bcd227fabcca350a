"""Attention and rotary embedding: our modules that Megatron builds in place of its own.

The stock ones need CUDA or TransformerEngine. They enter through `ModuleSpec` (`model.py`), so that everything
around them stays Megatron's. Norms and the gated activation are in `elementwise.py`.

Shapes: S tokens of a row, B rows, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from lilo_miles_backend.ranks.autograd import AutogradContext, AutogradGrads
from lilo_miles_backend.ranks.megatron import TransformerConfig


class Rotary:
    """Tables of the rotary position embedding, computed once per model and shared by its layers.

    Half-split form of Su et al., "RoFormer" (arXiv:2104.09864), as Hugging Face models store their weights: the pair of
    feature i is i + D/2, angle = position / base^(2i/D).
    """

    def __init__(
        self, *, head_dim: int, base: float, max_positions: int, device: torch.device
    ) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        positions = torch.arange(max_positions, dtype=torch.float32, device=device)
        angles_PF = torch.outer(positions, 1.0 / (base**exponents))
        sin_PF = angles_PF.sin()
        self._cos = torch.cat((angles_PF.cos(),) * 2, -1)[:, None, None, :]
        # The sign of rotate-half is folded into the table: out = x * cos + roll(x, D/2) * sin.
        self._sin = torch.cat((-sin_PF, sin_PF), -1)[:, None, None, :]

    def __call__(self, x_SBHD: torch.Tensor) -> torch.Tensor:
        """Rotate queries or keys of rows that start at position 0."""
        length = x_SBHD.shape[0]
        cos, sin = self._cos[:length].to(x_SBHD.dtype), self._sin[:length].to(x_SBHD.dtype)
        return _Rotate.apply(x_SBHD, cos, sin)  # type: ignore[no-any-return]


class _Rotate(torch.autograd.Function):
    """One node instead of six; the backward is the rotation by the negative angle."""

    @staticmethod
    def forward(
        ctx: AutogradContext, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> AutogradGrads:
        cos, sin = ctx.saved_tensors
        (grad,) = grads
        return (grad * cos).addcmul_(grad.roll(grad.shape[-1] // 2, -1), sin, value=-1), None, None


class CausalAttention(torch.nn.Module):
    """Megatron's `core_attention`: grouped-query causal attention over whole, right-padded rows.

    No mask is needed for the padding: it comes after every real token, which causality hides it from, and its own
    outputs are never read.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        rotary: Rotary,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__()
        self._rotary = rotary
        self._scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels or 1)

    def forward(
        self,
        query_SBHD: torch.Tensor,
        key_SBGD: torch.Tensor,
        value_SBGD: torch.Tensor,
        attention_mask: None = None,
        **_: object,
    ) -> torch.Tensor:
        """Return [S, B, H * D]."""
        assert attention_mask is None, "rows are causal and right-padded; no mask is built"
        length, rows, heads, size = query_SBHD.shape
        query, key = self._rotary(query_SBHD), self._rotary(key_SBGD)
        out_BHSD = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value_SBGD.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self._scale,
            enable_gqa=heads != key.shape[2],
        )
        return out_BHSD.permute(2, 0, 1, 3).reshape(length, rows, heads * size)
