"""Validate datums: lengths, dtypes, shapes, token ids and finite values of one forward_backward. Pure.

Shapes are checked datum by datum in plain Python; values are checked over all datums at once in numpy, because a
request can hold thousands of short datums. Only when something is wrong is the datum looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lilo_engine.errors import InvalidRequest
from lilo_engine.operations.datum import Datum
from lilo_engine.operations.losses import CLIP_INPUTS, LOSSES, Loss
from lilo_engine.operations.tensor import Tensor

if TYPE_CHECKING:
    from lilo_definitions import Definition


def check_datums(datums: Sequence[Datum], loss: str, definition: Definition) -> None:
    """Return if a known loss could be computed on the datums.

    Raises:
        InvalidRequest: naming the datum by its index, the value, and what was expected.
    """
    if not datums:
        raise InvalidRequest("the request has no datums; send at least one")
    for index, datum in enumerate(datums):
        _check_tokens_shape(index, datum, definition)
        _check_inputs(index, datum, loss, LOSSES[loss])
    vocab_size = definition.model.vocab_size
    _check_ids("tokens", [datum.tokens for datum in datums], vocab_size)
    _check_ids(
        "target_tokens", [datum.loss_inputs["target_tokens"] for datum in datums], vocab_size
    )
    for name in LOSSES[loss].inputs:
        _check_finite(name, [datum.loss_inputs.get(name) for datum in datums])
    if loss in ("ppo", "cispo", "gspo"):
        _check_thresholds(datums)


def _check_tokens_shape(index: int, datum: Datum, definition: Definition) -> None:
    tokens = datum.tokens
    if tokens.dtype != "int32" or len(tokens.shape) != 1:
        raise InvalidRequest(
            f"datum {index}: the model input is {_shown(tokens)}; expected int32 [n]"
        )
    if datum.num_tokens == 0:
        raise InvalidRequest(f"datum {index} is empty; a model input has at least one token")
    if datum.num_tokens > definition.context:
        raise InvalidRequest(
            f"datum {index} has {datum.num_tokens} tokens, over the context of {definition.context} "
            f"of {definition.name!r}; shorten it or split it"
        )


def _check_inputs(index: int, datum: Datum, name: str, loss: Loss) -> None:
    targets = datum.loss_inputs.get("target_tokens")
    if targets is None:
        raise InvalidRequest(f"datum {index}: loss {name!r} needs the input 'target_tokens'")
    _check_targets(index, datum, targets, name, loss)
    for required in loss.required:
        if required not in datum.loss_inputs:
            raise InvalidRequest(f"datum {index}: loss {name!r} needs the input {required!r}")
    for key, tensor in datum.loss_inputs.items():
        if key == "target_tokens":
            continue
        if key not in loss.inputs:
            known = ", ".join(("target_tokens", *loss.inputs))
            raise InvalidRequest(
                f"datum {index}: loss {name!r} has no input {key!r}; inputs it takes: {known}"
            )
        if tensor.dtype != "float32":
            raise InvalidRequest(f"datum {index}: {key!r} is {tensor.dtype}; expected float32")
        if tensor.shape != targets.shape:
            raise InvalidRequest(
                f"datum {index}: {key!r} has the shape {list(tensor.shape)}, the targets have "
                f"{list(targets.shape)}; they must be equal"
            )


def _check_targets(index: int, datum: Datum, targets: Tensor, name: str, loss: Loss) -> None:
    if targets.dtype != "int64":
        raise InvalidRequest(f"datum {index}: 'target_tokens' is {targets.dtype}; expected int64")
    shape = targets.shape
    axes = (1, 2) if loss.many_targets else (1,)
    if len(shape) not in axes or shape[0] != datum.num_tokens or 0 in shape:
        form = "[n] or [n, k]" if loss.many_targets else "[n]"
        raise InvalidRequest(
            f"datum {index}: 'target_tokens' has the shape {list(shape)} for {datum.num_tokens} "
            f"tokens; loss {name!r} takes {form} with one entry per token"
        )


def _check_ids(name: str, tensors: list[Tensor], vocab_size: int) -> None:
    ids = np.frombuffer(
        b"".join([tensor.data for tensor in tensors]), dtype=tensors[0].numpy().dtype
    )
    if ids.min() >= 0 and ids.max() < vocab_size:
        return
    for index, tensor in enumerate(tensors):
        values = tensor.numpy().reshape(-1)
        bad = np.flatnonzero((values < 0) | (values >= vocab_size))
        if bad.size:
            raise InvalidRequest(
                f"datum {index}: {name!r} has the token id {values[bad[0]]} at position {bad[0]}; "
                f"ids are 0 to {vocab_size - 1}"
            )


def _check_finite(name: str, tensors: list[Tensor | None]) -> None:
    data = b"".join([tensor.data for tensor in tensors if tensor is not None])
    if np.isfinite(np.frombuffer(data, dtype="<f4")).all():
        return
    for index, tensor in enumerate(tensors):
        if tensor is None:
            continue
        values = tensor.numpy().reshape(-1)
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            raise InvalidRequest(
                f"datum {index}: {name!r} is {values[bad[0]]} at position {bad[0]}; "
                "all values must be finite"
            )


def _check_thresholds(datums: Sequence[Datum]) -> None:
    low_name, high_name = CLIP_INPUTS
    for index, datum in enumerate(datums):
        low, high = datum.loss_inputs.get(low_name), datum.loss_inputs.get(high_name)
        if low is None and high is None:
            continue
        if low is not None and low.numpy().min() < 0:
            raise InvalidRequest(f"datum {index}: {low_name!r} is negative somewhere")
        if low is not None and high is not None and (low.numpy() > high.numpy()).any():
            raise InvalidRequest(
                f"datum {index}: {low_name!r} is above {high_name!r} somewhere; they bound the ratio"
            )


def _shown(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
