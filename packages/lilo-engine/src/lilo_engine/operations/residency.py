"""Residency: which models have a slot of the trainer, who waits for one, and who is about to give one up. Pure.

    absent -> waiting -> making -> held -> leaving -> absent
                 |          |
                 |          +-> absent   it could not be made
                 +-> absent              it was taken back

A slot is taken from `making` until it was freed, whatever became of the model meanwhile. Whoever waits does so in the
order of asking. When the trainer is lost all its slots are gone; only those who wait keep their places.
`work.py` asks what comes next, `hosting.py` says what happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from lilo_engine.operations.operation import ModelId


class Place(Enum):
    """Where a model stands towards the slots; one that is in none of these has nothing to do with them."""

    WAITING = auto()
    MAKING = auto()
    HELD = auto()
    LEAVING = auto()


_STEPS: Mapping[Place | None, frozenset[Place | None]] = {
    None: frozenset({Place.WAITING}),
    Place.WAITING: frozenset({Place.MAKING, None}),
    Place.MAKING: frozenset({Place.HELD, None}),
    Place.HELD: frozenset({Place.LEAVING}),
    Place.LEAVING: frozenset({None}),
}
"""Every step there is, but for the loss of the trainer."""


@dataclass(slots=True)
class Residency:
    """The slots of one trainer at a time."""

    slots: int = 0
    """How many there are; 0 while no trainer runs."""
    _places: dict[ModelId, Place] = field(default_factory=dict[ModelId, Place])
    _line: dict[ModelId, None] = field(default_factory=dict[ModelId, None])
    """Who waits, first come first."""
    _leaving: dict[ModelId, None] = field(default_factory=dict[ModelId, None])

    def place(self, model_id: ModelId) -> Place | None:
        """Where it stands."""
        return self._places.get(model_id)

    @property
    def num_taken(self) -> int:
        """Slots that somebody has."""
        return len(self._places) - len(self._line)

    @property
    def num_waiting(self) -> int:
        """Models in line."""
        return len(self._line)

    @property
    def is_short(self) -> bool:
        """Whether somebody waits, no slot is free, and none is about to become free."""
        return bool(self._line) and self.num_taken >= self.slots and not self._leaving

    def ahead_of(self, model_id: ModelId) -> int:
        """How many wait before this one, which waits."""
        return list(self._line).index(model_id)

    def next_to_make(self) -> ModelId | None:
        """Who gets the free slot, if there is one."""
        return next(iter(self._line), None) if self.num_taken < self.slots else None

    def next_to_free(self) -> ModelId | None:
        """Whose slot is to be freed."""
        return next(iter(self._leaving), None)

    def ask(self, model_id: ModelId) -> None:
        """It wants a slot."""
        self._step(model_id, Place.WAITING)
        self._line[model_id] = None

    def withdraw(self, model_id: ModelId) -> bool:
        """Take it out of the line; False when it is not in it."""
        if self.place(model_id) is not Place.WAITING:
            return False
        self._step(model_id, None)
        del self._line[model_id]
        return True

    def begin(self, model_id: ModelId) -> None:
        """It is being made in a free slot."""
        assert self.num_taken < self.slots, f"there is no slot for {model_id}"
        self._step(model_id, Place.MAKING)
        del self._line[model_id]

    def made(self, model_id: ModelId) -> None:
        """It has its slot."""
        self._step(model_id, Place.HELD)

    def failed(self, model_id: ModelId) -> None:
        """It could not be made; nothing of it is in the slot."""
        self._step(model_id, None)

    def leave(self, model_id: ModelId) -> None:
        """Its slot is to be freed."""
        self._step(model_id, Place.LEAVING)
        self._leaving[model_id] = None

    def freed(self, model_id: ModelId) -> None:
        """Its slot is free."""
        self._step(model_id, None)
        del self._leaving[model_id]

    def open(self, slots: int) -> None:
        """A trainer runs, with this many slots."""
        assert not self.num_taken, "slots of an earlier trainer are taken"
        self.slots = slots

    def lose(self, again: Iterable[ModelId]) -> None:
        """The trainer is gone with all slots; those that were being made and may try again stand first in line."""
        first = [model_id for model_id in again if self.place(model_id) is Place.MAKING]
        self._line = dict.fromkeys([*first, *self._line])
        self._places = dict.fromkeys(self._line, Place.WAITING)
        self._leaving = {}
        self.slots = 0

    def _step(self, model_id: ModelId, to: Place | None) -> None:
        came_from = self.place(model_id)
        assert to in _STEPS[came_from], f"{model_id} cannot go from {came_from} to {to}"
        if to is None:
            del self._places[model_id]
        else:
            self._places[model_id] = to
