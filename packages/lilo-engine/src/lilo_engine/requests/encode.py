"""Result to body: passes and samples as protobuf (or JSON for clients that ask for it), the rest as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import assert_never

import numpy as np

from lilo_engine.operations.result import Loaded, ModelCreated, Passed, Result, Saved, Stepped
from lilo_engine.operations.tensor import Tensor
from lilo_engine.requests.proto import tinker_public_pb2 as pb
from lilo_engine.sampling.engine import (
    UNUSED_LOGPROB,
    AltTokens,
    SampledSequence,
    SampleResult,
    TargetScores,
    TopK,
)

JsonBody = Mapping[str, object]
"""The JSON body of a reply."""

RECORD = "ArrayRecord"
"""The type name of a pass's outputs; the SDK shows it and reads nothing else from it."""

_DTYPES = {"float32": pb.DTYPE_FLOAT32, "int64": pb.DTYPE_INT64, "int32": pb.DTYPE_INT32}


def result_json(result: Result) -> JsonBody:
    """The JSON body of a result. Its top level never has `error`, nor the type `try_again`."""
    match result:
        case ModelCreated(source=None):
            return {"type": "create_model", "model_id": result.model_id}
        case ModelCreated():
            return {"type": "load_weights", "model_id": result.model_id, "path": str(result.source)}
        case Passed():
            return _passed_json(result)
        case Stepped():
            return {"metrics": dict(result.metrics)}
        case Saved():
            return _saved_json(result)
        case Loaded():
            return {"type": "load_weights", "model_id": result.model_id, "path": str(result.ref)}
        case _:
            assert_never(result)


def passed_protobuf(result: Passed) -> bytes:
    """A pass as `ForwardBackwardOutput`, with one record for each run of equal trailing shapes."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type=RECORD, metrics=result.metrics)
    for run in _rectangular(result.logprobs):
        record = message.loss_fn_outputs.add(type_tag=RECORD, num_datums=len(run))
        record.fields["logprobs"].CopyFrom(_batched(run))
    return message.SerializeToString()


def sample_protobuf(result: SampleResult) -> bytes:
    """A sample as `SampleResponse`."""
    message = pb.SampleResponse(sequences=[_sequence(one) for one in result.sequences])
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = result.prompt_logprobs
    if result.topk_prompt is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk(result.topk_prompt))
    if result.target_scores is not None:
        message.target_prompt_logprobs.CopyFrom(_targets(result.target_scores))
    if result.alt_tokens is not None:
        message.prompt_alt_tokens.CopyFrom(_alternatives(result.alt_tokens))
    return message.SerializeToString()


def sample_json(result: SampleResult) -> JsonBody:
    """A sample for clients from before the binary form. NaN becomes null; what they did not know is left out."""
    prompt = result.prompt_logprobs
    return {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": one.stop_reason,
                "tokens": np.frombuffer(one.tokens, "<i4").tolist(),
                "logprobs": np.frombuffer(one.logprobs, "<f4").tolist(),
            }
            for one in result.sequences
        ],
        "prompt_logprobs": None
        if prompt is None
        else [None if x != x else x for x in np.frombuffer(prompt, "<f4").tolist()],
        "topk_prompt_logprobs": None
        if result.topk_prompt is None
        else _topk_json(result.topk_prompt),
    }


def _rectangular(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    for _, run in groupby(tensors, key=lambda tensor: (tensor.dtype, tensor.shape[1:])):
        yield list(run)


def _batched(run: Sequence[Tensor]) -> pb.BatchedTensor:
    offsets = np.zeros(len(run) + 1, dtype="<i8")
    np.cumsum([len(tensor.data) for tensor in run], out=offsets[1:])
    return pb.BatchedTensor(
        data=b"".join(tensor.data for tensor in run),
        offsets=offsets.tobytes(),
        dtype=_DTYPES[run[0].dtype],
        trailing_shape=run[0].shape[1:],
    )


def _sequence(one: SampledSequence) -> pb.SampledSequence:
    stopped = one.stop_reason == "stop"
    message = pb.SampledSequence(
        stop_reason=pb.STOP_REASON_STOP if stopped else pb.STOP_REASON_LENGTH,
        tokens=one.tokens,
        logprobs=one.logprobs,
    )
    if one.topk is not None:
        message.topk_sampled_logprobs.CopyFrom(_topk(one.topk))
    return message


def _topk(topk: TopK) -> pb.TopkLogprobs:
    return pb.TopkLogprobs(
        token_ids=topk.token_ids, logprobs=topk.logprobs, k=topk.k, length=topk.length
    )


def _topk_json(topk: TopK) -> list[list[tuple[int, float]] | None]:
    """Per position pairs of token and logprob; null where there is none."""
    shape = (topk.length, topk.k)
    ids = np.frombuffer(topk.token_ids, "<i4").reshape(shape).tolist()
    values = np.frombuffer(topk.logprobs, "<f4").reshape(shape).tolist()
    rows = [
        [pair for pair in zip(some, theirs, strict=True) if pair[1] > UNUSED_LOGPROB]
        for some, theirs in zip(ids, values, strict=True)
    ]
    return [row or None for row in rows]


def _targets(scores: TargetScores) -> pb.Tensor:
    layout = scores.layout
    message = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[layout.length, layout.width])
    if layout.crow is None or layout.col is None:
        message.dense = scores.logprobs
    else:
        message.sparse_csr.values = scores.logprobs
        message.sparse_csr.crow_indices = layout.crow
        message.sparse_csr.col_indices = layout.col
    return message


def _alternatives(drawn: AltTokens) -> pb.PromptAltTokens:
    shape = [drawn.length, drawn.k]
    ids = np.frombuffer(drawn.token_ids, "<i4").astype("<i8")
    return pb.PromptAltTokens(
        tokens=pb.Tensor(dtype=pb.DTYPE_INT64, shape=shape, dense=ids.tobytes()),
        logprobs=pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=shape, dense=drawn.logprobs),
    )


def _saved_json(result: Saved) -> JsonBody:
    if result.ref.kind == "external_weights":
        size_bytes = result.size_bytes
        return {
            "type": "save_weights_external",
            "path": str(result.ref),
            "size_bytes": size_bytes,
        }
    kind = "save_weights" if result.ref.kind == "weights" else "save_weights_for_sampler"
    if result.sampling_session_id is None:
        return {"type": kind, "path": str(result.ref)}
    return {"type": kind, "sampling_session_id": result.sampling_session_id}


def _passed_json(result: Passed) -> JsonBody:
    return {
        "loss_fn_output_type": RECORD,
        "loss_fn_outputs": [
            {
                "logprobs": {
                    "data": tensor.numpy().ravel().tolist(),
                    "dtype": "float32",
                    "shape": list(tensor.shape),
                }
            }
            for tensor in result.logprobs
        ],
        "metrics": dict(result.metrics),
    }
