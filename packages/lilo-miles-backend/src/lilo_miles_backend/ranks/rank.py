"""Rank: one member of the trainer: holds its part of the model and of all adapters, and runs commands.

One method per command, no arithmetic. `execute` is called by one thread at a time and in the same order on all ranks;
`persist` beside it; `progress` at any time.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import assert_never

from lilo_definitions import resolve_source
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.command import Output, Published, RankProgress
from lilo_engine.errors import InvalidRequest
from lilo_engine.operations.operation import ModelId

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
from lilo_miles_backend.ranks.batch import BatchRunner
from lilo_miles_backend.ranks.device import Device
from lilo_miles_backend.ranks.frozen import Freezer
from lilo_miles_backend.ranks.losses import LOSS_NAMES
from lilo_miles_backend.ranks.model import BaseModel
from lilo_miles_backend.ranks.optimizer import adamw_step
from lilo_miles_backend.ranks.parallel import Parallel
from lilo_miles_backend.ranks.place import RankPlace
from lilo_miles_backend.ranks.residents import Residents
from lilo_miles_backend.ranks.side_stream import SideStream
from lilo_miles_backend.ranks.staging import Staging
from lilo_miles_backend.ranks.storage import Storage
from lilo_miles_backend.ranks.warmup import warm_up


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
            InvalidRequest: the model's files do not fit the definition, or there is no GPU where it asks for one.
        """
        definition = config.definition
        self._definition = definition
        self._place = place
        self._progress = Progress()
        self._device = Device.of(
            definition.topology,
            threads=settings.threads_per_rank,
            local_rank=0 if place is None else place.local_rank,
            num_devices=1 if place is None else place.num_devices,
        )
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
            attention=self._model.attention,
        )

    def execute(self, command: TrainCommand) -> list[Output] | Mapping[str, float] | None:
        """Run one command of the train mailbox."""
        with self._progress.of(type(command).__name__):
            match command:
                case RunBatch():
                    return self._batches.run(command.batch)
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
                    self._model.activate()  # or the last active adapter would stay in memory
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

    @property
    def parallel(self) -> Parallel:
        """This rank's place among the others."""
        return self._parallel

    def close(self) -> None:
        """Let go of what waits, and leave the process groups."""
        self._storage.close()
        self._device.synchronize()
        self._parallel.leave(together=True)

    def _load(self, config: BackendConfig) -> None:
        definition = config.definition
        folder = resolve_source(definition.model.source)
        self._model = BaseModel(definition, folder, self._device, self._parallel)
        self._residents = Residents(
            definition, self._model.sites, self._device.torch_device, self._parallel.tp
        )
        self._batches = BatchRunner(definition, self._model, self._residents, self._progress.moved)
        side = SideStream(self._device.torch_device)
        # Of the two alone: a way back to this rank would leave the model in memory, when it has ended, for the collector.
        room = functools.partial(_room, self._device, self._batches)
        freezer = Freezer(Staging(side) if self._device.is_cuda else None, room)
        self._storage = Storage(config, self._parallel, self._residents.shards_of, freezer)
        if self._device.is_cuda:
            with self._progress.of("WarmUp"):
                warm_up(
                    definition,
                    self._model,
                    self._batches,
                    self._residents,
                    moved=self._progress.moved,
                )

    def _step(self, command: StepOptimizer) -> Mapping[str, float]:
        adapter = self._residents.adapter(command.model_id)
        if adapter.num_passes == 0:
            raise InvalidRequest(
                f"model {command.model_id!r} has no gradients to step with; "
                "run forward_backward since the last optim_step"
            )
        return adamw_step(adapter, command.params, self._parallel, self._model.optimizer)

    def _restore(self, command: Load) -> None:
        state = self._storage.take(command)
        adapter = self._residents.adapter(command.model_id)
        self._residents.check_fits(command.model_id, state, str(command.source))
        adapter.restore(state, with_optimizer=command.with_optimizer)


def _room(device: Device, batches: BatchRunner) -> float:
    """Bytes of the device that no pass is planned to need; nothing is planned on a CPU."""
    left, needed = device.memory_left(), batches.pass_bytes
    return 0.0 if left is None or needed is None else left - needed
