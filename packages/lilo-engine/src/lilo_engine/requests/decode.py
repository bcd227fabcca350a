"""Wire to operation, one function per verb; JSON and protobuf forms of one request give equal operations.

Pure: what needs the definition or the records is passed in. The wire's `rank` becomes `lora_rank` here.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import cast

import numpy as np

from lilo_engine.errors import InvalidRequest, UnsupportedMedia
from lilo_engine.operations.datum import Datum
from lilo_engine.operations.ids import (
    EPHEMERAL_PREFIX,
    INFLIGHT_PREFIX,
    sampling_session_id_of,
    session_of,
)
from lilo_engine.operations.operation import (
    AdamParams,
    ForwardBackward,
    LoadState,
    LoraSpec,
    ModelId,
    OptimStep,
    SaveSampler,
    SaveState,
)
from lilo_engine.operations.reference import CheckpointRef, check_name
from lilo_engine.operations.tensor import Tensor
from lilo_engine.requests import tensors, wire_protobuf
from lilo_engine.requests.body import Body, Wire, parse_json
from lilo_engine.requests.wire_json import (
    LoadWeightsBody,
    LoraConfigBody,
    SaveExternalBody,
    SaveForSamplerBody,
    SaveWeightsBody,
    UserMetadata,
)
from lilo_engine.requests.wire_training import (
    DatumBody,
    ForwardBackwardBody,
    ModelInputBody,
    OptimStepBody,
    TensorBody,
)


def identity_of(body: Body) -> tuple[ModelId, int] | None:
    """Model id and number of a body that was refused, where they can still be read."""
    if body.protobuf:
        found = wire_protobuf.identity_of(body.data)
        return (ModelId(found[0]), found[1]) if found else None
    try:
        parsed: object = json.loads(body.data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, dict):
        return None
    fields = cast("dict[str, object]", parsed)
    model_id, seq_id = fields.get("model_id"), fields.get("seq_id")
    # No model has an id outside ASCII, and half a surrogate pair, which JSON can spell, fits no database.
    if not isinstance(model_id, str) or not model_id.isascii():
        return None
    if type(seq_id) is int and abs(seq_id) < 2**31:
        return ModelId(model_id), seq_id
    return None


def forward_backward(body: Body, *, forward_only: bool = False) -> ForwardBackward:
    """A pass. `forward_only` is set by the older `/forward` call; protobuf carries it inside.

    Raises:
        InvalidRequest: the body cannot be read; the message names the datum and tensor.
    """
    if body.protobuf:
        return wire_protobuf.forward_backward(wire_protobuf.parse(body.take()))
    wire = _json(body, ForwardBackwardBody)
    asked = wire.forward_backward_input
    return ForwardBackward(
        model_id=ModelId(wire.model_id),
        seq_id=wire.seq_id,
        datums=tuple(_datum(datum, i) for i, datum in enumerate(asked.data)),
        loss=asked.loss_fn,
        loss_config=dict(asked.loss_fn_config or {}),
        forward_only=forward_only,
    )


def optim_step(body: Body) -> OptimStep:
    """An optimizer step.

    Raises:
        InvalidRequest: the body cannot be read, or asks for another optimizer than AdamW.
    """
    wire = _json(body, OptimStepBody)
    asked = wire.adam_params
    check_optimizer(asked.type)
    return OptimStep(
        model_id=ModelId(wire.model_id),
        seq_id=wire.seq_id,
        params=AdamParams(
            learning_rate=asked.learning_rate,
            beta1=asked.beta1,
            beta2=asked.beta2,
            eps=asked.eps,
            weight_decay=asked.weight_decay,
            grad_clip_norm=asked.grad_clip_norm,
        ),
    )


def save_state(body: Body) -> SaveState:
    """A save of adapter and optimizer; without a name it is named after its number."""
    wire = _json(body, SaveWeightsBody)
    return SaveState(
        model_id=ModelId(wire.model_id),
        seq_id=wire.seq_id,
        name=check_name(wire.path if wire.path is not None else f"{wire.seq_id:06d}"),
        overwrite=wire.overwrite,
        ttl_s=wire.ttl_seconds,
        user_metadata=user_metadata(wire.user_metadata),
    )


def save_sampler(body: Body) -> SaveSampler:
    """A save for sampling; without a path it opens the sampling session that its number names."""
    wire = _json(body, SaveForSamplerBody)
    model_id = ModelId(wire.model_id)
    session: str | None = None
    if wire.path is None:
        if wire.sampling_session_seq_id is None:
            raise InvalidRequest(
                "save_weights_for_sampler needs a path, or a sampling_session_seq_id to open a session"
            )
        prefix = INFLIGHT_PREFIX if wire.kind == "inflight" else EPHEMERAL_PREFIX
        name = f"{prefix}{wire.seq_id:08d}"
        session = sampling_session_id_of(session_of(model_id), wire.sampling_session_seq_id)
    else:
        name = check_name(wire.path)
        if name.startswith((EPHEMERAL_PREFIX, INFLIGHT_PREFIX)):
            raise InvalidRequest(
                f"checkpoint name {name!r} starts with a prefix the server uses itself "
                f"({EPHEMERAL_PREFIX}, {INFLIGHT_PREFIX}); choose another"
            )
    return SaveSampler(
        model_id=model_id,
        seq_id=wire.seq_id,
        name=name,
        sampling_session_id=session,
        ttl_s=wire.ttl_seconds,
        user_metadata=user_metadata(wire.user_metadata),
    )


def save_external(body: Body) -> SaveSampler:
    """A save for download: a PEFT folder."""
    wire = _json(body, SaveExternalBody)
    if wire.age_encryption_recipients:
        raise InvalidRequest(
            "age_encryption_recipients: this server writes files unencrypted; leave it out, download over TLS and "
            "encrypt the files then"
        )
    return SaveSampler(
        model_id=ModelId(wire.model_id),
        seq_id=wire.seq_id,
        name=check_name(wire.path),
        ttl_s=wire.ttl_seconds,
        external=True,
    )


def load_state(body: Body) -> LoadState:
    """A load into a resident model."""
    wire = _json(body, LoadWeightsBody)
    if wire.model_id is None or wire.seq_id is None:
        raise InvalidRequest(
            "load_weights needs model_id and seq_id, or session_id and model_seq_id for a new model"
        )
    if wire.optimizer_config is not None:
        check_optimizer(wire.optimizer_config.type)
    return LoadState(
        model_id=ModelId(wire.model_id),
        seq_id=wire.seq_id,
        source=training_ref(wire.path),
        with_optimizer=wire.optimizer,
    )


def training_ref(path: str) -> CheckpointRef:
    """The training checkpoint a path names.

    Raises:
        InvalidRequest: it is no path, or names a PEFT folder, which holds no optimizer to train on.
    """
    ref = CheckpointRef.parse(path)
    if ref.kind != "weights":
        raise InvalidRequest(
            f"{path!r} names weights without an optimizer; training goes on from .../weights/NAME, which save_state makes"
        )
    return ref


def lora_spec(wire: LoraConfigBody, alpha: float) -> LoraSpec:
    """The adapter a client asks for, with the definition's alpha."""
    return LoraSpec(
        lora_rank=wire.rank,
        alpha=alpha,
        seed=wire.seed,
        train_attn=wire.train_attn,
        train_mlp=wire.train_mlp,
        train_unembed=wire.train_unembed,
    )


