"""Slots: models are made, wait for a slot, are put aside, end; what runs on one that ends."""

import anyio
import anyio.lowlevel
import pytest
from lilo_engine import work
from lilo_engine.errors import CommandFailed, Gone, InvalidRequest, NotFound, Saturated
from lilo_engine.operations.operation import ModelId
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.operations.result import ModelCreated, Pending

pytestmark = pytest.mark.anyio


async def test_a_model_is_created_once_and_a_retry_gets_the_same_id(build, running):
    async with running() as rig:
        first = await rig.engine.create_model(build.model("m"))
        assert await rig.engine.create_model(build.model("m")) == first
        assert await rig.result(first) == ModelCreated(model_id=ModelId("m"))
        assert rig.backend.log == [("create_adapter", "m")]
        assert [request.model_id for request in rig.journal.created] == ["m"]
        with pytest.raises(InvalidRequest):
            await rig.engine.create_model(build.model("m", lora=build.lora(seed=2)))


async def test_operations_sent_before_the_model_is_ready_wait_for_it(build, running):
    async with running() as rig:
        await rig.started(build)
        rig.backend.hold("create_adapter")
        created = await rig.engine.create_model(build.model("m"))
        await rig.reached("create_adapter")
        early = await rig.engine.submit(build.forward_backward("m", 1))
        assert isinstance(await rig.engine.retrieve(early, 0.01), Pending)
        rig.backend.let_go("create_adapter")
        await rig.result(created)
        await rig.result(early)


async def test_a_model_whose_source_does_not_load_leaves_no_slot_behind(build, running, limits):
    async with running(limits(slots=1)) as rig:
        source = CheckpointRef(run_id="nobody", kind="weights", name="x")
        error = await rig.error(await rig.engine.create_model(build.model("m", source=source)))
        assert isinstance(error, NotFound)
        with pytest.raises(Gone):
            await rig.engine.submit(build.forward_backward("m", 1))
        await rig.create(build.model("n"))


async def test_a_model_waits_for_a_slot_is_told_so_and_gets_the_next_free_one(
    build, running, limits
):
    async with running(limits(slots=1)) as rig:
        await rig.create(build.model("a"))
        second = await rig.engine.create_model(build.model("b"))
        third = await rig.engine.create_model(build.model("c"))
        along = await rig.engine.submit(build.forward_backward("c", 1))
        for request_id, ahead in ((second, None), (third, "1 more"), (along, "1 more")):
            state = await rig.engine.retrieve(request_id, 0.01)
            assert isinstance(state, Pending)
            assert state.queue_state == "paused_capacity"
            assert "all 1 slots" in state.reason
            assert ahead is None or ahead in state.reason
        waits_for = [row["waits_for"] for row in rig.engine.overview()["models"]]
        assert waits_for[0] is None
        assert all("all 1 slots" in reason for reason in waits_for[1:])
        await rig.engine.unload(ModelId("a"), "its client left")
        assert await rig.result(second) == ModelCreated(model_id=ModelId("b"))
        assert isinstance(await rig.engine.retrieve(third, 0), Pending)
        await rig.engine.unload(ModelId("b"), "its client left")
        await rig.result(along)
        assert [entry[:2] for entry in rig.backend.log if entry[0] != "forward_backward"] == [
            ("create_adapter", "a"),
            ("unload", "a"),
            ("create_adapter", "b"),
            ("unload", "b"),
            ("create_adapter", "c"),
        ]


async def test_a_model_that_ends_while_it_waits_never_takes_a_slot(build, running, limits):
    async with running(limits(slots=1)) as rig:
        await rig.create(build.model("a"))
        waits = await rig.engine.create_model(build.model("b"))
        along = await rig.engine.submit(build.forward_backward("b", 1))
        await rig.engine.unload(ModelId("b"), "its session ended")
        assert isinstance(await rig.error(waits), Gone)
        assert isinstance(await rig.error(along), Gone)
        await rig.engine.unload(ModelId("a"), "its client left")
        await rig.create(build.model("c"))
        assert ("create_adapter", "b") not in rig.backend.log
        assert [request.model_id for request in rig.journal.created] == ["a", "c"]


async def test_more_models_in_line_than_the_limit_are_refused(build, running, limits, monkeypatch):
    monkeypatch.setattr(work, "MAX_IN_LINE", 2)
    async with running(limits(slots=1)) as rig:
        await rig.create(build.model("a"))
        for name in "bc":
            await rig.engine.create_model(build.model(name))
        with pytest.raises(Saturated):
            await rig.engine.create_model(build.model("d"))


async def train(build, rig, model_id, number):
    """A pass and a step; what both gave."""
    passed = await rig.do(build.forward_backward(model_id, number, datums=(build.datum(),)))
    return passed.metrics, (await rig.do(build.step(model_id, number + 1))).metrics


