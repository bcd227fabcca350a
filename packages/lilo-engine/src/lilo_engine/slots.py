"""Slots: what is done next about the slots of the trainer: a model made, put aside or saved in its place, a slot freed. Pure.

`operations/residency.py` knows who has a slot and who waits; this decides, with the state of the models at hand, and
`work.py` lets it take turns with plans. When somebody waits and no slot is free, the model that has been idle for
longest is suspended: saved, and brought back when its client sends something. Nothing is lost by that, so that slots
are a cache over models.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from lilo_engine.errors import LiloError
from lilo_engine.operations.ids import SUSPENDED_NAME
from lilo_engine.operations.operation import ModelId, SaveState
from lilo_engine.operations.residency import Place, Residency
from lilo_engine.operations.roster import Model, Roster
from lilo_engine.schedule.lanes import Lanes

MAX_CREATION_TRIES = 2
"""A creation that a lost trainer interrupted is begun once more, on the next one; not for ever, since it may be the
reason for the loss."""
LOOK_AGAIN_S = 1.0
"""Between two looks for an idle model while somebody waits for its slot: what hinders it may have ended."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """A model has a slot and is made from a checkpoint, which is to be read beside the GPU lane."""

    model: Model


@dataclass(frozen=True, slots=True)
class Create:
    """A model is made in its slot; what it is made from was read before."""

    model: Model
    refusal: LiloError | None = None
    """Why it cannot be made from that."""


@dataclass(frozen=True, slots=True)
class Unload:
    """A slot is to be freed."""

    model_id: ModelId


@dataclass(frozen=True, slots=True)
class Suspend:
    """An idle model gives its slot to one that waits; this saves it first, on a lane that is reserved."""

    model: Model
    save: SaveState


@dataclass(frozen=True, slots=True)
class Cover:
    """A model keeps its slot and is saved, on a lane that is reserved: too much was done to it since it last was."""

    model: Model
    save: SaveState


SlotStep: TypeAlias = Prepare | Create | Unload | Suspend | Cover


@dataclass(slots=True, kw_only=True)
class Slots:
    """Decides over the slots of one trainer at a time."""

    roster: Roster
    lanes: Lanes
    suspend_idle_s: float
    """How long nothing was asked of a model before one that waits may have its slot."""
    residency: Residency = field(default_factory=Residency)
    _prepared: deque[Create] = field(default_factory=deque[Create])
    _look_again_s: float = -math.inf
    """Before then no model can have been idle for long enough."""

    def next_step(self, now_s: float) -> SlotStep | None:
        """What comes next; it counts as begun."""
        leaving = self.residency.next_to_free()
        if leaving is not None:
            return Unload(leaving)
        if self._prepared:
            return self._prepared.popleft()
        first = self.residency.next_to_make()
        if first is not None:
            model = self.roster.resident(first)
            model.creation_tries += 1
            self.residency.begin(first)
            return Create(model) if model.to_be_made.source is None else Prepare(model)
        return self._suspension(now_s) if self.residency.is_short else None

    def may_cover(self, model: Model) -> bool:
        """Whether a save of a model that works can begin: between two windows, and with its lane free."""
        if model.phase != "ready" or model.loading or not model.window.is_empty:
            return False
        free = self.lanes.is_free_for(_save_of(model))
        return free and not self.lanes.persisting(model.model_id)

    def cover(self, model: Model) -> Cover:
        """That save."""
        self.lanes.reserve("checkpoint", model.model_id)
        return Cover(model, _save_of(model))

    def prepared(self, step: Create) -> None:
        """What a model is made from has been read, or cannot be."""
        self._prepared.append(step)

    def until_idle_s(self, now_s: float) -> float:
        """Until somebody who waits for a slot may get that of an idle model."""
        if not self.residency.is_short:
            return math.inf
        return max(self._look_again_s - now_s, 0.0)

    def want_back(self, model: Model) -> None:
        """A suspended model with something to do gets in line for a slot."""
        if (
            model.phase == "suspended"
            and model.ledger.sequence.peek() is not None
            and self.residency.place(model.model_id) is None
        ):
            self.residency.ask(model.model_id)

    def give_up(self, model: Model) -> None:
        """The model ended: it waits for no slot, and one that it has is freed when what runs on it has ended."""
        self.residency.withdraw(model.model_id)
        if self.residency.place(model.model_id) is Place.HELD:
            self.residency.leave(model.model_id)

    def lose_trainer(self) -> list[Model]:
        """All slots are gone; the models whose state is gone with them.

        Those that wait lose nothing, those that are suspended are on the volume, and what was being made is begun
        again.
        """
        models = self.roster.all_resident()
        lost = [model for model in models if not self._outlives(model)]
        kept = [model for model in models if self._outlives(model)]
        self._prepared.clear()
        self.residency.lose(model.model_id for model in kept)
        for model in kept:
            self.want_back(model)
        return lost

    def why_waiting(self, model: Model) -> str | None:
        """What a model in line for a slot waits for, in words; None when it is not in line, or about to get one."""
        waiting = self.residency.place(model.model_id) is Place.WAITING
        if not waiting or not 0 < self.residency.slots <= self.residency.num_taken:
            return None
        ahead = self.residency.ahead_of(model.model_id)
        before = f", and {ahead} more wait before this one" if ahead else ""
        return (
            f"all {self.residency.slots} slots of this trainer are taken by other models{before}; "
            f"one that is not used for {self.suspend_idle_s:.0f} s, or whose session ends, makes room"
        )

    def _outlives(self, model: Model) -> bool:
        """Whether a model is worth a place on the next trainer."""
        if model.phase not in ("creating", "suspended"):
            return False
        making = self.residency.place(model.model_id) is Place.MAKING
        return not making or model.creation_tries < MAX_CREATION_TRIES

    def _suspension(self, now_s: float) -> Suspend | None:
        """Who gives up its slot now: of those that may, the one that has been idle for longest."""
        if now_s < self._look_again_s:
            return None
        held = [model for model in self.roster.all_resident() if model.phase == "ready"]
        for model in sorted(held, key=_idle_since_s):
            save = _save_of(model)
            if self._may_go(model, now_s) and self.lanes.is_free_for(save):
                self.lanes.reserve("checkpoint", model.model_id)
                model.move("suspending")
                return Suspend(model, save)
        self._look_again_s = self._next_look_s(held, now_s)
        return None

    def _next_look_s(self, held: Iterable[Model], now_s: float) -> float:
        oldest_s = min(map(_idle_since_s, held), default=now_s)
        return max(oldest_s + self.suspend_idle_s, now_s + LOOK_AGAIN_S)

    def _may_go(self, model: Model, now_s: float) -> bool:
        """Whether nothing of a model that has a slot would be lost or delayed if it were saved and put aside."""
        return (
            now_s - model.active_s >= self.suspend_idle_s
            and model.window.is_empty
            and model.ledger.sequence.peek() is None
            and not model.loading
            and not self.lanes.persisting(model.model_id)
        )


def _idle_since_s(model: Model) -> float:
    return model.active_s


def _save_of(model: Model) -> SaveState:
    """A save of the engine's own; its name is the engine's to overwrite once there is one."""
    return SaveState(
        model_id=model.model_id,
        seq_id=model.ledger.sequence.next - 1,
        name=SUSPENDED_NAME,
        overwrite=model.kept is not None,
    )
