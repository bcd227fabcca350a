"""What every sampling engine promises, run on each: in memory, embedded, and in a process of its own."""

from __future__ import annotations

import anyio
import numpy as np
import pytest
from lilo_engine.errors import Gone, InvalidRequest, NotFound, UserError

from tests.sampling.conftest import ENGINES
from tests.sampling.words import EOS, SUM, all_tokens, floats, request, tokens

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", params=["memory", "embedded", "remote"])
async def engine(request, definition, adapters, tmp_path_factory):
    """One engine for all tests here, with two adapters."""
    async with ENGINES[request.param](definition, tmp_path_factory.mktemp("log")) as engine:
        with anyio.fail_after(50):
            await engine.load("a", adapters["all"])
            await engine.load("b", adapters["linears"])
        yield engine


async def test_a_request_gets_exactly_the_samples_it_asked_for(engine):
    result = await engine.sample(request(n=3, max_tokens=5))
    assert len(result.sequences) == 3
    for sequence in result.sequences:
        assert len(tokens(sequence)) == len(floats(sequence.logprobs)) == 5
        assert sequence.stop_reason == "length"
        assert (floats(sequence.logprobs) <= 0).all()
    assert result.prompt_logprobs is None
    assert result.topk_prompt is None


async def test_the_same_seed_gives_the_same_samples_and_samples_of_one_request_differ(engine):
    first = all_tokens(await engine.sample(request([65], n=4, seed=7, temperature=1.5)))
    again = all_tokens(await engine.sample(request([65], n=4, seed=7, temperature=1.5)))
    assert first == again
    assert len({tuple(sample) for sample in first}) == 4


async def test_sample_j_draws_from_seed_plus_j(engine):
    together = all_tokens(await engine.sample(request([65], n=3, seed=20, temperature=2.0)))
    for j in range(3):
        alone = await engine.sample(request([65], seed=20 + j, temperature=2.0))
        assert all_tokens(alone) == [together[j]]


async def test_a_negative_seed_is_another_seed(engine):
    minus = await engine.sample(request([65], seed=-5, temperature=2.0))
    plus = await engine.sample(request([65], seed=5, temperature=2.0))
    assert all_tokens(minus) != all_tokens(plus)


async def test_without_a_seed_two_requests_differ(engine):
    first = await engine.sample(request([65], temperature=2.0, max_tokens=32))
    second = await engine.sample(request([65], temperature=2.0, max_tokens=32))
    assert all_tokens(first) != all_tokens(second)


async def test_scoring_a_sample_gives_the_logprobs_it_was_sampled_with(engine):
    for adapter in (None, "a", "b"):
        (sequence,) = (
            await engine.sample(request(adapter=adapter, seed=1, temperature=0.7))
        ).sequences
        scored = await engine.sample(
            request([*SUM, *tokens(sequence)], adapter=adapter, prompt_logprobs=True, max_tokens=1)
        )
        values = floats(scored.prompt_logprobs)
        assert np.isnan(values[0])
        np.testing.assert_allclose(values[len(SUM) :], floats(sequence.logprobs), atol=1e-4)


async def test_greedy_takes_the_most_likely_token_every_time(engine):
    result = await engine.sample(request(n=2, temperature=0.0, topk=3))
    first, second = result.sequences
    assert tokens(first) == tokens(second)
    top = np.frombuffer(first.topk.token_ids, dtype="<i4").reshape(first.topk.length, first.topk.k)
    assert top[:, 0].tolist() == tokens(first)


async def test_top_k_of_one_and_a_tiny_top_p_are_greedy(engine):
    greedy = all_tokens(await engine.sample(request(temperature=0.0)))
    assert all_tokens(await engine.sample(request(top_k=1, seed=3))) == greedy
    assert all_tokens(await engine.sample(request(top_p=1e-9, seed=3))) == greedy


async def test_top_k_samples_come_from_the_k_most_likely(engine):
    (sequence,) = (
        await engine.sample(request([65], top_k=3, topk=3, temperature=2.0, max_tokens=40))
    ).sequences
    top = np.frombuffer(sequence.topk.token_ids, dtype="<i4").reshape(-1, 3)
    assert all(token in row for token, row in zip(tokens(sequence), top, strict=True))
    assert any(token != row[0] for token, row in zip(tokens(sequence), top, strict=True))


async def test_generation_ends_with_and_includes_the_stop_token(engine):
    free = all_tokens(await engine.sample(request([65], seed=2, temperature=2.0)))[0]
    stop = free[5]
    (sequence,) = (
        await engine.sample(request([65], seed=2, temperature=2.0, stop_tokens=(stop,)))
    ).sequences
    assert tokens(sequence) == free[: free.index(stop) + 1]
    assert len(floats(sequence.logprobs)) == len(tokens(sequence))
    assert sequence.stop_reason == "stop"


async def test_no_stop_tokens_means_none_not_even_the_end_of_text(engine):
    info = await engine.info()
    assert info.eos_tokens
    (sequence,) = (await engine.sample(request(temperature=0.0, max_tokens=24))).sequences
    assert (len(tokens(sequence)), sequence.stop_reason) == (24, "length")


