"""Kernels of the device against float64, one by one; then how long they take at the shapes of an 8B model.

Bounds are what rounding to bfloat16 costs: 2^-9 of a number at most, so about 1.7e-3 of a tensor. What repeats and what
does not depend on its neighbours must do so bit for bit.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch
from lilo_miles_backend.bench.native import ADAM
from lilo_miles_backend.ranks.kernels.choose import kernels_of
from lilo_miles_backend.ranks.kernels.kernels import AdamBuffers, Kernels
from lilo_miles_backend.ranks.kernels.reference import REFERENCE
from lilo_miles_backend.ranks.lora import Factors

from benchmarks.gpu.kernel_problem import (
    SMALL,
    Sizes,
    factors_of,
    forward_backward,
    logits_of,
    maker,
    segments_of,
    shares,
)
from benchmarks.gpu.kernel_times import time_elementwise, time_head, time_lora
from benchmarks.gpu.lines import at_most, bound, emit, part

CASE = "check_kernels"
ROUNDING = {torch.bfloat16: 3e-3, torch.float32: 2e-6}
"""Of one tensor that was computed in float32 and rounded once."""
PRODUCTS = {torch.bfloat16: 5e-3, torch.float32: 5e-6}
"""Of a product whose operands were rounded."""


def main() -> None:
    """All parts; each fails for itself."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    sizes = Sizes() if device.type == "cuda" else SMALL
    torch.backends.cuda.matmul.allow_tf32 = False
    kernels = kernels_of(device)
    emit(CASE, setting="kernels", lora=type(kernels.lora).__name__)
    started = time.monotonic()
    for dtype in (torch.bfloat16, torch.float32):
        with part(CASE, f"norms, SwiGLU, rotary in {dtype}"):
            check_elementwise(kernels, sizes, dtype, device)
        with part(CASE, f"adapters in {dtype}"):
            check_lora(kernels, sizes, dtype, device)
    with part(CASE, "logprobs and the gradient of hidden states"):
        check_logits(kernels, sizes, device)
    with part(CASE, "neighbours"):
        check_neighbours(kernels, sizes, device)
    with part(CASE, "AdamW"):
        check_optimizer(kernels, sizes, device)
    emit(CASE, setting="checks and their compilations", seconds=time.monotonic() - started)
    with part(CASE, "time of adapters"):
        time_lora(kernels, sizes, device)
    with part(CASE, "time of the head"):
        time_head(kernels, sizes, device)
    with part(CASE, "time of norms, SwiGLU, rotary"):
        time_elementwise(kernels, sizes, device)
    emit(CASE, setting="all", seconds=time.monotonic() - started)


