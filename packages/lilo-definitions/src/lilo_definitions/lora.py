"""Lora: how many adapters a trainer holds, how large they may be, and what they may change."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias, cast, get_args

from pydantic import Field, field_validator

from lilo_definitions.part import Part

TargetGroup: TypeAlias = Literal["attn", "mlp", "unembed"]
"""A group of linears, as the SDK's `train_attn`, `train_mlp` and `train_unembed` name them."""

TARGET_GROUPS: tuple[TargetGroup, ...] = get_args(TargetGroup)

_OWNER: Mapping[str, TargetGroup] = MappingProxyType(
    {
        **dict.fromkeys(
            ("q_proj", "k_proj", "v_proj", "o_proj", "linear_qkv", "linear_proj"), "attn"
        ),
        **dict.fromkeys(("in_proj_qkv", "in_proj_z", "out_proj", "in_proj"), "attn"),
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj", "linear_fc1", "linear_fc2"), "mlp"),
        **dict.fromkeys(("lm_head", "output_layer"), "unembed"),
    }
)
"""Names of single linears, Hugging Face's and Megatron's, for saying which group one belongs to."""


class Lora(Part):
    """The adapters that can be resident together."""

    slots: int = Field(gt=0)
    """Models that are resident at the same time; the next one waits in line for a slot. Each costs 16 bytes a parameter
    while it is resident, and nothing while it is not."""
    max_rank: int = Field(gt=0)
    """Largest LoRA rank that a client may ask for; the planner counts every slot at this rank."""
    alpha: float = Field(gt=0)
    """Scale is alpha / rank; the definition's, never the client's, since the sampler must apply the same."""
    targets: tuple[TargetGroup, ...] = Field(default=("attn", "mlp", "unembed"), strict=False)
    """Groups of linears that may carry an adapter; leave `unembed` out where the sampling engine cannot apply it."""

    @field_validator("targets", mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        """Say which group a single linear belongs to: a name that matches nothing must not train nothing."""
        if not isinstance(value, list | tuple):
            return value
        for name in cast("list[object]", value):
            if isinstance(name, str) and name in _OWNER:
                raise ValueError(
                    f"{name!r} is one linear of the group {_OWNER[name]!r}; name the group"
                )
        return cast(object, value)

    @field_validator("targets")
    @classmethod
    def _some_and_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or len(set(value)) != len(value):
            raise ValueError(
                f"targets {list(value)} must name at least one of {', '.join(TARGET_GROUPS)}, each once"
            )
        return value
