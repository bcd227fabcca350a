"""Order: whose turn it is. Pure.

Turns go to the ready model that was served the fewest tokens, so that models with equal work make equal progress
however their requests are cut. Two rules bound that:

- A model that had nothing to do does not save up turns: when it comes back it counts as served as much as the
  model whose turn was last (start-time fair queuing, Goyal et al. 1996, with tokens as the work).
- A ready model is passed over at most as often as there are models. Before a turn is given to another than the
  longest waiting one, the others must still fit: with them sorted by how often they were passed over, the i-th
  (from 0) would be served after i more turns, so its count + 1 + i must not exceed the number of models.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from lilo_engine.operations.operation import ModelId

STEP_COST_TOKENS = 1
"""What a command without tokens counts as, so that it is not free."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A choice and the reason for it."""

    model_id: ModelId
    reason: str


@dataclass(slots=True)
class Order:
    """What each model was served, and how often each ready one was passed over."""

    _served: dict[ModelId, int] = field(default_factory=dict[ModelId, int])
    _passed: dict[ModelId, int] = field(default_factory=dict[ModelId, int])
    """Of models that were ready at the last choice."""
    _time: int = 0
    """Tokens served to the model of the last turn, before it."""

    def add(self, model_id: ModelId) -> None:
        """A model became resident."""
        self._served.setdefault(model_id, self._time)

    def remove(self, model_id: ModelId) -> None:
        """A model ended."""
        self._served.pop(model_id, None)
        self._passed.pop(model_id, None)

    def served_tokens(self, model_id: ModelId) -> int:
        """The count that turns are given by."""
        return self._served[model_id]

    def choose(self, ready: Collection[ModelId]) -> Turn:
        """Whose turn it is; `ready` is not empty, and in the order in which the models came."""
        self._see(ready)
        waiting = sorted(ready, key=self._passed.__getitem__, reverse=True)
        fewest = min(ready, key=self._served.__getitem__)
        if self._others_still_fit(fewest, waiting):
            self._time = self._served[fewest]
            return Turn(fewest, f"turn of {fewest}, served the fewest tokens ({self._time})")
        longest = waiting[0]
        return Turn(
            longest,
            f"turn of {longest}, passed over {self._passed[longest]} times "
            f"among {len(self._served)} models",
        )

    def settle(self, tokens: dict[ModelId, int]) -> None:
        """The models of a plan were given these tokens; the other ready ones were passed over."""
        for model_id, count in tokens.items():
            self._served[model_id] += max(count, STEP_COST_TOKENS)
            self._passed.pop(model_id, None)
        for model_id in self._passed:
            self._passed[model_id] += 1

    def _see(self, ready: Collection[ModelId]) -> None:
        """Forget the waiting of models that are not ready any more, and let returning ones in."""
        before = self._passed
        self._passed = {model_id: before.get(model_id, 0) for model_id in ready}
        for model_id in ready:
            if model_id not in before:
                self._served[model_id] = max(self._served[model_id], self._time)

    def _others_still_fit(self, chosen: ModelId, waiting: list[ModelId]) -> bool:
        others = [model_id for model_id in waiting if model_id != chosen]
        limit = len(self._served)
        return all(self._passed[m] + 1 + i <= limit for i, m in enumerate(others))
