"""A control plane over a temporary data folder, a clock that tests set, and checkpoints published for real."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from lilo_engine.commands.command import Published
from lilo_engine.config import DataFolder
from lilo_engine.control.control import Control
from lilo_engine.control.sampling_sessions import target_of
from lilo_engine.engine_client import EngineState
from lilo_engine.errors import NotFound
from lilo_engine.operations.lora_metadata import lora_to_metadata
from lilo_engine.operations.operation import CreateModel, LoraSpec, ModelId, SaveSampler, SaveState
from lilo_engine.parts import open_control
from lilo_engine.sampling.residents import AdapterVersion
from lilo_volume import LocalVolume, SoloGroup, begin

LORA = LoraSpec(
    lora_rank=4, alpha=8.0, seed=7, train_attn=True, train_mlp=False, train_unembed=True
)


@dataclass
class Clock:
    """Stands still."""

    now_s: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Plane:
    """A control plane and its folder."""

    data: DataFolder
    clock: Clock
    control: Control
    orders: int = 0
    owner: str = ""
    """Of what `run` and `save` make."""

    @property
    def now_s(self) -> float:
        return self.clock.now_s

    def reopened(self) -> Control:
        """As a restarted server would open it."""
        self.control.records.close()
        self.control = open_control(self.data, self.clock)
        return self.control

    async def run(self, session_id: str, number: int = 0) -> ModelId:
        """A model that became resident."""
        model_id = ModelId(f"{session_id}:train:{number}")
        await self.control.journal.model_created(
            CreateModel(
                model_id=model_id,
                session_id=session_id,
                base_model="tiny",
                lora=LORA,
                owner=self.owner,
            )
        )
        return model_id

    async def save(self, model_id: ModelId, name: str, **options: object) -> SaveState:
        """A published training checkpoint."""
        self.orders += 1
        operation = SaveState(
            model_id=model_id, seq_id=self.orders, name=name, overwrite=True, **options
        )
        await self.control.journal.published(operation, self._publish(operation, "weights"))
        return operation

    async def snapshot(self, model_id: ModelId, name: str, session: str | None) -> SaveSampler:
        """Published sampler weights."""
        self.orders += 1
        operation = SaveSampler(
            model_id=model_id, seq_id=self.orders, name=name, sampling_session_id=session
        )
        await self.control.journal.published(operation, self._publish(operation, "sampler_weights"))
        return operation

    async def target(self, sampling_session_id: str) -> AdapterVersion:
        """What a sampling session samples from."""
        sessions = self.control.sampling_sessions
        return target_of(await sessions.entry(await sessions.get(sampling_session_id)))

    def _publish(self, operation: SaveState | SaveSampler, kind: str) -> Published:
        metadata = {
            "base_model": "tiny",
            "owner": self.owner,
            **lora_to_metadata(LORA),
            "user_metadata": '{"note": "kept"}',
        }
        if operation.ttl_s is not None:
            metadata["ttl_s"] = str(operation.ttl_s)
        session = getattr(operation, "sampling_session_id", None)
        if session is not None:
            metadata["sampling_session_id"] = session
        with begin(
            LocalVolume(self.data.checkpoints),
            SoloGroup(),
            collection=operation.model_id,
            kind=kind,
            name=operation.name,
            order=operation.seq_id,
            overwrite=True,
            timeout_s=10,
        ) as attempt:
            with attempt.create("state") as file:
                file.write(operation.name.encode())
            done = attempt.publish(expected=["state"], metadata=metadata)
        return Published(
            run_id=operation.model_id,
            kind=kind,
            name=operation.name,
            attempt=done.publication.attempt,
            folder=str(done.folder),
            size_bytes=done.size_bytes,
            digest=done.manifest.digest,
        )


@dataclass
class Unloads:
    """The engine as the sweeper sees it: remembers what it was told to unload."""

    unloaded: list[str] = field(default_factory=list)
    unknown: tuple[str, ...] = ()
    resident: tuple[str, ...] = ()

    async def unload(self, model_id: ModelId, reason: str) -> None:
        if model_id in self.unknown:
            raise NotFound(f"{model_id} is not resident")
        self.unloaded.append(model_id)

    async def state(self) -> EngineState:
        return EngineState(
            phase="serving",
            epoch=1,
            backend=None,
            health=None,
            silent_s=0.0,
            resident_models=tuple(ModelId(name) for name in self.resident),
            queued_operations=0,
            last_failure=None,
            max_batch_tokens=1,
            max_forward_backward_batch=None,
        )


@dataclass
class Samples:
    """The sampling side as the sweeper sees it: remembers what it was told to forget."""

    adapters_in_use: set[str] = field(default_factory=set)
    forgotten: list[str] = field(default_factory=list)

    async def forget(self, session_id: str) -> None:
        self.forgotten.append(session_id)


@pytest.fixture
def plane(tmp_path: Path) -> Plane:
    data = DataFolder(root=tmp_path)
    data.create()
    clock = Clock()
    return Plane(data=data, clock=clock, control=open_control(data, clock))
