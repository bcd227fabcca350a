"""Ranks of any layout as real processes over gloo, on which functions run: gradients and replicas can be read.

What no command returns is read here from inside each rank; the parent puts the parts together and checks that replicas
are equal bit for bit. Shared by the tests here, by proofs and by nothing of the product.

Processes are forked from a server that has imported torch and Megatron once: importing them for each of eight ranks
would cost more than all numbers together.
"""

from __future__ import annotations

import multiprocessing as mp
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from lilo_definitions import Definition
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.command import Batch, Output, WorkItem
from lilo_engine.operations.operation import AdamParams, LoraSpec, ModelId
from lilo_miles_backend.adapter_state import AdapterState
from lilo_miles_backend.config import BackendSettings
from lilo_miles_backend.rank_commands import (
    CreateAdapter,
    DropGradients,
    RunBatch,
    StepOptimizer,
    Unload,
)
from lilo_miles_backend.ranks.place import RankPlace
from lilo_miles_backend.shards import FactorShard

LIMIT_S = 300.0
"""For one call on all ranks; a layout that hangs has failed."""

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["lilo_miles_backend.ranks.rank"])


@dataclass(frozen=True)
class Piece:
    """One rank's part of one tensor."""

    part: FactorShard
    values: torch.Tensor


Held = Mapping[str, Piece]


