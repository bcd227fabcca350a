"""The real driver of two rank processes behind the real launcher loses one: what clients are told, and how soon."""

import os
import signal
from pathlib import Path

import anyio
import psutil
import pytest
from lilo_engine.commands.launcher import ProcessLauncher
from lilo_engine.errors import BackendLost, Gone

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(240)]

START_S = 120
TOLD_S = 10
"""A lost rank is seen in seconds, whether it was in a command or not."""


async def within(limit_s, rig, request_id):
    with anyio.fail_after(limit_s):
        return await rig.engine.retrieve(request_id, limit_s)


@pytest.mark.parametrize("when", ["in a command", "idle"])
async def test_a_killed_rank_ends_the_trainer_and_models_are_gone_with_their_last_checkpoint(
    tiny, tmp_path, build, running, monkeypatch, when
):
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{here / 'children'}{os.pathsep}{here.parents[1]}")
    definition = tiny.derive(topology={"dp": 2})
    launcher = ProcessLauncher(
        definition=definition,
        checkpoints_root=tmp_path,
        log_path=tmp_path / "backend.log",
        backend="light-ranks",
    )
    async with running(definition=definition, launcher=launcher) as rig:
        created = await within(START_S, rig, await rig.engine.create_model(build.model("m")))
        assert hasattr(created, "result"), created
        saved = await rig.do(build.save("m", 1))
        driver, second = await pids(rig)
        assert len({driver, second, os.getpid()}) == 3
        if when == "in a command":
            os.kill(second, signal.SIGSTOP)
            waits = await rig.engine.submit(build.forward_backward("m", 2))
        else:
            # A number is missing before it: nothing runs.
            waits = await rig.engine.submit(build.forward_backward("m", 3))
        os.kill(second, signal.SIGKILL)
        error = (await within(TOLD_S, rig, waits)).error
        assert isinstance(error, BackendLost)
        assert f"rank 1 (process {second}" in error.message
        assert f"backend process {driver} exited with code 4" in error.message
        with pytest.raises(Gone) as gone:
            await rig.engine.submit(build.forward_backward("m", 4))
        assert f"rank 1 (process {second}" in gone.value.message
        assert str(saved.ref) in gone.value.message
        assert not psutil.pid_exists(driver)


async def pids(rig):
    """Of the driver and of rank 1."""
    state = await rig.engine.state()
    return state.backend.pid, state.health.ranks[1].pid
