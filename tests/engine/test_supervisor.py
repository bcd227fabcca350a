"""Supervisor: epochs, restarts, and when it gives up."""

import anyio
import pytest
from lilo_engine.commands.launcher import MemoryLauncher
from lilo_engine.commands.supervisor import MAX_FAILED_STARTS, Supervisor
from lilo_engine.errors import BackendLost

pytestmark = pytest.mark.anyio


class Flaky:
    """A launcher whose starts fail where the test says."""

    def __init__(self, launcher, fails):
        self.launcher = launcher
        self.fails = set(fails)
        self.epochs = []

    async def start(self, epoch):
        self.epochs.append(epoch)
        if epoch in self.fails:
            raise BackendLost(f"start {epoch} failed")
        return await self.launcher.start(epoch)


@pytest.fixture
def supervised(tiny, tmp_path):
    def make(fails=()):
        launcher = Flaky(MemoryLauncher(definition=tiny, checkpoints_root=tmp_path), fails)
        return Supervisor(launcher, first_pause_s=0.001), launcher

    return make


async def test_every_start_has_an_epoch_of_its_own(supervised):
    supervisor, launcher = supervised(fails=[2])
    assert await supervisor.start() is not None
    supervisor.lost("the power went", useful=True)
    with anyio.fail_after(5):
        assert await supervisor.start() is not None
    assert launcher.epochs == [1, 2, 3]
    assert supervisor.last_failure == "start 2 failed"


async def test_the_first_start_of_all_is_not_tried_again(supervised):
    supervisor, launcher = supervised(fails=[1])
    assert await supervisor.start() is None
    assert launcher.epochs == [1]


async def test_restarts_that_fail_end_with_the_cause(supervised):
    supervisor, launcher = supervised(fails=range(2, 100))
    await supervisor.start()
    supervisor.lost("the power went", useful=True)
    with anyio.fail_after(5):
        assert await supervisor.start() is None
    assert len(launcher.epochs) == 2 + MAX_FAILED_STARTS
    assert supervisor.last_failure == f"start {launcher.epochs[-1]} failed"


async def test_a_trainer_that_is_lost_again_and_again_is_given_up(supervised):
    supervisor, launcher = supervised()
    with anyio.fail_after(5):
        while await supervisor.start() is not None:
            supervisor.lost("it fell over", useful=False)
    assert len(launcher.epochs) == MAX_FAILED_STARTS + 1


async def test_a_trainer_that_held_models_is_always_started_again(supervised):
    supervisor, _ = supervised()
    for _ in range(3 * MAX_FAILED_STARTS):
        with anyio.fail_after(5):
            assert await supervisor.start() is not None
        supervisor.lost("somebody pulled the plug", useful=True)
