"""A sampler whose cache is limited, as on a GPU that it shares: the same answers, never more memory."""

from __future__ import annotations

import pytest
import torch
from lilo_definitions import get
from lilo_definitions.planner import sampler_memory
from lilo_miles_backend.sampler.batch import Batch
from lilo_miles_backend.sampler.device import limit_of
from lilo_miles_backend.sampler.model import Model
from lilo_miles_backend.sampler.sequence import Job
from lilo_miles_backend.sampler.weights import read_base

from tests.sampling.families import FAMILIES, make_model
from tests.sampling.words import all_tokens, request

CONTEXT = 256
JOBS = [(5, 40, 3), (200, 50, 2), (90, 10, 4), (3, 1, 5), (17, 30, 1), (180, 60, 2), (1, 200, 2)]
"""(prompt tokens, new tokens, samples)."""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("family")
    make_model(request.param, folder)
    return Model(read_base(folder, dtype=torch.float32, device=torch.device("cpu")))


def run(model, cache_bytes):
    """Tokens per job, and the most bytes that rows and prompts held together."""
    batch = Batch(model, max_rows=8, max_length=CONTEXT, cache_bytes=cache_bytes)
    answers, most = {}, 0
    for i, (length, new, samples) in enumerate(JOBS):
        prompt = [(7 * i + k) % 90 for k in range(length)]
        asked = request(prompt, n=samples, seed=i, max_tokens=new, request_id=f"{i}")
        job = Job(
            request=asked,
            prompt=prompt,
            adapter=None,
            max_new=new,
            stop_strings=None,
            deliver=lambda outcome, i=i: answers.__setitem__(i, outcome),
        )
        batch.submit(job)
    with torch.inference_mode():
        while batch.busy:
            batch.step()
            most = max(most, batch.held_bytes)
    return [all_tokens(answers[i]) for i in range(len(JOBS))], most


def test_jobs_wait_for_memory_and_come_to_the_same(model):
    whole = model.new_cache(max_rows=1, max_length=CONTEXT).bytes_of(1, CONTEXT)
    free, most_free = run(model, None)
    for contexts in (2, 3.5):
        limited, most = run(model, int(contexts * whole))
        assert limited == free
        assert most <= contexts * whole < most_free


def test_a_share_is_cut_to_what_is_free():
    share = sampler_memory(get("qwen3_0_6b"), device_bytes=85e9)
    assert limit_of(share, 80e9) == int(share.cache)
    assert limit_of(share, share.adapters + 3e9) == pytest.approx(1e9)
    assert limit_of(share, 1e9) == 0
