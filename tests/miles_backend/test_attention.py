"""Attention over streams: every way to put it together, in float64, against torch's autograd through a dense mask."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from lilo_miles_backend.ranks.attention import Attention, PackedRows
from lilo_miles_backend.ranks.attention_plan import DenseCall, dense_rows, plan_calls
from lilo_miles_backend.ranks.collectives import ALONE, Axis
from lilo_miles_backend.ranks.kernels.attention_choice import (
    TOLERANCE,
    choose_attention,
    dense_error,
    packed_error,
)
from lilo_miles_backend.ranks.kernels.attention_kernel import AttentionKernels
from lilo_miles_backend.ranks.kernels.attention_merge import merge_
from lilo_miles_backend.ranks.kernels.attention_reference import (
    CpuAttention,
    PlainAttention,
    PlainPackedAttention,
)
from lilo_miles_backend.ranks.stream import Stream, pack

EXACT = 1e-12
"""max|d| / max|ref|, float64 on both sides: some hundred roundings of 1e-16."""
HEADS, GROUPS, SIZE = 4, 2, 8
CPU = torch.device("cpu")
PACKS = AttentionKernels(
    dense=CpuAttention(),
    packed=PlainPackedAttention(),
    merge=merge_,
    dense_from=12,
    description="short rows in packed calls, as on a GPU",
)
KERNELS = {"dense": choose_attention(CPU, torch.float64, SIZE), "packed": PACKS}
ROWS = {
    "one row": ([24], [24]),
    "neighbours of one length": ([8, 8, 8, 16], [8, 8, 8, 16]),
    "odd lengths": ([17, 3, 9, 1, 2, 5, 16], [24, 8, 16, 8, 8, 8, 16]),
    "filled up": ([24, 8, 5, 0], [24, 8, 8, 24]),
}
"""Real and padded tokens; every padded length divides by 8, as four ranks need."""


@dataclass(frozen=True)
class Problem:
    """A whole stream, the same on every rank."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], padded: Sequence[int]) -> Problem:
        generator = torch.Generator().manual_seed(0)
        total = sum(padded)
        q, k, v, grad = (
            torch.randn(total, heads, SIZE, generator=generator, dtype=torch.float64)
            for heads in (HEADS, GROUPS, GROUPS, HEADS)
        )
        return cls(q=q, k=k, v=v, grad=grad * _is_real(lengths, padded)[:, None, None])

    def right(self, lengths: Sequence[int], padded: Sequence[int]) -> list[torch.Tensor]:
        """Output and gradients by a mask over the whole stream; what no one reads is zero."""
        q, k, v = (x.clone().requires_grad_() for x in (self.q, self.k, self.v))
        row = torch.repeat_interleave(torch.arange(len(padded)), torch.tensor(padded))
        place = torch.arange(len(row))
        seen = (row[:, None] == row[None]) & (place[:, None] >= place[None])
        wide = [x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v)]
        scores = torch.einsum("qhd,khd->hqk", q, wide[0]) / math.sqrt(SIZE)
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, wide[1])
        grads = torch.autograd.grad(out, (q, k, v), self.grad)
        return [out.detach() * _is_real(lengths, padded)[:, None, None], *grads]


def _is_real(lengths: Sequence[int], padded: Sequence[int]) -> torch.Tensor:
    return torch.cat(
        [torch.arange(size) < length for length, size in zip(lengths, padded, strict=True)]
    )


def _attend(
    attention: Attention, problem: Problem, stream: Stream, rows: PackedRows
) -> list[torch.Tensor]:
    """Output and gradients of one rank's tokens."""
    places = torch.from_numpy(stream.places)
    q, k, v, grad = (x[places] for x in (problem.q, problem.k, problem.v, problem.grad))
    scale = 1 / math.sqrt(SIZE)
    attended = attention.forward(q, attention.keys(k, v), rows, scale)
    grads = attention.backward(grad, q, attention.keys(k, v), attended, rows, scale)
    return [attended.out * torch.from_numpy(stream.is_real)[:, None, None], *grads]


def _worst(ours: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    pairs = zip(ours, right, strict=True)
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_one_rank_has_the_numbers_of_a_mask_over_the_whole_stream(kernels: str, rows: str) -> None:
    lengths, padded = ROWS[rows]
    problem, stream = Problem.of(lengths, padded), pack(lengths, padded, 0, 1)
    ours = _attend(Attention(KERNELS[kernels]), problem, stream, PackedRows.of(stream, CPU))
    assert _worst(ours, problem.right(lengths, padded)) <= EXACT
