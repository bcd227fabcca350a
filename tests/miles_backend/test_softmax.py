"""The softmax mixer in float64 against torch's autograd: norms, full and partial rotation, the output gate, packed rows."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from lilo_miles_backend.ranks.attention import Attention, PackedRows
from lilo_miles_backend.ranks.kernels.attention_choice import choose_attention
from lilo_miles_backend.ranks.kernels.reference import ReferenceElementwise
from lilo_miles_backend.ranks.layers.softmax import SoftmaxMixer
from lilo_miles_backend.ranks.rotary import Rotary
from lilo_miles_backend.ranks.stream import pack

EXACT = 1e-12
"""max|d| / max|ref|, float64 on both sides."""
HEADS, GROUPS, SIZE = 4, 2, 8
EPS, BASE = 1e-6, 1e4
LENGTHS = (7, 5, 5, 1)
CPU = torch.device("cpu")


def mixer(*, gated: bool, qk_norm: bool, rotary_dim: int) -> SoftmaxMixer:
    made = SoftmaxMixer(
        heads=HEADS,
        groups=GROUPS,
        head_dim=SIZE,
        rotary=Rotary(rotary_dim=rotary_dim, base=BASE, max_positions=16, device=CPU),
        attention=Attention(
            choose_attention(CPU, torch.float64, head_dim=SIZE, sharing=HEADS // GROUPS)
        ),
        elementwise=ReferenceElementwise(),
        dtype=torch.float64,
        eps=EPS,
        qk_norm=qk_norm,
        gated=gated,
    )
    for index, weight in enumerate(made.parameters()):
        weight.copy_(torch.linspace(-1, 2, SIZE) + index)
    return made


def right(
    made: SoftmaxMixer, projected: torch.Tensor, gated: bool, rotary_dim: int
) -> torch.Tensor:
    """The formulas one after another, with a mask over the whole stream."""
    width, narrow = HEADS * SIZE, GROUPS * SIZE
    q, *gate, k, v = projected.split([width] * (1 + gated) + [narrow] * 2, 1)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).float()
    frequencies = 1.0 / BASE ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim)
    angles = torch.outer(positions, frequencies)[:, None]
    cos, sin = angles.cos().double(), angles.sin().double()

    def rotated(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        x = x.unflatten(1, (-1, SIZE))
        if weight is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
        a, b, rest = x.split([rotary_dim // 2, rotary_dim // 2, SIZE - rotary_dim], -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    row = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.arange(len(row))
    seen = (row[:, None] == row[None]) & (place[:, None] >= place[None])
    key = rotated(k, made.k_norm).repeat_interleave(HEADS // GROUPS, 1)
    value = v.unflatten(1, (-1, SIZE)).repeat_interleave(HEADS // GROUPS, 1)
    scores = torch.einsum("qhd,khd->hqk", rotated(q, made.q_norm), key) / math.sqrt(SIZE)
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", weights, value).flatten(1)
    return out * torch.sigmoid(gate[0]) if gate else out


@pytest.mark.parametrize(
    ("gated", "qk_norm", "rotary_dim"),
    list(product((False, True), (False, True), (SIZE, SIZE // 2))),
)
def test_output_and_gradient_are_those_of_the_formulas(
    gated: bool, qk_norm: bool, rotary_dim: int
) -> None:
    made = mixer(gated=gated, qk_norm=qk_norm, rotary_dim=rotary_dim)
    generator = torch.Generator().manual_seed(0)
    features = (HEADS * (1 + gated) + 2 * GROUPS) * SIZE
    projected, grad = (
        torch.randn(sum(LENGTHS), size, generator=generator, dtype=torch.float64)
        for size in (features, HEADS * SIZE)
    )
    leaf = projected.clone().requires_grad_()
    expected = right(made, leaf, gated, rotary_dim)
    (expected_grad,) = torch.autograd.grad(expected, leaf, grad)

    rows = PackedRows.of(pack(LENGTHS, LENGTHS, 0, 1), CPU)
    out, saved = made.forward(projected, rows)
    grad_projected = made.backward(grad, projected, out, saved, rows)

    assert (out - expected.detach()).abs().max() <= EXACT * expected.detach().abs().max()
    assert (grad_projected - expected_grad).abs().max() <= EXACT * expected_grad.abs().max()


def test_a_gate_that_is_shut_gives_zeros_and_no_nan() -> None:
    made = mixer(gated=True, qk_norm=False, rotary_dim=SIZE)
    projected = torch.ones(sum(LENGTHS), (2 * HEADS + 2 * GROUPS) * SIZE, dtype=torch.float64)
    gate = projected[:, HEADS * SIZE : 2 * HEADS * SIZE]
    gate.fill_(-800.0)  # exp(-800) is 0 in float64
    rows = PackedRows.of(pack(LENGTHS, LENGTHS, 0, 1), CPU)
    out, saved = made.forward(projected, rows)
    grad = made.backward(torch.ones_like(out), projected, out, saved, rows)
    assert not out.any()
    assert not grad.any()
