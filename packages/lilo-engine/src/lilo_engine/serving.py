"""Serving: the engine's loops over one running trainer: choose, dispatch, settle, until it is lost.

    GPU lane       waits for: work that can start        unblocked by: submissions, finished saves, new models
    a persist      waits for: the trainer                 unblocked by: its answer; then its lane is free again
    a preparation  waits for: the trainer                 unblocked by: its answer; then what was read can be loaded
    look           waits for: some seconds                unblocked by: the clock
    watch          waits for: the end of the trainer      unblocked by: the launcher

All of them live in one task group: the first loss ends them all, and nothing is sent to that trainer again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import anyio
import anyio.abc

from lilo_engine.commands.command import CaptureId
from lilo_engine.commands.dispatch import Dispatcher, Outcome, Ran
from lilo_engine.commands.launcher import LOSS_NEWS_LIMIT_S, RunningBackend
from lilo_engine.console.recorder import Recorder
from lilo_engine.console.span import Span
from lilo_engine.errors import BackendLost, CommandFailed, LiloError, Unavailable
from lilo_engine.history.files import Files
from lilo_engine.history.record import PlanRecord
from lilo_engine.hosting import Hosting
from lilo_engine.journal import Journal
from lilo_engine.operations.ledger import Entry
from lilo_engine.operations.operation import (
    ForwardBackward,
    LoadState,
    OptimStep,
    SaveSampler,
    SaveState,
    adds_gradients,
)
from lilo_engine.operations.roster import Model
from lilo_engine.saving import Saving
from lilo_engine.schedule.lanes import PersistLane
from lilo_engine.schedule.plan import Plan
from lilo_engine.work import Load, Work

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
"""How long a trainer that is lost while nothing runs may go unnoticed."""
MAX_SILENT_LOOKS = 6
"""An idle trainer has nothing to do but to answer; half a minute of silence is no hiccup."""


@dataclass(slots=True, kw_only=True)
class Serving:
    """One epoch."""

    running: RunningBackend
    work: Work
    journal: Journal
    recorder: Recorder
    files: Files
    """Where the passes lie whose turn is far."""
    draining: anyio.Event
    """Set: nothing new is started."""
    idle: anyio.Event = field(default_factory=anyio.Event)
    """Set when draining and nothing runs any more."""
    _dispatcher: Dispatcher = field(init=False)
    _saving: Saving = field(init=False)
    _hosting: Hosting = field(init=False)

    def __post_init__(self) -> None:
        """Put the parts together."""
        self._dispatcher = Dispatcher(self.running.backend)
        self._saving = Saving(
            dispatcher=self._dispatcher,
            lanes=self.work.scheduler.lanes,
            journal=self.journal,
            recorder=self.recorder,
            history=self.work.history,
        )
        self._hosting = Hosting(
            dispatcher=self._dispatcher,
            work=self.work,
            journal=self.journal,
            recorder=self.recorder,
            saving=self._saving,
            on_saved=self._saved,
        )

    async def run(self) -> str:
        """Serve until the trainer is lost: the cause, in words."""
        causes: list[str] = []
        try:
            async with anyio.create_task_group() as lanes:
                lanes.start_soon(self._watch, causes, lanes.cancel_scope)
                lanes.start_soon(self._look)
                lanes.start_soon(self._gpu_lane, lanes)
        except* BackendLost as group:
            causes.append(_first(group))
            # The first cause says more than the connection that it broke.
            with anyio.move_on_after(LOSS_NEWS_LIMIT_S):
                causes.insert(0, await self.running.wait_lost())
        return causes[0]

    async def _watch(self, causes: list[str], scope: anyio.CancelScope) -> None:
        causes.append(await self.running.wait_lost())
        scope.cancel()

    async def _look(self) -> None:
        """Ask a trainer for its progress, so that one that is lost while nothing runs is noticed. Ended by its group.

        A command that runs has its own limit; a trainer that is busy may be silent.
        """
        strikes = 0
        while strikes < MAX_SILENT_LOOKS:
            await anyio.sleep(LOOK_EVERY_S)
            try:
                await self._dispatcher.health()
                strikes = 0
            except Unavailable:
                strikes = 0 if self.recorder.running else strikes + 1
        raise BackendLost(
            f"it did not tell its progress {strikes} times in a row, over {strikes * LOOK_EVERY_S:.0f} s in which "
            "nothing was asked of it"
        )

    async def _gpu_lane(self, lanes: anyio.abc.TaskGroup) -> None:
        while not self.draining.is_set():
            step = self.work.next_step()
            match step:
                case None:
                    await self.work.wait()
                case Plan():
                    await self._carry_out(step, lanes)
                case Load():
                    await self._load(step)
                case _:
                    await self._hosting.carry_out(step, lanes)
        self._tell_idle()

    # Operations.

    async def _carry_out(self, plan: Plan, lanes: anyio.abc.TaskGroup) -> None:
        _log.debug("%s lane: %s", plan.lane, plan.reason)
        operation = plan.entries[0].operation
        assert operation is not None, "what is taken has not finished"
        model = self._model_of(plan.entries[0])
        match operation:
            case ForwardBackward():
                await self._pass(plan)
            case OptimStep():
                await self._steps(plan)
            case LoadState():
                self.work.begin_load(model)
                lanes.start_soon(self._prepare, model, plan, operation)
            case SaveState() | SaveSampler():
                await self._capture(plan, operation, lanes)
            case _:
                raise AssertionError(f"{operation} was settled before")

    async def _steps(self, plan: Plan) -> None:
        """One after another; each client hears of its own at once."""
        # A model may end while the steps of others run; its own still runs, since its slot is freed later.
        models = [self._model_of(entry) for entry in plan.entries]
        record = self.work.history.planned(plan.entries, plan.reason)
        steps = [
            entry.operation for entry in plan.entries if isinstance(entry.operation, OptimStep)
        ]
        spans = [self._begin_step(plan, 0)]

        def told(place: int, ran: Ran) -> None:
            outcome = ran.outcome
            # The thread may be steps ahead of the loop: only its own times are those of a step.
            spans[place].started_s = ran.began_s
            self.recorder.end(
                spans[place], failed=isinstance(outcome, LiloError), ended_s=ran.ended_s
            )
            if place + 1 < len(steps):
                spans.append(self._begin_step(plan, place + 1))
            model = models[place]
            if isinstance(outcome, LiloError):
                self.work.history.dropped(model.model_id)
            else:
                self.work.history.stepped(steps[place], record)
            self._settle(model, plan.entries[place], outcome)
            self.work.settled(model)

        windows = [model.window for model in models]
        await self._dispatcher.steps(
            list(zip(steps, windows, strict=True)), told, self.recorder.clock
        )

    def _begin_step(self, plan: Plan, place: int) -> Span:
        entry = plan.entries[place]
        assert entry.operation is not None, "what is taken has not finished"
        return self.recorder.begin(
            "gpu",
            "optim_step",
            (entry.operation.model_id,),
            reason=plan.reason,
            request_ids=(entry.request_id,),
        )

    def _model_of(self, entry: Entry) -> Model:
        assert entry.operation is not None, "what is taken has not finished"
        return self.work.roster.resident(entry.operation.model_id)

    async def _pass(self, plan: Plan) -> None:
        # A model may end while the data of others is read; what is taken still runs.
        models = [self._model_of(entry) for entry in plan.entries]
        passes: list[_Pass] = []
        for entry, model in zip(plan.entries, models, strict=True):
            try:
                operation = await self.files.operation(self.work.history.payloads.of(entry))
            except CommandFailed as error:
                if entry.operation is not None and adds_gradients(entry.operation):
                    model.window.spoil(f"forward_backward number {entry.seq_id}", error)
                self._settle(model, entry, error)
                self.work.settled(model)
            else:
                passes.append(_Pass(entry, model, operation))
        if passes:
            await self._run(passes, self.work.history.planned(plan.entries, plan.reason))

    async def _run(self, passes: Sequence[_Pass], plan: PlanRecord) -> None:
        span = self.recorder.begin_passes([one.operation for one in passes], plan.reason)
        outcomes = await self._dispatcher.passes(
            [(one.entry.request_id, one.operation) for one in passes],
            [one.model.window for one in passes],
        )
        self.recorder.end(span, failed=sum(isinstance(o, LiloError) for o in outcomes))
        for one, outcome in zip(passes, outcomes, strict=True):
            if not isinstance(outcome, LiloError) and not one.operation.forward_only:
                self.work.history.passed(one.model.model_id, one.entry, plan)
            self._settle(one.model, one.entry, outcome)
        for one in passes:
            self.work.settled(one.model)

    def _settle(self, model: Model, entry: Entry, outcome: Outcome) -> None:
        if isinstance(outcome, LiloError):
            _log.info("%s failed: %s", entry.request_id, outcome.message)
            self.work.fail(model, entry, outcome)
        else:
            self.work.complete(model, entry, outcome)

    # Loads.

    async def _prepare(self, model: Model, plan: Plan, operation: LoadState) -> None:
        """Read the checkpoint beside the GPU lane: minutes of reading and digesting are nobody else's wait."""
        error = await self._dispatcher.prepare(
            operation.source, with_optimizer=operation.with_optimizer
        )
        self.work.prepared(Load(model, plan, error))

    async def _load(self, step: Load) -> None:
        (entry,), model = step.plan.entries, step.model
        operation = entry.operation
        assert isinstance(operation, LoadState), "a load is a plan of its own"
        if model.ended:
            outcome: Outcome = model.gone()
        elif step.refusal is not None:
            outcome = step.refusal
        else:
            span = self.recorder.begin(
                "gpu",
                "load",
                (operation.model_id,),
                reason=step.plan.reason,
                request_ids=(entry.request_id,),
            )
            outcome = await self._dispatcher.load(operation, model.window)
            self.recorder.end(span, failed=isinstance(outcome, LiloError))
            if not isinstance(outcome, LiloError):
                self.work.history.loaded(operation)
        self._settle(model, entry, outcome)
        self.work.loaded(model)

    # Saves.

    async def _capture(
        self, plan: Plan, operation: SaveState | SaveSampler, lanes: anyio.abc.TaskGroup
    ) -> None:
        assert plan.lane != "gpu", "a save has its reservation"
        model = self.work.roster.resident(operation.model_id)
        captured = await self._saving.capture(operation, plan.lane, plan.reason)
        self.work.settled(model)
        if isinstance(captured, LiloError):
            self._settle(model, plan.entries[0], captured)
            return
        lanes.start_soon(self._persist, model, plan, plan.lane, operation, captured)

    async def _persist(
        self,
        model: Model,
        plan: Plan,
        lane: PersistLane,
        operation: SaveState | SaveSampler,
        captured: CaptureId,
    ) -> None:
        outcome = await self._saving.persist(model, operation, lane, captured, plan.reason)
        self._settle(model, plan.entries[0], outcome)
        self._saved()

    def _saved(self) -> None:
        """A persist lane is free again."""
        self.work.notify()
        self._tell_idle()

    def _tell_idle(self) -> None:
        if self.draining.is_set() and self.work.scheduler.lanes.num_persisting == 0:
            self.idle.set()


class _Pass(NamedTuple):
    """One pass of a plan, with its data at hand."""

    entry: Entry
    model: Model
    operation: ForwardBackward


def _first(group: BaseExceptionGroup[BackendLost]) -> str:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error.message
