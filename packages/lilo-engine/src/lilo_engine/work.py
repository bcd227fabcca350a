"""Work: everything an engine has been asked for and has not finished, and the futures of all of it.

The state between the two sides of the engine: `engine.py` puts work in, `serving.py` takes it out. All methods are
plain functions of one event loop, so that every change is whole; the only waiting is `wait` and the futures'.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import anyio
from lilo_definitions import Definition

from lilo_engine.errors import LiloError
from lilo_engine.operations.fingerprint import Fingerprint
from lilo_engine.operations.ledger import Entry, Ledger
from lilo_engine.operations.operation import (
    CreateModel,
    ForwardBackward,
    ModelId,
    Operation,
    Refused,
)
from lilo_engine.operations.result import Result
from lilo_engine.operations.roster import Model, Roster
from lilo_engine.schedule.coalesce import Budget
from lilo_engine.schedule.lanes import Lanes
from lilo_engine.schedule.plan import Plan
from lilo_engine.schedule.scheduler import Scheduler
from lilo_engine.waiting import Waiters

MAX_CREATION_TRIES = 2
"""A creation that a lost trainer interrupted is begun once more, on the next one; not for ever, since it may be the
reason for the loss."""
FORWARD_ONLY_VERBS = ("forward",)
"""Refused verbs besides which a refused pass spoils the gradient window."""


@dataclass(frozen=True, slots=True)
class Create:
    """A model is to be made resident."""

    model: Model


@dataclass(frozen=True, slots=True)
class Unload:
    """A slot is to be freed."""

    model_id: ModelId


class Work:
    """Models, their operations, and what runs next."""

    def __init__(self, definition: Definition) -> None:
        self.roster = Roster()
        self.waiters = Waiters()
        self.scheduler = Scheduler(
            budget=Budget(
                max_tokens=definition.limits.max_batch_tokens,
                max_requests=definition.limits.max_forward_backward_batch,
            ),
            lanes=Lanes(publication_workers=definition.limits.publication_workers),
        )
        self._max_queued = definition.limits.max_queued_operations
        self._lifecycle: deque[Create | Unload] = deque()
        self._running: set[ModelId] = set()
        """Models with an operation on the GPU lane: what comes after it cannot be settled yet."""
        self._news = anyio.Event()

    # What comes in.

    def open_model(self, request: CreateModel, fingerprint: Fingerprint) -> Model:
        """Queue the creation of a new model; operations for it are taken from now on."""
        ledger = Ledger(model_id=request.model_id, max_queued=self._max_queued)
        creation = ledger.open_creation(fingerprint)
        model = Model(request=request, ledger=ledger, creation=creation)
        self.roster.add(model)
        self._lifecycle.append(Create(model))
        self.notify()
        return model

    def submit(
        self,
        model: Model,
        operation: Operation,
        fingerprint: Fingerprint,
        refusal: LiloError | None,
    ) -> Entry:
        """Park an operation.

        Raises:
            Saturated: too many of this model wait.
        """
        entry = model.ledger.submit(operation, fingerprint, refusal)
        self._settle_refused(model)
        self.notify()
        return entry

    # What goes on.

    def notify(self) -> None:
        """Something may have become ready."""
        self._news.set()

    async def wait(self) -> None:
        """Return when something may have become ready since the last `next_step`."""
        await self._news.wait()

    def next_step(self) -> Create | Unload | Plan | None:
        """What runs next on the GPU lane; None when nothing can start. Operations of a plan are taken."""
        self._news = anyio.Event()
        self._running.clear()
        if self._lifecycle:
            step = self._lifecycle.popleft()
            if isinstance(step, Create):
                step.model.creation_tries += 1
            return step
        plan = self.scheduler.next_plan()
        if plan is not None:
            for entry in plan.entries:
                assert entry.operation is not None
                model_id = entry.operation.model_id
                taken = self.roster.resident(model_id).ledger.sequence.take()
                assert taken is entry, "a plan takes operations in order"
                self._running.add(model_id)
        return plan

    def ready(self, model: Model) -> None:
        """The model is resident: its operations may run."""
        model.phase = "ready"
        self.scheduler.add(model.model_id, model.ledger.sequence)
        self._settle_refused(model)

    def settled(self, model: Model) -> None:
        """What ran of the model on the GPU lane has ended."""
        self._running.discard(model.model_id)
        self._settle_refused(model)

    def complete(self, model: Model, entry: Entry, result: Result) -> None:
        """An operation finished."""
        model.ledger.complete(entry, result)
        self.waiters.wake(entry.request_id)

    def fail(self, model: Model, entry: Entry, error: LiloError) -> None:
        """An operation failed."""
        model.ledger.fail(entry, error)
        self.waiters.wake(entry.request_id)

    def end(self, model: Model, reason: str, error: LiloError) -> None:
        """The model's life is over: what waits fails with `error`; what runs finishes on its own."""
        for entry in model.ledger.abandon(error):
            self.waiters.wake(entry.request_id)
        self.scheduler.remove(model.model_id)
        self.roster.end(model, reason)

    def free_slot(self, model_id: ModelId) -> None:
        """Queue the unloading of an ended model."""
        self._lifecycle.append(Unload(model_id))
        self.notify()

    def withdraw(self, model: Model) -> bool:
        """Take back a creation that has not begun; False when it has."""
        waiting = [step for step in self._lifecycle if isinstance(step, Create)]
        if not any(step.model is model for step in waiting):
            return False
        self._lifecycle.remove(Create(model))
        return True

    # What is lost.

    def lose_trainer(self) -> list[Model]:
        """Forget the lanes and the slots of a lost trainer; the models whose state is gone with it."""
        models = self.roster.all_resident()
        kept = [
            m for m in models if m.phase == "creating" and m.creation_tries < MAX_CREATION_TRIES
        ]
        self._lifecycle = deque(Create(model) for model in kept)
        self.scheduler.lanes.clear()
        return [model for model in models if model not in kept]

    def fail_unfinished(self, model: Model, error: LiloError) -> None:
        """Fail everything of a model, running or not."""
        for entry in model.ledger.unfinished():
            self.fail(model, entry, error)

    @property
    def num_queued(self) -> int:
        """Operations that wait, of all models, and creations."""
        parked = sum(len(model.ledger.sequence) for model in self.roster.all_resident())
        return parked + len(self._lifecycle)

    def _settle_refused(self, model: Model) -> None:
        """Fail what was refused and is next; that needs no trainer, so it does not wait for other models."""
        if model.phase != "ready" or model.model_id in self._running:
            return
        sequence = model.ledger.sequence
        head = sequence.peek()
        while head is not None and head.refusal is not None:
            sequence.take()
            if head.operation is not None and _adds_gradients(head.operation):
                model.window.spoil(f"forward_backward number {head.seq_id}", head.refusal)
            self.fail(model, head, head.refusal)
            head = sequence.peek()


def _adds_gradients(operation: Operation) -> bool:
    """Whether it would have added to the gradients had it not been refused."""
    if isinstance(operation, Refused):
        return "forward" in operation.verb and operation.verb not in FORWARD_ONLY_VERBS
    return isinstance(operation, ForwardBackward) and not operation.forward_only
