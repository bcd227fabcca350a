"""DeltaMixer: a gated delta net between a layer's projections: convolution, decay, delta rule, gated norm.

Yang et al., arXiv:2412.06464, as the Qwen3.5 family has it. The projection's columns are, for this rank's heads,
[q | k | v | z | b | a]. Its linears and their adapters are the layer's; the arithmetic is `kernels/delta_*.py`, chosen
by device.

Rows of a stream never see each other: convolution and state begin anew at every row. Context-parallel ranks have two
chunks of every row, so they tell each other, once per pass, the tokens at the end of each chunk (for the convolution)
and the affine map of the state that each chunk is; from those each rank computes what enters its own. The exchange
does not grow with the length of rows.

The backward computes the forward again from the projection, but for the states that enter chunks and the chunks' own
maps, which are kept. The gradient of a state that leaves a chunk is what the next chunk's outputs have in it and, through
the next chunk's map, what leaves that one has: so it goes back along the row as the state went forth, by such maps of all
chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from lilo_miles_backend.families.shape import DeltaShape
from lilo_miles_backend.ranks.attention import PackedRows
from lilo_miles_backend.ranks.collectives import ALONE, Axis, stacked, summing_parts
from lilo_miles_backend.ranks.kernels.delta_kernels import DeltaKernels, DeltaRule, RuleInputs
from lilo_miles_backend.ranks.layers.intervals import (
    Intervals,
    chunk_place,
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
        """The mixed tokens [T, H * V]; over context-parallel ranks saves what the rule carries, states and M of intervals."""
        with torch.no_grad():
            intervals = self._intervals(rows, projected_TO.device)
            qkv, z, b, a = projected_TO.split(self._columns, -1)
            before = self._before(qkv, intervals, rows)
            rule = self._rule(qkv, before, *self._gates(b, a), intervals)
            del before
            saved: Saved = ()
            if self._cp.is_split:
                saved = rule.carry(self._enter(rule.maps(), len(rows.padded)))
            out = rule.outputs(saved)
            del rule
            mixed = self._kernels.gated_norm(out, self._by_head(z), self.norm, self._eps)
            return mixed.flatten(1), saved

    def backward(
        self,
        grad_TW: torch.Tensor,
        projected_TO: torch.Tensor,
        out_TW: torch.Tensor,
        saved: Saved,
        rows: PackedRows,
    ) -> torch.Tensor:
        """Gradient of the projection [T, O]."""
        del out_TW
        intervals = self._intervals(rows, projected_TO.device)
        qkv, z, *gates = projected_TO.split(self._columns, -1)
        grad = torch.empty_like(projected_TO)
        grad_qkv, grad_z, *grad_gates = grad.split(self._columns, -1)
        before = self._before(qkv, intervals, rows)
        with torch.enable_grad():
            gates = [gate.detach().requires_grad_() for gate in gates]
            g, beta = self._gates(*gates)
            rule = self._rule(qkv, before, g, beta, intervals)
            out = rule.outputs(saved)
        grad_out = self._kernels.gated_norm_backward(
            self._by_head(grad_TW),
            out,
            self._by_head(z),
            self.norm,
            self._eps,
            self._by_head(grad_z),
        )
        del out
        left = self._leave(rule.slopes(grad_out), len(rows.padded)) if saved else None
        found = rule.gradients(grad_out, left)
        del rule, grad_out
        of_gates = torch.autograd.grad((g, beta), gates, (found.g, found.beta))
        for whole, part in zip(grad_gates, of_gates, strict=True):
            whole.copy_(part)
        grad_before = self._kernels.convolve_backward(
            (found.q.flatten(1), found.k.flatten(1), found.v.flatten(1)),
            qkv,
            self.conv,
            before,
            intervals,
            grad_qkv,
        )
        if grad_before is not None:
            self._before_back(grad_before, grad_qkv, intervals, rows)
        return grad

    def _intervals(self, rows: PackedRows, device: torch.device) -> Intervals:
        return Intervals.of(interval_lengths(tuple(rows.padded), self._cp.size), device)

    def _gates(self, b: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log of the decay, and beta."""
        decay = -self.a_log.exp() * F.softplus(a.to(self.a_log.dtype) + self.dt_bias)
        return decay, b.to(self.a_log.dtype).sigmoid()

    def _rule(
        self,
        qkv: torch.Tensor,
        before: torch.Tensor | None,
        g: torch.Tensor,
        beta: torch.Tensor,
        intervals: Intervals,
    ) -> DeltaRule:
        q, k, v = self._kernels.convolve(qkv, self.conv, before, intervals, self._qkv)
        inputs = RuleInputs(
            q=q.unflatten(-1, (self._key_heads, self._key_dim)),
            k=k.unflatten(-1, (self._key_heads, self._key_dim)),
            v=self._by_head(v),
            g=g,
            beta=beta,
        )
        return self._kernels.rule(inputs, intervals, linked=self._cp.is_split)

    def _by_head(self, x_TW: torch.Tensor) -> torch.Tensor:
        """[T, H, V] of a [T, H * V]."""
        return x_TW.unflatten(-1, (self._value_heads, self._value_dim))

    def _before(
        self, x_TC: torch.Tensor, intervals: Intervals, rows: PackedRows
    ) -> torch.Tensor | None:
        """The tokens before each interval that the convolution sees, [I, W - 1, C]; zeros before a row begins."""
        if not self._cp.is_split:
            return None
        count = self.conv.shape[1] - 1
        tails = x_TC.index_select(0, tail_tokens(intervals.lengths, count, x_TC.device))
        every = stacked(tails, self._cp).flatten(0, 1)
        places = self._tail_places(rows, x_TC.device)
        found = every.index_select(0, places.clamp(min=0).flatten()).unflatten(0, places.shape)
        return found * (places >= 0)[..., None]

    def _before_back(
        self, grad: torch.Tensor, grad_TC: torch.Tensor, intervals: Intervals, rows: PackedRows
    ) -> None:
        """Add the gradient of what `_before` found on all ranks to that of this rank's tokens."""
        count = self.conv.shape[1] - 1
        places = self._tail_places(rows, grad.device)
        tokens = tail_tokens(intervals.lengths, count, grad.device)
        every = grad.new_zeros(self._cp.size * len(tokens), grad.shape[-1])
        real = grad * (places >= 0)[..., None]
        every.index_add_(0, places.clamp(min=0).flatten(), real.flatten(0, 1))
        own = summing_parts(every.unflatten(0, (self._cp.size, -1)), self._cp).wait()
        grad_TC.index_add_(0, tokens, own)

    def _tail_places(self, rows: PackedRows, device: torch.device) -> torch.Tensor:
        count = self.conv.shape[1] - 1
        return tail_places(tuple(rows.padded), count, self._cp.rank, self._cp.size, device)

    def _enter(self, maps: torch.Tensor, rows: int) -> torch.Tensor:
        """The state that enters each interval, from the maps of all chunks before it, [I, H, K, V]."""
        return self._along(maps, rows, range(2 * self._cp.size))

    def _leave(self, maps: torch.Tensor, rows: int) -> torch.Tensor:
        """The gradient of the state that leaves each interval, from the maps of all chunks after it, likewise."""
        return self._along(maps, rows, range(2 * self._cp.size - 1, -1, -1))

    def _along(self, maps: torch.Tensor, rows: int, chunks: Sequence[int]) -> torch.Tensor:
        """What the maps of a row's chunks make of zero before each of this rank's, in the order given."""
        size = self._cp.size
        every = stacked(maps, self._cp).unflatten(1, (rows, 2))
        own = (self._cp.rank, 2 * size - 1 - self._cp.rank)
        state = maps.new_zeros(rows * maps.shape[1], self._key_dim, self._value_dim)
        found: dict[int, torch.Tensor] = {}
        for chunk in chunks:
            if chunk in own:
                found[chunk] = state.unflatten(0, (rows, -1))
            if len(found) == len(own):
                break
            rank, half = chunk_place(chunk, size)
            here = every[rank, :, half].flatten(0, 1)
            m, b = here.split((self._key_dim, self._value_dim), -1)
            state = torch.baddbmm(b, m, state)
        return torch.stack([found[chunk] for chunk in own], 1).flatten(0, 1)
