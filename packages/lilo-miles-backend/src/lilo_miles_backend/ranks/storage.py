"""Storage: a rank's way to the checkpoint volume: captures go out, published checkpoints come in.

    capture, take       on the thread that trains; memory only (capture: and a gather, for a snapshot)
    persist, fetch      on the threads that publish; files, digests, and the ranks' own group for them

Nothing is read, digested or waited for on the thread that trains.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.command import Published
from lilo_engine.errors import InvalidRequest, NotFound
from lilo_engine.operations.operation import LoraSpec
from lilo_engine.storage import open_checkpoints
from lilo_volume import Group, LocalVolume, SoloGroup
from lilo_volume.config import node_id
from lilo_volume.groups.torch import TorchGroup

from lilo_miles_backend.adapter_state import PARTS, AdapterState
from lilo_miles_backend.checkpoints import load_training
from lilo_miles_backend.checkpoints.capture_files import CaptureFiles, sweep
from lilo_miles_backend.checkpoints.publication import TIMEOUT_S
from lilo_miles_backend.checkpoints.translate import volume_errors
from lilo_miles_backend.rank_commands import Capture, Fetch, Load, Persist
from lilo_miles_backend.ranks.adapter import Adapter
from lilo_miles_backend.ranks.captures import Captures
from lilo_miles_backend.ranks.frozen import Freezer
from lilo_miles_backend.ranks.gather import whole_tensors
from lilo_miles_backend.ranks.parallel import Parallel
from lilo_miles_backend.ranks.share import share_of
from lilo_miles_backend.ranks.view_guard import ViewGuard
from lilo_miles_backend.shards import FactorShard

ShardsOf = Callable[[LoraSpec], Mapping[str, FactorShard]]
"""Which factors an adapter of some shape has in this trainer, and which part of each this rank holds."""


class Storage:
    """One rank's side of saving and loading."""

    def __init__(
        self, config: BackendConfig, parallel: Parallel, shards_of: ShardsOf, freezer: Freezer
    ) -> None:
        """Open this node's view of the volume and meet the other ranks over the group for checkpoints."""
        definition = config.definition
        self._base_model = definition.model.name
        self._parallel = parallel
        self._shards_of = shards_of
        self._freezer = freezer
        self._volume = open_checkpoints(Path(config.checkpoints_root))
        self._group = _group_of(parallel)
        topology = definition.topology
        sweep(self._volume, committed=parallel.rank == 0)
        in_files = definition.trainer.captures == "volume"
        self._files = CaptureFiles(self._volume) if in_files else None
        self._captures = Captures(
            self._volume,
            self._group,
            layout={"tp": topology.tp, "cp": topology.cp, "dp": topology.dp},
            files=self._files,
        )
        self._guard = ViewGuard(TIMEOUT_S)
        self._lock = threading.Lock()
        self._fetched: dict[str, AdapterState] = {}

    def capture(self, command: Capture, adapter: Adapter) -> None:
        """Freeze this rank's share of an adapter; rank 0 gets all of it if it is to be sampled from."""
        if command.kind == "training":
            frozen = self._freezer.freeze(self._share(adapter))
        elif self._parallel.rank < self._parallel.tp.size:  # rank 0 and those with its other parts
            weights = {f"weights.{n}": t for n, t in adapter.named(adapter.weights).items()}
            shards = {f"weights.{n}": shard for n, shard in adapter.shards.items()}
            frozen = whole_tensors(weights, shards, self._parallel.tp, self._freezer)
        else:
            return
        if frozen is None:
            return
        state = AdapterState(
            base_model=self._base_model,
            spec=adapter.spec,
            optimizer_step=adapter.optimizer_step,
            weights={},
            exp_avg={},
            exp_avg_sq={},
            shards=adapter.shards if command.kind == "training" else {},
        )
        self._captures.keep(command.capture_id, command.kind, state, frozen)

    def persist(self, command: Persist) -> Published:
        """Publish a capture: a training state together with all ranks, a snapshot as rank 0 alone."""
        with self._guard.writing():
            return self._captures.persist(command.capture_id, command.destination)

    def fetch(self, command: Fetch) -> None:
        """Read this rank's part of a published checkpoint, checked, and keep it for `take`.

        Raises:
            NotFound, InvalidRequest, CommandFailed: see `load_training`; the same on every rank.
        """
        with self._lock:
            for fetch_id in command.forget:
                self._fetched.pop(fetch_id, None)

        def place(
            base_model: str, spec: LoraSpec, shapes: Mapping[str, tuple[int, int]]
        ) -> Mapping[str, FactorShard]:
            return self._placed(str(command.source), base_model, spec, shapes)

        with self._view_alone():
            state = load_training(
                self._volume,
                command.source,
                with_optimizer=command.with_optimizer,
                group=self._group,
                place=place,
            )
        with self._lock:
            self._fetched[command.fetch_id] = state

    def take(self, command: Load) -> AdapterState:
        """What was fetched for a load; it is let go of here.

        Raises:
            NotFound: nothing was, or it was taken before.
        """
        with self._lock:
            state = self._fetched.pop(command.fetch_id, None)
        if state is None:
            raise NotFound(f"{command.source} was not fetched before it was to be loaded")
        return state

    def close(self) -> None:
        """Let go of what waits."""
        self._captures.close()
        with self._lock:
            self._fetched.clear()

    @contextmanager
    def _view_alone(self) -> Generator[None]:
        """While this node's view is brought up to date: nothing is being written to it, and what waits there is kept."""
        if isinstance(self._volume, LocalVolume):  # whose view is the committed state
            yield
            return
        with self._guard.loading():
            if self._files is not None:
                self._files.settle()
            yield

    def _share(self, adapter: Adapter) -> dict[str, torch.Tensor]:
        """What this rank will write of an adapter, as it lies there, by `PART.NAME`."""
        world, peers = self._parallel.world, self._parallel.dp_cp
        names = share_of(
            adapter.shards, everybody=(world.rank, world.size), peers=(peers.rank, peers.size)
        )
        return {
            f"{part}.{name}": tensor
            for part in PARTS
            for name, tensor in adapter.named(getattr(adapter, part)).items()
            if name in names
        }

    def _placed(
        self,
        source: str,
        base_model: str,
        spec: LoraSpec,
        shapes: Mapping[str, tuple[int, int]],
    ) -> Mapping[str, FactorShard]:
        """The parts that this rank wants of a checkpoint."""
        if base_model != self._base_model:
            raise InvalidRequest(
                f"{source} does not fit: base_model is {base_model} there and {self._base_model} here"
            )
        shards = self._shards_of(spec)
        here = {name: shard.full for name, shard in shards.items()}
        if here != dict(shapes):
            odd = sorted(set(shapes.items()) ^ set(here.items()))[:3]
            raise InvalidRequest(
                f"{source} does not fit: it holds other tensors than an adapter of its kind has here: {odd}"
            )
        return shards


def _group_of(parallel: Parallel) -> Group:
    if parallel.persist is None:
        return SoloGroup()
    group = TorchGroup(parallel.persist)
    with volume_errors():
        group.introduce(node_id(), TIMEOUT_S)
    return group
