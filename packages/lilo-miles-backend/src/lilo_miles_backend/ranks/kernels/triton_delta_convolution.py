# pyright: reportMissingImports=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalSubscript=false, reportArgumentType=false, reportOptionalOperand=false
"""Convolution of the delta nets in Triton: causal per channel, with SiLU; each reads and writes every number once.

The projection is read where it lies, and its gradient is written where it belongs, so that nothing is cut out or put
together. Arithmetic in float32. `delta_pieces.py` calls it.

Shapes: T tokens, I intervals, C channels of queries, keys and values, W the convolution's taps.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

TOKENS = 64
"""Of a chunk, which is what a program has; as the rule's, so that both have one table of them."""
CHANNELS = 64
"""Of a program; programs side by side have neighbouring channels, so that together they read whole tokens."""
WARPS = 4


def convolve(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    before: torch.Tensor | None,
    widths: tuple[int, int, int],
    bounds: torch.Tensor,
    chunks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, [T, width] each: SiLU of each channel's causal convolution.

    Args:
        x_TC: any stride over T.
        weight_CW: the last column is the current token's.
        before: contiguous [I, W - 1, C], the tokens before each interval; None: there are none.
        widths: channels of each of the three.
        bounds: int64 [I + 1], where each interval begins.
        chunks: int64 [N, 2]: the interval of each chunk of `TOKENS`, and its place in it.
    """
    q, k, v = (x_TC.new_empty(len(x_TC), width) for width in widths)
    _each(_forward, (q, k, v), x_TC, weight_CW, before, bounds, chunks)
    return q, k, v


def convolve_backward(
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    before: torch.Tensor | None,
    grad_x: torch.Tensor,
    bounds: torch.Tensor,
    chunks: torch.Tensor,
) -> torch.Tensor:
    """Writes the gradient of x to `grad_x`, of any stride over T; that of the convolution's sums, [T, C], is returned.

    Args:
        grads: of the three outputs, contiguous.
        x_TC: as in `convolve`, and so are the others.
        weight_CW: as there.
        before: as there.
        grad_x: [T, C].
        bounds: as there.
        chunks: as there.
    """
    sums = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    _each(_sums_back, grads, x_TC, weight_CW, before, bounds, chunks, sums)
    channels, taps = weight_CW.shape
    block = _block(channels)
    _taps_back[channels // block, len(chunks)](
        sums,
        grad_x,
        weight_CW,
        bounds,
        chunks,
        grad_x.stride(0),
        ALL=channels,
        TAPS=taps,
        BLOCK_T=TOKENS,
        BLOCK_C=block,
        num_warps=WARPS,
    )
    return sums


def _block(channels: int) -> int:
    """Channels of a program."""
    block = CHANNELS
    while channels % block:
        block //= 2
    return block


def _each(
    kernel: Any,
    three: tuple[torch.Tensor, ...],
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    before: torch.Tensor | None,
    bounds: torch.Tensor,
    chunks: torch.Tensor,
    *sums: torch.Tensor,
) -> None:
    """One launch for queries, keys and values each."""
    channels, taps = weight_CW.shape
    offset = 0
    for part in three:
        width = part.shape[1]
        block = _block(width)
        kernel[width // block, len(chunks)](
            part,
            x_TC,
            *sums,
            weight_CW,
            before,
            bounds,
            chunks,
            x_TC.stride(0),
            OFFSET=offset,
            WIDTH=width,
            ALL=channels,
            TAPS=taps,
            BLOCK_T=TOKENS,
            BLOCK_C=block,
            num_warps=WARPS,
        )
        offset += width


@triton.jit
def _chunk_of(bounds, chunks, BLOCK_T: tl.constexpr):
    """This program's chunk: its interval, place in it, first token and how many tokens it has."""
    chunk = tl.program_id(1).to(tl.int64)
    interval = tl.load(chunks + 2 * chunk)
    start = tl.load(chunks + 2 * chunk + 1) * BLOCK_T
    begin = tl.load(bounds + interval)
    count = tl.minimum(tl.load(bounds + interval + 1) - begin - start, BLOCK_T).to(tl.int32)
    return interval, start, begin + start, count


@triton.jit
def _convolved(
    x,
    weight,
    before,
    channel,
    interval,
    start,
    first,
    count,
    stride,
    ALL: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The sums of a chunk's tokens and some channels, float32."""
    within = tl.arange(0, BLOCK_T)
    total = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        # Of this chunk, or of the one before it in the same interval.
        inside = (start + within >= back) & (within < count)
        places = x + (first + within - back)[:, None] * stride + channel[None, :]
        value = tl.load(places, mask=inside[:, None], other=0.0).to(tl.float32)
        factor = tl.load(weight + channel * TAPS + tap).to(tl.float32)
        total += value * factor[None, :]
    if before is not None:  # noqa: SIM102 - this one is decided when it is compiled
        if start == 0:
            for tap in tl.static_range(TAPS - 1):
                earlier = (within + tap < TAPS - 1) & (within < count)
                row = interval * (TAPS - 1) + within + tap
                known = before + row[:, None] * ALL + channel[None, :]
                value = tl.load(known, mask=earlier[:, None], other=0.0).to(tl.float32)
                factor = tl.load(weight + channel * TAPS + tap).to(tl.float32)
                total += value * factor[None, :]
    return total


@triton.jit
def _forward(
    out,
    x,
    weight,
    before,
    bounds,
    chunks,
    stride,
    OFFSET: tl.constexpr,
    WIDTH: tl.constexpr,
    ALL: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    interval, start, first, count = _chunk_of(bounds, chunks, BLOCK_T)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = _convolved(
        x,
        weight,
        before,
        OFFSET + channel,
        interval,
        start,
        first,
        count,
        stride,
        ALL,
        TAPS,
        BLOCK_T,
        BLOCK_C,
    )
    within = tl.arange(0, BLOCK_T)
    places = out + (first + within)[:, None] * WIDTH + channel[None, :]
    result = total * tl.sigmoid(total)
    tl.store(places, result.to(out.dtype.element_ty), mask=(within < count)[:, None])


@triton.jit
def _sums_back(
    grad,
    x,
    sums,
    weight,
    before,
    bounds,
    chunks,
    stride,
    OFFSET: tl.constexpr,
    WIDTH: tl.constexpr,
    ALL: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    interval, start, first, count = _chunk_of(bounds, chunks, BLOCK_T)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = _convolved(
        x,
        weight,
        before,
        OFFSET + channel,
        interval,
        start,
        first,
        count,
        stride,
        ALL,
        TAPS,
        BLOCK_T,
        BLOCK_C,
    )
    within = tl.arange(0, BLOCK_T)
    real = (within < count)[:, None]
    token = (first + within)[:, None]
    slope = tl.load(grad + token * WIDTH + channel[None, :], mask=real, other=0.0).to(tl.float32)
    gate = tl.sigmoid(total)
    slope = slope * gate * (1 + total * (1 - gate))
    places = sums + token * ALL + OFFSET + channel[None, :]
    tl.store(places, slope.to(sums.dtype.element_ty), mask=real)


@triton.jit
def _taps_back(
    sums,
    grad_x,
    weight,
    bounds,
    chunks,
    stride,
    ALL: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    interval, _, first, count = _chunk_of(bounds, chunks, BLOCK_T)
    end = tl.load(bounds + interval + 1)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    within = tl.arange(0, BLOCK_T)
    token = first + within
    total = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        later = token + (TAPS - 1 - tap)
        places = sums + later[:, None] * ALL + channel[None, :]
        value = tl.load(places, mask=(later < end)[:, None], other=0.0).to(tl.float32)
        factor = tl.load(weight + channel * TAPS + tap).to(tl.float32)
        total += value * factor[None, :]
    places = grad_x + token[:, None] * stride + channel[None, :]
    tl.store(places, total.to(grad_x.dtype.element_ty), mask=(within < count)[:, None])
