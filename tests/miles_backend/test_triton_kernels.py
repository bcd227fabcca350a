"""Triton's kernels against the reference in float64; on a GPU where there is one, else through Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from lilo_miles_backend.ranks.kernels.kernels import Kernels
from lilo_miles_backend.ranks.kernels.reference import REFERENCE
from lilo_miles_backend.ranks.kernels.segment_tables import Line, table_key
from lilo_miles_backend.ranks.lora import Factors, Segment

from tests.miles_backend import reference as ref
from tests.miles_backend.triton_programs import watched

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton", reason="it comes with the CUDA builds of torch")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

EXACT = 2e-6
"""float32 kernels against float64."""


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    from lilo_miles_backend.ranks.kernels.triton_elementwise import TritonElementwise
    from lilo_miles_backend.ranks.kernels.triton_logits import TritonLogits
    from lilo_miles_backend.ranks.kernels.triton_lora import TritonLora
    from lilo_miles_backend.ranks.kernels.triton_optimizer import TritonOptimizer

    return Kernels(
        elementwise=TritonElementwise(),
        lora=TritonLora(),
        logits=TritonLogits(),
        optimizer=TritonOptimizer(),
    )


@pytest.fixture(autouse=True)
def conflicts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Programs that touched what others wrote: none may be left at the end of any test here. On a GPU nobody sees them."""
    if DEVICE.type == "cuda":
        yield []
        return
    with watched(monkeypatch) as found:
        yield found
    assert found == []


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


@pytest.mark.parametrize("hidden", [48, 100, 4097])
def test_norm_and_its_gradient_at_any_width(kernels: Kernels, hidden: int) -> None:
    x, grad, weight = _random(5, 3, hidden), _random(5, 3, hidden), _random(hidden)
    y, inverse = kernels.elementwise.rms_norm(x, weight, 1e-6)
    y64, inverse64 = REFERENCE.elementwise.rms_norm(x.double(), weight.double(), 1e-6)
    dx = kernels.elementwise.rms_norm_backward(grad, x, inverse, weight)
    dx64 = REFERENCE.elementwise.rms_norm_backward(
        grad.double(), x.double(), inverse64, weight.double()
    )
    assert ref.relative(y, y64) <= EXACT
    assert ref.relative(inverse, inverse64) <= EXACT
    assert ref.relative(dx, dx64) <= EXACT


