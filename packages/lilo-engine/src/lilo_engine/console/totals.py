"""Totals: counts of one kind of command, with a histogram of how long it took."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Upper bounds of the histogram: an almost empty step takes milliseconds, one at 256k tokens half an hour."""


@dataclass(slots=True)
class Totals:
    """Counts since the engine began."""

    commands: int = 0
    operations: int = 0
    failed: int = 0
    """Operations that ended with an error."""
    tokens: int = 0
    seconds: float = 0.0
    histogram: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    """Commands by `BOUNDS_S`; the last number is of those above all of them."""

    def add(self, took_s: float, *, operations: int, failed: int, tokens: int) -> None:
        """One command ended."""
        self.commands += 1
        self.operations += operations
        self.failed += failed
        self.tokens += tokens
        self.seconds += took_s
        self.histogram[bisect_left(BOUNDS_S, took_s)] += 1
