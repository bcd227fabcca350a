"""Long polls end when the server does."""

from __future__ import annotations

import anyio
import pytest
from lilo_engine.requests.long_polls import LongPolls

pytestmark = pytest.mark.anyio


async def test_polls_that_wait_are_answered_at_the_end_and_later_ones_at_once():
    polls, waits, answers = LongPolls(), [], []

    async def look(wait_s: float) -> str:
        waits.append(wait_s)
        if wait_s:
            await anyio.sleep_forever()
        return "not ready"

    async def poll() -> None:
        answers.append(await polls.answer(look, 25.0))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(poll)
            await anyio.wait_all_tasks_blocked()
            assert answers == []
            polls.end()
        await poll()
    assert answers == ["not ready"] * 4
    assert waits == [25.0] * 3 + [0.0] * 4


async def test_a_client_that_leaves_is_not_answered():
    polls = LongPolls()

    async def look(_: float) -> str:
        await anyio.sleep_forever()
        raise AssertionError("unreachable")

    with anyio.move_on_after(0) as left:
        await polls.answer(look, 25.0)
    assert left.cancelled_caught
    polls.end()
