"""Layer: one decoder layer as one autograd node, whose backward is written out and computes again what was not kept.

    n = norm(x)    p = in_proj(n)    o = mixer(p)    m = x + out_proj(o)    h = norm(m)    g = fc1(h)    y = m + fc2(swiglu(g))

What a level keeps between forward and backward, each with what is to its left:

    input: x    attention: o, m and what the mixer saves    qkv: p    all: g

The rest is computed again, the same way, so that every level has the same bits. Nothing is computed again that only a
frozen weight's gradient would need: fc2's product, say. What the mixer does is its own (`mixer.py`); Megatron's block
loops over layers and knows nothing of their inside.

Tensor-parallel ranks have rows of in_proj and fc1 and columns of out_proj and fc2, and each a share of the stream's tokens
for all that is between them (`stream_shards.py`): they gather the first two's inputs, and sum those inputs' gradients and
the products of the last two.

Shapes: T tokens of this rank's part of a stream, t of its share among tensor-parallel ranks, H hidden size, O features of the projection in, W of the mixer's
output, F inner size (this rank's of the last three).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from lilo_definitions.trainer import Keep

from lilo_miles_backend.ranks.attention import PackedRows
from lilo_miles_backend.ranks.autograd import AutogradContext, AutogradGrads
from lilo_miles_backend.ranks.kernels.kernels import Kernels
from lilo_miles_backend.ranks.layers.linear import Linear
from lilo_miles_backend.ranks.layers.mixer import Mixer, Saved
from lilo_miles_backend.ranks.layers.mlp import GateUps, Mlp, MlpAdapters
from lilo_miles_backend.ranks.layers.offload import OffloadedInputs
from lilo_miles_backend.ranks.layers.stream_shards import StreamShards
from lilo_miles_backend.ranks.lora import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Of one layer, as this rank holds it."""

    hidden: int
    projected: int
    """O."""
    mixed: int
    """W."""
    inner: int
    """F."""
    eps: float
    """Of the norms."""
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Active:
    """The adapters that act on a layer in one pass, by linear."""

    in_proj: tuple[Segment, ...] = ()
    out_proj: tuple[Segment, ...] = ()
    fc1: tuple[Segment, ...] = ()
    fc2: tuple[Segment, ...] = ()

    @property
    def mlp(self) -> MlpAdapters:
        """Those of the MLP."""
        return MlpAdapters(fc1=self.fc1, fc2=self.fc2)


@dataclass(slots=True, kw_only=True)
class Running:
    """What the layers of a model share about the microbatch that runs; set by `BaseModel.hidden`."""

    rows: PackedRows | None = None
    inputs: OffloadedInputs | None = None
    """Where layers' inputs wait for the backward, if not with what layers keep."""


@dataclass(slots=True, kw_only=True)
class _Kept:
    """Between a forward and its backward; None: to be computed again."""

    x: torch.Tensor | None
    """None: it is in `Running.inputs`."""
    mixed: torch.Tensor | None = None
    saved: Saved = ()
    middle: torch.Tensor | None = None
    projected: torch.Tensor | None = None
    gate_ups: GateUps | None = None