async def test_an_idle_model_makes_room_and_goes_on_exactly_when_its_client_does(
    build, running, limits
):
    async with running(limits(slots=2), suspend_idle_s=0.0) as rig:
        await rig.create(build.model("alone"))
        never_moved = [await train(build, rig, "alone", number) for number in (1, 3, 5)]
        await rig.engine.unload(ModelId("alone"), "it served as reference")
        await rig.create(build.model("a"))
        await rig.create(build.model("b"))
        gave = [await train(build, rig, "a", 1)]
        await train(build, rig, "b", 1)
        await rig.create(build.model("c"))
        assert ("unload", "a") in rig.backend.log
        overview = {row["model_id"]: row["phase"] for row in rig.engine.overview()["models"]}
        assert overview == {"a": "suspended", "b": "ready", "c": "ready"}
        gave += [await train(build, rig, "a", number) for number in (3, 5)]
        assert gave == never_moved
        assert [request.model_id for request in rig.journal.created] == ["alone", "a", "b", "c"]
        assert [model_id for model_id, _ in rig.journal.ended] == ["alone"]


async def test_whoever_waits_for_a_slot_gets_it_when_another_was_idle_for_long_enough(
    build, running, limits
):
    async with running(limits(slots=1), suspend_idle_s=0.2) as rig:
        await rig.create(build.model("a"))
        waits = await rig.engine.create_model(build.model("b"))
        assert isinstance(await rig.engine.retrieve(waits, 0.01), Pending)
        await rig.result(waits)
        assert ("persist", "weights", "lilo-suspended") in rig.backend.log


async def test_a_model_with_gradients_or_work_keeps_its_slot(build, running, limits):
    async with running(limits(slots=1), suspend_idle_s=0.0) as rig:
        await rig.create(build.model("a"))
        await rig.do(build.forward_backward("a", 1))
        waits = await rig.engine.create_model(build.model("b"))
        assert isinstance(await rig.engine.retrieve(waits, 0.05), Pending)
        rig.backend.hold("persist")
        await rig.do(build.step("a", 2))
        await rig.reached("persist")
        # Its client comes back while it is being put aside: it goes on where it is.
        again = await rig.engine.submit(build.forward_backward("a", 3))
        rig.backend.let_go("persist")
        await rig.result(again)
        assert ("unload", "a") not in rig.backend.log
        await rig.do(build.step("a", 4))
        await rig.result(waits)
        assert ("unload", "a") in rig.backend.log


async def test_an_idle_model_that_cannot_be_saved_keeps_its_slot(build, running, limits):
    async with running(limits(slots=1), suspend_idle_s=0.0) as rig:
        await rig.create(build.model("a"))
        first = await train(build, rig, "a", 1)
        rig.backend.raises["persist"] = CommandFailed("the disk is full")
        rig.backend.hold("persist")
        waits = await rig.engine.create_model(build.model("b"))
        await rig.reached("persist")
        rig.backend.let_go("persist")
        with anyio.fail_after(5):
            while rig.engine.overview()["models"][0]["phase"] != "ready":
                await anyio.lowlevel.checkpoint()
        assert await train(build, rig, "a", 3) != first
        await rig.result(waits)


async def test_a_suspended_model_that_ends_leaves_its_state_behind(build, running, limits):
    async with running(limits(slots=1), suspend_idle_s=0.0) as rig:
        await rig.create(build.model("a"))
        await train(build, rig, "a", 1)
        await rig.create(build.model("b"))
        await rig.engine.unload(ModelId("a"), "its session ended")
        with pytest.raises(Gone, match="tinker://a/weights/lilo-suspended"):
            await rig.engine.submit(build.forward_backward("a", 3))
        assert rig.journal.ended == [("a", "its session ended")]
        source = CheckpointRef(run_id="a", kind="weights", name="lilo-suspended")
        await rig.engine.unload(ModelId("b"), "its session ended")
        await rig.create(build.model("c", source=source, with_optimizer=True))
        await train(build, rig, "c", 1)


async def test_a_suspended_model_outlives_the_trainer(build, running, limits):
    async with running(limits(slots=1), suspend_idle_s=0.0) as rig:
        await rig.create(build.model("a"))
        await train(build, rig, "a", 1)
        await rig.create(build.model("b"))
        rig.launcher.started[-1].lose("the power went")
        await train(build, rig, "a", 3)
        with pytest.raises(Gone):
            await rig.engine.submit(build.forward_backward("b", 1))
        assert [model_id for model_id, _ in rig.journal.ended] == ["b"]


async def test_a_suspended_model_that_cannot_come_back_ends_with_the_cause(build, running, limits):
    async with running(limits(slots=1), suspend_idle_s=0.0) as rig:
        await rig.create(build.model("a"))
        await rig.create(build.model("b"))
        rig.backend.raises["load"] = CommandFailed("the disk is broken")
        error = await rig.error(await rig.engine.submit(build.forward_backward("a", 1)))
        assert isinstance(error, Gone)
        assert "the disk is broken" in error.message
        assert "tinker://a/weights/lilo-suspended" in error.message
        await rig.do(build.forward_backward("b", 1))


