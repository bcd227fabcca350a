"""Metadata: what a manifest says of an adapter, so that nobody has to open its tensors to list or recreate it.

Keys: `base_model`, `lora_rank`, `alpha`, `seed` (absent when the trainer drew it), `train_attn`, `train_mlp`,
`train_unembed` (`true` or `false`), `optimizer_step`; beside them everything of `Destination.metadata`.
"""

from __future__ import annotations

from collections.abc import Mapping

from lilo_engine.errors import CommandFailed
from lilo_engine.operations.operation import LoraSpec

from lilo_miles_backend.adapter_state import AdapterState

_FLAGS = {"true": True, "false": False}


def describe(state: AdapterState, extra: Mapping[str, str]) -> dict[str, str]:
    """Metadata of a checkpoint of `state`: `extra` and the keys above, which win."""
    spec = state.spec
    seed = {} if spec.seed is None else {"seed": str(spec.seed)}
    return {
        **{key: text for key, text in extra.items() if key != "seed"},
        "base_model": state.base_model,
        "lora_rank": str(spec.lora_rank),
        "alpha": repr(float(spec.alpha)),
        **seed,
        "train_attn": _flag(spec.train_attn),
        "train_mlp": _flag(spec.train_mlp),
        "train_unembed": _flag(spec.train_unembed),
        "optimizer_step": str(state.optimizer_step),
    }


def spec_of(metadata: Mapping[str, str]) -> LoraSpec:
    """The adapter's shape, read back.

    Raises:
        CommandFailed: a key is missing or cannot be read; no checkpoint of ours is like that.
    """
    try:
        return LoraSpec(
            lora_rank=int(metadata["lora_rank"]),
            alpha=float(metadata["alpha"]),
            seed=int(metadata["seed"]) if "seed" in metadata else None,
            train_attn=_FLAGS[metadata["train_attn"]],
            train_mlp=_FLAGS[metadata["train_mlp"]],
            train_unembed=_FLAGS[metadata["train_unembed"]],
        )
    except (KeyError, ValueError) as error:
        raise CommandFailed(
            f"the checkpoint's metadata does not describe an adapter ({type(error).__name__}: {error}); "
            f"it has {dict(metadata)}"
        ) from error


def _flag(value: bool) -> str:
    return "true" if value else "false"