class Layer(torch.nn.Module):
    """One decoder layer of one rank; its weights are frozen and never get gradients."""

    def __init__(
        self,
        *,
        sizes: LayerSizes,
        make_mixer: Callable[[], Mixer],
        kernels: Kernels,
        shards: StreamShards,
        running: Running,
        **_: object,
    ) -> None:
        """Allocate the weights on torch's default device; further keywords are Megatron's.

        Args:
            sizes: of the weights.
            make_mixer: what mixes tokens; a torch module with its own small weights.
            kernels: of the device.
            shards: divides the stream over the ranks with other parts of the weights.
            running: where to find the rows of the microbatch.
        """
        super().__init__()
        hidden, inner = sizes.hidden, sizes.inner
        self.input_norm = _frozen(hidden, dtype=torch.float32)
        self.in_proj = _frozen(sizes.projected, hidden, dtype=sizes.dtype)
        self.mixer = cast(Any, make_mixer())
        self.out_proj = _frozen(hidden, sizes.mixed, dtype=sizes.dtype)
        self.mlp_norm = _frozen(hidden, dtype=torch.float32)
        self.fc1 = _frozen(2 * inner, hidden, dtype=sizes.dtype)
        self.fc2 = _frozen(hidden, inner, dtype=sizes.dtype)
        self.linears = {
            name: Linear(getattr(self, name), kernels.lora)
            for name in ("in_proj", "out_proj", "fc1", "fc2")
        }
        self.active = Active()
        """Set by `BaseModel.activate`."""
        self.level: Keep = "all"
        """Set by `BaseModel.keep`."""
        self._mlp = Mlp(
            norm_H=self.mlp_norm,
            eps=sizes.eps,
            fc1=self.linears["fc1"],
            fc2=self.linears["fc2"],
            elementwise=kernels.elementwise,
            shards=shards,
        )
        self._elementwise = kernels.elementwise
        self._eps = sizes.eps
        self._shards = shards
        self._running = running

    def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        """[t, 1, H] -> [t, 1, H], and Megatron's context, which there is none of."""
        rows = self._running.rows
        assert rows is not None, "BaseModel.hidden says which rows run"
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            return _Node.apply(hidden_states, self, rows, self.active, self.level), None  # type: ignore[return-value]
        x_tH = hidden_states.view(-1, hidden_states.shape[-1])
        return self._run(x_tH, rows, self.active, None)[0].view_as(hidden_states), None

    def _run(
        self, x_tH: torch.Tensor, rows: PackedRows, active: Active, level: Keep | None
    ) -> tuple[torch.Tensor, _Kept]:
        """The layer's output, and what `level` keeps of it; None: there will be no backward."""
        kept, num_tokens = _Kept(x=x_tH), rows.positions.shape[0]
        projected = self._project(x_tH, num_tokens, active)
        mixed, saved = self.mixer.forward(projected, rows)
        if level in ("qkv", "all"):
            kept.projected = projected
        del projected
        middle = self._out(mixed, x_tH, active)
        if level in ("attention", "qkv", "all"):
            kept.mixed, kept.saved, kept.middle = mixed, saved, middle
        del mixed
        y_tH, kept.gate_ups = self._mlp.forward(middle, num_tokens, active.mlp, keep=level == "all")
        return y_tH, kept

    def _back(
        self, grad_tH: torch.Tensor, kept: _Kept, rows: PackedRows, active: Active
    ) -> torch.Tensor:
        """Gradient of x; adds to the adapters' gradients, and lets go of each activation as soon as it can."""
        num_tokens, x_tH = rows.positions.shape[0], kept.x
        assert x_tH is not None, "it was fetched before"
        if kept.middle is None:
            projected = self._project(x_tH, num_tokens, active)
            mixed, saved = self.mixer.forward(projected, rows)
            kept.projected, kept.mixed, kept.saved = projected, mixed, saved
            kept.middle = self._out(mixed, x_tH, active)
            del projected, mixed
        grad_middle = self._mlp.backward(
            grad_tH, kept.middle, num_tokens, kept.gate_ups, active.mlp
        )
        kept.middle = kept.gate_ups = None
        assert kept.mixed is not None, "kept with `middle`"
        grad_mixed = self.linears["out_proj"].backward(
            self._shards.whole(grad_middle, num_tokens), kept.mixed, active.out_proj
        )
        if kept.projected is None:
            kept.projected = self._project(x_tH, num_tokens, active)
        grad_projected = self.mixer.backward(
            grad_mixed, kept.projected, kept.mixed, kept.saved, rows
        )
        del grad_mixed
        kept.mixed, kept.saved, kept.projected = None, (), None
        normed, inverse = self._elementwise.rms_norm(x_tH, self.input_norm, self._eps)
        normed = self._shards.whole(normed, num_tokens)
        partial = self.linears["in_proj"].backward(grad_projected, normed, active.in_proj)
        del normed, grad_projected
        grad_normed = self._shards.summed(partial)
        del partial
        grad_x = self._elementwise.rms_norm_backward(grad_normed, x_tH, inverse, self.input_norm)
        return grad_x.add_(grad_middle)

    def _project(self, x_tH: torch.Tensor, num_tokens: int, active: Active) -> torch.Tensor:
        normed, _ = self._elementwise.rms_norm(x_tH, self.input_norm, self._eps)
        return self.linears["in_proj"].forward(
            self._shards.whole(normed, num_tokens), active.in_proj
        )

    def _out(self, mixed_TW: torch.Tensor, x_tH: torch.Tensor, active: Active) -> torch.Tensor:
        """The stream after the mixer: x and the sum of all ranks' products."""
        linear = self.linears["out_proj"]
        if not self._shards.is_split:
            return linear.forward(mixed_TW, active.out_proj, x_tH)
        return self._shards.summed(linear.forward(mixed_TW, active.out_proj)).add_(x_tH)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        x: torch.Tensor,
        layer: Layer,
        rows: PackedRows,
        active: Active,
        level: Keep,
    ) -> torch.Tensor:
        x_tH, inputs = x.view(-1, x.shape[-1]), layer._running.inputs
        ctx.place = None if inputs is None else inputs.put(x_tH)
        y_tH, kept = layer._run(x_tH, rows, active, level)
        if inputs is not None:
            kept.x = None
        ctx.layer, ctx.rows, ctx.active, ctx.inputs, ctx.kept = layer, rows, active, inputs, kept
        return y_tH.view_as(x)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> AutogradGrads:
        # Not through save_for_backward: activations are let go of one by one, and gradients written over some.
        kept, ctx.kept = ctx.kept, None
        assert kept is not None, "a layer is walked back once"
        if ctx.place is not None:
            kept.x = ctx.inputs.take(ctx.place)
        (grad,) = grads
        grad_tH = grad.reshape(-1, grad.shape[-1])
        grad_x = ctx.layer._back(grad_tH, kept, ctx.rows, ctx.active)
        return grad_x.view_as(grad), None, None, None, None


def _frozen(*size: int, dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
