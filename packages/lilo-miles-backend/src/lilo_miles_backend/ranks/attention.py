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

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F

from lilo_miles_backend.ranks.attention_calls import Calls, Inputs, Returned
from lilo_miles_backend.ranks.attention_plan import DenseCall, PackedCall, plan_calls
from lilo_miles_backend.ranks.autograd import AutogradContext, AutogradGrads
from lilo_miles_backend.ranks.collectives import (
    ALONE,
    Axis,
    Pending,
    gathered,
    stacking,
    summing_parts,
)
from lilo_miles_backend.ranks.kernels.attention_kernel import (
    Attended,
    AttentionGrads,
    AttentionKernels,
)
from lilo_miles_backend.ranks.megatron import TransformerConfig
from lilo_miles_backend.ranks.stream import Piece, Stream
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
    gathered: torch.Tensor
    """int64 [T * cp]."""
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, stream: Stream, device: torch.device) -> PackedRows:
        """Copy what mixers read."""
        return cls(
            positions=sent(stream.positions, device),
            lengths=stream.lengths,
            padded=stream.padded,
            gathered=torch.from_numpy(stream.gathered).to(device),
            pieces=stream.pieces,
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
        self._dense_from = None if kernels.packed is None else kernels.dense_from
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
                dense_from=self._dense_from,
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
        self._last: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def __call__(
        self, x_SBHD: torch.Tensor, positions_S: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rotate queries or keys at these positions; None: rows that start at position 0."""
        if positions_S is None:
            length = x_SBHD.shape[0]
            cos, sin = self._cos[:length], self._sin[:length]
        else:
            cos, sin = self._picked(positions_S)
        cos, sin = cos.to(x_SBHD.dtype), sin.to(x_SBHD.dtype)
        return _Rotate.apply(x_SBHD, cos, sin)  # type: ignore[no-any-return]

    def _picked(self, positions_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both tables at these positions, picked once for all layers of a microbatch."""
        if self._last is None or self._last[0] is not positions_S:
            self._last = (positions_S, self._cos[positions_S], self._sin[positions_S])
        return self._last[1], self._last[2]


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


@dataclass(slots=True, kw_only=True)
class Running:
    """What the layers of a model share about the microbatch that runs; set by `BaseModel.hidden`."""

    packed: PackedRows | None = None
    """None: whole, right-padded rows."""


class CausalAttention(torch.nn.Module):
    """Megatron's `core_attention`: grouped-query causal attention inside each row.

    No mask is needed for padding: it comes after every real token, which causality hides it from, and its own outputs
    are never read.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        rotary: Rotary,
        running: Running,
        cp: Axis = ALONE,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__()
        self._rotary = rotary
        self._running = running
        self._cp = cp
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
        assert attention_mask is None, "rows are causal; no mask is given"
        length, rows, heads, size = query_SBHD.shape
        packed = self._running.packed
        if packed is None:
            out = self._rows(self._rotary(query_SBHD), self._rotary(key_SBGD), value_SBGD)
        else:
            query = self._rotary(query_SBHD, packed.positions)
            key = self._rotary(key_SBGD, packed.positions)
            key, value = self._all_keys(key, value_SBGD, packed.gathered)
            out = self._pieces(query, key, value, packed.pieces)
        return out.reshape(length, rows, heads * size)

    def _rows(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out_BHSD = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self._scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out_BHSD.permute(2, 0, 1, 3)

    def _all_keys(
        self, key: torch.Tensor, value: torch.Tensor, order: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all ranks in stream order, exchanged together: one collective per layer."""
        if not self._cp.is_split:
            return key, value
        both = gathered(torch.cat((key, value), -1), self._cp).index_select(0, order)
        return both.chunk(2, -1)  # pyright: ignore[reportReturnType] - two parts

    def _pieces(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pieces: tuple[Piece, ...],
    ) -> torch.Tensor:
        """[T, 1, H, D]: one call per chunk of a row, or for several whole rows of one length; zeros for padding."""
        outs: list[torch.Tensor] = []
        for length, group in groupby(pieces, _whole_length):
            if length:
                here = [piece.queries for piece in group]
                rows = slice(here[0].start, here[-1].stop)
                outs.append(self._whole_rows(query[rows], key[rows], value[rows], len(here)))
                continue
            for piece in group:
                if piece.queries.stop > piece.queries.start:
                    keys, values = key[piece.keys], value[piece.keys]
                    outs.append(self._piece(query[piece.queries], keys, values))
                if piece.padding:
                    outs.append(query.new_zeros(piece.padding, *query.shape[1:]))
        whole = torch.cat(outs)
        if all(piece.queries.start == piece.queries.stop for piece in pieces):
            # Padding alone: still a node of the graph above keys and values, in whose backward the other ranks wait.
            whole = _Anchored.apply(whole, key, value)  # type: ignore[assignment]
        return whole

    def _whole_rows(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: int
    ) -> torch.Tensor:
        """Consecutive whole rows of one length: one call for all, as for a batch of rows."""
        batched = (
            x.unflatten(0, (rows, -1)).squeeze(2).transpose(0, 1) for x in (query, key, value)
        )
        return self._rows(*batched).transpose(0, 1).flatten(0, 1).unsqueeze(1)

    def _piece(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Queries that are the last ones of these keys' row so far."""
        num_queries, num_keys = query.shape[0], key.shape[0]
        if num_queries == num_keys:
            return self._rows(query, key, value)
        # A dense mask is right for a CPU's rows; a GPU's kernels take the two causal pieces and merge them instead.
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        out_BHSD = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=mask.tril(num_keys - num_queries),
            scale=self._scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out_BHSD.permute(2, 0, 1, 3)


def _whole_length(piece: Piece) -> int:
    """Tokens of a piece that is a whole row without padding, whose keys are its own; 0 for any other."""
    alone = piece.queries == piece.keys and not piece.padding
    return piece.queries.stop - piece.queries.start if alone else 0


class _Anchored(torch.autograd.Function):
    """x, with `others` below it in the graph: their gradient is zero, but it is asked for."""

    @staticmethod
    def forward(ctx: AutogradContext, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*others)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> AutogradGrads:
        return grads[0], *(torch.zeros_like(other) for other in ctx.saved_tensors)
