"""The cap on passes in one command: `max_forward_backward_batch`, on a running engine."""

from contextlib import asynccontextmanager

import anyio
import pytest
from lilo_definitions import get
from lilo_engine.commands.launcher import MemoryLauncher
from lilo_engine.engine import Engine
from lilo_engine.journal import MemoryJournal

from tests.engine.conftest import HeldBackend, Rig

pytestmark = pytest.mark.anyio


@pytest.fixture
def capped(tmp_path):
    """An engine with a cap of its own, over a trainer that can be held."""

    @asynccontextmanager
    async def run(cap):
        tiny = get("tiny")
        launcher = MemoryLauncher(
            definition=tiny, checkpoints_root=tmp_path / "checkpoints", factory=HeldBackend
        )
        journal = MemoryJournal()
        engine = Engine(
            definition=tiny, launcher=launcher, journal=journal, max_forward_backward_batch=cap
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.run)
            yield Rig(engine, launcher, journal)
            tasks.cancel_scope.cancel()

    return run


async def calls_of(rig, build, waiting):
    """The calls that these (model, number) become when all of them wait before the first one starts."""
    for name in dict.fromkeys(model for model, _ in waiting):
        await rig.create(build.model(name))
    await rig.create(build.model("gate"))
    rig.backend.hold("forward_backward")
    await rig.engine.submit(build.forward_backward("gate", 1))
    await rig.reached("forward_backward")
    ids = [await rig.engine.submit(build.forward_backward(m, n)) for m, n in waiting]
    rig.backend.log.clear()
    rig.backend.let_go("forward_backward")
    for request_id in ids:
        await rig.result(request_id)
    return [entry[1:] for entry in rig.backend.log if entry[0] == "forward_backward"]


FOUR = [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


async def test_a_cap_of_two_turns_four_requests_of_two_models_into_calls_of_two_and_two(
    build, capped
):
    async with capped(2) as rig:
        assert await calls_of(rig, build, FOUR) == [("a:1", "b:1"), ("a:2", "b:2")]


async def test_without_a_cap_four_requests_of_two_models_are_one_call(build, capped):
    async with capped(None) as rig:
        assert await calls_of(rig, build, FOUR) == [("a:1", "b:1", "a:2", "b:2")]


async def test_a_cap_of_one_turns_128_requests_of_one_model_into_128_calls_in_order(build, capped):
    async with capped(1) as rig:
        waiting = [("m", number) for number in range(1, 129)]
        assert await calls_of(rig, build, waiting) == [(f"m:{n}",) for n in range(1, 129)]


@pytest.mark.parametrize("cap", [0, -1])
def test_a_cap_below_one_is_refused(cap, tmp_path):
    tiny = get("tiny")
    launcher = MemoryLauncher(definition=tiny, checkpoints_root=tmp_path)
    with pytest.raises(ValueError, match="max_forward_backward_batch"):
        Engine(
            definition=tiny,
            launcher=launcher,
            journal=MemoryJournal(),
            max_forward_backward_batch=cap,
        )


@pytest.mark.parametrize("cap", [None, 1, 5])
async def test_the_cap_of_a_definition_is_read_back_from_a_running_engine(
    build, running, limits, cap
):
    async with running(limits(max_forward_backward_batch=cap)) as rig:
        await rig.create(build.model("m"))
        state = await rig.engine.state()
        assert state.max_forward_backward_batch == cap
        assert state.max_batch_tokens == get("tiny").limits.max_batch_tokens


async def test_a_cap_of_its_own_is_read_back_too(build, capped):
    async with capped(3) as rig:
        assert (await rig.engine.state()).max_forward_backward_batch == 3
