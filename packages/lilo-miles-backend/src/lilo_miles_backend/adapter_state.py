"""AdapterState: one adapter outside its slot: what a capture freezes, a checkpoint holds and a load puts back.

Names are slot-free and those of the Hugging Face module: `model.layers.0.self_attn.q_proj.lora_A`,
`...lora_B`, `lm_head.lora_A`. Tensors are float32 on the CPU, detached: A is [lora_rank, in], B is [out, lora_rank].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lilo_engine.operations.operation import LoraSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterState:
    """Everything needed to go on training an adapter elsewhere."""

    base_model: str
    spec: LoraSpec
    optimizer_step: int
    """Steps done; Adam's bias correction uses it."""
    weights: Mapping[str, torch.Tensor]
    exp_avg: Mapping[str, torch.Tensor]
    """First moments, same names and shapes as `weights`."""
    exp_avg_sq: Mapping[str, torch.Tensor]
    """Second moments."""
