"""Engine: what a client sees under any interleaving, over a trainer that tests can stop in mid-command."""

import anyio
import anyio.lowlevel
import pytest
from lilo_engine.errors import (
    BackendLost,
    CommandFailed,
    Gone,
    InvalidRequest,
    NotFound,
    Saturated,
    Unavailable,
)
from lilo_engine.operations.operation import ModelId, Refused
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.operations.result import Complete, Failed, ModelCreated, Pending

pytestmark = pytest.mark.anyio


def passes(backend):
    return [entry[1:] for entry in backend.log if entry[0] == "forward_backward"]


async def test_a_model_is_created_once_and_a_retry_gets_the_same_id(build, running):
    async with running() as rig:
        first = await rig.engine.create_model(build.model("m"))
        assert await rig.engine.create_model(build.model("m")) == first
        assert await rig.result(first) == ModelCreated(model_id=ModelId("m"))
        assert rig.backend.log == [("create_adapter", "m")]
        assert [request.model_id for request in rig.journal.created] == ["m"]
        with pytest.raises(InvalidRequest):
            await rig.engine.create_model(build.model("m", lora=build.lora(seed=2)))


async def test_operations_run_in_the_order_of_their_numbers_whatever_order_they_arrive_in(
    build, running
):
    async with running() as rig:
        await rig.create(build.model("m"))
        late = [await rig.engine.submit(build.forward_backward("m", n)) for n in (3, 2)]
        state = await rig.engine.retrieve(late[0], 0.01)
        assert isinstance(state, Pending)
        assert "number 1" in (state.reason or "")
        assert passes(rig.backend) == []
        await rig.do(build.forward_backward("m", 1))
        await rig.result(late[0])
        assert [name for group in passes(rig.backend) for name in group] == ["m:1", "m:2", "m:3"]


async def test_pipelined_and_awaited_steps_give_equal_results(build, running):
    async def train(rig, model_id, awaited):
        await rig.create(build.model(model_id))
        ids = []
        for number in range(1, 9, 2):
            for operation in (
                build.forward_backward(model_id, number),
                build.step(model_id, number + 1),
            ):
                ids.append(await rig.engine.submit(operation))
                if awaited:
                    await rig.result(ids[-1])
        return [await rig.result(request_id) for request_id in ids]

    async with running() as rig:
        assert await train(rig, "a", True) == await train(rig, "b", False)


async def test_a_retry_gets_the_same_id_and_runs_once(build, running):
    async with running() as rig:
        await rig.create(build.model("m"))
        rig.backend.hold("forward_backward")
        first = await rig.engine.submit(build.forward_backward("m", 1))
        await rig.reached("forward_backward")
        assert await rig.engine.submit(build.forward_backward("m", 1)) == first
        rig.backend.let_go("forward_backward")
        await rig.result(first)
        assert await rig.engine.submit(build.forward_backward("m", 1)) == first
        assert passes(rig.backend) == [("m:1",)]
        assert await rig.finished(first) == await rig.finished(first)


