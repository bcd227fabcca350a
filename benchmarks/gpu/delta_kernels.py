"""Where the time of one delta net goes, kernel by kernel: one rank's share of the 27B, forward and backward apart.

The backward's includes the forward that it runs again. Exchanges between ranks are copies (`check_delta.alike`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from lilo_miles_backend.bench.clock import synchronize, timed
from lilo_miles_backend.families.shape import DeltaShape
from lilo_miles_backend.ranks.attention import PackedRows
from lilo_miles_backend.ranks.collectives import ALONE, Axis
from lilo_miles_backend.ranks.kernels import triton_delta
from lilo_miles_backend.ranks.kernels.delta import delta_kernels
from lilo_miles_backend.ranks.kernels.delta_fla import CHUNK, WITHIN, chunk_errors
from lilo_miles_backend.ranks.kernels.delta_gradients import ChunkInputs
from lilo_miles_backend.ranks.stream import pack
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.check_delta import REAL, alike, make_mixer
from benchmarks.gpu.lines import at_most, emit

SHOWN = 26
WARPS = (2, 4)


def show_mixer(case: str, tokens: int, cp: int, device: torch.device) -> None:
    """Milliseconds by kernel of a mixer that has `tokens` of a row over `cp` ranks, the largest first."""
    shape = REAL.timed
    axis = ALONE if cp == 1 else Axis(name="cp", rank=0, size=cp, group=None)
    mixer = make_mixer(shape, delta_kernels(device), torch.bfloat16, device, axis)
    rows = PackedRows.of(pack((tokens * cp,), (tokens * cp,), 0, cp), device)
    width = shape.conv_channels + shape.value_width + 2 * shape.value_heads
    projected = torch.randn(tokens, width, device=device).bfloat16()
    grad = torch.randn(tokens, shape.value_width, device=device).bfloat16()
    with alike():
        out, saved = mixer.forward(projected, rows)
        ways: Mapping[str, Callable[[], object]] = {
            "forward": lambda: mixer.forward(projected, rows),
            "backward": lambda: mixer.backward(grad, projected, out, saved, rows),
        }
        for way, run in ways.items():
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
    """The step that is ours in each form: its errors, and its time for the heads of one rank."""
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

        errors = chunk_errors(run, device)
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
