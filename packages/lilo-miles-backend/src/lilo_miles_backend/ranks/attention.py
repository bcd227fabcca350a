"""Attention over a stream of rows: kernel calls put together, with their backward written out.

Not a kernel (`kernels/attention_*.py`), nor the choice of calls (`attention_plan.py`), nor one call
(`attention_calls.py`). Callers are the softmax mixers, which rotate and gate around it.

    alone              dense calls over whole rows, packed calls over stretches of short ones
    context parallel   keys and values of all ranks are gathered in one collective; meanwhile each rank attends to its own
                       two chunks of a row (together plain causal attention, since the second comes after the first),
                       and then adds, merged by log-sum-exp,

                           all queries             x first chunks of the ranks before    no mask: all of them are earlier
                           second chunk's queries  x both chunks of the ranks after      likewise

                       The backward is given the merged output, so that its calls add up; the gradient of the other
                       ranks' keys and values travels during the call on the rank's own.

Every token of a row that has a real one is computed, its padding too: it comes after the real tokens, which causality
hides it from, its outputs are never read and so its gradients are zero. Chunks are attended where they lie: a call
without a mask does not ask for an order of keys, so nothing is sorted, and with two ranks nothing is copied.

Shapes: T tokens of this rank, N query heads and G key/value heads (this rank's), D head size, cp ranks along a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lilo_miles_backend.ranks.attention_calls import Calls, Inputs, Returned
from lilo_miles_backend.ranks.attention_plan import DenseCall, DenseRule, PackedCall, plan_calls
from lilo_miles_backend.ranks.collectives import ALONE, Axis, Pending, stacking, summing_parts
from lilo_miles_backend.ranks.kernels.attention_kernel import (
    Attended,
    AttentionGrads,
    AttentionKernels,
)
from lilo_miles_backend.ranks.stream import Stream
from lilo_miles_backend.ranks.transfer import sent


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """A stream as the mixers see it, made once per microbatch and read by every layer."""

    positions: torch.Tensor
    """int64 [T], on the device: place of each token in its row."""
    lengths: tuple[int, ...]
    """Real tokens of each row, over all ranks; 0: padding of the stream."""
    padded: tuple[int, ...]
    """Tokens of each row with its padding, over all ranks. A rank's share lies in one piece, first chunk first."""

    @classmethod
    def of(cls, stream: Stream, device: torch.device) -> PackedRows:
        """Copy what mixers read."""
        return cls(
            positions=sent(stream.positions, device),
            lengths=stream.lengths,
            padded=stream.padded,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Keys and values of one layer."""

    k: torch.Tensor
    """[T, G, D]."""
    v: torch.Tensor
    everywhere: Pending | None
    """All ranks' keys and values [cp, T, 2 G, D], on the way; None: no other ranks have any."""


class Attention:
    """Causal attention inside each row of a stream; one per model, shared by its layers."""

    def __init__(self, kernels: AttentionKernels, cp: Axis = ALONE) -> None:
        """Compose.

        Args:
            kernels: of this rank's device.
            cp: the ranks that have the other chunks of every row.
        """
        self.kernels = kernels.names
        """What attends, for people."""
        self._is_dense = DenseRule(kernels)
        self._cp = cp
        self._calls = Calls(kernels, cp)
        self._last: tuple[PackedRows, Sequence[DenseCall], Sequence[PackedCall]] | None = None

    def keys(self, k: torch.Tensor, v: torch.Tensor) -> Keys:
        """Hand in keys and values [T, G, D], as soon as they are known: where ranks cut rows, their exchange starts."""
        if not self._cp.is_split:
            return Keys(k=k, v=v, everywhere=None)
        both = torch.cat((k, v), 1)
        own_k, own_v = both.chunk(2, 1)
        return Keys(k=own_k, v=own_v, everywhere=stacking(both, self._cp))

    def forward(self, q: torch.Tensor, keys: Keys, rows: PackedRows, scale: float) -> Attended:
        """Attend.

        Args:
            q: [T, N, D].
            keys: of the same tokens.
            rows: the stream.
            scale: of the products, before the softmax.

        Returns:
            The output [T, N, D], and the log-sum-exps [N, T] that the backward needs.
        """
        inputs = Inputs(q=q, k=keys.k, v=keys.v, scale=scale)
        dense, packed = self._planned(rows)
        own = [self._calls.own(inputs, call) for call in dense]
        everywhere = None if keys.everywhere is None else keys.everywhere.wait()
        if everywhere is not None:
            for call, whole in zip(dense, own, strict=True):
                self._calls.merge_others(whole, inputs, everywhere, call)
        outs = [(call.tokens, one.out.flatten(0, 1)) for call, one in zip(dense, own, strict=True)]
        lses = [
            (call.tokens, one.lse.transpose(0, 1).flatten(1))
            for call, one in zip(dense, own, strict=True)
        ]
        for call in packed:
            found = self._calls.packed(inputs, everywhere, call)
            outs.append((call.tokens, found.out))
            lses.append((call.tokens, found.lse))
        return Attended(_joined(outs, q.shape[0]), _joined(lses, q.shape[0], 1))

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        keys: Keys,
        attended: Attended,
        rows: PackedRows,
        scale: float,
    ) -> AttentionGrads:
        """Gradients of q, k and v from that of the output [T, N, D]; takes what `forward` took and gave."""
        inputs = Inputs(q=q, k=keys.k, v=keys.v, scale=scale)
        returned = Returned(attended=attended, grad=grad)
        dense, packed = self._planned(rows)
        if keys.everywhere is not None:
            return self._cut_grads(inputs, returned, keys.everywhere.wait(), dense, packed)
        found = [
            (
                call.tokens,
                [one.flatten(0, 1) for one in self._calls.own_grads(inputs, returned, call)],
            )
            for call in dense
        ]
        found += [
            (call.tokens, list(self._calls.packed_grads(inputs, returned, call))) for call in packed
        ]
        return AttentionGrads(
            *(_joined([(tokens, one[i]) for tokens, one in found], q.shape[0]) for i in range(3))
        )

    def _cut_grads(
        self,
        inputs: Inputs,
        returned: Returned,
        everywhere: torch.Tensor,
        dense: Sequence[DenseCall],
        packed: Sequence[PackedCall],
    ) -> AttentionGrads:
        """Other ranks' keys first, so that their gradient travels while this rank's own are computed."""
        grad_everywhere = torch.zeros_like(everywhere)
        arguments = inputs, returned, everywhere, grad_everywhere
        others = [self._calls.others_grads(*arguments, call) for call in dense]
        parts = [(call.tokens, self._calls.cut_packed_grads(*arguments, call)) for call in packed]
        pending = summing_parts(grad_everywhere, self._cp)
        own = [self._calls.own_grads(inputs, returned, call) for call in dense]
        grad_k, grad_v = pending.wait().chunk(2, 1)
        for call, some, grads in zip(dense, others, own, strict=True):
            for queries, grad_q in some:
                grads.q[:, queries] += grad_q
            grad_k[call.tokens] += grads.k.flatten(0, 1)
            grad_v[call.tokens] += grads.v.flatten(0, 1)
            parts.append((call.tokens, grads.q.flatten(0, 1)))
        return AttentionGrads(_joined(parts, inputs.q.shape[0]), grad_k, grad_v)

    def _planned(self, rows: PackedRows) -> tuple[Sequence[DenseCall], Sequence[PackedCall]]:
        """The calls of this stream, chosen when its first layer asks."""
        if self._last is None or self._last[0] is not rows:
            calls = plan_calls(
                rows.lengths,
                rows.padded,
                cp_rank=self._cp.rank,
                cp_size=self._cp.size,
                is_dense=self._is_dense,
                device=rows.positions.device,
            )
            dense = [call for call in calls if isinstance(call, DenseCall)]
            packed = [call for call in calls if isinstance(call, PackedCall)]
            self._last = (rows, dense, packed)
        return self._last[1:]


def _joined(parts: Sequence[tuple[slice, torch.Tensor]], tokens: int, dim: int = 0) -> torch.Tensor:
    """Stretches put together along `dim`, zeros where none is; as it is where one covers all."""
    first = parts[0][1]
    covered = sum(part.shape[dim] for _, part in parts)
    if first.shape[dim] == tokens:
        return first
    shape = (*first.shape[:dim], tokens, *first.shape[dim + 1 :])
    whole = first.new_empty(shape) if covered == tokens else first.new_zeros(shape)
    for here, part in parts:
        whole.narrow(dim, here.start, here.stop - here.start).copy_(part)
    return whole
