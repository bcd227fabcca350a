"""Process: a real child behind the bridge: started, killed in mid-command, orphaned, stopped."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import anyio
import psutil
import pytest
from lilo_engine.commands.child import describe_exit
from lilo_engine.commands.command import Batch, WorkItem
from lilo_engine.commands.launcher import ProcessLauncher
from lilo_engine.commands.process import start_process
from lilo_engine.errors import BackendLost, Gone, InvalidRequest, Unavailable
from lilo_engine.operations.operation import ModelId

pytestmark = pytest.mark.anyio


@pytest.fixture
def launcher(tmp_path):
    def make(definition, backend="memory"):
        return ProcessLauncher(
            definition=definition,
            checkpoints_root=tmp_path / "checkpoints",
            log_path=tmp_path / "logs" / "backend.log",
            backend=backend,
        )

    return make


@pytest.fixture
def child(tiny, tmp_path):
    """A child and its bridge, without an engine."""
    started = []

    def start(definition=tiny, backend="memory"):
        process = start_process(
            backend=backend,
            definition=definition,
            checkpoints_root=tmp_path / "checkpoints",
            log_path=tmp_path / "backend.log",
            epoch=1,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.stop()


def suspend(pid):
    """Hold a process in the middle of whatever it does, as a stuck device would."""
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)


async def test_an_engine_trains_through_a_real_child(build, tiny, running, launcher):
    async with running(launcher=launcher(tiny)) as rig:
        await rig.create(build.model("m"))
        await rig.do(build.forward_backward("m", 1))
        assert (await rig.do(build.step("m", 2))).metrics["skipped"] == 0.0
        state = await rig.engine.state()
        assert state.backend is not None
        assert state.backend.pid != os.getpid()
        assert state.health is not None
        assert state.health.completed_commands == 3


async def test_killing_the_child_in_mid_command_names_the_signal_and_a_new_child_serves(
    build, tiny, running, launcher
):
    async with running(launcher=launcher(tiny)) as rig:
        await rig.create(build.model("m"))
        saved = await rig.do(build.save("m", 1))
        pid = (await rig.engine.state()).backend.pid
        suspend(pid)
        runs = await rig.engine.submit(build.forward_backward("m", 2))
        waits = await rig.engine.submit(build.step("m", 3))
        await anyio.wait_all_tasks_blocked()
        os.kill(pid, signal.SIGKILL)
        with anyio.fail_after(1):
            errors = [await rig.error(request_id) for request_id in (runs, waits)]
        for error in errors:
            assert isinstance(error, BackendLost)
            assert f"{pid} was ended by signal 9 (SIGKILL)" in error.message
        with pytest.raises(Gone, match=str(saved.ref)):
            await rig.engine.submit(build.forward_backward("m", 4))
        await rig.create(build.model("n", source=saved.ref, with_optimizer=True))
        state = await rig.engine.state()
        assert (state.phase, state.epoch) == ("serving", 2)
        assert state.backend.pid != pid


async def test_a_trainer_that_is_not_there_is_told_at_once_and_in_one_sentence(
    build, tiny, running, launcher
):
    async with running(launcher=launcher(tiny, backend="nonesuch")) as rig:
        with anyio.fail_after(10):
            error = await rig.error(await rig.engine.create_model(build.model("m")))
        assert isinstance(error, BackendLost)
        assert "'nonesuch'" in error.message
        assert "memory" in error.message
        assert "Traceback" not in error.message


async def test_stopping_the_engine_ends_the_child(build, tiny, running, launcher):
    async with running(launcher=launcher(tiny)) as rig:
        await rig.create(build.model("m"))
        pid = (await rig.engine.state()).backend.pid
    assert not psutil.pid_exists(pid)


async def test_stopping_ends_a_child_that_does_not_answer(build, tiny, running, launcher):
    async with running(launcher=launcher(tiny)) as rig:
        await rig.create(build.model("m"))
        pid = (await rig.engine.state()).backend.pid
        suspend(pid)
    assert not psutil.pid_exists(pid)


def test_a_command_over_its_limit_fences_the_bridge_and_names_the_limit(tiny, limits, child, build):
    process = child(limits(command_timeout_s=0.2, command_s_per_token=0.0))
    pid = process.client.describe().pid
    process.client.create_adapter(ModelId("m"), build.lora())
    suspend(pid)
    with pytest.raises(BackendLost, match="command_timeout_s"):
        process.client.drop_gradients(ModelId("m"))
    os.kill(pid, signal.SIGCONT)
    # It would answer again, but nobody knows what was done: nothing is sent any more.
    with pytest.raises(BackendLost, match="drop_gradients"):
        process.client.describe()


def test_the_limit_of_a_pass_grows_with_its_tokens(tiny, limits, child, build):
    process = child(limits(command_timeout_s=0.05, command_s_per_token=0.05))
    process.client.describe()
    datum = build.datum(n=4)
    item = WorkItem(operation_id="m:1", model_id=ModelId("m"), datums=(datum,))
    batch = Batch(loss="cross_entropy", config={}, forward_only=True, items=(item,))
    suspend(process.pid)
    with pytest.raises(BackendLost, match="4 tokens"):
        process.client.forward_backward(batch)


def test_an_error_of_one_command_leaves_the_bridge_open(child, build):
    process = child()
    process.client.create_adapter(ModelId("m"), build.lora())
    with pytest.raises(InvalidRequest):
        process.client.create_adapter(ModelId("m"), build.lora(lora_rank=4))
    process.client.drop_gradients(ModelId("m"))


def test_health_is_answered_while_the_gpu_lane_waits_for_nothing(child):
    process = child()
    process.client.describe()
    assert process.client.health().completed_commands == 0


def test_a_trainer_that_answers_health_late_is_not_given_up(child, build):
    process = child()
    process.client.describe()
    assert process.client.health().completed_commands == 0
    suspend(process.pid)
    with pytest.raises(Unavailable):
        process.client.health()
    os.kill(process.pid, signal.SIGCONT)
    process.client.create_adapter(ModelId("m"), build.lora())
    assert process.client.health().last_completed == "create_adapter"
    assert process.client.cause is None


def test_the_end_of_the_child_wakes_whoever_waits(child):
    process = child()
    process.client.describe()
    suspend(process.pid)
    raised = []

    def call():
        try:
            process.client.describe()
        except BackendLost as error:
            raised.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    os.kill(process.pid, signal.SIGKILL)
    cause = process.wait_lost()
    assert cause.startswith(f"the backend process {process.pid} was ended by signal 9 (SIGKILL)")
    caller.join(5)
    assert len(raised) == 1


def test_the_child_ends_when_its_parent_is_killed(tmp_path):
    """A parent that starts a child and is killed with -9: the child must not stay behind."""
    script = textwrap.dedent(
        f"""
        import pathlib, time
        from lilo_definitions import get
        from lilo_engine.commands.process import start_process
        root = pathlib.Path({str(tmp_path)!r})
        process = start_process(backend="memory", definition=get("tiny"),
            checkpoints_root=root / "checkpoints", log_path=root / "backend.log", epoch=1)
        print(process.client.describe().pid, flush=True)
        time.sleep(60)
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(5)


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exited with code 0"), (3, "exited with code 3"), (-15, "signal 15 (SIGTERM)")],
)
def test_an_exit_status_is_told_in_words(code, words):
    assert words in describe_exit(code)


async def test_an_awaited_pass_is_one_command_of_the_child_and_nothing_else(
    build, tiny, running, launcher
):
    async with running(launcher=launcher(tiny)) as rig:
        await rig.create(build.model("m"))
        before = (await rig.engine.state()).health.completed_commands
        for number in range(1, 21):
            await rig.do(build.forward_backward("m", number))
        assert (await rig.engine.state()).health.completed_commands == before + 20
