"""A rank that is slow at random moments and writes down what it was told; its numbers depend on the whole history.

Every command is a collective over the command's own number, so that ranks which are at different commands find out.
"""

from __future__ import annotations

import random
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.command import Output
from lilo_engine.operations.tensor import Tensor
from lilo_miles_backend.config import BackendSettings
from lilo_miles_backend.rank_commands import (
    Capture,
    CreateAdapter,
    DropGradients,
    RunBatch,
    StepOptimizer,
    Unload,
)
from lilo_miles_backend.ranks.place import RankPlace

from tests.cluster.light_rank import LightRank

MAX_DELAY_S = 0.004
PRIME = 1_000_003


def after(state: int, what: str) -> int:
    """The state of a model after one more thing was done to it."""
    return (state * 31 + zlib.crc32(what.encode())) % PRIME


class OrderedRank(LightRank):
    def __init__(self, config: BackendConfig, settings: BackendSettings, place: RankPlace) -> None:
        super().__init__(config, settings, place)
        self._log = Path(config.checkpoints_root, f"rank-{place.rank}.log")
        self._delays = random.Random(place.rank)
        self._states: dict[str, int] = {}

    def execute(self, command: object) -> object:
        with self.progress_.of(type(command).__name__):
            match command:
                case CreateAdapter() | Unload():
                    self._states[command.model_id] = 0
                    self._together(f"{type(command).__name__} {command.model_id}")
                    return None
                case RunBatch():
                    return [self._pass(item) for item in command.batch.items]
                case StepOptimizer():
                    self._done(command.model_id, "step")
                    return {"state": float(self._states[command.model_id]), "skipped": 0.0}
                case DropGradients() | Capture():
                    return None
                case _:
                    raise AssertionError(f"an ordered rank knows no {command}")

    def _pass(self, item) -> Output:
        self._done(item.model_id, item.operation_id)
        logprobs = tuple(
            Tensor.of([0.0] * len(datum.loss_inputs["target_tokens"].numpy()), "float32")
            for datum in item.datums
        )
        state = float(self._states[item.model_id])
        return Output(
            operation_id=item.operation_id, logprobs=logprobs, metrics={"loss:sum": state}
        )

    def _done(self, model_id: str, what: str) -> None:
        self._together(f"{model_id} {what}")
        self._states[model_id] = after(self._states[model_id], what)

    def _together(self, what: str) -> None:
        time.sleep(self._delays.uniform(0.0, MAX_DELAY_S))
        with self._log.open("a") as log:
            log.write(f"{what}\n")
        number = zlib.crc32(what.encode()) % 1000
        total = torch.tensor([number])
        dist.all_reduce(total)
        assert int(total) == number * self.place.world_size, f"the ranks are not all at {what}"
