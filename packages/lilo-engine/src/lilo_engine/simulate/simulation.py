"""Simulation: plays a workload against the engine's real ledger and scheduler, with a clock of its own.

    client  submits a step -> Ledger -> Scheduler.next_plan -> simulated trainer -> Ledger.complete -> client

Only the trainer and the time are simulated: numbering, futures, turns, coalescing and lanes are the code that
serves (`operations/`, `schedule/`). Called by `lilo bench engine --simulate` and by tests; no task, no wait.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial

from lilo_definitions import Limits

from lilo_engine.operations.datum import Datum
from lilo_engine.operations.fingerprint import Fingerprint
from lilo_engine.operations.ledger import Entry, Ledger
from lilo_engine.operations.operation import (
    AdamParams,
    ForwardBackward,
    ModelId,
    Operation,
    OptimStep,
    SaveSampler,
    SaveState,
)
from lilo_engine.operations.result import Stepped
from lilo_engine.operations.tensor import Tensor
from lilo_engine.schedule.coalesce import Budget
from lilo_engine.schedule.lanes import Lanes, PersistLane
from lilo_engine.schedule.plan import Plan
from lilo_engine.schedule.scheduler import Scheduler
from lilo_engine.simulate.costs import Costs
from lilo_engine.simulate.trace import Trace
from lilo_engine.simulate.workload import Save, Script, Step, Workload, scripts

_ADAM = AdamParams(
    learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0
)
_DONE = Stepped(metrics={})


@dataclass(slots=True, kw_only=True, eq=False)
class _Client:
    """One synthetic client and its model."""

    index: int
    script: Script
    ledger: Ledger
    next_step: int = 0
    next_seq: int = 1
    unfinished: int = 0
    """Operations of the step it waits for."""
    head_ready: int = 0
    """Plans that had been made when its next operation could have run first."""


@dataclass(slots=True, kw_only=True)
class Simulation:
    """One run."""

    workload: Workload
    limits: Limits
    costs: Costs = field(default_factory=Costs)
    trace: Trace = field(init=False)
    _scheduler: Scheduler = field(init=False)
    _clients: dict[ModelId, _Client] = field(default_factory=dict[ModelId, _Client])
    _now_s: float = 0.0
    _gpu_is_free: bool = True
    _submitted_s: dict[str, float] = field(default_factory=dict[str, float])
    _events: list[tuple[float, int, Callable[[], None]]] = field(
        default_factory=list[tuple[float, int, Callable[[], None]]]
    )
    _ticks: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        """Make the models resident."""
        budget = Budget(
            max_tokens=self.limits.max_batch_tokens,
            max_requests=self.limits.max_forward_backward_batch,
        )
        lanes = Lanes(publication_workers=self.limits.publication_workers)
        self._scheduler = Scheduler(budget=budget, lanes=lanes)
        self.trace = Trace(clients=self.workload.clients, work_tokens=self.workload.work_tokens)
        for index, script in enumerate(scripts(self.workload)):
            model_id = ModelId(f"client-{index}")
            ledger = Ledger(model_id=model_id, max_queued=self.limits.max_queued_operations)
            client = _Client(index=index, script=script, ledger=ledger)
            self._clients[model_id] = client
            self._scheduler.add(model_id, ledger.sequence)
            self._at(script.starts_s, partial(self._submit_step, client))

    def run(self) -> Trace:
        """Play until every client has done all its work."""
        while self._events:
            self._now_s, _, happen = heapq.heappop(self._events)
            happen()
            # What happens at the same moment is seen by one decision.
            if self._gpu_is_free and not (self._events and self._events[0][0] == self._now_s):
                self._start()
        self.trace.ended_s = self._now_s
        return self.trace

    def _at(self, time_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._ticks), happen))

    # Clients.

    def _submit_step(self, client: _Client) -> None:
        step = client.script.steps[client.next_step]
        client.next_step += 1
        client.ledger.forget_fetched()
        if client.unfinished == 0:
            client.head_ready = self.trace.plans
        for operation in _operations(client.ledger.model_id, client.next_seq, step):
            mark = Fingerprint(b"%d:%d" % (client.index, operation.seq_id))
            entry = client.ledger.submit(operation, mark, None)
            self._submitted_s[entry.request_id] = self._now_s
            client.next_seq += 1
            client.unfinished += 1

    def _finish(self, entry: Entry, client: _Client) -> None:
        client.ledger.complete(entry, _DONE)
        client.ledger.fetch(entry)
        client.unfinished -= 1
        if client.unfinished:
            return
        if client.next_step < len(client.script.steps):
            self._at(self._now_s + self.workload.round_trip_s, partial(self._submit_step, client))
        else:
            self.trace.client_ended(client.index, self._now_s)

    # The trainer.

    def _start(self) -> None:
        plan = self._scheduler.next_plan()
        if plan is None:
            return
        clients: list[_Client] = []
        for entry in plan.entries:
            assert entry.operation is not None
            client = self._clients[entry.operation.model_id]
            taken = client.ledger.sequence.take()
            assert taken is entry, "a plan takes operations in order"
            self.trace.waited(
                entry.operation, self._now_s - self._submitted_s.pop(entry.request_id)
            )
            clients.append(client)
        self._note(plan, clients)
        took_s = self._gpu_s(plan)
        self.trace.busy("gpu", took_s)
        self._gpu_is_free = False
        self._at(self._now_s + took_s, partial(self._gpu_done, plan, clients))

    def _note(self, plan: Plan, clients: list[_Client]) -> None:
        """Write down what was decided, and count how often those who run now were passed over."""
        is_bound = plan.lane != "gpu"
        for client in {id(client): client for client in clients}.values():
            passed = self.trace.plans - client.head_ready
            self.trace.served_after(0 if is_bound else passed)
            client.head_ready = self.trace.plans + 1
        self.trace.plans += 1
        key = plan.entries[0].key
        if key is not None:
            left_over = next(self._scheduler.order.alike(key), None) is not None
            self.trace.passes(
                self._now_s,
                [
                    (client.index, entry.tokens)
                    for client, entry in zip(clients, plan.entries, strict=True)
                ],
                fill=plan.num_tokens / self.limits.max_batch_tokens,
                left_over=left_over,
            )

    def _gpu_s(self, plan: Plan) -> float:
        if plan.entries[0].key is not None:
            return self.costs.passes_s(plan.num_tokens)
        if plan.lane == "gpu":
            return self.costs.step_s * len(plan.entries)
        return self.costs.capture_s

    def _gpu_done(self, plan: Plan, clients: list[_Client]) -> None:
        self._gpu_is_free = True
        if plan.lane == "gpu":
            for entry, client in zip(plan.entries, clients, strict=True):
                self._finish(entry, client)
            return
        took_s = self.costs.persist_s[plan.lane]
        self.trace.busy(plan.lane, took_s)
        self._at(
            self._now_s + took_s,
            partial(self._persisted, plan.lane, plan.entries[0], clients[0]),
        )

    def _persisted(self, lane: PersistLane, entry: Entry, client: _Client) -> None:
        self._scheduler.lanes.release(lane, client.ledger.model_id)
        self._finish(entry, client)


def _operations(model_id: ModelId, first_seq: int, step: Step) -> list[Operation]:
    seq_ids = itertools.count(first_seq)
    operations: list[Operation] = [
        ForwardBackward(
            model_id=model_id,
            seq_id=next(seq_ids),
            datums=(_datum(tokens),),
            loss="cross_entropy",
            loss_config={},
            forward_only=False,
        )
        for tokens in step.passes
    ]
    operations.append(OptimStep(model_id=model_id, seq_id=next(seq_ids), params=_ADAM))
    if step.save is not None:
        operations.append(_save(model_id, next(seq_ids), step.save))
    return operations


def _save(model_id: ModelId, seq_id: int, lane: Save) -> Operation:
    if lane == "checkpoint":
        return SaveState(model_id=model_id, seq_id=seq_id, name="state", overwrite=True)
    return SaveSampler(model_id=model_id, seq_id=seq_id, name="snapshot")


@lru_cache(maxsize=8192)
def _datum(tokens: int) -> Datum:
    """A datum of that length; scheduling never looks inside, so all of one length are one."""
    return Datum(tokens=Tensor.of([0] * tokens, "int32"), loss_inputs={})
