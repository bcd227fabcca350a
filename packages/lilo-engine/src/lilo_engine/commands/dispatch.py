"""Dispatch: carries out commands on a backend, from threads, and turns what comes back into outcomes.

`serving.py` calls it, one command at a time on the GPU lane and persists beside it. An error that concerns one
command is an outcome; BackendLost is raised and means that the trainer must be given up.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, ParamSpec, TypeAlias, TypeVar

import anyio

from lilo_engine.commands.backend import Backend
from lilo_engine.commands.command import (
    BackendInfo,
    Batch,
    CaptureId,
    Destination,
    Health,
    Output,
    Published,
    WorkItem,
)
from lilo_engine.commands.threads import in_thread
from lilo_engine.errors import BackendLost, CommandFailed, InvalidRequest, LiloError
from lilo_engine.operations.operation import (
    CreateModel,
    ForwardBackward,
    LoadState,
    ModelId,
    OptimStep,
    SaveSampler,
    SaveState,
)
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.operations.result import Loaded, Passed, Result, Stepped
from lilo_engine.operations.window import Window

Outcome: TypeAlias = Result | LiloError

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Step:
    """What becomes of one step."""

    operation: OptimStep
    refusal: LiloError | None
    spoiled: bool
    """Whether a failed pass may have left gradients behind."""


class Ran(NamedTuple):
    """A step that was done, timed in its thread: the loop hears of it later."""

    outcome: Outcome
    began_s: float
    ended_s: float


class _Heard:
    """Outcomes on their way from a thread to the loop, in order."""

    def __init__(self) -> None:
        self._outcomes = deque[Ran]()
        self._news = anyio.Event()

    def put(self, outcome: Ran) -> None:
        """In the loop."""
        self._outcomes.append(outcome)
        self._news.set()

    async def next(self) -> Ran:
        """The next one. Ended by its group where the thread fails, which has the limits of its commands."""
        while not self._outcomes:
            self._news = anyio.Event()
            await self._news.wait()
        return self._outcomes.popleft()


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """Commands for one trainer."""

    backend: Backend
    _fetching: anyio.Lock = field(default_factory=anyio.Lock)
    """One checkpoint is read at a time. The next one waits here, where no limit of a command counts its wait as silence of
    the trainer."""

    async def describe(self) -> BackendInfo:
        """What the trainer can do."""
        return await self._call(self.backend.describe)

    async def health(self) -> Health:
        """Its progress.

        Raises:
            Unavailable: it did not tell in time.
        """
        return await self._call(self.backend.health)

    async def create(self, request: CreateModel) -> LiloError | None:
        """Make the adapter and load its source; when that fails, nothing of it stays."""
        error = await self._try(self.backend.create_adapter, request.model_id, request.lora)
        if error is not None or request.source is None:
            return error
        error = await self._try(
            self.backend.load,
            request.model_id,
            request.source,
            with_optimizer=request.with_optimizer,
        )
        if error is not None:
            await self.unload(request.model_id)
        return error

    async def prepare(self, source: CheckpointRef, *, with_optimizer: bool) -> LiloError | None:
        """Have a checkpoint read and checked, beside the GPU lane; why it cannot be loaded, if so."""
        async with self._fetching:
            return await self._try(self.backend.prepare_load, source, with_optimizer=with_optimizer)

    async def unload(self, model_id: ModelId) -> None:
        """Free the slot. It cannot be refused: a trainer that fails here has lost track of its slots."""
        error = await self._try(self.backend.unload, model_id)
        if error is not None:
            raise BackendLost(f"unload of {model_id} failed: {error.message}") from error

    async def passes(
        self, operations: Sequence[tuple[str, ForwardBackward]], windows: Sequence[Window]
    ) -> list[Outcome]:
        """Run passes that share loss, config and direction; one outcome each, and the windows follow."""
        first = operations[0][1]
        batch = Batch(
            loss=first.loss,
            config=first.loss_config,
            forward_only=first.forward_only,
            items=tuple(
                WorkItem(operation_id=name, model_id=operation.model_id, datums=operation.datums)
                for name, operation in operations
            ),
        )
        outputs = await self._try(self.backend.forward_backward, batch)
        outcomes = _outcomes(batch, outputs)
        if not first.forward_only:
            for (_, operation), window, outcome in zip(operations, windows, outcomes, strict=True):
                if isinstance(outcome, LiloError):
                    window.spoil(f"forward_backward number {operation.seq_id}", outcome)
                else:
                    window.passed()
        return outcomes

    async def steps(
        self,
        operations: Sequence[tuple[OptimStep, Window]],
        told: Callable[[int, Ran], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Do steps one after another, or refuse one and drop what a failed pass may have left; the windows close.

        All in one thread, which does not wait for the loop between two: what the loop does for clients meanwhile takes
        longer than a small step.

        Args:
            operations: steps of different models.
            told: called with the place of each step, its outcome and its time, as soon as it is done.
            clock: seconds, from any origin; read in the thread.
        """
        steps = [
            _Step(operation, window.refusal(), spoiled=window.failure is not None)
            for operation, window in operations
        ]
        for _, window in operations:
            window.close()
        heard = _Heard()
        tell = partial(asyncio.get_running_loop().call_soon_threadsafe, heard.put)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run_steps, steps, tell, clock)
            for place in range(len(steps)):
                told(place, await heard.next())

    async def _run_steps(
        self,
        steps: Sequence[_Step],
        tell: Callable[[Ran], object],
        clock: Callable[[], float],
    ) -> None:
        await self._call(self._optim_steps, steps, tell, clock)

    def _optim_steps(
        self,
        steps: Sequence[_Step],
        tell: Callable[[Ran], object],
        clock: Callable[[], float],
    ) -> None:
        """In a thread."""
        for step in steps:
            began_s = clock()
            outcome = self._optim_step(step)
            tell(Ran(outcome, began_s, clock()))

    def _optim_step(self, step: _Step) -> Outcome:
        model_id = step.operation.model_id
        if step.refusal is not None:
            if step.spoiled:
                self._drop_gradients(model_id)
            return step.refusal
        try:
            return Stepped(metrics=dict(self.backend.optim_step(model_id, step.operation.params)))
        except BackendLost:
            raise
        except LiloError as error:
            self._drop_gradients(model_id)
            return error

    async def load(self, operation: LoadState, window: Window) -> Outcome:
        """Load a checkpoint; gradients are dropped with what they belonged to."""
        error = await self._try(
            self.backend.load,
            operation.model_id,
            operation.source,
            with_optimizer=operation.with_optimizer,
        )
        if error is not None:
            return error
        window.close()
        return Loaded(model_id=operation.model_id, ref=operation.source)

    async def capture(self, operation: SaveState | SaveSampler) -> CaptureId | LiloError:
        """Freeze the state to be saved."""
        kind = "training" if isinstance(operation, SaveState) else "sampler"
        return await self._try(self.backend.capture, operation.model_id, kind)

    async def persist(
        self, capture_id: CaptureId, destination: Destination
    ) -> Published | LiloError:
        """Publish a capture; runs beside the GPU lane."""
        return await self._try(self.backend.persist, capture_id, destination)

    def _drop_gradients(self, model_id: ModelId) -> None:
        """In a thread."""
        try:
            self.backend.drop_gradients(model_id)
        except BackendLost:
            raise
        except LiloError as error:
            # Gradients of a failed window would leak into the next one.
            raise BackendLost(f"drop_gradients of {model_id} failed: {error.message}") from error

    async def _try(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | LiloError:
        """What a command returns, or the error that concerns it alone; a lost trainer is raised."""
        try:
            return await self._call(call, *args, **kwargs)
        except BackendLost:
            raise
        except LiloError as error:
            return error

    async def _call(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await in_thread(call, *args, **kwargs)
        except LiloError:
            raise
        except Exception as error:
            name = getattr(call, "__name__", "a command").lstrip("_")
            raise BackendLost(
                f"{name} failed in the trainer: {type(error).__name__}: {error}"
            ) from error


def _outcomes(batch: Batch, outputs: Sequence[Output] | LiloError) -> list[Outcome]:
    """One outcome per item; when the answer does not fit the batch, which item got which numbers cannot be known."""
    wanted = [item.operation_id for item in batch.items]
    if isinstance(outputs, LiloError):
        return [outputs for _ in wanted]
    got = [output.operation_id for output in outputs]
    if wanted != got:
        misfit = CommandFailed(
            f"the trainer answered {len(got)} items {got[:4]} for {len(wanted)} items {wanted[:4]}"
        )
        return [misfit for _ in wanted]
    return [
        InvalidRequest(output.error)
        if output.error is not None
        else Passed(logprobs=output.logprobs, metrics=output.metrics)
        for output in outputs
    ]
