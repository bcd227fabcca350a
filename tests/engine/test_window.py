"""Gradient windows: what a step may use, and what a failed pass does to it and to others."""

import pytest
from lilo_engine.errors import CommandFailed, InvalidRequest
from lilo_engine.operations.operation import ModelId, Refused

pytestmark = pytest.mark.anyio


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
            failing = Refused(
                model_id=ModelId("m"),
                seq_id=2,
                verb="forward_backward",
                error=error,
                adds_gradients=True,
            )
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


async def test_steps_of_one_plan_fail_and_are_told_each_for_itself(build, running):
    """The first of three cannot be done: its gradients are dropped, and the others are done."""
    async with running() as rig:
        for name in "abc":
            await rig.create(build.model(name))
            await rig.do(build.forward_backward(name, 1))
        await rig.create(build.model("gate"))
        rig.backend.hold("forward_backward")
        await rig.engine.submit(build.forward_backward("gate", 1))
        await rig.reached("forward_backward")
        steps = {name: await rig.engine.submit(build.step(name, 2)) for name in "abc"}
        rig.backend.hold("optim_step")
        rig.backend.let_go("forward_backward")
        await rig.reached("optim_step")
        rig.backend.raises["optim_step"] = CommandFailed("out of memory")
        rig.backend.let_go("optim_step")
        assert isinstance(await rig.error(steps["a"]), CommandFailed)
        for name in "bc":
            await rig.result(steps[name])
        assert rig.backend.log[-4:] == [
            ("optim_step", "a"),
            ("drop_gradients", "a"),
            ("optim_step", "b"),
            ("optim_step", "c"),
        ]
