"""Long polls end when the server does, or when their client leaves."""

from __future__ import annotations

import anyio
import pytest
from fastapi import Request
from lilo_engine.errors import NotFound
from lilo_engine.requests.long_polls import UNWATCHED_S, LongPolls
from starlette.requests import ClientDisconnect

pytestmark = pytest.mark.anyio


def asked(left: anyio.Event | None = None) -> Request:
    """A request whose body was read, and whose client leaves at an event."""

    async def receive():
        await (left or anyio.Event()).wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)


@pytest.mark.parametrize("long", [False, True], ids=["in its first moment", "later"])
async def test_polls_that_wait_are_answered_at_the_end_and_later_ones_at_once(long):
    polls, waits, answers = LongPolls(), [], []

    async def look(wait_s: float) -> str:
        waits.append(wait_s)
        if wait_s > UNWATCHED_S or (wait_s and not long):
            await anyio.sleep_forever()
        return "not ready"

    async def poll() -> None:
        answers.append(await polls.answer(asked(), look, 25.0, pending=bool))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(poll)
            await anyio.wait_all_tasks_blocked()
            assert answers == []
            assert polls.num_waiting == 3
            polls.end()
        await poll()
    assert answers == ["not ready"] * 4
    assert polls.num_waiting == 0
    assert waits[-4:] == [0.0] * 4
    if long:
        assert sum(waits) == 3 * 25.0
    else:
        assert all(UNWATCHED_S / 2 < each <= UNWATCHED_S for each in waits[:3])


async def test_a_client_that_leaves_takes_its_poll_along():
    polls, left, looks = LongPolls(), anyio.Event(), []

    async def look(wait_s: float) -> str:
        looks.append(wait_s)
        if wait_s > UNWATCHED_S:
            await anyio.sleep_forever()
        return "not ready"

    async def poll() -> None:
        with pytest.raises(ClientDisconnect):
            await polls.answer(asked(left), look, 25.0, pending=bool)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(poll)
            await anyio.wait_all_tasks_blocked()
            left.set()
    assert looks == [1.0, 24.0], "nobody is there to hear of what there is"


async def test_polls_that_came_together_do_not_begin_to_be_watched_together():
    """Else two thousand clients that wait hold up all others for 0.2 s."""
    polls, moments = LongPolls(), []

    async def look(wait_s: float) -> str:
        moments.append(wait_s)
        return ""

    for _ in range(2048):
        await polls.answer(asked(), look, 25.0, pending=bool)
    tenths = [int(20 * (1 - each / UNWATCHED_S)) for each in moments]
    assert max(tenths.count(tenth) for tenth in range(10)) < 0.11 * len(moments)
    assert max(moments) <= UNWATCHED_S


async def test_an_answer_that_is_there_is_given_at_once():
    looks = []

    async def look(wait_s: float) -> str:
        looks.append(wait_s)
        return ""

    assert await LongPolls().answer(asked(), look, 25.0, pending=bool) == ""
    assert looks == [UNWATCHED_S]


async def test_an_error_is_the_answer_as_it_is():
    async def look(_: float) -> str:
        raise NotFound("there is none")

    with pytest.raises(NotFound, match="there is none"):
        await LongPolls().answer(asked(), look, 25.0, pending=bool)


async def test_a_poll_that_is_cancelled_ends():
    polls = LongPolls()

    async def look(_: float) -> str:
        await anyio.sleep_forever()
        raise AssertionError("unreachable")

    with anyio.move_on_after(0) as left:
        await polls.answer(asked(), look, 25.0, pending=bool)
    assert left.cancelled_caught
    polls.end()
