"""Binary bodies against the SDK's own messages and conversions, which were generated independently of ours."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lilo_engine.errors import InvalidRequest
from lilo_engine.operations.fingerprint import fingerprint
from lilo_engine.operations.result import Passed
from lilo_engine.operations.tensor import Tensor
from lilo_engine.requests import decode, encode, wire_protobuf
from lilo_engine.requests.body import Body
from lilo_engine.requests.proto import tinker_public_pb2 as our_pb
from lilo_engine.sampling.engine import SampledSequence, SampleResult, TopK
from tinker import types
from tinker.proto import tinker_public_pb2 as sdk_pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)


def decoded(message: sdk_pb.ForwardBackwardRequest):
    return decode.forward_backward(Body(data=message.SerializeToString(), protobuf=True))


def one_input(name: str, tensor: types.TensorData, tokens: list[int]):
    data = [types.Datum(types.ModelInput.from_ints(tokens), {name: tensor})]
    body = types.ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    asked = types.ForwardBackwardRequest(body, model_id="m", seq_id=1)
    return decoded(forward_backward_request_to_proto(asked))


def test_our_messages_have_the_field_numbers_and_types_of_the_sdks():
    def table(descriptor) -> dict[int, tuple[object, ...]]:
        return {f.number: (f.type, f.is_repeated) for f in descriptor.fields}

    for name, ours in our_pb.DESCRIPTOR.message_types_by_name.items():
        names = {
            "TokenSpan": ["PromptProvenanceSpan", "SampledProvenanceSpan"],
        }.get(name, [name])
        for sdk_name in names:
            theirs = sdk_pb.DESCRIPTOR.message_types_by_name[sdk_name]
            assert table(ours) == table(theirs), name
            for nested, map_entry in ours.nested_types_by_name.items():
                assert table(map_entry) == table(theirs.nested_types_by_name[nested])


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20))
def test_tokens_come_through_unchanged(tokens):
    targets = types.TensorData(tokens, "int64", [len(tokens)])
    operation = one_input("target_tokens", targets, tokens)
    assert operation.datums[0].tokens.numpy().tolist() == tokens
    assert operation.datums[0].loss_inputs["target_tokens"].numpy().tolist() == tokens


def test_a_sparse_tensor_is_its_dense_self():
    dense = torch.zeros(40, 9, dtype=torch.int64)
    dense[3, 2], dense[3, 8], dense[39, 0] = 7, 8, 9
    sparse = types.TensorData.from_torch_sparse(dense)
    assert sparse.sparse_crow_indices is not None
    operation = one_input("target_tokens", sparse, [1] * 40)
    found = operation.datums[0].loss_inputs["target_tokens"]
    np.testing.assert_array_equal(found.numpy(), dense.numpy())
    assert found.dtype == "int64"


def test_every_dtype_of_the_wire_widens_to_one_form():
    values = [1.5, -2.0]
    half = torch.tensor(values, dtype=torch.bfloat16).view(torch.uint16).numpy().tobytes()
    message = sdk_pb.ForwardBackwardRequest(model_id="m", seq_id=1)
    inputs = message.data.add().loss_fn_inputs
    inputs["half"].dense, inputs["half"].dtype = half, sdk_pb.DTYPE_BFLOAT16
    inputs["short"].dense, inputs["short"].dtype = np.array([3, -4], "<i4").tobytes(), 3
    found = decoded(message).datums[0].loss_inputs
    assert (found["half"].dtype, found["half"].numpy().tolist()) == ("float32", values)
    assert (found["short"].dtype, found["short"].numpy().tolist()) == ("int64", [3, -4])


def test_the_second_form_of_the_loss_settings_wins():
    message = sdk_pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    message.loss_fn_config["clip_low_threshold"] = 0.5
    assert decoded(message).loss_config == {"clip_low_threshold": 0.5}
    message.loss_fn_config_v2["clip_low_threshold"].number = 0.8
    message.loss_fn_config_v2["word"].text = "x"
    assert decoded(message).loss_config == {"clip_low_threshold": 0.8, "word": "x"}


@given(st.binary(max_size=60))
def test_any_bytes_are_an_operation_or_refused(data):
    try:
        decode.forward_backward(Body(data=data, protobuf=True))
    except InvalidRequest:
        decode.identity_of(Body(data=data, protobuf=True))


@given(st.text(min_size=1, max_size=100), st.integers(1, 2**31 - 1))
def test_model_and_number_are_read_from_the_start_of_a_damaged_body(model_id, seq_id):
    message = sdk_pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id)
    data = message.SerializeToString() + b"\x1a\x7fbroken"
    with pytest.raises(InvalidRequest):
        wire_protobuf.parse(data)
    expected = (model_id, seq_id) if len(model_id.encode()) < 128 else None
    assert wire_protobuf.identity_of(data) == expected


def long_message() -> sdk_pb.ForwardBackwardRequest:
    """8 MB: a float and an integer for each of 700,000 tokens."""
    message = sdk_pb.ForwardBackwardRequest(model_id="m", seq_id=7, loss_fn="cross_entropy")
    inputs = message.data.add().loss_fn_inputs
    inputs["target_tokens"].dense = np.zeros(700_000, "<i8").tobytes()
    inputs["target_tokens"].dtype = sdk_pb.DTYPE_INT64
    inputs["weights"].dense = np.zeros(700_000, "<f4").tobytes()
    inputs["weights"].dtype = sdk_pb.DTYPE_FLOAT32
    return message


def test_a_body_is_let_go_of_before_its_tensors_are_made():
    body = Body(data=long_message().SerializeToString(), protobuf=True)
    size_bytes = len(body.data)
    tracemalloc.start()
    try:
        operation = decode.forward_backward(body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The body itself was there before. What the parser keeps is not Python's; of each tensor there is one copy.
    assert peak_bytes < 1.1 * size_bytes
    assert len(body.data) < 300
    assert operation.datums[0].loss_inputs["target_tokens"].shape == (700_000,)


def test_a_long_body_that_is_refused_still_names_its_model_and_number():
    message = long_message()
    message.data[0].loss_fn_inputs["weights"].shape.append(3)
    body = Body(data=message.SerializeToString(), protobuf=True)
    with pytest.raises(InvalidRequest, match=r"shape \[3\] does not hold the 700000 values"):
        decode.forward_backward(body)
    assert decode.identity_of(body) == ("m", 7)


def test_json_and_binary_forms_of_one_pass_have_one_fingerprint():
    targets = types.TensorData([2, 3], "int64", [2])
    binary = one_input("target_tokens", targets, [1, 2])
    body = b"""{"model_id": "m", "seq_id": 1, "forward_backward_input": {"loss_fn": "cross_entropy",
      "data": [{"model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
      "loss_fn_inputs": {"target_tokens": {"data": [2, 3], "dtype": "int64"}}}]}}"""
    text = decode.forward_backward(Body(data=body, protobuf=False))
    assert fingerprint(text) == fingerprint(binary)


def test_outputs_of_ragged_shapes_come_back_one_by_one():
    arrays = [
        np.full(shape, i, "<f4") for i, shape in enumerate([(3,), (5,), (2, 4), (2, 4), (1,)])
    ]
    passed = Passed(
        logprobs=tuple(Tensor.of(array, "float32") for array in arrays),
        metrics={"loss:sum": 1.25, "x:mean": float("nan")},
    )
    found = deserialize_forward_backward_output(encode.passed_protobuf(passed))
    assert len(found.loss_fn_outputs) == len(arrays)
    for output, array in zip(found.loss_fn_outputs, arrays, strict=True):
        np.testing.assert_array_equal(output["logprobs"].to_numpy(), array)
    assert found.metrics["loss:sum"] == 1.25


def test_samples_come_back_with_their_logprobs_and_top_k():
    tokens, logprobs = np.array([4, 5], "<i4"), np.array([-0.5, -1.5], "<f4")
    topk = TopK(
        k=2,
        length=2,
        token_ids=np.array([4, 9, 5, 0], "<i4").tobytes(),
        logprobs=np.array([-0.5, -2, -1.5, -99999], "<f4").tobytes(),
    )
    sequences = tuple(
        SampledSequence(
            tokens=tokens.tobytes(), logprobs=logprobs.tobytes(), stop_reason=reason, topk=topk
        )
        for reason in ("stop", "length")
    )
    prompt = np.array([np.nan, -3], "<f4")
    result = SampleResult(sequences=sequences, prompt_logprobs=prompt.tobytes(), topk_prompt=topk)
    found = deserialize_sample_response(encode.sample_protobuf(result))
    assert [sequence.stop_reason for sequence in found.sequences] == ["stop", "length"]
    assert found.sequences[0].tokens == [4, 5]
    np.testing.assert_array_equal(found.sequences[0].logprobs, logprobs)
    assert found.sequences[0].topk_logprobs is not None
    assert found.prompt_logprobs == [None, -3.0]
    assert found.topk_prompt_logprobs is not None
