"""The gated delta net in torch: for any device, float64 included; what runs on CPU, and what other kernels are checked with.

The rule in chunks: inside a chunk of C tokens a triangular system is solved for all chunks at once, after which each
chunk is a map of the state, S_out = M S_in + B; the only loop is one small product per chunk. With the decays up to each
token d_i = sum of g, and all products restricted to earlier tokens,

    (I + beta (K K^T) exp(d_i - d_j)) [U | W] = beta [V | K exp(d)]
    M = exp(d_C) - (K exp(d_C - d))^T W,  B = (K exp(d_C - d))^T U
    o = Q exp(d) S + (Q K^T) exp(d_i - d_j) (U - W S)

Arithmetic in float32, or float64 where the inputs are.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lilo_miles_backend.ranks.kernels.delta_kernels import RuleInputs, Three, Widths
from lilo_miles_backend.ranks.layers.intervals import Intervals
from lilo_miles_backend.ranks.layers.mixer import Saved

MIN_CHUNK = 32
"""Below it the loop over chunks costs more than the larger triangular systems do."""

NORM_EPS = 1e-6
"""Added to the squared length of keys and queries."""


class TorchDelta:
    """`DeltaKernels` in torch."""

    def convolve(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        before: torch.Tensor | None,
        intervals: Intervals,
        widths: Widths,
    ) -> Three:
        """See `DeltaPieces.convolve`."""
        tokens, channels = x_TC.shape
        width = weight_CW.shape[1]
        if before is None:
            before = x_TC.new_zeros(len(intervals.lengths), width - 1, channels)
        # Each interval with the tokens before it, one after another: then the window never reaches into another one.
        parts = x_TC.split(intervals.lengths)
        longer = torch.cat([part for pair in zip(before, parts, strict=True) for part in pair])
        shift = _up(longer), _up(weight_CW)
        starts = torch.arange(len(intervals.lengths), device=x_TC.device) * (width - 1)
        lengths = intervals.bounds.diff()
        places = torch.arange(tokens, device=x_TC.device) + starts.repeat_interleave(lengths)
        y = sum(shift[0][places + tap] * shift[1][:, tap] for tap in range(width))
        q, k, v = F.silu(y).to(x_TC.dtype).split(widths, -1)  # type: ignore[arg-type] # a sum of tensors
        return q, k, v

    def convolve_backward(
        self,
        grads: Three,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        before: torch.Tensor | None,
        intervals: Intervals,
        grad_x: torch.Tensor,
    ) -> torch.Tensor | None:
        """See `DeltaPieces.convolve_backward`."""
        q, k, v = (grad.shape[1] for grad in grads)
        with torch.enable_grad():
            x = x_TC.detach().requires_grad_()
            first = None if before is None else before.detach().requires_grad_()
            outs = self.convolve(x, weight_CW, first, intervals, (q, k, v))
        sources = (x,) if first is None else (x, first)
        found, *of_before = torch.autograd.grad(outs, sources, grads)
        grad_x.copy_(found)
        return of_before[0] if of_before else None

    def rule(self, inputs: RuleInputs, intervals: Intervals, *, linked: bool) -> TorchRule:
        """See `DeltaKernels.rule`."""
        del linked
        return TorchRule(inputs, intervals)

    def gated_norm(
        self, x_THV: torch.Tensor, gate_THV: torch.Tensor, weight_V: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `DeltaPieces.gated_norm`."""
        normed = F.rms_norm(_up(x_THV), weight_V.shape, _up(weight_V).to(_up(x_THV).dtype), eps)
        return (normed * F.silu(_up(gate_THV))).to(x_THV.dtype)

    def gated_norm_backward(
        self,
        grad_THV: torch.Tensor,
        x_THV: torch.Tensor,
        gate_THV: torch.Tensor,
        weight_V: torch.Tensor,
        eps: float,
        grad_gate: torch.Tensor,
    ) -> torch.Tensor:
        """See `DeltaPieces.gated_norm_backward`."""
        with torch.enable_grad():
            x, gate = (t.detach().requires_grad_() for t in (x_THV, gate_THV))
            out = self.gated_norm(x, gate, weight_V, eps)
        of_x, of_gate = torch.autograd.grad(out, (x, gate), grad_THV)
        grad_gate.copy_(of_gate)
        return of_x


