"""How the adapters' kernels are best cut on this card: milliseconds of each kernel under several launches.

What is the least for the four linears of an 8B layer together is what `launches.py` should say. Not part of
`run.py`: python -m benchmarks.gpu.adapter_launches [--device cuda]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lilo_miles_backend.ranks.kernels.launches import Launch, Launches
from lilo_miles_backend.ranks.kernels.triton_lora import TritonLora

from benchmarks.gpu.kernel_problem import Sizes, factors_of, in_turn, segments_of, shares
from benchmarks.gpu.lines import emit, part

CASE = "adapter_launches"
CHOICES: dict[str, tuple[Launch, ...]] = {
    "shrink": (
        Launch(rows=64, columns=128, warps=4, stages=3),
        Launch(rows=64, columns=64, warps=4, stages=4),
        Launch(rows=128, columns=64, warps=4, stages=4),
    ),
    "expand": (
        Launch(rows=64, columns=128, warps=4, stages=1),
        Launch(rows=64, columns=64, warps=4, stages=1),
        Launch(rows=128, columns=128, warps=8, stages=1),
        Launch(rows=128, columns=64, warps=4, stages=1),
    ),
    "grad_products": (
        Launch(rows=64, columns=128, warps=4, stages=3),
        Launch(rows=64, columns=64, warps=4, stages=5),
        Launch(rows=128, columns=64, warps=4, stages=4),
    ),
    "grad_x": (
        Launch(rows=64, columns=128, warps=4, stages=1),
        Launch(rows=64, columns=64, warps=4, stages=1),
        Launch(rows=128, columns=128, warps=8, stages=1),
        Launch(rows=128, columns=64, warps=4, stages=1),
    ),
    "outer": (
        Launch(rows=64, columns=128, warps=4, stages=3),
        Launch(rows=64, columns=64, warps=4, stages=4),
        Launch(rows=32, columns=128, warps=4, stages=4),
    ),
}


def main() -> None:
    """Each kernel, each launch, with 1 and with 32 adapters."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    for kernel, launches in CHOICES.items():
        with part(CASE, kernel):
            for count in (1, 32):
                measure(kernel, launches, count, device)


def measure(kernel: str, launches: tuple[Launch, ...], count: int, device: torch.device) -> None:
    """Milliseconds of one kernel, over the four linears."""
    taken = dict.fromkeys(launches, 0.0)
    sizes = Sizes()
    for features, parts in sizes.linears.values():
        factors = [factors_of(features, parts, 32, torch.bfloat16, device) for _ in range(count)]
        segments = segments_of(factors, shares(sizes.tokens, count))
        wide = sum(parts)
        x, grad, y, dx = (
            torch.randn(sizes.tokens, n, device=device, dtype=torch.bfloat16)
            for n in (features, wide, wide, features)
        )
        runs: dict[object, Callable[[], object]] = {
            launch: call(kernel, launch, x, grad, y, dx, segments, parts) for launch in launches
        }
        for launch, seconds in in_turn(runs, device, rounds=5).items():
            taken[launch] += seconds  # pyright: ignore[reportArgumentType]
    for launch, seconds in taken.items():
        cut = f"{launch.rows} x {launch.columns}, {launch.warps} warps, {launch.stages} stages"
        emit(CASE, setting=f"{kernel}, {count} adapters, {cut}", ms=1e3 * seconds)


def call(
    kernel: str,
    launch: Launch,
    x: torch.Tensor,
    grad: torch.Tensor,
    y: torch.Tensor,
    dx: torch.Tensor,
    segments: Any,
    parts: tuple[int, ...],
) -> Callable[[], object]:
    """One kernel alone, with all that it takes prepared; reaches into what `backward` is made of."""
    lora: Any = TritonLora(replace(Launches(), **{kernel: launch}))
    products = lora.shrink(x, segments)
    plan = lora._plan(products, segments)
    columns = lora._columns_of(parts, lora._launches.outer, x.device)
    inputs = lora._columns_of((x.shape[1],), lora._launches.outer, x.device)
    outers = (
        (x, products, plan, inputs, {"modules": len(parts), "of_a": True}),
        (grad, products, plan, columns, {"modules": 1, "of_a": False}),
    )
    calls: dict[str, Callable[[], object]] = {
        "shrink": lambda: lora.shrink(x, segments),
        "expand": lambda: lora.expand_(y, products, segments, parts),
        "grad_products": lambda: lora._grad_products(grad, products, plan, columns),
        "grad_x": lambda: lora._add_grad_x(dx, products, plan, len(parts)),
        "outer": lambda: [lora._add_outer(*args, **how) for *args, how in outers],
    }
    return calls[kernel]


if __name__ == "__main__":
    main()
