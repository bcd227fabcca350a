"""MilesBackend: the driver: one method per command of the `Backend` protocol, each a broadcast to the ranks.

It holds no model state: ranks do (`ranks/`). The engine calls it as `commands/backend.py` says: GPU-lane methods one
at a time, `persist` beside them, `health` at any time.
"""

from __future__ import annotations

import os
import secrets
import uuid
from collections.abc import Mapping
from typing import cast

from lilo_engine.commands.backend import BackendConfig, CaptureKind
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

from lilo_miles_backend.config import BackendSettings
from lilo_miles_backend.fetches import Fetches
from lilo_miles_backend.launchers.launch import launch
from lilo_miles_backend.launchers.ranks import Ranks
from lilo_miles_backend.progress import Progress
from lilo_miles_backend.rank_commands import (
    Capture,
    CreateAdapter,
    DropGradients,
    Fetch,
    Load,
    Persist,
    RunBatch,
    StepOptimizer,
    Unload,
)


class MilesBackend:
    """A trainer that holds many LoRA adapters over one frozen base model."""

    def __init__(self, config: BackendConfig) -> None:
        """Start the ranks and load the base model.

        Raises:
            InvalidRequest: this version cannot build the definition; the message says what it offers.
        """
        self._definition = config.definition
        self._progress = Progress()
        self._fetches = Fetches(limit=config.definition.lora.slots)
        self.ranks: Ranks = launch(config, BackendSettings.from_environment())
        self._info = self._describe()

    def describe(self) -> BackendInfo:
        """What it can do."""
        return self._info

    def create_adapter(self, model_id: ModelId, spec: LoraSpec) -> None:
        """Make a fresh adapter in a free slot; the same spec again does nothing.

        Raises:
            InvalidRequest: the spec cannot be honoured.
            Saturated: no slot is free.
        """
        seed = secrets.randbits(63)
        with self._progress.of(f"create_adapter {model_id}"):
            self.ranks.train(CreateAdapter(model_id=model_id, spec=spec, drawn_seed=seed))

    def forward_backward(self, batch: Batch) -> list[Output]:
        """Run the items; one output per item, in order. Adds to gradients unless `forward_only`.

        The engine has checked the loss, its settings and the datums; that they are is asserted only.
        """
        verb = "forward" if batch.forward_only else "forward_backward"
        with self._progress.of(f"{verb} of {len(batch.items)}"):
            return cast(list[Output], self.ranks.train(RunBatch(batch=batch)))

    def optim_step(self, model_id: ModelId, params: AdamParams) -> Mapping[str, float]:
        """One AdamW step with the gradients gathered since the last; clears them.

        Returns:
            `step`, `learning_rate`, `skipped` (1.0: a gradient was not finite, nothing changed), and `grad_norm`
            (before clipping) unless skipped.

        Raises:
            InvalidRequest: there are no gradients in this window.
            NotFound: no such model is resident.
        """
        with self._progress.of(f"optim_step {model_id}"):
            reply = self.ranks.train(StepOptimizer(model_id=model_id, params=params))
            return cast(Mapping[str, float], reply)

    def capture(self, model_id: ModelId, kind: CaptureKind) -> CaptureId:
        """Freeze the model's state; returns when it is detached from the device."""
        capture_id = CaptureId(uuid.uuid4().hex)
        with self._progress.of(f"capture {model_id}"):
            self.ranks.train(Capture(model_id=model_id, kind=kind, capture_id=capture_id))
        return capture_id

    def persist(self, capture_id: CaptureId, destination: Destination) -> Published:
        """Publish a capture through lilo-volume and free it, whether that succeeds or not."""
        with self._progress.of(f"persist {destination.kind}/{destination.name}"):
            return self.ranks.persist(Persist(capture_id=capture_id, destination=destination))

    def prepare_load(self, source: CheckpointRef, *, with_optimizer: bool) -> None:
        """Read a published training checkpoint into the ranks' memory, so that `load` only copies it.

        Raises:
            NotFound: there is no such checkpoint.
            InvalidRequest: it is of no model that can be trained here.
            CommandFailed: it is damaged; the message says where.
        """
        with self._progress.of(f"prepare_load {source}"):
            self._fetches.add(source, self._fetch(source, with_optimizer), with_optimizer)

    def load(self, model_id: ModelId, source: CheckpointRef, *, with_optimizer: bool) -> None:
        """Replace the adapter by a published training checkpoint; drops gradients.

        What was not prepared is read first: the train mailbox is free meanwhile.

        Raises:
            NotFound: there is no such checkpoint.
            InvalidRequest: it does not fit this model; the message names both sides.
        """
        with self._progress.of(f"load {model_id}"):
            fetch_id = self._fetches.take(source, with_optimizer) or self._fetch(
                source, with_optimizer
            )
            self.ranks.train(
                Load(
                    model_id=model_id,
                    source=source,
                    with_optimizer=with_optimizer,
                    fetch_id=fetch_id,
                )
            )

    def drop_gradients(self, model_id: ModelId) -> None:
        """Forget the gradients of this window."""
        with self._progress.of(f"drop_gradients {model_id}"):
            self.ranks.train(DropGradients(model_id=model_id))

    def unload(self, model_id: ModelId) -> None:
        """Free the slot; unknown models are no error."""
        with self._progress.of(f"unload {model_id}"):
            self.ranks.train(Unload(model_id=model_id))

    def health(self) -> Health:
        """Progress of the driver and of each rank."""
        view = self._progress.view()
        return Health(
            last_completed=view.last_completed,
            completed_commands=view.completed_commands,
            age_s=view.age_s,
            ranks=self.ranks.progress(),
        )

    def wait_lost(self) -> str:
        """Block until the ranks are lost, asked or not: the first cause."""
        return self.ranks.wait_lost()

    def close(self) -> None:
        """End the ranks; nothing may be called afterwards."""
        self.ranks.close()

    def _describe(self) -> BackendInfo:
        first = self.ranks.info()[0]
        topology = self._definition.topology
        world = topology.world_size
        return BackendInfo(
            base_model=self._definition.model.name,
            vocab_size=self._definition.model.vocab_size,
            max_context=self._definition.context,
            max_rank=self._definition.lora.max_rank,
            slots=self._definition.lora.slots,
            target_groups=self._definition.lora.targets,
            losses=first.losses,
            topology=f"{world} rank{'s' if world > 1 else ''}: tp {topology.tp}, cp {topology.cp}, dp {topology.dp}",
            device=first.device,
            pid=os.getpid(),
        )

    def _fetch(self, source: CheckpointRef, with_optimizer: bool) -> str:
        fetch_id = uuid.uuid4().hex
        self.ranks.fetch(
            Fetch(
                fetch_id=fetch_id,
                source=source,
                with_optimizer=with_optimizer,
                forget=self._fetches.surplus(),
            )
        )
        return fetch_id
