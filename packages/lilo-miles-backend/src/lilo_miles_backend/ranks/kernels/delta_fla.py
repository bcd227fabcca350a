# pyright: reportMissingImports=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalSubscript=false, reportArgumentType=false
"""The gated delta net on GPUs: kernels of flash-linear-attention (`fla-core`), which only this module imports.

All arguments by keyword: its functions differ among themselves in their order.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from fla.backends import BaseBackend, register
from fla.modules.causal_conv1d import causal_conv1d
from fla.modules.norm.fused_norm_gate import rms_norm_gated
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

from lilo_miles_backend.ranks.kernels.delta_gradients import ChunkInputs, chunk_gradients
from lilo_miles_backend.ranks.kernels.delta_kernels import Enter
from lilo_miles_backend.ranks.kernels.delta_tuning import fix_configurations
from lilo_miles_backend.ranks.layers.intervals import Intervals


@register("common")
class _Gradients(BaseBackend):
    """In place of the one kernel that Triton compiles wrongly on this GPU; see `delta_gradients.py`."""

    backend_type = "lilo"
    priority = 0

    @classmethod
    def is_available(cls) -> bool:
        """Where fla refuses to run its own."""
        return bool(IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1)

    def verify(self, function_name: str, *args: object, **given: Any) -> tuple[bool, str | None]:  # noqa: ANN401 - theirs
        """Only this function, as the gated delta rule calls it: a packed stream with decay, all by keyword."""
        needed = ("w", "g", "dv", "cu_seqlens", "chunk_indices")
        fits = (
            function_name == "chunk_bwd_dqkwg"
            and not args
            and all(given.get(name) is not None for name in needed)
            and not given.get("state_v_first")
        )
        return fits, None if fits else "not a gated delta rule over a packed stream"

    def chunk_bwd_dqkwg(self, **given: Any) -> tuple[torch.Tensor, ...]:  # noqa: ANN401 - theirs
        """The step's gradients, in fla's order: of q, k, w and g."""
        names = ("q", "k", "v", "do", "dv", "g", "h", "dh")
        return chunk_gradients(
            ChunkInputs(**{name: given[name] for name in names}),
            scale=given["scale"],
            bounds=given["cu_seqlens"],
            chunks=given["chunk_indices"],
            chunk_size=given["chunk_size"],
        )


NORM_ROWS = 65_536
"""Heads of tokens that are normalised at once: fla compiles its norm anew for each multiple of this many."""


class FlaDelta:
    """`DeltaKernels` on a GPU."""

    def __init__(self) -> None:
        """Choose how the kernels run, once per process."""
        fix_configurations()
        # It says of every function that it asked ours and was answered no.
        logging.getLogger("fla.backends").setLevel(logging.WARNING)

    def convolve(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        before: torch.Tensor | None,
        intervals: Intervals,
    ) -> torch.Tensor:
        """See `DeltaKernels.convolve`."""
        initial = None
        if before is not None:
            # A place more than is read: the kernel keeps as many tokens as its window is wide.
            initial = torch.nn.functional.pad(before.transpose(1, 2), (1, 0)).contiguous()
        y, _ = causal_conv1d(
            x=x_TC[None],
            weight=weight_CW,
            initial_state=initial,
            activation="silu",
            **_bounds(intervals),
        )
        return y[0]

    def rule(
        self,
        q_TGK: torch.Tensor,
        k_TGK: torch.Tensor,
        v_THV: torch.Tensor,
        g_TH: torch.Tensor,
        beta_TH: torch.Tensor,
        intervals: Intervals,
        enter: Enter | None,
    ) -> torch.Tensor:
        """See `DeltaKernels.rule`."""
        q, k, v, g, beta = (t[None] for t in (q_TGK, k_TGK, v_THV, g_TH, beta_TH))
        entered = None if enter is None else enter(_maps(q, k, v, g, beta, intervals))
        out, _ = chunk_gated_delta_rule(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            initial_state=entered,
            use_qk_l2norm_in_kernel=True,
            **_bounds(intervals),
        )
        return out[0]

    def gated_norm(
        self, x_THV: torch.Tensor, gate_THV: torch.Tensor, weight_V: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `DeltaKernels.gated_norm`."""
        tokens = max(1, NORM_ROWS // x_THV.shape[1])
        parts = zip(x_THV.split(tokens), gate_THV.split(tokens), strict=True)
        return torch.cat(
            [
                rms_norm_gated(x=x, g=gate, weight=weight_V, bias=None, activation="swish", eps=eps)
                for x, gate in parts
            ]
        )


def _maps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    intervals: Intervals,
) -> torch.Tensor:
    """[M | B] of each interval, [I, H, K, K + V] float32.

    The columns of a state do not act on each other: with K columns more, whose values are zero and which start as the
    identity, the final state's are M; the others, from zero, are B.
    """
    heads, size, width = v.shape[2], k.shape[-1], v.shape[-1]
    zeros = v.new_zeros(*v.shape[:-1], size)
    identity = torch.eye(size, device=v.device)
    start = torch.nn.functional.pad(identity, (0, width))
    start = start.expand(len(intervals.lengths), heads, -1, -1).contiguous()
    _, final = chunk_gated_delta_rule(
        q=q,
        k=k,
        v=torch.cat((zeros, v), -1),
        g=g,
        beta=beta,
        initial_state=start,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        **_bounds(intervals),
    )
    return final


def _bounds(intervals: Intervals) -> dict[str, Any]:
    """The host's copy goes along: without it every call asks the device for the lengths."""
    return {"cu_seqlens": intervals.bounds, "cu_seqlens_cpu": intervals.host_bounds}
