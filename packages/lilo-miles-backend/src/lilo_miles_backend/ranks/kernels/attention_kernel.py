"""Attention kernels: the primitives that attention over a stream is composed of, as protocols. No implementation.

`ranks/attention.py` is the one caller; `attention_choice.py` picks the implementations of a device. A backward takes the
output and the log-sum-exp of the *whole* attention of its queries, so that it serves a part of their keys as well: the
parts' gradients of the queries add up, and those of the keys are complete.

Shapes: B rows of one length, S queries of each, K keys of each, N query heads, G key/value heads (a divisor of N), D
head size; T and U queries and keys of packed rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


class Attended(NamedTuple):
    """What a forward returns."""

    out: torch.Tensor
    """Of the queries' shape and dtype."""
    lse: torch.Tensor
    """Natural logarithm of the softmax's denominator, scale and maximum included; float64 for float64 queries, float32
    for all others. [B, N, S], or [N, T] of packed rows."""


class AttentionGrads(NamedTuple):
    """What a backward returns, each of the shape of what it is the gradient of."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class DenseAttention(Protocol):
    """Softmax attention of rows of one length: Vaswani et al., arXiv:1706.03762."""

    name: str

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Attended:
        """Attend.

        Args:
            q: [B, S, N, D]; last axis contiguous, other strides free (of k and v too).
            k: [B, K, G, D].
            v: likewise.
            causal: query i sees keys 0 to i, and K is S; otherwise it sees all keys.
            scale: of the products, before the softmax.
        """
        ...

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attended: Attended,
        *,
        causal: bool,
        scale: float,
    ) -> AttentionGrads:
        """Gradients from that of the output; `attended` may be of more keys than these."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBounds:
    """Where packed rows begin and end, on the device and, where a kernel wants plain numbers, on the host."""

    queries: torch.Tensor
    """int32 [rows + 1]: ends of the rows' queries, from 0."""
    keys: torch.Tensor
    """int32 [rows + 1]; a row has at least as many keys as queries."""
    most_queries: int
    """Of the longest row."""
    most_keys: int


class PackedAttention(Protocol):
    """Causal attention of rows one after another; the last query of a row sees the row's last key."""

    name: str

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bounds: PackedBounds,
        *,
        scale: float,
    ) -> Attended:
        """Attend: q [T, N, D], k and v [U, G, D]."""
        ...

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attended: Attended,
        bounds: PackedBounds,
        *,
        scale: float,
    ) -> AttentionGrads:
        """Gradients from that of the output."""
        ...


class Merge(Protocol):
    """Attention over two disjoint sets of keys from the attention over each."""

    def __call__(self, whole: Attended, part: Attended) -> None:
        """Merge `part` into `whole`, [B, S, N, D] and [B, N, S] of any strides, in place."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernels:
    """Those of one device."""

    dense: DenseAttention
    packed: PackedAttention | None
    """None: every row is a dense call, with neighbours of its length."""
    merge: Merge
    dense_from: int
    """Rows of one length may be a dense call where rows * length^2 is at least the square of this; shorter ones share a
    packed call with their neighbours."""
    dense_at_once_from: int
    """Likewise: where they are one at first sight. In between they are one where so many rows of that length came together
    lately, since a kernel may prepare for each shape that it meets."""
    description: str
    """For the log: which kernels, and what was put aside and why."""

    @property
    def names(self) -> str:
        """Which kernels, without what was put aside: equal on ranks that compute alike."""
        return self.dense.name if self.packed is None else f"{self.dense.name}, {self.packed.name}"
