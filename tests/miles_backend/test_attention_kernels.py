"""Attention's kernels: those of a GPU as this torch has them, the plain formulas, and the check that chooses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lilo_miles_backend.ranks.kernels import attention_reference
from lilo_miles_backend.ranks.kernels.attention_choice import (
    TOLERANCE,
    Case,
    Choice,
    dense_error,
    packed_error,
)
from lilo_miles_backend.ranks.kernels.attention_cudnn import CudnnAttention
from lilo_miles_backend.ranks.kernels.attention_fa4 import Fa4Attention
from lilo_miles_backend.ranks.kernels.attention_flash import FlashAttention, FlashPackedAttention
from lilo_miles_backend.ranks.kernels.attention_kernel import (
    Attended,
    DenseAttention,
    PackedBounds,
)
from lilo_miles_backend.ranks.kernels.attention_reference import (
    CpuAttention,
    PlainAttention,
    PlainPackedAttention,
)

from tests.miles_backend import reference as ref

EXACT = 1e-12
"""max|d| / max|ref|, float64 on both sides."""
HEADS, GROUPS, SIZE = 4, 2, 8
CPU = torch.device("cpu")


def test_a_wrong_kernel_is_seen_by_the_check_at_start() -> None:
    class Shifted(CpuAttention):
        """Forgets the mask."""

        def forward(self, q: Any, k: Any, v: Any, *, causal: bool, scale: float) -> Attended:
            return super().forward(q, k, v, causal=False, scale=scale)

    class Scaled(PlainPackedAttention):
        """Gets its scale wrong."""

        def forward(
            self, q: Any, k: Any, v: Any, bounds: PackedBounds, *, scale: float
        ) -> Attended:
            return super().forward(q, k, v, bounds, scale=scale * 1.1)

    bf16 = torch.bfloat16
    assert dense_error(CpuAttention(), Case(CPU, bf16, 64, 2)) <= TOLERANCE / 2
    assert packed_error(PlainPackedAttention(), Case(CPU, bf16, 64, 2)) <= TOLERANCE / 2
    assert dense_error(Shifted(), Case(CPU, bf16, 64, 2)) > TOLERANCE
    assert packed_error(Scaled(), Case(CPU, bf16, 64, 2)) > TOLERANCE


def test_kernels_that_raise_or_are_wrong_are_put_aside_with_the_reason() -> None:
    # What this build of torch cannot run on a CPU stands for what a card cannot run.
    choice = Choice()
    kernel = choice.first(
        (Fa4Attention, CudnnAttention, FlashAttention, CpuAttention),
        lambda one: dense_error(one, Case(CPU, torch.bfloat16, 64, 2)),
    )
    assert isinstance(kernel, CpuAttention)
    assert [note.split()[0] for note in choice.notes] == ["cuDNN", "FA2"]


def test_plain_formulas_are_those_of_torch_and_their_gradients_those_of_autograd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_reference, "QUERIES_AT_ONCE", 3)
    q, k, v, grad = (
        torch.randn(2, length, heads, SIZE, dtype=torch.float64)
        for length, heads in ((7, HEADS), (9, GROUPS), (9, GROUPS), (7, HEADS))
    )
    for one in (q, k, v):
        one.requires_grad_()
    for causal in (False, True):
        mask = torch.ones(7, 9, dtype=torch.bool).tril(2 if causal else 9)
        first = (x.transpose(1, 2) for x in (q, k, v))
        right = torch.nn.functional.scaled_dot_product_attention(
            *first, attn_mask=mask, scale=0.3, enable_gqa=True
        ).transpose(1, 2)
        right_grads = torch.autograd.grad(right, (q, k, v), grad)
        right = right.detach()
        with torch.no_grad():
            ours = PlainAttention().forward(q, k, v, causal=causal, scale=0.3)
            grads = PlainAttention().backward(grad, q, k, v, ours, causal=causal, scale=0.3)
        for one, other in zip((ours.out, *grads), (right, *right_grads), strict=True):
            assert ref.relative(one, other) <= EXACT


@pytest.mark.parametrize("kernel", [FlashAttention(), CudnnAttention()])
def test_this_torch_has_the_gpu_ops_as_they_are_called_and_leaves_heads_where_a_merge_wants_them(
    kernel: DenseAttention,
) -> None:
    # The meta device checks arguments and gives shapes and strides; numbers are checked on a GPU.
    def empty(tokens: int, heads: int) -> torch.Tensor:
        return torch.empty(2, tokens, heads, 64, dtype=torch.bfloat16, device="meta")

    for causal, queries, keys in ((True, 64, 64), (False, 32, 64)):
        q, (k, v) = empty(queries, 4), empty(keys, 4).chunk(2, 2)
        attended = kernel.forward(q, k, v, causal=causal, scale=0.1)
        grads = kernel.backward(q, q, k, v, attended, causal=causal, scale=0.1)
        assert attended.out.stride() == q.stride()
        assert attended.lse.shape == (2, 4, queries)
        assert [one.shape for one in grads] == [q.shape, k.shape, v.shape]


def test_this_torch_has_the_packed_gpu_op_as_it_is_called() -> None:
    q = torch.empty(64, 4, 64, dtype=torch.bfloat16, device="meta")
    k, v = torch.empty(80, 4, 64, dtype=torch.bfloat16, device="meta").chunk(2, 1)
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    bounds = PackedBounds(queries=ends, keys=ends, most_queries=40, most_keys=50)
    attended = FlashPackedAttention().forward(q, k, v, bounds, scale=0.1)
    grads = FlashPackedAttention().backward(q, q, k, v, attended, bounds, scale=0.1)
    assert attended.lse.shape == (4, 64)
    assert [one.shape for one in grads] == [q.shape, k.shape, v.shape]
