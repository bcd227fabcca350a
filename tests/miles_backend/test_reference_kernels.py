"""The kernels in torch, which run on CPUs and which others are held to: against autograd of the plain formulas, float64."""

from __future__ import annotations

import pytest
import torch
from lilo_miles_backend.ranks.kernels.reference import REFERENCE
from lilo_miles_backend.ranks.lora import Factors, Segment
from torch.nn.functional import rms_norm, silu

from tests.miles_backend import reference as ref

EXACT = 1e-13
EPS = 1e-6
T = 11


def random(*size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64)


def close(ours: torch.Tensor, right: torch.Tensor) -> bool:
    return ref.relative(ours, right.detach()) <= EXACT


def test_rms_norm_and_its_gradient_are_torchs() -> None:
    x, weight, grad = random(T, 16), random(16, seed=1), random(T, 16, seed=2)
    wide = x.clone().requires_grad_()
    right = rms_norm(wide, (16,), weight, EPS)
    right.backward(grad)
    ours, inverse = REFERENCE.elementwise.rms_norm(x, weight, EPS)
    assert close(ours, right)
    assert wide.grad is not None
    assert close(REFERENCE.elementwise.rms_norm_backward(grad, x, inverse, weight), wide.grad)


def test_swiglu_and_its_gradient_are_those_of_the_formula() -> None:
    fused, grad = random(T, 24), random(T, 12, seed=1)
    wide = fused.clone().requires_grad_()
    right = silu(wide[:, :12]) * wide[:, 12:]
    right.backward(grad)
    assert close(REFERENCE.elementwise.swiglu(fused), right)
    assert wide.grad is not None
    assert close(REFERENCE.elementwise.swiglu_backward_(fused, grad), wide.grad)


@pytest.mark.parametrize("rotated", [8, 6])
@pytest.mark.parametrize("normed", [True, False])
def test_rotation_of_a_section_and_its_gradient_are_those_of_the_formula(
    rotated: int, normed: bool
) -> None:
    half, size = rotated // 2, 8
    weight = random(size, seed=1) if normed else None
    cos, sin, grad = random(T, half, seed=2), random(T, half, seed=3), random(T, 3, size, seed=4)
    section = random(T, 40)[:, 8:32].unflatten(1, (3, size))
    wide = section.clone().requires_grad_()
    x = wide if weight is None else rms_norm(wide, (size,), weight, EPS)
    a, b, c, s = x[..., :half], x[..., half:rotated], cos[:, None], sin[:, None]
    right = torch.cat([a * c - b * s, b * c + a * s, x[..., rotated:]], -1)
    right.backward(grad)
    ours = REFERENCE.elementwise.rotate(section, weight, EPS, cos, sin)
    assert ours.is_contiguous()
    assert close(ours, right)
    REFERENCE.elementwise.rotate_backward(grad, section, weight, EPS, cos, sin, section)
    assert wide.grad is not None
    assert close(section, wide.grad)


def _factors(inputs: int, parts: tuple[int, ...], rank: int, seed: int) -> Factors:
    a, b = random(len(parts) * rank, inputs, seed=seed), random(sum(parts), rank, seed=seed + 1)
    zeros = torch.zeros_like
    return Factors(scale=0.7, lora_rank=rank, a=a, b=b, grad_a=zeros(a), grad_b=zeros(b))


SEGMENTS = {
    "one": ((T,), (2,)),
    "three and tokens of none": ((3, 0, 6), (2, 3, 1)),
    "neighbours of one rank and length": ((3, 3, 3), (2, 2, 2)),
    "single tokens": ((1, 1, 1, 1), (3, 3, 3, 3)),
    "of one rank, of several lengths": ((4, 0, 1, 5), (2, 2, 2, 2)),
    "two ranks": ((2, 2, 1, 3), (2, 2, 3, 3)),
    "short, then a long one": ((2, 1, 90), (2, 2, 2)),
}
"""Lengths and lora_ranks."""


