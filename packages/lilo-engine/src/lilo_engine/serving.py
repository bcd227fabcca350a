"""Serving: the engine's loops over one running trainer: choose, dispatch, settle, until it is lost.

    GPU lane       waits for: work that can start        unblocked by: submissions, finished saves, new models
    a persist      waits for: the trainer                 unblocked by: its answer; then its lane is free again
    watch          waits for: the end of the trainer      unblocked by: the launcher

All of them live in one task group: the first loss ends them all, and nothing is sent to that trainer again.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field

import anyio
import anyio.abc

from lilo_engine.commands.command import BackendInfo, CaptureId, Destination, Published
from lilo_engine.commands.dispatch import Dispatcher, Outcome
from lilo_engine.commands.launcher import EXIT_NEWS_LIMIT_S, RunningBackend
from lilo_engine.console.recorder import Recorder
from lilo_engine.errors import BackendLost, CommandFailed, Gone, LiloError, Saturated
from lilo_engine.journal import Journal
from lilo_engine.operations.ledger import Entry
from lilo_engine.operations.operation import (
    ForwardBackward,
    LoadState,
    OptimStep,
    SaveSampler,
    SaveState,
)
from lilo_engine.operations.reference import CheckpointKind, CheckpointRef
from lilo_engine.operations.result import ModelCreated, Saved
from lilo_engine.operations.roster import Model
from lilo_engine.schedule.lanes import PersistLane
from lilo_engine.schedule.plan import Plan
from lilo_engine.work import Create, Unload, Work

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Serving:
    """One epoch."""

    running: RunningBackend
    info: BackendInfo
    work: Work
    journal: Journal
    recorder: Recorder
    draining: anyio.Event
    """Set: nothing new is started."""
    idle: anyio.Event = field(default_factory=anyio.Event)
    """Set when draining and nothing runs any more."""
    num_slots_taken: int = 0

    async def run(self) -> str:
        """Serve until the trainer is lost: the cause, in words."""
        causes: list[str] = []
        try:
            async with anyio.create_task_group() as lanes:
                lanes.start_soon(self._watch, causes, lanes.cancel_scope)
                lanes.start_soon(self._gpu_lane, lanes)
        except* BackendLost as group:
            causes.append(_first(group))
            # The news of the exit says more than the connection that it broke.
            with anyio.move_on_after(EXIT_NEWS_LIMIT_S):
                causes.insert(0, await self.running.wait_lost())
        return causes[0]

    async def _watch(self, causes: list[str], scope: anyio.CancelScope) -> None:
        causes.append(await self.running.wait_lost())
        scope.cancel()

    async def _gpu_lane(self, lanes: anyio.abc.TaskGroup) -> None:
        dispatcher = Dispatcher(self.running.backend)
        while not self.draining.is_set():
            step = self.work.next_step()
            match step:
                case None:
                    await self.work.wait()
                case Create():
                    await self._create(dispatcher, step.model)
                case Unload():
                    span = self.recorder.begin("gpu", "unload", (step.model_id,))
                    await dispatcher.unload(step.model_id)
                    self.recorder.end(span)
                    self.num_slots_taken -= 1
                case Plan():
                    await self._carry_out(dispatcher, step, lanes)
        self._tell_idle()

    # Models.

    async def _create(self, dispatcher: Dispatcher, model: Model) -> None:
        request = model.request
        error: LiloError | None = None
        if self.num_slots_taken >= self.info.slots:
            error = Saturated(
                f"all {self.info.slots} slots of this trainer are taken by resident models; "
                "end a session, or wait until an idle one expires, and create the model again"
            )
        else:
            span = self.recorder.begin("gpu", "create", (request.model_id,))
            error = await dispatcher.create(request)
            self.recorder.end(span, failed=error is not None)
        if error is None:
            self.num_slots_taken += 1
            error = await self._record_model(model)
            if error is not None:
                self.work.free_slot(request.model_id)
        if model.ended:
            self.work.fail(model, model.creation, model.gone())
            return
        if error is not None:
            self.work.fail(model, model.creation, error)
            reason = f"it was not created: {error.message}"
            self.work.end(model, reason, Gone(f"{model.model_id} is gone: {reason}"))
            return
        self.work.ready(model)
        result = ModelCreated(model_id=request.model_id, source=request.source)
        self.work.complete(model, model.creation, result)

    async def _record_model(self, model: Model) -> LiloError | None:
        """Tell the journal of a model that was made; why it cannot stay, if so."""
        request = model.request
        if model.ended:
            return model.gone()
        try:
            await self.journal.model_created(request)
            # It may have been unloaded meanwhile, when there was nothing to take back yet.
            if model.ended:
                await self.journal.model_ended(request.model_id, model.reason)
                return model.gone()
        except Exception as failure:
            _log.exception("%s could not be recorded", request.model_id)
            return CommandFailed(f"the model could not be recorded: {failure}")
        return None

    # Operations.

    async def _carry_out(
        self, dispatcher: Dispatcher, plan: Plan, lanes: anyio.abc.TaskGroup
    ) -> None:
        _log.debug("%s lane: %s", plan.lane, plan.reason)
        operation = plan.entries[0].operation
        assert operation is not None, "what is taken has not finished"
        model = self._model_of(plan.entries[0])
        match operation:
            case ForwardBackward():
                await self._pass(dispatcher, plan)
                return
            case OptimStep():
                await self._steps(dispatcher, plan)
                return
            case LoadState():
                span = self.recorder.begin("gpu", "load", (operation.model_id,), reason=plan.reason)
                outcome = await dispatcher.load(operation, model.window)
                self.recorder.end(span, failed=isinstance(outcome, LiloError))
            case SaveState() | SaveSampler():
                await self._capture(dispatcher, plan, operation, lanes)
                return
            case _:
                raise AssertionError(f"{operation} was settled before")
        self._settle(model, plan, 0, outcome)
        self.work.settled(model)

    async def _steps(self, dispatcher: Dispatcher, plan: Plan) -> None:
        """One after another; each client hears of its own at once."""
        # A model may end while the steps of others run; its own still runs, since its slot is freed later.
        models = [self._model_of(entry) for entry in plan.entries]
        for index, (entry, model) in enumerate(zip(plan.entries, models, strict=True)):
            assert isinstance(entry.operation, OptimStep)
            span = self.recorder.begin("gpu", "optim_step", (model.model_id,), reason=plan.reason)
            outcome = await dispatcher.step(entry.operation, model.window)
            self.recorder.end(span, failed=isinstance(outcome, LiloError))
            self._settle(model, plan, index, outcome)
            self.work.settled(model)

    def _model_of(self, entry: Entry) -> Model:
        assert entry.operation is not None, "what is taken has not finished"
        return self.work.roster.resident(entry.operation.model_id)

    async def _pass(self, dispatcher: Dispatcher, plan: Plan) -> None:
        operations: list[tuple[str, ForwardBackward]] = []
        models: list[Model] = []
        for entry in plan.entries:
            assert isinstance(entry.operation, ForwardBackward)
            operations.append((entry.request_id, entry.operation))
            models.append(self._model_of(entry))
        span = self.recorder.begin_passes(plan.entries, plan.reason)
        outcomes = await dispatcher.passes(operations, [model.window for model in models])
        self.recorder.end(span, failed=sum(isinstance(o, LiloError) for o in outcomes))
        for index, (model, outcome) in enumerate(zip(models, outcomes, strict=True)):
            self._settle(model, plan, index, outcome)
        for model in models:
            self.work.settled(model)

    def _settle(self, model: Model, plan: Plan, index: int, outcome: Outcome) -> None:
        entry = plan.entries[index]
        if isinstance(outcome, LiloError):
            _log.info("%s failed: %s", entry.request_id, outcome.message)
            self.work.fail(model, entry, outcome)
        else:
            self.work.complete(model, entry, outcome)

    # Saves.

    async def _capture(
        self,
        dispatcher: Dispatcher,
        plan: Plan,
        operation: SaveState | SaveSampler,
        lanes: anyio.abc.TaskGroup,
    ) -> None:
        assert plan.lane != "gpu", "a save has its reservation"
        model = self.work.roster.resident(operation.model_id)
        span = self.recorder.begin("gpu", "capture", (operation.model_id,), reason=plan.reason)
        captured = await dispatcher.capture(operation)
        self.recorder.end(span, failed=isinstance(captured, LiloError))
        self.work.settled(model)
        if isinstance(captured, LiloError):
            self.work.scheduler.lanes.release(plan.lane, operation.model_id)
            self._settle(model, plan, 0, captured)
            return
        lanes.start_soon(self._persist, dispatcher, model, plan, plan.lane, operation, captured)

    async def _persist(
        self,
        dispatcher: Dispatcher,
        model: Model,
        plan: Plan,
        lane: PersistLane,
        operation: SaveState | SaveSampler,
        capture_id: CaptureId,
    ) -> None:
        destination = _destination(model, operation)
        span = self.recorder.begin(lane, "persist", (operation.model_id,), reason=plan.reason)
        published = await dispatcher.persist(capture_id, destination)
        self.recorder.end(span, failed=isinstance(published, LiloError))
        outcome: Saved | LiloError
        if isinstance(published, LiloError):
            outcome = published
        else:
            outcome = await self._record(model, operation, published)
        self.work.scheduler.lanes.release(lane, operation.model_id)
        self._settle(model, plan, 0, outcome)
        self.work.notify()
        self._tell_idle()

    async def _record(
        self, model: Model, operation: SaveState | SaveSampler, published: Published
    ) -> Saved | LiloError:
        ref = CheckpointRef(run_id=published.run_id, kind=published.kind, name=published.name)
        try:
            await self.journal.published(operation, published)
        except Exception as error:
            _log.exception("%s could not be recorded", ref)
            return CommandFailed(f"{ref} is published, but could not be recorded: {error}")
        if isinstance(operation, SaveState):
            model.last_checkpoint = ref
            return Saved(ref=ref)
        return Saved(
            ref=ref,
            sampling_session_id=operation.sampling_session_id,
            size_bytes=published.size_bytes,
        )

    def _tell_idle(self) -> None:
        if self.draining.is_set() and self.work.scheduler.lanes.num_persisting == 0:
            self.idle.set()


def _destination(model: Model, operation: SaveState | SaveSampler) -> Destination:
    """Where a save goes, with what a catalogue must know of it without records."""
    metadata = {
        "session_id": model.request.session_id,
        "user_metadata": json.dumps(dict(operation.user_metadata)),
    }
    if operation.ttl_s is not None:
        metadata["ttl_s"] = str(operation.ttl_s)
    if isinstance(operation, SaveSampler) and operation.sampling_session_id is not None:
        metadata["sampling_session_id"] = operation.sampling_session_id
    return Destination(
        run_id=operation.model_id,
        kind=_kind(operation),
        name=operation.name,
        order=operation.seq_id,
        # A snapshot of the same name replaces the older one: the SDK has no way to ask for it.
        overwrite=not isinstance(operation, SaveState) or operation.overwrite,
        metadata=metadata,
    )


def _first(group: BaseExceptionGroup[BackendLost]) -> str:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error.message


def _kind(operation: SaveState | SaveSampler) -> CheckpointKind:
    if isinstance(operation, SaveState):
        return "weights"
    return "external_weights" if operation.external else "sampler_weights"
