"""The gated delta rule as a GPU runs it, against torch in float64; on a CPU through Triton's interpreter."""

from __future__ import annotations

import builtins
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lilo_miles_backend.ranks.kernels import delta_gradients
from lilo_miles_backend.ranks.kernels.delta_gradients import ChunkInputs
from lilo_miles_backend.ranks.kernels.delta_kernels import DeltaPieces, RuleInputs
from lilo_miles_backend.ranks.kernels.delta_parts import Parts
from lilo_miles_backend.ranks.kernels.delta_reference import TorchDelta, TorchRule
from lilo_miles_backend.ranks.layers.intervals import Intervals

from tests.miles_backend import reference as ref

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton", reason="it comes with the CUDA builds of torch")
pytest.importorskip("fla", reason="the extra of lilo-miles-backend that GPUs need")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Triton is not supported"),
    pytest.mark.filterwarnings("ignore::ImportWarning"),
]

FLOAT32 = 3e-6
EXACT = FLOAT32 if DEVICE.type == "cpu" else 3e-3
"""float32 against float64; on a GPU fla multiplies in TF32."""


@pytest.fixture(autouse=True)
def _loops_of_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter counts loops in plain numbers, of which fla asks what only Triton's have."""
    if DEVICE.type == "cuda":
        return
    from fla.ops.common import chunk_delta_h
    from triton.runtime.interpreter import interpreter_semantic

    def counted(*limits: int) -> Iterator[object]:
        return map(
            interpreter_semantic.to_tensor, builtins.range(*(int(limit) for limit in limits))
        )

    monkeypatch.setattr(chunk_delta_h, "range", counted, raising=False)