@pytest.mark.parametrize(("lengths", "ranks"), SEGMENTS.values(), ids=SEGMENTS)
def test_adapters_products_and_gradients_are_those_of_each_alone(
    lengths: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    parts, inputs, T = (5, 3, 4), 7, 2 + sum(lengths)
    adapters = [_factors(inputs, parts, rank, 10 * i) for i, rank in enumerate(ranks)]
    segments, start = list[Segment](), 0
    for factors, length in zip(adapters, lengths, strict=True):
        segments.append(Segment(factors=factors, tokens=slice(start, start + length)))
        start += length
    x, y, grad = random(T, inputs), random(T, 14, seed=1), random(T, 14, seed=2)
    ours, grad_x, base = y.clone(), random(T, inputs, seed=3), random(T, inputs, seed=3)
    lora, columns = REFERENCE.lora, sum(parts)
    products = lora.shrink(x, segments)
    lora.expand_(ours[:, :columns], products, segments, parts)
    lora.backward(grad[:, :columns], x, products, segments, parts, grad_x)
    right, right_grad = y.clone(), base
    for segment in segments:
        one, here = segment.factors, segment.tokens
        wide = x[here].clone().requires_grad_()
        a, b = one.a.clone().requires_grad_(), one.b.clone().requires_grad_()
        modules = zip(a.split(one.lora_rank), b.split(parts), strict=True)
        added = torch.cat([0.7 * wide @ left.t() @ up.t() for left, up in modules], 1)
        added.backward(grad[here, :columns])
        right[here, :columns] += added.detach()
        assert wide.grad is not None
        assert a.grad is not None
        assert b.grad is not None
        right_grad[here] += wide.grad
        if wide.shape[0]:
            assert close(one.grad_a, a.grad)
            assert close(one.grad_b, b.grad)
        else:
            assert not one.grad_a.any()
            assert not one.grad_b.any()
    assert close(ours, right)
    assert close(grad_x, right_grad)


def test_what_is_not_finite_of_a_segment_stays_in_it() -> None:
    parts, inputs = (5, 3), 7
    for lengths in ((3, 3, 3), (2, 3, 1)):
        adapters = [_factors(inputs, parts, 2, seed) for seed in (1, 3, 5)]
        tokens = [slice(sum(lengths[:i]), sum(lengths[: i + 1])) for i in range(3)]
        segments = [
            Segment(factors=one, tokens=here) for one, here in zip(adapters, tokens, strict=True)
        ]
        x, y, grad, grad_x = random(T, inputs), random(T, 8), random(T, 8), random(T, inputs)
        for tensor in (x, grad):
            tensor[tokens[1]] = torch.nan
        products = REFERENCE.lora.shrink(x, segments)
        REFERENCE.lora.expand_(y, products, segments, parts)
        REFERENCE.lora.backward(grad, x, products, segments, parts, grad_x)
        for index in (0, 2):
            one, here = adapters[index], tokens[index]
            for found in (y[here], grad_x[here], one.grad_a, one.grad_b):
                assert found.isfinite().all()
        assert adapters[1].grad_a.isnan().all()


def test_logits_of_a_part_of_the_vocabulary_have_the_gradient_of_a_whole_one() -> None:
    entries, first = 13, 4  # of which a rank has those from 4 to 8
    logits, targets, grad = (
        random(T, entries),
        torch.arange(2 * T).view(T, 2) % entries,
        random(T, 2),
    )
    wide = logits.clone().requires_grad_()
    wide.log_softmax(1).gather(1, targets).backward(grad)
    whole, at_targets = REFERENCE.logits.statistics(logits, targets)
    assert close(whole, logits.logsumexp(1, keepdim=True))
    assert close(at_targets, logits.gather(1, targets))
    places = torch.where((targets >= first) & (targets < first + 5), targets - first, -1)
    part = logits[:, first : first + 5].clone()
    assert (REFERENCE.logits.statistics(part, places)[1][places < 0] == 0).all()
    assert wide.grad is not None
    found = REFERENCE.logits.gradient(part, whole, places, grad, torch.float64)
    assert close(found, wide.grad[:, first : first + 5])
