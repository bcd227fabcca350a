"""Defaults of a sample request that depend on the model."""

from __future__ import annotations

import numpy as np
import pytest
from lilo_engine.errors import InvalidRequest
from lilo_engine.requests.decode_sample import fingerprint, sample_request
from lilo_engine.requests.wire_sampling import SampleBody
from lilo_engine.sampling.engine import SampleRequest


def decoded(
    params: dict[str, object], *, stop_strings: bool = True, **fields: object
) -> SampleRequest:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"tokens": [3]}]}
    wire = SampleBody.model_validate({"prompt": prompt, "sampling_params": params, **fields})
    return sample_request(
        wire, adapter=None, context=10, eos_tokens=(257,), stop_strings=stop_strings
    )


def test_without_a_word_on_stops_the_models_end_token_stops():
    assert decoded({}).params.stop_tokens == (257,)


def test_an_empty_list_stops_nothing_and_other_forms_are_kept_apart():
    assert decoded({"stop": []}).params.stop_tokens == ()
    assert decoded({"stop": [5, 6]}).params.stop_tokens == (5, 6)
    assert decoded({"stop": "x"}).params.stop_strings == ("x",)
    assert decoded({"stop": ["x", "y"]}).params.stop_strings == ("x", "y")


def test_without_max_tokens_prompt_and_sample_fill_the_context():
    assert decoded({}).params.max_tokens == 7
    assert decoded({"max_tokens": 3}).params.max_tokens == 3


def test_chunks_of_text_are_joined():
    assert np.frombuffer(decoded({}).prompt, "<i4").tolist() == [1, 2, 3]


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(InvalidRequest):
        decoded({"stop": "x"}, stop_strings=False)


@pytest.mark.parametrize(
    "target",
    [
        {"data": [1], "shape": [2]},
        {"data": [1], "shape": [2, 2]},
        {"data": [2**40], "shape": [1, 1]},
        {"data": [1], "shape": [2, 1], "sparse_crow_indices": [0], "sparse_col_indices": [0]},
        {"data": [1], "shape": [-1, -1]},
        {"data": [1], "shape": [1, 2**40]},
    ],
)
def test_targets_whose_numbers_do_not_fit_their_shape_are_refused(target):
    with pytest.raises(InvalidRequest):
        decoded({}, target_prompt_logprobs=target)


def test_fingerprints_tell_requests_apart():
    marks = {fingerprint(decoded({"seed": seed})) for seed in (1, 2)}
    assert len(marks) == 2
    assert fingerprint(decoded({"seed": 1})) in marks
