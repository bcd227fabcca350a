"""Attention calls: one entry of a stream's plan, forward and backward, on the tokens that it is about.

`attention.py` puts them together and holds what they exchange. Shapes: T tokens of this rank, N query heads and G
key/value heads (this rank's), D head size, cp ranks along a row; a dense call has B rows of S tokens here, of which
L = S / 2 are a chunk; a packed call has t tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lilo_miles_backend.ranks.attention_plan import DenseCall, PackedCall, PackedPart
from lilo_miles_backend.ranks.collectives import Axis
from lilo_miles_backend.ranks.kernels.attention_kernel import (
    Attended,
    AttentionGrads,
    AttentionKernels,
    PackedAttention,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a layer attends with."""

    q: torch.Tensor
    """[T, N, D]."""
    k: torch.Tensor
    """[T, G, D]."""
    v: torch.Tensor
    scale: float
    """Of the products, before the softmax."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """What comes back in a backward: the forward's result and the gradient of its output."""

    attended: Attended
    """[T, N, D] and [N, T]."""
    grad: torch.Tensor
    """[T, N, D]."""


class Calls:
    """Runs calls with one device's kernels, as one of the ranks that cut the rows."""

    def __init__(self, kernels: AttentionKernels, cp: Axis) -> None:
        self._kernels = kernels
        self._cp = cp

    def own(self, inputs: Inputs, call: DenseCall) -> Attended:
        """Attention to this rank's own keys, [B, S, N, D] and [B, N, S]."""
        q, k, v = (_rows(x, call) for x in (inputs.q, inputs.k, inputs.v))
        return self._kernels.dense.forward(q, k, v, causal=True, scale=inputs.scale)

    def own_grads(self, inputs: Inputs, returned: Returned, call: DenseCall) -> AttentionGrads:
        """The gradients of `own`, [B, S, heads, D] each."""
        q, k, v = (_rows(x, call) for x in (inputs.q, inputs.k, inputs.v))
        return self._kernels.dense.backward(
            _rows(returned.grad, call),
            q,
            k,
            v,
            _attended_rows(returned.attended, call),
            causal=True,
            scale=inputs.scale,
        )

    def merge_others(
        self, whole: Attended, inputs: Inputs, everywhere: torch.Tensor, call: DenseCall
    ) -> None:
        """Add to `whole`, in place, what the other ranks' keys [cp, T, 2 G, D] contribute."""
        rows = _rows(inputs.q, call)
        for queries, keys in self._others(everywhere, call):
            k, v = keys.flatten(1, 3).chunk(2, 2)
            part = self._kernels.dense.forward(
                rows[:, queries], k, v, causal=False, scale=inputs.scale
            )
            self._kernels.merge(Attended(whole.out[:, queries], whole.lse[:, :, queries]), part)

    def others_grads(
        self,
        inputs: Inputs,
        returned: Returned,
        everywhere: torch.Tensor,
        grad_everywhere: torch.Tensor,
        call: DenseCall,
    ) -> list[tuple[slice, torch.Tensor]]:
        """Gradients from the other ranks' keys: of some queries [B, some, N, D] each, and of those keys, written."""
        rows, grad = _rows(inputs.q, call), _rows(returned.grad, call)
        attended = _attended_rows(returned.attended, call)
        targets = (keys for _, keys in self._others(grad_everywhere, call))
        found: list[tuple[slice, torch.Tensor]] = []
        for (queries, keys), target in zip(self._others(everywhere, call), targets, strict=True):
            k, v = keys.flatten(1, 3).chunk(2, 2)
            seen = Attended(attended.out[:, queries], attended.lse[:, :, queries])
            grads = self._kernels.dense.backward(
                grad[:, queries], rows[:, queries], k, v, seen, causal=False, scale=inputs.scale
            )
            for part, one in zip(target.chunk(2, 4), (grads.k, grads.v), strict=True):
                part.copy_(one.unflatten(1, target.shape[1:4]))
            found.append((queries, grads.q))
        return found

    def _others(
        self, everywhere: torch.Tensor, call: DenseCall
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Which queries see keys of other ranks, and those: views [B, ranks, chunks, L, 2 G, D]."""
        halves = everywhere[:, call.tokens].unflatten(1, (call.rows, 2, -1)).transpose(0, 1)
        rank, ranks = self._cp.rank, self._cp.size
        if rank > 0:
            yield slice(None), halves[:, :rank, :1]
        if rank + 1 < ranks:
            yield slice(call.length // 2, None), halves[:, rank + 1 :]

    def packed(self, inputs: Inputs, everywhere: torch.Tensor | None, call: PackedCall) -> Attended:
        """Attention of a stretch to all its keys, [t, N, D] and [N, t]."""
        q = inputs.q[call.tokens]
        found: list[Attended] = []
        for part in call.parts:
            k, v = _part_keys(inputs, everywhere, call, part)
            found.append(
                self._packed.forward(_picked(q, part), k, v, part.bounds, scale=inputs.scale)
            )
        if call.parts[0].queries is None:
            return found[0]
        out, lse = torch.empty_like(q), found[0].lse.new_empty(q.shape[1], q.shape[0])
        for part, one in zip(call.parts, found, strict=True):
            assert part.queries is not None, "a cut stretch has one part per chunk"
            out.index_copy_(0, part.queries, one.out)
            lse.index_copy_(1, part.queries, one.lse)
        return Attended(out, lse)

    def packed_grads(self, inputs: Inputs, returned: Returned, call: PackedCall) -> AttentionGrads:
        """The gradients of `packed` where no other ranks have keys, [t, heads, D] each."""
        (part,) = call.parts
        return self._part_grads(inputs, returned, None, call, part)

    def cut_packed_grads(
        self,
        inputs: Inputs,
        returned: Returned,
        everywhere: torch.Tensor,
        grad_everywhere: torch.Tensor,
        call: PackedCall,
    ) -> torch.Tensor:
        """Gradient of the queries [t, N, D]; adds that of all ranks' keys, this one's too."""
        grad_q = torch.empty_like(inputs.q[call.tokens])
        for part in call.parts:
            grads = self._part_grads(inputs, returned, everywhere, call, part)
            assert part.queries is not None, "a cut stretch has one part per chunk"
            assert part.keys is not None, "a cut stretch has keys of several ranks"
            grad_q.index_copy_(0, part.queries, grads.q)
            # Each key is once in a part, so the order of additions is that of the parts.
            both = torch.cat((grads.k, grads.v), 1)
            grad_everywhere.flatten(0, 1).index_add_(0, part.keys, both)
        return grad_q

    def _part_grads(
        self,
        inputs: Inputs,
        returned: Returned,
        everywhere: torch.Tensor | None,
        call: PackedCall,
        part: PackedPart,
    ) -> AttentionGrads:
        k, v = _part_keys(inputs, everywhere, call, part)
        out, lse = returned.attended
        lse = lse[:, call.tokens]
        if part.queries is not None:
            lse = lse.index_select(1, part.queries)
        return self._packed.backward(
            _picked(returned.grad[call.tokens], part),
            _picked(inputs.q[call.tokens], part),
            k,
            v,
            Attended(_picked(out[call.tokens], part), lse),
            part.bounds,
            scale=inputs.scale,
        )

    @property
    def _packed(self) -> PackedAttention:
        packed = self._kernels.packed
        assert packed is not None, "a packed call was planned without a kernel for it"
        return packed


def _rows(x: torch.Tensor, call: DenseCall) -> torch.Tensor:
    """[T, heads, D] -> [B, S, heads, D], a view."""
    return x[call.tokens].unflatten(0, (call.rows, call.length))


def _attended_rows(attended: Attended, call: DenseCall) -> Attended:
    lse = attended.lse[:, call.tokens].unflatten(1, (call.rows, call.length))
    return Attended(_rows(attended.out, call), lse.transpose(0, 1))


def _picked(x: torch.Tensor, part: PackedPart) -> torch.Tensor:
    return x if part.queries is None else x.index_select(0, part.queries)


def _part_keys(
    inputs: Inputs, everywhere: torch.Tensor | None, call: PackedCall, part: PackedPart
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a packed call, rows one after another."""
    if part.keys is None or everywhere is None:
        return inputs.k[call.tokens], inputs.v[call.tokens]
    k, v = everywhere.flatten(0, 1).index_select(0, part.keys).chunk(2, 1)
    return k, v
