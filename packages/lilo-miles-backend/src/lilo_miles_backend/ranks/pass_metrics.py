"""PassMetrics: the numbers that come back with every pass, by names of one colon. Pure arithmetic.

The suffix says how a client's library puts the chunks of one call together: `sum`, `max`, or `mean` weighted by datums.
Explained to users in docs/observability.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PassMetrics:
    """Of one item."""

    loss: float
    tokens: int
    padded_tokens: float
    """Positions computed for them, over all ranks that share rows."""
    seconds: float
    """Of the slowest rank; of a pass of several items the item's share of tokens."""
    flops: float
    """Useful operations (`work.py`)."""
    ranks: int
    """Ranks that shared the work."""
    peak_flops_per_s: float | None
    """Of one rank's device; None: not known."""
    peak_memory_bytes: float
    """Of the fullest rank."""
    fill: float
    """Tokens of the pass over those that its microbatches had room for."""

    def named(self) -> Mapping[str, float]:
        """By the names that clients see."""
        speed = self.flops / self.seconds / self.ranks if self.seconds > 0 else 0.0
        named = {
            "loss:sum": self.loss,
            "tokens:sum": float(self.tokens),
            "padded_tokens:sum": self.padded_tokens,
            "seconds:sum": self.seconds,
            "model_flops:sum": self.flops,
            "model_flops_per_s_per_rank:mean": speed,
            "microbatch_fill:mean": self.fill,
            "peak_memory_bytes:max": self.peak_memory_bytes,
        }
        if self.peak_flops_per_s is not None:
            named["utilisation:mean"] = speed / self.peak_flops_per_s
        return named
