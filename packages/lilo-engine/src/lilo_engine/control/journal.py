"""ControlJournal: what the engine reports goes into the records before the client sees the result."""

from __future__ import annotations

from collections.abc import Callable

from lilo_engine.commands.command import Published
from lilo_engine.control.checkpoints import Checkpoints
from lilo_engine.control.runs import Runs
from lilo_engine.control.sampling_sessions import SamplingSession, SamplingSessions
from lilo_engine.operations.ids import INFLIGHT_PREFIX
from lilo_engine.operations.operation import CreateModel, ModelId, SaveSampler, SaveState
from lilo_engine.operations.reference import CheckpointRef


class ControlJournal:
    """Implements `lilo_engine.journal.Journal` over the records."""

    def __init__(
        self,
        *,
        runs: Runs,
        checkpoints: Checkpoints,
        sampling_sessions: SamplingSessions,
        clock: Callable[[], float],
    ) -> None:
        self._runs = runs
        self._checkpoints = checkpoints
        self._sampling_sessions = sampling_sessions
        self._clock = clock

    async def model_created(self, request: CreateModel) -> None:
        """A model became resident."""
        await self._runs.created(request, self._clock())

    async def model_ended(self, model_id: ModelId, reason: str) -> None:
        """A model is not resident any more."""
        await self._runs.ended(model_id, reason, self._clock())

    async def published(self, operation: SaveState | SaveSampler, published: Published) -> None:
        """A checkpoint became visible; an ephemeral save opens its sampling session."""
        now_s = self._clock()
        ref = CheckpointRef(run_id=published.run_id, kind=published.kind, name=published.name)
        await self._checkpoints.published(operation, published, now_s)
        self._sampling_sessions.forget(ref)
        if not isinstance(operation, SaveSampler) or operation.sampling_session_id is None:
            return
        run = await self._runs.get(operation.model_id)
        moving = operation.name.startswith(INFLIGHT_PREFIX)
        session = SamplingSession(
            sampling_session_id=operation.sampling_session_id,
            session_id=run.session_id,
            base_model=run.base_model,
            ref=ref,
            attempt=published.attempt,
            moving=moving,
        )
        await self._sampling_sessions.open(session, now_s)
        if moving:
            await self._sampling_sessions.move(published.run_id, ref, published.attempt)
