"""The sampling manager: futures, retries, adapters on demand, bounds, and what happens when an engine is lost."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from contextlib import asynccontextmanager

import anyio
import pytest
from lilo_engine.errors import (
    BackendLost,
    Gone,
    InvalidRequest,
    NotFound,
    Saturated,
    ServerError,
    Unavailable,
)
from lilo_engine.operations.result import Failed, Pending
from lilo_engine.sampling.engine import SamplerHealth
from lilo_engine.sampling.futures import Sampled
from lilo_engine.sampling.launcher import MemorySamplerLauncher, ProcessSamplerLauncher
from lilo_engine.sampling.manager import SamplingManager
from lilo_engine.sampling.residents import AdapterVersion
from lilo_engine.sampling.room import Claim
from lilo_engine.sampling.supervisor import Supervisor

from tests.sampling.words import all_tokens, floats, request, with_sampler

pytestmark = pytest.mark.anyio

ANYBODY = Claim()
ENDLESS = {"n": 64, "max_tokens": 1000}
"""Takes long enough on every engine to be caught running."""


@asynccontextmanager
async def running(definition, launcher, **options):
    """A manager that is serving."""
    manager = SamplingManager(definition=definition, launcher=launcher, **options)
    with anyio.fail_after(50):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(manager.run)
            await anyio.wait_all_tasks_blocked()
            yield manager
            tasks.cancel_scope.cancel()


@pytest.fixture
async def manager(definition):
    async with running(definition, MemorySamplerLauncher(definition)) as manager:
        yield manager


def submit(
    manager, seq_id, *, session_id="s", fingerprint="f", adapter=None, claim=ANYBODY, **keywords
):
    return manager.submit(
        session_id=session_id,
        seq_id=seq_id,
        fingerprint=fingerprint,
        adapter=adapter,
        request=request(**keywords),
        claim=claim,
    )


async def caught_running(manager):
    """Return once the engine has a request in hand."""
    while not ((state := await manager.state()).health and state.health.running):
        await anyio.lowlevel.checkpoint()


async def answer(manager, seq_id, **keywords):
    return await manager.retrieve(submit(manager, seq_id, **keywords).request_id, 30)


def versions(tmp_path, count) -> list[AdapterVersion]:
    """Adapters for the memory engine: any two files."""
    found = []
    for i in range(count):
        folder = tmp_path / f"v{i}"
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(bytes([i]))
        found.append(AdapterVersion(name=f"v{i}", folder=str(folder)))
    return found


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


async def test_adapters_are_loaded_on_demand_and_never_more_than_allowed(definition, tmp_path):
    small = with_sampler(definition, max_adapters=2)
    adapters = versions(tmp_path, 4)
    async with running(small, MemorySamplerLauncher(small)) as manager:
        answers = {}
        for round_number in range(2):
            for i, version in enumerate(adapters):
                seq_id = 10 * round_number + i
                state = await answer(manager, seq_id, adapter=version, seed=1)
                assert isinstance(state, Sampled)
                assert answers.setdefault(i, all_tokens(state.result)) == all_tokens(state.result)
                assert len((await manager.state()).loaded_adapters) <= 2
        assert len({str(tokens) for tokens in answers.values()}) == 4


async def test_the_least_recently_used_adapter_is_dropped(definition, tmp_path):
    small = with_sampler(definition, max_adapters=2)
    a, b, c = versions(tmp_path, 3)
    async with running(small, MemorySamplerLauncher(small)) as manager:
        for seq_id, version in enumerate([a, b, a, c]):
            await answer(manager, seq_id, adapter=version)
        assert (await manager.state()).loaded_adapters == (a.name, c.name)


async def test_an_adapter_in_use_is_not_dropped_and_newcomers_wait(definition, tmp_path):
    small = with_sampler(definition, max_adapters=1)
    a, b = versions(tmp_path, 2)
    async with running(small, MemorySamplerLauncher(small)) as manager:
        long = submit(manager, 0, adapter=a, **ENDLESS)
        waiting = submit(manager, 1, adapter=b)
        while not (await manager.state()).loaded_adapters:
            await anyio.lowlevel.checkpoint()
        assert (await manager.state()).loaded_adapters == (a.name,)
        assert await manager.retrieve(waiting.request_id, 0) == Pending()
        await manager.cancel(long.request_id)
        assert isinstance(await manager.retrieve(waiting.request_id, 10), Sampled)


async def test_a_missing_adapter_fails_its_request_and_is_never_answered_by_the_base(
    manager, tmp_path
):
    missing = AdapterVersion(name="gone", folder=str(tmp_path / "gone"))
    states = [await answer(manager, i, adapter=missing) for i in range(2)]
    for state in states:
        assert isinstance(state, Failed)
        assert state.error.category == "user"
    assert isinstance(await answer(manager, 2), Sampled)


async def test_a_volume_that_stands_still_fails_a_request_within_the_limit(definition, tmp_path):
    short = definition.model_copy(
        update={"limits": definition.limits.model_copy(update={"command_timeout_s": 0.2})}
    )
    goes_on = threading.Event()
    [version] = versions(tmp_path, 1)

    def see(version):
        goes_on.wait(40)
        return version.folder

    async with running(short, MemorySamplerLauncher(short), see=see) as manager:
        try:
            with anyio.fail_after(10):
                state = await answer(manager, 0, adapter=version)
            assert isinstance(state, Failed)
            assert "command_timeout_s" in state.error.message
        finally:
            goes_on.set()
        assert isinstance(await answer(manager, 1, adapter=version), Sampled)


async def test_another_folder_under_another_name_is_another_adapter(manager, tmp_path):
    first, second = versions(tmp_path, 2)
    renamed = AdapterVersion(name=f"{first.name}@2", folder=second.folder)
    before = await answer(manager, 0, adapter=first, max_tokens=0, prompt_logprobs=True)
    after = await answer(manager, 1, adapter=renamed, max_tokens=0, prompt_logprobs=True)
    same = await answer(manager, 2, adapter=second, max_tokens=0, prompt_logprobs=True)
    values = [floats(state.result.prompt_logprobs)[1:].tolist() for state in (before, after, same)]
    assert values[0] != values[1]
    assert values[1] == values[2]


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


async def test_more_adapters_than_fit_each_answer_with_their_own_weights(
    definition, adapters, tmp_path
):
    small = with_sampler(definition, max_adapters=2)
    launcher = ProcessSamplerLauncher(definition=small, log_file=tmp_path / "sampler.log")
    names = list(adapters)
    scores: dict[str, set[tuple[float, ...]]] = {name: set() for name in names}

    async def one(manager, seq_id):
        name = names[seq_id % len(names)]
        version = AdapterVersion(name=name, folder=adapters[name])
        state = await answer(manager, seq_id, adapter=version, max_tokens=2, prompt_logprobs=True)
        values = floats(state.result.prompt_logprobs)[1:]
        scores[name].add(tuple(round(float(value), 3) for value in values))

    async with running(small, launcher) as manager:
        async with anyio.create_task_group() as tasks:
            for seq_id in range(40):
                tasks.start_soon(one, manager, seq_id)
        assert len((await manager.state()).loaded_adapters) <= 2
    assert [len(scores[name]) for name in names] == [1] * len(names)
    assert len(set.union(*scores.values())) == len(names)


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
