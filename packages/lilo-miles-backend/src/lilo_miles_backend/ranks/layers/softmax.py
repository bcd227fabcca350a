"""Softmax attention as a mixer: norm and rotation of queries and keys, attention over the stream, gate on the output.

The projection has the sections [q | k | v], or [q | gate | k | v] where a model gates attention's output with
sigmoid(gate), as the hybrids' full-attention layers do; each section is this rank's heads one after another. Nothing but
the log-sum-exps is kept: rotated queries and keys are computed again from the projection, and the ungated output from
the gated one.

Shapes: T tokens, O features of the projection, N query heads and G key/value heads (this rank's), D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lilo_miles_backend.ranks.attention import Attention, PackedRows
from lilo_miles_backend.ranks.kernels.attention_kernel import Attended
from lilo_miles_backend.ranks.kernels.kernels import Elementwise
from lilo_miles_backend.ranks.layers.mixer import Saved
from lilo_miles_backend.ranks.rotary import Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sections:
    """Views of a projection or of its gradient."""

    q: torch.Tensor
    """[T, N, D]."""
    gate: torch.Tensor | None
    """[T, N * D]."""
    k: torch.Tensor
    """[T, G, D]."""
    v: torch.Tensor


class SoftmaxMixer(torch.nn.Module):
    """One layer's softmax attention; see `Mixer`."""

    def __init__(
        self,
        *,
        heads: int,
        groups: int,
        head_dim: int,
        rotary: Rotary,
        attention: Attention,
        elementwise: Elementwise,
        dtype: torch.dtype,
        eps: float,
        qk_norm: bool,
        gated: bool = False,
    ) -> None:
        """Make room for the small weights, whose numbers are read from files afterwards.

        Args:
            heads: N.
            groups: G.
            head_dim: D.
            rotary: the model's tables; they say how many features are rotated.
            attention: the model's.
            elementwise: of the device.
            dtype: of the norms' weights.
            eps: of the norms.
            qk_norm: each head of q and k is normalized before it is rotated.
            gated: there is a gate section.
        """
        super().__init__()
        self.q_norm = _weight(head_dim, dtype) if qk_norm else None
        self.k_norm = _weight(head_dim, dtype) if qk_norm else None
        self._heads, self._groups, self._head_dim = heads, groups, head_dim
        self._rotary, self._attention, self._elementwise = rotary, attention, elementwise
        self._eps, self._gated = eps, gated
        self._scale = head_dim**-0.5

    @property
    def kernels(self) -> str:
        """What attends, for people."""
        return self._attention.kernels

    def forward(self, projected_TO: torch.Tensor, rows: PackedRows) -> tuple[torch.Tensor, Saved]:
        """The attended tokens [T, N * D], gated where the model does so."""
        parts = self._sections(projected_TO)
        tables = self._rotary.at(rows.positions)
        # Keys first: where ranks cut rows, they travel while the queries are rotated.
        keys = self._attention.keys(
            self._elementwise.rotate(parts.k, self.k_norm, self._eps, *tables), parts.v
        )
        q = self._elementwise.rotate(parts.q, self.q_norm, self._eps, *tables)
        attended = self._attention.forward(q, keys, rows, self._scale)
        out = attended.out.flatten(1)
        if parts.gate is not None:
            out = torch.sigmoid(parts.gate).mul_(out)
        return out, (attended.lse,)

    def backward(
        self,
        grad_TW: torch.Tensor,
        projected_TO: torch.Tensor,
        out_TW: torch.Tensor,
        saved: Saved,
        rows: PackedRows,
    ) -> torch.Tensor:
        """Gradient of the projection, written in place of it."""
        (lse,) = saved
        parts = self._sections(projected_TO)
        tables = self._rotary.at(rows.positions)
        keys = self._attention.keys(
            self._elementwise.rotate(parts.k, self.k_norm, self._eps, *tables), parts.v
        )
        q = self._elementwise.rotate(parts.q, self.q_norm, self._eps, *tables)
        if parts.gate is not None:
            grad_TW, out_TW = _ungated(grad_TW, out_TW, parts.gate)
        grads = self._attention.backward(
            grad_TW.unflatten(1, (self._heads, -1)),
            q,
            keys,
            Attended(out_TW.unflatten(1, (self._heads, -1)), lse),
            rows,
            self._scale,
        )
        for grad, part, weight in (
            (grads.q, parts.q, self.q_norm),
            (grads.k, parts.k, self.k_norm),
        ):
            self._elementwise.rotate_backward(grad, part, weight, self._eps, *tables, part)
        parts.v.copy_(grads.v)
        return projected_TO

    def _sections(self, projected_TO: torch.Tensor) -> _Sections:
        width, size = self._heads * self._head_dim, self._groups * self._head_dim
        widths = [width, *([width] if self._gated else []), size, size]
        q, *gate, k, v = projected_TO.split(widths, 1)
        return _Sections(
            q=q.unflatten(1, (self._heads, -1)),
            gate=gate[0] if gate else None,
            k=k.unflatten(1, (self._groups, -1)),
            v=v.unflatten(1, (self._groups, -1)),
        )


def _weight(size: int, dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(size, dtype=dtype), requires_grad=False)


def _ungated(
    grad: torch.Tensor, out: torch.Tensor, gate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of attention's output and that output, from those after the gate; the gate becomes its gradient.

    With s = sigmoid(gate) and y = s o: do = s dy, dgate = dy o s (1 - s) = dy y (1 - s), and 1 - s = sigmoid(-gate).
    """
    opened = torch.sigmoid(gate)
    grad_gate = torch.sigmoid(gate.neg()).mul_(out).mul_(grad)
    # A gate that is shut to the last bit lets no gradient through either, so any output serves for it.
    out = out / opened.clamp_min(torch.finfo(gate.dtype).tiny)
    gate.copy_(grad_gate)
    return opened.mul_(grad), out
