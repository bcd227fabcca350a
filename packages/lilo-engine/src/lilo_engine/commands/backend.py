"""Backend: the protocol between the engine and a trainer.

Above it stands `commands/dispatch.py`, which calls it from one worker thread per lane; below it a trainer
(`lilo_miles_backend`), the bridge to a trainer in a child process, or `commands/memory.py` for tests.

Threads: `create_adapter` ... `unload` of the GPU lane come one at a time; `persist` and `prepare_load` calls may come at the
same time as those and as each other; `health` at any time. What capture returns is detached, so that persist
needs no lock.

Errors: UserError and CommandFailed concern one command; anything else means the trainer is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from lilo_definitions import Definition

from lilo_engine.commands.command import (
    BackendInfo,
    Batch,
    CaptureId,
    Destination,
    Health,
    Output,
    Published,
)
from lilo_engine.operations.operation import AdamParams, LoraSpec, ModelId
from lilo_engine.operations.reference import CheckpointRef

CaptureKind: TypeAlias = Literal["training", "sampler"]


class Backend(Protocol):
    """A trainer that holds many adapters over one base model."""

    def describe(self) -> BackendInfo:
        """What it can do."""
        ...

    def create_adapter(self, model_id: ModelId, spec: LoraSpec) -> None:
        """Make a fresh adapter in a free slot; the same spec again does nothing.

        Raises:
            UserError: the spec cannot be honoured.
            Saturated: no slot is free.
        """
        ...

    def forward_backward(self, batch: Batch) -> list[Output]:
        """Run the items; one output per item, in order. Adds to gradients unless `forward_only`."""
        ...

    def optim_step(self, model_id: ModelId, params: AdamParams) -> Mapping[str, float]:
        """One AdamW step with the gradients gathered since the last; clears them.

        Returns metrics; `skipped` is 1.0 when a gradient was not finite and the step was not done.
        """
        ...

    def capture(self, model_id: ModelId, kind: CaptureKind) -> CaptureId:
        """Freeze the model's state; returns when it is detached from the device."""
        ...

    def persist(self, capture_id: CaptureId, destination: Destination) -> Published:
        """Publish a capture through lilo-volume and free it, whether that succeeds or not."""
        ...

    def prepare_load(self, source: CheckpointRef, *, with_optimizer: bool) -> None:
        """Read and check a published training checkpoint beside the GPU lane, so that the next such `load` is short.

        `load` works without it, and then does this itself. What is prepared and never loaded is let go of in time.

        Raises:
            NotFound: there is no such checkpoint.
            UserError: it can be loaded by no model of this trainer.
            CommandFailed: it is damaged; the message says where.
        """
        ...

    def load(self, model_id: ModelId, source: CheckpointRef, *, with_optimizer: bool) -> None:
        """Replace the adapter by a published training checkpoint; drops gradients.

        Raises:
            NotFound: there is no such checkpoint.
            UserError: it does not fit this model; the message names both sides.
        """
        ...

    def drop_gradients(self, model_id: ModelId) -> None:
        """Forget the gradients of this window."""
        ...

    def unload(self, model_id: ModelId) -> None:
        """Free the slot; unknown models are no error."""
        ...

    def health(self) -> Health:
        """Progress of the driver and of each rank."""
        ...

    def wait_lost(self) -> str:
        """Block until it is lost although nothing may have been asked of it: the first cause, in words.

        Waited for in a thread of its own. One that cannot be lost by itself, or was closed, never returns.
        """
        ...

    def close(self) -> None:
        """Free everything; nothing may be called afterwards."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """What a backend is built from."""

    definition: Definition
    checkpoints_root: str
    """Root of the local volume that holds published checkpoints."""
    epoch: int
    """Number of this trainer group; carried by every command so that a late one is recognised."""


class BackendFactory(Protocol):
    """What the entry-point group `lilo.backends` yields; building loads the base model (minutes at most)."""

    def __call__(self, config: BackendConfig) -> Backend:
        """Start the trainer."""
        ...
