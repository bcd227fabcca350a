# pyright: reportMissingImports=false
"""Where the time of one delta net goes, kernel by kernel: one rank's share of the 27B, forward and backward apart.

The backward's includes the forward that it runs again. Exchanges between ranks are copies (`check_delta.alike`). Then each
kernel of fla in other configurations, one at a time, and parts of other lengths: what `delta_tuning.py` chooses from.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from lilo_miles_backend.bench.clock import synchronize, timed
from lilo_miles_backend.families.shape import DeltaShape
from lilo_miles_backend.ranks.attention import PackedRows
from lilo_miles_backend.ranks.collectives import ALONE, Axis
from lilo_miles_backend.ranks.kernels import delta_fla, triton_delta
from lilo_miles_backend.ranks.kernels.delta import delta_kernels
from lilo_miles_backend.ranks.kernels.delta_choice import CHUNK, WITHIN, piece_errors, step_errors
from lilo_miles_backend.ranks.kernels.delta_gradients import ChunkInputs
from lilo_miles_backend.ranks.kernels.delta_pieces import TritonPieces
from lilo_miles_backend.ranks.kernels.delta_tuning import tuners
from lilo_miles_backend.ranks.stream import pack
from torch.profiler import ProfilerActivity, profile
from triton import Config

from benchmarks.gpu.check_delta import REAL, alike, make_mixer
from benchmarks.gpu.lines import at_most, emit, part

CASE = "delta_kernels"
SHOWN = 26
WARPS = (2, 4)
TOKENS, CP = 32_768, 8
PARTS = (1024, 2048, 8192, 16_384)
OTHERS: tuple[tuple[str, Mapping[str, int], int, int], ...] = (
    ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", {"BV": 64}, 4, 2),
    ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", {"BV": 64}, 4, 1),
    ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", {"BV": 32}, 4, 1),
    ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", {"BV": 128}, 4, 1),
    ("chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64", {"BV": 64}, 4, 2),
    ("chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64", {"BV": 64}, 4, 1),
    ("chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64", {"BV": 32}, 4, 1),
    ("chunk_fwd_kernel_o", {"BK": 128, "BV": 128}, 8, 3),
    ("chunk_fwd_kernel_o", {"BK": 64, "BV": 128}, 4, 2),
    ("chunk_gated_delta_rule_fwd_kkt_solve_kernel", {"BK": 64}, 1, 3),
    ("chunk_gated_delta_rule_fwd_kkt_solve_kernel", {"BK": 64}, 4, 3),
    ("recompute_w_u_fwd_kernel", {}, 4, 3),
    ("recompute_w_u_fwd_kernel", {}, 2, 2),
    ("prepare_wy_repr_bwd_kernel", {}, 4, 3),
    ("prepare_wy_repr_bwd_kernel", {}, 8, 2),
    ("chunk_bwd_kernel_dv_local", {}, 4, 3),
)
"""Kernel, blocks, warps, stages."""


@dataclass(frozen=True)
class Ways:
    """One mixer on its data, there and back."""

    forward: Callable[[], object]
    backward: Callable[[], object]


def main() -> None:
    """What runs, then what else might."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    started = time.monotonic()
    with part(CASE, "kernels"):
        show_mixer(CASE, TOKENS, CP, device)
        show_step(CASE, TOKENS, device)
    with alike():
        for tokens in PARTS:
            with part(CASE, f"parts of {tokens}"), patch.object(delta_fla, "PART_TOKENS", tokens):
                show_ways(f"parts of {tokens} tokens", ways_of(TOKENS, CP, device))
        ways = ways_of(TOKENS, CP, device)
        show_ways("as it is", ways)
        for name, blocks, warps, stages in OTHERS:
            what = f"{name}, {dict(blocks)}, {warps} warps, {stages} stages"
            with part(CASE, what), configured(name, blocks, warps, stages):
                show_ways(what, ways)
        show_ways("as it is", ways)
    emit(CASE, setting="all", seconds=time.monotonic() - started)


@contextmanager
def configured(name: str, blocks: Mapping[str, int], warps: int, stages: int) -> Iterator[None]:
    """One kernel of fla in another configuration."""
    found: list[Any] = [tuner for tuner in tuners() if tuner.base_fn.__name__ == name]
    before = [tuner.configs for tuner in found]
    assert found, f"fla has no kernel {name}"
    for tuner in found:
        tuner.configs = [Config(dict(blocks), num_warps=warps, num_stages=stages)]
    try:
        yield
    finally:
        for tuner, configs in zip(found, before, strict=True):
            tuner.configs = configs


