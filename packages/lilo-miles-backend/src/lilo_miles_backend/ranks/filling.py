"""Filling: which rows a rank computes, which of them together, and how long a stream is made. Pure arithmetic.

    share     rows over data-parallel ranks, by what they cost
    fill      a rank's rows into microbatches, by their tokens
    bucket    a stream's length, rounded up to one of few

Each depends on nothing but its arguments, so that all ranks decide alike and an item's cut does not depend on others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCost:
    """Operations of a row: per_token * n + per_pair * n^2, in any unit."""

    per_token: float = 1.0
    per_pair: float = 0.0
    """Of two tokens of which one sees the other, halved; softmax attention's."""

    def of(self, length: int) -> float:
        """Of a row of so many tokens."""
        return self.per_token * length + self.per_pair * length * length


BY_TOKENS = RowCost()
"""Every token costs the same."""


def share(lengths: Sequence[int], ranks: int, cost: RowCost = BY_TOKENS) -> list[list[int]]:
    """Rows of each data-parallel rank, of about equal cost; ranks beyond the number of rows get none.

    Costliest first, each to the rank with the least so far: Graham, "Bounds on multiprocessing timing anomalies", 1969;
    at most 4/3 of the best there is. Equal rows keep the client's order.
    """
    if ranks == 1:
        return [list(range(len(lengths)))]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for index in _longest_first(lengths):
        least = loads.index(min(loads))
        shares[least].append(index)
        loads[least] += cost.of(lengths[index])
    return [sorted(rows) for rows in shares]


def fill(sizes: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """Rows of each microbatch, none over `capacity` but where one row alone is.

    First fit, longest first: Johnson, 1973; at most 11/9 of the fewest microbatches and one. Rows of a microbatch are
    longest first, equal ones in the client's order.

    Args:
        sizes: padded tokens of each row.
        capacity: tokens of a microbatch over all ranks that share its rows.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    previous, first = -1, 0
    for index in _longest_first(sizes):
        size = sizes[index]
        if size != previous:
            previous, first = size, 0
        # What an equal row before found full is full for this one.
        while first < len(room) and room[first] < size:
            first += 1
        if first == len(room):
            groups.append([])
            room.append(capacity)
        groups[first].append(index)
        room[first] -= size
    return [tuple(group) for group in groups]


def bucket(tokens: int, multiple: int, capacity: int) -> int:
    """Length that a stream of `tokens` is padded to: in steps of an eighth of the power of two below it.

    So a range of lengths up to 2^k has 8 k sizes at most, and less than an eighth of a stream is padding. The capacity
    is never passed for it.

    Args:
        tokens: of the rows with their own padding; a multiple of `multiple`.
        multiple: what the layout needs a row to divide by.
        capacity: tokens of a microbatch; a stream that is over it stays as it is.
    """
    assert tokens % multiple == 0, (tokens, multiple)
    step = math.lcm(multiple, max(_LEAST_STEP, 1 << max(tokens.bit_length() - 4, 0)))
    padded = -(-tokens // step) * step
    return padded if padded <= capacity else max(tokens, capacity // multiple * multiple)


_LEAST_STEP = 16
"""Kernels are built for lengths that divide by 16, and for others again."""


def _longest_first(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda index: -sizes[index])
