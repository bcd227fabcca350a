"""Line: ready models, least served first; among equals the one that came first. Pure.

Kept sorted, so that looking at the first few costs no look at the others. Used by `order.py`: one line of all ready
models, and one for each kind of pass that may share a command.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from lilo_engine.operations.operation import ModelId


class Place(NamedTuple):
    """A model's place; smaller is earlier."""

    served_tokens: int
    arrival: int
    """Models are numbered as they become resident."""
    model_id: ModelId


@dataclass(slots=True)
class Line:
    """Places in order."""

    _places: list[Place] = field(default_factory=list[Place])
    _smallest: int = 0

    def __len__(self) -> int:
        """How many stand in it."""
        return len(self._places)

    def __iter__(self) -> Iterator[ModelId]:
        """From the least served on; the line is not changed meanwhile."""
        return (place.model_id for place in self._places)

    @property
    def first(self) -> ModelId:
        """The least served; there is one."""
        return self._places[0].model_id

    @property
    def smallest_tokens(self) -> int:
        """No next operation in this line has fewer tokens; a bound, since it is only known from those that came."""
        return self._smallest

    def add(self, place: Place, tokens: int) -> None:
        """A model came whose next operation has so many tokens."""
        self._smallest = min(self._smallest, tokens) if self._places else tokens
        insort(self._places, place)

    def remove(self, place: Place) -> None:
        """It left; it is there."""
        del self._places[bisect_left(self._places, place)]
