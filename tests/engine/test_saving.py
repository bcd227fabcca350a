"""Saving and loading: lanes beside training, names, and states that go on exactly."""

import pytest
from lilo_engine.errors import InvalidRequest
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.operations.result import Pending

pytestmark = pytest.mark.anyio


async def test_training_overlaps_a_checkpoint_being_written(build, running):
    async with running() as rig:
        await rig.create(build.model("m"))
        rig.backend.hold("persist")
        save = await rig.engine.submit(build.save("m", 1))
        await rig.reached("persist")
        await rig.do(build.forward_backward("m", 2))
        await rig.do(build.step("m", 3))
        assert isinstance(await rig.engine.retrieve(save, 0), Pending)
        rig.backend.let_go("persist")
        saved = await rig.result(save)
        assert saved.ref == CheckpointRef(run_id="m", kind="weights", name="state")
        assert [published.name for published in rig.journal.checkpoints] == ["state"]


async def test_a_slow_checkpoint_delays_neither_a_publication_nor_another_model(build, running):
    async with running() as rig:
        for name in "abc":
            await rig.create(build.model(name))
        rig.backend.hold("persist")
        slow = await rig.engine.submit(build.save("a", 1))
        await rig.reached("persist")
        gate = rig.backend.held.pop("persist")
        second = await rig.engine.submit(build.save("b", 1))
        await rig.do(build.publish("c", 1, sampling_session_id="sampling"))
        await rig.do(build.forward_backward("c", 2))
        assert isinstance(await rig.engine.retrieve(second, 0), Pending)
        assert isinstance(await rig.engine.retrieve(slow, 0), Pending)
        gate.set()
        await rig.result(slow)
        await rig.result(second)


async def test_a_saved_state_loads_into_a_new_model_and_training_goes_on_equally(build, running):
    async def step(rig, model_id, number):
        await rig.do(build.forward_backward(model_id, number, datums=(build.datum(),)))
        await rig.do(build.step(model_id, number + 1))

    async with running() as rig:
        await rig.create(build.model("m"))
        await step(rig, "m", 1)
        saved = await rig.do(build.save("m", 3))
        await step(rig, "m", 4)
        source = build.model("n", source=saved.ref, with_optimizer=True, lora=build.lora(seed=9))
        assert (await rig.create(source)).source == saved.ref
        await step(rig, "n", 1)
        again = build.forward_backward("m", 6, datums=(build.datum(),))
        resumed = build.forward_backward("n", 3, datums=(build.datum(),))
        assert await rig.do(again) == await rig.do(resumed)


async def test_a_taken_checkpoint_name_is_the_users_mistake(build, running):
    async with running() as rig:
        await rig.create(build.model("m"))
        await rig.do(build.save("m", 1))
        assert isinstance(
            await rig.error(await rig.engine.submit(build.save("m", 2))), InvalidRequest
        )
        await rig.do(build.save("m", 3, overwrite=True))