class TorchRule:
    """`DeltaRule` in torch; its backward is autograd's, of what ran where gradients were enabled."""

    def __init__(self, inputs: RuleInputs, intervals: Intervals) -> None:
        """Compute what does not depend on the states."""
        q, k, v, g, beta = (
            x.detach().requires_grad_(torch.is_grad_enabled())
            for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
        )
        self._inputs = (q, k, v, g, beta)
        groups, size = k.shape[1:]
        self._shared = (groups, v.shape[1] // groups)
        self._chunks = chunks = _Chunks.of(intervals, max(MIN_CHUNK, size))
        self._terms = _terms(
            *(chunks.cut(t, groups) for t in (_unit(q) * size**-0.5, _unit(k), _up(v))),
            *(chunks.cut(_up(t), groups) for t in (g, beta)),
        )
        self._m: torch.Tensor | None = None
        self._entered: torch.Tensor | None = None
        self._out: torch.Tensor | None = None
        self._left: torch.Tensor | None = None

    def maps(self) -> torch.Tensor:
        """See `DeltaRule.maps`."""
        with torch.no_grad():
            return _composed(self._terms, self._chunks).flatten(0, 1).movedim(1, 0)

    def carry(self, entered: torch.Tensor) -> Saved:
        """See `DeltaRule.carry`."""
        return entered, self.maps()[..., : self._terms.m.shape[-1]].contiguous()

    def outputs(self, carried: Saved) -> torch.Tensor:
        """See `DeltaRule.outputs`."""
        values = self._inputs[2]
        if carried:
            entered, self._m = carried
        else:
            shape = len(self._chunks.counts), values.shape[1], self._terms.m.shape[-1]
            entered = self._terms.m.new_zeros(*shape, values.shape[-1])
        self._entered = entered.detach().requires_grad_(torch.is_grad_enabled())
        first = self._entered.movedim(0, 1).unflatten(0, self._shared)
        states = _entering(self._terms, self._chunks, first)
        self._left = _leaving(self._terms, self._chunks, states).flatten(0, 1).movedim(1, 0)
        self._out = self._chunks.joined(_outputs(self._terms, states)).to(values.dtype)
        return self._out.detach()

    def slopes(self, grad_THV: torch.Tensor) -> torch.Tensor:
        """See `DeltaRule.slopes`."""
        assert self._out is not None, "outputs came before"
        assert self._entered is not None, "likewise"
        assert self._m is not None, "and were carried"
        (own,) = torch.autograd.grad(self._out, self._entered, grad_THV, retain_graph=True)
        return torch.cat((self._m.mT, own), -1)

    def gradients(self, grad_THV: torch.Tensor, left: torch.Tensor | None) -> RuleInputs:
        """See `DeltaRule.gradients`."""
        assert self._out is not None, "outputs came before"
        assert self._left is not None, "likewise"
        outs, grads = [self._out], [grad_THV]
        if left is not None:
            outs, grads = [*outs, self._left], [*grads, left]
        q, k, v, g, beta = torch.autograd.grad(outs, self._inputs, grads)
        return RuleInputs(q=q, k=k, v=v, g=g, beta=beta)


def _up(x: torch.Tensor) -> torch.Tensor:
    """At least float32."""
    return x if x.dtype == torch.float64 else x.float()


def _unit(x: torch.Tensor) -> torch.Tensor:
    x = _up(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunks:
    """How intervals are cut into chunks of one size, the last of each padded with tokens that leave the state alone."""

    size: int
    counts: tuple[int, ...]
    """Chunks of each interval."""
    places: torch.Tensor
    """int64 [T]: where each token lies among the padded ones."""

    @classmethod
    def of(cls, intervals: Intervals, longest: int) -> _Chunks:
        """Chunks of at most `longest` tokens."""
        size = min(longest, max(intervals.lengths))
        counts = tuple(-(-length // size) for length in intervals.lengths)
        lengths = intervals.bounds.diff()
        padding = (lengths + size - 1) // size * size - lengths
        skipped = (padding.cumsum(0) - padding).repeat_interleave(lengths)
        tokens = torch.arange(sum(intervals.lengths), device=intervals.bounds.device)
        return cls(size=size, counts=counts, places=tokens + skipped)

    def cut(self, x: torch.Tensor, groups: int) -> torch.Tensor:
        """From [T, heads, D] to [G, heads / G, N, C, D], or [T, heads] to [G, heads / G, N, C]; padding is zero.

        A padded token with k = v = g = beta = 0 maps the state to itself.
        """
        padded = x.new_zeros(sum(self.counts) * self.size, *x.shape[1:])
        padded = padded.index_copy(0, self.places, x)
        cut = padded.unflatten(0, (-1, self.size)).unflatten(2, (groups, -1))
        return cut.permute(2, 3, 0, 1, *range(4, cut.dim()))

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """From [G, R, N, C, D] back to [T, G * R, D]."""
        return x.permute(2, 3, 0, 1, 4).flatten(2, 3).flatten(0, 1).index_select(0, self.places)

    def steps(self) -> list[tuple[list[int], list[int]]]:
        """For j = 0, 1, ...: the intervals that have a j-th chunk, and which of all chunks it is."""
        firsts = [sum(self.counts[:index]) for index in range(len(self.counts))]
        found: list[tuple[list[int], list[int]]] = []
        for j in range(max(self.counts)):
            active = [i for i, count in enumerate(self.counts) if count > j]
            found.append((active, [firsts[i] + j for i in active]))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """What does not depend on the state that enters a chunk; leading dimensions [G, R, N]."""

    q: torch.Tensor
    attention: torch.Tensor
    u: torch.Tensor
    w: torch.Tensor
    m: torch.Tensor
    b: torch.Tensor


def _terms(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> _Terms:
    size, width = k.shape[-2], k.shape[-1]
    decay_to = g.cumsum(-1)
    last = decay_to[..., -1:]
    seen = torch.ones(size, size, dtype=torch.bool, device=k.device).tril()
    between = decay_to[..., :, None] - decay_to[..., None, :]
    decay = between.masked_fill(~seen, -torch.inf).exp()
    system = (k @ k.transpose(-1, -2)) * decay * beta[..., None]
    right = torch.cat((v, (k * decay_to.exp()[..., None]).expand(*v.shape[:-1], width)), -1)
    # Only the strict lower triangle of the system is read.
    solved = torch.linalg.solve_triangular(
        system, right * beta[..., None], upper=False, unitriangular=True
    )
    u, w = solved.split((v.shape[-1], width), -1)
    to_end = (k * (last - decay_to).exp()[..., None]).transpose(-1, -2)
    whole_decay = torch.diag_embed(last.exp().expand(*last.shape[:-1], width))
    return _Terms(
        q=q * decay_to.exp()[..., None],
        attention=(q @ k.transpose(-1, -2)) * decay,
        u=u,
        w=w,
        m=whole_decay - to_end @ w,
        b=to_end @ u,
    )


def _composed(terms: _Terms, chunks: _Chunks) -> torch.Tensor:
    """The map of each interval, [G, R, I, K, K + V]."""
    width = terms.m.shape[-1]
    both = torch.cat((terms.m, terms.b), -1)
    maps: torch.Tensor | None = None
    for active, which in chunks.steps():
        here = both[:, :, which]
        if maps is None:
            maps = here
            continue
        before = maps[:, :, active]
        m, b = here.split((width, here.shape[-1] - width), -1)
        after = m @ before + F.pad(b, (width, 0))
        maps = maps.index_copy(2, torch.tensor(active, device=maps.device), after)
    assert maps is not None, "a stream has intervals"
    return maps


def _entering(terms: _Terms, chunks: _Chunks, entered: torch.Tensor) -> torch.Tensor:
    """The state that enters each chunk, [G, R, N, K, V]; `entered` [G, R, I, K, V] enters the intervals."""
    # The j-th chunks of the intervals that have one are as many as a prefix of `state`, which shrinks with j.
    state, alive = entered, list(range(len(chunks.counts)))
    states: list[torch.Tensor] = []
    order: list[int] = []
    for active, which in chunks.steps():
        if active != alive:
            state = state[:, :, [alive.index(i) for i in active]]
            alive = active
        states.append(state)
        order += which
        state = terms.m[:, :, which] @ state + terms.b[:, :, which]
    back = torch.empty(len(order), dtype=torch.int64)
    back[order] = torch.arange(len(order))
    return torch.cat(states, 2).index_select(2, back.to(terms.m.device))


def _leaving(terms: _Terms, chunks: _Chunks, states: torch.Tensor) -> torch.Tensor:
    """The state that leaves each interval, [G, R, I, K, V], from those that enter chunks."""
    lasts = [count - 1 for count in itertools.accumulate(chunks.counts)]
    return terms.m[:, :, lasts] @ states[:, :, lasts] + terms.b[:, :, lasts]


def _outputs(terms: _Terms, state: torch.Tensor) -> torch.Tensor:
    return terms.q @ state + terms.attention @ (terms.u - terms.w @ state)