def test_gradients_inside_chunks_are_those_of_the_torch_form() -> None:
    from lilo_miles_backend.ranks.kernels import triton_delta

    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    lengths, chunk = (20, 1, 16), 16
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    chunks = torch.tensor([(i, j) for i, n in enumerate(lengths) for j in range(-(-n // chunk))])
    tokens, key_size, width = (
        sum(lengths),
        96,
        48,
    )  # more than one block of either, the last not whole
    given = {name: normal(1, tokens, 2, key_size) for name in ("q", "k")}
    given |= {name: normal(1, tokens, 4, width) for name in ("v", "do", "dv")}
    given |= {name: normal(1, len(chunks), 4, key_size, width) for name in ("h", "dh")}
    given["g"] = -normal(1, tokens, 4).abs().cumsum(1) / 16
    asked: dict[str, Any] = {"scale": 0.4, "bounds": bounds, "chunks": chunks, "chunk_size": chunk}
    on_device = {name: x.to(DEVICE) for name, x in given.items()}
    asked_there = asked | {"bounds": bounds.to(DEVICE), "chunks": chunks.to(DEVICE)}

    found = triton_delta.chunk_gradients(ChunkInputs(**on_device), **asked_there)

    double = ChunkInputs(**{name: x.double() for name, x in given.items()})
    exact = delta_gradients.chunk_gradients(double, **asked)
    for ours, theirs in zip(found, exact, strict=True):
        assert ref.relative(ours.cpu(), theirs) <= EXACT


@pytest.mark.parametrize(
    ("lengths", "part"),
    [((150, 1), 192), ((150, 1), 64), ((140,), 64), ((70, 70), 64)],
    ids=["whole", "in parts", "one in parts", "in as many parts each"],
)
def test_the_rule_has_maps_outputs_and_gradients_of_the_definition(
    lengths: tuple[int, ...], part: int
) -> None:
    from lilo_miles_backend.ranks.kernels.delta_fla import FlaRule
    from lilo_miles_backend.ranks.kernels.delta_tuning import fix_configurations
    from lilo_miles_backend.ranks.kernels.triton_delta import chunk_gradients

    fix_configurations()
    torch.manual_seed(0)
    tokens, groups, heads, size = sum(lengths), 1, 2, 16
    inputs = {
        "q": torch.randn(tokens, groups, size),
        "k": torch.randn(tokens, groups, size),
        "v": torch.randn(tokens, heads, size),
        "g": -torch.rand(tokens, heads) / 8,
        "beta": torch.rand(tokens, heads),
    }
    entered, left = torch.randn(2, len(lengths), heads, size, size).unbind()
    grad = torch.randn(tokens, heads, size)
    with torch.enable_grad():
        exact = TorchRule(
            RuleInputs(**{name: x.double() for name, x in inputs.items()}),
            Intervals.of(lengths, torch.device("cpu")),
        )
        expected = [exact.maps(), exact.outputs(exact.carry(entered.double()))]
        expected.append(exact.slopes(grad.double()))
        expected += _each(exact.gradients(grad.double(), left.double()))

    rule = FlaRule(
        RuleInputs(**{name: x.to(DEVICE) for name, x in inputs.items()}),
        Parts.of(Intervals.of(lengths, DEVICE), part),
        chunk_gradients,
    )
    found = [rule.maps(), rule.outputs(rule.carry(entered.to(DEVICE)))]
    found.append(rule.slopes(grad.to(DEVICE)))
    found += _each(rule.gradients(grad.to(DEVICE), left.to(DEVICE)))
    for ours, theirs in zip(found, expected, strict=True):
        assert ref.relative(ours.cpu(), theirs) <= EXACT


@pytest.mark.parametrize("given", [True, False], ids=["tokens before", "none before"])
def test_convolution_and_its_backward_are_those_of_the_torch_form(given: bool) -> None:
    kernels = _pieces()
    torch.manual_seed(0)
    lengths, widths, taps = (70, 1, 2, 64, 3), (32, 32, 48), 4
    channels = sum(widths)
    whole = torch.randn(sum(lengths), channels + 60)
    weight, before = torch.randn(channels, taps), torch.randn(len(lengths), taps - 1, channels)
    grads = [torch.randn(sum(lengths), width) for width in widths]

    def run(device: torch.device, dtype: torch.dtype, form: DeltaPieces) -> list[torch.Tensor]:
        x = whole.to(device, dtype)[:, :channels]
        first = before.to(device, dtype) if given else None
        there, intervals = weight.to(device, dtype), Intervals.of(lengths, device)
        outs = form.convolve(x, there, first, intervals, widths)
        q, k, v = (grad.to(device, dtype) for grad in grads)
        written = torch.full_like(whole.to(device, dtype), torch.nan)
        of_before = form.convolve_backward(
            (q, k, v), x, there, first, intervals, written[:, :channels]
        )
        assert written[:, channels:].isnan().all()
        assert (of_before is None) is not given
        found = [*outs, written[:, :channels], *([of_before] if given else [])]
        return [one.cpu() for one in found if one is not None]

    cpu = torch.device("cpu")
    ours, exact = run(DEVICE, torch.float32, kernels), run(cpu, torch.float64, TorchDelta())
    for one, other in zip(ours, exact, strict=True):
        assert ref.relative(one, other) <= FLOAT32


def test_the_gated_norm_and_its_backward_are_those_of_the_torch_form() -> None:
    kernels = _pieces()
    torch.manual_seed(0)
    tokens, heads, width = 37, 3, 24
    x, grad = torch.randn(2, tokens, heads, width).unbind()
    gates, weight = torch.randn(tokens, heads * width + 20), torch.rand(width) + 0.5

    def run(device: torch.device, dtype: torch.dtype, form: DeltaPieces) -> list[torch.Tensor]:
        def cut(whole: torch.Tensor) -> torch.Tensor:
            return whole[:, : heads * width].unflatten(-1, (heads, width))

        here = [t.to(device, dtype) for t in (grad, x, gates, weight)]
        there, written = cut(here[2]), torch.full_like(here[2], torch.nan)
        out = form.gated_norm(here[1], there, here[3], 1e-6)
        of_x = form.gated_norm_backward(here[0], here[1], there, here[3], 1e-6, cut(written))
        assert written[:, heads * width :].isnan().all()
        return [one.cpu() for one in (out, of_x, cut(written))]

    cpu = torch.device("cpu")
    ours, exact = run(DEVICE, torch.float32, kernels), run(cpu, torch.float64, TorchDelta())
    for one, other in zip(ours, exact, strict=True):
        assert ref.relative(one, other) <= FLOAT32


def _pieces() -> DeltaPieces:
    from lilo_miles_backend.ranks.kernels.delta_pieces import TritonPieces

    return TritonPieces()


def _each(gradients: RuleInputs) -> list[torch.Tensor]:
    return [gradients.q, gradients.k, gradients.v, gradients.g, gradients.beta]
