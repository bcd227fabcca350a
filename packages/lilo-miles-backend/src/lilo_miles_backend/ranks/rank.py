"""Rank: one member of the trainer: holds its part of the model and of all adapters, and runs commands.

One method per command, no arithmetic. `execute` is called by one thread at a time and in the same order on all ranks;
`persist` beside it; `progress` at any time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import assert_never

from lilo_definitions import resolve_source
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.command import Batch, Output, Published, RankProgress, WorkItem
from lilo_engine.errors import InvalidRequest, LiloError
from lilo_engine.operations.operation import ModelId
from lilo_engine.operations.tensor import Tensor

from lilo_miles_backend.config import BackendSettings
from lilo_miles_backend.progress import Progress
from lilo_miles_backend.rank_commands import (
    Capture,
    CreateAdapter,
    DropGradients,
    Fetch,
    Load,
    Persist,
    PersistCommand,
    RankInfo,
    RunBatch,
    StepOptimizer,
    TrainCommand,
    Unload,
)
from lilo_miles_backend.ranks.adapter import Adapter
from lilo_miles_backend.ranks.device import Device
from lilo_miles_backend.ranks.forward_backward import NonFiniteLoss, PassLimits, run_pass
from lilo_miles_backend.ranks.losses import LOSS_NAMES, Objective
from lilo_miles_backend.ranks.model import BaseModel
from lilo_miles_backend.ranks.optimizer import adamw_step
from lilo_miles_backend.ranks.parallel import Parallel
from lilo_miles_backend.ranks.place import RankPlace
from lilo_miles_backend.ranks.residents import Residents
from lilo_miles_backend.ranks.rows import assert_checked
from lilo_miles_backend.ranks.storage import Storage

_log = logging.getLogger(__name__)


class Rank:
    """One rank of the trainer."""

    def __init__(
        self, config: BackendConfig, settings: BackendSettings, place: RankPlace | None = None
    ) -> None:
        """Join the process groups and load the base model.

        Args:
            config: the trainer's.
            settings: this machine's.
            place: of this rank among the others; None: it is the only one.

        Raises:
            InvalidRequest: the model's files do not fit the definition.
        """
        definition = config.definition
        self._definition = definition
        self._place = place
        self._progress = Progress()
        self._device = Device.cpu(threads=settings.threads_per_rank)
        self._parallel = Parallel.join(
            definition.topology,
            self._device,
            timeout_minutes=definition.limits.distributed_timeout_minutes,
            place=place,
        )
        try:
            self._load(config)
        except BaseException:
            self._parallel.leave()
            raise

    def info(self) -> RankInfo:
        """What this rank runs on."""
        return RankInfo(
            rank=self._parallel.rank,
            pid=os.getpid(),
            device=self._device.description,
            losses=LOSS_NAMES,
            node="local" if self._place is None else self._place.node,
            group_limits_s=self._parallel.group_limits_s,
        )

    def execute(self, command: TrainCommand) -> list[Output] | Mapping[str, float] | None:
        """Run one command of the train mailbox."""
        with self._progress.of(type(command).__name__):
            match command:
                case RunBatch():
                    return self._run_batch(command.batch)
                case StepOptimizer():
                    return self._step(command)
                case CreateAdapter():
                    self._residents.create(command.model_id, command.spec, command.drawn_seed)
                case Capture():
                    self._storage.capture(command, self._residents.adapter(command.model_id))
                case Load():
                    self._restore(command)
                case DropGradients():
                    self._residents.adapter(command.model_id).drop_gradients()
                case Unload():
                    self._model.activate(None)  # or the last active adapter would stay in memory
                    self._residents.remove(command.model_id)
                case _:
                    assert_never(command)
        return None

    def persist(self, command: PersistCommand) -> Published | None:
        """Publish a capture, or fetch what will be loaded; touches nothing that `execute` touches."""
        with self._progress.of(type(command).__name__):
            match command:
                case Persist():
                    return self._storage.persist(command)
                case Fetch():
                    return self._storage.fetch(command)
                case _:
                    assert_never(command)

    def progress(self) -> RankProgress:
        """How far this rank has come."""
        view = self._progress.view()
        return RankProgress(
            rank=self._parallel.rank,
            pid=os.getpid(),
            completed_commands=view.completed_commands,
            running=view.running,
            age_s=view.age_s,
        )

    def adapter(self, model_id: ModelId) -> Adapter:
        """A resident model's state, for measuring what no command returns (gradients, say).

        Raises:
            NotFound: the model is not resident.
        """
        return self._residents.adapter(model_id)

    def close(self) -> None:
        """Let go of what waits, and leave the process groups."""
        self._storage.close()
        self._parallel.leave()

    def _load(self, config: BackendConfig) -> None:
        definition = config.definition
        folder = resolve_source(definition.model.source)
        self._model = BaseModel(definition, folder, self._device, self._parallel)
        self._residents = Residents(definition, self._model.sites, self._device.torch_device)
        self._storage = Storage(config, self._parallel, self._residents.shards_of)
        self._limits = PassLimits(
            max_tokens=definition.limits.max_tokens_per_rank,
            chunk_tokens=definition.limits.logprob_chunk_tokens,
        )

    def _run_batch(self, batch: Batch) -> list[Output]:
        objective = Objective.of(batch.loss, batch.config)
        return [
            self._run_item(item, objective, forward_only=batch.forward_only) for item in batch.items
        ]

    def _run_item(self, item: WorkItem, objective: Objective, *, forward_only: bool) -> Output:
        """One item's output; its failure stays its own, and leaves no half-added gradients."""
        try:
            assert_checked(
                item.datums,
                objective.name,
                vocab_size=self._definition.model.vocab_size,
                context=self._definition.context,
            )
            result = run_pass(
                self._model,
                self._residents.adapter(item.model_id),
                objective,
                item.datums,
                self._limits,
                forward_only=forward_only,
                moved=self._progress.moved,
            )
        except Exception as error:  # isolates one client from another: the others' items go on
            if not isinstance(error, LiloError | NonFiniteLoss):
                _log.exception("model %s operation %s failed", item.model_id, item.operation_id)
            self._drop_after_failure(item.model_id, forward_only=forward_only)
            return Output(operation_id=item.operation_id, error=_sentence(error))
        return Output(
            operation_id=item.operation_id,
            logprobs=tuple(Tensor.of(values, "float32") for values in result.logprobs),
            metrics=result.metrics,
        )

    def _drop_after_failure(self, model_id: ModelId, *, forward_only: bool) -> None:
        if not forward_only and model_id in self._residents:
            self._residents.adapter(model_id).drop_gradients()

    def _step(self, command: StepOptimizer) -> Mapping[str, float]:
        adapter = self._residents.adapter(command.model_id)
        if adapter.num_passes == 0:
            raise InvalidRequest(
                f"model {command.model_id!r} has no gradients to step with; "
                "run forward_backward since the last optim_step"
            )
        return adamw_step(adapter, command.params)

    def _restore(self, command: Load) -> None:
        state = self._storage.take(command)
        adapter = self._residents.adapter(command.model_id)
        self._residents.check_fits(command.model_id, state, str(command.source))
        adapter.restore(state, with_optimizer=command.with_optimizer)


def _sentence(error: Exception) -> str:
    if isinstance(error, LiloError | NonFiniteLoss):
        return str(error)
    return f"the pass failed with {type(error).__name__}: {error}"
