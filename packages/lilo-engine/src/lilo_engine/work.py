"""Work: everything an engine has been asked for and has not finished, and the futures of all of it.

The state between the two sides of the engine: `engine.py` puts work in, `serving.py` takes it out. All methods are
plain functions of one event loop, so that every change is whole; the only waiting is `wait` and the futures'.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import anyio
from lilo_definitions import Definition

from lilo_engine.errors import LiloError, Saturated
from lilo_engine.history.history import History, HistorySettings
from lilo_engine.operations.fingerprint import Fingerprint
from lilo_engine.operations.ledger import Entry, Ledger
from lilo_engine.operations.operation import CreateModel, ModelId, Operation, adds_gradients
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.operations.result import Result, Stepped
from lilo_engine.operations.roster import Model, Roster
from lilo_engine.schedule.coalesce import Budget
from lilo_engine.schedule.gathering import Gathering
from lilo_engine.schedule.lanes import Lanes
from lilo_engine.schedule.plan import Plan
from lilo_engine.schedule.scheduler import Scheduler
from lilo_engine.slots import Cover, Slots, SlotStep, Suspend
from lilo_engine.waiting import Waiters

MAX_IN_LINE = 1024
"""Models that may wait for a slot: each has a client that could be told now that it will not be soon."""


@dataclass(frozen=True, slots=True)
class Load:
    """A checkpoint was read for a model, and is now to be loaded into it."""

    model: Model
    plan: Plan
    refusal: LiloError | None
    """Why it cannot be."""


def _unheard(_: Entry) -> None:
    """Nobody watches."""


class Work:
    """Models, their operations, and what runs next."""

    def __init__(
        self,
        definition: Definition,
        *,
        suspend_idle_s: float,
        history: HistorySettings | None = None,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        """Nothing has been asked for.

        Args:
            definition: its limits are kept.
            suspend_idle_s: how long nothing was asked of a model before one that waits may have its slot.
            history: how much is kept of what was done; None = the defaults.
            clock: seconds, from any origin.
        """
        self.roster = Roster()
        self.waiters = Waiters()
        self.on_accepted: Callable[[Entry], None] = _unheard
        """Called with each operation that is new."""
        self.on_finished: Callable[[Entry], None] = _unheard
        """Called with each that has its result."""
        self.history = History.empty(history or HistorySettings())
        self.scheduler = Scheduler(
            budget=Budget(
                max_tokens=definition.limits.max_batch_tokens,
                max_requests=definition.limits.max_forward_backward_batch,
                packs_models=definition.trainer.pack_models,
            ),
            lanes=Lanes(publication_workers=definition.limits.publication_workers),
        )
        self.slots = Slots(
            roster=self.roster, lanes=self.scheduler.lanes, suspend_idle_s=suspend_idle_s
        )
        self.residency = self.slots.residency
        self._max_queued = definition.limits.max_queued_operations
        self._clock = clock
        self._loads: deque[Load] = deque()
        self._gathering = Gathering(needed=definition.trainer.pack_models)
        self._held_until_s = math.inf
        """When passes that the last look for a plan held back are to be looked at again; infinite if it was to hold none."""
        self._running: set[ModelId] = set()
        """Models with an operation on the GPU lane: what comes after it cannot be settled yet."""
        self._slots_were_last = False
        """Whether the last step was about slots; then a plan has its turn."""
        self._news = anyio.Event()

    # What comes in.

    def open_model(self, request: CreateModel, fingerprint: Fingerprint) -> Model:
        """Put a new model in line for a slot; operations for it are taken from now on.

        Raises:
            Saturated: too many wait for one.
        """
        if self.residency.num_waiting >= MAX_IN_LINE:
            raise Saturated(
                f"{self.residency.num_waiting} models wait for one of {self.residency.slots} slots, and no more may; "
                "try again later"
            )
        ledger = Ledger(model_id=request.model_id, max_queued=self._max_queued)
        creation = ledger.open_creation(fingerprint)
        model = Model(request=request, ledger=ledger, creation=creation, active_s=self._clock())
        self.roster.add(model)
        self.residency.ask(model.model_id)
        self.notify()
        return model

    def submit(
        self,
        model: Model,
        operation: Operation,
        fingerprint: Fingerprint,
        refusal: LiloError | None,
        trace_parent: str | None = None,
    ) -> Entry:
        """Park an operation.

        Raises:
            Saturated: too many of this model wait, or too much of its owner's.
        """
        self.roster.check_owners_room(model, operation)
        entry = model.ledger.submit(operation, fingerprint, refusal)
        entry.trace_parent = trace_parent
        self.history.payloads.park(entry)
        self.on_accepted(entry)
        model.active_s = self._clock()
        self._gathering.came(model.model_id, model.active_s)
        self._settle_refused(model)
        self.slots.want_back(model)
        self.notify()
        return entry

    # What goes on.

    def notify(self) -> None:
        """Something may have become ready."""
        self._news.set()

    async def wait(self) -> None:
        """Return when something may have become ready since the last `next_step`."""
        now_s = self._clock()
        held_s = max(self._held_until_s - now_s, 0.0)
        with anyio.move_on_after(min(self.slots.until_idle_s(now_s), held_s)):
            await self._news.wait()

    def next_step(self) -> SlotStep | Load | Plan | None:
        """What runs next on the GPU lane; None when nothing can start. Operations of a plan are taken.

        Slots and plans take turns, so that neither clients that come and go nor those that train hold up the others.
        """
        self._news = anyio.Event()
        self._running.clear()
        if self._loads:
            return self._loads.popleft()
        cover = self._cover()
        if cover is not None:
            return cover
        turns = (self._slot_step, self._plan)
        for choose in reversed(turns) if self._slots_were_last else turns:
            step = choose()
            if step is not None:
                self._slots_were_last = not isinstance(step, Plan)
                return step
        return None

    def ready(self, model: Model) -> None:
        """The model has its slot: its operations may run."""
        if model.phase == "creating":
            self.history.opened(model.request)
        model.move("ready")
        model.active_s = self._clock()
        model.creation_tries = 0
        self.scheduler.add(model.model_id, model.ledger.sequence)
        self._settle_refused(model)

    def suspended(self, model: Model, kept: CheckpointRef) -> None:
        """The model's state is published: its slot goes to another, unless its client came back meanwhile."""
        model.kept = model.last_checkpoint = kept
        if model.ledger.sequence.peek() is not None:
            self.ready(model)
            return
        model.move("suspended")
        self.residency.leave(model.model_id)
        self.notify()

    def begin_load(self, model: Model) -> None:
        """A checkpoint is read for the model; what comes after the load waits."""
        model.loading = True
        self.scheduler.remove(model.model_id)

    def prepared(self, load: Load) -> None:
        """It was read, or cannot be."""
        self._loads.append(load)
        self.notify()

    def loaded(self, model: Model) -> None:
        """The load has ended, well or not: the model goes on."""
        model.loading = False
        if model.phase == "ready":
            self.scheduler.add(model.model_id, model.ledger.sequence)
        self.settled(model)

    def settled(self, model: Model) -> None:
        """What ran of the model on the GPU lane has ended."""
        self._running.discard(model.model_id)
        model.active_s = self._clock()
        self._settle_refused(model)

    def complete(self, model: Model, entry: Entry, result: Result) -> None:
        """An operation finished."""
        self.history.payloads.end(entry)
        model.ledger.complete(entry, result)
        self._finished(entry)
        if isinstance(result, Stepped) and not model.ended:
            self._gathering.stepped(model.model_id, self._clock())
            if model.ledger.sequence.peek() is not None:
                self._gathering.came(model.model_id, self._clock())

    def fail(self, model: Model, entry: Entry, error: LiloError) -> None:
        """An operation failed."""
        self.history.payloads.end(entry)
        model.ledger.fail(entry, error)
        self._finished(entry)

    def end(self, model: Model, reason: str, error: LiloError) -> None:
        """The model's life is over: what waits fails with `error`; what runs finishes on its own.

        Its slot, if it has one, is freed when what runs on it has ended.
        """
        for entry in model.ledger.abandon(error):
            self.history.payloads.end(entry)
            self._finished(entry)
        self.history.forget(model.model_id)
        self._gathering.forget(model.model_id)
        self.scheduler.remove(model.model_id)
        self.roster.end(model, reason)
        self.slots.give_up(model)
        self.notify()

    def freed(self, model_id: ModelId) -> None:
        """A slot is free; a suspended model whose client sent something meanwhile wants one again."""
        self.residency.freed(model_id)
        model = self.roster.get(model_id)
        if model is not None:
            self.slots.want_back(model)

    # What is lost.

    def lose_trainer(self) -> list[Model]:
        """Forget the lanes and the slots of a lost trainer; the models whose state is gone with it."""
        self.scheduler.lanes.clear()
        self.history.lose_trainer()
        self._loads.clear()
        return self.slots.lose_trainer()

    def fail_unfinished(self, model: Model, error: LiloError) -> None:
        """Fail everything of a model, running or not."""
        for entry in model.ledger.unfinished():
            self.fail(model, entry, error)

    @property
    def num_queued(self) -> int:
        """Operations that wait, of all models, and models that wait for a slot."""
        parked = sum(len(model.ledger.sequence) for model in self.roster.all_resident())
        return parked + self.residency.num_waiting

    # Parts.

    def _finished(self, entry: Entry) -> None:
        self.waiters.wake(entry.request_id)
        self.on_finished(entry)

    def _slot_step(self) -> SlotStep | None:
        step = self.slots.next_step(self._clock())
        if isinstance(step, Suspend):
            self.scheduler.remove(step.model.model_id)
        return step

    def _cover(self) -> Cover | None:
        """A snapshot of the engine's own, when too much is in none."""
        model_id = self.history.heaviest(self._may_cover)
        return None if model_id is None else self.slots.cover(self.roster.resident(model_id))

    def _may_cover(self, model_id: ModelId) -> bool:
        return self.slots.may_cover(self.roster.resident(model_id))

    def _plan(self) -> Plan | None:
        now_s = self._clock()
        self._held_until_s = now_s + self._gathering.until_s(now_s)
        plan = self.scheduler.next_plan(hold_passes=math.isfinite(self._held_until_s))
        if plan is not None:
            for entry in plan.entries:
                assert entry.operation is not None
                model_id = entry.operation.model_id
                taken = self.roster.resident(model_id).ledger.sequence.take()
                assert taken is entry, "a plan takes operations in order"
                self._running.add(model_id)
        return plan

    def _settle_refused(self, model: Model) -> None:
        """Fail what was refused and is next; that needs no trainer, so it does not wait for other models."""
        if model.phase in ("creating", "ended") or model.loading or model.model_id in self._running:
            return
        sequence = model.ledger.sequence
        head = sequence.peek()
        while head is not None and head.refusal is not None:
            sequence.take()
            if head.operation is not None and adds_gradients(head.operation):
                model.window.spoil(f"forward_backward number {head.seq_id}", head.refusal)
            self.fail(model, head, head.refusal)
            head = sequence.peek()
