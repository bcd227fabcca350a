"""The forward pass of a dense Qwen3 with a key-value cache and many adapters. Numbers only: no requests here.

Axes: B rows, T new tokens per row, Q queries per row and key-value head (T times the heads that share it), S cached positions, H heads, D head dim, E hidden size, V vocabulary.
The layer is Qwen3's (transformers `modeling_qwen3.py`): RMSNorm, attention with per-head q and k norms and RoPE over
the whole head, then SwiGLU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from lilo_miles_backend.sampler.adapters import HEAD_PLACE, Adapter
from lilo_miles_backend.sampler.cache import KeyValueCache
from lilo_miles_backend.sampler.groups import AdapterGroups
from lilo_miles_backend.sampler.weights import BaseWeights, Layer


class Model:
    """The base weights, and how a row of tokens runs through them and its adapter."""

    def __init__(self, base: BaseWeights) -> None:
        """Nothing is allocated but the RoPE frequencies."""
        self.base = base
        half = torch.arange(0, base.shape.head_dim, 2, device=base.device).float()
        self._frequencies = 1.0 / base.shape.rope_theta ** (half / base.shape.head_dim)

    def new_cache(self, *, max_rows: int, max_length: int) -> KeyValueCache:
        """A cache for this model; empty, so that it costs nothing until used."""
        return KeyValueCache(
            self.base.shape,
            max_rows=max_rows,
            max_length=max_length,
            dtype=self.base.dtype,
            device=self.base.device,
        )

    def forward(
        self,
        tokens_BT: torch.Tensor,
        start_B: torch.Tensor,
        cache: KeyValueCache,
        adapters: Sequence[Adapter | None],
    ) -> torch.Tensor:
        """Run T tokens per row; row b's stand at positions `start_B[b]` and on, in row b of the cache.

        Returns:
            The final hidden states after the last norm, [B, T, E].
        """
        shape = self.base.shape
        rows, count = tokens_BT.shape
        groups = AdapterGroups(adapters, self.base.device)
        places_BT = start_B[:, None] + torch.arange(count, device=self.base.device)
        length = int(places_BT.max()) + 1
        cache.reserve(rows, length)
        angles = places_BT[:, None, :, None].float() * self._frequencies
        angles = torch.cat([angles, angles], dim=-1)
        rope = (angles.cos().to(self.base.dtype), angles.sin().to(self.base.dtype))
        seen = torch.arange(length, device=self.base.device)
        mask_B1QS = (seen[None, None] <= places_BT[:, :, None])[:, None]
        mask_B1QS = mask_B1QS.repeat(
            1, 1, shape.num_attention_heads // shape.num_key_value_heads, 1
        )
        x = self.base.embedding[tokens_BT]
        for i, layer in enumerate(self.base.layers):
            normed = self._norm(x, layer.input_norm)
            qkv = self._linear(normed, layer, i, "qkv", groups)
            mixed = self._attend(qkv, layer, i, rope, mask_B1QS, cache, start_B)
            x = x + self._linear(mixed, layer, i, "o", groups)
            normed = self._norm(x, layer.post_norm)
            gate, up = self._linear(normed, layer, i, "gate_up", groups).chunk(2, dim=-1)
            x = x + self._linear(functional.silu(gate) * up, layer, i, "down", groups)
        return self._norm(x, self.base.norm)

    def logits(self, hidden_BE: torch.Tensor, adapters: Sequence[Adapter | None]) -> torch.Tensor:
        """Logits of single positions, float32 [B, V]; one adapter per row."""
        out = functional.linear(hidden_BE, self.base.head)
        groups = AdapterGroups(adapters, self.base.device)
        return groups.add(out, hidden_BE, HEAD_PLACE).float()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.base.shape.rms_norm_eps)

    def _linear(
        self, x_BTI: torch.Tensor, layer: Layer, index: int, fused: str, groups: AdapterGroups
    ) -> torch.Tensor:
        return groups.add(functional.linear(x_BTI, layer.fused[fused]), x_BTI, (index, fused))

    def _attend(
        self,
        qkv: torch.Tensor,
        layer: Layer,
        index: int,
        rope: tuple[torch.Tensor, torch.Tensor],
        mask_B1QS: torch.Tensor,
        cache: KeyValueCache,
        start_B: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of the new tokens over everything cached, themselves included; [B, T, H x D]."""
        shape = self.base.shape
        rows, count, _ = qkv.shape
        heads, kv_heads, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
        q = self._norm(q.view(rows, count, heads, dim), layer.q_norm).transpose(1, 2)
        k = self._norm(k.view(rows, count, kv_heads, dim), layer.k_norm).transpose(1, 2)
        v = v.view(rows, count, kv_heads, dim).transpose(1, 2)
        cache.write(index, _rotate(k, rope), v, start_B)
        keys, values = cache.read(index, rows, mask_B1QS.shape[-1])
        # Query heads that share a key-value head stand below each other as more queries: nothing is repeated.
        grouped = _rotate(q, rope).reshape(rows, kv_heads, -1, dim)
        out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask_B1QS)
        return out.view(rows, heads, count, dim).transpose(1, 2).reshape(rows, count, heads * dim)


def _rotate(x_BHTD: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """RoPE in the half-split form."""
    cos, sin = rope
    first, second = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cos + torch.cat([-second, first], dim=-1) * sin
