"""Logprobs chunk by chunk against torch's log_softmax in float64, for any chunk."""

from __future__ import annotations

import pytest
import torch
from lilo_miles_backend.ranks.logprobs import Head, target_logprobs
from lilo_miles_backend.ranks.lora import Factors

from tests.miles_backend import reference as ref

N, H, V, R, SCALE = 23, 12, 31, 3, 0.7


def _factors(generator: torch.Generator) -> Factors:
    a = torch.randn(R, H, generator=generator)
    b = torch.randn(V, R, generator=generator)
    return Factors(
        scale=SCALE,
        lora_rank=R,
        a=a,
        grad_a=torch.zeros_like(a),
        b=b,
        grad_b=torch.zeros_like(b),
    )


@pytest.mark.parametrize("chunk_tokens", [1, 7, 23, 1024])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("adapted", [True, False])
def test_values_and_gradients_do_not_depend_on_the_chunk(
    chunk_tokens: int, width: int, adapted: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(V, H, generator=generator)
    hidden = torch.randn(N, H, generator=generator).requires_grad_()
    targets = torch.randint(0, V, (N, width), generator=generator)
    slope = torch.randn(N, width, generator=generator)
    factors = _factors(generator) if adapted else None
    head = Head(weight_VH=weight, factors=factors, chunk_tokens=chunk_tokens)

    logprobs = target_logprobs(hidden, targets, head)
    logprobs.backward(slope)

    wide = hidden.detach().double().requires_grad_()
    logits = wide @ weight.double().t()
    if factors is not None:
        a, b = factors.a.double().requires_grad_(), factors.b.double().requires_grad_()
        logits = logits + SCALE * (wide @ a.t() @ b.t())
    expected = logits.log_softmax(-1).gather(1, targets)
    expected.backward(slope.double())
    assert ref.relative(logprobs.detach(), expected.detach()) <= 1e-5
    assert hidden.grad is not None
    assert wide.grad is not None
    assert ref.relative(hidden.grad, wide.grad) <= 1e-5
    if factors is not None:
        assert a.grad is not None
        assert b.grad is not None
        assert ref.relative(factors.grad_a, a.grad) <= 1e-5
        assert ref.relative(factors.grad_b, b.grad) <= 1e-5
