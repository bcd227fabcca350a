"""Head: from hidden states to the logprob of each target and back, in one pass that never holds all logits.

    per chunk:  logits (float32) -> log-sum-exp, target logits -> logprobs -> slope of the loss -> gradient of the logits
                -> gradient of the hidden states

The slope dL/dlogprob is asked for inside the loop (`token_loss.py`), so that a chunk's logits are made once. A loss that
needs more than a chunk's own tokens has all logprobs made first (`HeadPass.logprobs`), which costs the product again
unless one chunk is all there is. The adapter of the head acts here, where it has one.

Tensor-parallel ranks hold parts of the vocabulary. They exchange two floats a token and target: each rank's
log-sum-exp and the target's logit, which one of them has. The gradient of the hidden states is partial on each rank;
the caller sums it.

Shapes: N tokens, H hidden size, V vocabulary (this rank's part), k targets per position, C tokens of a chunk,
r lora_rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from lilo_miles_backend.ranks.collectives import ALONE, Axis, stacked
from lilo_miles_backend.ranks.kernels.kernels import Logits, LoraProducts
from lilo_miles_backend.ranks.kernels.reference import REFERENCE
from lilo_miles_backend.ranks.kernels.short_segments import Segments
from lilo_miles_backend.ranks.lora import Factors, Segment

Slope: TypeAlias = Callable[[slice, torch.Tensor], torch.Tensor]
"""From a chunk's tokens and their logprobs [C, k] to dL/dlogprob, float32 [C, k]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The output layer, with the active adapter's factors for it."""

    weight_VH: torch.Tensor
    factors: Factors | None
    """Of the one adapter that acts on all tokens; None: there is none."""
    chunk_tokens: int
    segments: Segments = field(default_factory=Segments)
    """Instead of `factors`, where several adapters act: each on its own tokens, one after another."""
    first_entry: int = 0
    """Token id of this rank's first vocabulary entry."""
    tp: Axis = ALONE
    """The ranks that hold the other entries."""
    kernels: Logits = REFERENCE.logits
    lora: LoraProducts = REFERENCE.lora
    """The products of `segments`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """One chunk after its forward."""

    logits_CV: torch.Tensor
    lse_C1: torch.Tensor
    """Over all entries."""
    places_Ck: torch.Tensor
    """Each target among this rank's entries; below 0: another rank's."""
    logprobs_Ck: torch.Tensor
    products_Cr: torch.Tensor | None
    """A's products, where the head has an adapter."""


