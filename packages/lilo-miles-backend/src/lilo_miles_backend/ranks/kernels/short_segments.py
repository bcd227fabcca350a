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
from itertools import accumulate, pairwise

import torch

from lilo_miles_backend.ranks.lora import Segment

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
        self._b: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """Of A's products: k * r."""
        return self._factors[0].a.shape[0]

    def shrink(self, x: torch.Tensor) -> torch.Tensor:
        """A's products of the run's tokens, [n, k * r]."""
        return self._flat(torch.bmm(self._split(x), self._a.transpose(1, 2)))

    def expand_(self, y: torch.Tensor, products: torch.Tensor, parts: Sequence[int]) -> None:
        """Add scale * B (A x) to the run's tokens of y [T, O]."""
        b_SOh = self._b_of_all(tuple(parts))
        products_SLh = self._split(products)[..., : self.width]  # others may have more
        self._add(y, products_SLh, b_SOh.transpose(1, 2), self.scale)

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
        grad_h = torch.bmm(grad_SLO, self._b_of_all(tuple(parts))).mul_(self.scale)
        products_SLh = self._split(products)[..., : self.width]
        grad_b = torch.bmm(grad_SLO.to(dtype).mT, products_SLh.to(dtype))
        if len(parts) > 1:  # only a module's own ranks act on it
            grad_b = torch.cat([grad_b[:, out, ranks] for out, ranks in self._modules(parts)], 1)
        grad_a = torch.bmm(grad_h.to(dtype).mT, x_SLI.to(dtype))
        _add_each([one.grad_b for one in self._factors], grad_b, self.scale)
        _add_each([one.grad_a for one in self._factors], grad_a, 1.0)
        if grad_x is not None:
            self._add(grad_x, grad_h, self._a, 1.0)

    @cached_property
    def _a(self) -> torch.Tensor:
        """[S, k * r, I]: a copy, made once; weights do not change while a microbatch runs."""
        return torch.stack([one.a for one in self._factors])

    def _b_of_all(self, parts: tuple[int, ...]) -> torch.Tensor:
        """[S, O, k * r]: every module's B in its own rows and columns, zero elsewhere; made once, likewise.

        So all modules of a site are one product, which costs less than the calls for each.
        """
        if self._b is None:
            b_SOr = torch.stack([one.b for one in self._factors])
            if len(parts) == 1:
                self._b = b_SOr
            else:
                self._b = b_SOr.new_zeros(*b_SOr.shape[:2], self.width)
                for out, ranks in self._modules(parts):
                    self._b[:, out, ranks] = b_SOr[:, out]
        return self._b

    def _modules(self, parts: Sequence[int]) -> list[tuple[slice, slice]]:
        """Of each module its output features, and its columns of A's products."""
        ends, r = [0, *accumulate(parts)], self.lora_rank
        return [
            (slice(start, end), slice(index * r, (index + 1) * r))
            for index, (start, end) in enumerate(pairwise(ends))
        ]

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """The run's tokens of [T, F] as [S, L, F]; a view where they are of one length."""
        here = x[self.tokens]
        if self._padding is not None:
            here = here.index_select(0, self._padding.tokens_SL)
        return here.view(*self._size, -1)

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
    groups = _groups(
        tuple(
            (one.tokens.start, one.tokens.stop, one.factors.lora_rank, one.factors.scale)
            for one in segments
        )
    )
    return Division(
        runs=tuple(Run([segments[i] for i in group]) for group in groups if len(group) > 1),
        others=tuple(segments[group[0]] for group in groups if len(group) == 1),
    )


@lru_cache(maxsize=64)
def _groups(kinds: tuple[tuple[int, int, int, float], ...]) -> tuple[tuple[int, ...], ...]:
    """Indices of neighbours that go together, by first and last token, rank and scale; found once for all linears."""
    groups: list[list[int]] = []
    for index, (start, stop, *kind) in enumerate(kinds):
        if start == stop:
            continue
        if groups and stop - start <= LONGEST:
            first, last, *other = kinds[groups[-1][-1]]
            # It goes on where the group ends, and is like it: short, of one rank and scale.
            if last == start and last - first <= LONGEST and kind == other:
                groups[-1].append(index)
                continue
        groups.append([index])
    return tuple(map(tuple, groups))


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
    """Add to each segment's buffer its own; on a CPU one after another, since two may be of one adapter."""
    torch._foreach_add_(buffers, list(found.unbind()), alpha=scale)  # pyright: ignore[reportPrivateImportUsage]
