"""Kernels of the device against float64, one by one; then how long they take at the shapes of an 8B model.

Bounds are what rounding to bfloat16 costs: 2^-9 of a number at most, so about 1.7e-3 of a tensor. What repeats and what
does not depend on its neighbours must do so bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from lilo_miles_backend.bench.native import ADAM
from lilo_miles_backend.ranks.kernels.choose import kernels_of
from lilo_miles_backend.ranks.kernels.kernels import AdamBuffers, Kernels
from lilo_miles_backend.ranks.kernels.reference import REFERENCE
from lilo_miles_backend.ranks.lora import Factors, Segment

from benchmarks.gpu.lines import at_most, bound, emit, part

CASE = "check_kernels"
ROUNDING = {torch.bfloat16: 3e-3, torch.float32: 2e-6}
"""Of one tensor that was computed in float32 and rounded once."""
QUEUED_CYCLES = 2_000_000
"""About a millisecond."""
PRODUCTS = {torch.bfloat16: 5e-3, torch.float32: 5e-6}
"""Of a product whose operands were rounded."""


@dataclass(frozen=True)
class Sizes:
    """Of what is checked, and of what is timed."""

    hidden: int = 4096
    inner: int = 12288
    heads: int = 32
    groups: int = 8
    vocab: int = 151_936
    tokens: int = 16_384
    checked: int = 1500
    """Tokens, for the comparisons; no multiple of anything."""

    @property
    def linears(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """The four of a layer: input features, and output features of each module."""
        wide, narrow = 128 * self.heads, 128 * self.groups
        return {
            "in_proj": (self.hidden, (wide, narrow, narrow)),
            "out_proj": (wide, (self.hidden,)),
            "fc1": (self.hidden, (self.inner, self.inner)),
            "fc2": (self.inner, (self.hidden,)),
        }


SMALL = Sizes(hidden=64, inner=160, heads=1, groups=1, vocab=500, tokens=256, checked=90)


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


# Exactness.


def check_elementwise(
    kernels: Kernels, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> None:
    """Each function forward and backward, with heads of 128 (all rotated) and 256 (64 rotated)."""
    ours, exact, limit = kernels.elementwise, REFERENCE.elementwise, ROUNDING[dtype]
    tokens, make = sizes.checked, _maker(dtype, device)
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
    """One adapter; and many of several lora_ranks with empty, single-token and odd segments."""
    features, parts = sizes.linears["in_proj"]
    many = (8, 32, 1, 16, 32, 8, 32, 32)
    cuts = {
        "one adapter": ((32,), (sizes.checked,)),
        "adapters of ranks 8, 32, 1, 16": (many, shares(sizes.checked, len(many), empty=2)),
    }
    for name, (ranks, counts) in cuts.items():
        factors = [factors_of(features, parts, rank, dtype, device) for rank in ranks]
        wide = [_double(one) for one in factors]
        make = _maker(dtype, device)
        x, grad = make(sizes.checked, features), make(sizes.checked, sum(parts))
        y, dx = make(sizes.checked, sum(parts)), make(sizes.checked, features)
        y64, dx64 = y.double(), dx.double()
        for held, used, out, back in ((factors, kernels, y, dx), (wide, REFERENCE, y64, dx64)):
            segments = segments_of(held, counts)
            inputs, grads = (x, grad) if held is factors else (x.double(), grad.double())
            _forward_backward(used, inputs, grads, out, back, segments, parts)
        pairs = {"y": (y, y64), "dx": (dx, dx64)}
        pairs |= {f"dA {i}": (a.grad_a, b.grad_a) for i, (a, b) in _used(factors, wide, counts)}
        pairs |= {f"dB {i}": (a.grad_b, b.grad_b) for i, (a, b) in _used(factors, wide, counts)}
        _hold(f"{name}, {dtype}", PRODUCTS[dtype], **pairs)


def check_neighbours(kernels: Kernels, sizes: Sizes, device: torch.device) -> None:
    """An adapter's gradients alone, beside 31 others, and again beside other ones: equal bits."""
    features, parts = sizes.linears["fc1"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokens = sizes.checked
    make = _maker(dtype, device)
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
        _forward_backward(kernels, whole_x, whole_grad, y, dx, segments, parts)
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
    logits = _logits(hidden, head)
    lse, picked = kernels.logits.statistics(logits, targets)
    error = (picked - lse).double() - at_targets
    gradient = kernels.logits.gradient(logits, lse, targets, grad, dtype)
    at_most(CASE, "logprobs: largest error", error.abs().max().item(), 1e-4)
    emit(CASE, setting="logprobs: mean error", error=error.abs().mean().item())
    at_most(CASE, "gradient of hidden states", _error(gradient @ head, expected), 2.5e-3)


def check_optimizer(kernels: Kernels, sizes: Sizes, device: torch.device) -> None:
    """One step from zero moments with the model's copy, clipped or not, at the size of a large adapter."""
    make, count = _maker(torch.float32, device), sizes.hidden * sizes.inner
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


# Time.


def time_lora(kernels: Kernels, sizes: Sizes, device: torch.device) -> None:
    """The adapters' part of one layer's four linears, beside the base products; the same tokens for every count."""
    counts = (1, 4, 8, 32)
    base_s = 0.0
    library_s = 0.0
    took = dict.fromkeys(counts, 0.0)
    dtype = torch.bfloat16
    for features, parts in sizes.linears.values():
        make = _maker(dtype, device)
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
                _forward_backward(used, x, grad, y, dx, segments, parts)

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
    make = _maker(dtype, device)
    head, hidden = make(sizes.vocab, sizes.hidden), make(sizes.tokens, sizes.hidden)
    targets = torch.randint(0, sizes.vocab, (sizes.tokens, 1), device=device)
    grad = torch.rand(sizes.tokens, 1, device=device)

    def run(passes: bool = True) -> None:
        for rows in torch.arange(sizes.tokens).split(2048):
            here = slice(int(rows[0]), int(rows[-1]) + 1)
            logits = _logits(hidden[here], head)
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
    ours, make, tokens = kernels.elementwise, _maker(torch.bfloat16, device), sizes.tokens
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


# Shared.


def _forward_backward(
    kernels: Kernels,
    x: torch.Tensor,
    grad: torch.Tensor,
    y: torch.Tensor,
    dx: torch.Tensor,
    segments: Sequence[Segment],
    parts: Sequence[int],
) -> None:
    products = kernels.lora.shrink(x, segments)
    kernels.lora.expand_(y, products, segments, parts)
    kernels.lora.backward(grad, x, products, segments, parts, dx)


def factors_of(
    features: int, parts: Sequence[int], rank: int, dtype: torch.dtype, device: torch.device
) -> Factors:
    make = _maker(dtype, device)
    a, b = make(len(parts) * rank, features), make(sum(parts), rank)
    return Factors(
        scale=1.5,
        lora_rank=rank,
        a=a.mul_(0.02),
        b=b.mul_(0.02),
        grad_a=torch.zeros(a.shape, device=device),
        grad_b=torch.zeros(b.shape, device=device),
    )


def _double(one: Factors) -> Factors:
    names = ("a", "b", "grad_a", "grad_b")
    return replace(one, **{name: getattr(one, name).double() for name in names})


def _cleared(one: Factors) -> Factors:
    return replace(one, grad_a=torch.zeros_like(one.grad_a), grad_b=torch.zeros_like(one.grad_b))


def segments_of(factors: Sequence[Factors], counts: Sequence[int]) -> tuple[Segment, ...]:
    ends = torch.tensor(counts).cumsum(0).tolist()
    return tuple(
        Segment(factors=one, tokens=slice(end - count, end))
        for one, count, end in zip(factors, counts, ends, strict=True)
    )


def shares(tokens: int, number: int, empty: int | None = None) -> list[int]:
    """Uneven counts that add up to `tokens`; one of them may be 0, and then the one after it is 1."""
    weights = [1.0 + 0.5 * (index % 3) for index in range(number)]
    counts = [max(1, int(tokens * weight / sum(weights)) - 1) for weight in weights]
    if empty is not None:
        counts[empty], counts[empty + 1] = 0, 1
    counts[-1] += tokens - sum(counts)
    return counts


def _used(
    factors: Sequence[Factors], wide: Sequence[Factors], counts: Sequence[int]
) -> list[tuple[int, tuple[Factors, Factors]]]:
    pairs = zip(factors, wide, strict=True)
    return [(i, pair) for i, pair in enumerate(pairs) if counts[i]]


def _maker(dtype: torch.dtype, device: torch.device) -> Callable[..., torch.Tensor]:
    return lambda *shape: torch.randn(*shape, device=device, dtype=dtype)


def _logits(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    if hidden.is_cuda:
        return torch.mm(hidden, head.t(), out_dtype=torch.float32)
    return hidden.float() @ head.float().t()


def _error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


def _hold(figure: str, limit: float, **pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    errors = {name: _error(*pair) for name, pair in pairs.items()}
    worst = max(
        errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name]
    )
    at_most(CASE, f"{figure}: {worst}", errors[worst], limit)


def in_turn(
    runs: dict[object, Callable[[], object]], device: torch.device, rounds: int = 7
) -> dict[object, float]:
    """Median seconds of each, all in turn, so that clocks and heat are shared; two warm rounds."""
    taken: dict[object, list[float]] = {name: [] for name in runs}
    for index in range(rounds + 2):
        for name, run in runs.items():
            seconds = _seconds(run, device)
            if index >= 2:
                taken[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(QUEUED_CYCLES)  # the device is busy until all of it is queued, as in a step
    first.record()
    run()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3


if __name__ == "__main__":
    main()
