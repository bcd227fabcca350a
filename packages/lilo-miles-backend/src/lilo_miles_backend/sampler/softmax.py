"""SoftmaxMixer: attention over the keys and values of a row, as Llama, Qwen3 and the full layers of Qwen3.5 have it.

Differences between families are its fields: norms of queries and keys, how many features are rotated, an output gate.
Axes: B rows, T new tokens, S cached positions, H heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from lilo_miles_backend.sampler.mixer import LayerCache, rms_norm
from lilo_miles_backend.sampler.places import Places


class KeyValues:
    """Keys and values of one layer in one tensor [rows, 2, H, positions, D]: a row is copied and cleared at once."""

    def __init__(self, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate nothing yet."""
        self._heads, self._dim = heads, dim
        self._dtype, self._device = dtype, device
        self._both_R2HSD = self._empty(0, 0)

    @property
    def row_bytes(self) -> int:
        """Nothing but positions."""
        return 0

    @property
    def position_bytes(self) -> int:
        """Of a key and a value of every head."""
        return 2 * self._heads * self._dim * self._dtype.itemsize

    def reserve(self, rows: int, length: int) -> None:
        """One layer after the other, so that only one of them is held twice at a time."""
        old, new = self._both_R2HSD, self._empty(rows, length)
        kept, upto = min(rows, old.shape[0]), min(length, old.shape[3])
        new[:kept, :, :, :upto] = old[:kept, :, :, :upto]
        self._both_R2HSD = new

    def write(self, keys_BHTD: torch.Tensor, values_BHTD: torch.Tensor, places: Places) -> None:
        """Put the new positions of rows 0..B-1."""
        keys_RHSD, values_RHSD = self._both_R2HSD.unbind(1)
        keys_RHSD[places.rows_B1, :, places.places_BT] = keys_BHTD.transpose(1, 2)
        values_RHSD[places.rows_B1, :, places.places_BT] = values_BHTD.transpose(1, 2)

    def read(self, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the first `rows` rows and `length` positions, each [rows, H, length, D]."""
        keys_BHSD, values_BHSD = self._both_R2HSD[:rows, :, :, :length].unbind(1)
        return keys_BHSD, values_BHSD

    def copy_from(self, other: KeyValues, source: int, row: int, length: int) -> None:
        """As `LayerCache` says."""
        self._both_R2HSD[row, :, :, :length] = other._both_R2HSD[source, :, :, :length]

    def clear(self, row: int) -> None:
        """As `LayerCache` says."""
        self._both_R2HSD[row] = 0

    def _empty(self, rows: int, length: int) -> torch.Tensor:
        # Zeros, not uninitialised memory: masked positions still multiply by a weight of exactly 0.
        size = (rows, 2, self._heads, length, self._dim)
        return torch.zeros(size, dtype=self._dtype, device=self._device)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxMixer:
    """Reads the fused projection [q | k | v]; with a gate, q holds query and gate of each head in turn."""

    heads: int
    kv_heads: int
    head_dim: int
    gated: bool
    eps: float
    q_norm: torch.Tensor | None
    """[D]; None: queries and keys are not normalised."""
    k_norm: torch.Tensor | None
    dtype: torch.dtype
    device: torch.device

    def new_cache(self) -> KeyValues:
        """Keys and values."""
        return KeyValues(self.kv_heads, self.head_dim, self.dtype, self.device)

    def forward(
        self, projected_BTO: torch.Tensor, places: Places, cache: LayerCache
    ) -> torch.Tensor:
        """Attention of the new tokens over everything cached, themselves included; [B, T, H x D]."""
        assert isinstance(cache, KeyValues)
        rows, count, _ = projected_BTO.shape
        heads, kv_heads, dim = self.heads, self.kv_heads, self.head_dim
        per_head = 2 * dim if self.gated else dim
        q, k, v = projected_BTO.split([heads * per_head, kv_heads * dim, kv_heads * dim], dim=-1)
        q = q.view(rows, count, heads, per_head)
        gate = q[..., dim:] if self.gated else None
        q = self._turned(q[..., :dim], self.q_norm, places)
        k = self._turned(k.view(rows, count, kv_heads, dim), self.k_norm, places)
        cache.write(k, v.view(rows, count, kv_heads, dim).transpose(1, 2), places)
        keys, values = cache.read(rows, places.length)
        out = _attention(q, keys, values, places.mask_B1QS)
        # Which strides come back depends on the device.
        out = out.reshape(rows, heads, count, dim).transpose(1, 2)
        if gate is not None:
            out = out * gate.sigmoid()
        return out.reshape(rows, count, heads * dim)

    def _turned(
        self, x_BTHD: torch.Tensor, weight: torch.Tensor | None, places: Places
    ) -> torch.Tensor:
        """Norm per head where there is one, then RoPE of the first features; [B, H, T, D]."""
        if weight is not None:
            x_BTHD = rms_norm(x_BTHD, weight, self.eps)
        return _rotate(x_BTHD.transpose(1, 2), places.cos_B1TR, places.sin_B1TR)


def _attention(
    q_BHTD: torch.Tensor,
    keys_BHSD: torch.Tensor,
    values_BHSD: torch.Tensor,
    mask_B1QS: torch.Tensor | None,
) -> torch.Tensor:
    if mask_B1QS is None:
        return functional.scaled_dot_product_attention(
            q_BHTD, keys_BHSD, values_BHSD, is_causal=True, enable_gqa=True
        )
    # Query heads that share a key-value head stand below each other as more queries: nothing is repeated.
    rows, kv_heads, _, dim = keys_BHSD.shape
    grouped = q_BHTD.reshape(rows, kv_heads, -1, dim)
    return functional.scaled_dot_product_attention(
        grouped, keys_BHSD, values_BHSD, attn_mask=mask_B1QS
    )


def _rotate(x_BHTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE in the half-split form (arXiv:2104.09864) of as many features as there are angles."""
    rotated = cos.shape[-1]
    turned = x_BHTD[..., :rotated]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    if rotated == x_BHTD.shape[-1]:
        return turned
    return torch.cat([turned, x_BHTD[..., rotated:]], dim=-1)
