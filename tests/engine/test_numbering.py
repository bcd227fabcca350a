"""Numbering: operations run once, in the order of their numbers, whatever is sent and however often."""

import anyio
import anyio.lowlevel
import pytest
from lilo_engine.errors import InvalidRequest, NotFound, Saturated
from lilo_engine.operations.operation import ModelId, Refused
from lilo_engine.operations.result import Complete, Pending

from tests.engine.conftest import passes

pytestmark = pytest.mark.anyio


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
