# pyright: reportMissingImports=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalSubscript=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false, reportAssignmentType=false
"""The gated delta net on GPUs: kernels of flash-linear-attention (`fla-core`), which only this module imports.

Its steps are put together here, and not by its own autograd: the intervals' maps come from what the rule has computed
anyway, and the backward takes states and chunks' systems over from the forward that it runs again. All arguments by
keyword: its functions differ among themselves in their order.

Convolution and gated norm are ours (`delta_pieces.py`), and one step of the rule, the gradients inside chunks: compilers of Triton from 3.4 to before 3.7.1 make wrong code for fla's on
Hopper GPUs, and it refuses to run there. `triton_delta.py` has it, `delta_gradients.py` is what it is compared with.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from fla.modules.norm.l2norm import l2norm_bwd, l2norm_fwd
from fla.ops.common.chunk_delta_h import (
    chunk_gated_delta_rule_bwd_dhu,
    chunk_gated_delta_rule_fwd_h,
)
from fla.ops.common.chunk_o import chunk_bwd_dv_local, chunk_fwd_o
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2

from lilo_miles_backend.ranks.kernels import delta_choice
from lilo_miles_backend.ranks.kernels.delta_choice import CHUNK, ChunkGradients
from lilo_miles_backend.ranks.kernels.delta_gradients import ChunkInputs
from lilo_miles_backend.ranks.kernels.delta_kernels import DeltaPieces, RuleInputs
from lilo_miles_backend.ranks.kernels.delta_parts import Parts
from lilo_miles_backend.ranks.kernels.delta_pieces import chunks_of
from lilo_miles_backend.ranks.kernels.delta_tuning import fix_configurations
from lilo_miles_backend.ranks.layers.intervals import Intervals
from lilo_miles_backend.ranks.layers.mixer import Saved

PART_TOKENS = 64 * CHUNK
"""Of parts of intervals, where states enter those: then 32k tokens of two intervals are eight parts of each head's state."""


class FlaDelta:
    """`DeltaKernels` on a GPU."""

    def __init__(self, pieces: DeltaPieces, gradients: ChunkGradients) -> None:
        """Of parts that `delta_choice.py` chose.

        Args:
            pieces: what is not the rule.
            gradients: the step of the rule's backward that is ours.
        """
        self.convolve, self.convolve_backward = pieces.convolve, pieces.convolve_backward
        self.gated_norm, self.gated_norm_backward = pieces.gated_norm, pieces.gated_norm_backward
        self._gradients = gradients

    @classmethod
    def on(cls, device: torch.device) -> FlaDelta:
        """Choose how the kernels run on a device, once per process."""
        fix_configurations()
        # It says of every function that it asked backends and was answered no.
        logging.getLogger("fla.backends").setLevel(logging.WARNING)
        return cls(delta_choice.pieces(device), delta_choice.chunk_gradients(device))

    def rule(self, inputs: RuleInputs, intervals: Intervals, *, linked: bool) -> FlaRule:
        """See `DeltaKernels.rule`."""
        longest = PART_TOKENS if linked else max(intervals.lengths)
        return FlaRule(inputs, Parts.of(intervals, longest), self._gradients)


