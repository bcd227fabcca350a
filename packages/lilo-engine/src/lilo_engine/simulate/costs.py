"""Costs: how long a simulated trainer takes for its commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from lilo_engine.schedule.lanes import PersistLane


def _persist() -> Mapping[PersistLane, float]:
    return MappingProxyType({"checkpoint": 2.0, "publication": 0.3})


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds; the defaults are of the order of one GPU with an 8B model."""

    command_s: float = 0.02
    """Of any command, besides its tokens."""
    tokens_per_s: float = 30000.0
    step_s: float = 0.008
    """An optimizer step."""
    capture_s: float = 0.01
    persist_s: Mapping[PersistLane, float] = field(default_factory=_persist)
    """From the capture until it is published."""

    def passes_s(self, tokens: int) -> float:
        """One command with so many tokens."""
        return self.command_s + tokens / self.tokens_per_s
