"""Ranks: the driver's handle on all ranks of a trainer, whatever started them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias

from lilo_engine.commands.command import Output, Published, RankProgress

from lilo_miles_backend.rank_commands import Fetch, Persist, RankInfo, TrainCommand

Reply: TypeAlias = "list[Output] | Mapping[str, float] | None"
"""Outputs of a batch, metrics of a step, nothing for the other commands."""


class Ranks(Protocol):
    """All ranks, addressed together. Two mailboxes: `train` is totally ordered, `persist` runs beside it."""

    def info(self) -> tuple[RankInfo, ...]:
        """What each rank found when it had started, in rank order."""
        ...

    def train(self, command: TrainCommand) -> Reply:
        """Broadcast a command and return rank 0's reply; one call at a time."""
        ...

    def persist(self, command: Persist) -> Published:
        """Broadcast a persist; may run at the same time as `train` and as other persists."""
        ...

    def fetch(self, command: Fetch) -> None:
        """Have every rank read its part of what will be loaded; as `persist`, beside `train`."""
        ...

    def progress(self) -> tuple[RankProgress, ...]:
        """How far each rank has come; never waits for a command."""
        ...

    def wait_lost(self) -> str:
        """Block until the ranks are lost: the first cause. Never returns where none can be lost alone, or after `close`."""
        ...

    def close(self) -> None:
        """End all ranks."""
        ...
