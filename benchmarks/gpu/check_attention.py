"""Attention on the device against float64: each kernel, and what is composed of them; then how fast they are.

Bounds are what rounding inputs and outputs to bfloat16 costs, as measured for all these kernels: outputs 2.0e-3, dq
2.4e-3, dk and dv 2.3-3.0e-3; merged pieces 2.8e-3 and 3.1e-3. Speeds count one forward as 2 n^2 d a head and a backward
as 2.5 of them.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from lilo_miles_backend.ranks.attention import Attention, PackedRows
from lilo_miles_backend.ranks.kernels.attention_choice import choose_attention
from lilo_miles_backend.ranks.kernels.attention_kernel import (
    AttentionKernels,
    DenseAttention,
    PackedAttention,
)
from lilo_miles_backend.ranks.stream import Stream, pack

from benchmarks.gpu.attention_problem import Heads, Problem, Setting
from benchmarks.gpu.attention_room import Room, axis
from benchmarks.gpu.attention_speed import time_dense, time_new_lengths, time_packed, time_pieces
from benchmarks.gpu.lines import at_most, emit, part

CASE = "check_attention"
NAMES = ("out", "dq", "dk", "dv")
WHOLE = {"out": 2.6e-3, "dq": 3.0e-3, "dk": 3.4e-3, "dv": 3.4e-3}
"""Relative error in the 2-norm; a quarter above what was measured, since the numbers are drawn anew."""
MERGED = {"out": 3.5e-3, "dq": 3.9e-3, "dk": 3.9e-3, "dv": 3.9e-3}


def main() -> None:
    """All parts; each fails for itself."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", type=int, help="of the heads: 128 or 256; both without it")
    arguments = parser.parse_args()
    setting = Setting.on(torch.device(arguments.device))
    torch.backends.cuda.matmul.allow_tf32 = False
    started = time.monotonic()
    for shape in setting.shapes:
        if arguments.size not in (None, shape.size):
            continue
        with part(CASE, f"choice for heads of {shape.size}"):
            before = time.monotonic()
            chosen = choose_attention(
                setting.device,
                setting.dtype,
                head_dim=shape.size,
                sharing=shape.heads // shape.groups,
            )
            emit(
                CASE,
                setting=f"choice for heads of {shape.size}",
                kernels=chosen.description,
                seconds=time.monotonic() - before,
            )
            check_streams(setting, shape, chosen)
            time_pieces(setting, shape, chosen)
            time_packed(setting, shape, chosen)
        for build in setting.dense:
            with part(CASE, f"{build.__name__} for heads of {shape.size}"):
                if (kernel := _built(build)) is not None:
                    check_dense(setting, shape, kernel)
                    time_dense(setting, shape, kernel)
                    time_new_lengths(setting, shape, kernel)
        for build_packed in setting.packed:
            with part(CASE, f"{build_packed.__name__} for heads of {shape.size}"):
                if (packed := _built(build_packed)) is not None:
                    check_packed(setting, shape, chosen, packed)
    emit(CASE, setting="all", seconds=time.monotonic() - started)


def _built(build: Callable[[], Any]) -> Any:
    try:
        return build()
    except ImportError as missing:
        emit(CASE, setting=build.__name__, skipped=str(missing))
        return None


def _hold(
    figure: str,
    ours: Sequence[torch.Tensor],
    right: Sequence[torch.Tensor],
    limits: dict[str, float],
) -> None:
    for name, one, other in zip(NAMES, ours, right, strict=True):
        error = (one.double() - other).norm() / other.norm()
        at_most(CASE, f"{figure}: {name}", float(error), limits[name])


def check_dense(setting: Setting, shape: Heads, kernel: DenseAttention) -> None:
    """One causal row; one full call; whether the same call gives the same bits (reported, not required)."""
    tokens = setting.checked
    problem = Problem.of(setting, shape, tokens)
    q, k, v, grad = (x[None] for x in (problem.q, problem.k, problem.v, problem.grad))
    for causal in (True, False):
        how = {"causal": causal, "scale": problem.scale}
        runs: list[list[torch.Tensor]] = []
        for _ in range(2):
            attended = kernel.forward(q, k, v, **how)
            grads = kernel.backward(grad, q, k, v, attended, **how)
            runs.append([attended.out[0], *(one[0] for one in grads)])
        name = f"{kernel.name}, heads of {shape.size}, {'causal' if causal else 'full'}"
        _hold(name, runs[0], problem.right([tokens], causal), WHOLE)
        same = {n: bool(torch.equal(a, b)) for n, a, b in zip(NAMES, *runs, strict=True)}
        emit(CASE, setting=f"{name}: same bits again", **same)