async def test_records_that_cannot_be_written_end_no_model_but_the_one_that_cannot_come_back(
    build, running, limits
):
    async with running(limits(slots=1), suspend_idle_s=0.0) as rig:
        await rig.create(build.model("a"))
        await rig.create(build.model("b"))
        rig.backend.raises["load"] = CommandFailed("the disk is broken")
        rig.journal.away = True
        await rig.error(await rig.engine.submit(build.forward_backward("a", 1)))
        rig.journal.away = False
        await rig.do(build.forward_backward("b", 1))
        await rig.engine.unload(ModelId("a"), "its session ended")
        ((model_id, reason),) = rig.journal.ended
        assert (model_id, "the disk is broken" in reason) == ("a", True)


async def test_models_that_share_a_slot_take_turns(build, running, limits):
    async with running(limits(slots=1), suspend_idle_s=0.0) as rig:
        for name in "abc":
            await rig.create(build.model(name))
        gave = {name: [] for name in "abc"}
        async with anyio.create_task_group() as tasks:

            async def client(name):
                for number in (1, 3, 5):
                    gave[name].append(await train(build, rig, name, number))

            for name in "abc":
                tasks.start_soon(client, name)
        assert gave["a"] == gave["b"] == gave["c"]


async def test_clients_that_come_and_go_do_not_hold_up_one_that_trains(build, running, limits):
    async with running(limits(slots=2)) as rig:
        await rig.create(build.model("a"))
        rig.backend.hold("forward_backward")
        first = await rig.engine.submit(build.forward_backward("a", 1))
        await rig.reached("forward_backward")
        for number in range(8):
            await rig.engine.create_model(build.model(f"b{number}"))
        last = await rig.engine.submit(build.step("a", 2))
        for number in range(8):
            await rig.engine.unload(ModelId(f"b{number}"), "its client left")
            await rig.engine.create_model(build.model(f"c{number}"))
        rig.backend.log.clear()
        rig.backend.let_go("forward_backward")
        await rig.result(first)
        await rig.result(last)
        assert rig.backend.log.index(("optim_step", "a")) <= 1


async def test_a_failed_creation_fails_what_was_sent_along(build, running):
    async with running() as rig:
        await rig.started(build)
        rig.backend.raises["create_adapter"] = CommandFailed("no memory")
        created = await rig.engine.create_model(build.model("m"))
        along = await rig.engine.submit(build.forward_backward("m", 1))
        assert isinstance(await rig.error(created), CommandFailed)
        assert isinstance(await rig.error(along), Gone)
        assert await rig.engine.create_model(build.model("m")) == created


async def test_unloading_fails_what_waits_and_lets_what_runs_finish(build, running):
    async with running() as rig:
        await rig.create(build.model("m"))
        rig.backend.hold("forward_backward")
        runs = await rig.engine.submit(build.forward_backward("m", 1))
        await rig.reached("forward_backward")
        waits = await rig.engine.submit(build.step("m", 2))
        await rig.engine.unload(ModelId("m"), "its session ended")
        await rig.engine.unload(ModelId("m"), "its session ended")
        error = await rig.error(waits)
        assert isinstance(error, Gone)
        assert "its session ended" in error.message
        rig.backend.let_go("forward_backward")
        await rig.result(runs)
        with pytest.raises(Gone):
            await rig.engine.submit(build.step("m", 3))
        await rig.create(build.model("n"))
        assert ("unload", "m") in rig.backend.log


async def test_unloading_a_model_that_is_being_made_frees_its_slot(build, running, limits):
    async with running(limits(slots=1)) as rig:
        await rig.started(build)
        rig.backend.hold("create_adapter")
        created = await rig.engine.create_model(build.model("m"))
        await rig.reached("create_adapter")
        waiting = await rig.engine.create_model(build.model("w"))
        await rig.engine.unload(ModelId("m"), "its client left")
        await rig.engine.unload(ModelId("w"), "its client left")
        rig.backend.let_go("create_adapter")
        assert isinstance(await rig.error(created), Gone)
        assert isinstance(await rig.error(waiting), Gone)
        await rig.create(build.model("n"))
        assert {request.model_id for request in rig.journal.created} == {"first", "second", "n"}


async def test_a_model_that_ends_while_the_steps_of_others_run_holds_nobody_up(build, running):
    """Steps of several models are one plan: one of them is unloaded while another's step runs."""
    async with running() as rig:
        for name in "abc":
            await rig.create(build.model(name))
            await rig.do(build.forward_backward(name, 1))
        await rig.create(build.model("gate"))
        rig.backend.hold("forward_backward")
        rig.backend.hold("optim_step")
        await rig.engine.submit(build.forward_backward("gate", 1))
        await rig.reached("forward_backward")
        steps = {name: await rig.engine.submit(build.step(name, 2)) for name in "abc"}
        rig.backend.let_go("forward_backward")
        await rig.reached("optim_step")
        await rig.engine.unload(ModelId("c"), "its client left")
        rig.backend.let_go("optim_step")
        for name in "abc":
            await rig.result(steps[name])
        await rig.create(build.model("d"))
        assert rig.backend.log[-2:] == [("unload", "c"), ("create_adapter", "d")]
