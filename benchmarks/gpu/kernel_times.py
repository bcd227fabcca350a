"""Times of the device's kernels at the shapes of an 8B model; `check_kernels.py` calls this once they are right."""

from __future__ import annotations

from collections.abc import Callable

import torch
from lilo_miles_backend.ranks.kernels.kernels import Kernels
from lilo_miles_backend.ranks.kernels.reference import REFERENCE

from benchmarks.gpu.kernel_problem import (
    Sizes,
    factors_of,
    forward_backward,
    in_turn,
    logits_of,
    maker,
    segments_of,
    shares,
)
from benchmarks.gpu.lines import at_most, emit

CASE = "check_kernels"


def time_lora(kernels: Kernels, sizes: Sizes, device: torch.device) -> None:
    """The adapters' part of one layer's four linears, beside the base products; the same tokens for every count."""
    counts = (1, 4, 8, 32)
    base_s = 0.0
    library_s = 0.0
    took = dict.fromkeys(counts, 0.0)
    dtype = torch.bfloat16
    for features, parts in sizes.linears.values():
        make = maker(dtype, device)
        tokens, wide = sizes.tokens, sum(parts)
        x, grad, y, dx = (make(tokens, n) for n in (features, wide, wide, features))
        weight = make(wide, features)
        runs: dict[object, Callable[[], object]] = {
            "base": lambda x=x, grad=grad, weight=weight: (x @ weight.t(), grad @ weight)
        }
        for count in (*counts, "library"):
            number = count if isinstance(count, int) else 1
            factors = [factors_of(features, parts, 32, dtype, device) for _ in range(number)]
            segments = segments_of(factors, shares(tokens, number))
            used = kernels if isinstance(count, int) else REFERENCE

            def run(used=used, x=x, grad=grad, y=y, dx=dx, segments=segments, parts=parts) -> None:
                forward_backward(used, x, grad, y, dx, segments, parts)

            runs[count] = run
        seconds = in_turn(runs, device)
        base_s += seconds["base"]
        library_s += seconds["library"]
        for count in counts:
            took[count] += seconds[count]
    for count in counts:
        emit(
            CASE,
            setting=f"adapters of one layer, {count}",
            ms=1e3 * took[count],
            over_base=took[count] / base_s,
        )
    emit(CASE, setting="one adapter by addmm", ms=1e3 * library_s, over_base=library_s / base_s)
    emit(CASE, setting="base products of one layer", ms=1e3 * base_s)
    if device.type == "cuda":
        extra = (took[32] - took[1]) / base_s
        at_most(CASE, "32 adapters over 1, of the base products' time", extra, 0.03)


def time_head(kernels: Kernels, sizes: Sizes, device: torch.device) -> None:
    """Products and both passes over the logits of all tokens, chunk by chunk."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    make = maker(dtype, device)
    head, hidden = make(sizes.vocab, sizes.hidden), make(sizes.tokens, sizes.hidden)
    targets = torch.randint(0, sizes.vocab, (sizes.tokens, 1), device=device)
    grad = torch.rand(sizes.tokens, 1, device=device)

    def run(passes: bool = True) -> None:
        for rows in torch.arange(sizes.tokens).split(2048):
            here = slice(int(rows[0]), int(rows[-1]) + 1)
            logits = logits_of(hidden[here], head)
            gradient = logits.view(dtype)[:, : sizes.vocab] if dtype != logits.dtype else logits
            if passes:
                lse, _ = kernels.logits.statistics(logits, targets[here])
                gradient = kernels.logits.gradient(logits, lse, targets[here], grad[here], dtype)
            _ = gradient @ head

    seconds = in_turn({"all": run, "products": lambda: run(False)}, device)
    useful = 4 * sizes.tokens * sizes.vocab * sizes.hidden
    emit(
        CASE,
        setting="head, one pass",
        ms=1e3 * seconds["all"],
        products_ms=1e3 * seconds["products"],
        tflops=useful / seconds["all"] / 1e12,
    )


def time_elementwise(kernels: Kernels, sizes: Sizes, device: torch.device) -> None:
    """Milliseconds, and bytes a second: each tensor counted once for every time it must be read or written."""
    ours, make, tokens = kernels.elementwise, maker(torch.bfloat16, device), sizes.tokens
    x, weight = make(tokens, sizes.hidden), make(sizes.hidden)
    _, inverse = ours.rms_norm(x, weight, 1e-6)
    gate_up, inner = make(tokens, 2 * sizes.inner), make(tokens, sizes.inner)
    heads, norm = make(tokens, sizes.heads, 128), make(128)
    angles = torch.rand(tokens, 64, device=device)
    cos, sin = angles.cos(), angles.sin()
    runs: dict[object, tuple[int, Callable[[], object]]] = {
        "norm": (2 * x.nbytes, lambda: ours.rms_norm(x, weight, 1e-6)),
        "norm backward": (3 * x.nbytes, lambda: ours.rms_norm_backward(x, x, inverse, weight)),
        "SwiGLU": (3 * inner.nbytes, lambda: ours.swiglu(gate_up)),
        "SwiGLU backward": (5 * inner.nbytes, lambda: ours.swiglu_backward_(gate_up, inner)),
        "rotary": (2 * heads.nbytes, lambda: ours.rotate(heads, norm, 1e-6, cos, sin)),
        "rotary backward": (
            3 * heads.nbytes,
            lambda: ours.rotate_backward(heads, heads, norm, 1e-6, cos, sin, heads),
        ),
    }
    seconds = in_turn({name: run for name, (_, run) in runs.items()}, device)
    for name, (num_bytes, _) in runs.items():
        took = seconds[name]
        emit(CASE, setting=str(name), ms=1e3 * took, terabytes_a_second=num_bytes / took / 1e12)
