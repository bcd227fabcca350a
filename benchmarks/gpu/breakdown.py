"""Breakdown: where the device's time of one step of the slice goes, by kind of kernel, and how long it had nothing to do."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping

import torch
from lilo_miles_backend.bench.clock import synchronize
from lilo_miles_backend.bench.native import Layout, Trainer, definition, random_datums
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.lines import emit, part
from benchmarks.gpu.models import model_folder

CASE = "breakdown"
KINDS: Mapping[str, tuple[str, ...]] = {
    "communication": ("nccl",),
    "attention": ("flash", "fmha", "sdpa", "mha", "cudnn"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas"),
    "copies": ("memcpy", "memset"),
}
SHOWN, PAUSES = 14, 5


def main() -> None:
    """One backend, one profiled step at each length."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--keep", default="all")
    parser.add_argument("--lengths", nargs="*", type=int, default=[4096, 16_384])
    given = parser.parse_args()
    folder, architecture = model_folder(given.model, given.layers)
    layout = Layout(device=given.device, keep=given.keep)
    with Trainer(definition(folder, architecture, max(given.lengths), layout)) as trainer:
        for tokens in given.lengths:
            with part(CASE, f"{tokens} tokens"):
                data = {trainer.models[0]: random_datums([tokens], architecture.vocab)}
                for _ in range(3):
                    trainer.step(data)
                synchronize()
                started = time.perf_counter()
                trainer.step(data)
                synchronize()
                wall_ms = 1e3 * (time.perf_counter() - started)
                with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
                    trainer.step(data)
                    synchronize()
                show(profiler, tokens, wall_ms)
                gaps(profiler, tokens)


def gaps(profiler: profile, tokens: int) -> None:
    """When the device had nothing to do: all of it, and the longest pauses with the kernels before and after."""
    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA  # pyright: ignore[reportPrivateImportUsage]
    )
    pauses: list[tuple[float, str, str]] = []
    end, last = (kernels[0][0], "the start") if kernels else (0.0, "")
    for start, stop, name in kernels:
        if start > end:
            pauses.append((start - end, last[:50], name[:50]))
        if stop > end:
            end, last = stop, name
    whole = sum(pause for pause, *_ in pauses)
    emit(CASE, setting="pauses between kernels", tokens=tokens, ms=whole / 1e3, number=len(pauses))
    for pause, before, after in sorted(pauses, reverse=True)[:PAUSES]:
        emit(CASE, setting="  a pause", tokens=tokens, ms=pause / 1e3, after=before, before=after)


def show(profiler: profile, tokens: int, wall_ms: float) -> None:
    """Milliseconds and calls by kind, the largest first."""
    kinds: dict[str, list[float]] = {}
    for event in profiler.key_averages():
        if event.device_type != torch.autograd.DeviceType.CUDA:  # pyright: ignore[reportPrivateImportUsage]
            continue
        kind = next(
            (k for k, words in KINDS.items() if any(w in event.key.lower() for w in words)),
            event.key.replace("void at::native::", "")[:110],
        )
        found = kinds.setdefault(kind, [0.0, 0.0])
        found[0] += event.self_device_time_total / 1e3
        found[1] += event.count
    busy = sum(ms for ms, _ in kinds.values())
    emit(
        CASE,
        setting="a step",
        tokens=tokens,
        wall_ms=wall_ms,
        kernels_ms=busy,
        idle_ms=wall_ms - busy,
    )
    for kind, (ms, calls) in sorted(kinds.items(), key=lambda item: -item[1][0])[:SHOWN]:
        emit(CASE, setting=f"  {kind}", tokens=tokens, ms=ms, calls=int(calls))


if __name__ == "__main__":
    main()
