"""Requests and answers in the words of tests."""

from __future__ import annotations

import numpy as np
from lilo_engine.sampling.engine import SampleRequest, SamplingParams

SUM = [ord(c) for c in "12+34="]
EOS = 257


def request(
    prompt=SUM,
    *,
    n=1,
    adapter=None,
    request_id="r",
    prompt_logprobs=False,
    topk_prompt=0,
    topk=0,
    **params,
):
    """A request of `n` samples; other keywords are sampling parameters."""
    params.setdefault("max_tokens", 16)
    return SampleRequest(
        request_id=request_id,
        prompt=np.asarray(prompt, dtype="<i4").tobytes(),
        num_samples=n,
        params=SamplingParams(**params),
        adapter=adapter,
        prompt_logprobs=prompt_logprobs,
        topk_prompt_logprobs=topk_prompt,
        topk_sample_logprobs=topk,
    )


def tokens(sequence) -> list[int]:
    return np.frombuffer(sequence.tokens, dtype="<i4").tolist()


def floats(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype="<f4")


def all_tokens(result) -> list[list[int]]:
    return [tokens(sequence) for sequence in result.sequences]


def with_sampler(definition, **changes):
    """The definition with some settings of its sampler changed."""
    return definition.model_copy(update={"sampler": definition.sampler.model_copy(update=changes)})