def check_optimizer(name: str) -> None:
    """Refuse an optimizer that is not AdamW.

    Raises:
        InvalidRequest: naming the one there is.
    """
    if name != "adamw":
        raise InvalidRequest(f"optimizer {name!r} is not offered; there is adamw")


def user_metadata(wire: UserMetadata | None) -> Mapping[str, str]:
    """A client's own notes as text: other JSON values are kept as their JSON."""
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in (wire or {}).items()
    }


def prompt_tokens(wire: ModelInputBody, what: str) -> bytes:
    """JSON chunks as int32 little-endian token ids.

    Raises:
        InvalidRequest: a chunk is not text, or an id does not fit 32 bits.
    """
    ids: list[int] = []
    for chunk in wire.chunks:
        if chunk.type != "encoded_text":
            raise InvalidRequest(
                f"{what} has a chunk of type {chunk.type!r}; this model takes encoded_text"
            )
        ids.extend(chunk.tokens)
    try:
        return np.array(ids, dtype="<i4").tobytes()
    except OverflowError as error:
        raise InvalidRequest(f"{what} has a token id that does not fit 32 bits") from error


def _json(body: Body, wire: type[Wire]) -> Wire:
    if body.protobuf:
        raise UnsupportedMedia("this call takes application/json; only forward_backward is binary")
    return parse_json(body.data, wire)


def _datum(wire: DatumBody, index: int) -> Datum:
    what = f"datum {index}"
    data = prompt_tokens(wire.model_input, f"{what}, model_input")
    return Datum(
        tokens=tensors.token_ids([data], what),
        loss_inputs={
            name: _tensor(wire.loss_fn_inputs[name], f"{what}, {name}")
            for name in sorted(wire.loss_fn_inputs)
        },
    )


def _tensor(wire: TensorBody, what: str) -> Tensor:
    shape, data = wire.shape or [], b""
    with _fits(what, wire.dtype):
        data = np.array(wire.data, dtype="<i8" if wire.dtype == "int64" else "<f4").tobytes()
    if wire.sparse_crow_indices is None or wire.sparse_col_indices is None:
        return tensors.from_dense(data, wire.dtype, shape, what)
    with _fits(f"{what}, sparse indices", "int64"):
        crow = np.array(wire.sparse_crow_indices, dtype="<i8")
        col = np.array(wire.sparse_col_indices, dtype="<i8")
        return tensors.from_csr(data, crow, col, dtype=wire.dtype, shape=shape, what=what)


@contextmanager
def _fits(what: str, dtype: str) -> Generator[None]:
    """Numbers that a type does not hold are refused.

    Raises:
        InvalidRequest: naming the type.
    """
    try:
        # Else a number beyond float32 would become infinite, with a warning on the server's console.
        with np.errstate(over="raise"):
            yield
    except (OverflowError, ValueError, FloatingPointError) as error:
        raise InvalidRequest(f"{what}: the numbers do not fit {dtype} ({error})") from error
