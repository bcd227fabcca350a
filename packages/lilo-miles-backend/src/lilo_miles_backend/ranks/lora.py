"""LoRA sites: where an adapter acts, and how its factors change a linear's output.

Hu et al., "LoRA" (arXiv:2106.09685): y = W x + (alpha / lora_rank) B A x. There is one A and one B per Hugging Face
module, so that an exported adapter is exact; where Megatron fuses several modules into one linear, a *site* holds
their factors together: the A's stacked into one matrix (one product), each B writing into its slice of the output.

Shapes: T tokens, I and O features of the linear, k modules of a site, r lora_rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from lilo_definitions.lora import TargetGroup

from lilo_miles_backend.qwen3.shape import ModelShape
from lilo_miles_backend.ranks.autograd import AutogradContext, AutogradGrads

Split: TypeAlias = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
"""From a linear's output [T, O] to one view per module; elements in the order of the module's own output."""

HEAD_SITE = "output_layer"
"""Name of the head's site."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraModule:
    """One Hugging Face linear."""

    name: str
    """As `model.layers.0.self_attn.q_proj`."""
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSite:
    """One linear of the trainer's model and the modules it computes."""

    name: str
    group: TargetGroup
    modules: tuple[LoraModule, ...]
    path: str | None
    """Of the Megatron linear; None for the head, which `logprobs.py` computes."""
    split: Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """One adapter's numbers at one site: float32 views into its flat buffers."""

    scale: float
    a: torch.Tensor
    """[k * r, I]."""
    grad_a: torch.Tensor
    b: tuple[torch.Tensor, ...]
    """k times [out, r]."""
    grad_b: tuple[torch.Tensor, ...]


class LoraLinear(torch.nn.Module):
    """A Megatron linear with the active adapter's contribution; keeps the (output, bias) contract."""

    def __init__(self, base: torch.nn.Module, site: str, split: Split) -> None:
        super().__init__()
        self.base = base
        self.site = site
        self.factors: Factors | None = None
        """Of the active adapter; None when it has none here."""
        self._split = split

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> tuple[torch.Tensor, Any]:
        """The base linear's answer plus the adapter's."""
        y, bias = self.base(x, *args, **kwargs)
        if self.factors is not None:
            y = _AddLora.apply(y, x, self.factors, self._split)
        return y, bias

    def backward_dw(self) -> None:
        """Megatron's hook for delayed weight gradients; the base weight is frozen."""


class _AddLora(torch.autograd.Function):
    """y += scale * B A x, slice by slice; the backward adds to the adapter's gradient buffers itself.

    That saves a gradient tensor and an addition per factor and pass, and keeps a pass's cost independent of how many
    adapters are resident.
    """

    @staticmethod
    def forward(
        ctx: AutogradContext, y: torch.Tensor, x: torch.Tensor, factors: Factors, split: Split
    ) -> torch.Tensor:
        x2 = x.reshape(-1, x.shape[-1])
        h = x2 @ factors.a.to(x.dtype).t()
        if len(factors.b) == 1:
            # Out of place: the output of Megatron's row-parallel linear is a view that must not be written to.
            b = factors.b[0].to(x.dtype)
            y = y.view(-1, y.shape[-1]).addmm(h, b.t(), alpha=factors.scale).view(y.shape)
        else:
            for part, h_i, b in zip(
                _slices(y, split), _columns(h, factors), factors.b, strict=True
            ):
                _add_product(part, h_i, b.to(x.dtype).t(), factors.scale)
            ctx.mark_dirty(y)
        ctx.save_for_backward(x2, h)
        ctx.factors, ctx.split, ctx.x_shape = factors, split, x.shape
        return y

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> AutogradGrads:
        (grad,) = grads
        x2, h = ctx.saved_tensors
        factors: Factors = ctx.factors
        grad_h = torch.empty_like(h)
        columns = zip(_columns(h, factors), _columns(grad_h, factors), strict=True)
        for part, (h_i, grad_h_i), b, grad_b in zip(
            _slices(grad, ctx.split), columns, factors.b, factors.grad_b, strict=True
        ):
            flat = part.reshape(h.shape[0], -1)
            torch.mm(flat, b.to(flat.dtype), out=grad_h_i)
            _accumulate(grad_b, flat.t(), h_i, factors.scale)
        grad_h *= factors.scale
        _accumulate(factors.grad_a, grad_h.t(), x2, 1.0)
        grad_x = (
            (grad_h @ factors.a.to(h.dtype)).view(ctx.x_shape) if ctx.needs_input_grad[1] else None
        )
        return grad, grad_x, None, None


