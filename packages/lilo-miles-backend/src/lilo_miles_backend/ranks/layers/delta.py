"""DeltaMixer: a gated delta net between a layer's projections: convolution, decay, delta rule, gated norm.

Yang et al., arXiv:2412.06464, as the Qwen3.5 family has it. The projection's columns are, for this rank's heads,
[q | k | v | z | b | a]. Its linears and their adapters are the layer's; the arithmetic is `kernels/delta_*.py`, chosen
by device.

Rows of a stream never see each other: convolution and state begin anew at every row. Context-parallel ranks have two
chunks of every row, so they tell each other, once per pass, the tokens at the end of each chunk (for the convolution)
and the affine map of the state that each chunk is; from those each rank computes what enters its own. The exchange
does not grow with the length of rows.

The backward computes the forward again from the projection, with autograd, exchange included.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from lilo_miles_backend.families.shape import DeltaShape
from lilo_miles_backend.ranks.attention import PackedRows
from lilo_miles_backend.ranks.collectives import ALONE, Axis, gathered
from lilo_miles_backend.ranks.kernels.delta_kernels import DeltaKernels
from lilo_miles_backend.ranks.layers.intervals import (
    Intervals,
    chunk_order,
    interval_lengths,
    tail_places,
    tail_tokens,
)
from lilo_miles_backend.ranks.layers.mixer import Saved


class DeltaMixer(torch.nn.Module):
    """One layer's gated delta net; a `Mixer`."""

    def __init__(
        self,
        *,
        shape: DeltaShape,
        kernels: DeltaKernels,
        eps: float,
        dtype: torch.dtype,
        tp: Axis = ALONE,
        cp: Axis = ALONE,
    ) -> None:
        """Make the small weights, unset; they are read from files.

        Args:
            shape: the whole model's.
            kernels: of the device.
            eps: of the norm.
            dtype: what the model computes in; decay and norm are kept in float32 at least.
            tp: ranks that have other heads.
            cp: ranks that have other chunks of each row.
        """
        super().__init__()
        self._kernels, self._eps, self._cp = kernels, eps, cp
        self._key_heads, self._value_heads = (
            shape.key_heads // tp.size,
            shape.value_heads // tp.size,
        )
        self._key_dim, self._value_dim = shape.key_dim, shape.value_dim
        keys, values = self._key_heads * shape.key_dim, self._value_heads * shape.value_dim
        self._qkv = (keys, keys, values)
        self._columns = (sum(self._qkv), values, self._value_heads, self._value_heads)
        small = torch.promote_types(dtype, torch.float32)
        self.conv = torch.nn.Parameter(torch.empty(sum(self._qkv), shape.conv_kernel, dtype=dtype))
        self.a_log = torch.nn.Parameter(torch.empty(self._value_heads, dtype=small))
        self.dt_bias = torch.nn.Parameter(torch.empty(self._value_heads, dtype=small))
        self.norm = torch.nn.Parameter(torch.empty(shape.value_dim, dtype=small))

    def forward(self, projected_TO: torch.Tensor, rows: PackedRows) -> tuple[torch.Tensor, Saved]:
        """The mixed tokens [T, H * V]; nothing is saved, the backward needs the projection alone."""
        with torch.no_grad():
            return self._mix(projected_TO, rows), ()

    def backward(
        self,
        grad_TW: torch.Tensor,
        projected_TO: torch.Tensor,
        out_TW: torch.Tensor,
        saved: Saved,
        rows: PackedRows,
    ) -> torch.Tensor:
        """Gradient of the projection [T, O]."""
        del out_TW, saved
        with torch.enable_grad():
            projected = projected_TO.detach().requires_grad_()
            out = self._mix(projected, rows)
            (grad,) = torch.autograd.grad(out, projected, grad_TW)
        return grad

    def _mix(self, projected_TO: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        padded = tuple(rows.padded)
        lengths = interval_lengths(padded, self._cp.size)
        intervals = Intervals.of(lengths, projected_TO.device)
        qkv, z, b, a = projected_TO.split(self._columns, -1)
        before = self._before(qkv, intervals, padded) if self._cp.is_split else None
        mixed = self._kernels.convolve(qkv, self.conv, before, intervals)
        q, k, v = mixed.split(self._qkv, -1)
        out = self._kernels.rule(
            q.unflatten(-1, (self._key_heads, self._key_dim)),
            k.unflatten(-1, (self._key_heads, self._key_dim)),
            v.unflatten(-1, (self._value_heads, self._value_dim)),
            -self.a_log.exp() * F.softplus(a.to(self.a_log.dtype) + self.dt_bias),
            b.to(self.a_log.dtype).sigmoid(),
            intervals,
            functools.partial(self._enter, rows=len(padded)) if self._cp.is_split else None,
        )
        gate = z.unflatten(-1, (self._value_heads, self._value_dim))
        return self._kernels.gated_norm(out, gate, self.norm, self._eps).flatten(1)

    def _before(
        self, x_TC: torch.Tensor, intervals: Intervals, padded: tuple[int, ...]
    ) -> torch.Tensor:
        """The tokens before each interval that the convolution sees, [I, W - 1, C]; zeros before a row begins."""
        count = self.conv.shape[1] - 1
        tails = x_TC.index_select(0, tail_tokens(intervals.lengths, count, x_TC.device))
        every = gathered(tails, self._cp)
        places = tail_places(padded, count, self._cp.rank, self._cp.size, x_TC.device)
        found = every.index_select(0, places.clamp(min=0).flatten()).unflatten(0, places.shape)
        return found * (places >= 0)[..., None]

    def _enter(self, maps: torch.Tensor, *, rows: int) -> torch.Tensor:
        """The state that enters each interval, from the maps of all chunks before it, [I, H, K, V]."""
        size, last = self._cp.size, 2 * self._cp.size - 1
        order = chunk_order(rows, size, maps.device)
        every = gathered(maps, self._cp)
        own = (self._cp.rank, last - self._cp.rank)
        width = self._key_dim
        state = maps.new_zeros(rows, *maps.shape[1:-1], self._value_dim)
        entering: list[torch.Tensor] = []
        for chunk in range(own[1] + 1):
            if chunk in own:
                entering.append(state)
            if chunk < own[1]:
                here = every.index_select(0, order[chunk])
                m, b = here.split((width, self._value_dim), -1)
                state = m @ state + b
        return torch.stack(entering, 1).flatten(0, 1)