def check_elementwise(
    kernels: Kernels, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> None:
    """Each function forward and backward, with heads of 128 (all rotated) and 256 (64 rotated)."""
    ours, exact, limit = kernels.elementwise, REFERENCE.elementwise, ROUNDING[dtype]
    tokens, make = sizes.checked, maker(dtype, device)
    x, grad, weight = make(tokens, sizes.hidden), make(tokens, sizes.hidden), make(sizes.hidden)
    y, inverse = ours.rms_norm(x, weight, 1e-6)
    y64, inverse64 = exact.rms_norm(x.double(), weight.double(), 1e-6)
    dx = ours.rms_norm_backward(grad, x, inverse, weight)
    dx64 = exact.rms_norm_backward(grad.double(), x.double(), inverse64, weight.double())
    _hold(f"norm, {dtype}", limit, forward=(y, y64), backward=(dx, dx64))
    gate_up, grad = make(tokens, 2 * sizes.inner), make(tokens, sizes.inner)
    a, a64 = ours.swiglu(gate_up), exact.swiglu(gate_up.double())
    d64 = exact.swiglu_backward_(gate_up.double(), grad.double())
    d = ours.swiglu_backward_(gate_up, grad)
    _hold(f"SwiGLU, {dtype}", limit, forward=(a, a64), backward=(d, d64))
    for head_dim, rotated, norms in ((128, 128, True), (256, 64, True), (128, 128, False)):
        projected = make(tokens, 3 * head_dim + 64)
        heads = projected[:, : 3 * head_dim].unflatten(1, (3, head_dim))
        weight = make(head_dim) if norms else None
        angles = torch.rand(tokens, rotated // 2, device=device) * 6
        cos, sin, grad = angles.cos(), angles.sin(), make(tokens, 3, head_dim)
        wide = (None if weight is None else weight.double(), 1e-6, cos.double(), sin.double())
        q, q64 = ours.rotate(heads, weight, 1e-6, cos, sin), exact.rotate(heads.double(), *wide)
        back64 = torch.empty_like(q64)
        exact.rotate_backward(grad.double(), heads.double(), *wide, back64)
        ours.rotate_backward(grad, heads, weight, 1e-6, cos, sin, heads)
        figure = f"rotary {rotated} of {head_dim}, {'' if norms else 'no '}norm, {dtype}"
        _hold(figure, limit, forward=(q, q64), backward=(heads, back64))


def check_lora(kernels: Kernels, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
    """One adapter; many of several lora_ranks with empty, single-token and odd segments; and many passes of two."""
    features, parts = sizes.linears["in_proj"]
    many = (8, 32, 1, 16, 32, 8, 32, 32)
    cuts = {
        "one adapter": ((32,), (0,), (sizes.checked,)),
        "adapters of ranks 8, 32, 1, 16": (many, range(8), shares(sizes.checked, 8, empty=2)),
        # Programs that run at once must not add to one gradient.
        "eight passes each of two adapters": ((32, 16), (0, 1) * 8, shares(sizes.checked, 16)),
    }
    for name, (ranks, owners, counts) in cuts.items():
        factors = [factors_of(features, parts, rank, dtype, device) for rank in ranks]
        wide = [_double(one) for one in factors]
        make = maker(dtype, device)
        x, grad = make(sizes.checked, features), make(sizes.checked, sum(parts))
        y, dx = make(sizes.checked, sum(parts)), make(sizes.checked, features)
        y64, dx64 = y.double(), dx.double()
        for held, used, out, back in ((factors, kernels, y, dx), (wide, REFERENCE, y64, dx64)):
            segments = segments_of([held[owner] for owner in owners], counts)
            inputs, grads = (x, grad) if held is factors else (x.double(), grad.double())
            forward_backward(used, inputs, grads, out, back, segments, parts)
        pairs = {"y": (y, y64), "dx": (dx, dx64)}
        for owner in sorted({owner for owner, count in zip(owners, counts, strict=True) if count}):
            ours, exact = factors[owner], wide[owner]
            pairs |= {f"dA {owner}": (ours.grad_a, exact.grad_a)}
            pairs |= {f"dB {owner}": (ours.grad_b, exact.grad_b)}
        _hold(f"{name}, {dtype}", PRODUCTS[dtype], **pairs)


def check_neighbours(kernels: Kernels, sizes: Sizes, device: torch.device) -> None:
    """An adapter's gradients alone, beside 31 others, and again beside other ones: equal bits."""
    features, parts = sizes.linears["fc1"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokens = sizes.checked
    make = maker(dtype, device)
    x, grad = make(tokens, features), make(tokens, sum(parts))
    original = factors_of(features, parts, 32, dtype, device)
    found: list[tuple[torch.Tensor, ...]] = []
    for others in (0, 31, 31):
        ours = _cleared(original)
        room = shares(tokens, others) if others else []
        whole_x, whole_grad = (
            torch.cat([make(tokens, source.shape[1]), source]) if others else source
            for source in (x, grad)
        )
        all_factors = [factors_of(features, parts, 32, dtype, device) for _ in room] + [ours]
        segments = segments_of(all_factors, [*room, tokens])
        y = torch.zeros_like(whole_grad)
        dx = torch.zeros_like(whole_x)
        forward_backward(kernels, whole_x, whole_grad, y, dx, segments, parts)
        found.append((ours.grad_a, ours.grad_b, y[-tokens:], dx[-tokens:]))
    names = ("dA", "dB", "y", "dx")
    for what, one, other in (("beside 31 others as alone", 0, 1), ("beside 31 more", 1, 2)):
        pairs = zip(names, found[one], found[other], strict=True)
        different = ", ".join(name for name, a, b in pairs if not torch.equal(a, b))
        figure = f"an adapter {what}"
        bound(CASE, figure, different or "equal bits", "equal bits", not different)


def check_logits(kernels: Kernels, sizes: Sizes, device: torch.device) -> None:
    """Logits spread as a trained head's (standard deviation 3), targets drawn from them."""
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    tokens = min(512, sizes.checked)
    head = torch.randn(sizes.vocab, sizes.hidden, device=device, dtype=dtype) * 0.02
    hidden = torch.randn(tokens, sizes.hidden, device=device, dtype=dtype)
    hidden *= 3.0 / (0.02 * sizes.hidden**0.5)
    logits64 = hidden.double() @ head.double().t()
    targets = torch.distributions.Categorical(logits=logits64.float()).sample()[:, None]
    grad = torch.rand(tokens, 1, device=device) - 0.5
    logprobs64 = torch.log_softmax(logits64, 1)
    gradient64 = -logprobs64.exp() * grad.double()
    gradient64.scatter_add_(1, targets, grad.double())
    expected = gradient64 @ head.double()
    at_targets = logprobs64.gather(1, targets)
    del logits64, gradient64, logprobs64
    logits = logits_of(hidden, head)
    lse, picked = kernels.logits.statistics(logits, targets)
    error = (picked - lse).double() - at_targets
    gradient = kernels.logits.gradient(logits, lse, targets, grad, dtype)
    at_most(CASE, "logprobs: largest error", error.abs().max().item(), 1e-4)
    emit(CASE, setting="logprobs: mean error", error=error.abs().mean().item())
    at_most(CASE, "gradient of hidden states", _error(gradient @ head, expected), 2.5e-3)


def check_optimizer(kernels: Kernels, sizes: Sizes, device: torch.device) -> None:
    """One step from zero moments with the model's copy, clipped or not, at the size of a large adapter."""
    make, count = maker(torch.float32, device), sizes.hidden * sizes.inner
    for words, clip in (("not clipped", 0.0), ("clipped", 1.0)):
        weights = make(count)
        ours = AdamBuffers(
            weights=weights,
            gradients=make(count),
            exp_avg=torch.zeros_like(weights),
            exp_avg_sq=torch.zeros_like(weights),
            copy=weights.to(torch.bfloat16),
        )
        names = ("weights", "gradients", "exp_avg", "exp_avg_sq")
        exact = AdamBuffers(**{name: getattr(ours, name).double() for name in names}, copy=None)
        params, norm = replace(ADAM, grad_clip_norm=clip), exact.gradients.norm()
        kernels.optimizer.adamw_(ours, params, step=1, norm=norm)
        REFERENCE.optimizer.adamw_(exact, params, step=1, norm=norm)
        pairs = {
            name: (getattr(ours, name), getattr(exact, name))
            for name in names
            if "grad" not in name
        }
        _hold(f"AdamW, {words}", ROUNDING[torch.float32], **pairs)
        left = int(ours.gradients.count_nonzero())
        bound(CASE, f"AdamW, {words}: gradients left", left, "0", left == 0)


def _double(one: Factors) -> Factors:
    names = ("a", "b", "grad_a", "grad_b")
    return replace(one, **{name: getattr(one, name).double() for name in names})


def _cleared(one: Factors) -> Factors:
    return replace(one, grad_a=torch.zeros_like(one.grad_a), grad_b=torch.zeros_like(one.grad_b))


def _error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


def _hold(figure: str, limit: float, **pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    errors = {name: _error(*pair) for name, pair in pairs.items()}
    worst = max(
        errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name]
    )
    at_most(CASE, f"{figure}: {worst}", errors[worst], limit)


if __name__ == "__main__":
    main()
