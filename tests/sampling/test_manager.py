"""The sampling manager: tickets, futures, retries, cancellation, and its bounds."""

from __future__ import annotations

import anyio
import pytest
from lilo_engine.errors import Gone, InvalidRequest, NotFound, Saturated, Unavailable
from lilo_engine.operations.result import Failed, Pending
from lilo_engine.sampling.futures import Sampled
from lilo_engine.sampling.launcher import MemorySamplerLauncher
from lilo_engine.sampling.manager import SamplingManager
from lilo_engine.sampling.room import Claim

from tests.sampling.managers import ENDLESS, answer, caught_running, running, submit

pytestmark = pytest.mark.anyio


async def test_a_ticket_has_one_sequence_id_per_sample_and_an_id_that_tells_it_is_a_sample(manager):
    ticket = submit(manager, 0, n=3)
    assert ticket.request_id.startswith("sample:")
    assert len(ticket.sequence_ids) == len(set(ticket.sequence_ids)) == 3
    state = await manager.retrieve(ticket.request_id, 30)
    assert isinstance(state, Sampled)
    assert len(state.result.sequences) == 3


async def test_an_answer_can_be_fetched_again(manager):
    ticket = submit(manager, 0)
    first = await manager.retrieve(ticket.request_id, 30)
    assert await manager.retrieve(ticket.request_id, 0) == first


async def test_a_retry_gives_the_same_ticket_and_runs_once(manager):
    first = submit(manager, 5, temperature=2.0)
    again = submit(manager, 5, temperature=2.0)
    assert first == again
    state = await manager.retrieve(first.request_id, 30)
    assert submit(manager, 5, temperature=2.0) == first
    # Unseeded: a second run would have drawn other tokens.
    assert await manager.retrieve(first.request_id, 0) == state


async def test_a_number_used_with_another_payload_is_refused(manager):
    submit(manager, 5)
    with pytest.raises(InvalidRequest):
        submit(manager, 5, fingerprint="other")


async def test_numbers_are_per_sampling_session(manager):
    first = submit(manager, 0, session_id="one", fingerprint="a")
    second = submit(manager, 0, session_id="two", fingerprint="b")
    assert first.request_id != second.request_id


async def test_a_request_that_has_not_finished_is_pending(manager):
    ticket = submit(manager, 0, **ENDLESS)
    assert await manager.retrieve(ticket.request_id, 0) == Pending()
    assert await manager.retrieve(ticket.request_id, 0.01) == Pending()


async def test_an_unknown_id_is_not_found(manager):
    with pytest.raises(NotFound):
        await manager.retrieve("sample:s:99", 0)


async def test_bad_requests_are_refused_at_submission(manager):
    for wrong in ({"prompt": []}, {"prompt": [9999]}, {"n": 0}, {"top_p": 7.0}):
        with pytest.raises(InvalidRequest):
            submit(manager, 0, **wrong)
    assert isinstance(await answer(manager, 0), Sampled)


async def test_a_cancelled_request_fails_and_frees_the_engine(manager):
    ticket = submit(manager, 0, **ENDLESS)
    await caught_running(manager)
    await manager.cancel(ticket.request_id)
    state = await manager.retrieve(ticket.request_id, 10)
    assert isinstance(state, Failed)
    assert isinstance(state.error, Gone)
    assert (await manager.state()).health.running == 0
    await manager.cancel("sample:unknown:0")


async def test_a_session_that_ended_is_stopped_and_its_answers_are_gone(manager):
    kept = submit(manager, 0, session_id="other")
    running_one = submit(manager, 0, **ENDLESS)
    done = submit(manager, 1)
    await manager.retrieve(done.request_id, 30)
    manager.forget("s")
    manager.forget("s")
    for ticket in (running_one, done):
        with pytest.raises(Gone):
            await manager.retrieve(ticket.request_id, 0)
    assert isinstance(await manager.retrieve(kept.request_id, 30), Sampled)
    await anyio.wait_all_tasks_blocked()
    assert (await manager.state()).health.running == 0


async def test_too_many_waiting_requests_are_saturated_until_some_end(definition):
    async with running(definition, MemorySamplerLauncher(definition), max_waiting=4) as manager:
        first = submit(manager, 0, **ENDLESS)
        submit(manager, 1, **ENDLESS)
        with pytest.raises(Saturated):
            submit(manager, 2)
        # A retry of an accepted one is not a new one.
        assert submit(manager, 0, **ENDLESS) == first
        await manager.cancel(first.request_id)
        await manager.retrieve(first.request_id, 10)
        assert submit(manager, 2).request_id == "sample:s:2"


async def test_an_owner_has_as_much_of_the_waiting_room_as_it_leaves_free(definition):
    async with running(definition, MemorySamplerLauncher(definition), max_waiting=6) as manager:
        greedy, modest = Claim(owner="greedy"), Claim(owner="modest")
        for number in range(3):
            submit(manager, number, claim=greedy, **ENDLESS)
        with pytest.raises(Saturated, match="3 samples of this key"):
            submit(manager, 3, claim=greedy)
        submit(manager, 0, session_id="t", claim=modest, **ENDLESS)
        submit(manager, 1, session_id="t", claim=modest, **ENDLESS)
        with pytest.raises(Saturated):
            submit(manager, 2, session_id="t", claim=modest)
        assert submit(manager, 0, session_id="u", claim=Claim(owner="third")).request_id


async def test_samples_of_an_owner_with_a_limit_hold_so_much_and_no_more(definition):
    async with running(definition, MemorySamplerLauncher(definition)) as manager:
        # A prompt of some tokens, and 64 x 1000 tokens with their logprobs.
        limited = Claim(owner="limited", max_bytes=700_000)
        first = submit(manager, 0, claim=limited, **ENDLESS)
        with pytest.raises(Saturated, match="its limit of 700000"):
            submit(manager, 1, claim=limited, **ENDLESS)
        submit(manager, 0, session_id="t", claim=Claim(owner="other"), **ENDLESS)
        await manager.cancel(first.request_id)
        await manager.retrieve(first.request_id, 10)
        submit(manager, 1, claim=limited, **ENDLESS)


async def test_kept_answers_are_bounded_and_fetched_ones_go_first(definition):
    async with running(definition, MemorySamplerLauncher(definition), max_finished=3) as manager:
        tickets = [submit(manager, i, max_tokens=1) for i in range(3)]
        await anyio.wait_all_tasks_blocked()
        await manager.retrieve(tickets[1].request_id, 10)
        tickets.append(submit(manager, 3, max_tokens=1))
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(NotFound):
            await manager.retrieve(tickets[1].request_id, 0)
        for i in (0, 2, 3):
            assert isinstance(await manager.retrieve(tickets[i].request_id, 0), Sampled)


async def test_without_a_running_manager_submission_is_unavailable(definition):
    manager = SamplingManager(definition=definition, launcher=MemorySamplerLauncher(definition))
    with pytest.raises(Unavailable):
        submit(manager, 0)
    assert (await manager.state()).phase == "stopped"


async def test_stopping_fails_what_runs(definition):
    manager = SamplingManager(definition=definition, launcher=MemorySamplerLauncher(definition))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(manager.run)
        await anyio.wait_all_tasks_blocked()
        ticket = submit(manager, 0, **ENDLESS)
        tasks.cancel_scope.cancel()
    state = await manager.retrieve(ticket.request_id, 0)
    assert isinstance(state, Failed)
    assert isinstance(state.error, Unavailable)
