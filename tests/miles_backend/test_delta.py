"""Gated delta nets: equal to the definition token by token, in float64, packed and over context-parallel ranks."""

from __future__ import annotations

import pytest
import torch
from lilo_miles_backend.ranks.kernels.delta_gradients import ChunkInputs, chunk_gradients

from tests.miles_backend import reference as ref
from tests.miles_backend.delta_ranks import Case, Fault, over_ranks, token_by_token

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXACT = 1e-12
"""max|d| / max|ref|, float64 on both sides."""
LENGTHS = (70, 1, 2, 33, 3, 5, 1)


@pytest.mark.parametrize(("cp", "multiple"), [(1, 1), (2, 4), (3, 6)])
def test_rows_of_a_stream_have_the_numbers_that_each_has_token_by_token(
    cp: int, multiple: int
) -> None:
    case = Case.of(LENGTHS, multiple)
    for ours, theirs in zip(over_ranks(case, cp), token_by_token(case), strict=True):
        assert ref.relative(ours, theirs) <= EXACT


@pytest.mark.parametrize(("fault", "cp"), [("leak", 1), ("order", 2), ("maps", 2), ("halo", 2)])
def test_rows_that_leak_and_ranks_that_keep_silent_are_seen_by_the_same_comparison(
    fault: Fault, cp: int
) -> None:
    case = Case.of(LENGTHS, 4)
    ours, theirs = over_ranks(case, cp, fault), token_by_token(case)
    assert ref.relative(ours[1], theirs[1]) > 1e-3


def test_the_step_that_is_not_of_fla_has_the_gradients_of_autograd() -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    lengths, size, scale = (40, 1, 16, 33), 16, 0.4
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    chunks = [(i, j) for i, n in enumerate(lengths) for j in range(-(-n // size))]
    q, k = (normal(1, sum(lengths), 2, 8).requires_grad_() for _ in range(2))
    w, u, do = (normal(1, sum(lengths), 4, n) for n in (8, 6, 6))
    g = (-normal(1, sum(lengths), 4).abs() / 4).requires_grad_()
    h, dh = normal(1, len(chunks), 4, 8, 6), normal(1, len(chunks), 4, 8, 6)
    w.requires_grad_()
    summed, written, total = [], [], torch.zeros((), dtype=torch.float64)
    for index, (interval, chunk) in enumerate(chunks):
        first = int(bounds[interval]) + chunk * size
        here = slice(first, min(first + size, int(bounds[interval + 1])))
        one_q, one_k = (t[0, here].repeat_interleave(2, 1).transpose(0, 1) for t in (q, k))
        decay = g[0, here].cumsum(0)
        decay.retain_grad()
        summed.append(decay)
        d = decay.t()
        new = u[0, here].transpose(0, 1) - w[0, here].transpose(0, 1) @ h[0, index]
        new.retain_grad()
        written.append(new)
        between = torch.exp2(d[:, :, None] - d[:, None]).tril()
        out = torch.exp2(d)[..., None] * (one_q @ h[0, index])
        out = scale * (out + (one_q @ one_k.transpose(1, 2) * between) @ new)
        kept = one_k * torch.exp2(d[:, -1:] - d)[..., None]
        state = torch.exp2(d[:, -1, None, None]) * h[0, index] + kept.transpose(1, 2) @ new
        total = total + (out * do[0, here].transpose(0, 1)).sum() + (state * dh[0, index]).sum()
    total.backward()

    found = chunk_gradients(
        ChunkInputs(
            q=q.detach(),
            k=k.detach(),
            v=torch.cat([one.detach().transpose(0, 1) for one in written])[None],
            do=do,
            dv=torch.cat([one.grad.transpose(0, 1) for one in written])[None],
            g=torch.cat(summed).detach()[None],
            h=h,
            dh=dh,
        ),
        scale=scale,
        bounds=bounds,
        chunks=torch.tensor(chunks, dtype=torch.int32),
        chunk_size=size,
    )

    # Of decays in powers of two, the step's gradient is that of natural ones.
    decays = torch.cat([one.grad for one in summed])[None] / torch.log(torch.tensor(2.0).double())
    for ours, theirs in zip(found, (q.grad, k.grad, w.grad, decays), strict=True):
        assert ref.relative(ours, theirs) <= EXACT
