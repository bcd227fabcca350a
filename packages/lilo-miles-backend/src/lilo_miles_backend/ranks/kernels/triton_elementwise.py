# pyright: reportMissingImports=false, reportIndexIssue=false
"""Norms, SwiGLU and rotary embedding as Triton kernels: `kernels.Elementwise` on a GPU.

Each reads and writes every activation once; all of them are bound by memory. Not matrix products. Called by layers and
mixers through `choose.py`; imported only where Triton is, which comes with the CUDA builds of torch.

Shapes: T tokens, H hidden size, F inner size of the MLP, N heads, D head size, R rotated features of a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lilo_miles_backend.ranks.kernels import triton_rotary

ROW_WARPS_FROM = 4096
"""Row length from which a norm gets 8 warps instead of 4."""
SWIGLU_BLOCK = 1024
ROTATE_FEATURES = 2048
"""Of some tokens' heads: what one program has at a time."""
ROTATE_HEADS = 4
"""Of one program, one after another: a token's angles, which are twice a head's bytes, are read once for them."""


class TritonElementwise:
    """Implements `kernels.Elementwise` for bfloat16, float16 and float32."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute x / rms(x) * weight, and 1 / rms in float32."""
        flat = _rows(x)
        y = torch.empty_like(flat, memory_format=torch.contiguous_format)
        inverse = flat.new_empty(flat.shape[0], dtype=torch.float32)
        if flat.numel():
            size = flat.shape[1]
            _rms_norm[(flat.shape[0],)](
                flat,
                weight,
                y,
                inverse,
                flat.stride(0),
                size,
                eps,
                BLOCK=triton.next_power_of_2(size),
                num_warps=_row_warps(size),
            )
        return y.view(x.shape), inverse.view(*x.shape[:-1], 1)

    def rms_norm_backward(
        self, grad: torch.Tensor, x: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Gradient of x."""
        flat, grads = _rows(x), _rows(grad)
        result = torch.empty_like(flat, memory_format=torch.contiguous_format)
        if flat.numel():
            size = flat.shape[1]
            _rms_norm_backward[(flat.shape[0],)](
                grads,
                flat,
                inverse.contiguous(),
                weight,
                result,
                grads.stride(0),
                flat.stride(0),
                size,
                BLOCK=triton.next_power_of_2(size),
                num_warps=_row_warps(size),
            )
        return result.view(x.shape)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Compute silu(gate) * up, [T, F]."""
        num_tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
        assert gate_up.stride(1) == 1, "the fused projection's features lie next to each other"
        result = gate_up.new_empty(num_tokens, inner)
        if result.numel():
            _swiglu[(num_tokens, triton.cdiv(inner, SWIGLU_BLOCK))](
                gate_up, result, inner, gate_up.stride(0), BLOCK=SWIGLU_BLOCK
            )
        return result

    def swiglu_backward_(self, gate_up: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of the fused input, in place of it."""
        num_tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
        assert gate_up.stride(1) == 1, "the fused projection's features lie next to each other"
        assert grad.stride(1) == 1, "the gradient's features lie next to each other"
        if grad.numel():
            _swiglu_backward[(num_tokens, triton.cdiv(inner, SWIGLU_BLOCK))](
                gate_up, grad, inner, gate_up.stride(0), grad.stride(0), BLOCK=SWIGLU_BLOCK
            )
        return gate_up

    def rotate(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """Norm per head where there is a weight, then the rotary embedding; [T, N, D], contiguous."""
        num_tokens, heads, size = x.shape
        assert x.stride(2) == 1, "a head's features lie next to each other"
        result = torch.empty((num_tokens, heads, size), dtype=x.dtype, device=x.device)
        if result.numel():
            triton_rotary.rotate[_rotate_grid(x)](
                x,
                x if weight is None else weight,
                cos,
                sin,
                result,
                num_tokens,
                heads,
                x.stride(0),
                x.stride(1),
                cos.stride(0),
                sin.stride(0),
                eps,
                D=size,
                BLOCK_D=triton.next_power_of_2(size),
                HALF=cos.shape[1],
                NORM=weight is not None,
                TOKENS=_rotate_tokens(size),
                HEADS=ROTATE_HEADS,
            )
        return result

    def rotate_backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write the gradient of x into `out`, which may be x itself."""
        num_tokens, heads, size = x.shape
        assert x.stride(2) == grad.stride(2) == out.stride(2) == 1, (
            "a head's features lie next to each other"
        )
        if out.numel():
            triton_rotary.rotate_backward[_rotate_grid(x)](
                grad,
                x,
                x if weight is None else weight,
                cos,
                sin,
                out,
                num_tokens,
                heads,
                grad.stride(0),
                grad.stride(1),
                x.stride(0),
                x.stride(1),
                out.stride(0),
                out.stride(1),
                cos.stride(0),
                sin.stride(0),
                eps,
                D=size,
                BLOCK_D=triton.next_power_of_2(size),
                HALF=cos.shape[1],
                NORM=weight is not None,
                TOKENS=_rotate_tokens(size),
                HEADS=ROTATE_HEADS,
            )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[..., H] as rows whose features lie next to each other; a view where that is possible."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _rotate_tokens(size: int) -> int:
    return max(1, ROTATE_FEATURES // triton.next_power_of_2(size))


def _rotate_grid(x: torch.Tensor) -> tuple[int, int]:
    tokens, heads, size = x.shape
    return triton.cdiv(tokens, _rotate_tokens(size)), triton.cdiv(heads, ROTATE_HEADS)


def _row_warps(size: int) -> int:
    return 8 if size >= ROW_WARPS_FROM else 4


@triton.jit
def _rms_norm(x, weight, y, inverse, x_stride, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / size + eps)
    tl.store(inverse + row, scale)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * size + column, (value * scale * w).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_backward(
    grad, x, inverse, weight, result, grad_stride, x_stride, size, BLOCK: tl.constexpr
):
    # With n = x * inverse: dx = inverse * (g w - n * mean(g w n)).
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    g *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(inverse + row)
    normed = value * scale
    mean = tl.sum(g * normed, 0) / size
    dx = scale * (g - normed * mean)
    tl.store(result + row * size + column, dx.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu(gate_up, result, inner, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    here = gate_up + row * stride + column
    gate = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(here + inner, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(result + row * inner + column, value.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(gate_up, grad, inner, stride, grad_stride, BLOCK: tl.constexpr):
    # With s = sigmoid(gate): d gate = g up s (1 + gate (1 - s)), d up = g gate s.
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    here = gate_up + row * stride + column
    gate = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(here + inner, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    dtype = gate_up.dtype.element_ty
    tl.store(here, (g * up * s * (1.0 + gate * (1.0 - s))).to(dtype), mask=inside)
    tl.store(here + inner, (g * gate * s).to(dtype), mask=inside)
