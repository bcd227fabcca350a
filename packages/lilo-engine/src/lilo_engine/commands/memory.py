"""Memory backend: a trainer in plain memory, with a model of sixteen weights. Implements `Backend`.

For tests, benchmarks of the engine, and reading: everything around the arithmetic is real (gradient windows,
optimizer state, captures that are detached, checkpoints published through lilo-volume), so that results depend on
the whole history and a command run twice, lost or out of order shows in the numbers. It is no language model.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from lilo_volume import Checkpoint, SoloGroup, begin, open_named
from lilo_volume.errors import CheckpointMissing, NameTaken

from lilo_engine.commands.backend import BackendConfig, CaptureKind
from lilo_engine.commands.command import (
    BackendInfo,
    Batch,
    CaptureId,
    Destination,
    Health,
    Output,
    Published,
    RankProgress,
    WorkItem,
)
from lilo_engine.commands.memory_model import MemoryAdapter, run_datum
from lilo_engine.errors import CommandFailed, InvalidRequest, NotFound, Saturated
from lilo_engine.operations.lora_metadata import lora_to_metadata
from lilo_engine.operations.losses import LOSSES
from lilo_engine.operations.operation import AdamParams, LoraSpec, ModelId
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.operations.tensor import Tensor
from lilo_engine.storage import open_checkpoints

PUBLISH_LIMIT_S = 60.0
"""A few hundred bytes on a local disk; a limit all the same."""
_FILE = "adapter.json"


class MemoryBackend:
    """A trainer without a device."""

    def __init__(self, config: BackendConfig) -> None:
        self._definition = config.definition
        self._volume = open_checkpoints(Path(config.checkpoints_root))
        self._adapters: dict[ModelId, MemoryAdapter] = {}
        self._captures: dict[CaptureId, tuple[MemoryAdapter, CaptureKind]] = {}
        self._numbers = itertools.count(1)
        self._progress = threading.Lock()
        self._completed = 0
        self._last: str | None = None
        self._changed = time.monotonic()

    def describe(self) -> BackendInfo:
        """What it can do."""
        definition = self._definition
        return BackendInfo(
            base_model=definition.model.name,
            vocab_size=definition.model.vocab_size,
            max_context=definition.context,
            max_rank=definition.lora.max_rank,
            slots=definition.lora.slots,
            target_groups=definition.lora.targets,
            losses=tuple(LOSSES),
            topology="1 rank, in memory",
            device="cpu",
            pid=os.getpid(),
        )

    def create_adapter(self, model_id: ModelId, spec: LoraSpec) -> None:
        """Make a fresh adapter in a free slot; the same spec again does nothing."""
        there = self._adapters.get(model_id)
        if there is not None:
            if there.spec != spec:
                raise InvalidRequest(f"{model_id} is resident with {there.spec}, not {spec}")
            return
        if len(self._adapters) >= self._definition.lora.slots:
            raise Saturated(f"all {self._definition.lora.slots} slots are taken")
        self._adapters[model_id] = MemoryAdapter.fresh(model_id, spec)
        self._done("create_adapter")

    def forward_backward(self, batch: Batch) -> list[Output]:
        """Run the items; one output per item, in order. Adds to gradients unless `forward_only`."""
        outputs = [self._run_item(batch, item) for item in batch.items]
        self._done("forward_backward")
        return outputs

    def optim_step(self, model_id: ModelId, params: AdamParams) -> Mapping[str, float]:
        """One AdamW step with the gradients gathered since the last; clears them."""
        metrics = self._adapter(model_id).step(params)
        self._done("optim_step")
        return metrics

    def capture(self, model_id: ModelId, kind: CaptureKind) -> CaptureId:
        """Copy the model's state."""
        adapter = self._adapter(model_id).frozen()
        capture_id = CaptureId(f"capture-{next(self._numbers)}")
        self._captures[capture_id] = (adapter, kind)
        self._done("capture")
        return capture_id

    def persist(self, capture_id: CaptureId, destination: Destination) -> Published:
        """Publish a capture through lilo-volume and free it, whether that succeeds or not."""
        held = self._captures.pop(capture_id, None)
        if held is None:
            raise NotFound(f"there is no capture {capture_id!r}; a capture can be persisted once")
        adapter, kind = held
        state = {"weights": adapter.weights.tolist()}
        if kind == "training":
            state["exp_avg"] = adapter.exp_avg.tolist()
            state["exp_avg_sq"] = adapter.exp_avg_sq.tolist()
        try:
            published = self._publish(json.dumps(state).encode(), adapter, destination)
        except NameTaken as error:
            raise InvalidRequest(str(error)) from error
        self._done("persist")
        return published

    def prepare_load(self, source: CheckpointRef, *, with_optimizer: bool) -> None:
        """Check the checkpoint; there is nothing to keep."""
        self._published(source)
        self._done("prepare_load")

    def load(self, model_id: ModelId, source: CheckpointRef, *, with_optimizer: bool) -> None:
        """Replace the adapter by a published training checkpoint; drops gradients."""
        adapter = self._adapter(model_id)
        checkpoint = self._published(source)
        metadata = checkpoint.manifest.metadata
        if int(metadata["lora_rank"]) != adapter.spec.lora_rank:
            raise InvalidRequest(
                f"{source} has the rank {metadata['lora_rank']}, {model_id} has "
                f"{adapter.spec.lora_rank}; create a model of that rank"
            )
        state = json.loads((checkpoint.folder / _FILE).read_bytes())
        fresh = MemoryAdapter(spec=adapter.spec, weights=np.array(state["weights"]))
        if with_optimizer:
            fresh.exp_avg = np.array(state["exp_avg"])
            fresh.exp_avg_sq = np.array(state["exp_avg_sq"])
            fresh.optimizer_step = int(metadata["optimizer_step"])
        self._adapters[model_id] = fresh
        self._done("load")

    def drop_gradients(self, model_id: ModelId) -> None:
        """Forget the gradients of this window."""
        adapter = self._adapter(model_id)
        adapter.gradients = np.zeros_like(adapter.gradients)
        self._done("drop_gradients")

    def unload(self, model_id: ModelId) -> None:
        """Free the slot; unknown models are no error."""
        self._adapters.pop(model_id, None)
        self._done("unload")

    def health(self) -> Health:
        """Commands done, and since when."""
        with self._progress:
            age_s = time.monotonic() - self._changed
            rank = RankProgress(
                rank=0,
                pid=os.getpid(),
                completed_commands=self._completed,
                running=None,
                age_s=age_s,
            )
            return Health(
                last_completed=self._last,
                completed_commands=self._completed,
                age_s=age_s,
                ranks=(rank,),
            )

    def wait_lost(self) -> str:
        """Never returns: nothing of it can be lost alone."""
        threading.Event().wait()
        raise AssertionError("nobody sets it")

    def close(self) -> None:
        """Forget everything."""
        self._adapters.clear()
        self._captures.clear()

    def _published(self, source: CheckpointRef) -> Checkpoint:
        try:
            return open_named(self._volume, source.run_id, source.kind, source.name)
        except CheckpointMissing as error:
            raise NotFound(f"there is no checkpoint {source}; list those there are") from error

    def _adapter(self, model_id: ModelId) -> MemoryAdapter:
        adapter = self._adapters.get(model_id)
        if adapter is None:
            raise CommandFailed(f"{model_id} is not resident in this trainer")
        return adapter

    def _run_item(self, batch: Batch, item: WorkItem) -> Output:
        adapter = self._adapters.get(item.model_id)
        if adapter is None:
            return Output(
                operation_id=item.operation_id,
                error=f"{item.model_id} is not resident in this trainer",
            )
        gradients = np.zeros_like(adapter.gradients)
        logprobs: list[Tensor] = []
        total = 0.0
        for datum in item.datums:
            p, value, gradient = run_datum(adapter.weights, datum, batch.loss, batch.config)
            logprobs.append(Tensor.of(p, "float32"))
            total += value
            gradients += gradient
        if not np.isfinite(total):
            return Output(
                operation_id=item.operation_id,
                error=f"the loss is {total}; its gradients were dropped",
            )
        if not batch.forward_only:
            adapter.gradients += gradients
        return Output(
            operation_id=item.operation_id,
            logprobs=tuple(logprobs),
            metrics={"loss:sum": total, "datums:sum": float(len(item.datums))},
        )

    def _publish(self, data: bytes, adapter: MemoryAdapter, destination: Destination) -> Published:
        with begin(
            self._volume,
            SoloGroup(),
            collection=destination.run_id,
            kind=destination.kind,
            name=destination.name,
            order=destination.order,
            overwrite=destination.overwrite,
            timeout_s=PUBLISH_LIMIT_S,
        ) as attempt:
            with attempt.create(_FILE) as file:
                file.write(data)
            checkpoint = attempt.publish(
                expected=[_FILE],
                metadata={
                    **destination.metadata,
                    **lora_to_metadata(adapter.spec),
                    "base_model": self._definition.model.name,
                    "optimizer_step": str(adapter.optimizer_step),
                },
            )
        return Published(
            run_id=destination.run_id,
            kind=destination.kind,
            name=destination.name,
            attempt=checkpoint.publication.attempt,
            folder=str(checkpoint.folder),
            size_bytes=checkpoint.size_bytes,
            digest=checkpoint.manifest.digest,
        )

    def _done(self, command: str) -> None:
        with self._progress:
            self._completed += 1
            self._last = command
            self._changed = time.monotonic()
