"""Random interleavings of everything a client, a trainer and an engine can do, against a serial reference.

Submits, retries, duplicates, refusals, failures, unloads, lost trainers and engines that are started anew, with fewer
slots than models, so that idle ones are put aside and come back in between. Whatever happens, at the end: every
operation has an answer, none ran twice, those of one model ran in the order of their numbers, and every number that
was computed equals that of a trainer which ran the model's operations alone.
"""

import itertools
import tempfile
from pathlib import Path

import anyio
import anyio.lowlevel
import hypothesis.strategies as st
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from lilo_engine import slots
from lilo_engine.commands.launcher import MemoryLauncher
from lilo_engine.engine import Engine
from lilo_engine.errors import (
    CommandFailed,
    Gone,
    InvalidRequest,
    NotFound,
)
from lilo_engine.history.history import HistorySettings
from lilo_engine.journal import MemoryJournal
from lilo_engine.operations.operation import ModelId
from lilo_engine.operations.result import Complete, Failed, Pending

from tests.engine.conftest import HeldBackend
from tests.engine.repeat import repeated, same
from tests.engine.serial import BUILD, TINY, Client, check_alone, check_order, operation

LANES = ("gpu", "checkpoint", "publication")
LIMIT_S = 30
KINDS = ("pass", "forward", "bad pass", "step", "save", "publish", "load")
LIVE = 5
HOLDS = (
    "create_adapter",
    "forward_backward",
    "optim_step",
    "persist",
    "capture",
    "unload",
    "load",
    "prepare_load",
)
FAILS = ("forward_backward", "optim_step", "persist", "capture")


