"""Short segments of several adapters, side by side: batched products for what would be many tiny ones, in torch.

With a few tokens per adapter a product costs little more than the call that starts it. So neighbours of equal lora_rank
are stacked: rows padded to the longest of them, one product for all. A segment's sums hold its own tokens and zeros, so
that nothing of a neighbour, NaN included, reaches them. `reference.py` calls this; long segments are its own.

Shapes: S segments of a run, L tokens of the longest, n of all, I and O features, k modules of a site, r lora_rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from lilo_miles_backend.ranks.lora import Factors, Segment

LONGEST = 64
"""Tokens up to which a segment is short: beyond, arithmetic outweighs the calls, and padding costs what it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """How tokens of segments of unequal lengths lie in [S, L]."""

    tokens_SL: torch.Tensor
    """[S * L]: of each place its token, counted from the run's first; padding repeats the segment's first."""
    pads_SL1: torch.Tensor
    """[S, L, 1]: whether a place is padding."""
    places_n: torch.Tensor
    """Of each token its place."""


class Run:
    """Neighbouring short segments of one lora_rank and scale."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        """Of segments that lie one after another, none of them empty."""
        first = segments[0].factors
        lengths = tuple(map(_length, segments))
        self.tokens = slice(segments[0].tokens.start, segments[-1].tokens.stop)
        self.scale, self.lora_rank = first.scale, first.lora_rank
        self._factors = [segment.factors for segment in segments]
        self._size = (len(lengths), max(lengths))
        self._padding = None if len(set(lengths)) == 1 else _padding(lengths)

    @property
    def width(self) -> int:
        """Of A's products: k * r."""
        return self._factors[0].a.shape[0]

    def shrink(self, x: torch.Tensor) -> torch.Tensor:
        """A's products of the run's tokens, [n, k * r]."""
        return self._flat(torch.bmm(self._split(x), self._a.transpose(1, 2)))

    def expand_(self, y: torch.Tensor, products: torch.Tensor, parts: Sequence[int]) -> None:
        """Add scale * B (A x) to the run's tokens of y [T, O]."""
        h_SLr, b_SOr = self._split(products), self._b
        start = 0
        for index, width in enumerate(parts):
            out, ranks = slice(start, start + width), self._ranks(index)
            self._add(y[:, out], h_SLr[..., ranks], b_SOr[:, out].transpose(1, 2), self.scale)
            start += width

    def backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        products: torch.Tensor,
        parts: Sequence[int],
        grad_x: torch.Tensor | None,
    ) -> None:
        """Add to the factors' gradients, and to the run's tokens of `grad_x` [T, I]."""
        grad_SLO, x_SLI = self._split(grad), self._split(x)
        if self._padding is not None:
            grad_SLO = grad_SLO.masked_fill(self._padding.pads_SL1, 0)
        dtype = self._factors[0].grad_a.dtype
        wide_SLO, wide_SLr = grad_SLO.to(dtype), self._split(products).to(dtype)
        b_SOr = self._b
        grad_h = grad_SLO.new_empty(*self._size, self.width)
        grad_b = wide_SLO.new_empty(b_SOr.shape)
        start = 0
        for index, width in enumerate(parts):
            out, ranks = slice(start, start + width), self._ranks(index)
            torch.bmm(grad_SLO[..., out], b_SOr[:, out], out=grad_h[..., ranks])
            torch.bmm(wide_SLO[..., out].mT, wide_SLr[..., ranks], out=grad_b[:, out])
            start += width
        grad_h *= self.scale
        grad_a = torch.bmm(grad_h.to(dtype).mT, x_SLI.to(dtype))
        _add_each([one.grad_b for one in self._factors], grad_b, self.scale)
        _add_each([one.grad_a for one in self._factors], grad_a, 1.0)
        if grad_x is not None:
            self._add(grad_x, grad_h, self._a, 1.0)

    @cached_property
    def _a(self) -> torch.Tensor:
        """[S, k * r, I]: a copy, made once; weights do not change while a microbatch runs."""
        return torch.stack([one.a for one in self._factors])

    @cached_property
    def _b(self) -> torch.Tensor:
        """[S, O, r], likewise."""
        return torch.stack([one.b for one in self._factors])

    def _ranks(self, module: int) -> slice:
        return slice(module * self.lora_rank, (module + 1) * self.lora_rank)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """The run's tokens of [T, F] as [S, L, F]; a view where they are of one length."""
        here = x[self.tokens]
        if self._padding is not None:
            here = here.index_select(0, self._padding.tokens_SL)
        return here.unflatten(0, self._size)

    def _flat(self, x_SLF: torch.Tensor) -> torch.Tensor:
        """The tokens of [S, L, F], without padding."""
        flat = x_SLF.flatten(0, 1)
        return flat if self._padding is None else flat.index_select(0, self._padding.places_n)

    def _add(self, y: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float) -> None:
        """Do y[the run's tokens] += scale * left @ right."""
        if self._padding is None:
            self._split(y).baddbmm_(left, right, alpha=scale)
        else:
            y[self.tokens].add_(self._flat(torch.bmm(left, right)), alpha=scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How segments are computed."""

    runs: tuple[Run, ...]
    """Side by side; of two segments at least."""
    others: tuple[Segment, ...]
    """One after another."""


class Segments(tuple[Segment, ...]):
    """Those of one linear in one microbatch, divided once for all products of it."""

    @cached_property
    def division(self) -> Division:
        """Runs of the short ones, and the others."""
        return _divided(self)


def divided(segments: Sequence[Segment]) -> Division:
    """The division of some segments: by their lengths and ranks alone. A lone segment is never in a run."""
    return segments.division if isinstance(segments, Segments) else _divided(segments)


def _divided(segments: Sequence[Segment]) -> Division:
    if len(segments) == 1:
        return Division(runs=(), others=tuple(segments))
    groups: list[list[Segment]] = []
    for segment in segments:
        if not _length(segment):
            continue
        if groups and _fits(groups[-1], segment):
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return Division(
        runs=tuple(Run(group) for group in groups if len(group) > 1),
        others=tuple(group[0] for group in groups if len(group) == 1),
    )


def _fits(group: Sequence[Segment], segment: Segment) -> bool:
    """Whether one goes on where the group ends, and is like it: short, of one rank and scale."""
    last = group[-1]
    return (
        last.tokens.stop == segment.tokens.start
        and _length(segment) <= LONGEST
        and _length(last) <= LONGEST
        and _kind(last.factors) == _kind(segment.factors)
    )


def _kind(factors: Factors) -> tuple[int, float]:
    return factors.lora_rank, factors.scale


def _length(segment: Segment) -> int:
    return segment.tokens.stop - segment.tokens.start


@lru_cache(maxsize=64)
def _padding(lengths: tuple[int, ...]) -> Padding:
    """Found once for all linears of a microbatch."""
    longest, start = max(lengths), 0
    tokens, pads, places = list[int](), list[bool](), list[int]()
    for index, length in enumerate(lengths):
        spare = longest - length
        tokens += [*range(start, start + length), *([start] * spare)]
        pads += [False] * length + [True] * spare
        places += range(index * longest, index * longest + length)
        start += length
    return Padding(
        tokens_SL=torch.tensor(tokens),
        pads_SL1=torch.tensor(pads).view(len(lengths), longest, 1),
        places_n=torch.tensor(places),
    )


def _add_each(buffers: list[torch.Tensor], found: torch.Tensor, scale: float) -> None:
    """Add to each segment's buffer its own; one after another, since two may be of one adapter."""
    for buffer, one in zip(buffers, found.unbind(), strict=True):
        buffer.add_(one, alpha=scale)
