"""EngineClient: the only way a front reaches an engine: in-process on a laptop, over HTTP otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from lilo_engine.commands.command import BackendInfo, Health
from lilo_engine.operations.operation import CreateModel, ModelId, Operation, RequestId
from lilo_engine.operations.result import FutureState

Phase: TypeAlias = Literal["starting", "serving", "restarting", "draining", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What an engine is doing, by progress."""

    phase: Phase
    epoch: int
    """Number of the trainer group; grows with each restart of the backend."""
    backend: BackendInfo | None
    health: Health | None
    """The last command that it completed, and how long ago; None = it never told."""
    silent_s: float
    """How long the trainer has not answered when asked for its health; 0 = it answered now, or none runs."""
    resident_models: tuple[ModelId, ...]
    queued_operations: int
    last_failure: str | None
    max_batch_tokens: int
    """Tokens of coalesced passes in one command at most, as the scheduler has it."""
    max_forward_backward_batch: int | None
    """Passes in one command at most, as the scheduler has it; None = no cap."""


class EngineClient(Protocol):
    """One engine, as a front sees it."""

    async def submit(self, operation: Operation, trace_parent: str | None = None) -> RequestId:
        """Accept a numbered operation; the same number and payload again gives the same id.

        Args:
            operation: what is asked.
            trace_parent: the client's own trace, as the header `traceparent` of W3C has it; ours become a part of it.

        Raises:
            NotFound, Gone: the model is unknown, or ended.
            InvalidRequest: the number was used with another payload, or is below 1. An operation that is invalid in
                itself is accepted and becomes a failed future, so that it uses up its number.
            Saturated: too many operations of this model wait.
            Unavailable: the engine is draining or has stopped.
        """
        ...

    async def retrieve(
        self, request_id: RequestId, wait_s: float, announce_above: int | None = None
    ) -> FutureState:
        """The state of a future, waiting up to `wait_s` for it to finish.

        Args:
            request_id: of the future.
            wait_s: how long to wait.
            announce_above: a result of more bytes is only announced to its client, which asks again when it has room:
                until then it is kept as one that nobody has seen. None: it is handed out.

        Raises:
            NotFound, Gone: the id is unknown, or its model ended.
        """
        ...

    async def create_model(self, request: CreateModel) -> RequestId:
        """Make a model resident; the same request again gives the same id.

        While the trainer restarts, or all slots are taken, the creation waits, and its future says what for.

        Raises:
            InvalidRequest: it could not be made here, or the id belongs to a model with other settings.
            Gone: it was made, and ended.
            Saturated: too many wait for a slot already.
            Unavailable: the engine is draining or has stopped.
        """
        ...

    async def unload(self, model_id: ModelId, reason: str) -> None:
        """End a model: its waiting operations fail with `reason`, its slot is freed. Idempotent."""
        ...

    async def state(self) -> EngineState:
        """What the engine is doing."""
        ...

    async def drain(self) -> None:
        """Take no more work; return when what runs and what is being published has ended."""
        ...
