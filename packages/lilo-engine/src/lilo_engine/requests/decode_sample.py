"""asample's body to a `SampleRequest`: defaults that depend on the model, and options that are not offered.

Prompt and parameters are checked by the sampling manager, which every way of sampling goes through.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from lilo_engine.errors import InvalidRequest
from lilo_engine.requests.decode import prompt_tokens
from lilo_engine.requests.tensors import csr_fits
from lilo_engine.requests.wire_sampling import SampleBody, SamplingParamsBody
from lilo_engine.requests.wire_training import TargetsBody
from lilo_engine.sampling.engine import CellLayout, PromptTargets, SampleRequest, SamplingParams

MAX_SAMPLES = 4096
"""Of one prompt; bounds what one request can queue."""
_COMPARED = tuple(
    field.name
    for field in fields(SampleRequest)
    if field.name not in ("request_id", "prompt", "params")
)
_COMPARED_PARAMS = tuple(field.name for field in fields(SamplingParams))
"""Numbers and texts, or tuples of them: their `repr` is the same in every process."""


def sample_request(
    wire: SampleBody,
    *,
    adapter: str | None,
    context: int,
    eos_tokens: Sequence[int],
    stop_strings: bool,
) -> SampleRequest:
    """The request that a body asks for; the manager gives it its id.

    Args:
        wire: The body.
        adapter: Name of the weights; None = the base model.
        context: Longest sequence in tokens: without `max_tokens`, prompt and sample together fill it.
        eos_tokens: What stops a sample when the body says nothing of stops.
        stop_strings: Whether the engine can stop on text.

    Raises:
        InvalidRequest: a chunk is not text, or a number does not fit.
    """
    if wire.num_samples > MAX_SAMPLES:
        raise InvalidRequest(
            f"num_samples is {wire.num_samples}; at most {MAX_SAMPLES} of one prompt"
        )
    prompt = prompt_tokens(wire.prompt, "the prompt")
    params = wire.sampling_params
    tokens, strings = _stops(params, eos_tokens)
    if strings and not stop_strings:
        raise InvalidRequest(
            "stop strings need a tokenizer, which this model has not; send token ids"
        )
    return SampleRequest(
        request_id="",
        prompt=prompt,
        num_samples=wire.num_samples,
        params=SamplingParams(
            max_tokens=params.max_tokens or max(1, context - len(prompt) // 4),
            temperature=params.temperature,
            top_k=params.top_k if params.top_k else -1,
            top_p=params.top_p,
            seed=params.seed,
            stop_tokens=tokens,
            stop_strings=strings,
        ),
        adapter=adapter,
        prompt_logprobs=bool(wire.prompt_logprobs),
        topk_prompt_logprobs=wire.topk_prompt_logprobs,
        topk_sample_logprobs=wire.topk_sample_logprobs,
        prompt_logprobs_last_n=wire.prompt_logprobs_last_n,
        prompt_alt_tokens_k=wire.prompt_alt_tokens_k,
        prompt_targets=None
        if wire.target_prompt_logprobs is None
        else prompt_targets(wire.target_prompt_logprobs),
    )


def fingerprint(request: SampleRequest) -> str:
    """What makes two submissions of one number the same request: everything but the id."""
    asked = [getattr(request, name) for name in _COMPARED]
    asked += [getattr(request.params, name) for name in _COMPARED_PARAMS]
    return hashlib.sha256(repr(asked).encode() + request.prompt).hexdigest()


def prompt_targets(wire: TargetsBody) -> PromptTargets:
    """Dense or sparse target ids as a list of cells, with the layout to answer in.

    Raises:
        InvalidRequest: numbers and shape do not fit each other.
    """
    what = "target_prompt_logprobs"
    try:
        ids = np.array(wire.data, dtype="<i4")
    except OverflowError as error:
        raise InvalidRequest(f"{what} has a token id that does not fit 32 bits") from error
    if len(wire.shape) != 2 or min(wire.shape) < 0 or max(wire.shape) >= 2**31:
        raise InvalidRequest(f"{what}: the shape is [len(prompt) - 1, K], got {wire.shape}")
    length, width = wire.shape
    if wire.sparse_crow_indices is None or wire.sparse_col_indices is None:
        if ids.size != length * width:
            raise InvalidRequest(
                f"{what}: shape {wire.shape} does not hold the {ids.size} ids sent"
            )
        rows = np.repeat(np.arange(length, dtype="<i4"), width)
        layout = CellLayout(length=length, width=width)
        return PromptTargets(layout=layout, rows=rows.tobytes(), token_ids=ids.tobytes())
    try:
        crow = np.array(wire.sparse_crow_indices, dtype="<i8")
        col = np.array(wire.sparse_col_indices, dtype="<i8")
    except OverflowError as error:
        raise InvalidRequest(f"{what}: an index does not fit 64 bits") from error
    if not csr_fits(crow, col, ids.size, length, width):
        raise InvalidRequest(
            f"{what}: the sparse indices do not describe {ids.size} cells of shape {wire.shape}"
        )
    rows = np.repeat(np.arange(length, dtype="<i4"), np.diff(crow))
    layout = CellLayout(length=length, width=width, crow=crow.tobytes(), col=col.tobytes())
    return PromptTargets(layout=layout, rows=rows.tobytes(), token_ids=ids.tobytes())


def _stops(
    wire: SamplingParamsBody, eos_tokens: Sequence[int]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    if wire.stop is None:
        return tuple(eos_tokens), ()
    if isinstance(wire.stop, str):
        return (), (wire.stop,)
    tokens = tuple(stop for stop in wire.stop if isinstance(stop, int))
    return tokens, tuple(stop for stop in wire.stop if isinstance(stop, str))