def _slices(y: torch.Tensor, split: Split) -> tuple[torch.Tensor, ...]:
    return split(y.view(-1, y.shape[-1]))


def _columns(h: torch.Tensor, factors: Factors) -> tuple[torch.Tensor, ...]:
    return (h,) if len(factors.b) == 1 else h.chunk(len(factors.b), 1)


def _add_product(
    target: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float
) -> None:
    if target.dim() == 2:
        target.addmm_(left, right, alpha=scale)
    else:
        target.add_((left @ right).view(target.shape), alpha=scale)


def _accumulate(
    buffer: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float
) -> None:
    """Do buffer += scale * left @ right, in the buffer's float32 whatever the activations are."""
    if left.dtype == buffer.dtype:
        buffer.addmm_(left, right, alpha=scale)
    else:
        buffer.add_((left @ right).to(buffer.dtype), alpha=scale)


def lora_sites(shape: ModelShape) -> tuple[LoraSite, ...]:
    """Every site of the model, in the order of the layers, the head last."""
    wide = shape.num_attention_heads * shape.head_dim
    narrow = shape.num_key_value_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    qkv = {"q_proj": (hidden, wide), "k_proj": (hidden, narrow), "v_proj": (hidden, narrow)}
    gated = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner)}
    by_group = _by_group(shape)
    sites: list[LoraSite] = []
    for layer in range(shape.num_hidden_layers):
        ours, hf = f"decoder.layers.{layer}", f"model.layers.{layer}"
        attn, mlp = f"{ours}.self_attention", f"{ours}.mlp"
        sites += [
            _site("attn", f"{attn}.linear_qkv", by_group, f"{hf}.self_attn.", qkv),
            _site(
                "attn",
                f"{attn}.linear_proj",
                _whole,
                f"{hf}.self_attn.",
                {"o_proj": (wide, hidden)},
            ),
            _site("mlp", f"{mlp}.linear_fc1", _halves, f"{hf}.mlp.", gated),
            _site("mlp", f"{mlp}.linear_fc2", _whole, f"{hf}.mlp.", {"down_proj": (inner, hidden)}),
        ]
    sites.append(_site("unembed", None, _whole, "", {"lm_head": (hidden, shape.vocab_size)}))
    return tuple(sites)


def _site(
    group: TargetGroup,
    path: str | None,
    split: Split,
    prefix: str,
    modules: dict[str, tuple[int, int]],
) -> LoraSite:
    """A site from its modules' (in, out) sizes by Hugging Face name."""
    return LoraSite(
        name=path or HEAD_SITE,
        group=group,
        path=path,
        split=split,
        modules=tuple(
            LoraModule(name=prefix + name, in_features=wide, out_features=out)
            for name, (wide, out) in modules.items()
        ),
    )


def _whole(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (y,)


def _halves(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return y.chunk(2, 1)


def _by_group(shape: ModelShape) -> Split:
    """Megatron groups query, key and value heads by key/value head: [T, G, Q + 2, D]."""
    groups, queries, size = shape.num_key_value_heads, shape.queries_per_group, shape.head_dim

    def split(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return y.view(-1, groups, queries + 2, size).split((queries, 1, 1), 2)

    return split
