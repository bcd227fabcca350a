"""Attention and rotary embedding: our modules that Megatron builds in place of its own.

The stock ones need CUDA or TransformerEngine. They enter through `ModuleSpec` (`model.py`), so that everything
around them stays Megatron's. Norms and the gated activation are in `elementwise.py`.

A microbatch is either a batch of whole, right-padded rows, or a stream of packed rows (`stream.py`), of which a
context-parallel rank has a part: then the keys and values of all ranks are gathered once per layer.

Shapes: S tokens of a row, B rows, H query heads, G key/value heads (this rank's), D head size; T tokens of this rank's
part of a stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F

from lilo_miles_backend.ranks.autograd import AutogradContext, AutogradGrads
from lilo_miles_backend.ranks.collectives import ALONE, Axis, gathered
from lilo_miles_backend.ranks.megatron import TransformerConfig
from lilo_miles_backend.ranks.stream import Piece, Stream


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """A stream's arrays on the device, made once per microbatch and read by every layer."""

    positions: torch.Tensor
    """int64 [T]."""
    gathered: torch.Tensor
    """int64 [T * cp]."""
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, stream: Stream, device: torch.device) -> PackedRows:
        """Copy what attention reads."""
        return cls(
            positions=torch.from_numpy(stream.positions).to(device),
            gathered=torch.from_numpy(stream.gathered).to(device),
            pieces=stream.pieces,
        )


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
