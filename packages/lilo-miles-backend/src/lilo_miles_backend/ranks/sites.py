"""Sites: where an adapter can act, and which part of its factors each tensor-parallel rank holds.

There is one A and one B per Hugging Face module, so that an exported adapter is exact; where Megatron fuses several
modules into one linear, a *site* holds their factors together: the A's stacked into one matrix (one product), each B
writing into its slice of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from lilo_definitions.lora import TargetGroup

from lilo_miles_backend.families.linear import Cut
from lilo_miles_backend.families.shape import ModelShape
from lilo_miles_backend.ranks.collectives import ALONE, Axis
from lilo_miles_backend.shards import FactorShard, shard

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
    cut: Cut
    split: Split
    """Of what this rank computes of the output."""


def lora_sites(shape: ModelShape, tp_size: int = 1) -> tuple[LoraSite, ...]:
    """Every site of the model, in the order of the layers, the head last; sizes of modules are the whole model's."""
    wide = shape.num_attention_heads * shape.head_dim
    narrow = shape.num_key_value_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    qkv = {"q_proj": (hidden, wide), "k_proj": (hidden, narrow), "v_proj": (hidden, narrow)}
    gated = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner)}
    output, down = {"o_proj": (wide, hidden)}, {"down_proj": (inner, hidden)}
    by_group = _by_group(shape, tp_size)
    sites: list[LoraSite] = []
    for layer in range(shape.num_hidden_layers):
        ours, hf = f"decoder.layers.{layer}", f"model.layers.{layer}"
        attn, self_attn = f"{ours}.self_attention", f"{hf}.self_attn."
        mlp, hf_mlp = f"{ours}.mlp", f"{hf}.mlp."
        sites += [
            _site("attn", f"{attn}.linear_qkv", "out", by_group, self_attn, qkv),
            _site("attn", f"{attn}.linear_proj", "in", _whole, self_attn, output),
            _site("mlp", f"{mlp}.linear_fc1", "out", _halves, hf_mlp, gated),
            _site("mlp", f"{mlp}.linear_fc2", "in", _whole, hf_mlp, down),
        ]
    head = {"lm_head": (hidden, shape.vocab_size)}
    sites.append(_site("unembed", None, "out", _whole, "", head))
    return tuple(sites)


def factor_shards(
    sites: Sequence[LoraSite], lora_rank: int, tp: Axis = ALONE
) -> dict[str, FactorShard]:
    """This rank's part of each factor by name, in buffer order: the A's of a site next to each other, then its B's.

    Where the output of a linear is cut, B is and A is whole on every rank; where the input is, the other way round.
    Whole factors come first, so that their gradients are one piece of the buffer.
    """
    shards: dict[str, FactorShard] = {}
    for site in sites:
        a_dim, b_dim = (None, 0) if site.cut == "out" else (1, None)
        for module in site.modules:
            full = (lora_rank, module.in_features)
            shards[f"{module.name}.lora_A"] = shard(full, a_dim, tp.rank, tp.size)
        for module in site.modules:
            full = (module.out_features, lora_rank)
            shards[f"{module.name}.lora_B"] = shard(full, b_dim, tp.rank, tp.size)
    return dict(sorted(shards.items(), key=lambda named: named[1].dim is not None))


def _site(
    group: TargetGroup,
    path: str | None,
    cut: Cut,
    split: Split,
    prefix: str,
    modules: dict[str, tuple[int, int]],
) -> LoraSite:
    """A site from its modules' (in, out) sizes by Hugging Face name."""
    return LoraSite(
        name=path or HEAD_SITE,
        group=group,
        path=path,
        cut=cut,
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


def _by_group(shape: ModelShape, tp_size: int) -> Split:
    """Megatron groups query, key and value heads by key/value head: [T, G, Q + 2, D]."""
    groups = shape.num_key_value_heads // tp_size
    queries, size = shape.queries_per_group, shape.head_dim

    def split(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return y.view(-1, groups, queries + 2, size).split((queries, 1, 1), 2)

    return split
