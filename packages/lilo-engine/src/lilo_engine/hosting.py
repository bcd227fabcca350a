"""Hosting: carries out what was decided about slots on one running trainer: makes models, puts them aside, frees slots.

`slots.py` decides and `serving.py` calls, on the GPU lane; reading what a model is made from and writing one that is
suspended go on beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import anyio.abc

from lilo_engine.commands.command import CaptureId
from lilo_engine.commands.dispatch import Dispatcher
from lilo_engine.console.recorder import Recorder
from lilo_engine.errors import CommandFailed, Gone, LiloError
from lilo_engine.journal import Journal
from lilo_engine.operations.operation import ModelId
from lilo_engine.operations.result import ModelCreated
from lilo_engine.operations.roster import Model
from lilo_engine.saving import Saving
from lilo_engine.slots import Cover, Create, Prepare, SlotStep, Suspend, Unload
from lilo_engine.work import Work

_log = logging.getLogger(__name__)

_SUSPENDED = "it is idle and another model waits for its slot"
_COVERED = "too much was done since it was last saved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """The slots of one running trainer."""

    dispatcher: Dispatcher
    work: Work
    journal: Journal
    recorder: Recorder
    saving: Saving
    on_saved: Callable[[], None]
    """Called when a persist lane is free again."""

    async def carry_out(self, step: SlotStep, lanes: anyio.abc.TaskGroup) -> None:
        """Do one step; returns when the GPU lane is free again."""
        match step:
            case Prepare():
                lanes.start_soon(self._prepare, step.model)
            case Create():
                await self._create(step)
            case Unload():
                await self._unload(step.model_id)
            case Suspend():
                await self._suspend(step, lanes)
            case Cover():
                await self._cover(step, lanes)

    async def _prepare(self, model: Model) -> None:
        request = model.to_be_made
        assert request.source is not None, "a model from nothing needs no preparation"
        error = await self.dispatcher.prepare(request.source, with_optimizer=request.with_optimizer)
        self.work.slots.prepared(Create(model, error))
        self.work.notify()

    async def _create(self, step: Create) -> None:
        """Fill a slot: with a new model, or with one that was put aside."""
        model, error = step.model, step.refusal
        coming_back = model.phase == "suspended"
        if model.ended:
            error = model.gone()
        elif error is None:
            span = self.recorder.begin("gpu", "create", (model.model_id,))
            error = await self.dispatcher.create(model.to_be_made)
            self.recorder.end(span, failed=error is not None)
        if error is not None:
            self.work.residency.failed(model.model_id)
        else:
            self.work.residency.made(model.model_id)
            if not coming_back:
                error = await self._record(model)
        if error is None and not model.ended:
            self.work.ready(model)
            result = ModelCreated(model_id=model.model_id, source=model.request.source)
            self.work.complete(model, model.creation, result)
        elif model.ended:
            self.work.slots.give_up(model)
            self.work.fail(model, model.creation, model.gone())
        elif error is not None:
            await self._give_up(model, error, coming_back=coming_back)

    async def _give_up(self, model: Model, error: LiloError, *, coming_back: bool) -> None:
        what = "brought back" if coming_back else "created"
        reason = f"it was not {what}: {error.message}"
        self.work.fail(model, model.creation, error)
        gone = Gone(f"{model.model_id} is gone: {reason}")
        self.work.end(model, reason, model.gone_with(reason) if coming_back else gone)
        if not coming_back:
            return
        try:
            await self.journal.model_ended(model.model_id, reason)
        except Exception:
            # The models of others go on; this one's record is mended when its session ends.
            _log.exception("the end of %s could not be recorded", model.model_id)

    async def _record(self, model: Model) -> LiloError | None:
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

    async def _unload(self, model_id: ModelId) -> None:
        span = self.recorder.begin("gpu", "unload", (model_id,))
        await self.dispatcher.unload(model_id)
        self.recorder.end(span)
        self.work.freed(model_id)

    async def _suspend(self, step: Suspend, lanes: anyio.abc.TaskGroup) -> None:
        _log.info("%s is put aside: %s", step.model.model_id, _SUSPENDED)
        captured = await self.saving.capture(step.save, "checkpoint", _SUSPENDED)
        if isinstance(captured, LiloError):
            self._stay(step.model, captured)
            return
        lanes.start_soon(self._put_aside, step, captured)

    async def _put_aside(self, step: Suspend, captured: CaptureId) -> None:
        saved = await self.saving.persist(step.model, step.save, "checkpoint", captured, _SUSPENDED)
        if step.model.ended:
            pass
        elif isinstance(saved, LiloError):
            self._stay(step.model, saved)
        else:
            self.work.suspended(step.model, saved.ref)
        self.on_saved()

    async def _cover(self, step: Cover, lanes: anyio.abc.TaskGroup) -> None:
        _log.info("%s is saved by the engine: %s", step.model.model_id, _COVERED)
        captured = await self.saving.capture(step.save, "checkpoint", _COVERED)
        if isinstance(captured, LiloError):
            _log.warning("%s could not be saved: %s", step.model.model_id, captured.message)
            return
        lanes.start_soon(self._save, step, captured)

    async def _save(self, step: Cover, captured: CaptureId) -> None:
        saved = await self.saving.persist(step.model, step.save, "checkpoint", captured, _COVERED)
        if isinstance(saved, LiloError):
            _log.warning("%s could not be saved: %s", step.model.model_id, saved.message)
        else:
            step.model.kept = saved.ref
        self.on_saved()

    def _stay(self, model: Model, error: LiloError) -> None:
        """It keeps its slot, and is not asked for it again before it has been idle for as long once more."""
        _log.warning("%s could not be put aside: %s", model.model_id, error.message)
        if not model.ended:
            self.work.ready(model)
