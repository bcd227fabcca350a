"""Validate: whether an operation could run at all, told before it can touch a device. Pure.

The engine asks at submission; an operation that fails here becomes a failed future that uses up its number.
`validate_datums` holds what concerns the arrays.
"""

from __future__ import annotations

import math
from difflib import get_close_matches
from typing import TYPE_CHECKING, assert_never

from lilo_engine.errors import InvalidRequest
from lilo_engine.operations.lora_rules import honoured
from lilo_engine.operations.losses import LOSSES, Loss
from lilo_engine.operations.operation import (
    AdamParams,
    CreateModel,
    ForwardBackward,
    LoadState,
    Operation,
    OptimStep,
    Refused,
    SaveSampler,
    SaveState,
)
from lilo_engine.operations.reference import check_name
from lilo_engine.operations.validate_datums import check_datums

if TYPE_CHECKING:
    from lilo_definitions import Definition


def check(operation: Operation, definition: Definition) -> None:
    """Return if the operation could run.

    Raises:
        LiloError: why not, with the value and what was expected; for a `Refused` the error it carries.
    """
    match operation:
        case ForwardBackward():
            _check_loss(operation)
            check_datums(operation.datums, operation.loss, definition)
        case OptimStep():
            _check_adam(operation.params)
        case SaveState() | SaveSampler():
            check_name(operation.name)
        case LoadState():
            _check_source(operation.source.kind, str(operation.source))
        case Refused():
            raise operation.error
        case _:
            assert_never(operation)


def check_model(request: CreateModel, definition: Definition) -> None:
    """Return if the model could be made.

    Raises:
        InvalidRequest: base model, lora_rank, alpha, flags or source are not possible here.
    """
    if request.base_model != definition.model.name:
        raise InvalidRequest(
            f"base model {request.base_model!r} is not served here; this server trains "
            f"{definition.model.name!r}"
        )
    honoured(request.lora, definition)
    if request.source is not None:
        _check_source(request.source.kind, str(request.source))


def check_seq_id(seq_id: object) -> None:
    """Return if it can be the number of an operation.

    Raises:
        InvalidRequest: it is no integer from 1 on.
    """
    if isinstance(seq_id, bool) or not isinstance(seq_id, int) or seq_id < 1:
        raise InvalidRequest(f"seq_id {seq_id!r} is not possible; operations are numbered from 1")


def _check_loss(operation: ForwardBackward) -> None:
    loss = LOSSES.get(operation.loss)
    if loss is None:
        near = get_close_matches(operation.loss, LOSSES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidRequest(
            f"loss {operation.loss!r} is not known; there are {', '.join(LOSSES)}{hint}"
        )
    for key, value in operation.loss_config.items():
        _check_setting(operation.loss, loss, key, value)
    low = operation.loss_config.get("clip_low_threshold")
    high = operation.loss_config.get("clip_high_threshold")
    if isinstance(low, float | int) and isinstance(high, float | int) and low > high:
        raise InvalidRequest(
            f"clip_low_threshold {low} is above clip_high_threshold {high}; "
            "they bound the ratio, as 0.8 and 1.2"
        )


def _check_setting(name: str, loss: Loss, key: str, value: float | str) -> None:
    if key not in loss.config:
        known = ", ".join(loss.config) or "none"
        raise InvalidRequest(f"loss {name!r} has no setting {key!r}; settings it takes: {known}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(f"setting {key!r} of loss {name!r} is {value!r}; give a finite number")
    if value < 0:
        raise InvalidRequest(f"setting {key!r} of loss {name!r} is {value}; it cannot be negative")


def _check_adam(params: AdamParams) -> None:
    for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
        value = getattr(params, name)
        if not math.isfinite(value) or value < 0:
            raise InvalidRequest(f"{name} is {value}; give a finite number from 0 on")
    for name in ("beta1", "beta2"):
        value = getattr(params, name)
        if not 0 <= value < 1:
            raise InvalidRequest(f"{name} is {value}; it must be from 0 to below 1")


def _check_source(kind: str, path: str) -> None:
    if kind != "weights":
        raise InvalidRequest(
            f"{path} holds weights for sampling, without optimizer; training goes on from a "
            "path made by save_state, as tinker://RUN/weights/NAME"
        )
