"""Rows: datums as the arrays that a pass computes on. Checked data in, numpy views out.

`lilo_engine.operations.validate_datums` has been asked before: a token id out of range would read out of bounds on a
device.

Shapes: n tokens, k targets per position (1 for all but cross_entropy).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy.typing as npt
from lilo_engine.operations.datum import Datum

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One datum, ready to be put into a microbatch."""

    tokens: Array
    """[n], int32."""
    targets: Array
    """[n, k], int64."""
    target_shape: tuple[int, ...]
    """As the client sent it, [n] or [n, k]; its logprobs go back in this shape."""
    inputs: Mapping[str, Array]
    """The loss's other inputs, float32 [n, k]."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.tokens.shape[0]


def make_row(datum: Datum) -> Row:
    """The arrays of one valid datum; no copy."""
    tensors = {name: tensor.numpy() for name, tensor in datum.loss_inputs.items()}
    targets = tensors.pop("target_tokens")
    length = datum.num_tokens
    return Row(
        tokens=datum.tokens.numpy(),
        targets=targets.reshape(length, -1),
        target_shape=targets.shape,
        inputs={name: values.reshape(length, -1) for name, values in tensors.items()},
    )
