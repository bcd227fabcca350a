"""The bare trainer: the backend alone in this process, and the same work through a server beside it. Not a proof.

A machine's speed drifts by a tenth within minutes: what is compared is measured in turns of a second or two.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tinker
from _proof import LIMIT_S, adam, connect, datum, tokens
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
from tinker import types

ADAM = AdamParams(
    learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0
)
LONG_ROWS, SHORT_ROWS = (16, 1000), (128, 128)
"""Datums and tokens of steps of more than a second on one core; short ones cost the engine more for the same work."""
_LONG_STEPS = 5
_SHORT_STEPS = 15
FULL_ROWS = (8, 128)
_CROWD_RANK = 8
"""Lora rank of the load driver's clients."""
_CROWD_TURNS, _CROWD_STEPS = 5, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """Medians of some steps."""

    cpu_s: float
    wall_s: float


class BareTrainer:
    """Steps of one adapter on the backend alone, in this process."""

    def __init__(self, backend: Backend, lora_rank: int) -> None:
        self._backend = backend
        self._model_id = ModelId("bare")
        groups: dict[str, Any] = {"train_attn": True, "train_mlp": True, "train_unembed": True}
        spec = LoraSpec(lora_rank=lora_rank, alpha=32.0, seed=1, **groups)
        backend.create_adapter(self._model_id, spec)

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
def bare_trainer(folder: Path, lora_rank: int = 4) -> Generator[BareTrainer]:
    """One, closed afterwards."""
    config = BackendConfig(definition=get("tiny"), checkpoints_root=str(folder), epoch=1)
    backend = find_backend("miles")(config)
    try:
        yield BareTrainer(backend, lora_rank)
    finally:
        backend.close()


def full_batch(bare: BareTrainer) -> Took:
    """A step of 8 x 128 tokens."""
    batch = bare.batch(*FULL_ROWS)
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


def crowd(server: LocalServer, folder: Path, clients: int = 8) -> list[float]:
    """Tokens a second of SDK clients at once by those of the bare trainer, steps of 8 x 128 tokens; one ratio per turn."""
    rows, length = FULL_ROWS
    service = connect(server)
    models = [
        service.create_lora_training_client(base_model="tiny", rank=_CROWD_RANK)
        for _ in range(clients)
    ]
    data = [
        [datum(tokens(1 + rows * client + row, length + 1)) for row in range(rows)]
        for client in range(clients)
    ]
    ratios: list[float] = []
    with bare_trainer(folder, _CROWD_RANK) as bare, ThreadPoolExecutor(clients) as pool:
        batch = bare.batch(*FULL_ROWS)

        def together() -> None:
            for _ in pool.map(_train, models, data):
                pass

        def alone() -> None:
            for _ in range(_SHORT_STEPS):
                bare.step(batch)

        together()
        alone()
        for _ in range(_CROWD_TURNS):
            bare_s = _timed(alone, time.process_time).wall_s / _SHORT_STEPS
            served_s = _timed(together, time.process_time).wall_s / (clients * _CROWD_STEPS)
            ratios.append(bare_s / served_s)
    return ratios


def _train(model: tinker.TrainingClient, data: Sequence[types.Datum]) -> None:
    """Some steps, both calls of each sent before either is awaited."""
    for _ in range(_CROWD_STEPS):
        called = (model.forward_backward(list(data), "cross_entropy"), model.optim_step(adam(1e-4)))
        for future in called:
            future.result(timeout=LIMIT_S)


def _timed(call: Callable[[], None], processor_s: Callable[[], float]) -> Took:
    cpu, wall = processor_s(), time.perf_counter()
    call()
    return Took(cpu_s=processor_s() - cpu, wall_s=time.perf_counter() - wall)


def _medians(took: list[Took]) -> Took:
    return Took(
        cpu_s=statistics.median(one.cpu_s for one in took),
        wall_s=statistics.median(one.wall_s for one in took),
    )
