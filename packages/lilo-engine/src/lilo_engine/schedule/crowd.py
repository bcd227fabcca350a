"""Crowd: whether all who wait can still be served in time, one per turn. Pure.

Each one came at some turn and must be served within `limit` turns of that. Sorted by the turn they came at, the i-th
(from 0) is served after i more turns, so at turn `now` all of them fit as long as

    now - came(i) + i + 1 <= limit        for every i

A tree over the turns keeps the largest `i + 1 - came(i)`, so that a change or a look costs the logarithm of the
number of models, not that number. Used by `order.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

NOBODY = float("-inf")
_FIRST_SIZE = 64


class Crowd:
    """Those who wait, by the turn at which they came."""

    def __init__(self) -> None:
        self._base = 0
        """Turn of the first leaf."""
        self._size = _FIRST_SIZE
        """Number of leaves, a power of two; node 1 is the root, node i has the children 2i and 2i + 1."""
        self._count = [0] * (2 * _FIRST_SIZE)
        """How many came in the turns of a node."""
        self._worst = [NOBODY] * (2 * _FIRST_SIZE)
        """Largest `i + 1 - came(i)` in a node, with i counted inside the node."""

    @property
    def worst(self) -> float:
        """Largest `i + 1 - came(i)`; minus infinity when nobody waits."""
        return self._worst[1]

    def fits(self, now: int, limit: int) -> bool:
        """Whether all are served in time if one is per turn, beginning with the turn after this one."""
        return now + self._worst[1] <= limit

    def add(self, turn: int) -> None:
        """One more came at this turn; turns never go back by more than the tree covers."""
        if turn >= self._base + self._size:
            self._rebuild(turn)
        self._change(turn, 1)

    def remove(self, turn: int) -> None:
        """One of those who came at this turn waits no more."""
        self._change(turn, -1)

    def _change(self, turn: int, by: int) -> None:
        node = self._size + turn - self._base
        count, worst = self._count, self._worst
        count[node] += by
        worst[node] = count[node] - turn if count[node] else NOBODY
        while node > 1:
            node //= 2
            left, right = 2 * node, 2 * node + 1
            count[node] = count[left] + count[right]
            # Those on the right wait behind all on the left.
            behind = count[left] + worst[right]
            worst[node] = behind if behind > worst[left] else worst[left]

    def _rebuild(self, turn: int) -> None:
        """Begin the leaves at the oldest who waits, with room for as many turns again."""
        there = [
            (self._base + leaf, self._count[self._size + leaf])
            for leaf in range(self._size)
            if self._count[self._size + leaf]
        ]
        self._base = there[0][0] if there else turn
        self._size = _FIRST_SIZE
        while self._size < 2 * (turn - self._base + 1):
            self._size *= 2
        self._count = [0] * (2 * self._size)
        self._worst = [NOBODY] * (2 * self._size)
        self._fill(there)

    def _fill(self, there: Iterable[tuple[int, int]]) -> None:
        for came, number in there:
            self._change(came, number)
