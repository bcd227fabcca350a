"""A trainer that is lost, never comes up, or is drained: who is told what, and what goes on."""

import anyio
import anyio.lowlevel
import pytest
from lilo_engine.errors import BackendLost, Gone, Unavailable
from lilo_engine.operations.operation import ModelId
from lilo_engine.operations.result import Complete, Failed, ModelCreated, Pending

pytestmark = pytest.mark.anyio


async def test_a_lost_trainer_fails_what_is_unfinished_at_once_and_a_new_one_serves(build, running):
    async with running() as rig:
        await rig.create(build.model("m"))
        saved = await rig.do(build.save("m", 1))
        rig.backend.hold("forward_backward")
        runs = await rig.engine.submit(build.forward_backward("m", 2))
        waits = await rig.engine.submit(build.step("m", 3))
        await rig.reached("forward_backward")
        rig.launcher.started[-1].lose("the power went")
        with anyio.fail_after(1):
            for request_id in (runs, waits):
                error = await rig.error(request_id)
                assert isinstance(error, BackendLost)
                assert "the power went" in error.message
        rig.backend.let_go("forward_backward")
        with pytest.raises(Gone, match=str(saved.ref)):
            await rig.engine.submit(build.step("m", 4))
        assert rig.journal.ended == [("m", "the trainer was lost: the power went")]
        await rig.create(build.model("n", source=saved.ref, with_optimizer=True))
        state = await rig.engine.state()
        assert (state.phase, state.epoch) == ("serving", 2)
        assert "the power went" in (state.last_failure or "")
        await rig.do(build.forward_backward("n", 1))
        rig.launcher.started[-1].lose("the power went again")
        with anyio.fail_after(5):
            while (await rig.engine.state()).epoch < 3:
                await anyio.lowlevel.checkpoint()
        with pytest.raises(Gone, match=str(saved.ref)):
            await rig.engine.submit(build.forward_backward("n", 2))


async def test_an_error_that_concerns_no_single_command_gives_the_trainer_up(build, running):
    async with running() as rig:
        await rig.create(build.model("m"))
        rig.backend.raises["forward_backward"] = RuntimeError("device-side assert")
        error = await rig.error(await rig.engine.submit(build.forward_backward("m", 1)))
        assert isinstance(error, BackendLost)
        assert "device-side assert" in error.message
        await rig.create(build.model("n"))


async def test_a_creation_waits_for_the_restart(build, running):
    async with running() as rig:
        await rig.create(build.model("m"))
        rig.launcher.started[-1].lose("the power went")
        created = await rig.engine.create_model(build.model("n"))
        assert isinstance((await rig.result(created)), ModelCreated)
        assert len(rig.launcher.started) == 2


async def test_a_result_can_be_fetched_after_the_trainer_was_lost(build, running):
    async with running() as rig:
        await rig.create(build.model("m"))
        done = await rig.engine.submit(build.forward_backward("m", 1))
        with anyio.fail_after(5):
            while not any(entry[0] == "forward_backward" for entry in rig.backend.log):
                await anyio.lowlevel.checkpoint()
        await rig.do(build.step("m", 2))
        rig.launcher.started[-1].lose("the power went")
        await rig.create(build.model("n"))
        assert isinstance(await rig.finished(done), Complete)


async def test_draining_lets_what_runs_end_and_fails_the_rest(build, running):
    async with running() as rig:
        await rig.create(build.model("m"))
        rig.backend.hold("persist")
        rig.backend.hold("forward_backward")
        save = await rig.engine.submit(build.save("m", 1))
        await rig.reached("persist")
        runs = await rig.engine.submit(build.forward_backward("m", 2))
        await rig.reached("forward_backward")
        waits = await rig.engine.submit(build.step("m", 3))
        drained = anyio.Event()

        async def drain():
            await rig.engine.drain()
            drained.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drain)
            await anyio.wait_all_tasks_blocked()
            assert (await rig.engine.state()).phase == "draining"
            with pytest.raises(Unavailable):
                await rig.engine.submit(build.step("m", 4))
            with pytest.raises(Unavailable):
                await rig.engine.create_model(build.model("n"))
            assert not drained.is_set()
            rig.backend.let_go("forward_backward")
            await rig.result(runs)
            assert not drained.is_set()
            rig.backend.let_go("persist")
            await rig.result(save)
            with anyio.fail_after(5):
                await drained.wait()
        assert isinstance(await rig.engine.retrieve(waits, 0), Pending)
        engine = rig.engine
    assert (await engine.state()).phase == "stopped"
    state = await engine.retrieve(waits, 0)
    assert isinstance(state, Failed)
    assert isinstance(state.error, Unavailable)


async def test_a_trainer_that_never_comes_up_stops_the_engine_and_says_why(build, running):
    def broken(config):
        raise RuntimeError("weights are missing")

    async with running(factory=broken) as rig:
        created = await rig.engine.create_model(build.model("m"))
        error = await rig.error(created)
        assert isinstance(error, BackendLost)
        state = await rig.engine.state()
        assert state.phase == "stopped"
        assert "weights are missing" in (state.last_failure or "")
        with pytest.raises(Unavailable):
            await rig.engine.create_model(build.model("n"))


async def test_what_runs_of_a_model_that_ended_is_answered_when_the_trainer_is_lost(build, running):
    async with running() as rig:
        await rig.create(build.model("m"))
        rig.backend.hold("forward_backward")
        runs = await rig.engine.submit(build.forward_backward("m", 1))
        await rig.reached("forward_backward")
        await rig.engine.unload(ModelId("m"), "its client left")
        assert isinstance(await rig.engine.retrieve(runs, 0), Pending)
        rig.launcher.started[-1].lose("the power went")
        assert isinstance(await rig.error(runs), Gone)


async def test_what_runs_of_a_model_that_ended_is_answered_when_the_engine_stops(build, running):
    async with running() as rig:
        await rig.create(build.model("m"))
        rig.backend.hold("forward_backward")
        runs = await rig.engine.submit(build.forward_backward("m", 1))
        await rig.reached("forward_backward")
        await rig.engine.unload(ModelId("m"), "its client left")
        engine = rig.engine
    assert isinstance((await engine.retrieve(runs, 0)).error, Gone)
