"""Choice of attention: the kernels of a device, checked against the plain formulas before they are used.

The fast ones are other projects' private functions, which a release may change or a card not run: at start each is given
a small random problem, and one that raises or is wrong is put aside, with the reason in the description and the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from lilo_miles_backend.ranks.kernels.attention_cudnn import CudnnAttention
from lilo_miles_backend.ranks.kernels.attention_fa4 import Fa4Attention, Fa4PackedAttention
from lilo_miles_backend.ranks.kernels.attention_flash import FlashAttention, FlashPackedAttention
from lilo_miles_backend.ranks.kernels.attention_kernel import (
    AttentionKernels,
    DenseAttention,
    Merge,
    PackedAttention,
    PackedBounds,
)
from lilo_miles_backend.ranks.kernels.attention_merge import merge_
from lilo_miles_backend.ranks.kernels.attention_reference import (
    CpuAttention,
    PlainAttention,
    PlainPackedAttention,
)

logger = logging.getLogger(__name__)

TOLERANCE = 0.02
"""Relative error, in the 2-norm, that a kernel is put aside above. Rounding to bfloat16 makes 0.003; a wrong mask, scale
or gradient makes 0.1 and more."""
DENSE_FROM = 2048
"""Where a dense call of cuDNN overtakes the packed kernel of FA2: below, launching takes longer than attending."""
CUDNN_AT_ONCE_FROM = 16384
"""cuDNN plans for 0.1-0.15 s when it meets a shape. A row of this length wins that back in one pass of eight layers; one of
4,096 only in 25, and rows of all lengths must not stop the trainer for a plan each."""
FA4_FROM = 4096
"""FA4's packed kernel is as fast as its dense one, which is worth a call of its own only where keys are exchanged."""

Kernel = TypeVar("Kernel", DenseAttention, PackedAttention)


@dataclass(slots=True)
class Choice:
    """Takes the first kernel that works; what was put aside before it, and why, is in `notes`."""

    notes: list[str] = field(default_factory=list[str])

    def first(
        self, builders: Sequence[Callable[[], Kernel]], check: Callable[[Kernel], float]
    ) -> Kernel | None:
        """The first kernel that is installed and right."""
        for build in builders:
            try:
                kernel = build()
            except ImportError:
                continue
            logger.info("attention: checking %s", kernel.name)
            try:
                error = check(kernel)
            except Exception as problem:
                self._aside(kernel.name, f"{type(problem).__name__}: {problem}")
                continue
            if error <= TOLERANCE:
                return kernel
            self._aside(kernel.name, f"its relative error is {error:.3g}, not <= {TOLERANCE}")
        return None

    def _aside(self, name: str, reason: str) -> None:
        logger.warning("attention: %s is not used here: %s", name, reason)
        self.notes.append(f"{name} put aside: {reason}")


