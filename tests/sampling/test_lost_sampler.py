"""What happens when a sampling engine is lost, makes no progress, or never comes up."""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import asynccontextmanager

import anyio
import pytest
from lilo_engine.errors import BackendLost, ServerError
from lilo_engine.operations.result import Failed
from lilo_engine.sampling.engine import SamplerHealth
from lilo_engine.sampling.futures import Sampled
from lilo_engine.sampling.launcher import MemorySamplerLauncher, ProcessSamplerLauncher
from lilo_engine.sampling.manager import SamplingManager
from lilo_engine.sampling.residents import AdapterVersion
from lilo_engine.sampling.supervisor import Supervisor

from tests.sampling.managers import ENDLESS, answer, caught_running, running, submit, versions
from tests.sampling.words import all_tokens

pytestmark = pytest.mark.anyio


async def test_after_a_lost_engine_later_requests_are_served_with_their_adapters(
    definition, tmp_path
):
    launcher = MemorySamplerLauncher(definition)
    (version,) = versions(tmp_path, 1)
    async with running(definition, launcher) as manager:
        before = await answer(manager, 0, adapter=version, seed=1)
        long = submit(manager, 1, **ENDLESS)
        await caught_running(manager)
        launcher.lose("pulled the plug")
        state = await manager.retrieve(long.request_id, 10)
        assert isinstance(state, Failed)
        assert isinstance(state.error, ServerError)
        after = await answer(manager, 2, adapter=version, seed=1)
        assert all_tokens(after.result) == all_tokens(before.result)
        assert launcher.launches == 2
        assert (await manager.state()).last_failure == "pulled the plug"


class Stuck:
    """An engine that stops answering, or stops getting on, and its launcher."""

    def __init__(self, definition, *, answers: bool):
        self.launches = 0
        self.answers = answers
        self.definition = definition

    @asynccontextmanager
    async def launch(self):
        self.launches += 1
        async with MemorySamplerLauncher(self.definition).launch() as running:
            if self.launches == 1:
                running.engine.health = self.health
            yield running

    async def health(self):
        if not self.answers:
            await anyio.sleep_forever()
        return SamplerHealth(running=1, waiting=0, generated_tokens=0, age_s=1e6)


@pytest.mark.parametrize("answers", [True, False])
async def test_an_engine_without_progress_is_replaced(definition, answers):
    launcher = Stuck(definition, answers=answers)
    supervisor = Supervisor(
        definition=definition, launcher=launcher, health_every_s=0.0, health_within_s=0.05
    )
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.run)
            while launcher.launches < 2:
                await anyio.lowlevel.checkpoint()
            await supervisor.engine_is_there()
            assert supervisor.last_failure
            tasks.cancel_scope.cancel()


class Broken:
    """A launcher whose engines do not come up, or are lost before they answered anything."""

    def __init__(self, definition, *, comes_up: bool):
        self.launches = 0
        self.comes_up = comes_up
        self.definition = definition

    @asynccontextmanager
    async def launch(self):
        self.launches += 1
        if not self.comes_up:
            raise ServerError("no device")
        async with MemorySamplerLauncher(self.definition).launch() as running:
            running.lose("no device")
            yield running


@pytest.mark.parametrize("comes_up", [True, False])
async def test_an_engine_that_never_serves_is_given_up_and_the_error_names_the_cause(
    definition, comes_up
):
    launcher = Broken(definition, comes_up=comes_up)
    supervisor = Supervisor(definition=definition, launcher=launcher, backoff_s=(0.0, 0.0, 0.0))
    with anyio.fail_after(20):
        await supervisor.run()
    assert launcher.launches == 3
    with pytest.raises(BackendLost, match="no device"):
        await supervisor.engine_is_there()


async def test_an_engine_that_answered_is_launched_again_however_often_it_is_lost(definition):
    launcher = MemorySamplerLauncher(definition)
    manager = SamplingManager(definition=definition, launcher=launcher, backoff_s=(0.0, 0.0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(manager.run)
        with anyio.fail_after(20):
            await manager.info()
            for number in range(4):
                assert isinstance(await answer(manager, number), Sampled)
                launcher.lose("pulled the plug")
                while (await manager.state()).launches < number + 2:
                    await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


async def test_killing_the_sampling_process_fails_running_requests_and_serves_later_ones(
    definition, adapters, tmp_path
):
    launcher = ProcessSamplerLauncher(definition=definition, log_file=tmp_path / "sampler.log")
    version = AdapterVersion(name="all", folder=adapters["all"])
    async with running(definition, launcher) as manager:
        pid = (await manager.info()).pid
        before = await answer(manager, 0, adapter=version, seed=1, n=2)
        long = submit(manager, 1, adapter=version, **ENDLESS)
        await caught_running(manager)
        os.kill(pid, signal.SIGKILL)
        with anyio.fail_after(5):
            state = await manager.retrieve(long.request_id, 5)
        assert isinstance(state, Failed)
        assert isinstance(state.error, ServerError)
        assert "signal 9" in str(state.error)
        after = await answer(manager, 2, adapter=version, seed=1, n=2)
        assert all_tokens(after.result) == all_tokens(before.result)
        assert (await manager.info()).pid != pid


async def test_a_sampling_process_that_cannot_start_is_named_in_the_error(definition, tmp_path):
    broken = definition.model_copy(
        update={
            "model": definition.model.model_copy(update={"source": str(tmp_path)}),
            "limits": definition.limits.model_copy(update={"startup_timeout_s": 30.0}),
        }
    )
    log = tmp_path / "sampler.log"
    launcher = ProcessSamplerLauncher(definition=broken, log_file=log)
    with pytest.raises(ServerError, match="before it was ready") as failed:
        async with launcher.launch():
            pass
    assert "Traceback" in log.read_text()
    assert log.read_text().splitlines()[-1] in str(failed.value)


async def test_a_launch_needs_no_folder_while_it_serves_and_leaves_no_process(
    definition, tmp_path, monkeypatch
):
    launcher = ProcessSamplerLauncher(definition=definition, log_file=tmp_path / "sampler.log")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    async with launcher.launch() as running_sampler:
        engine = running_sampler.engine
        pid = (await engine.info()).pid
        assert not os.listdir(tmp_path / "temporary"), "a server that is killed now would leave it"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(ServerError):
        await engine.info()