class HeadPass:
    """The head on tokens of one microbatch: those of one adapter, or of several whose segments the head names."""

    def __init__(self, hidden_NH: torch.Tensor, targets_Nk: torch.Tensor, head: Head) -> None:
        """Prepare; nothing is computed yet.

        Args:
            hidden_NH: final hidden states; not part of any graph that this class adds to.
            targets_Nk: token ids, int64.
            head: the output layer.
        """
        self._hidden = hidden_NH.detach()
        self._targets = targets_Nk
        self._head = head
        count, size = hidden_NH.shape[0], head.chunk_tokens
        self._chunks = [slice(s, min(s + size, count)) for s in range(0, count, size)]
        self._only: _Chunk | None = None

    def logprobs(self, *, keep: bool) -> torch.Tensor:
        """Logprob of each target, [N, k] in float32; what `backward` gives too.

        Args:
            keep: whether one chunk's logits may be held for a backward that follows.
        """
        found = self._empty()
        for rows in self._chunks:
            chunk = self._forward(rows)
            found[rows] = chunk.logprobs_Ck
            if keep and len(self._chunks) == 1:
                self._only = chunk
            del chunk  # before the next one's logits are made
        return found

    def backward(self, slope: Slope, grad_NH: torch.Tensor | None) -> torch.Tensor:
        """The logprobs, with the gradient of the hidden states written into `grad_NH`; None: it is not wanted.

        Adds to the gradients of the head's factors. `grad_NH` may be the hidden states themselves, which are read no
        more once a chunk is done; it is partial where the vocabulary is split.
        """
        found = self._empty()
        for rows in self._chunks:
            chunk = self._only or self._forward(rows)
            self._only = None
            found[rows] = chunk.logprobs_Ck
            out = None if grad_NH is None else grad_NH[rows]
            self._backward(rows, chunk, slope(rows, chunk.logprobs_Ck), out)
            del chunk  # before the next one's logits are made
        return found

    def _empty(self) -> torch.Tensor:
        dtype = torch.promote_types(self._hidden.dtype, torch.float32)
        return self._hidden.new_empty(self._targets.shape, dtype=dtype)

    def _forward(self, rows: slice) -> _Chunk:
        head, hidden = self._head, self._hidden[rows]
        logits = widened(hidden, head.weight_VH.t())
        products = None
        if head.factors is not None:
            factors = head.factors
            # In the logits' type: so narrow a product is bound by reading and writing the logits, whatever its type.
            products = widened(hidden, factors.a.t())
            logits.addmm_(products, factors.b.to(logits.dtype).t(), alpha=factors.scale)
        elif segments := self._segments(rows):
            products = head.lora.shrink(hidden, segments)
            head.lora.expand_(logits, products, segments, (logits.shape[1],))
        places = self._places(rows)
        lse, at_targets = head.kernels.statistics(logits, places)
        if head.tp.is_split:
            # Equal bits on every rank, since all of them add up the same parts in the same order.
            parts = stacked(torch.cat((lse, at_targets), 1), head.tp)
            lse, at_targets = torch.logsumexp(parts[:, :, :1], 0), parts[:, :, 1:].sum(0)
        return _Chunk(
            logits_CV=logits,
            lse_C1=lse,
            places_Ck=places,
            logprobs_Ck=at_targets - lse,
            products_Cr=products,
        )

    def _segments(self, rows: slice) -> Segments:
        """Those of a chunk, counted from its first token."""
        segments = self._head.segments
        if len(self._chunks) == 1:
            return segments
        cut = [
            (one.factors, max(one.tokens.start, rows.start), min(one.tokens.stop, rows.stop))
            for one in segments
        ]
        return Segments(
            Segment(factors=factors, tokens=slice(start - rows.start, stop - rows.start))
            for factors, start, stop in cut
            if start < stop
        )

    def _places(self, rows: slice) -> torch.Tensor:
        targets, head = self._targets[rows], self._head
        if not head.tp.is_split:
            return targets
        places = targets - head.first_entry
        return places.masked_fill(places >= head.weight_VH.shape[0], -1)

    def _backward(
        self, rows: slice, chunk: _Chunk, slope_Ck: torch.Tensor, out_CH: torch.Tensor | None
    ) -> None:
        head = self._head
        factors, weight = head.factors, head.weight_VH
        grad_logits = head.kernels.gradient(
            chunk.logits_CV, chunk.lse_C1, chunk.places_Ck, slope_Ck, weight.dtype
        )
        if chunk.products_Cr is not None and (segments := self._segments(rows)):
            # The hidden states, which `out_CH` may be, are read by the adapters' part.
            grad = None if out_CH is None else grad_logits @ weight
            parts = (grad_logits.shape[1],)
            head.lora.backward(
                grad_logits, self._hidden[rows], chunk.products_Cr, segments, parts, grad
            )
            if out_CH is not None and grad is not None:
                out_CH.copy_(grad)
            return
        grad_products = None
        if factors is not None and chunk.products_Cr is not None:
            grad_products = (grad_logits @ factors.b).mul_(factors.scale)
            products = chunk.products_Cr.to(grad_logits.dtype)
            _add_product(factors.grad_b, grad_logits.t(), products, factors.scale)
            _add_product(factors.grad_a, grad_products.t(), self._hidden[rows], 1.0)
        if out_CH is None:
            return
        torch.mm(grad_logits, weight, out=out_CH)
        if factors is not None and grad_products is not None:
            out_CH.addmm_(grad_products, factors.a)


def widened(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Product [C, V] with a result of float32 at least, not rounded to the operands' type on the way.

    A GPU hands out what it summed. Elsewhere the operands are widened, the right one some columns at a time.
    """
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    wide = left.float()
    result = wide.new_empty(left.shape[0], right.shape[1])
    for start in range(0, right.shape[1], _COLUMNS):
        columns = slice(start, start + _COLUMNS)
        result[:, columns] = wide @ right[:, columns].float()
    return result


_COLUMNS = 8192
"""Of a frozen weight that are widened at a time, on a CPU."""


def _add_product(
    buffer: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float
) -> None:
    """Do buffer += scale * left @ right, in the buffer's type."""
    if left.dtype == buffer.dtype:
        buffer.addmm_(left, right, alpha=scale)
    else:
        buffer.add_(widened(left, right), alpha=scale)
