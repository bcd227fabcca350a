"""Gathering: whose next pass is about to come, so that a pass which others could share waits for it a moment. Pure.

Where rows of several models share microbatches, a pass of many small requests takes hardly longer than one of few. The
clients of models whose steps have just ended send their next passes within milliseconds; without a wait the first of
them would run alone, and the others would then wait for it. Told by `work.py`; nothing here reads a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lilo_engine.operations.operation import ModelId

GATHER_S = 0.004
"""How long a model is waited for after its step."""
PROMPT_S = 2 * GATHER_S
"""Only models are waited for that came back within this time when they last did: a client that is far away, or thinks,
holds up nobody."""


@dataclass(slots=True, kw_only=True)
class Gathering:
    """The models whose last step has ended, and which of them are prompt."""

    needed: bool
    """Whether models share passes at all."""
    _stepped_s: dict[ModelId, float] = field(default_factory=dict[ModelId, float])
    """When it ended, of those that have sent nothing since; the one that ended first is first."""
    _prompt: set[ModelId] = field(default_factory=set[ModelId])

    def stepped(self, model_id: ModelId, now_s: float) -> None:
        """A step of a model ended."""
        self._stepped_s.pop(model_id, None)
        self._stepped_s[model_id] = now_s

    def came(self, model_id: ModelId, now_s: float) -> None:
        """A model's client sent something."""
        stepped_s = self._stepped_s.pop(model_id, None)
        if stepped_s is None:
            return
        if now_s - stepped_s <= PROMPT_S:
            self._prompt.add(model_id)
        else:
            self._prompt.discard(model_id)

    def forget(self, model_id: ModelId) -> None:
        """A model ended."""
        self._stepped_s.pop(model_id, None)
        self._prompt.discard(model_id)

    def until_s(self, now_s: float) -> float:
        """For how long passes are to wait; infinite when there is nobody to wait for.

        No pass waits for ever: after its step a model needs a pass of its own before the next.
        """
        if not self.needed:
            return math.inf
        for model_id in reversed(self._stepped_s):
            left_s = self._stepped_s[model_id] + GATHER_S - now_s
            if left_s <= 0:
                break
            if model_id in self._prompt:
                return left_s
        return math.inf
