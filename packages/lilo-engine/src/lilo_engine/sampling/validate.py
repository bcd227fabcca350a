"""What a sample request must be, checked before it can reach a device. Pure; the manager and every engine call it."""

from __future__ import annotations

import math

import numpy as np

from lilo_engine.errors import InvalidRequest
from lilo_engine.sampling.engine import PromptTargets, SampleRequest

MAX_TOPK = 128
"""Most likely tokens that can be asked for at each position; bounds the answer."""


def check_request(request: SampleRequest, *, vocab_size: int, context: int) -> None:
    """Check prompt, counts and parameters.

    Raises:
        InvalidRequest: the first thing that is wrong, what was expected, what to do.
    """
    _check_prompt(request.prompt, vocab_size=vocab_size, context=context)
    for good, words in [*_counts(request), *_parameters(request), *_stops(request, vocab_size)]:
        if not good:
            raise InvalidRequest(words)
    _check_about_prompt(request, len(request.prompt) // 4)
    if request.prompt_targets is not None:
        _check_targets(request.prompt_targets, len(request.prompt) // 4, vocab_size)


def _check_prompt(prompt: bytes, *, vocab_size: int, context: int) -> None:
    if len(prompt) % 4:
        raise InvalidRequest(f"a prompt of {len(prompt)} bytes is not a list of int32 tokens")
    tokens = np.frombuffer(prompt, dtype="<i4")
    if not tokens.size:
        raise InvalidRequest("the prompt is empty; send at least one token")
    if tokens.size > context:
        raise InvalidRequest(
            f"the prompt has {tokens.size} tokens, over the context of {context}; shorten it"
        )
    bad = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if bad.size:
        place = int(bad[0])
        raise InvalidRequest(
            f"prompt token {place} is {tokens[place]}; token ids are 0 to {vocab_size - 1}"
        )


def _counts(request: SampleRequest) -> list[tuple[bool, str]]:
    tops = (request.topk_prompt_logprobs, request.topk_sample_logprobs)
    return [
        (request.num_samples >= 1, f"num_samples is {request.num_samples}; expected at least 1"),
        (
            all(0 <= k <= MAX_TOPK for k in tops),
            f"top logprobs of {tops[0]} (prompt) and {tops[1]} (samples); expected 0 to {MAX_TOPK}",
        ),
    ]


def _check_about_prompt(request: SampleRequest, prompt_tokens: int) -> None:
    last_n, alternatives = request.prompt_logprobs_last_n, request.prompt_alt_tokens_k
    if last_n is not None and not request.prompt_logprobs:
        raise InvalidRequest("prompt_logprobs_last_n says how many; set prompt_logprobs too")
    if last_n is not None and not 1 <= last_n < max(2, prompt_tokens):
        raise InvalidRequest(
            f"prompt_logprobs_last_n is {last_n}; this prompt of {prompt_tokens} tokens has "
            f"1 to {prompt_tokens - 1}, since nothing predicts the first"
        )
    if not 0 <= alternatives <= MAX_TOPK:
        raise InvalidRequest(f"prompt_alt_tokens_k is {alternatives}; expected 0 to {MAX_TOPK}")


def _check_targets(targets: PromptTargets, prompt_tokens: int, vocab_size: int) -> None:
    """The tensor has a row for each prompt token but the first, and names a token at least once."""
    rows = targets.layout.length
    if rows != prompt_tokens - 1:
        raise InvalidRequest(
            f"target_prompt_logprobs has {rows} rows; a prompt of {prompt_tokens} tokens takes "
            f"{prompt_tokens - 1}, one for each token but the first"
        )
    ids = np.frombuffer(targets.token_ids, dtype="<i4")
    if ids.size > MAX_TOPK * prompt_tokens:
        raise InvalidRequest(
            f"target_prompt_logprobs has {ids.size} cells; at most {MAX_TOPK} for each prompt token"
        )
    bad = np.flatnonzero((ids < -1) | (ids >= vocab_size))
    if bad.size:
        raise InvalidRequest(
            f"target_prompt_logprobs names token {ids[bad[0]]}; token ids are 0 to {vocab_size - 1}, "
            "and -1 asks for nothing"
        )
    if not (ids >= 0).any():
        raise InvalidRequest("target_prompt_logprobs names no token; leave it out")


def _parameters(request: SampleRequest) -> list[tuple[bool, str]]:
    params = request.params
    return [
        (params.max_tokens >= 0, f"max_tokens is {params.max_tokens}; expected at least 0"),
        (
            math.isfinite(params.temperature) and params.temperature >= 0,
            f"temperature is {params.temperature}; expected a finite number from 0 (greedy) on",
        ),
        (
            params.top_k == -1 or params.top_k >= 1,
            f"top_k is {params.top_k}; expected -1 (all) or at least 1",
        ),
        (0 < params.top_p <= 1, f"top_p is {params.top_p}; expected above 0 and at most 1"),
        (all(params.stop_strings), "a stop string is empty; leave it out"),
    ]


def _stops(request: SampleRequest, vocab_size: int) -> list[tuple[bool, str]]:
    """A stop token that cannot be drawn never stops anything: the client has another tokenizer in mind."""
    bad = next((token for token in request.params.stop_tokens if not 0 <= token < vocab_size), None)
    return [(bad is None, f"stop token {bad} cannot be drawn; token ids are 0 to {vocab_size - 1}")]
