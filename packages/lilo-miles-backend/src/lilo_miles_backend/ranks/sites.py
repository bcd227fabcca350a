"""Sites: where an adapter can act, and which part of its factors each tensor-parallel rank holds.

There is one A and one B per Hugging Face module, so that an exported adapter is exact; where several modules read the
same input, they are one linear here, and a *site* holds their factors together: the A's stacked into one matrix (one
product), the B's one after another, each for its columns of the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lilo_definitions.lora import TargetGroup

from lilo_miles_backend.families.linear import Cut, Linear
from lilo_miles_backend.families.shape import LayerKind, ModelShape
from lilo_miles_backend.ranks.collectives import ALONE, Axis
from lilo_miles_backend.shards import FactorShard, shard

HEAD_SITE = "output_layer"
"""Name of the head's site."""

LINEARS: Mapping[LayerKind, Mapping[str, tuple[str, ...]]] = {
    "softmax": {
        "in_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "out_proj": ("self_attn.o_proj",),
        "fc1": ("mlp.gate_proj", "mlp.up_proj"),
        "fc2": ("mlp.down_proj",),
    },
    "delta": {
        "in_proj": (
            "linear_attn.in_proj_qkv",
            "linear_attn.in_proj_z",
            "linear_attn.in_proj_b",
            "linear_attn.in_proj_a",
        ),
        "out_proj": ("linear_attn.out_proj",),
        "fc1": ("mlp.gate_proj", "mlp.up_proj"),
        "fc2": ("mlp.down_proj",),
    },
}
"""The linears of a layer and the modules that each computes, in the order of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraModule:
    """One Hugging Face linear that adapters act on."""

    name: str
    """As `model.layers.0.self_attn.q_proj`."""
    linear: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSite:
    """One linear of the trainer's model and those of its modules that adapters act on."""

    name: str
    """As `decoder.layers.0.in_proj`, or `output_layer`."""
    group: TargetGroup
    modules: tuple[LoraModule, ...]
    """The first ones of the linear; whatever its output has after theirs carries no adapter."""
    path: str | None
    """Of the linear in the model; None for the head, which `logprobs.py` computes."""
    cut: Cut
    parts: tuple[int, ...]
    """What this rank computes of each module's output: columns of the site's output, one after another."""


def lora_sites(shape: ModelShape, tp: Axis = ALONE) -> tuple[LoraSite, ...]:
    """Every site of the model, in the order of the layers, the head last."""
    sites: list[LoraSite] = []
    for index, kind in enumerate(shape.layers):
        linears = shape.linears(kind)
        for name, modules in LINEARS[kind].items():
            path = f"decoder.layers.{index}.{name}"
            prefix = f"{shape.prefix}layers.{index}."
            adapted = {prefix + m: linears[m] for m in modules if linears[m].adaptable}
            sites.append(_site(path, path, adapted, tp))
    sites.append(_site(HEAD_SITE, None, {"lm_head": shape.head}, tp))
    return tuple(sites)


def factor_shards(
    sites: Sequence[LoraSite], lora_rank: int, tp: Axis = ALONE
) -> dict[str, FactorShard]:
    """This rank's part of each factor by name, in buffer order: the A's of a site next to each other, then its B's.

    Where the output of a linear is cut, B is and A is whole on every rank; where the input is, the other way round.
    Whole factors come first, so that their gradients are one piece of the buffer.
    """
    whole: dict[str, FactorShard] = {}
    cut: dict[str, FactorShard] = {}
    for site in sites:
        a_side, b_side = (whole, cut) if site.cut == "out" else (cut, whole)
        for module in site.modules:
            a_side[f"{module.name}.lora_A"] = _a_shard(module.linear, lora_rank, tp)
        for module in site.modules:
            b_side[f"{module.name}.lora_B"] = _b_shard(module.linear, lora_rank, tp)
    return whole | cut


def _a_shard(linear: Linear, lora_rank: int, tp: Axis) -> FactorShard:
    full = (lora_rank, linear.in_features)
    if linear.cut == "out":
        return FactorShard(full=full)
    return shard(full, 1, tp.rank, tp.size, linear.sections)


def _b_shard(linear: Linear, lora_rank: int, tp: Axis) -> FactorShard:
    full = (linear.out_features, lora_rank)
    if linear.cut == "in":
        return FactorShard(full=full)
    return shard(full, 0, tp.rank, tp.size, linear.sections)


def _site(name: str, path: str | None, modules: Mapping[str, Linear], tp: Axis) -> LoraSite:
    """A site of linears that are alike but for their output."""
    found = tuple(LoraModule(name=name, linear=linear) for name, linear in modules.items())
    first = found[0].linear
    return LoraSite(
        name=name,
        group=first.group,
        modules=found,
        path=path,
        cut=first.cut,
        parts=tuple(_b_shard(module.linear, 1, tp).shape[0] for module in found),
    )
