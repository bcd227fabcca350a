"""Lanes: where commands run, and which may start. Pure.

    gpu          one command at a time: everything that touches the device, and the capture of both saves
    checkpoint   one training checkpoint at a time is made durable
    publication  up to N sampler snapshots at a time, one per model so that versions keep their order

A save reserves its lane before it captures, so that nothing captured waits in memory; while its lane is taken it
is not ready, and only its own model waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from lilo_engine.operations.operation import LoadState, ModelId, Operation, SaveSampler, SaveState

Lane: TypeAlias = Literal["gpu", "checkpoint", "publication"]
PersistLane: TypeAlias = Literal["checkpoint", "publication"]


def lane_of(operation: Operation) -> Lane:
    """The lane on which an operation ends; all of them start on the GPU lane."""
    match operation:
        case SaveState():
            return "checkpoint"
        case SaveSampler():
            return "publication"
        case _:
            return "gpu"


def _nobody() -> dict[PersistLane, set[ModelId]]:
    return {"checkpoint": set(), "publication": set()}


def may_wait_for_a_lane(operation: Operation) -> bool:
    """Whether it can be next of its model and still not start."""
    return isinstance(operation, LoadState | SaveSampler | SaveState)


@dataclass(slots=True, kw_only=True)
class Lanes:
    """Which models are being persisted."""

    publication_workers: int
    changes: int = 0
    """Grows whenever a lane is taken or freed, so that who waits for one is looked at only then."""
    _busy: dict[PersistLane, set[ModelId]] = field(default_factory=_nobody)

    def is_free_for(self, operation: Operation) -> bool:
        """Whether the operation could start now."""
        if isinstance(operation, LoadState):
            # It may name what this model is saving right now.
            return not self.persisting(operation.model_id)
        match lane_of(operation):
            case "gpu":
                return True
            case "checkpoint":
                return not self._busy["checkpoint"]
            case "publication":
                busy = self._busy["publication"]
                return operation.model_id not in busy and len(busy) < self.publication_workers

    def persisting(self, model_id: ModelId) -> bool:
        """Whether something of the model is being made durable."""
        return any(model_id in busy for busy in self._busy.values())

    def reserve(self, lane: PersistLane, model_id: ModelId) -> None:
        """Take the lane for a model's save, before the capture."""
        assert model_id not in self._busy[lane], f"{lane} is reserved for {model_id} already"
        self._busy[lane].add(model_id)
        self.changes += 1

    def release(self, lane: PersistLane, model_id: ModelId) -> None:
        """The save ended, well or not."""
        self._busy[lane].discard(model_id)
        self.changes += 1

    def clear(self) -> None:
        """The trainer is gone, and all saves with it."""
        self._busy = _nobody()
        self.changes += 1

    @property
    def num_persisting(self) -> int:
        """Saves under way on all lanes."""
        return sum(len(busy) for busy in self._busy.values())