@dataclass(frozen=True, slots=True)
class Case:
    """What a kernel is checked for; one that compiles does so for exactly this."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    sharing: int
    """Query heads of a key/value head."""


def choose_attention(
    device: torch.device, dtype: torch.dtype, *, head_dim: int, sharing: int
) -> AttentionKernels:
    """Choose, check and report.

    Args:
        device: of this rank; on a GPU, kernels that compile on first use do so here.
        dtype: of the activations.
        head_dim: of the model.
        sharing: query heads of a key/value head.
    """
    if device.type != "cuda":  # the meta device too, on which a model is only counted
        cpu = CpuAttention()
        return AttentionKernels(
            dense=cpu,
            packed=None,
            merge=merge_,
            dense_from=0,
            dense_at_once_from=0,
            description=cpu.name,
        )
    if dtype not in (torch.bfloat16, torch.float16):
        return _plain(f"no kernel takes {dtype}")
    return _fast(Case(device, dtype, head_dim, sharing))


def _fast(case: Case) -> AttentionKernels:
    choice = Choice()
    dense = choice.first(
        (Fa4Attention, CudnnAttention, FlashAttention),
        lambda kernel: dense_error(kernel, case),
    )
    is_fa4 = isinstance(dense, Fa4Attention)
    packed = choice.first(
        (Fa4PackedAttention, FlashPackedAttention) if is_fa4 else (FlashPackedAttention,),
        lambda kernel: packed_error(kernel, case),
    )
    if dense is None:
        return _plain("; ".join(choice.notes))
    names = dense.name if packed is None else f"{dense.name}, {packed.name}"
    is_planning = isinstance(dense, CudnnAttention)
    dense_from = FA4_FROM if isinstance(packed, Fa4PackedAttention) else DENSE_FROM
    kernels = AttentionKernels(
        dense=dense,
        packed=packed,
        merge=_gpu_merge(),
        dense_from=dense_from,
        dense_at_once_from=CUDNN_AT_ONCE_FROM if is_planning else dense_from,
        description="; ".join((names, *choice.notes)),
    )
    logger.info(
        "attention: %s for heads of %s in %s", kernels.description, case.head_dim, case.dtype
    )
    return kernels


def _plain(reason: str) -> AttentionKernels:
    logger.warning("attention: plain formulas, which are slow: %s", reason)
    return AttentionKernels(
        dense=PlainAttention(),
        packed=None,
        merge=merge_,
        dense_from=0,
        dense_at_once_from=0,
        description=f"{PlainAttention.name}; {reason}",
    )


def _gpu_merge() -> Merge:
    from lilo_miles_backend.ranks.kernels import triton_merge  # noqa: PLC0415 - only CUDA builds have triton

    return triton_merge.merge_


def dense_error(kernel: DenseAttention, case: Case) -> float:
    """Largest relative error of a kernel's outputs and gradients, causal and full, against the plain formulas."""
    return max(
        error
        for causal, keys in ((True, 200), (False, 328))
        for error in _dense_errors(kernel, _problem(case, 200, keys), causal)
    )


def _dense_errors(
    kernel: DenseAttention, problem: Sequence[torch.Tensor], causal: bool
) -> Iterator[float]:
    plain, scale = PlainAttention(), problem[0].shape[-1] ** -0.5
    q, k, v, grad = (one[None] for one in problem)
    q32, k32, v32, grad32 = (one.float() for one in (q, k, v, grad))
    ours = kernel.forward(q, k, v, causal=causal, scale=scale)
    right = plain.forward(q32, k32, v32, causal=causal, scale=scale)
    yield from _errors(ours, right)
    yield from _errors(
        kernel.backward(grad, q, k, v, ours, causal=causal, scale=scale),
        plain.backward(grad32, q32, k32, v32, right, causal=causal, scale=scale),
    )


def packed_error(kernel: PackedAttention, case: Case) -> float:
    """As `dense_error`, of three rows of which two have more keys than queries."""
    queries, keys = (0, 70, 71, 200), (0, 198, 199, 328)
    bounds = PackedBounds(
        queries=torch.tensor(queries, dtype=torch.int32, device=case.device),
        keys=torch.tensor(keys, dtype=torch.int32, device=case.device),
        most_queries=129,
        most_keys=198,
    )
    plain, scale = PlainPackedAttention(), case.head_dim**-0.5
    q, k, v, grad = problem = _problem(case, queries[-1], keys[-1])
    q32, k32, v32, grad32 = (one.float() for one in problem)
    ours = kernel.forward(q, k, v, bounds, scale=scale)
    right = plain.forward(q32, k32, v32, bounds, scale=scale)
    grads = kernel.backward(grad, q, k, v, ours, bounds, scale=scale)
    right_grads = plain.backward(grad32, q32, k32, v32, right, bounds, scale=scale)
    return max(*_errors(ours, right), *_errors(grads, right_grads))


def _problem(case: Case, queries: int, keys: int) -> list[torch.Tensor]:
    """q, k, v and the output's gradient, for two key/value heads: the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((queries, 2 * case.sharing), (keys, 2), (keys, 2), (queries, 2 * case.sharing))
    return [
        torch.randn(*shape, case.head_dim, generator=generator).to(case.device, case.dtype)
        for shape in shapes
    ]


def _errors(ours: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> Iterator[float]:
    for one, other in zip(ours, right, strict=True):
        difference = (one.float() - other).norm() / other.norm()
        yield float("inf") if bool(difference.isnan()) else float(difference)
