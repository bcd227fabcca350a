"""LoRA rules: which adapters a definition can have. Pure; asked at a model's creation by the engine and by every trainer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from lilo_engine.errors import InvalidRequest
from lilo_engine.operations.operation import LoraSpec

if TYPE_CHECKING:
    from lilo_definitions import Definition
    from lilo_definitions.lora import TargetGroup


def groups_of(lora: LoraSpec) -> set[TargetGroup]:
    """The groups of layers that get an adapter."""
    flags: dict[TargetGroup, bool] = {
        "attn": lora.train_attn,
        "mlp": lora.train_mlp,
        "unembed": lora.train_unembed,
    }
    return {group for group, on in flags.items() if on}


def honoured(lora: LoraSpec, definition: Definition) -> LoraSpec:
    """What will be trained: what was asked, but no head where the definition has none.

    The SDK asks for train_unembed by default; a definition without `unembed` trains without it instead of refusing
    every client.

    Raises:
        InvalidRequest: rank, alpha or flags are not possible here.
    """
    limits = definition.lora
    if not 1 <= lora.lora_rank <= limits.max_rank:
        raise InvalidRequest(
            f"rank {lora.lora_rank} is not possible here; give 1 to {limits.max_rank}"
        )
    if not math.isfinite(lora.alpha) or lora.alpha <= 0:
        raise InvalidRequest(f"alpha is {lora.alpha}; it must be a finite number above 0")
    if not groups_of(lora):
        raise InvalidRequest(
            "train_attn, train_mlp and train_unembed are all off, so nothing would be trained; turn one on"
        )
    offered = ", ".join(limits.targets)
    refused = sorted(groups_of(lora) - {*limits.targets, "unembed"})
    if refused:
        raise InvalidRequest(
            f"train_{refused[0]} is on, but {definition.name!r} trains only {offered}"
        )
    if "unembed" not in limits.targets:
        lora = replace(lora, train_unembed=False)
    if not groups_of(lora):
        raise InvalidRequest(
            f"only unembed would be trained, which {definition.name!r} does not train; it has {offered}"
        )
    return lora
