"""Clock: seconds of a step between two synchronizations, and the most memory that was allocated meanwhile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Some runs of one step, after warm ones."""

    best_s: float
    median_s: float
    all_s: tuple[float, ...]
    """Warm ones first."""
    peak_gib: float
    """Of torch's allocator over all of them; 0 on CPU."""


def timed(
    step: Callable[[], object], *, warm: int, runs: int, budget_s: float | None = None
) -> Timing:
    """Time a step that is run `warm + runs` times.

    Args:
        step: what is timed.
        warm: runs before those that count.
        runs: runs that count.
        budget_s: end early, with one that counts at least, once all of them took this long.
    """
    _collect()
    seconds: list[float] = []
    for index in range(warm + runs):
        synchronize()
        started = time.perf_counter()
        step()
        synchronize()
        seconds.append(time.perf_counter() - started)
        if budget_s is not None and index >= warm and sum(seconds) > budget_s:
            break
    measured = seconds[warm:]
    return Timing(
        best_s=min(measured),
        median_s=statistics.median(measured),
        all_s=tuple(round(one, 4) for one in seconds),
        peak_gib=peak_gib(),
    )


def synchronize() -> None:
    """Wait for the device, if this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def peak_gib() -> float:
    """Most memory that was allocated since the last `timed` began."""
    return torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_initialized() else 0.0


def _collect() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
