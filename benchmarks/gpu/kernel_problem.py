"""Problems for the kernels' cases: sizes of an 8B model's layer, random adapters, and how long some runs take in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from lilo_miles_backend.ranks.kernels.kernels import Kernels
from lilo_miles_backend.ranks.lora import Factors, Segment

QUEUED_CYCLES = 2_000_000
"""About a millisecond."""


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


def maker(dtype: torch.dtype, device: torch.device) -> Callable[..., torch.Tensor]:
    """Draws random numbers of a shape."""
    return lambda *shape: torch.randn(*shape, device=device, dtype=dtype)


def factors_of(
    features: int, parts: Sequence[int], rank: int, dtype: torch.dtype, device: torch.device
) -> Factors:
    """Random factors of one adapter, without gradients."""
    make = maker(dtype, device)
    a, b = make(len(parts) * rank, features), make(sum(parts), rank)
    return Factors(
        scale=1.5,
        lora_rank=rank,
        a=a.mul_(0.02),
        b=b.mul_(0.02),
        grad_a=torch.zeros(a.shape, device=device),
        grad_b=torch.zeros(b.shape, device=device),
    )


def segments_of(factors: Sequence[Factors], counts: Sequence[int]) -> tuple[Segment, ...]:
    """So many tokens of each, one after another."""
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


def forward_backward(
    kernels: Kernels,
    x: torch.Tensor,
    grad: torch.Tensor,
    y: torch.Tensor,
    dx: torch.Tensor,
    segments: Sequence[Segment],
    parts: Sequence[int],
) -> None:
    """All that adapters do to one linear, in place of y, dx and the factors' gradients."""
    products = kernels.lora.shrink(x, segments)
    kernels.lora.expand_(y, products, segments, parts)
    kernels.lora.backward(grad, x, products, segments, parts, dx)


def logits_of(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """In float32."""
    if hidden.is_cuda:
        return torch.mm(hidden, head.t(), out_dtype=torch.float32)
    return hidden.float() @ head.float().t()


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
