"""LoRA metadata: an adapter's shape as the text that a manifest keeps, and back. Pure.

Trainers write it, so that a checkpoint can be listed and a model made for it without opening its tensors. Keys:
`lora_rank`, `alpha`, `seed` (absent when the trainer drew it), `train_attn`, `train_mlp`, `train_unembed` (`true` or
`false`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from lilo_engine.errors import InvalidRequest
from lilo_engine.operations.operation import LoraSpec

_FLAGS = {"true": True, "false": False}


def lora_to_metadata(spec: LoraSpec) -> dict[str, str]:
    """The keys above."""
    seed = {} if spec.seed is None else {"seed": str(spec.seed)}
    return {
        "lora_rank": str(spec.lora_rank),
        "alpha": repr(float(spec.alpha)),
        **seed,
        "train_attn": _flag(spec.train_attn),
        "train_mlp": _flag(spec.train_mlp),
        "train_unembed": _flag(spec.train_unembed),
    }


def lora_from_metadata(metadata: Mapping[str, str]) -> LoraSpec:
    """The shape, read back; other keys are ignored.

    Raises:
        InvalidRequest: a key is missing or cannot be read; no checkpoint of ours is like that.
    """
    try:
        return LoraSpec(
            lora_rank=_whole(metadata["lora_rank"], bits=31),
            alpha=_finite(metadata["alpha"]),
            seed=_whole(metadata["seed"], bits=63) if "seed" in metadata else None,
            train_attn=_FLAGS[metadata["train_attn"]],
            train_mlp=_FLAGS[metadata["train_mlp"]],
            train_unembed=_FLAGS[metadata["train_unembed"]],
        )
    except (KeyError, ValueError) as error:
        raise InvalidRequest(
            f"the checkpoint's manifest does not say the shape of its adapter "
            f"({type(error).__name__}: {error}); it was not made by a trainer of this kind"
        ) from error


def _whole(text: str, *, bits: int) -> int:
    value = int(text)
    if value.bit_length() > bits:
        raise ValueError(f"{text[:40]} has more than {bits} bits")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not finite")
    return value


def _flag(value: bool) -> str:
    return "true" if value else "false"
