"""The head in one pass, chunk by chunk, against torch's log_softmax in float64, for any chunk."""

from __future__ import annotations

import pytest
import torch
from lilo_miles_backend.ranks.logprobs import Head, HeadPass
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
    hidden = torch.randn(N, H, generator=generator)
    targets = torch.randint(0, V, (N, width), generator=generator)
    slope = torch.randn(N, width, generator=generator)
    factors = _factors(generator) if adapted else None
    head = Head(weight_VH=weight, factors=factors, chunk_tokens=chunk_tokens)

    wide = hidden.double().requires_grad_()
    logits = wide @ weight.double().t()
    if factors is not None:
        a, b = factors.a.double().requires_grad_(), factors.b.double().requires_grad_()
        logits = logits + SCALE * (wide @ a.t() @ b.t())
    expected = logits.log_softmax(-1).gather(1, targets)
    expected.backward(slope.double())

    grad = torch.empty_like(hidden)
    logprobs = HeadPass(hidden, targets, head).backward(lambda rows, _: slope[rows], grad)

    assert ref.relative(logprobs, expected.detach()) <= 1e-5
    assert wide.grad is not None
    assert ref.relative(grad, wide.grad) <= 1e-5
    if factors is not None:
        assert a.grad is not None
        assert b.grad is not None
        assert ref.relative(factors.grad_a, a.grad) <= 1e-5
        assert ref.relative(factors.grad_b, b.grad) <= 1e-5


@pytest.mark.parametrize("chunk_tokens", [7, 1024])
def test_the_slope_is_asked_for_with_the_logprobs_that_are_given_back(chunk_tokens: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(V, H, generator=generator)
    hidden = torch.randn(N, H, generator=generator)
    targets = torch.randint(0, V, (N, 1), generator=generator)
    head = Head(weight_VH=weight, factors=None, chunk_tokens=chunk_tokens)
    kept = hidden.clone()
    asked: list[tuple[slice, torch.Tensor]] = []

    def slope(rows: slice, logprobs: torch.Tensor) -> torch.Tensor:
        asked.append((rows, logprobs.clone()))
        return logprobs  # of the loss sum(p^2) / 2

    work = HeadPass(hidden, targets, head)
    before = work.logprobs(keep=True)
    found = work.backward(slope, hidden)  # in place of the hidden states

    assert torch.equal(before, found)
    assert [rows.stop for rows, _ in asked][-1] == N
    assert torch.equal(torch.cat([values for _, values in asked]), found)
    wide = kept.double().requires_grad_()
    p = (wide @ weight.double().t()).log_softmax(-1).gather(1, targets)
    (p.square().sum() / 2).backward()
    assert wide.grad is not None
    assert ref.relative(hidden, wide.grad) <= 1e-5
