"""A trainer in a real child process that fails as trainers of several ranks do: who learns what, how soon."""

from pathlib import Path

import anyio
import pytest
from lilo_engine import serving
from lilo_engine.commands import bridge_client
from lilo_engine.commands.launcher import ProcessLauncher
from lilo_engine.commands.process import start_process
from lilo_engine.errors import BackendLost, Gone
from lilo_engine.operations.operation import ModelId

from tests.engine.test_process import suspend

pytestmark = pytest.mark.anyio

CAUSE = "rank 1 on host b (pid 7) raised OutOfMemoryError"


@pytest.fixture
def launcher(tiny, tmp_path, monkeypatch):
    """Children that find the trainers of `children/misbehaving.py`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "children"))

    def make(backend, definition=tiny):
        return ProcessLauncher(
            definition=definition,
            checkpoints_root=tmp_path / "checkpoints",
            log_path=tmp_path / "backend.log",
            backend=backend,
        )

    return make


async def test_a_rank_lost_in_a_command_ends_the_trainer_and_every_client_learns_the_first_cause(
    build, running, launcher
):
    async with running(launcher=launcher("loses-a-rank")) as rig:
        for name in "ab":
            await rig.create(build.model(name))
        saved = await rig.do(build.save("b", 1))
        await rig.do(build.forward_backward("a", 1))
        pid = (await rig.engine.state()).backend.pid
        step = await rig.engine.submit(build.step("a", 2))
        waits = await rig.engine.submit(build.forward_backward("a", 3))
        with anyio.fail_after(2):
            errors = [await rig.error(request_id) for request_id in (step, waits)]
        for error in errors:
            assert isinstance(error, BackendLost)
            assert CAUSE in error.message
            assert f"{pid} exited with code 4" in error.message
        with pytest.raises(Gone) as gone:
            await rig.engine.submit(build.forward_backward("b", 2))
        assert CAUSE in gone.value.message
        assert str(saved.ref) in gone.value.message
        assert all(CAUSE in reason for _, reason in rig.journal.ended)
        await rig.create(build.model("c", source=saved.ref, with_optimizer=True))
        await rig.do(build.forward_backward("c", 1))


async def test_a_node_lost_while_nothing_runs_is_noticed_in_seconds(build, running, launcher):
    async with running(launcher=launcher("loses-a-node-while-idle")) as rig:
        await rig.create(build.model("a"))
        waits = await rig.engine.submit(build.step("a", 3))
        saved = await rig.do(build.save("a", 1))
        error = await rig.error(waits)
        assert isinstance(error, BackendLost)
        assert CAUSE in error.message
        with pytest.raises(Gone, match=str(saved.ref)):
            await rig.engine.submit(build.forward_backward("a", 2))


async def test_what_a_trainer_said_before_it_crashed_is_quoted(build, running, launcher):
    async with running(launcher=launcher("crashes")) as rig:
        await rig.create(build.model("a"))
        await rig.do(build.forward_backward("a", 1))
        error = await rig.error(await rig.engine.submit(build.step("a", 2)))
        assert isinstance(error, BackendLost)
        assert "signal 11 (SIGSEGV)" in error.message
        assert "an illegal memory access was encountered" in error.message


async def test_a_step_that_moves_is_never_given_up_and_one_that_stands_still_is(
    build, running, launcher, limits
):
    definition = limits(command_timeout_s=0.5, command_s_per_token=0.0)
    async with running(launcher=launcher("slow", definition), definition=definition) as rig:
        await rig.create(build.model("a"))
        # 1.2 s, more than twice the limit and its second look.
        await rig.do(build.forward_backward("a", 1))
        error = await rig.error(await rig.engine.submit(build.step("a", 2)))
        assert isinstance(error, BackendLost)
        assert "made no progress within limits.command_timeout_s of 0.5 s" in error.message


async def test_an_idle_trainer_that_is_silent_is_replaced(build, running, launcher, monkeypatch):
    monkeypatch.setattr(serving, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(bridge_client, "HEALTH_LIMIT_S", 0.1)
    async with running(launcher=launcher("memory")) as rig:
        await rig.create(build.model("a"))
        waits = await rig.engine.submit(build.step("a", 2))
        suspend((await rig.engine.state()).backend.pid)
        error = await rig.error(waits)
        assert isinstance(error, BackendLost)
        assert "did not tell its progress" in error.message
        with pytest.raises(Gone):
            await rig.engine.submit(build.forward_backward("a", 1))
        await rig.create(build.model("b"))


async def test_five_failed_starts_leave_nothing_behind_and_the_sixth_works(
    tiny, tmp_path, launcher, build
):
    """B16 of one process: neither descriptors nor processes of a failed start stay."""
    broken, whole = launcher("nonesuch"), launcher("memory")
    await fails(broken)
    before = open_descriptors()
    for _ in range(4):
        await fails(broken)
    assert open_descriptors() == before
    running = await whole.start(6)
    try:
        running.backend.create_adapter(ModelId("m"), build.lora())
    finally:
        await running.stop()
    assert open_descriptors() == before


async def fails(launcher):
    with pytest.raises(BackendLost, match="nonesuch"):
        await launcher.start(1)


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_an_answer_of_any_size_is_waited_for_without_looks(tiny, tmp_path, build):
    """A look is a call of its own; a trainer that answers in time is never asked for one."""
    process = start_process(
        backend="memory",
        definition=tiny,
        checkpoints_root=tmp_path / "checkpoints",
        log_path=tmp_path / "backend.log",
        epoch=1,
    )
    try:
        process.client.describe()
        for number in range(20):
            process.client.create_adapter(ModelId(f"m{number}"), build.lora())
        assert process.client.health().completed_commands == 20
    finally:
        process.stop()