def check_packed(
    setting: Setting, shape: Heads, chosen: AttentionKernels, packed: PackedAttention
) -> None:
    """Odd rows in one packed call, and the same rows cut over four ranks in two calls each."""
    tokens = setting.checked
    lengths = _odd(tokens)
    kernels = _with_rule(chosen, tokens * tokens, packed)
    name = f"{packed.name}, heads of {shape.size}"
    _check_composed(setting, shape, kernels, lengths, 1, f"{name}, {len(lengths)} rows", WHOLE)
    _check_composed(setting, shape, kernels, lengths, 4, f"{name}, cut over 4", MERGED)


def check_streams(setting: Setting, shape: Heads, chosen: AttentionKernels) -> None:
    """What the trainer runs: one row and mixed rows, whole and cut over two and four ranks."""
    tokens = setting.checked
    for label, lengths in (
        ("one row", [tokens]),
        ("rows of one length", [tokens // 4] * 4),
        ("mixed rows", [tokens // 2, *_odd(tokens // 2)]),
    ):
        # Rows as long as the first are dense calls and the others packed ones, as far as there is a kernel for those.
        kernels = _with_rule(chosen, lengths[0] // 4, chosen.packed)
        for cp in (1, 2, 4):
            figure = f"{label}, heads of {shape.size}, " + (f"cut over {cp}" if cp > 1 else "whole")
            limits = WHOLE if cp == 1 else MERGED
            _check_composed(setting, shape, kernels, lengths, cp, figure, limits)


def _with_rule(
    chosen: AttentionKernels, dense_from: int, packed: PackedAttention | None
) -> AttentionKernels:
    return replace(chosen, packed=packed, dense_from=dense_from, dense_at_once_from=dense_from)


def _odd(tokens: int) -> list[int]:
    """Rows of many lengths, of one token too, that are `tokens` together."""
    lengths = [1, 3, 17, tokens // 3, tokens // 5 + 1]
    return [*lengths, tokens - sum(lengths)]


def _check_composed(
    setting: Setting,
    shape: Heads,
    kernels: AttentionKernels,
    lengths: Sequence[int],
    cp: int,
    figure: str,
    limits: dict[str, float],
) -> None:
    padded = [-(-length // (2 * cp)) * 2 * cp if cp > 1 else length for length in lengths]
    problem = Problem.of(setting, shape, sum(padded))
    streams = [pack(lengths, padded, rank, cp) for rank in range(cp)]
    _zero_padding(problem, streams[0] if cp == 1 else pack(lengths, padded, 0, 1))
    found: list[list[torch.Tensor]] = [[] for _ in range(cp)]
    room = Room(size=cp)
    axes = [axis(room, rank, cp) for rank in range(cp)]

    def run(rank: int) -> None:
        places = torch.from_numpy(streams[rank].places).to(setting.device)
        found[rank] = _attend(Attention(kernels, axes[rank]), problem, places, streams[rank])

    with room:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(cp)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    right = problem.right(padded)
    ours = [torch.empty_like(one, dtype=setting.dtype) for one in right]
    for stream, some in zip(streams, found, strict=True):
        assert some, "a rank failed; its traceback is above"
        for whole, one in zip(ours, some, strict=True):
            whole[torch.from_numpy(stream.places).to(setting.device)] = one
    _hold(figure, ours, right, limits)


def _zero_padding(problem: Problem, whole: Stream) -> None:
    """No one reads what padding gives, so its gradient is zero."""
    problem.grad[torch.from_numpy(~whole.is_real).to(problem.grad.device)] = 0


def _attend(
    attention: Attention, problem: Problem, places: torch.Tensor, stream: Stream
) -> list[torch.Tensor]:
    q, k, v, grad = (x[places] for x in (problem.q, problem.k, problem.v, problem.grad))
    rows = PackedRows.of(stream, q.device)
    attended = attention.forward(q, attention.keys(k, v), rows, problem.scale)
    grads = attention.backward(grad, q, attention.keys(k, v), attended, rows, problem.scale)
    return [attended.out, *grads]


if __name__ == "__main__":
    main()
