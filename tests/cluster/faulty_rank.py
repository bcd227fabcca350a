"""The real rank, which also does on command what ranks should not: `light_rank.py` lists the words."""

from __future__ import annotations

from lilo_miles_backend.rank_commands import StepOptimizer
from lilo_miles_backend.ranks.rank import Rank

from tests.cluster.light_rank import act

FAULT = "fault:"
"""A step of a model by this name is no step but what follows."""


class FaultyRank(Rank):
    def execute(self, command):
        if isinstance(command, StepOptimizer) and command.model_id.startswith(FAULT):
            with self._progress.of(type(command).__name__):
                words = command.model_id.removeprefix(FAULT)
                return {"sum": act(words, self._parallel.rank)}
        return super().execute(command)
