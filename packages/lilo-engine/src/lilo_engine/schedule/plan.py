"""Plan: what runs next, together, and why. A frozen decision; `commands/dispatch.py` carries it out."""

from __future__ import annotations

from dataclasses import dataclass

from lilo_engine.operations.ledger import Entry
from lilo_engine.schedule.lanes import Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Operations of one command, or optimizer steps of several models, one command each."""

    entries: tuple[Entry, ...]
    """Several only for passes that share loss, config and direction, those of one model in order, and for steps."""
    lane: Lane
    """Where it ends; a save was given its reservation there."""
    reason: str
    """Why these and why now, in words; logged, and tested."""

    @property
    def num_tokens(self) -> int:
        """Sum of the model-input lengths."""
        return sum(entry.tokens for entry in self.entries)
