# pyright: reportMissingImports=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalSubscript=false, reportArgumentType=false
"""Which of our own kernels of the delta nets a process runs: those that have the torch forms' numbers on its device.

Compared once, at start; where one does not compile or is wrong, the torch form runs in its place, and the log says so.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from fla.ops.utils import chunk_local_cumsum

from lilo_miles_backend.ranks.kernels import delta_gradients, triton_delta
from lilo_miles_backend.ranks.kernels.delta_gradients import ChunkInputs
from lilo_miles_backend.ranks.kernels.delta_kernels import DeltaPieces
from lilo_miles_backend.ranks.kernels.delta_pieces import TritonPieces
from lilo_miles_backend.ranks.kernels.delta_reference import TorchDelta
from lilo_miles_backend.ranks.layers.intervals import Intervals

logger = logging.getLogger(__name__)

CHUNK = 64
"""Tokens of a chunk; fla's fused system solver has no other."""

WITHIN = 1e-2
"""Norm of the difference over that of the torch form in float32; the kernels multiply in bfloat16, or round to it."""

ChunkGradients: TypeAlias = Callable[..., tuple[torch.Tensor, ...]]
"""`delta_gradients.chunk_gradients`, or what stands for it."""

_Form = TypeVar("_Form")


@functools.cache
def chunk_gradients(device: torch.device) -> ChunkGradients:
    """The step of the rule's backward that is ours."""
    return _right(
        "the gradients inside chunks",
        triton_delta.chunk_gradients,
        delta_gradients.chunk_gradients,
        lambda: step_errors(triton_delta.chunk_gradients, device),
    )


@functools.cache
def pieces(device: torch.device) -> DeltaPieces:
    """Convolution and gated norm."""
    ours: DeltaPieces = TritonPieces()
    return _right(
        "convolution and gated norm", ours, TorchDelta(), lambda: piece_errors(ours, device)
    )


def _right(
    what: str, ours: _Form, torch_form: _Form, errors_of: Callable[[], tuple[float, ...]]
) -> _Form:
    try:
        errors = errors_of()
    except Exception as error:  # whatever a compiler raises, the torch form runs
        reason = f"{type(error).__name__}: {error}"
    else:
        # A number that is none is not within it either.
        if all(error <= WITHIN for error in errors):
            return ours
        reason = f"its errors are {errors}, at most {WITHIN} was expected"
    logger.warning(
        "a kernel of the delta nets is not used, and its slower torch form is: %s, because %s",
        what,
        reason,
    )
    return torch_form


def step_errors(ours: ChunkGradients, device: torch.device) -> tuple[float, ...]:
    """How far a form of the step is from the torch form in float32: of q, k, w and g, each a norm over a norm.

    Of enough chunks that all processors of a GPU have several, and of some that are not whole.
    """
    lengths, groups, heads, size = (200, 64, 1, 63, 8192), 2, 6, 128
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    tokens = sum(lengths)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=device)
    chunks = [(i, j) for i, n in enumerate(lengths) for j in range(-(-n // CHUNK))]
    cut = torch.tensor(chunks, device=device)
    low = {
        name: normal(1, tokens, count, size).div(size**0.5).bfloat16()
        for name, count in (
            ("q", groups),
            ("k", groups),
            ("v", heads),
            ("do", heads),
            ("dv", heads),
        )
    }
    low |= {name: normal(1, len(chunks), heads, size, size).bfloat16() for name in ("h", "dh")}
    decays = -normal(1, tokens, heads).abs() / 16
    g = chunk_local_cumsum(decays, chunk_size=CHUNK, cu_seqlens=bounds, chunk_indices=cut)
    asked: dict[str, Any] = {
        "scale": size**-0.5,
        "bounds": bounds,
        "chunks": cut,
        "chunk_size": CHUNK,
    }
    exact = delta_gradients.chunk_gradients(
        ChunkInputs(g=g, **{name: x.float() for name, x in low.items()}), **asked
    )
    found = ours(ChunkInputs(g=g, **low), **asked)
    return tuple(
        float((one.float() - other).norm() / other.norm())
        for one, other in zip(found, exact, strict=True)
    )


def piece_errors(ours: DeltaPieces, device: torch.device) -> tuple[float, ...]:
    """How far a form of convolution and gated norm is from the torch form in float32, values and gradients."""
    lengths, widths, heads, size = (200, 1, 2, 64, 4096), (256, 256, 768), 6, 128
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    tokens, channels = sum(lengths), sum(widths)
    intervals = Intervals.of(lengths, device)
    projected, weight = normal(tokens, channels + heads * size + 64), normal(channels, 4)
    before, out = normal(len(lengths), 3, channels), normal(tokens, heads, size)
    of_three, of_normed = normal(tokens, channels), normal(tokens, heads, size)
    scale = normal(size).float()

    def run(form: DeltaPieces, dtype: torch.dtype) -> list[torch.Tensor]:
        whole = projected.to(dtype)
        grad = torch.full_like(whole, torch.nan)
        x, gate, _ = whole.split((channels, heads * size, 64), -1)
        of_x, of_gate, _ = grad.split((channels, heads * size, 64), -1)
        gate, of_gate = (t.unflatten(-1, (heads, size)) for t in (gate, of_gate))
        taps, first = weight.to(dtype), before.to(dtype)
        three = form.convolve(x, taps, first, intervals, widths)
        q, k, v = (part.contiguous() for part in of_three.to(dtype).split(widths, -1))
        of_first = form.convolve_backward((q, k, v), x, taps, first, intervals, of_x)
        assert of_first is not None, "it was given"
        normed = form.gated_norm(out.to(dtype), gate, scale, 1e-6)
        of_out = form.gated_norm_backward(
            of_normed.to(dtype), out.to(dtype), gate, scale, 1e-6, of_gate
        )
        return [*three, of_x, of_first, normed, of_out, of_gate]

    found, exact = run(ours, torch.bfloat16), run(TorchDelta(), torch.float32)
    return tuple(
        float((one.float() - other).norm() / other.norm())
        for one, other in zip(found, exact, strict=True)
    )
