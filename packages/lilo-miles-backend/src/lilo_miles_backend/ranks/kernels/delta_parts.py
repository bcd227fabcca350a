"""Parts: intervals cut so that their states can be computed side by side.

The only sequential thing in a gated delta net is its state, chunk by chunk; a few long intervals leave most of a GPU idle
there. Where ranks pass maps of their intervals on, maps of parts of them cost no more, and then a part is to its interval
what an interval is to its row: its own map, the state that enters it, and on the way back the same of the gradients.

Torch in float32, a few small products for each part of the longest interval; `delta_fla.py` calls it.

Shapes: I intervals of P parts in all, S of the longest, H heads, K and V their sizes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from lilo_miles_backend.ranks.layers.intervals import Intervals
from lilo_miles_backend.ranks.transfer import sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Of one stream's intervals; made once per shape."""

    intervals: Intervals
    """The parts, as intervals."""
    longest: int
    """S."""
    places: torch.Tensor
    """int64 [I * S]: which part is the s-th of each interval; P where it has none."""
    inside: torch.Tensor
    """int64 [P]: where each part is among those."""

    @classmethod
    def of(cls, intervals: Intervals, tokens: int) -> Parts:
        """Parts of so many tokens, but for the last of each interval, which has what is left."""
        return _cut(intervals.lengths, tokens, intervals.bounds.device)

    def composed(self, maps: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        """The map [M | B] of each interval, [I, H, K, K + V], from those of its parts [P, ...].

        Args:
            maps: of the parts.
            back: the last part's comes first, as with gradients.
        """
        if self.longest == 1:
            return maps
        first, *others = self._in_order(maps, back)
        size = maps.shape[-2]
        for here in others:
            # The columns of B as they come, and nothing to add to those of M.
            added = torch.nn.functional.pad(here[..., size:], (size, 0))
            first = torch.baddbmm(added, here[..., :size], first)
        return first.unflatten(0, (-1, maps.shape[1]))

    def states(
        self, maps: torch.Tensor, first: torch.Tensor, *, back: bool = False
    ) -> torch.Tensor:
        """What comes before each part, [P, H, K, V], from what comes before its interval [I, H, K, V]."""
        if self.longest == 1:
            return first
        size, state = maps.shape[-2], first.flatten(0, 1)
        found: list[torch.Tensor] = []
        for here in self._in_order(maps, back):
            found.append(state)
            state = torch.baddbmm(here[..., size:], here[..., :size], state)
        if back:
            found.reverse()
        every = torch.stack(found, 1).unflatten(0, (-1, maps.shape[1])).transpose(1, 2)
        every = every.flatten(0, 1).contiguous()
        return every if len(self.inside) == len(every) else every.index_select(0, self.inside)

    def _in_order(self, maps: torch.Tensor, back: bool) -> list[torch.Tensor]:
        """The s-th parts of all intervals, [I * H, K, K + V] each; of one that has none, what changes nothing."""
        if len(self.inside) == len(self.places):
            every = maps.unflatten(0, (-1, self.longest))
            found = [every[:, index].flatten(0, 1) for index in range(self.longest)]
            return found[::-1] if back else found
        nothing = torch.eye(*maps.shape[-2:], device=maps.device, dtype=maps.dtype)
        known = torch.cat((maps, nothing.expand(1, *maps.shape[1:])))
        every = known.index_select(0, self.places).unflatten(0, (-1, self.longest))
        found = [here.flatten(0, 1) for here in every.unbind(1)]
        return found[::-1] if back else found


@functools.lru_cache(maxsize=4)
def _cut(lengths: tuple[int, ...], tokens: int, device: torch.device) -> Parts:
    counts = [-(-length // tokens) for length in lengths]
    longest, total = max(counts), sum(counts)
    places = np.full((len(lengths), longest), total, dtype=np.int64)
    places[np.arange(longest) < np.array(counts)[:, None]] = np.arange(total)
    inside = np.flatnonzero(places.reshape(-1) < total)
    cut = [min(tokens, length - start) for length in lengths for start in range(0, length, tokens)]
    return Parts(
        intervals=Intervals.of(cut, device),
        longest=longest,
        places=sent(places.reshape(-1), device),
        inside=sent(inside, device),
    )
