"""AdamW as a Triton kernel against the reference; on a GPU where there is one, else through Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from lilo_miles_backend.ranks.kernels.kernels import AdamBuffers, Optimizer
from lilo_miles_backend.ranks.kernels.reference import REFERENCE

from tests.miles_backend import reference as ref
from tests.miles_backend.triton_programs import watched

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton", reason="it comes with the CUDA builds of torch")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

EXACT = 2e-6
"""float32 on both sides."""


@pytest.fixture(autouse=True)
def conflicts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No program may touch what another one writes; on a GPU nobody sees it."""
    if DEVICE.type == "cuda":
        yield
        return
    with watched(monkeypatch) as found:
        yield
    assert found == []


def _ours() -> Optimizer:
    from lilo_miles_backend.ranks.kernels.triton_optimizer import TritonOptimizer

    return TritonOptimizer()


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


@pytest.mark.parametrize("changes", [{}, {"grad_clip_norm": 0.5}, {"weight_decay": 0.0}])
def test_steps_of_adamw_clear_the_gradients_and_equal_the_reference(
    changes: dict[str, float],
) -> None:
    params = replace(ref.ADAM, **{"weight_decay": 0.1, **changes})
    ours, exact = (_buffers(torch.float16), _buffers(None))
    for name in ("weights", "exp_avg", "exp_avg_sq"):
        getattr(exact, name).copy_(getattr(ours, name))
    for step in (1, 2, 3):
        exact.gradients.copy_(ours.gradients.normal_())
        norm = torch.linalg.vector_norm(ours.gradients, dtype=torch.float64)
        _ours().adamw_(ours, params, step=step, norm=norm)
        REFERENCE.optimizer.adamw_(exact, params, step=step, norm=norm)
        assert not ours.gradients.any()
    for name in ("weights", "exp_avg", "exp_avg_sq"):
        assert ref.relative(getattr(ours, name), getattr(exact, name)) <= EXACT
    assert ours.copy is not None
    assert ref.relative(ours.copy, exact.weights) <= 1e-3


def test_a_step_without_eps_leaves_what_never_had_a_gradient() -> None:
    # As A of a fresh adapter, whose gradient is zero while B is.
    params = replace(ref.ADAM, eps=0.0, weight_decay=0.0)
    ours, exact = _buffers(None), _buffers(None)
    for buffers in (ours, exact):
        buffers.weights.copy_(ours.weights)
        buffers.gradients.copy_(ours.gradients)[::2] = 0
        buffers.exp_avg.zero_()
        buffers.exp_avg_sq.zero_()
    before = ours.weights.clone()
    norm = torch.linalg.vector_norm(ours.gradients, dtype=torch.float64)
    _ours().adamw_(ours, params, step=1, norm=norm)
    REFERENCE.optimizer.adamw_(exact, params, step=1, norm=norm)
    assert torch.equal(ours.weights[::2], before[::2])
    assert ref.relative(ours.weights, exact.weights) <= EXACT


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # numpy's, of lanes that nothing is stored from
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_changes_nothing_but_itself(value: float) -> None:
    buffers = _buffers(None)
    before = (buffers.weights.clone(), buffers.exp_avg.clone(), buffers.exp_avg_sq.clone())
    buffers.gradients[7] = value
    norm = torch.linalg.vector_norm(buffers.gradients, dtype=torch.float64)
    _ours().adamw_(buffers, ref.ADAM, step=1, norm=norm)
    assert not buffers.gradients.any()
    for old, new in zip(
        before, (buffers.weights, buffers.exp_avg, buffers.exp_avg_sq), strict=True
    ):
        assert torch.equal(old, new)


def _buffers(copy: torch.dtype | None) -> AdamBuffers:
    count = 3_000_001 if DEVICE.type == "cuda" else 3001  # a GPU full of programs, or two of them
    weights = _random(count)
    return AdamBuffers(
        weights=weights,
        gradients=_random(count),
        exp_avg=_random(count),
        exp_avg_sq=_random(count).abs(),
        copy=None if copy is None else weights.to(copy),
    )
