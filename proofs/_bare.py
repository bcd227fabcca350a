"""The bare trainer: the backend alone in this process, and the same work through a server beside it. Not a proof."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lilo_definitions import get
from lilo_engine.bench.client import datums
from lilo_engine.bench.server import cpu_s
from lilo_engine.bench.wire import Wire
from lilo_engine.bench.wire_model import WireModel
from lilo_engine.commands.backend import Backend, BackendConfig
from lilo_engine.commands.command import Batch, WorkItem
from lilo_engine.commands.discovery import find_backend
from lilo_engine.demo.server import LocalServer
from lilo_engine.operations.datum import Datum
from lilo_engine.operations.operation import AdamParams, LoraSpec, ModelId
from lilo_engine.operations.tensor import Tensor

ADAM = AdamParams(
    learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0
)
LONG_ROWS, SHORT_ROWS = (16, 1000), (128, 128)
"""Datums and tokens of steps of more than a second on one core; short ones cost the engine more for the same work."""
_LONG_STEPS = 5
_SHORT_STEPS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """Medians of some steps."""

    cpu_s: float
    wall_s: float


class BareTrainer:
    """Steps of one adapter on the backend alone, in this process."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._model_id = ModelId("bare")
        groups: dict[str, Any] = {"train_attn": True, "train_mlp": True, "train_unembed": True}
        backend.create_adapter(self._model_id, LoraSpec(lora_rank=4, alpha=32.0, seed=1, **groups))

    def step(self, batch: Batch) -> None:
        """A pass and a step."""
        self._backend.forward_backward(batch)
        self._backend.optim_step(self._model_id, ADAM)

    def batch(self, count: int, tokens: int) -> Batch:
        """Datums like those of `client.datums`."""
        ids = [33 + i % 90 for i in range(tokens)]
        datum = Datum(
            tokens=Tensor.of(ids, "int32"),
            loss_inputs={
                "target_tokens": Tensor.of(ids, "int64"),
                "logprobs": Tensor.of([0.0] * tokens, "float32"),
                "advantages": Tensor.of([1.0] * tokens, "float32"),
            },
        )
        item = WorkItem(operation_id="bare:1", model_id=self._model_id, datums=(datum,) * count)
        return Batch(loss="importance_sampling", config={}, forward_only=False, items=(item,))


@contextmanager
def bare_trainer(folder: Path) -> Generator[BareTrainer]:
    """One, closed afterwards."""
    config = BackendConfig(definition=get("tiny"), checkpoints_root=str(folder), epoch=1)
    backend = find_backend("miles")(config)
    try:
        yield BareTrainer(backend)
    finally:
        backend.close()


def full_batch(bare: BareTrainer) -> Took:
    """A step of 8 x 128 tokens."""
    batch = bare.batch(8, 128)
    for _ in range(3):
        bare.step(batch)
    return _medians(
        [_timed(lambda: bare.step(batch), time.process_time) for _ in range(_SHORT_STEPS)]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """The same long step on the backend alone and through a server."""

    bare: Took
    served: Took
    """Its processor time is that of front and engine alone."""

    @property
    def wall_share(self) -> float:
        """What the engine adds to the wall time of a step."""
        return self.served.wall_s / self.bare.wall_s - 1

    @property
    def cpu_share(self) -> float:
        """Processor time of front and engine against the trainer's."""
        return self.served.cpu_s / self.bare.cpu_s


def overhead(bare: BareTrainer, server: LocalServer, rows: tuple[int, int]) -> Overhead:
    """Steps of these datums and tokens, in turns, so that whatever else the machine does meets both."""
    batch, data = bare.batch(*rows), datums(*rows)
    took_bare: list[Took] = []
    took_served: list[Took] = []
    with Wire(server.base_url, server.api_key) as wire:
        model = WireModel.create(wire)
        bare.step(batch)
        model.step(data)
        for _ in range(_LONG_STEPS):
            took_bare.append(_timed(lambda: bare.step(batch), time.process_time))
            took_served.append(_timed(lambda: model.step(data), lambda: cpu_s(server.pid)))
    return Overhead(bare=_medians(took_bare), served=_medians(took_served))


def _timed(call: Callable[[], None], processor_s: Callable[[], float]) -> Took:
    cpu, wall = processor_s(), time.perf_counter()
    call()
    return Took(cpu_s=processor_s() - cpu, wall_s=time.perf_counter() - wall)


def _medians(took: list[Took]) -> Took:
    return Took(
        cpu_s=statistics.median(one.cpu_s for one in took),
        wall_s=statistics.median(one.wall_s for one in took),
    )
