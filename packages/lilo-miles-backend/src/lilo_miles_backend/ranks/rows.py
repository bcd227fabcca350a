"""Rows: datums as the arrays that a pass computes on. Checked data in, numpy views out.

The engine has checked them (`lilo_engine.operations.validate_datums`). `assert_checked` repeats only what would read
out of bounds on a device, or be left out of a sum without a word.

Shapes: n tokens, k targets per position (1 for all but cross_entropy).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from lilo_engine.operations.datum import Datum
from lilo_engine.operations.losses import LOSSES

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


def assert_checked(datums: Sequence[Datum], loss: str, *, vocab_size: int, context: int) -> None:
    """Fail if anything got past the engine's check; two looks at the ids of all datums together."""
    assert datums, "an item has datums"
    known = {"target_tokens", *LOSSES[loss].inputs}
    assert all(known.issuperset(datum.loss_inputs) for datum in datums), f"{loss} takes {known}"
    longest = max(datum.num_tokens for datum in datums)
    assert longest <= context, f"a datum of {longest} tokens is over the context of {context}"
    for tensors in (
        [datum.tokens for datum in datums],
        [datum.loss_inputs["target_tokens"] for datum in datums],
    ):
        ids = np.concatenate([tensor.numpy().reshape(-1) for tensor in tensors])
        assert ids.min() >= 0, f"token id {ids.min()}"
        assert ids.max() < vocab_size, f"token id {ids.max()} of a vocabulary of {vocab_size}"