async def test_two_racing_copies_of_a_big_request_run_once(build, running, limits):
    datums = tuple(build.datum(n=1000) for _ in range(20))
    ids = []
    async with running() as rig:
        await rig.create(build.model("m"))

        async def send():
            ids.append(await rig.engine.submit(build.forward_backward("m", 1, datums=datums)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            tasks.start_soon(send)
        assert ids[0] == ids[1]
        await rig.result(ids[0])
        assert passes(rig.backend) == [("m:1",)]


async def test_a_used_number_with_another_payload_is_refused_and_the_model_goes_on(build, running):
    async with running() as rig:
        await rig.create(build.model("m"))
        await rig.do(build.forward_backward("m", 1))
        with pytest.raises(InvalidRequest):
            await rig.engine.submit(build.forward_backward("m", 1, forward_only=True))
        await rig.do(build.step("m", 2))


async def test_an_invalid_operation_uses_up_its_number(build, running):
    async with running() as rig:
        await rig.create(build.model("m"))
        bad = await rig.engine.submit(build.forward_backward("m", 1, loss="nonsense"))
        good = await rig.engine.submit(build.forward_backward("m", 2))
        assert isinstance(await rig.error(bad), InvalidRequest)
        await rig.result(good)
        assert passes(rig.backend) == [("m:2",)]


async def test_an_invalid_operation_fails_while_another_models_pass_runs(build, running):
    async with running() as rig:
        await rig.create(build.model("a"))
        await rig.create(build.model("b"))
        rig.backend.hold("forward_backward")
        slow = await rig.engine.submit(build.forward_backward("a", 1))
        await rig.reached("forward_backward")
        bad = await rig.engine.submit(build.forward_backward("b", 1, loss="nonsense"))
        with anyio.fail_after(1):
            assert isinstance(await rig.error(bad), InvalidRequest)
        rig.backend.let_go("forward_backward")
        await rig.result(slow)


async def test_a_request_that_could_not_be_read_becomes_a_failed_operation(build, running):
    async with running() as rig:
        await rig.create(build.model("m"))
        refused = Refused(
            model_id=ModelId("m"),
            seq_id=1,
            verb="optim_step",
            error=InvalidRequest("optimizer dimuon is not known"),
        )
        failed = await rig.engine.submit(refused)
        assert await rig.error(failed) == refused.error
        await rig.do(build.forward_backward("m", 2))


@pytest.mark.parametrize("how", ["invalid", "refused", "raised", "not finite"])
async def test_a_failed_pass_spoils_its_window_and_the_next_one_starts_clean(build, running, how):
    async def train(rig, model_id, first):
        await rig.create(build.model(model_id))
        number = first
        await rig.do(build.forward_backward(model_id, number))
        return await rig.do(build.step(model_id, number + 1))

    async with running() as rig:
        await rig.create(build.model("m"))
        await rig.do(build.forward_backward("m", 1))
        error = InvalidRequest("bad")
        if how == "invalid":
            failing = build.forward_backward("m", 2, loss="nonsense")
        elif how == "refused":
            failing = Refused(model_id=ModelId("m"), seq_id=2, verb="forward_backward", error=error)
        elif how == "raised":
            rig.backend.raises["forward_backward"] = CommandFailed("out of memory")
            failing = build.forward_backward("m", 2)
        else:
            huge = build.datum(
                logprobs=build.floats([-1e30] * 4), advantages=build.floats([1.0] * 4)
            )
            failing = build.forward_backward("m", 2, datums=(huge,), loss="importance_sampling")
        await rig.error(await rig.engine.submit(failing))
        refusal = await rig.error(await rig.engine.submit(build.step("m", 3)))
        assert isinstance(refusal, CommandFailed if how == "raised" else InvalidRequest)
        assert "number 2" in refusal.message
        assert ("drop_gradients", "m") in rig.backend.log
        await rig.do(build.forward_backward("m", 4))
        clean = await rig.do(build.step("m", 5))
        await rig.create(build.model("n"))
        await rig.do(build.forward_backward("n", 1, datums=(build.datum(start=4),)))
        assert await rig.do(build.step("n", 2)) == clean


async def test_a_failed_forward_only_pass_spoils_nothing(build, running):
    async with running() as rig:
        await rig.create(build.model("m"))
        await rig.do(build.forward_backward("m", 1))
        bad = build.forward_backward("m", 2, loss="nonsense", forward_only=True)
        await rig.error(await rig.engine.submit(bad))
        await rig.do(build.step("m", 3))


async def test_a_step_without_gradients_is_the_users_mistake(build, running):
    async with running() as rig:
        await rig.create(build.model("m"))
        await rig.do(build.forward_backward("m", 1, forward_only=True))
        error = await rig.error(await rig.engine.submit(build.step("m", 2)))
        assert isinstance(error, InvalidRequest)
        assert ("optim_step", "m") not in rig.backend.log


async def test_gradients_add_up_over_requests(build, running):
    async with running() as rig:
        await rig.create(build.model("a"))
        await rig.create(build.model("b"))
        one, two = build.datum(start=3), build.datum(start=50)
        await rig.do(build.forward_backward("a", 1, datums=(one, two)))
        await rig.do(build.forward_backward("b", 1, datums=(one,)))
        await rig.do(build.forward_backward("b", 2, datums=(two,)))
        together = (await rig.do(build.step("a", 2))).metrics["grad_norm"]
        apart = (await rig.do(build.step("b", 3))).metrics["grad_norm"]
        assert together == pytest.approx(apart, rel=1e-12)


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


async def test_a_model_whose_source_does_not_load_leaves_no_slot_behind(build, running, limits):
    async with running(limits(slots=1)) as rig:
        source = CheckpointRef(run_id="nobody", kind="weights", name="x")
        error = await rig.error(await rig.engine.create_model(build.model("m", source=source)))
        assert isinstance(error, NotFound)
        with pytest.raises(Gone):
            await rig.engine.submit(build.forward_backward("m", 1))
        await rig.create(build.model("n"))


async def test_a_taken_checkpoint_name_is_the_users_mistake(build, running):
    async with running() as rig:
        await rig.create(build.model("m"))
        await rig.do(build.save("m", 1))
        assert isinstance(
            await rig.error(await rig.engine.submit(build.save("m", 2))), InvalidRequest
        )
        await rig.do(build.save("m", 3, overwrite=True))


async def test_full_slots_fail_a_creation_and_a_freed_one_serves_again(build, running, limits):
    async with running(limits(slots=2)) as rig:
        await rig.create(build.model("a"))
        await rig.create(build.model("b"))
        assert isinstance(
            await rig.error(await rig.engine.create_model(build.model("c"))), Saturated
        )
        await rig.engine.unload(ModelId("a"), "its client left")
        await rig.create(build.model("d"))
        assert rig.journal.ended == [("a", "its client left")]


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


async def test_an_unknown_model_or_future_is_not_found(build, running):
    async with running() as rig:
        with pytest.raises(NotFound):
            await rig.engine.submit(build.step("nobody", 1))
        for request_id in ("nobody:1", "m", "m:x", ""):
            with pytest.raises(NotFound):
                await rig.engine.retrieve(request_id, 0)
        await rig.create(build.model("m"))
        with pytest.raises(NotFound):
            await rig.engine.retrieve("m:7", 0)


async def test_more_waiting_operations_than_the_limit_are_refused(build, running, limits):
    async with running(limits(max_queued_operations=2)) as rig:
        await rig.create(build.model("m"))
        await rig.engine.submit(build.step("m", 2))
        await rig.engine.submit(build.step("m", 3))
        with pytest.raises(Saturated):
            await rig.engine.submit(build.step("m", 4))


async def test_one_model_that_fails_does_not_change_anothers_numbers(build, running):
    async def train(rig, model_id, number):
        request = await rig.engine.submit(
            build.forward_backward(model_id, number, datums=(build.datum(start=9),))
        )
        return request

    async with running() as rig:
        await rig.create(build.model("alone"))
        alone = await rig.result(await train(rig, "alone", 1))
        await rig.create(build.model("a"))
        await rig.create(build.model("b"))
        await rig.create(build.model("gate"))
        rig.backend.hold("forward_backward")
        gate = await train(rig, "gate", 1)
        await rig.reached("forward_backward")
        bad = await rig.engine.submit(build.forward_backward("a", 1, loss="nonsense"))
        good = await train(rig, "b", 1)
        rig.backend.let_go("forward_backward")
        await rig.result(gate)
        await rig.error(bad)
        assert await rig.result(good) == alone


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


async def test_many_waiting_clients_do_not_slow_a_heartbeat(build, running):
    """2,048 clients wait on one model's futures; asking for the state stays quick, and all are answered."""
    answered = []
    async with running() as rig:
        await rig.create(build.model("m"))
        rig.backend.hold("forward_backward")
        ids = [await rig.engine.submit(build.forward_backward("m", n)) for n in range(1, 65)]
        await rig.reached("forward_backward")

        async def client(request_id):
            answered.append(await rig.engine.retrieve(request_id, 30))

        async with anyio.create_task_group() as tasks:
            for i in range(2048):
                tasks.start_soon(client, ids[i % len(ids)])
            await anyio.wait_all_tasks_blocked()
            took = []
            for _ in range(50):
                started = anyio.current_time()
                await anyio.lowlevel.checkpoint()
                assert (await rig.engine.retrieve("m:0", 0)) is not None
                took.append(anyio.current_time() - started)
            assert sorted(took)[25] < 0.005
            rig.backend.let_go("forward_backward")
        assert len(answered) == 2048
        assert all(isinstance(state, Complete) for state in answered)


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
