"""Adapters of the sampling manager: loaded on demand, never more than fit, each request answered by its own."""

from __future__ import annotations

import threading

import anyio
import pytest
from lilo_engine.operations.result import Failed, Pending
from lilo_engine.sampling.futures import Sampled
from lilo_engine.sampling.launcher import MemorySamplerLauncher, ProcessSamplerLauncher
from lilo_engine.sampling.residents import AdapterVersion

from tests.sampling.managers import ENDLESS, answer, running, submit, versions
from tests.sampling.words import all_tokens, floats, with_sampler

pytestmark = pytest.mark.anyio


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
