"""Engine: takes operations of many models, runs them on one trainer, and answers for them. Implements EngineClient.

    submit -> Work (numbered, parked) -> Serving (chosen, dispatched, settled) -> retrieve

It is not the trainer (`commands/` reaches that), not the schedule (`schedule/` decides), and not the records
(`Journal` hears what outlives it). `app.py` makes one, starts `run` in its task group, and hands it to the front.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
from lilo_definitions import Definition

from lilo_engine.commands.launcher import Launcher
from lilo_engine.commands.supervisor import Supervisor
from lilo_engine.console.overview import overview
from lilo_engine.console.recorder import Recorder
from lilo_engine.engine_client import EngineState
from lilo_engine.errors import BackendLost, Gone, InvalidRequest, LiloError, Unavailable
from lilo_engine.history.files import Files, own_folder
from lilo_engine.history.history import HistorySettings
from lilo_engine.history.segments import Segments
from lilo_engine.journal import Journal
from lilo_engine.operations.fingerprint import Fingerprint, fingerprint
from lilo_engine.operations.operation import (
    CreateModel,
    ForwardBackward,
    ModelId,
    Operation,
    RequestId,
)
from lilo_engine.operations.residency import Place
from lilo_engine.operations.result import Failed, FutureState, Pending
from lilo_engine.operations.roster import Model
from lilo_engine.operations.validate import check, check_model, check_seq_id
from lilo_engine.trainers import Trainers
from lilo_engine.work import Work

THREAD_FROM_TOKENS = 16384
"""Requests from this size on are checked and hashed in a thread: it takes longer than a heartbeat may wait."""
SUSPEND_IDLE_S = 300.0
"""Long enough that a client which samples between its steps keeps its slot; being put aside costs it seconds."""


class Engine:
    """One trainer and everything asked of it."""

    def __init__(
        self,
        *,
        definition: Definition,
        launcher: Launcher,
        journal: Journal,
        max_forward_backward_batch: int | Literal["as defined"] | None = "as defined",
        suspend_idle_s: float = SUSPEND_IDLE_S,
        history: HistorySettings | None = None,
        segments: Path | None = None,
    ) -> None:
        """Build it; nothing runs before `run`.

        Args:
            definition: what is served.
            launcher: starts trainers.
            journal: hears what outlives the engine.
            max_forward_backward_batch: in place of the definition's: passes in one command at most; None = no cap.
            suspend_idle_s: how long nothing was asked of a model before one that waits may have its slot.
            history: how much is kept in memory, and how much that no snapshot covers; None = the defaults.
            segments: folder for the payloads of passes that do not stay in memory; None = one of its own, among
                temporary files.

        Raises:
            ValueError: the cap is below 1.
        """
        if max_forward_backward_batch != "as defined":
            definition = definition.derive(
                limits={"max_forward_backward_batch": max_forward_backward_batch}
            )
        self._definition = definition
        self._journal = journal
        self._work = Work(definition, suspend_idle_s=suspend_idle_s, history=history)
        self.history = self._work.history
        """What was done to each model since its newest snapshot."""
        self.files = Files(self.history.payloads, Segments(segments or own_folder()))
        """Where the passes lie that do not stay in memory."""
        self.recorder = Recorder(context=definition.context)
        """What the lanes did."""
        self._work.on_accepted = lambda entry: self.recorder.watcher.accepted(entry)
        self._work.on_finished = lambda entry: self.recorder.watcher.finished(entry)
        self._trainers = Trainers(
            supervisor=Supervisor(launcher),
            work=self._work,
            journal=journal,
            recorder=self.recorder,
            files=self.files,
        )

    # The client's side.

    async def submit(self, operation: Operation, trace_parent: str | None = None) -> RequestId:
        """Accept a numbered operation; the same number and payload again gives the same id."""
        check_seq_id(operation.seq_id)
        if isinstance(operation, ForwardBackward) and operation.num_tokens >= THREAD_FROM_TOKENS:
            mark, refusal = await anyio.to_thread.run_sync(self._examine, operation)
        else:
            mark, refusal = self._examine(operation)
        # From here on nothing waits, so that two copies of one request cannot both be new.
        model = self._work.roster.resident(operation.model_id)
        known = model.ledger.known(operation.seq_id, mark)
        if known is not None:
            return known
        self._refuse_when_closed()
        return self._work.submit(model, operation, mark, refusal, trace_parent).request_id

    async def retrieve(
        self, request_id: RequestId, wait_s: float, announce_above: int | None = None
    ) -> FutureState:
        """The state of a future, waiting up to `wait_s` for it to finish."""
        model, entry = self._work.roster.entry(request_id)
        await self._work.waiters.wait(request_id, lambda: entry.state is not None, wait_s)
        if entry.state is None:
            return self._pending(model)
        model.ledger.fetch(entry, announce_above)
        return entry.state

    async def create_model(self, request: CreateModel) -> RequestId:
        """Make a model resident; the same request again gives the same id.

        Raises:
            InvalidRequest: it could not be made here, or the id is another model's.
        """
        mark = fingerprint(request)
        there = self._work.roster.get(request.model_id)
        if there is not None:
            return _same_creation(there, mark)
        check_model(request, self._definition)
        self._refuse_when_closed()
        return self._work.open_model(request, mark).creation.request_id

    async def unload(self, model_id: ModelId, reason: str) -> None:
        """End a model; its slot is freed when what runs on it has ended."""
        model = self._work.roster.get(model_id)
        if model is None:
            return
        if model.ended:
            # Its end may have met records that could not be written.
            await self._journal.model_ended(model_id, model.reason)
            return
        error = Gone(f"{model_id} is gone: {reason}")
        begun = self._work.residency.place(model_id) is not Place.WAITING
        was_made = model.phase != "creating"
        self._work.end(model, reason, error)
        # What is being made just now is told its end by `hosting.py`, when there is something to take back.
        if was_made:
            await self._journal.model_ended(model_id, reason)
        elif not begun:
            self._work.fail(model, model.creation, error)

    async def state(self) -> EngineState:
        """What the engine is doing, by progress."""
        health, silent_s = await self._trainers.health()
        # All that follows is of one moment: a trainer may have been lost and replaced while it was asked.
        return EngineState(
            phase=self._trainers.phase,
            epoch=self._trainers.supervisor.epoch,
            backend=self._trainers.info,
            health=health,
            silent_s=silent_s,
            resident_models=tuple(m.model_id for m in self._work.roster.all_resident()),
            queued_operations=self._work.num_queued,
            last_failure=self._trainers.supervisor.last_failure,
            max_batch_tokens=self._work.scheduler.budget.max_tokens,
            max_forward_backward_batch=self._work.scheduler.budget.max_requests,
        )

    def overview(self) -> dict[str, Any]:
        """What waits and why, what runs, and which models there are: plain values, for a console."""
        models = self._work.roster.all_resident()
        return overview(models, self._work.scheduler, self._work.slots, self.recorder)

    def kept_bytes(self) -> dict[str, int]:
        """Data of passes by where it lies: `memory`, `files`; and `uncovered`, which is in no snapshot, wherever."""
        return {
            "memory": self.history.payloads.memory_bytes,
            "files": self.files.size_bytes,
            "uncovered": self.history.uncovered_bytes,
        }

    async def drain(self) -> None:
        """Take no more work; return when what runs and what is being published has ended.

        Operations that wait are not started any more; they fail when `run` ends. A command has its own limit, and
        so has this.
        """
        self._trainers.draining.set()
        self._work.notify()
        serving = self._trainers.serving
        if serving is not None and not self._trainers.stopped.is_set():
            await serving.idle.wait()

    # The trainer's side.

    async def run(self) -> None:
        """Serve until cancelled; returns only when the trainer could not be started (see `state`)."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.files.run)
                await self._trainers.run()
                tasks.cancel_scope.cancel()
        finally:
            self._trainers.stopped.set()
            self._fail_everything()

    def _fail_everything(self) -> None:
        """The engine stops: nobody may wait for what will not come."""
        error: LiloError = Unavailable("the server is stopping; this operation was not done")
        if self._trainers.given_up:
            failure = self._trainers.supervisor.last_failure
            error = BackendLost(f"the trainer could not be started: {failure}")
        for model in self._work.roster.all_resident():
            self._work.fail_unfinished(model, error)
            self._work.end(model, error.message, error)
        for model in self._work.roster.all_ended():
            self._work.fail_unfinished(model, model.gone())

    # Parts.

    def _examine(self, operation: Operation) -> tuple[Fingerprint, LiloError | None]:
        """Fingerprint, and why it cannot run, if so."""
        mark = fingerprint(operation)
        try:
            check(operation, self._definition)
        except LiloError as error:
            return mark, error
        return mark, None

    def _refuse_when_closed(self) -> None:
        if self._trainers.stopped.is_set():
            why = self._trainers.supervisor.last_failure or "it was stopped"
            raise Unavailable(f"the trainer does not run: {why}")
        if self._trainers.draining.is_set():
            raise Unavailable("the server is stopping and takes no more work; try again later")

    def _pending(self, model: Model) -> Pending:
        """Why a future of a model has no result yet, as far as that is worth telling."""
        line = self._work.slots.why_waiting(model)
        if line is not None:
            return Pending(queue_state="paused_capacity", reason=line)
        missing = model.ledger.sequence.missing()
        if missing is not None:
            return Pending(
                reason=f"operations of this model wait for number {missing}, which has not come yet"
            )
        if self._trainers.serving is None:
            return Pending(reason=f"the trainer is {self._trainers.phase}")
        return Pending()


def _same_creation(model: Model, mark: Fingerprint) -> RequestId:
    """The id of a creation that was asked for before.

    Raises:
        InvalidRequest: the id belongs to another model.
        Gone: it was made, and ended.
    """
    if model.creation.fingerprint != mark:
        raise InvalidRequest(
            f"{model.model_id} was created with other settings; each model needs an id of its own"
        )
    if model.ended and not isinstance(model.creation.state, Failed):
        raise model.gone()
    return model.creation.request_id