def show_ways(what: str, ways: Ways) -> None:
    """Milliseconds of both."""
    there, back = (timed(run, warm=2, runs=5) for run in (ways.forward, ways.backward))
    emit(CASE, setting=what, forward_ms=1e3 * there.best_s, backward_ms=1e3 * back.best_s)


def ways_of(tokens: int, cp: int, device: torch.device) -> Ways:
    """A mixer that has `tokens` of a row over `cp` ranks."""
    shape = REAL.timed
    axis = ALONE if cp == 1 else Axis(name="cp", rank=0, size=cp, group=None)
    mixer = make_mixer(shape, delta_kernels(device), torch.bfloat16, device, axis)
    rows = PackedRows.of(pack((tokens * cp,), (tokens * cp,), 0, cp), device)
    width = shape.conv_channels + shape.value_width + 2 * shape.value_heads
    projected = torch.randn(tokens, width, device=device).bfloat16()
    grad = torch.randn(tokens, shape.value_width, device=device).bfloat16()
    out, saved = mixer.forward(projected, rows)
    return Ways(
        forward=lambda: mixer.forward(projected, rows),
        backward=lambda: mixer.backward(grad, projected, out, saved, rows),
    )


def show_mixer(case: str, tokens: int, cp: int, device: torch.device) -> None:
    """Milliseconds by kernel of a mixer that has `tokens` of a row over `cp` ranks, the largest first."""
    with alike():
        ways = ways_of(tokens, cp, device)
        for way, run in (("forward", ways.forward), ("backward", ways.backward)):
            taken = timed(run, warm=2, runs=5)
            emit(
                case,
                setting=f"a delta net's {way}, maps over {cp} ranks",
                tokens=tokens,
                ms=1e3 * taken.median_s,
                gib=taken.peak_gib,
            )
            _show(case, run)


def _show(case: str, run: Callable[[], object]) -> None:
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        run()
        synchronize()
    found = [
        (event.self_device_time_total / 1e3, event.count, event.key)
        for event in profiler.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA  # pyright: ignore[reportPrivateImportUsage]
    ]
    emit(case, setting="  all kernels", ms=sum(ms for ms, *_ in found), calls=len(found))
    for ms, calls, name in sorted(found, reverse=True)[:SHOWN]:
        short = name.replace("void at::native::", "").replace("(anonymous namespace)::", "")
        emit(case, setting=f"  {short[:90]}", ms=ms, calls=int(calls))


def show_step(case: str, tokens: int, device: torch.device) -> None:
    """The step that is ours in each form: its errors, and its time for the heads of one rank; the errors of the others."""
    shape: DeltaShape = REAL.timed
    groups, heads, size = shape.key_heads, shape.value_heads, shape.key_dim
    count = tokens // CHUNK

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).div_(size**0.5).bfloat16()

    given = ChunkInputs(
        q=normal(1, tokens, groups, size),
        k=normal(1, tokens, groups, size),
        v=normal(1, tokens, heads, size),
        do=normal(1, tokens, heads, size),
        dv=normal(1, tokens, heads, size),
        g=-torch.rand(1, tokens, heads, device=device),
        h=normal(1, count, heads, size, size),
        dh=normal(1, count, heads, size, size),
    )
    bounds = torch.tensor([0, tokens], device=device)
    places = torch.arange(count, device=device)
    chunks = torch.stack((torch.zeros_like(places), places), 1)
    for warps in WARPS:

        def run(
            *given: ChunkInputs, warps: int = warps, **asked: object
        ) -> tuple[torch.Tensor, ...]:
            return triton_delta.chunk_gradients(*given, **asked, warps=warps)  # pyright: ignore[reportArgumentType]

        errors = step_errors(run, device)
        taken = timed(
            lambda run=run: run(
                given, scale=size**-0.5, bounds=bounds, chunks=chunks, chunk_size=CHUNK
            ),
            warm=2,
            runs=5,
        )
        emit(
            case,
            setting=f"gradients inside chunks, {warps} warps, with the sums over heads",
            tokens=tokens,
            ms=1e3 * taken.median_s,
            largest_error=max(errors),
        )
        if warps == triton_delta.WARPS:
            at_most(case, "gradients inside chunks, against float32", max(errors), WITHIN)
    worst = max(piece_errors(TritonPieces(), device))
    at_most(case, "convolution and gated norm, against float32", worst, WITHIN)


if __name__ == "__main__":
    main()
