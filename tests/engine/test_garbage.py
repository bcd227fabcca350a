"""Garbage: cycles are found when nothing is asked, and no look through everything comes at any other time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import anyio
import pytest
from lilo_engine.garbage import QUIET, Garbage

pytestmark = pytest.mark.anyio


class Ring:
    """Refers to itself, as a task and its traceback do."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def full_looks() -> Iterator[list[int]]:
    """One item for each look through everything."""
    looks: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            looks.append(info["collected"])

    gc.callbacks.append(note)
    yield looks
    gc.callbacks.remove(note)


async def test_old_cycles_go_at_a_quiet_moment(full_looks):
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Garbage(lambda: True, least_s=0.05).run)
            await anyio.wait_all_tasks_blocked()
            full_looks.clear()
            ring = Ring()
            gone = anyio.Event()
            weakref.finalize(ring, gone.set)
            gc.collect(1)
            del ring
            gc.collect(1)
            assert not gone.is_set(), "what is old is not looked through with the young"
            await gone.wait()
            tasks.cancel_scope.cancel()
    assert sum(full_looks) >= 1


async def test_requests_of_many_data_bring_no_look_through_everything(full_looks):
    before = gc.get_threshold()
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Garbage(lambda: True).run)
            await anyio.wait_all_tasks_blocked()
            full_looks.clear()
            kept = [[[number]] for number in range(200_000)]
            assert not full_looks
            tasks.cancel_scope.cancel()
    assert len(kept) == 200_000
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


async def test_long_looks_put_the_next_one_off_by_no_more_than_the_limit(full_looks):
    """Neither the wait after a look of many milliseconds nor that for a quiet moment grows with it."""
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Garbage(lambda: False, least_s=0.01, most_s=0.05).run)
            await anyio.wait_all_tasks_blocked()
            full_looks.clear()
            kept = [[[number]] for number in range(400_000)]
            while len(full_looks) < 3:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    assert len(kept) == 400_000


async def test_a_moment_between_two_requests_is_not_taken_for_a_quiet_one(full_looks):
    """And a server that is never quiet looks in the end."""
    asked: list[int] = []

    def quiet() -> bool:
        asked.append(len(full_looks))
        return len(asked) % QUIET != 0

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Garbage(quiet, least_s=0.05).run)
            await anyio.wait_all_tasks_blocked()
            full_looks.clear()
            while not full_looks:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    assert asked.count(0) > 2 * QUIET
