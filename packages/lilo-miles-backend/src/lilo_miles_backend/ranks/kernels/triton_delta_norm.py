# pyright: reportMissingImports=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalSubscript=false, reportArgumentType=false, reportOptionalOperand=false
"""Gated norm of the delta nets in Triton: RMSNorm of each head times SiLU of its gate.

The gate is read in the projection where it lies, and its gradient is written where it belongs. Arithmetic in float32.
`delta_pieces.py` calls it.

Shapes: T tokens, H heads of V.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, WARPS = 32, 4


def gated_norm(
    x_THV: torch.Tensor, gate_THV: torch.Tensor, weight_V: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMSNorm per head times SiLU of the gate, [T, H, V]; the gate has any stride over T."""
    out = torch.empty_like(x_THV)
    tokens, heads, width = x_THV.shape
    _norm[triton.cdiv(tokens * heads, ROWS),](
        x_THV,
        gate_THV,
        weight_V,
        out,
        eps,
        tokens * heads,
        gate_THV.stride(0),
        HEADS=heads,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ROWS=ROWS,
        num_warps=WARPS,
    )
    return out


def gated_norm_backward(
    grad_THV: torch.Tensor,
    x_THV: torch.Tensor,
    gate_THV: torch.Tensor,
    weight_V: torch.Tensor,
    eps: float,
    grad_gate: torch.Tensor,
) -> torch.Tensor:
    """The gradient of x; that of the gate is written to `grad_gate`, of any stride over T."""
    grad_x = torch.empty_like(x_THV)
    tokens, heads, width = x_THV.shape
    _norm_back[triton.cdiv(tokens * heads, ROWS),](
        grad_THV,
        x_THV,
        gate_THV,
        weight_V,
        grad_x,
        grad_gate,
        eps,
        tokens * heads,
        gate_THV.stride(0),
        grad_gate.stride(0),
        HEADS=heads,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ROWS=ROWS,
        num_warps=WARPS,
    )
    return grad_x


@triton.jit
def _norm_inputs(
    x,
    gate,
    weight,
    eps,
    rows,
    stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Of this program's heads of tokens: where they lie, which are there, normed x, its factor, gate and weight."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    there = (row < rows)[:, None] & (at < WIDTH)[None, :]
    value = tl.load(x + row[:, None] * WIDTH + at[None, :], mask=there, other=0.0).to(tl.float32)
    gates = (row // HEADS)[:, None] * stride + (row % HEADS)[:, None] * WIDTH + at[None, :]
    gate_value = tl.load(gate + gates, mask=there, other=0.0).to(tl.float32)
    factor = 1 / tl.sqrt(tl.sum(value * value, 1) / WIDTH + eps)
    weights = tl.load(weight + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    return row, at, there, value * factor[:, None], factor, gate_value, weights[None, :]


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x,
    gate,
    weight,
    out,
    eps,
    rows,
    stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row, at, there, normed, _, gated, weights = _norm_inputs(
        x, gate, weight, eps, rows, stride, HEADS, WIDTH, BLOCK, ROWS
    )
    result = normed * weights * gated * tl.sigmoid(gated)
    tl.store(out + row[:, None] * WIDTH + at[None, :], result.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows"])
def _norm_back(
    grad,
    x,
    gate,
    weight,
    grad_x,
    grad_gate,
    eps,
    rows,
    stride,
    grad_stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row, at, there, normed, factor, gated, weights = _norm_inputs(
        x, gate, weight, eps, rows, stride, HEADS, WIDTH, BLOCK, ROWS
    )
    own = row[:, None] * WIDTH + at[None, :]
    slope = tl.load(grad + own, mask=there, other=0.0).to(tl.float32)
    open_ = tl.sigmoid(gated)
    of_gate = slope * normed * weights * open_ * (1 + gated * (1 - open_))
    of_normed = slope * gated * open_ * weights
    shared = tl.sum(of_normed * normed, 1) / WIDTH
    of_x = factor[:, None] * (of_normed - normed * shared[:, None])
    tl.store(grad_x + own, of_x.to(grad_x.dtype.element_ty), mask=there)
    gates = (row // HEADS)[:, None] * grad_stride + (row % HEADS)[:, None] * WIDTH + at[None, :]
    tl.store(grad_gate + gates, of_gate.to(grad_gate.dtype.element_ty), mask=there)
