"""Saving: a model's state leaves the device on the GPU lane and becomes a checkpoint on a lane of its own.

    capture (GPU lane, its persist lane reserved before) -> persist (beside it) -> recorded

Used by `serving.py` for what clients save and by `hosting.py` for models that are put aside. It settles no future.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

from lilo_engine.commands.command import CaptureId, Destination, Published
from lilo_engine.commands.dispatch import Dispatcher
from lilo_engine.console.recorder import Recorder
from lilo_engine.errors import CommandFailed, LiloError
from lilo_engine.history.history import History
from lilo_engine.journal import Journal
from lilo_engine.operations.ledger import request_id_of
from lilo_engine.operations.operation import RequestId, SaveSampler, SaveState
from lilo_engine.operations.reference import CheckpointKind, CheckpointRef
from lilo_engine.operations.result import Saved
from lilo_engine.operations.roster import Model
from lilo_engine.schedule.lanes import Lanes, PersistLane

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Saves models of one running trainer."""

    dispatcher: Dispatcher
    lanes: Lanes
    journal: Journal
    recorder: Recorder
    history: History

    async def capture(
        self, operation: SaveState | SaveSampler, lane: PersistLane, reason: str
    ) -> CaptureId | LiloError:
        """Freeze the state; the reserved lane is given back if that fails."""
        span = self.recorder.begin(
            "gpu", "capture", (operation.model_id,), reason=reason, request_ids=_ids(operation)
        )
        captured = await self.dispatcher.capture(operation)
        failed = isinstance(captured, LiloError)
        self.recorder.end(span, failed=failed)
        if isinstance(captured, LiloError):
            self.lanes.release(lane, operation.model_id)
            self.history.not_captured(operation.model_id)
        elif isinstance(operation, SaveState):
            self.history.captured(captured, operation.model_id)
        return captured

    async def persist(
        self,
        model: Model,
        operation: SaveState | SaveSampler,
        lane: PersistLane,
        captured: CaptureId,
        reason: str,
    ) -> Saved | LiloError:
        """Make the captured state a checkpoint, record it, and give the lane back."""
        span = self.recorder.begin(
            lane, "persist", (operation.model_id,), reason=reason, request_ids=_ids(operation)
        )
        published = await self.dispatcher.persist(captured, destination_of(model, operation))
        failed = isinstance(published, LiloError)
        self.recorder.end(span, failed=failed)
        outcome = published if failed else await self._record(model, operation, published)
        self.history.published(captured, None if isinstance(outcome, LiloError) else outcome.ref)
        self.lanes.release(lane, operation.model_id)
        return outcome

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


def _ids(operation: SaveState | SaveSampler) -> tuple[RequestId, ...]:
    return (request_id_of(operation.model_id, operation.seq_id),)


def destination_of(model: Model, operation: SaveState | SaveSampler) -> Destination:
    """Where a save goes, with what a catalogue must know of it without records."""
    metadata = {
        "session_id": model.request.session_id,
        "owner": model.request.owner,
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


def _kind(operation: SaveState | SaveSampler) -> CheckpointKind:
    if isinstance(operation, SaveState):
        return "weights"
    return "external_weights" if operation.external else "sampler_weights"
