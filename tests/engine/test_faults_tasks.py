"""B41: an error that nobody foresaw, in a task that nobody awaits, is noticed: nothing lives on and does nothing."""

from __future__ import annotations

import anyio
import pytest
from lilo_engine.commands.launcher import MemoryLauncher
from lilo_engine.engine import Engine
from lilo_engine.errors import LiloError
from lilo_engine.journal import MemoryJournal
from lilo_engine.operations.operation import ModelId

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("command", ["optim_step", "capture", "persist"])
async def test_b41_an_unforeseen_error_of_a_command_or_a_publication_ends_the_trainer_and_a_new_one_serves(
    build, running, command
):
    async with running() as rig:
        await rig.create(build.model("m"))
        await rig.do(build.forward_backward("m", 1))
        lost = rig.backend
        lost.raises[command] = RuntimeError("nobody thought of it")
        operation = build.step("m", 2) if command == "optim_step" else build.save("m", 2)
        error = await rig.error(await rig.engine.submit(operation))
        assert isinstance(error, LiloError)
        assert "nobody thought of it" in error.message
        await rig.create(build.model("after"))
        assert rig.backend is not lost


async def test_b41_an_unforeseen_error_of_the_choice_fails_what_waits_and_ends_the_engine(
    build, tiny, tmp_path, monkeypatch
):
    """The server stands in one task group with the engine, and ends with it."""
    launcher = MemoryLauncher(definition=tiny, checkpoints_root=tmp_path)
    engine = Engine(definition=tiny, launcher=launcher, journal=MemoryJournal())
    ended: list[BaseException] = []

    async def run():
        try:
            await engine.run()
        except BaseExceptionGroup as group:
            ended.extend(group.exceptions)

    def choose():
        raise RuntimeError("a fault of the choice")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        with anyio.fail_after(20):
            created = await engine.create_model(build.model("m"))
            await engine.retrieve(created, 10)
            monkeypatch.setattr(engine._work, "next_step", choose)
            waiting = await engine.submit(build.forward_backward(ModelId("m"), 1))
            state = await engine.retrieve(waiting, 10)
        assert isinstance(state.error, LiloError)
    assert "a fault of the choice" in repr(ended)
    assert (await engine.state()).phase == "stopped"
    with pytest.raises(LiloError):
        await engine.submit(build.step("m", 2))