@pytest.mark.parametrize("inner", [1, 48, 1100])
def test_swiglu_and_its_gradient_in_place(kernels: Kernels, inner: int) -> None:
    gate_up, grad = _random(7, 2 * inner), _random(7, inner)
    forward64 = REFERENCE.elementwise.swiglu(gate_up.double())
    backward64 = REFERENCE.elementwise.swiglu_backward_(gate_up.double(), grad.double())
    assert ref.relative(kernels.elementwise.swiglu(gate_up), forward64) <= EXACT
    kernels.elementwise.swiglu_backward_(gate_up, grad)
    assert ref.relative(gate_up, backward64) <= EXACT


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("tokens", "heads", "size", "rotated"),
    [(37, 3, 16, 16), (1, 2, 24, 8), (5, 2, 32, 0), (17, 2, 96, 64)],
)
def test_rotary_of_all_or_some_features_and_its_gradient(
    kernels: Kernels, tokens: int, heads: int, size: int, rotated: int, normed: bool
) -> None:
    x = _random(tokens, heads * size + 8)[:, : heads * size].unflatten(1, (heads, size))
    grad = _random(tokens, heads, size)
    angles = torch.rand(tokens, rotated // 2, device=DEVICE) * 6
    cos, sin, weight = angles.cos(), angles.sin(), _random(size) if normed else None
    wide = (None if weight is None else weight.double(), 1e-6, cos.double(), sin.double())
    y64 = REFERENCE.elementwise.rotate(x.double(), *wide)
    dx64 = torch.empty_like(y64)
    REFERENCE.elementwise.rotate_backward(grad.double(), x.double(), *wide, dx64)
    assert ref.relative(kernels.elementwise.rotate(x, weight, 1e-6, cos, sin), y64) <= EXACT
    kernels.elementwise.rotate_backward(grad, x, weight, 1e-6, cos, sin, x)
    assert ref.relative(x, dx64) <= EXACT


@pytest.mark.parametrize(("entries", "num_targets"), [(1, 1), (700, 1), (4100, 3)])
def test_logits_of_own_and_absent_targets(kernels: Kernels, entries: int, num_targets: int) -> None:
    logits = 3 * _random(6, entries)
    places = torch.randint(-1, entries, (6, num_targets), device=DEVICE)
    grad = _random(6, num_targets)
    lse64, picked64 = REFERENCE.logits.statistics(logits.double(), places)
    expected = REFERENCE.logits.gradient(
        logits.double(), lse64, places, grad.double(), torch.float64
    )
    lse, picked = kernels.logits.statistics(logits, places)
    assert ref.relative(lse, lse64) <= EXACT
    assert ref.relative(picked, picked64) <= EXACT
    got = kernels.logits.gradient(logits, lse, places, grad, torch.float32)
    assert (got.double() - expected).norm() <= EXACT * (1 + expected.norm())


def _factors(features: int, parts: Sequence[int], lora_rank: int) -> Factors:
    a, b = _random(len(parts) * lora_rank, features), _random(sum(parts), lora_rank)
    return Factors(
        scale=2.0 / lora_rank,
        lora_rank=lora_rank,
        a=a,
        b=b,
        grad_a=_random(*a.shape),
        grad_b=_random(*b.shape),
    )


def _wide(one: Factors) -> Factors:
    return replace(
        one,
        a=one.a.double(),
        b=one.b.double(),
        grad_a=one.grad_a.double(),
        grad_b=one.grad_b.double(),
    )


def _segments(factors: Sequence[Factors], counts: Sequence[int]) -> list[Segment]:
    ends = torch.tensor(counts).cumsum(0).tolist()
    return [
        Segment(factors=one, tokens=slice(end - count, end))
        for one, count, end in zip(factors, counts, ends, strict=True)
    ]


@pytest.mark.parametrize(
    ("features", "parts", "lora_ranks", "counts"),
    [
        pytest.param(256, (128, 64, 64), (16, 16), (30, 70), id="three modules"),
        pytest.param(100, (48, 16), (8, 32, 1), (0, 65, 1), id="an empty segment, three ranks"),
        pytest.param(70, (33,), (1,), (5,), id="odd sizes, rank 1"),
        pytest.param(64, (40, 8), (32, 32), (1100, 3), id="several chunks"),
        pytest.param(64, (32,), (200, 130), (10, 70), id="wide ranks"),
    ],
)
def test_adapters_of_many_ranks_and_lengths_in_one_batch(
    kernels: Kernels,
    features: int,
    parts: tuple[int, ...],
    lora_ranks: tuple[int, ...],
    counts: tuple[int, ...],
) -> None:
    factors = [_factors(features, parts, lora_rank) for lora_rank in lora_ranks]
    wide = [_wide(one) for one in factors]
    tokens = sum(counts) + 3  # the last belong to nobody, as a stream's padding does
    x, y, dx = _random(tokens, features), _random(tokens, sum(parts) + 5), _random(tokens, features)
    grad = _random(tokens, sum(parts))
    y64, dx64 = y.double(), dx.double()
    for used, own, (inputs, grads, out, back) in (
        (kernels.lora, factors, (x, grad, y, dx)),
        (REFERENCE.lora, wide, (x.double(), grad.double(), y64, dx64)),
    ):
        segments, here = _segments(own, counts), out[:, : sum(parts)]
        products = used.shrink(inputs, segments)
        used.expand_(here, products, segments, parts)
        used.backward(grads, inputs, products, segments, parts, back)
    assert ref.relative(y, y64) <= EXACT
    assert ref.relative(dx, dx64) <= EXACT
    for one, exact in zip(factors, wide, strict=True):
        assert ref.relative(one.grad_a, exact.grad_a) <= EXACT
        assert ref.relative(one.grad_b, exact.grad_b) <= EXACT


@pytest.mark.parametrize("counts", [(30, 7, 20), (1030, 3, 64)])
def test_two_passes_of_one_adapter_add_up_beside_another_adapter(
    kernels: Kernels, counts: tuple[int, ...]
) -> None:
    features, parts = 48, (32, 16)
    one, other = _factors(features, parts, 8), _factors(features, parts, 4)
    wide = [_wide(one), _wide(other)]
    x, grad = _random(sum(counts), features), _random(sum(counts), sum(parts))
    for used, own, (inputs, grads) in (
        (kernels.lora, [one, other], (x, grad)),
        (REFERENCE.lora, wide, (x.double(), grad.double())),
    ):
        segments = _segments([own[0], own[1], own[0]], counts)
        products = used.shrink(inputs, segments)
        used.backward(grads, inputs, products, segments, parts, None)
    for ours, exact in zip((one, other), wide, strict=True):
        assert ref.relative(ours.grad_a, exact.grad_a) <= EXACT
        assert ref.relative(ours.grad_b, exact.grad_b) <= EXACT


@pytest.mark.skipif(DEVICE.type == "cuda", reason="programs are looked at in the interpreter")
def test_programs_that_add_to_one_gradient_are_seen(
    kernels: Kernels, conflicts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lilo_miles_backend.ranks.kernels import triton_lora

    def a_line_for_each(segments: Sequence[Segment]) -> tuple[tuple[Line, ...], tuple[int, ...]]:
        found = [table_key([segment])[0][0] for segment in segments]
        return tuple(found), tuple(range(len(found)))

    monkeypatch.setattr(triton_lora, "table_key", a_line_for_each)
    one = _factors(48, (32,), 8)
    x, grad, segments = _random(20, 48), _random(20, 32), _segments([one, one], (12, 8))
    products = kernels.lora.shrink(x, segments)
    kernels.lora.backward(grad, x, products, segments, (32,), None)
    seen = [conflict.partition(":")[0] for conflict in conflicts]
    conflicts.clear()
    assert seen == ["outer", "outer"]


def test_an_adapter_has_equal_bits_alone_and_beside_others(kernels: Kernels) -> None:
    features, parts, tokens = 64, (32, 16), 77
    ours, x, grad = _factors(features, parts, 8), _random(77, features), _random(77, sum(parts))
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for others in ((), (50, 3)):
        mine = replace(ours, grad_a=ours.grad_a.clone(), grad_b=ours.grad_b.clone())
        neighbours = [_factors(features, parts, 8) for _ in others]
        segments = _segments([*neighbours, mine], [*others, tokens])
        whole_x = torch.cat([_random(sum(others), features), x])
        whole_grad = torch.cat([_random(sum(others), sum(parts)), grad])
        products = kernels.lora.shrink(whole_x, segments)
        kernels.lora.backward(whole_grad, whole_x, products, segments, parts, None)
        found.append((mine.grad_a, mine.grad_b))
    for alone, beside in zip(*found, strict=True):
        assert torch.equal(alone, beside)
