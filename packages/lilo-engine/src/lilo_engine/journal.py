"""Journal: what the engine reports of things that outlive it. `control/` keeps it; `MemoryJournal` is for tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from lilo_engine.commands.command import Published
from lilo_engine.operations.operation import CreateModel, ModelId, SaveSampler, SaveState


class Journal(Protocol):
    """Every method is awaited before the client sees the result it belongs to."""

    async def model_created(self, request: CreateModel) -> None:
        """A model became resident."""
        ...

    async def model_ended(self, model_id: ModelId, reason: str) -> None:
        """A model is not resident any more."""
        ...

    async def published(self, operation: SaveState | SaveSampler, published: Published) -> None:
        """A checkpoint became visible; for an ephemeral save this opens its sampling session."""
        ...


@dataclass
class MemoryJournal:
    """Keeps what it was told."""

    created: list[CreateModel] = field(default_factory=list[CreateModel])
    ended: list[tuple[ModelId, str]] = field(default_factory=list[tuple[ModelId, str]])
    checkpoints: list[Published] = field(default_factory=list[Published])

    async def model_created(self, request: CreateModel) -> None:
        """A model became resident."""
        self.created.append(request)

    async def model_ended(self, model_id: ModelId, reason: str) -> None:
        """A model is not resident any more."""
        self.ended.append((model_id, reason))

    async def published(self, operation: SaveState | SaveSampler, published: Published) -> None:
        """A checkpoint became visible."""
        self.checkpoints.append(published)
