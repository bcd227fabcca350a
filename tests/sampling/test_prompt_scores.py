"""What a request may ask about its own prompt, on the engine in memory and on the embedded one."""

from __future__ import annotations

import dataclasses

import anyio
import numpy as np
import pytest
import torch
from lilo_engine.errors import InvalidRequest
from lilo_engine.requests.decode_sample import prompt_targets
from lilo_engine.requests.wire_training import TargetsBody

from tests.sampling.conftest import ENGINES
from tests.sampling.words import SUM, floats, request

pytestmark = pytest.mark.anyio
LONG = [(7 * i) % 250 for i in range(600)]
"""More tokens than the engine scores at once."""


@pytest.fixture(scope="module", params=["memory", "embedded"])
async def engine(request, definition, adapters, tmp_path_factory):
    async with ENGINES[request.param](definition, tmp_path_factory.mktemp("log")) as engine:
        with anyio.fail_after(50):
            await engine.load("a", adapters["all"])
        yield engine


def asked(prompt=SUM, **options):
    """A request with what `request` has no word for."""
    names = ("prompt_logprobs_last_n", "prompt_alt_tokens_k", "prompt_targets")
    more = {name: options.pop(name) for name in names if name in options}
    return dataclasses.replace(request(prompt, max_tokens=1, **options), **more)


def dense(ids: list[list[int]]):
    return prompt_targets(
        TargetsBody(data=[i for row in ids for i in row], shape=[len(ids), len(ids[0])])
    )


@pytest.mark.parametrize("n", [1, 3, 5])
async def test_only_the_last_tokens_are_scored_when_asked_for(engine, n):
    whole = await engine.sample(asked(prompt_logprobs=True, topk_prompt=2))
    part = await engine.sample(asked(prompt_logprobs=True, topk_prompt=2, prompt_logprobs_last_n=n))
    values = floats(part.prompt_logprobs)
    assert np.isnan(values[:-n]).all()
    np.testing.assert_allclose(values[-n:], floats(whole.prompt_logprobs)[-n:], atol=1e-5)
    tops = floats(part.topk_prompt.logprobs).reshape(-1, 2)
    assert (tops[:-n] == -99999.0).all()
    expected = floats(whole.topk_prompt.logprobs).reshape(-1, 2)[-n:]
    np.testing.assert_allclose(tops[-n:], expected, atol=1e-5)


async def test_targets_that_are_the_prompt_itself_score_as_the_prompt_does(engine):
    ids = [[token, -1] for token in LONG[1:]]
    result = await engine.sample(
        asked(LONG, adapter="a", prompt_logprobs=True, prompt_targets=dense(ids))
    )
    scores = floats(result.target_scores.logprobs).reshape(-1, 2)
    np.testing.assert_allclose(scores[:, 0], floats(result.prompt_logprobs)[1:], atol=1e-5)
    assert (scores[:, 1] == 0).all()


async def test_sparse_targets_come_back_in_their_own_layout(engine):
    wire = TargetsBody(
        data=[65, 66, 67],
        shape=[len(SUM) - 1, 9],
        sparse_crow_indices=[0, 0, 1, 1, 3, 3],
        sparse_col_indices=[4, 0, 8],
    )
    sparse = await engine.sample(asked(prompt_targets=prompt_targets(wire)))
    table = np.full((len(SUM) - 1, 3), -1)
    table[1, 0], table[3, 1], table[3, 2] = 65, 66, 67
    full = await engine.sample(asked(prompt_targets=dense(table.tolist())))
    expected = floats(full.target_scores.logprobs).reshape(table.shape)
    assert sparse.target_scores.layout.width == 9
    np.testing.assert_allclose(
        floats(sparse.target_scores.logprobs), expected[table >= 0], atol=1e-5
    )
    assert sparse.prompt_logprobs is None


async def test_alternatives_are_draws_of_each_position_with_their_logprobs(engine):
    request_of = {"seed": 3, "prompt_alt_tokens_k": 4}
    first = await engine.sample(asked(LONG, **request_of))
    again = await engine.sample(asked(LONG, **request_of))
    assert first.alt_tokens.token_ids == again.alt_tokens.token_ids
    assert (first.alt_tokens.length, first.alt_tokens.k) == (len(LONG) - 1, 4)
    ids = np.frombuffer(first.alt_tokens.token_ids, "<i4").reshape(-1, 4)
    scored = await engine.sample(asked(LONG, prompt_targets=dense(ids.tolist())))
    np.testing.assert_allclose(
        floats(first.alt_tokens.logprobs), floats(scored.target_scores.logprobs), atol=1e-5
    )


async def test_greedy_alternatives_are_the_most_likely_tokens(engine):
    result = await engine.sample(asked(temperature=0.0, prompt_alt_tokens_k=2, topk_prompt=1))
    ids = np.frombuffer(result.alt_tokens.token_ids, "<i4").reshape(-1, 2)
    tops = np.frombuffer(result.topk_prompt.token_ids, "<i4")[1:]
    assert (ids == tops[:, None]).all()


async def test_alternatives_follow_the_distribution_of_their_position(engine, reference):
    if (await engine.info()).device == "memory":
        pytest.skip("the independent reference is the tiny model")
    prompt, k, draws = SUM[:3], 128, []
    for seed in range(16):
        result = await engine.sample(
            asked(prompt, seed=seed, temperature=0.7, prompt_alt_tokens_k=k)
        )
        draws.append(np.frombuffer(result.alt_tokens.token_ids, "<i4").reshape(-1, k))
    found = np.concatenate(draws, axis=1)
    with torch.no_grad():
        logits = reference(torch.tensor([prompt])).logits[0].double()
    for row in range(2):
        expected = (logits[row] / 0.7).softmax(-1).numpy()
        share = np.bincount(found[row], minlength=expected.size) / found.shape[1]
        assert np.abs(share - expected).max() < 0.05


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_logprobs_last_n": 2},
        {"prompt_logprobs_last_n": 0, "prompt_logprobs": True},
        {"prompt_logprobs_last_n": len(SUM), "prompt_logprobs": True},
        {"prompt_alt_tokens_k": -1},
        {"prompt_alt_tokens_k": 129},
        {"prompt_targets": dense([[1]])},
        {"prompt_targets": dense([[-1]] * (len(SUM) - 1))},
        {"prompt_targets": dense([[10**6]] * (len(SUM) - 1))},
        {"prompt_targets": dense([[1] * 200] * (len(SUM) - 1))},
    ],
)
async def test_what_does_not_fit_the_prompt_is_refused(engine, options):
    with pytest.raises(InvalidRequest):
        await engine.sample(asked(**options))
