"""Speed of attention: kernels alone, and what the trainer composes of them. FLOPs: see `Heads.flops`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lilo_miles_backend.bench.clock import Timing, timed
from lilo_miles_backend.ranks.attention import Attention, PackedRows
from lilo_miles_backend.ranks.kernels.attention_kernel import (
    Attended,
    AttentionKernels,
    DenseAttention,
)
from lilo_miles_backend.ranks.stream import pack

from benchmarks.gpu.attention_problem import Heads, Problem, Setting
from benchmarks.gpu.attention_room import Room, axis
from benchmarks.gpu.lines import at_least, emit

CASE = "check_attention"
FLOOR_TFLOPS = {128: 480.0, 256: 380.0}
"""Forward and backward together at the longest row: a tenth below the slowest that was measured of cuDNN."""
PIECES_SHARE = 0.9
"""Speed of a context-parallel rank's pieces, exchange left out, against the whole row on one rank."""


def time_dense(setting: Setting, shape: Heads, kernel: DenseAttention) -> None:
    """One causal row of each length."""
    for tokens in setting.timed:
        forward, backward = _times(setting, shape, kernel, tokens, warm=1)
        _speed(f"{kernel.name}, one row", shape, [tokens], forward.best_s, backward.best_s)


def time_new_lengths(setting: Setting, shape: Heads, kernel: DenseAttention) -> None:
    """What the first call at a length costs over the second: kernels may plan or compile for it."""
    for index in range(3):
        tokens = setting.checked + 37 * (index + 1)
        forward, backward = _times(setting, shape, kernel, tokens, warm=0)
        emit(
            CASE,
            setting=f"{kernel.name}, heads of {shape.size}: a new length, {tokens} tokens",
            first_ms=1e3 * (forward.all_s[0] + backward.all_s[0]),
            again_ms=1e3 * (forward.best_s + backward.best_s),
        )


def _times(
    setting: Setting, shape: Heads, kernel: DenseAttention, tokens: int, *, warm: int
) -> tuple[Timing, Timing]:
    """Of two forwards and of two backwards, after warm ones."""
    problem = Problem.of(setting, shape, tokens)
    q, k, v, grad = (x[None] for x in (problem.q, problem.k, problem.v, problem.grad))
    scale = problem.scale

    def forward() -> Attended:
        return kernel.forward(q, k, v, causal=True, scale=scale)

    there = timed(forward, warm=warm, runs=2)
    attended = forward()
    back = timed(
        lambda: kernel.backward(grad, q, k, v, attended, causal=True, scale=scale),
        warm=warm,
        runs=2,
    )
    return there, back


def time_pieces(setting: Setting, shape: Heads, chosen: AttentionKernels) -> None:
    """The longest row whole, and one rank's share of it over two and over eight ranks, exchange left out."""
    tokens = setting.timed[-1]
    whole = _time_composed(setting, shape, Attention(chosen), [tokens], 0, 1, "whole row")
    floor = FLOOR_TFLOPS.get(shape.size)
    if floor is not None:
        figure = f"heads of {shape.size}, {tokens} tokens: TFLOP/s forward and backward"
        at_least(CASE, figure, whole, floor)
    with Room(size=1):
        for cp, rank in ((2, 0), (2, 1), (8, 3)):
            label = f"rank {rank} of {cp}"
            share = _time_composed(
                setting, shape, Attention(chosen, axis(None, rank, cp)), [tokens], rank, cp, label
            )
            if floor is not None:
                figure = (
                    f"heads of {shape.size}, {tokens} tokens, {label}: speed against a whole row's"
                )
                at_least(CASE, figure, share / whole, PIECES_SHARE)


def time_packed(setting: Setting, shape: Heads, chosen: AttentionKernels) -> None:
    """Packs of the longest row's tokens, as the trainer would run them, and all rows in packed calls."""
    tokens = setting.timed[-1]
    many = tokens // 64
    packs = {
        "16 equal rows": [tokens // 16] * 16,
        "half one row, 32 short": [tokens // 2] + [many] * 32,
        "mixed": [tokens // 4, tokens // 8, tokens // 8]
        + [tokens // 16 + tokens // 1024 * i for i in range(-4, 4)],
    }
    for label, lengths in packs.items():
        _time_composed(setting, shape, Attention(chosen), lengths, 0, 1, label)
        if chosen.packed is not None:
            only = replace(chosen, dense_from=1 << 40, dense_at_once_from=1 << 40)
            name = f"{label}, packed calls only"
            _time_composed(setting, shape, Attention(only), lengths, 0, 1, name)


def _time_composed(
    setting: Setting,
    shape: Heads,
    attention: Attention,
    lengths: Sequence[int],
    rank: int,
    cp: int,
    label: str,
) -> float:
    """TFLOP/s of forward and backward together."""
    stream = pack(lengths, lengths, rank, cp)
    rows = PackedRows.of(stream, setting.device)
    problem = Problem.of(setting, shape, sum(lengths) // cp)
    q, k, v, grad = problem.q, problem.k, problem.v, problem.grad
    # Shapes become known by being seen once.
    attention.forward(q, attention.keys(k, v), PackedRows.of(stream, setting.device), problem.scale)
    attended = attention.forward(q, attention.keys(k, v), rows, problem.scale)
    forward = timed(
        lambda: attention.forward(q, attention.keys(k, v), rows, problem.scale), warm=1, runs=2
    )
    backward = timed(
        lambda: attention.backward(grad, q, attention.keys(k, v), attended, rows, problem.scale),
        warm=1,
        runs=2,
    )
    name = f"as the trainer runs it, {label}"
    return _speed(name, shape, lengths, forward.best_s, backward.best_s, cp)


def _speed(
    label: str,
    shape: Heads,
    lengths: Sequence[int],
    forward_s: float,
    backward_s: float,
    cp: int = 1,
) -> float:
    flops = shape.flops(lengths) / cp / 1e12
    both = 3.5 * flops / (forward_s + backward_s)
    emit(
        CASE,
        setting=label,
        heads=f"{shape.heads}/{shape.groups} x {shape.size}",
        tokens=sum(lengths),
        forward_ms=1e3 * forward_s,
        backward_ms=1e3 * backward_s,
        forward_tflops=flops / forward_s,
        backward_tflops=2.5 * flops / backward_s,
        tflops=both,
    )
    return both
