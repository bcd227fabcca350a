"""Scheduler: which operations run next, together. Pure: no clock, no await, no I/O; it owns the turns and lanes.

`work.py` asks it whenever the GPU lane is free; `order.py` says whose turn it is, `lanes.py` whether a save could
start, `coalesce.py` what runs along. A pass looks only at models whose next operation changed since the last one,
and never at a payload.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from lilo_engine.operations.ledger import Entry
from lilo_engine.operations.operation import ModelId, OptimStep
from lilo_engine.operations.sequence import Sequence
from lilo_engine.schedule.coalesce import Budget, coalesce
from lilo_engine.schedule.lanes import Lanes, lane_of, may_wait_for_a_lane
from lilo_engine.schedule.order import Order, Turn
from lilo_engine.schedule.plan import Plan

MAX_STEPS = 32
"""Optimizer steps in one plan. They run one after another, each in a few milliseconds, and together take about as
long as a command of passes: without it every step would be a turn of its own, and with a thousand clients, whoever
sends small requests, and so needs many steps, would fall behind."""
_STEPS = b"optim_step"
"""The line in which models with a step wait."""


@dataclass(slots=True, kw_only=True)
class Scheduler:
    """Chooses plans for one trainer."""

    budget: Budget
    lanes: Lanes
    order: Order = field(default_factory=Order)
    _parked: dict[ModelId, Sequence[Entry]] = field(default_factory=dict[ModelId, Sequence[Entry]])
    _changed: dict[ModelId, None] = field(default_factory=dict[ModelId, None])
    """Models whose next operation may be another than at the last look, in the order of the changes."""
    _bound: dict[ModelId, None] = field(default_factory=dict[ModelId, None])
    """Models whose next operation can start only when its lane is free."""
    _lanes_seen: int = 0

    def add(self, model_id: ModelId, parked: Sequence[Entry]) -> None:
        """The operations of a model may run from now on; its sequence tells of its changes."""
        self.order.add(model_id)
        self._parked[model_id] = parked
        parked.on_change = partial(self._changed.__setitem__, model_id, None)
        parked.on_change()

    def remove(self, model_id: ModelId) -> None:
        """A model ended, or never was there."""
        self.order.remove(model_id)
        self._parked.pop(model_id, None)
        self._bound.pop(model_id, None)

    def next_plan(self, *, hold_passes: bool = False) -> Plan | None:
        """Decide, and count the plan as served; None when nothing can start.

        The entries of the plan are to be taken from their sequences before the next call. A head that was refused
        must have been settled before this one.

        Args:
            hold_passes: a turn of a pass is not taken yet, since more that could share it are about to come; steps are
                done meanwhile, and may pass it over more often than `order.py` says. Each model that is prompt and ends
                a step may prolong it by the 4 ms of `gathering.py` once, so N of them hold it
                for N times that at most, and for their steps.
        """
        self._look()
        if not self.order.num_ready:
            return None
        turn = self.order.choose()
        head = self._parked[turn.model_id].peek()
        if hold_passes and head is not None and head.key is not None:
            stepping = next(self.order.alike(_STEPS), None)
            if stepping is None:
                return None
            turn = Turn(stepping, f"step of {stepping}, while passes wait for others to share one")
            head = self._parked[stepping].peek()
        assert head is not None
        assert head.operation is not None
        lane = lane_of(head.operation)
        if head.key is not None:
            plan = self._coalesced(turn.model_id, turn.reason, head.key)
        elif isinstance(head.operation, OptimStep):
            plan = self._steps(turn.model_id, turn.reason)
        else:
            plan = Plan(entries=(head,), lane=lane, reason=turn.reason)
        if lane != "gpu":
            self.lanes.reserve(lane, turn.model_id)
        self._settle(plan)
        return plan

    def why_waiting(self, model_id: ModelId) -> str:
        """Why the next operation of a model has not started, in words."""
        parked = self._parked.get(model_id)
        if parked is None:
            return "its model is being made, put aside, brought back or loaded"
        missing = parked.missing()
        if missing is not None:
            return f"number {missing} has not come"
        head = parked.peek()
        if head is None or head.operation is None:
            return "nothing waits"
        if not self.lanes.is_free_for(head.operation):
            return "its lane is taken by an earlier save"
        return f"its turn comes; passed over {self.order.passed_over(model_id)} times"

    def _look(self) -> None:
        """Let models in and out whose next operation or whose lane changed."""
        for model_id in self._changed:
            self._place(model_id)
        self._changed.clear()
        if self.lanes.changes != self._lanes_seen:
            self._lanes_seen = self.lanes.changes
            for model_id in self._bound:
                self._place_bound(model_id)

    def _place(self, model_id: ModelId) -> None:
        parked = self._parked.get(model_id)
        head = None if parked is None else parked.peek()
        self._bound.pop(model_id, None)
        if head is None or head.operation is None:
            self.order.leave(model_id)
        elif may_wait_for_a_lane(head.operation):
            self._bound[model_id] = None
            self._place_bound(model_id)
        else:
            key = _STEPS if isinstance(head.operation, OptimStep) else head.key
            self.order.enter(model_id, key, head.tokens)

    def _place_bound(self, model_id: ModelId) -> None:
        head = self._parked[model_id].peek()
        assert head is not None
        assert head.operation is not None
        if self.lanes.is_free_for(head.operation):
            self.order.enter(model_id)
        else:
            self.order.leave(model_id)

    def _coalesced(self, anchor: ModelId, reason: str, key: bytes) -> Plan:
        entries = coalesce(
            anchor,
            (m for m in self.order.alike(key) if m != anchor),
            self._parked,
            served_tokens=self.order.served_tokens,
            budget=self.budget,
            smallest_tokens=self.order.smallest_alike(key),
        )
        if len(entries) > 1:
            models = len({entry.operation.model_id for entry in entries if entry.operation})
            tokens = sum(entry.tokens for entry in entries)
            reason += (
                f"; {len(entries)} passes of {models} models share loss and config, "
                f"{tokens} of {self.budget.max_tokens} tokens"
            )
            if self.budget.packs_models and models > 1:
                reason += "; rows of several models share microbatches"
        return Plan(entries=tuple(entries), lane="gpu", reason=reason)

    def _steps(self, anchor: ModelId, reason: str) -> Plan:
        """The step of a model, and those of others that wait for theirs."""
        others = (m for m in self.order.alike(_STEPS) if m != anchor)
        heads = [self._parked[m].peek() for m in (anchor, *islice(others, MAX_STEPS - 1))]
        entries = tuple(head for head in heads if head is not None)
        if len(entries) > 1:
            reason += f"; the steps of {len(entries)} models, one after another"
        return Plan(entries=entries, lane="gpu", reason=reason)

    def _settle(self, plan: Plan) -> None:
        tokens: dict[ModelId, int] = {}
        for entry in plan.entries:
            assert entry.operation is not None
            model_id = entry.operation.model_id
            tokens[model_id] = tokens.get(model_id, 0) + entry.tokens
        self.order.settle(tokens)
