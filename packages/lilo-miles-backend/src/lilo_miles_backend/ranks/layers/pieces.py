"""Pieces: a stream's tokens cut so that what is wide for a moment, as an MLP's inside, never is so for all of them. Pure.

An adapter's gradient must not depend on its neighbours in the stream, to the last bit: so its tokens are cut at multiples
of the size counted from its own first one, and whole stretches are only put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lilo_miles_backend.ranks.lora import Segment


def cut_pieces(num_tokens: int, segments: Sequence[Segment], size: int) -> list[slice]:
    """Consecutive slices of at most `size` tokens that cover all, with cuts between segments or inside long ones."""
    if num_tokens <= size:
        return [slice(0, num_tokens)]
    bounds = {0, num_tokens}
    for segment in segments:
        start, stop, _ = segment.tokens.indices(num_tokens)
        bounds |= {start, stop}
    pieces: list[slice] = []
    for start, stop in pairwise(sorted(bounds)):
        for first in range(start, stop, size):
            last = min(first + size, stop)
            if pieces and last - pieces[-1].start <= size:
                pieces[-1] = slice(pieces[-1].start, last)
            else:
                pieces.append(slice(first, last))
    return pieces


def inside(segments: Sequence[Segment], piece: slice, num_tokens: int) -> tuple[Segment, ...]:
    """The segments' parts in a piece, counted from its first token."""
    if piece.start == 0 and piece.stop == num_tokens:
        return segments if isinstance(segments, tuple) else tuple(segments)
    found: list[Segment] = []
    for segment in segments:
        start, stop, _ = segment.tokens.indices(num_tokens)
        first, last = max(start, piece.start), min(stop, piece.stop)
        if first < last:
            tokens = slice(first - piece.start, last - piece.start)
            found.append(Segment(factors=segment.factors, tokens=tokens))
    return tuple(found)
