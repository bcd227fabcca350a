"""The merge of partial attention as a Triton kernel against the one in torch; on a GPU, else through the interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from lilo_miles_backend.ranks.kernels.attention_kernel import Attended
from lilo_miles_backend.ranks.kernels.attention_merge import merge_

from tests.miles_backend import reference as ref
from tests.miles_backend.triton_programs import watched

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton", reason="it comes with the CUDA builds of torch")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def conflicts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No program may touch what another one writes; on a GPU nobody sees it."""
    if DEVICE.type == "cuda":
        yield
        return
    with watched(monkeypatch) as found:
        yield
    assert found == []


@pytest.mark.parametrize(("rows", "length", "size"), [(2, 10, 16), (1, 6, 24)])
def test_a_merge_into_the_second_half_has_the_numbers_of_torch_and_leaves_the_first(
    rows: int, length: int, size: int
) -> None:
    from lilo_miles_backend.ranks.kernels import triton_merge

    generator = torch.Generator(DEVICE).manual_seed(0)
    half, heads = length // 2, 3
    out, part_out = (
        torch.randn(rows, n, heads, size, generator=generator, device=DEVICE)
        for n in (length, half)
    )
    lse, part_lse = (
        3 * torch.randn(rows, heads, n, generator=generator, device=DEVICE) for n in (length, half)
    )
    ours, right = (Attended(out.to(kind), lse.to(kind)) for kind in (torch.float32, torch.float64))
    first, second = ours.out[:, :half].clone(), slice(half, None)
    for merge, whole in ((triton_merge.merge_, ours), (merge_, right)):
        kind = whole.out.dtype
        part = Attended(part_out.to(kind), part_lse.to(kind))
        merge(Attended(whole.out[:, second], whole.lse[:, :, second]), part)
    assert ref.relative(ours.out, right.out) <= 2e-6
    assert ref.relative(ours.lse, right.lse) <= 2e-6
    assert torch.equal(ours.out[:, :half], first)
