"""Datum: one client example: the tokens a model reads and what the loss wants at each position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lilo_engine.operations.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One sequence as the client sent it; position i of `tokens` predicts `target_tokens[i]`."""

    tokens: Tensor
    """int32, shape [n]."""

    loss_inputs: Mapping[str, Tensor]
    """By name: `target_tokens` int64 [n] or [n, k]; `weights`, `logprobs`, `advantages`, ... float32."""

    @property
    def num_tokens(self) -> int:
        """Length of the model input."""
        return self.tokens.shape[0]

    @property
    def num_bytes(self) -> int:
        """Size of all its arrays."""
        return len(self.tokens.data) + sum(len(each.data) for each in self.loss_inputs.values())
