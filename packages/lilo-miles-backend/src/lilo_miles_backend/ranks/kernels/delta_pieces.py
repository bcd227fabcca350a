# pyright: reportMissingImports=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalSubscript=false, reportArgumentType=false
"""TritonPieces: convolution and gated norm of the delta nets on GPUs, by `triton_delta_convolution.py` and `triton_delta_norm.py`."""

from __future__ import annotations

import torch
from fla.ops.utils.index import prepare_chunk_indices

from lilo_miles_backend.ranks.kernels import triton_delta_convolution, triton_delta_norm
from lilo_miles_backend.ranks.kernels.delta_kernels import Three, Widths
from lilo_miles_backend.ranks.layers.intervals import Intervals


class TritonPieces:
    """`DeltaPieces` on a GPU."""

    def convolve(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        before: torch.Tensor | None,
        intervals: Intervals,
        widths: Widths,
    ) -> Three:
        """See `DeltaPieces.convolve`."""
        before = None if before is None else before.contiguous()
        chunks = chunks_of(intervals)
        return triton_delta_convolution.convolve(
            x_TC, weight_CW, before, widths, intervals.bounds, chunks
        )

    def convolve_backward(
        self,
        grads: Three,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        before: torch.Tensor | None,
        intervals: Intervals,
        grad_x: torch.Tensor,
    ) -> torch.Tensor | None:
        """See `DeltaPieces.convolve_backward`."""
        before = None if before is None else before.contiguous()
        chunks = chunks_of(intervals)
        q, k, v = (grad.contiguous() for grad in grads)
        sums = triton_delta_convolution.convolve_backward(
            (q, k, v), x_TC, weight_CW, before, grad_x, intervals.bounds, chunks
        )
        return None if before is None else _of_before(sums, weight_CW, intervals)

    def gated_norm(
        self, x_THV: torch.Tensor, gate_THV: torch.Tensor, weight_V: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `DeltaPieces.gated_norm`."""
        return triton_delta_norm.gated_norm(x_THV.contiguous(), gate_THV, weight_V, eps)

    def gated_norm_backward(
        self,
        grad_THV: torch.Tensor,
        x_THV: torch.Tensor,
        gate_THV: torch.Tensor,
        weight_V: torch.Tensor,
        eps: float,
        grad_gate: torch.Tensor,
    ) -> torch.Tensor:
        """See `DeltaPieces.gated_norm_backward`."""
        return triton_delta_norm.gated_norm_backward(
            grad_THV.contiguous(), x_THV.contiguous(), gate_THV, weight_V, eps, grad_gate
        )


def chunks_of(intervals: Intervals) -> torch.Tensor:
    """int64 [N, 2]: the interval of each chunk, and its place in it; fla keeps the tables that it made last."""
    # With the host's copy: from the other, every call would ask the device for the lengths.
    return prepare_chunk_indices(
        intervals.bounds, triton_delta_convolution.TOKENS, cu_seqlens_cpu=intervals.host_bounds
    )


def _of_before(
    sums_TC: torch.Tensor, weight_CW: torch.Tensor, intervals: Intervals
) -> torch.Tensor:
    """Gradient of the tokens before each interval, [I, W - 1, C], from that of the sums that they are in."""
    count = weight_CW.shape[1] - 1
    slot = torch.arange(count, device=sums_TC.device)
    places = intervals.bounds[:-1, None] + slot
    real = places < intervals.bounds[1:, None]
    firsts = sums_TC.index_select(0, torch.where(real, places, 0).flatten()).float()
    firsts = firsts.unflatten(0, places.shape) * real[..., None]
    tokens, taps = firsts.unbind(1), weight_CW.float().unbind(1)
    # A slot is `later - t` taps after the first one in the sum of an interval's t-th token.
    found = [sum(tokens[t] * taps[later - t] for t in range(later + 1)) for later in range(count)]
    return torch.stack(found, 1).to(sums_TC.dtype)  # type: ignore[arg-type] # sums of tensors