class World:
    """All ranks of one definition's layout."""

    def __init__(self, definition: Definition, folder: Path) -> None:
        self.definition = definition
        size = definition.topology.world_size
        config = BackendConfig(
            definition=definition, checkpoints_root=str(folder / "checkpoints"), epoch=1
        )
        with tempfile.NamedTemporaryFile(dir=folder, prefix="meet-") as file:
            meet = f"file://{file.name}"
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for index in range(size):
            ours, theirs = _context.Pipe()
            place = RankPlace(rank=index, world_size=size, rendezvous=meet)
            process = _context.Process(target=_serve, args=(theirs, config, place), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers()

    def call(self, function: Callable[..., Any], *args: object) -> list[Any]:
        """`function(rank, *args)` on every rank; results in rank order."""
        for pipe in self._pipes:
            pipe.send((function, args))
        return self._answers()

    def close(self) -> None:
        """End the processes that this object started."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=30)
            if process.is_alive():
                process.kill()
                process.join()

    def _answers(self) -> list[Any]:
        answers: list[Any] = []
        for index, pipe in enumerate(self._pipes):
            assert pipe.poll(LIMIT_S), f"rank {index} gave no answer within {LIMIT_S} s"
            answers.append(pipe.recv())
        failed = [f"rank {i}: {a.text}" for i, a in enumerate(answers) if isinstance(a, _Failed)]
        assert not failed, "\n".join(failed)
        return answers

    def create(self, model_id: str, spec: LoraSpec) -> None:
        """A fresh adapter with random B."""
        command = CreateAdapter(model_id=ModelId(model_id), spec=spec, drawn_seed=0)
        self.call(_execute, command)
        self.call(_randomize, model_id)

    def unload(self, model_id: str) -> None:
        self.call(_execute, Unload(model_id=ModelId(model_id)))

    def drop_gradients(self, model_id: str) -> None:
        self.call(_execute, DropGradients(model_id=ModelId(model_id)))

    def run(
        self,
        *items: WorkItem,
        loss: str = "cross_entropy",
        forward_only: bool = False,
        config: Mapping[str, float | str] | None = None,
    ) -> list[Output]:
        """One batch; the answer of rank 0."""
        batch = Batch(loss=loss, config=config or {}, forward_only=forward_only, items=items)
        return self.call(_execute, RunBatch(batch=batch))[0]

    def step(self, model_id: str, params: AdamParams) -> list[Mapping[str, float]]:
        """An optimizer step; every rank's metrics."""
        return self.call(_execute, StepOptimizer(model_id=ModelId(model_id), params=params))

    def gradients(self, model_id: str) -> dict[str, torch.Tensor]:
        """This window's gradients as the next step would sum them; replicas are compared bit for bit."""
        return assembled(self.call(_gradients, model_id))

    def state(self, model_id: str) -> AdapterState:
        """The whole adapter and its moments; replicas are compared bit for bit."""
        held = self.call(_state, model_id)
        first = held[0]
        weights, exp_avg, exp_avg_sq = (
            assembled([rank[kind] for rank in held]) for kind in ("weights", "exp_avg", "square")
        )
        return AdapterState(
            base_model="reference",
            spec=first["spec"],
            optimizer_step=first["step"],
            weights=weights,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
        )


@contextmanager
def world(definition: Definition, folder: Path) -> Iterator[World]:
    """Ranks that end with the block."""
    ranks = World(definition, folder)
    try:
        yield ranks
    finally:
        ranks.close()


def laid_out(
    definition: Definition, *, tp: int = 1, cp: int = 1, dp: int = 1, **changes: object
) -> Definition:
    """The same model in another layout."""
    topology: dict[str, object] = {"tp": tp, "cp": cp, "dp": dp}
    topology.update(changes.pop("topology", {}))  # type: ignore[call-overload]
    return definition.derive(topology=topology, **changes)


def assembled(held: Sequence[Held]) -> dict[str, torch.Tensor]:
    """Whole tensors from all ranks' parts; ranks that hold the same part must hold the same bits."""
    whole: dict[str, torch.Tensor] = {}
    for name, first in held[0].items():
        whole[name] = torch.full(first.part.full, torch.nan)
    for rank, pieces in enumerate(held):
        for name, piece in pieces.items():
            known = whole[name][piece.part.index]
            if known.isnan().all():
                whole[name][piece.part.index] = piece.values
            else:
                assert torch.equal(known, piece.values), f"rank {rank} has another {name}"
    assert not any(tensor.isnan().any() for tensor in whole.values()), "some part is on no rank"
    return whole


@dataclass(frozen=True)
class _Failed:
    text: str


def _serve(pipe: Connection, config: BackendConfig, place: RankPlace) -> None:
    from lilo_miles_backend.ranks.rank import Rank

    try:
        rank = Rank(config, BackendSettings(), place)
        pipe.send(None)
    except Exception as error:  # the parent raises it
        pipe.send(_Failed(f"{type(error).__name__}: {error}"))
        return
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            break
        try:
            answer = function(rank, *args)
        except Exception as error:  # the parent raises it
            answer = _Failed(f"{type(error).__name__}: {error}")
        pipe.send(answer)
    rank.close()


def _execute(rank: Any, command: Any) -> object:
    return rank.execute(command)


def _randomize(rank: Any, model_id: str, seed: int = 5, scale: float = 0.01) -> None:
    """As `reference.randomize`: the whole B is drawn, and this rank takes its part."""
    adapter = rank.adapter(ModelId(model_id))
    generator = torch.Generator().manual_seed(seed)
    # The order of names must not depend on the layout, which the buffers' order does.
    for name, factor in sorted(adapter.named(adapter.weights).items()):
        if name.endswith(".lora_B"):
            part = adapter.shards[name]
            factor.copy_((torch.randn(part.full, generator=generator) * scale)[part.index])


def _pieces(adapter: Any, buffer: torch.Tensor) -> dict[str, Piece]:
    return {
        name: Piece(part=adapter.shards[name], values=values.clone())
        for name, values in adapter.named(buffer).items()
    }


def _gradients(rank: Any, model_id: str) -> dict[str, Piece]:
    from lilo_miles_backend.ranks.reduction import sum_gradients

    adapter = rank.adapter(ModelId(model_id))
    own = adapter.gradients.clone()
    sum_gradients(adapter, rank.parallel)
    pieces = _pieces(adapter, adapter.gradients)
    adapter.gradients.copy_(own)
    return pieces


def _state(rank: Any, model_id: str) -> dict[str, Any]:
    adapter = rank.adapter(ModelId(model_id))
    return {
        "spec": adapter.spec,
        "step": adapter.optimizer_step,
        "weights": _pieces(adapter, adapter.weights),
        "exp_avg": _pieces(adapter, adapter.exp_avg),
        "square": _pieces(adapter, adapter.exp_avg_sq),
    }
