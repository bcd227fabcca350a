"""Saving and loading: lanes beside training, names, and states that go on exactly."""

import pytest
from lilo_engine.errors import BackendLost, Gone, InvalidRequest, NotFound
from lilo_engine.operations.operation import ModelId
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.operations.result import ModelCreated, Pending

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


async def test_checkpoints_are_read_one_after_another_so_that_none_waits_at_the_trainer(
    build, running
):
    async with running() as rig:
        for name in "abc":
            await rig.create(build.model(name))
        saved = await rig.do(build.save("a", 1))
        rig.backend.hold("prepare_load")
        first = await rig.engine.submit(build.load("a", 2, saved.ref))
        second = await rig.engine.submit(build.load("b", 1, saved.ref))
        await rig.reached("prepare_load")
        await rig.do(build.forward_backward("c", 1))
        assert [entry[0] for entry in rig.backend.log].count("prepare_load") == 1
        rig.backend.let_go("prepare_load")
        await rig.result(first)
        await rig.result(second)
        assert [entry[0] for entry in rig.backend.log].count("prepare_load") == 2


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


async def saved_state(build, rig):
    """A model `a` that trained and was saved, and its checkpoint."""
    await rig.create(build.model("a"))
    await rig.do(build.forward_backward("a", 1))
    await rig.do(build.step("a", 2))
    return (await rig.do(build.save("a", 3))).ref


async def test_others_train_while_a_checkpoint_is_read_and_its_own_model_waits(build, running):
    async with running() as rig:
        source = await saved_state(build, rig)
        await rig.create(build.model("b"))
        rig.backend.hold("prepare_load")
        load = await rig.engine.submit(build.load("a", 4, source))
        refused = await rig.engine.submit(build.forward_backward("a", 5, loss="nonsense"))
        after = await rig.engine.submit(build.forward_backward("a", 6))
        await rig.reached("prepare_load")
        await rig.do(build.forward_backward("b", 1))
        await rig.do(build.step("b", 2))
        for request_id in (load, refused, after):
            assert isinstance(await rig.engine.retrieve(request_id, 0), Pending)
        rig.backend.let_go("prepare_load")
        assert (await rig.result(load)).ref == source
        assert isinstance(await rig.error(refused), InvalidRequest)
        await rig.result(after)
        assert [entry[0] for entry in rig.backend.log][-2:] == ["load", "forward_backward"]


async def test_others_train_while_what_a_model_is_made_from_is_read(build, running):
    async with running() as rig:
        source = await saved_state(build, rig)
        rig.backend.hold("prepare_load")
        created = await rig.engine.create_model(build.model("b", source=source))
        await rig.reached("prepare_load")
        await rig.do(build.forward_backward("a", 4))
        rig.backend.let_go("prepare_load")
        await rig.result(created)
        await rig.do(build.forward_backward("b", 1))


async def test_a_checkpoint_that_cannot_be_read_fails_its_load_and_nothing_else(build, running):
    async with running() as rig:
        await saved_state(build, rig)
        missing = CheckpointRef(run_id="a", kind="weights", name="never-saved")
        load = await rig.engine.submit(build.load("a", 4, missing))
        assert isinstance(await rig.error(load), NotFound)
        await rig.do(build.forward_backward("a", 5))
        await rig.do(build.step("a", 6))
        assert ("load", "a") not in rig.backend.log


@pytest.mark.parametrize("how", ["load", "creation"])
async def test_a_model_that_ends_while_its_checkpoint_is_read_frees_its_slot(
    build, running, limits, how
):
    async with running(limits(slots=2)) as rig:
        source = await saved_state(build, rig)
        rig.backend.hold("prepare_load")
        if how == "load":
            waits = await rig.engine.submit(build.load("a", 4, source))
        else:
            waits = await rig.engine.create_model(build.model("b", source=source))
        await rig.reached("prepare_load")
        await rig.engine.unload(ModelId("a" if how == "load" else "b"), "its client left")
        rig.backend.let_go("prepare_load")
        assert isinstance(await rig.error(waits), Gone)
        for name in ("c", "d") if how == "load" else ("c",):
            await rig.create(build.model(name))


async def test_a_trainer_lost_while_a_checkpoint_is_read_is_no_reason_to_wait(build, running):
    async with running() as rig:
        source = await saved_state(build, rig)
        rig.backend.hold("prepare_load")
        load = await rig.engine.submit(build.load("a", 4, source))
        await rig.reached("prepare_load")
        created = await rig.engine.create_model(build.model("b", source=source))
        rig.launcher.started[-1].lose("the power went")
        assert isinstance(await rig.error(load), BackendLost)
        assert isinstance(await rig.result(created), ModelCreated)
