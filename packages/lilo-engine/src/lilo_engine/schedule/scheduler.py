"""Scheduler: which operations run next, together. Pure: no clock, no await, no I/O; it owns the turns and lanes.

`engine.py` asks it whenever the GPU lane is free; `order.py` says whose turn it is, `lanes.py` whether a save could
start, `coalesce.py` what runs along. A pass costs a look at each model's next operation, never at its payload.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lilo_engine.operations.ledger import Entry
from lilo_engine.operations.operation import ModelId
from lilo_engine.operations.sequence import Sequence
from lilo_engine.schedule.coalesce import Budget, coalesce
from lilo_engine.schedule.lanes import Lanes, lane_of
from lilo_engine.schedule.order import Order
from lilo_engine.schedule.plan import Plan


@dataclass(slots=True, kw_only=True)
class Scheduler:
    """Chooses plans for one trainer."""

    budget: Budget
    lanes: Lanes
    order: Order = field(default_factory=Order)

    def next_plan(self, parked: Mapping[ModelId, Sequence[Entry]]) -> Plan | None:
        """Decide, and count the plan as served; None when nothing can start.

        Args:
            parked: the operations of every model that may run, by model, in the order in which the models came. A
                head that was refused must have been settled before.
        """
        ready = [model_id for model_id, waiting in parked.items() if self._can_start(waiting)]
        if not ready:
            return None
        turn = self.order.choose(ready)
        head = parked[turn.model_id].peek()
        assert head is not None
        assert head.operation is not None
        lane = lane_of(head.operation)
        if head.key is None:
            plan = Plan(entries=(head,), lane=lane, reason=turn.reason)
        else:
            plan = self._coalesced(turn.model_id, turn.reason, ready, parked)
        if lane != "gpu":
            self.lanes.reserve(lane, turn.model_id)
        self._settle(plan)
        return plan

    def _can_start(self, waiting: Sequence[Entry]) -> bool:
        head = waiting.peek()
        if head is None or head.operation is None:
            return False
        return self.lanes.is_free_for(head.operation)

    def _coalesced(
        self,
        anchor: ModelId,
        reason: str,
        ready: list[ModelId],
        parked: Mapping[ModelId, Sequence[Entry]],
    ) -> Plan:
        others = sorted((m for m in ready if m != anchor), key=self.order.served_tokens)
        entries = coalesce(
            anchor,
            others,
            parked,
            served_tokens=self.order.served_tokens,
            budget=self.budget,
        )
        if len(entries) > 1:
            models = len({entry.operation.model_id for entry in entries if entry.operation})
            tokens = sum(entry.tokens for entry in entries)
            reason += (
                f"; {len(entries)} passes of {models} models share loss and config, "
                f"{tokens} of {self.budget.max_tokens} tokens"
            )
        return Plan(entries=tuple(entries), lane="gpu", reason=reason)

    def _settle(self, plan: Plan) -> None:
        tokens: dict[ModelId, int] = {}
        for entry in plan.entries:
            assert entry.operation is not None
            model_id = entry.operation.model_id
            tokens[model_id] = tokens.get(model_id, 0) + entry.tokens
        self.order.settle(tokens)
