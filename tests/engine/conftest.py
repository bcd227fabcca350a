"""Operations as a front would make them, and an engine over a trainer in memory that tests can hold and let go."""

import threading
from contextlib import asynccontextmanager

import anyio
import pytest
from lilo_definitions import get
from lilo_engine.commands.launcher import MemoryLauncher
from lilo_engine.commands.memory import MemoryBackend
from lilo_engine.engine import Engine
from lilo_engine.errors import Unavailable
from lilo_engine.journal import MemoryJournal
from lilo_engine.operations.datum import Datum
from lilo_engine.operations.operation import (
    AdamParams,
    CreateModel,
    ForwardBackward,
    LoadState,
    LoraSpec,
    ModelId,
    OptimStep,
    SaveSampler,
    SaveState,
)
from lilo_engine.operations.tensor import Tensor

ADAM = AdamParams(
    learning_rate=0.1, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0
)


def passes(backend):
    """The passes that a held trainer ran, one tuple of operation ids for each command."""
    return [entry[1:] for entry in backend.log if entry[0] == "forward_backward"]


class Build:
    """Makes valid operations; every field can be given."""

    adam = ADAM

    def datum(self, n=4, start=0, **inputs):
        ids = [(start + i) % 256 for i in range(n)]
        given = {"target_tokens": Tensor.of(ids, "int64"), **inputs}
        return Datum(tokens=Tensor.of(ids, "int32"), loss_inputs=given)

    def floats(self, values):
        return Tensor.of(values, "float32")

    def lora(self, **fields):
        defaults = {
            "lora_rank": 8,
            "alpha": 32.0,
            "seed": 1,
            "train_attn": True,
            "train_mlp": True,
            "train_unembed": True,
        }
        return LoraSpec(**(defaults | fields))

    def model(self, name, **fields):
        defaults = {
            "model_id": ModelId(name),
            "session_id": "session",
            "base_model": "tiny",
            "lora": self.lora(),
        }
        return CreateModel(**(defaults | fields))

    def forward_backward(self, model_id, seq_id, *, datums=None, loss="cross_entropy", **fields):
        return ForwardBackward(
            model_id=ModelId(model_id),
            seq_id=seq_id,
            datums=(self.datum(start=seq_id),) if datums is None else datums,
            loss=loss,
            loss_config=fields.get("config", {}),
            forward_only=fields.get("forward_only", False),
        )

    def step(self, model_id, seq_id, params=ADAM):
        return OptimStep(model_id=ModelId(model_id), seq_id=seq_id, params=params)

    def save(self, model_id, seq_id, name="state", overwrite=False):
        return SaveState(model_id=ModelId(model_id), seq_id=seq_id, name=name, overwrite=overwrite)

    def publish(self, model_id, seq_id, name="snapshot", **fields):
        return SaveSampler(model_id=ModelId(model_id), seq_id=seq_id, name=name, **fields)

    def load(self, model_id, seq_id, source, with_optimizer=True):
        return LoadState(
            model_id=ModelId(model_id),
            seq_id=seq_id,
            source=source,
            with_optimizer=with_optimizer,
        )


class HeldBackend(MemoryBackend):
    """A trainer in memory that writes down what it does and stops where a test holds it."""

    def __init__(self, config):
        super().__init__(config)
        self.log = []
        self.held = {}
        self.reached = {}
        self.raises = {}

    def hold(self, command):
        self.held[command] = threading.Event()
        self.reached[command] = threading.Event()

    def let_go(self, command):
        self.held.pop(command).set()

    def _enter(self, command, *what):
        self.log.append((command, *what))
        if command in self.held:
            gate = self.held[command]
            self.reached[command].set()
            assert gate.wait(20), f"{command} was never let go"
        if command in self.raises:
            raise self.raises.pop(command)

    def create_adapter(self, model_id, spec):
        self._enter("create_adapter", model_id)
        super().create_adapter(model_id, spec)

    def forward_backward(self, batch):
        self._enter("forward_backward", *[item.operation_id for item in batch.items])
        return super().forward_backward(batch)

    def optim_step(self, model_id, params):
        self._enter("optim_step", model_id)
        return super().optim_step(model_id, params)

    def capture(self, model_id, kind):
        self._enter("capture", model_id, kind)
        return super().capture(model_id, kind)

    def persist(self, capture_id, destination):
        self._enter("persist", destination.kind, destination.name)
        return super().persist(capture_id, destination)

    def load(self, model_id, source, *, with_optimizer):
        self._enter("load", model_id)
        super().load(model_id, source, with_optimizer=with_optimizer)

    def prepare_load(self, source, *, with_optimizer):
        self._enter("prepare_load", str(source))
        super().prepare_load(source, with_optimizer=with_optimizer)

    def drop_gradients(self, model_id):
        self._enter("drop_gradients", model_id)
        super().drop_gradients(model_id)

    def unload(self, model_id):
        self._enter("unload", model_id)
        super().unload(model_id)


class Journal(MemoryJournal):
    """One that a test can make fail, as a database that is away does."""

    away = False

    async def model_ended(self, model_id, reason):
        if self.away:
            raise Unavailable("the records are away")
        await super().model_ended(model_id, reason)


class Rig:
    """A running engine and what a client does with it."""

    def __init__(self, engine, launcher, journal):
        self.engine = engine
        self.launcher = launcher
        self.journal = journal

    @property
    def backend(self):
        return self.launcher.started[-1].backend

    async def started(self, build):
        """Return when the trainer is up: a model was made and ended."""
        await self.create(build.model("first"))
        await self.engine.unload(ModelId("first"), "the test begins")
        await self.create(build.model("second"))
        await self.engine.unload(ModelId("second"), "the test begins")
        self.backend.log.clear()

    async def finished(self, request_id):
        with anyio.fail_after(10):
            return await self.engine.retrieve(request_id, 10)

    async def result(self, request_id):
        state = await self.finished(request_id)
        assert hasattr(state, "result"), state
        return state.result

    async def error(self, request_id):
        state = await self.finished(request_id)
        assert hasattr(state, "error"), state
        return state.error

    async def create(self, request):
        return await self.result(await self.engine.create_model(request))

    async def do(self, operation):
        return await self.result(await self.engine.submit(operation))

    async def reached(self, command):
        """Return when the trainer stands in a held command."""
        with anyio.fail_after(10):
            await anyio.to_thread.run_sync(self.backend.reached[command].wait, 10)


@pytest.fixture(scope="session")
def build():
    return Build()


@pytest.fixture(scope="session")
def tiny():
    return get("tiny")


@pytest.fixture
def limits(tiny):
    """A definition with some limits changed."""

    def change(slots=None, **limits):
        changed = tiny.limits.model_copy(update=limits)
        lora = tiny.lora if slots is None else tiny.lora.model_copy(update={"slots": slots})
        return tiny.model_copy(update={"limits": changed, "lora": lora})

    return change


@pytest.fixture
def running(tiny, tmp_path):
    """An engine over a held trainer, as a context."""

    @asynccontextmanager
    async def run(definition=tiny, factory=HeldBackend, launcher=None, **settings):
        launcher = launcher or MemoryLauncher(
            definition=definition, checkpoints_root=tmp_path / "checkpoints", factory=factory
        )
        journal = Journal()
        engine = Engine(definition=definition, launcher=launcher, journal=journal, **settings)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.run)
            rig = Rig(engine, launcher, journal)
            try:
                yield rig
            finally:
                for started in getattr(launcher, "started", []):
                    for command in list(getattr(started.backend, "held", {})):
                        started.backend.let_go(command)
                tasks.cancel_scope.cancel()

    return run
