"""Attention problems: the shapes and kernels of a device, and random streams with their numbers in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from lilo_miles_backend.ranks.kernels.attention_cudnn import CudnnAttention
from lilo_miles_backend.ranks.kernels.attention_fa4 import Fa4Attention, Fa4PackedAttention
from lilo_miles_backend.ranks.kernels.attention_flash import FlashAttention, FlashPackedAttention
from lilo_miles_backend.ranks.kernels.attention_kernel import DenseAttention, PackedAttention
from lilo_miles_backend.ranks.kernels.attention_reference import (
    CpuAttention,
    PlainAttention,
    PlainPackedAttention,
)


@dataclass(frozen=True)
class Heads:
    """One model's."""

    heads: int
    groups: int
    size: int

    def flops(self, lengths: Sequence[int]) -> float:
        """Of one causal forward."""
        return sum(2.0 * length**2 for length in lengths) * self.heads * self.size


@dataclass(frozen=True)
class Setting:
    """A device and what is run on it."""

    device: torch.device
    dtype: torch.dtype
    shapes: tuple[Heads, ...]
    checked: int
    """Tokens that are compared with float64."""
    timed: tuple[int, ...]
    """Row lengths whose speed is measured."""
    dense: tuple[Callable[[], DenseAttention], ...]
    packed: tuple[Callable[[], PackedAttention], ...]

    @classmethod
    def on(cls, device: torch.device) -> Setting:
        """All kernels of a GPU at real sizes in bfloat16, or the CPU's at tiny ones in float32, which it keeps sums in."""
        if device.type == "cpu":
            tiny = (Heads(4, 2, 16), Heads(6, 1, 32))
            return cls(
                device,
                torch.float32,
                tiny,
                128,
                (64, 256),
                (CpuAttention,),
                (PlainPackedAttention,),
            )
        return cls(
            device,
            torch.bfloat16,
            (Heads(32, 8, 128), Heads(24, 4, 256)),
            2048,
            (16_384, 65_536),
            (CudnnAttention, FlashAttention, Fa4Attention),
            (FlashPackedAttention, Fa4PackedAttention),
        )


@dataclass(frozen=True)
class Problem:
    """A whole stream."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor
    scale: float

    @classmethod
    def of(cls, setting: Setting, shape: Heads, tokens: int, seed: int = 0) -> Problem:
        generator = torch.Generator(setting.device).manual_seed(seed)
        q, k, v, grad = (
            torch.randn(tokens, heads, shape.size, generator=generator, device=setting.device).to(
                setting.dtype
            )
            for heads in (shape.heads, shape.groups, shape.groups, shape.heads)
        )
        return cls(q=q, k=k, v=v, grad=grad, scale=1 / math.sqrt(shape.size))

    def right(self, lengths: Sequence[int], causal: bool = True) -> list[torch.Tensor]:
        """Output and gradients in float64, row by row."""
        rows: list[list[torch.Tensor]] = []
        start = 0
        for length in lengths:
            q, k, v, grad = (
                x[None, start : start + length].double()
                for x in (self.q, self.k, self.v, self.grad)
            )
            start += length
            plain, how = PlainAttention(), {"causal": causal, "scale": self.scale}
            attended = plain.forward(q, k, v, **how)
            rows.append([attended.out, *plain.backward(grad, q, k, v, attended, **how)])
        return [torch.cat(some, 1)[0] for some in zip(*rows, strict=True)]