class Interleavings(RuleBasedStateMachine):
    """A running engine over a trainer in memory; every rule is something that happens, if it can happen now.

    Rules have no preconditions: which models outlive a trainer depends on threads, and what hypothesis draws must not.
    """

    def __init__(self):
        super().__init__()
        # A save that is cut off at the end may still be writing in its thread.
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(slots, "LOOK_AGAIN_S", 0.01)
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.portal_context = start_blocking_portal()
        self.portal = self.portal_context.__enter__()
        self.launcher = MemoryLauncher(
            definition=TINY, checkpoints_root=Path(self.folder.name), factory=HeldBackend
        )
        self.engine = self.portal.call(self._build)
        self.running = self.portal.start_task_soon(self.engine.run)
        self.names = (f"m{i}" for i in itertools.count())
        self.clients = []
        self.new_client()
        self.finished(self.clients[0].creation)

    async def _build(self):
        return Engine(
            definition=TINY,
            launcher=self.launcher,
            journal=MemoryJournal(),
            suspend_idle_s=0.0,
            # Everything lies in files, and the engine saves often by itself.
            history=HistorySettings(memory_bytes=0, eager_bytes=0, uncovered_operations=4),
            segments=Path(self.folder.name) / "segments",
        )

    @property
    def live(self):
        return [client for client in self.clients if not client.ended]

    @property
    def backend(self):
        return self.launcher.started[-1].backend

    def pick(self, index, among):
        return among[index % len(among)]

    def finished(self, request_id):
        async def wait():
            with anyio.fail_after(LIMIT_S):
                return await self.engine.retrieve(request_id, LIMIT_S)

        return self.portal.call(wait)

    # What clients do.

    @rule()
    def new_client(self):
        if not (len(self.live) < LIVE):
            return
        name = next(self.names)
        client = Client(name, self.portal.call(self.engine.create_model, BUILD.model(name)))
        self.clients.append(client)

    @rule(which=st.integers(0, 99), kind=st.sampled_from(KINDS), skip=st.integers(0, 2))
    def submit(self, which, kind, skip):
        if not (self.live):
            return
        client = self.pick(which, self.live)
        number = client.unsent(skip)
        asked = operation(kind, client.name, number)
        client.sent[number] = (asked, self.portal.call(self.engine.submit, asked))

    @rule(which=st.integers(0, 99))
    def submit_twice_at_once(self, which):
        if not (self.live):
            return
        client = self.pick(which, self.live)
        number = client.unsent(0)
        asked = operation("pass", client.name, number)
        ids = []

        async def send():
            ids.append(await self.engine.submit(asked))

        async def both():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(send)
                tasks.start_soon(send)

        self.portal.call(both)
        assert ids[0] == ids[1]
        client.sent[number] = (asked, ids[0])

    @rule(which=st.integers(0, 99), number=st.integers(0, 99))
    def retry(self, which, number):
        if not (any(client.sent for client in self.live)):
            return
        client = self.pick(which, [client for client in self.live if client.sent])
        asked, request_id = client.sent[self.pick(number, sorted(client.sent))]
        assert self.portal.call(self.engine.submit, asked) == request_id

    @rule(which=st.integers(0, 99), number=st.integers(0, 99))
    def use_a_number_twice(self, which, number):
        if not (any(client.sent for client in self.live)):
            return
        client = self.pick(which, [client for client in self.live if client.sent])
        used = self.pick(number, sorted(client.sent))
        other = BUILD.forward_backward(client.name, used, datums=(BUILD.datum(n=9),))
        try:
            self.portal.call(self.engine.submit, other)
        except InvalidRequest:
            return
        raise AssertionError("another payload under a used number was taken")

    @rule(which=st.integers(0, 99), number=st.integers(0, 99))
    def poll(self, which, number):
        if not (any(client.sent for client in self.clients)):
            return
        client = self.pick(which, [client for client in self.clients if client.sent])
        number = self.pick(number, sorted(client.sent))
        _, request_id = client.sent[number]
        try:
            state = self.portal.call(self.engine.retrieve, request_id, 0)
        except Gone:
            assert client.ended
        except NotFound:
            assert client.states is not None
        else:
            assert isinstance(state, Pending | Complete | Failed)
            if not isinstance(state, Pending):
                client.seen.add(number)

    @rule(which=st.integers(0, 99))
    def unload(self, which):
        if not (len(self.live) > 1):
            return
        client = self.pick(which, self.live)
        client.ended = True
        self.portal.call(self.engine.unload, ModelId(client.name), "its client left")

    # What the trainer does.

    @rule(command=st.sampled_from(HOLDS))
    def hold(self, command):
        if self.backend.held:
            return
        self.backend.hold(command)

    @rule()
    def let_go(self):
        if not (self.backend.held):
            return
        for command in list(self.backend.held):
            self.backend.let_go(command)

    @rule(command=st.sampled_from(FAILS))
    def fail_once(self, command):
        self.backend.raises[command] = CommandFailed(f"{command} was made to fail")

    @rule()
    def lose_the_trainer(self):
        if not (self.live):
            return
        lost = self.backend
        # A trainer that holds no model would count as one that cannot live.
        self.let_go()
        if "ready" not in self.phases().values():
            self.submit(0, "forward", 0)
        self.portal.call(self._until_useful)
        epoch = self.portal.call(self.engine.state).epoch
        self.launcher.started[-1].lose("the power went")
        self.portal.call(self._until_served, epoch)
        assert self.backend is not lost
        there = self.phases()
        for client in self.live:
            client.ended = client.name not in there
        if not self.live:
            self.new_client()

    @rule(drained=st.booleans())
    def start_the_engine_anew(self, drained):
        """As a server that is stopped and started: nothing of the earlier one's models is known to the next."""
        self.let_go()
        if drained:
            self.portal.call(self._drain)
        self.running.cancel()
        self.portal.call(self._until_stopped)
        for client in self.clients:
            if client.states is None:
                client.states = {n: self._state_now(client, n) for n in sorted(client.sent)}
                client.ended = True
        self.engine = self.portal.call(self._build)
        self.running = self.portal.start_task_soon(self.engine.run)
        self.portal.call(self._until_served, 0)
        for client in self.clients:
            with pytest.raises(NotFound):
                self.portal.call(self.engine.submit, operation("forward", client.name, 1))
        self.new_client()

    def phases(self):
        models = self.portal.call(self._overview)["models"]
        return {row["model_id"]: row["phase"] for row in models}

    def _state_now(self, client, number):
        """What a stopped engine says of an operation: never that it goes on."""
        try:
            state = self.portal.call(self.engine.retrieve, client.sent[number][1], 0)
        except Gone:
            assert number in client.seen, f"{client.name}:{number} was lost"
            return None
        assert isinstance(state, Complete | Failed), f"{client.name}:{number} was left: {state}"
        return state

    async def _drain(self):
        with anyio.fail_after(LIMIT_S):
            await self.engine.drain()

    async def _until_stopped(self):
        with anyio.fail_after(LIMIT_S):
            while (await self.engine.state()).phase != "stopped":
                await anyio.lowlevel.checkpoint()

    async def _until_useful(self):
        with anyio.fail_after(LIMIT_S):
            while "ready" not in [row["phase"] for row in self.engine.overview()["models"]]:
                await anyio.lowlevel.checkpoint()

    async def _until_served(self, epoch):
        with anyio.fail_after(LIMIT_S):
            while True:
                state = await self.engine.state()
                if state.epoch > epoch and state.phase == "serving":
                    return
                await anyio.lowlevel.checkpoint()

    # What must hold.

    @invariant()
    def nobody_is_passed_over_too_often(self):
        seen = self.portal.call(self._overview)
        for row in seen["queue"]:
            assert row["passed_over"] <= max(1, len(seen["models"])), row
        held = [row for row in seen["models"] if row["phase"] in ("ready", "suspending")]
        assert len(held) <= TINY.lora.slots

    async def _overview(self):
        return self.engine.overview()

    def teardown(self):
        try:
            if self.clients:
                self._end_well()
        finally:
            self.let_go()
            self.running.cancel()
            self.patches.undo()
            self.portal_context.__exit__(None, None, None)
            self.folder.cleanup()

    def _end_well(self):
        """Every client sends what is missing and a last step, so that none keeps its slot from those that wait."""
        self.let_go()
        for client in self.live:
            last = max(client.sent, default=0) + 1
            for number in range(1, last + 1):
                if number not in client.sent:
                    asked = operation("step" if number == last else "forward", client.name, number)
                    client.sent[number] = (asked, self.portal.call(self.engine.submit, asked))
        for client in self.clients:
            states = client.states
            if states is None:
                states = {n: self._last_state(client, n) for n in sorted(client.sent)}
            with tempfile.TemporaryDirectory() as root:
                check_alone(client, states, Path(root))
        check_order([s.backend.log for s in self.launcher.started])
        self.portal.call(self._check_history)

    async def _check_history(self):
        """What is kept of each model that has a slot makes its state again."""
        with anyio.fail_after(LIMIT_S):
            while any(self.engine.overview()["lanes"][lane] for lane in LANES):
                await anyio.lowlevel.checkpoint()
            await self.engine.files.caught_up()
        for model in self.engine.overview()["models"]:
            model_id = model["model_id"]
            # Of a window that grew beyond the limits nothing is kept.
            if model["phase"] != "ready" or not self.engine.history.is_kept(model_id):
                continue
            again, _ = await repeated(self.engine, model_id, BUILD.lora(), Path(self.folder.name))
            assert same(again, self.backend._adapters[model_id]), f"{model_id} is another one"

    def _last_state(self, client, number):
        request_id = client.sent[number][1]
        try:
            state = self.finished(request_id)
        except Gone:
            # It was fetched before its model ended, and is not kept for ever.
            assert client.ended
            assert number in client.seen, f"{request_id} was lost"
            return None
        assert isinstance(state, Complete | Failed), f"{request_id} has no answer: {state}"
        return state


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