async def test_top_logprobs_of_the_prompt_have_an_unused_first_position(engine):
    result = await engine.sample(request(topk_prompt=4, prompt_logprobs=True, max_tokens=1))
    top = result.topk_prompt
    assert (top.k, top.length) == (4, len(SUM))
    ids = np.frombuffer(top.token_ids, dtype="<i4").reshape(top.length, 4)
    values = floats(top.logprobs).reshape(top.length, 4)
    assert ids[0].tolist() == [0] * 4
    assert values[0].tolist() == [-99999.0] * 4
    assert (np.diff(values[1:], axis=1) <= 0).all()
    for place in range(1, len(SUM)):
        found = np.flatnonzero(ids[place] == SUM[place])
        if found.size:
            value = floats(result.prompt_logprobs)[place]
            assert values[place, found[0]] == pytest.approx(value, abs=1e-5)


async def test_no_new_tokens_still_score_the_prompt(engine):
    result = await engine.sample(request(max_tokens=0, n=2, prompt_logprobs=True))
    assert all_tokens(result) == [[], []]
    assert [sequence.stop_reason for sequence in result.sequences] == ["length", "length"]
    assert len(floats(result.prompt_logprobs)) == len(SUM)


async def test_a_prompt_of_one_token_can_be_scored(engine):
    result = await engine.sample(request([65], max_tokens=1, prompt_logprobs=True))
    assert np.isnan(floats(result.prompt_logprobs)).tolist() == [True]


async def test_generation_ends_where_the_context_ends(engine, definition):
    prompt = [65] * (definition.context - 3)
    (sequence,) = (await engine.sample(request(prompt, max_tokens=100))).sequences
    # The last drawn token is never read, so one may stand after the last position.
    assert len(tokens(sequence)) == 4
    full = await engine.sample(request([65] * definition.context, max_tokens=1))
    assert len(all_tokens(full)[0]) == 1


async def test_adapters_change_the_answer_and_not_each_others(engine):
    async def score(adapter):
        result = await engine.sample(request(adapter=adapter, max_tokens=0, prompt_logprobs=True))
        return floats(result.prompt_logprobs)[1:]

    base, a, b = await score(None), await score("a"), await score("b")
    assert np.abs(base - a).max() > 1e-2
    assert np.abs(a - b).max() > 1e-2
    np.testing.assert_allclose(await score("a"), a, atol=1e-6)


async def test_an_adapter_that_is_not_loaded_is_an_error_never_the_base_model(engine):
    with pytest.raises(NotFound):
        await engine.sample(request(adapter="never"))


async def test_a_name_once_unloaded_is_not_found_and_can_be_loaded_again(engine, adapters):
    await engine.load("passing", adapters["linears"])
    await engine.load("passing", adapters["linears"])
    await engine.sample(request(adapter="passing", max_tokens=1))
    await engine.unload("passing")
    await engine.unload("passing")
    with pytest.raises(NotFound):
        await engine.sample(request(adapter="passing"))


async def test_a_name_stands_for_one_folder(engine, adapters):
    with pytest.raises(UserError):
        await engine.load("a", adapters["linears"])


async def test_a_folder_without_an_adapter_is_a_user_error(engine, tmp_path):
    with pytest.raises(InvalidRequest):
        await engine.load("empty", str(tmp_path))
    with pytest.raises(InvalidRequest):
        await engine.load("missing", str(tmp_path / "no"))
    await engine.sample(request(max_tokens=1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": []},
        {"prompt": [260]},
        {"prompt": [65, -1]},
        {"prompt": [65] * 1025},
        {"n": 0},
        {"max_tokens": -1},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"topk": 10_000},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
async def test_bad_requests_are_user_errors_and_the_engine_goes_on(engine, wrong):
    with pytest.raises(InvalidRequest):
        await engine.sample(request(**wrong))
    await engine.sample(request(max_tokens=1))


async def test_an_aborted_request_raises_and_others_are_served(engine):
    outcome = []

    async def long():
        try:
            outcome.append(await engine.sample(request(n=64, max_tokens=1000, request_id="long")))
        except Gone as error:
            outcome.append(error)

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(long)
            while (await engine.health()).generated_tokens == 0 or not (
                await engine.health()
            ).running:
                await anyio.lowlevel.checkpoint()
            await engine.abort("long")
            await engine.abort("unknown")
        assert isinstance(outcome[0], Gone)
        await engine.sample(request(max_tokens=1))


async def test_a_cancelled_call_frees_the_engine(engine):
    with anyio.fail_after(20):
        with anyio.move_on_after(0.05):
            await engine.sample(request(n=64, max_tokens=1000))
        while (health := await engine.health()).running or health.waiting:
            await anyio.lowlevel.checkpoint()
        assert health.age_s == 0


async def test_many_requests_at_once_get_their_own_answers(engine):
    answers = {}

    async def one(seed):
        adapter = (None, "a", "b")[seed % 3]
        result = await engine.sample(
            request([65 + seed], adapter=adapter, seed=seed, request_id=f"m{seed}")
        )
        answers[seed] = all_tokens(result)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            for seed in range(12):
                tasks.start_soon(one, seed)
        for seed in range(12):
            alone = await engine.sample(
                request([65 + seed], adapter=(None, "a", "b")[seed % 3], seed=seed)
            )
            assert all_tokens(alone) == answers[seed]


async def test_information_matches_the_definition(engine, definition):
    info = await engine.info()
    assert info.base_model == definition.model.name
    assert info.vocab_size == definition.model.vocab_size
    assert info.max_context == definition.context
    assert info.vocab_size > EOS
