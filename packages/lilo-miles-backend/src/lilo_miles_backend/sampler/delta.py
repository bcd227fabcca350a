"""DeltaMixer: the gated delta net of Qwen3.5, whose memory of a row is a state, and not its keys and values.

A short causal convolution over queries, keys and values, the gated delta rule (`delta_rule.py`), then a gated norm: as
transformers' `modeling_qwen3_5.py` has them. Axes: B rows, T new tokens, C channels of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from lilo_miles_backend.families.shape import DeltaShape
from lilo_miles_backend.sampler.delta_rule import many_tokens, one_token
from lilo_miles_backend.sampler.mixer import LayerCache, rms_norm
from lilo_miles_backend.sampler.places import Places

_NORM_EPS = 1e-6
"""Of the length that queries and keys are divided by."""


class DeltaStates:
    """Of one layer: each row's state, float32, and the newest inputs of the convolution."""

    def __init__(self, shape: DeltaShape, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate nothing yet."""
        shared = shape.value_heads // shape.key_heads
        self._sizes = (shape.key_heads, shared, shape.key_dim, shape.value_dim)
        self._window = (shape.conv_kernel - 1, shape.conv_channels)
        self._dtype, self._device = dtype, device
        self.states_RHRKV, self.windows_RKC = self._empty(0)

    @property
    def row_bytes(self) -> int:
        """Of state and window."""
        heads, shared, key, value = self._sizes
        taps, channels = self._window
        return 4 * heads * shared * key * value + taps * channels * self._dtype.itemsize

    @property
    def position_bytes(self) -> int:
        """A longer row remembers no more."""
        return 0

    def reserve(self, rows: int, length: int) -> None:
        """As `LayerCache` says."""
        if rows == len(self.states_RHRKV):
            return
        states, windows = self._empty(rows)
        kept = min(rows, len(self.states_RHRKV))
        states[:kept], windows[:kept] = self.states_RHRKV[:kept], self.windows_RKC[:kept]
        self.states_RHRKV, self.windows_RKC = states, windows

    def copy_from(self, other: DeltaStates, source: int, row: int, length: int) -> None:
        """As `LayerCache` says; the source has taken in exactly `length` tokens, which a state cannot go back behind."""
        self.states_RHRKV[row] = other.states_RHRKV[source]
        self.windows_RKC[row] = other.windows_RKC[source]

    def clear(self, row: int) -> None:
        """As `LayerCache` says."""
        self.states_RHRKV[row] = 0
        self.windows_RKC[row] = 0

    def _empty(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        states = torch.zeros((rows, *self._sizes), dtype=torch.float32, device=self._device)
        windows = torch.zeros((rows, *self._window), dtype=self._dtype, device=self._device)
        return states, windows


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaMixer:
    """Reads the fused projection [q, k, v | z | b | a]."""

    shape: DeltaShape
    conv_KC: torch.Tensor
    """Tap by tap, the oldest token's first."""
    rate: torch.Tensor
    """-exp(A_log), float32, one per value head."""
    dt_bias: torch.Tensor
    """Float32."""
    norm: torch.Tensor
    eps: float

    def new_cache(self) -> DeltaStates:
        """States and windows."""
        return DeltaStates(self.shape, self.conv_KC.dtype, self.conv_KC.device)

    def forward(
        self, projected_BTO: torch.Tensor, places: Places, cache: LayerCache
    ) -> torch.Tensor:
        """The mixed tokens [B, T, value width]; states and windows of rows 0..B-1 go on."""
        assert isinstance(cache, DeltaStates)
        s = self.shape
        heads = (s.key_heads, s.value_heads // s.key_heads)
        qkv, z, b, a = projected_BTO.split(
            [s.conv_channels, s.value_width, s.value_heads, s.value_heads], dim=-1
        )
        mixed = self._convolved(qkv, places, cache)
        q, k, v = mixed.float().split([s.key_width, s.key_width, s.value_width], dim=-1)
        q = _normalised(q.unflatten(-1, (s.key_heads, -1))) * s.key_dim**-0.5
        k = _normalised(k.unflatten(-1, (s.key_heads, -1)))
        g = self.rate * functional.softplus(a.float() + self.dt_bias)
        beta = b.float().sigmoid()
        if places.real_BT is not None:
            g, beta = g * places.real_BT[..., None], beta * places.real_BT[..., None]
        v, g, beta = (
            v.unflatten(-1, (*heads, -1)),
            g.unflatten(-1, heads),
            beta.unflatten(-1, heads),
        )
        out = self._ruled(q, k, v, g, beta, cache.states_RHRKV[: len(q)])
        out = rms_norm(out.flatten(2, 3), self.norm.float(), self.eps)
        gate = functional.silu(z.float()).unflatten(-1, (s.value_heads, -1))
        return (out * gate).flatten(2).to(projected_BTO.dtype)

    def _convolved(self, x_BTC: torch.Tensor, places: Places, cache: DeltaStates) -> torch.Tensor:
        """Causal convolution and SiLU; remembers the last real inputs of each row."""
        rows, count, channels = x_BTC.shape
        taps = len(self.conv_KC)
        inputs = torch.cat([cache.windows_RKC[:rows], x_BTC], dim=1)
        out = inputs[:, :count] * self.conv_KC[0]
        for tap in range(1, taps):
            out = out + inputs[:, tap : tap + count] * self.conv_KC[tap]
        if places.real_BT is None:
            newest = inputs[:, count:]
        else:
            steps = torch.arange(taps - 1, device=x_BTC.device)
            index = (places.counts_B[:, None] + steps)[..., None].expand(-1, -1, channels)
            newest = inputs.gather(1, index)
        cache.windows_RKC[:rows] = newest
        return functional.silu(out)

    def _ruled(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        if q.shape[1] == 1:
            return one_token(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state)[:, None]
        return many_tokens(q, k, v, g, beta, state)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + _NORM_EPS)
