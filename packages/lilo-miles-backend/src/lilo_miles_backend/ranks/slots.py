"""SlotTable: which model holds which slot. Pure bookkeeping: no tensors, no clock.

A slot is freed and taken again; its generation never recurs, so that a late reference to a former holder is
recognised instead of reading its successor's numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from lilo_engine.errors import NotFound, Saturated
from lilo_engine.operations.operation import ModelId


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One holding of one place."""

    index: int
    generation: int


class SlotTable:
    """Places 0 to `num_slots` - 1 and their holders."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_slots = num_slots
        self._held: dict[ModelId, Slot] = {}
        self._generation = 0

    def __contains__(self, model_id: ModelId) -> bool:
        """Whether the model holds a slot."""
        return model_id in self._held

    def take(self, model_id: ModelId) -> Slot:
        """Give the model a free slot.

        Raises:
            Saturated: none is free.
        """
        assert model_id not in self._held, f"{model_id} already holds a slot"
        if not self._free:
            raise Saturated(
                f"all {self._num_slots} adapter slots are taken; unload a model or wait until one is idle"
            )
        self._generation += 1
        slot = Slot(index=self._free.pop(), generation=self._generation)
        self._held[model_id] = slot
        return slot

    def of(self, model_id: ModelId) -> Slot:
        """The slot that the model holds.

        Raises:
            NotFound: it holds none.
        """
        if model_id not in self._held:
            raise NotFound(f"model {model_id!r} is not resident in this trainer; create it first")
        return self._held[model_id]

    def free(self, model_id: ModelId) -> None:
        """Take the slot back; a model without one is no error."""
        slot = self._held.pop(model_id, None)
        if slot is not None:
            self._free.append(slot.index)