class FlaRule:
    """`DeltaRule` of fla's kernels, in the dtype of the values; decays in powers of two."""

    def __init__(self, inputs: RuleInputs, parts: Parts, gradients: ChunkGradients) -> None:
        """Solve the chunks' systems, which do not depend on the states.

        Args:
            inputs: of one stream.
            parts: of its intervals, of whole chunks but for the last ones.
            gradients: the step that is ours.
        """
        self._gradients, self._parts = gradients, parts
        self._bounds = parts.intervals.bounds
        self._count = len(parts.intervals.lengths)
        self._chunks = chunks_of(parts.intervals)
        q, k, v, g, beta = (
            x.detach()[None].contiguous()
            for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
        )
        self._scale: float = k.shape[-1] ** -0.5
        self._v, self._beta = v, beta
        self._q, self._q_length = l2norm_fwd(q)
        self._k, self._k_length = l2norm_fwd(k)
        self._g = chunk_local_cumsum(g, scale=RCP_LN2, **self._cut())
        self._w, self._u, self._solved = chunk_gated_delta_rule_fwd_intra(
            k=self._k, v=v, g=self._g, beta=beta, **self._cut()
        )
        self._states: torch.Tensor | None = None
        self._written: torch.Tensor | None = None
        self._inside: torch.Tensor | None = None
        self._maps: torch.Tensor | None = None
        self._m: torch.Tensor | None = None

    def maps(self) -> torch.Tensor:
        """See `DeltaRule.maps`.

        The columns of a state do not act on each other: with K columns more, whose values are zero and which start as
        the identity, the final state's are M; the others, from zero, are B.
        """
        heads, size, width = self._u.shape[2], self._k.shape[-1], self._u.shape[-1]
        start = torch.eye(size, size + width, device=self._u.device)
        _, _, final = chunk_gated_delta_rule_fwd_h(
            k=self._k,
            w=self._w,
            u=torch.nn.functional.pad(self._u, (size, 0)),
            g=self._g,
            initial_state=start.expand(self._count, heads, -1, -1).contiguous(),
            output_final_state=True,
            save_new_value=False,
            **self._cut(),
        )
        self._maps = final
        return self._parts.composed(final)

    def carry(self, entered: torch.Tensor) -> Saved:
        """See `DeltaRule.carry`; of every part."""
        assert self._maps is not None, "maps came before"
        states = self._parts.states(self._maps, entered)
        m = self._maps[..., : self._k.shape[-1]].contiguous()
        self._maps = None
        return states, m

    def outputs(self, carried: Saved) -> torch.Tensor:
        """See `DeltaRule.outputs`."""
        entered, self._m = carried or (None, None)
        self._states, self._written, _ = chunk_gated_delta_rule_fwd_h(
            k=self._k,
            w=self._w,
            u=self._u,
            g=self._g,
            initial_state=entered,
            **self._cut(),
        )
        return chunk_fwd_o(
            q=self._q,
            k=self._k,
            v=self._written,
            h=self._states,
            g=self._g,
            scale=self._scale,
            **self._cut(),
        )[0]

    def slopes(self, grad_THV: torch.Tensor) -> torch.Tensor:
        """See `DeltaRule.slopes`."""
        assert self._m is not None, "outputs came before, and were carried"
        start = self._m.new_zeros(*self._m.shape[:-1], self._u.shape[-1])
        _, own, _ = self._back(grad_THV, start, None)
        self._maps = torch.cat((self._m.mT, own), -1)
        return self._parts.composed(self._maps, back=True)

    def gradients(self, grad_THV: torch.Tensor, left: torch.Tensor | None) -> RuleInputs:
        """See `DeltaRule.gradients`."""
        assert self._states is not None, "outputs came before"
        assert self._written is not None, "likewise"
        if left is not None:
            assert self._maps is not None, "slopes came before"
            left = self._parts.states(self._maps, left, back=True)
        dstates, _, dwritten = self._back(grad_THV, None, left)
        given = ChunkInputs(
            q=self._q,
            k=self._k,
            v=self._written,
            do=grad_THV[None].contiguous(),
            dv=dwritten,
            g=self._g,
            h=self._states,
            dh=dstates,
        )
        self._states = self._written = self._inside = None
        del dstates
        dq, dk, dw, dg = self._gradients(
            given, scale=self._scale, bounds=self._bounds, chunks=self._chunks, chunk_size=CHUNK
        )
        del given
        dk_system, dv, dbeta, dg_system = prepare_wy_repr_bwd(
            k=self._k,
            v=self._v,
            beta=self._beta,
            A=self._solved,
            dw=dw,
            du=dwritten,
            g=self._g,
            cu_seqlens=self._bounds,
            chunk_indices=self._chunks,
        )
        dg = chunk_local_cumsum(dg.add_(dg_system), reverse=True, **self._cut())
        return RuleInputs(
            q=l2norm_bwd(self._q, self._q_length, dq)[0],
            k=l2norm_bwd(self._k, self._k_length, dk.add_(dk_system))[0],
            v=dv[0],
            g=dg[0],
            beta=dbeta[0],
        )

    def _back(
        self, grad_THV: torch.Tensor, start: torch.Tensor | None, left: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of the states that leave chunks, of `start` if it is asked for, and of what the rule writes."""
        do = grad_THV[None].contiguous()
        if self._inside is None:
            self._inside = chunk_bwd_dv_local(
                q=self._q, k=self._k, g=self._g, do=do, scale=self._scale, **self._cut()
            )
        return chunk_gated_delta_rule_bwd_dhu(
            q=self._q,
            k=self._k,
            w=self._w,
            g=self._g,
            h0=start,
            dht=left,
            do=do,
            dv=self._inside,
            scale=self._scale,
            **self._cut(),
        )

    def _cut(self) -> dict[str, Any]:
        return {
            "cu_seqlens": self._bounds,
            "chunk_indices": self._chunks,
            "chunk_size": CHUNK,
        }
