"""Spawned ranks through their driver: real processes, real gloo; what happens when one of them fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from lilo_engine.commands.command import CaptureId, Destination
from lilo_engine.errors import BackendLost, CommandFailed, InvalidRequest
from lilo_miles_backend.launchers.driver import DrivenRanks
from lilo_miles_backend.rank_commands import DropGradients, Persist

from tests.cluster.conftest import REPOSITORY, Spawn, act, world_of_two

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

FAST_S = 10.0
"""A cause that needs no limit to run out is told well within this."""


def lost(ranks: DrivenRanks, what: str) -> tuple[str, float]:
    """The cause that a command ends with, and the seconds until then; no process is left by then."""
    pids = [info.pid for info in ranks.info()]
    started = time.monotonic()
    with pytest.raises(BackendLost) as caught:
        ranks.train(act(what))
    seconds = time.monotonic() - started
    assert not any(psutil.pid_exists(pid) for pid in pids), "a rank outlived its group"
    return str(caught.value), seconds


def persist(name: str, kind: str) -> Persist:
    return Persist(
        capture_id=CaptureId(name),
        destination=Destination(run_id="run", kind=kind, name=name, order=1, overwrite=False),
    )


def test_a_group_answers_refuses_publishes_and_ends_in_order(spawn: Spawn) -> None:
    """One group for all that leaves it whole; starting one costs seconds."""
    ranks = spawn(rank_silence_s=3.0)
    pids = [info.pid for info in ranks.info()]
    assert [info.rank for info in ranks.info()] == [0, 1]
    assert ranks.info()[0].facts == ranks.info()[1].facts
    assert ranks.train(act("sum")) == {"sum": 2.0}

    with pytest.raises(InvalidRequest):
        ranks.train(act("refuse"))
    assert ranks.train(act("sum")) == {"sum": 2.0}, "what all ranks refuse harms nobody"

    with pytest.raises(CommandFailed):
        ranks.persist(persist("refused", "weights"))
    assert ranks.persist(persist("one", "weights")).name == "one"

    num_before = ranks.progress()[0].completed_commands
    started = time.monotonic()
    for _ in range(100):
        ranks.train(DropGradients(model_id="any"))
    assert (time.monotonic() - started) / 100 < 0.03, "a broadcast costs less than 3 ms when alone"
    assert [view.completed_commands for view in ranks.progress()] == [num_before + 100] * 2

    a_slow_checkpoint_delays_neither_training_nor_a_publication(ranks)
    b39_a_slow_rank_inside_the_limits_is_left_alone(ranks)

    ranks.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(BackendLost):
        ranks.train(act("sum"))


def a_slow_checkpoint_delays_neither_training_nor_a_publication(ranks: DrivenRanks) -> None:
    slow = threading.Thread(target=ranks.persist, args=(persist("slow-3", "weights"),))
    slow.start()
    published = ranks.persist(persist("now", "sampler_weights"))
    assert published.folder == "/rank-0"
    assert ranks.train(act("sum")) == {"sum": 2.0}
    assert slow.is_alive(), "the checkpoint still goes on"
    slow.join(20)
    assert not slow.is_alive()


def b39_a_slow_rank_inside_the_limits_is_left_alone(ranks: DrivenRanks) -> None:
    assert ranks.train(act("late-1-5")) == {"sum": 2.0}


@pytest.mark.parametrize("when", ["before", "in", "after"])
def test_b40_an_exception_of_one_rank_is_the_cause_wherever_the_others_stand(
    spawn: Spawn, when: str
) -> None:
    cause, seconds = lost(spawn(), f"raise-{when}-1")
    assert "rank 1" in cause
    assert f"ValueError: {when}" in cause
    assert seconds < FAST_S


def test_b40_a_killed_rank_is_the_cause_and_not_the_connection_that_it_broke(spawn: Spawn) -> None:
    ranks = spawn()
    victim = ranks.info()[1].pid
    threading.Timer(0.5, os.kill, (victim, signal.SIGKILL)).start()
    cause, seconds = lost(ranks, "late-1-30")
    assert f"rank 1 (process {victim}" in cause
    assert "SIGKILL" in cause
    assert seconds < FAST_S


def test_b40_a_rank_killed_while_nothing_runs_is_noticed_and_nothing_is_sent_any_more(
    spawn: Spawn,
) -> None:
    ranks = spawn()
    os.kill(ranks.info()[0].pid, signal.SIGKILL)
    assert "rank 0" in ranks.wait_lost()
    for call in (lambda: ranks.train(act("sum")), ranks.progress):
        with pytest.raises(BackendLost, match="rank 0"):
            call()


def test_a_stopped_rank_is_taken_for_lost_within_the_limit_of_silence(spawn: Spawn) -> None:
    ranks = spawn(rank_silence_s=4.0)
    os.kill(ranks.info()[1].pid, signal.SIGSTOP)
    cause, seconds = lost(ranks, "sum")
    assert "rank 1" in cause
    assert "rank_silence_s" in cause
    assert seconds < 4.0 + FAST_S


def test_b39_a_collective_over_its_limit_names_limit_rank_and_command(spawn: Spawn) -> None:
    cause, seconds = lost(spawn(world_of_two(group_limit_s=3.0)), "late-1-8")
    assert "limits.distributed_timeout_minutes" in cause
    assert "(3 s)" in cause
    assert "rank 0" in cause.partition("still running")[0]
    assert "rank 1" in cause.partition("still running")[2]
    assert "StepOptimizer" in cause
    assert seconds < 3.0 + FAST_S


def test_a_command_over_its_limit_names_the_limit_and_who_is_late(spawn: Spawn) -> None:
    cause, seconds = lost(spawn(world_of_two(limit_s=4.0)), "late-1-60")
    assert "limits.command_timeout_s of 4 s" in cause
    assert "rank 1" in cause
    assert seconds < 4.0 + FAST_S


def test_a_refusal_by_one_rank_alone_ends_the_group(spawn: Spawn) -> None:
    cause, seconds = lost(spawn(), "refuse-1")
    assert "rank 1: there are no gradients" in cause
    assert seconds < 5.0 + FAST_S


def test_a_rank_that_cannot_begin_ends_all_and_says_why(spawn: Spawn) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(BackendLost, match="rank 1 cannot read its weights"):
        spawn(world_of_two(source="fails-on-1"))
    assert set(psutil.Process().children()) == before


def test_ranks_end_when_their_driver_is_killed(tmp_path: Path) -> None:
    """Nobody is left to end them, so that they do so themselves, even one that waits in a collective."""
    program = f"""
import sys, threading, time
from lilo_engine.commands.backend import BackendConfig
from lilo_miles_backend.config import BackendSettings
from lilo_miles_backend.launchers.spawned import spawn_ranks
from tests.cluster.conftest import LIGHT, act, world_of_two
config = BackendConfig(definition=world_of_two(), checkpoints_root={str(tmp_path)!r}, epoch=1)
ranks = spawn_ranks(config, BackendSettings(rank_class=LIGHT))
threading.Thread(target=ranks.train, args=(act("late-1-60"),), daemon=True).start()
print(*[info.pid for info in ranks.info()], flush=True)
time.sleep(600)
"""
    driver = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert driver.stdout is not None
    with driver.stdout as said:
        ranks = [psutil.Process(int(pid)) for pid in said.readline().split()]
    assert len(ranks) == 2
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive
