"""Jobs with the same prompt and adapter: computed once while there is work, with the answers that each has alone."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from lilo_miles_backend.sampler.adapters import Adapter
from lilo_miles_backend.sampler.batch import Batch
from lilo_miles_backend.sampler.model import Model
from lilo_miles_backend.sampler.prefill import CHUNK_TOKENS, Prefill, take_group
from lilo_miles_backend.sampler.prompts import Prompts
from lilo_miles_backend.sampler.sequence import Job
from lilo_miles_backend.sampler.weights import read_base

from tests.sampling.families import FAMILIES, make_model
from tests.sampling.words import all_tokens, floats, request

SHORT, OTHER = [5, 9, 2, 40], [7, 7, 1]
LONG = [k % 90 for k in range(CHUNK_TOKENS + 30)]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("family")
    make_model(request.param, folder)
    return Model(read_base(folder, dtype=torch.float32, device=torch.device("cpu")))


def job(prompt, answers, seed, *, adapter=None, scored=False):
    asked = request(prompt, seed=seed, max_tokens=6, prompt_logprobs=scored, request_id=f"{seed}")
    return Job(
        request=asked,
        prompt=prompt,
        adapter=adapter,
        max_new=6,
        stop_strings=None,
        deliver=lambda outcome: answers.__setitem__(seed, outcome),
    )


def answers_of(model, groups):
    """By seed; the jobs of a group come together."""
    batch = Batch(model, max_rows=8, max_length=len(LONG) + 8)
    answers = {}
    with torch.inference_mode():
        for group in groups:
            for prompt, seed, scored in group:
                batch.submit(job(prompt, answers, seed, scored=scored))
            while batch.busy:
                batch.step()
    return answers


def group_of(jobs):
    waiting = deque(jobs)
    return take_group(waiting, 8, lambda rows, length: True), list(waiting)


def test_jobs_that_share_a_prompt_answer_as_each_does_alone(model):
    asked = [
        (SHORT, 1, False),
        (OTHER, 2, True),
        (SHORT, 3, True),
        (LONG, 4, False),
        (LONG, 5, False),
        (SHORT, 6, False),
    ]
    together = answers_of(model, [asked])
    alone = answers_of(model, [[each] for each in asked])
    assert together.keys() == alone.keys()
    for seed, answer in alone.items():
        assert all_tokens(together[seed]) == all_tokens(answer)
        if answer.prompt_logprobs is not None:
            ours, its = floats(together[seed].prompt_logprobs), floats(answer.prompt_logprobs)
            assert ours[1:] == pytest.approx(its[1:], abs=1e-4)


def test_a_prompt_is_computed_once_for_each_adapter(model):
    adapter = Adapter(name="a", folder="", factors={})
    asked = [(SHORT, None), (OTHER, None), (SHORT, None), (SHORT, adapter), (SHORT, None)]
    jobs = [job(prompt, {}, i, adapter=its) for i, (prompt, its) in enumerate(asked)]
    prefill = Prefill(model, jobs)
    with torch.inference_mode():
        prefill.step()
    assert prefill.done
    assert prefill.rows == [0, 1, 0, 2, 0]
    assert prefill.last_logits_BV is not None
    assert len(prefill.last_logits_BV) == 3


def test_a_long_prompt_takes_along_what_costs_nothing_more():
    same = [job(LONG, {}, i) for i in range(3)]
    assert group_of([*same, job(SHORT, {}, 3)])[0] == same
    first, scored = job(LONG, {}, 0), job(LONG, {}, 1, scored=True)
    # Running samples would wait for the scores of both.
    assert group_of([first, scored]) == ([first], [scored])


def test_jobs_that_come_one_by_one_answer_as_each_does_alone(model):
    asked = [(SHORT, seed, seed == 3) for seed in range(1, 5)]
    batch = Batch(model, max_rows=8, max_length=64)
    answers = {}
    with torch.inference_mode():
        for prompt, seed, scored in asked:
            batch.submit(job(prompt, answers, seed, scored=scored))
            batch.step()
        busy_bytes = batch.held_bytes
        while batch.busy:
            batch.step()
    assert batch.held_bytes < busy_bytes, "an idle one keeps no prompts"
    alone = answers_of(model, [[each] for each in asked])
    assert {seed: all_tokens(answer) for seed, answer in answers.items()} == {
        seed: all_tokens(answer) for seed, answer in alone.items()
    }


def waiting_for(model, limit_contexts=None):
    whole = model.new_cache(max_rows=1, max_length=64).bytes_of
    limit = None if limit_contexts is None else whole(limit_contexts, 64)
    return Prompts(model, max_rows=8, bytes_of=whole, limit_bytes=limit)


@torch.inference_mode()
def test_a_prompt_that_was_just_computed_is_not_computed_again(model):
    prompts = waiting_for(model)
    adapter = Adapter(name="a", folder="", factors={})
    jobs = [job(SHORT, {}, 0), job(SHORT, {}, 1), job(SHORT, {}, 2, adapter=adapter)]
    jobs.append(job(SHORT, {}, 3, scored=True))
    for each in jobs:
        prompts.submit(each)
        prompts.step()
    first, second, other, scored = [entry.prefill for entry in prompts.ready]
    assert second is first
    assert other is not first
    assert scored not in (first, other), "its scores have to be computed"
    prompts.forget_recent()
    prompts.submit(job(SHORT, {}, 4))
    prompts.step()
    assert prompts.ready[-1].prefill not in (first, other, scored)


@torch.inference_mode()
def test_what_is_kept_for_later_jobs_makes_room_and_keeps_the_order_of_the_line(model):
    prompts = waiting_for(model, limit_contexts=1)
    long, short = job([k % 90 for k in range(60)], {}, 0), job(SHORT, {}, 1)
    prompts.submit(short)
    prompts.step()
    prompts.ready.clear()  # its samples have started
    prompts.submit(long)
    prompts.submit(job(SHORT, {}, 2))
    while not prompts.ready:
        prompts.step()
    assert prompts.ready[0].job is long
    assert prompts.held_bytes <= model.new_cache(max_rows=1, max_length=64).bytes_of(1, 64)


@torch.inference_mode()
def test_nothing_is_kept_of_an_adapter_that_is_unloaded_while_others_generate(model):
    adapter = Adapter(name="a", folder="", factors={})
    batch = Batch(model, max_rows=8, max_length=64)
    batch.submit(job(SHORT, {}, 0))
    batch.step()
    without = batch.held_bytes
    ended = job(OTHER, {}, 1, adapter=adapter)
    ended.max_new = 1
    batch.submit(ended)
    batch.step()
    prompt = model.new_cache(max_rows=1, max_length=64).bytes_of(1, len(OTHER))
    logits = batch.held_bytes - without - prompt
    assert logits >= 4 * model.base.shape.vocab_size
    batch.forget_adapter(adapter)
    assert batch.busy
    assert batch.held_bytes == without
