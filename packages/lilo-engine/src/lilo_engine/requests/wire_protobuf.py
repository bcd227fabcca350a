"""Binary forward_backward bodies to operations. Runs in a worker thread for large bodies.

The messages are in `proto/tinker_public.proto`. Nothing here looks at values: ranges, lengths and losses are
checked where the definition is known.
"""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import DecodeError

from lilo_engine.errors import InvalidRequest
from lilo_engine.operations.datum import Datum
from lilo_engine.operations.operation import ForwardBackward, LossConfig, ModelId
from lilo_engine.operations.tensor import Tensor
from lilo_engine.requests import tensors
from lilo_engine.requests.proto import tinker_public_pb2 as pb

_DTYPES: dict[int, tensors.WireDType] = {
    pb.DTYPE_FLOAT32: "float32",
    pb.DTYPE_INT64: "int64",
    pb.DTYPE_INT32: "int32",
    pb.DTYPE_BFLOAT16: "bfloat16",
}


def parse(data: bytes) -> pb.ForwardBackwardRequest:
    """Parse the message.

    Raises:
        InvalidRequest: the bytes are no such message.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise InvalidRequest(
            f"the body is no ForwardBackwardRequest message of {len(data)} bytes ({error})"
        ) from error
    return message


def forward_backward(message: pb.ForwardBackwardRequest) -> ForwardBackward:
    """The operation that a message asks for.

    Raises:
        InvalidRequest: a tensor does not fit its bytes, or a chunk is not text.
    """
    return ForwardBackward(
        model_id=ModelId(message.model_id),
        seq_id=message.seq_id,
        datums=tuple(_datum(datum, i) for i, datum in enumerate(message.data)),
        loss=message.loss_fn,
        loss_config=_loss_config(message),
        forward_only=message.forward_only,
    )


def identity_of(data: bytes) -> tuple[str, int] | None:
    """Model id and number of a message that cannot be parsed as a whole, if they stand at its start.

    Serialisers write fields in the order of their numbers, so that 1 (model id) and 2 (number) come first and
    survive damage further on.
    """
    if len(data) < 2 or data[0] != 0x0A or data[1] & 0x80 or len(data) < 2 + data[1]:
        return None
    end = 2 + data[1]
    # A varint of an int32 above zero takes at most five bytes after its tag.
    for cut in range(end + 2, min(end + 7, len(data) + 1)):
        if data[end : end + 1] != b"\x10" or data[cut - 1] & 0x80:
            continue
        message = pb.ForwardBackwardRequest()
        try:
            message.ParseFromString(data[:cut])
        except DecodeError:
            return None
        return message.model_id, message.seq_id
    return None


def _loss_config(message: pb.ForwardBackwardRequest) -> LossConfig:
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    return {
        name: value.text if value.WhichOneof("value") == "text" else value.number
        for name, value in message.loss_fn_config_v2.items()
    }


def _datum(datum: pb.Datum, index: int) -> Datum:
    what = f"datum {index}"
    return Datum(
        tokens=tensors.token_ids(list(_text(datum.model_input, what)), f"{what}, model_input"),
        loss_inputs={
            name: _tensor(datum.loss_fn_inputs[name], f"{what}, {name}")
            for name in sorted(datum.loss_fn_inputs)
        },
    )


def _text(chunks: Iterable[pb.Chunk], what: str) -> Iterable[bytes]:
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise InvalidRequest(
                f"{what}: model_input has a chunk of kind {kind or 'unknown'}; this model takes encoded_text"
            )
        yield chunk.encoded_text.tokens


def _tensor(tensor: pb.Tensor, what: str) -> Tensor:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidRequest(
            f"{what}: dtype {tensor.dtype} is unknown; expected one of "
            + ", ".join(f"{number} ({name})" for number, name in _DTYPES.items())
        )
    if tensor.WhichOneof("encoding") == "sparse_csr":
        csr = tensor.sparse_csr
        return tensors.from_csr(
            csr.values,
            tensors.indices(csr.crow_indices, what),
            tensors.indices(csr.col_indices, what),
            dtype=dtype,
            shape=tensor.shape,
            what=what,
        )
    return tensors.from_dense(tensor.dense, dtype, tensor.shape, what)
