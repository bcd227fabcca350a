"""Order: whose turn it is. Pure.

Turns go to the ready model that was served the fewest tokens, so that models with equal work make equal progress
however their requests are cut. Two rules bound that:

- A model that had nothing to do does not save up turns: when it comes back it counts as served as much as the
  model whose turn was last (start-time fair queuing, Goyal et al. 1996, with tokens as the work).
- A ready model is passed over at most as often as there are models. A turn is given to another than the longest
  waiting one only while the others still fit (`crowd.py`). Only a pass that is held for others to share it may be passed
  over more often, by steps done meanwhile (`scheduler.py`).

The cost of a turn does not grow with the number of models, but for moving their places in a sorted list.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from lilo_engine.operations.operation import ModelId
from lilo_engine.schedule.crowd import Crowd
from lilo_engine.schedule.line import Line, Place

STEP_COST_TOKENS = 1
"""What a command without tokens counts as, so that it is not free."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A choice and the reason for it."""

    model_id: ModelId
    reason: str


class _Waiting(NamedTuple):
    """A ready model."""

    since: int
    """The turn at which it became ready, or its operation before was served."""
    place: Place
    key: bytes | None
    tokens: int


@dataclass(slots=True)
class Order:
    """What each model was served, and since when each ready one waits."""

    _served: dict[ModelId, int] = field(default_factory=dict[ModelId, int])
    _arrival: dict[ModelId, int] = field(default_factory=dict[ModelId, int])
    _arrived: int = 0
    _waiting: OrderedDict[ModelId, _Waiting] = field(default_factory=OrderedDict[ModelId, _Waiting])
    """Longest first."""
    _crowd: Crowd = field(default_factory=Crowd)
    _line: Line = field(default_factory=Line)
    _lines: dict[bytes, Line] = field(default_factory=dict[bytes, Line])
    """Of those whose next operation may share a command with others of the same key."""
    _turns: int = 0
    _time: int = 0
    """Tokens served to the model of the last turn, before it."""

    def add(self, model_id: ModelId) -> None:
        """A model became resident."""
        if model_id not in self._served:
            self._served[model_id] = self._time
            self._arrival[model_id] = self._arrived
            self._arrived += 1

    def remove(self, model_id: ModelId) -> None:
        """A model ended."""
        self.leave(model_id)
        self._served.pop(model_id, None)
        self._arrival.pop(model_id, None)

    def served_tokens(self, model_id: ModelId) -> int:
        """The count that turns are given by."""
        return self._served[model_id]

    def passed_over(self, model_id: ModelId) -> int:
        """How often a ready model was passed over since it became ready; 0 for one that is not."""
        waiting = self._waiting.get(model_id)
        return 0 if waiting is None else self._turns - waiting.since

    @property
    def num_ready(self) -> int:
        """Models that wait for a turn."""
        return len(self._waiting)

    def enter(self, model_id: ModelId, key: bytes | None = None, tokens: int = 0) -> None:
        """A model is ready: its next operation can start. Nothing changes if it was already.

        Args:
            model_id: it, added before.
            key: equal for operations that may share a command; None for one that runs alone.
            tokens: of the next operation.
        """
        before = self._waiting.get(model_id)
        if before is not None and (before.key, before.tokens) == (key, tokens):
            return
        since = self._turns
        if before is not None:
            since = before.since
            self._stand_aside(before)
        else:
            self._served[model_id] = max(self._served[model_id], self._time)
            self._crowd.add(since)
        place = Place(self._served[model_id], self._arrival[model_id], model_id)
        # Replacing a value keeps its place in the order of waiting.
        self._waiting[model_id] = _Waiting(since, place, key, tokens)
        self._line.add(place, tokens)
        if key is not None:
            self._lines.setdefault(key, Line()).add(place, tokens)

    def leave(self, model_id: ModelId) -> None:
        """A model is not ready any more; nothing changes if it was not."""
        waiting = self._waiting.pop(model_id, None)
        if waiting is None:
            return
        self._crowd.remove(waiting.since)
        self._stand_aside(waiting)

    def choose(self) -> Turn:
        """Whose turn it is; somebody is ready."""
        fewest = self._line.first
        since = self._waiting[fewest].since
        self._crowd.remove(since)
        others_fit = self._crowd.fits(self._turns, len(self._served))
        self._crowd.add(since)
        if others_fit:
            self._time = self._served[fewest]
            return Turn(fewest, f"turn of {fewest}, served the fewest tokens ({self._time})")
        longest = next(iter(self._waiting))
        return Turn(
            longest,
            f"turn of {longest}, passed over {self.passed_over(longest)} times "
            f"among {len(self._served)} models",
        )

    def alike(self, key: bytes) -> Iterator[ModelId]:
        """Ready models whose next operation has this key, least served first."""
        return iter(self._lines.get(key, ()))

    def smallest_alike(self, key: bytes) -> int:
        """No next operation with this key has fewer tokens."""
        line = self._lines.get(key)
        return 0 if line is None else line.smallest_tokens

    def settle(self, tokens: dict[ModelId, int]) -> None:
        """The models of a plan were given these tokens; the other ready ones were passed over."""
        for model_id, count in tokens.items():
            self.leave(model_id)
            self._served[model_id] += max(count, STEP_COST_TOKENS)
        self._turns += 1

    def _stand_aside(self, waiting: _Waiting) -> None:
        self._line.remove(waiting.place)
        if waiting.key is not None:
            line = self._lines[waiting.key]
            line.remove(waiting.place)
            if not line:
                del self._lines[waiting.key]
