"""BaseWeights: a dense Qwen3 model as the sampler multiplies with it: fused projections, read from safetensors.

Not the trainer's weights: the sampler is a process of its own and reads the same folder, by the same rules (`families/`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from lilo_miles_backend.families.files import open_tensors
from lilo_miles_backend.families.read import read_shape
from lilo_miles_backend.families.shape import ModelShape

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Projections that read the same input are one matrix; the parts are stacked over the output dim in this order."""

HEAD = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer."""

    fused: Mapping[str, torch.Tensor]
    """By the names of `FUSED`, each [out, in]."""
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseWeights:
    """Everything that is frozen."""

    shape: ModelShape
    embedding: torch.Tensor
    """[vocab, hidden]."""
    head: torch.Tensor
    """[vocab, hidden]; the embedding itself when they are tied."""
    norm: torch.Tensor
    layers: tuple[Layer, ...]
    eos_tokens: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self.embedding.dtype


def read_base(folder: Path, *, dtype: torch.dtype, device: torch.device) -> BaseWeights:
    """Read `config.json` and all safetensors of a Hugging Face folder.

    Raises:
        InvalidRequest: the folder holds another kind of model, or other tensors than its configuration says.
    """
    shape = read_shape(folder)
    with open_tensors(folder, shape) as read:

        def take(name: str) -> torch.Tensor:
            return read(f"{name}.weight").to(device=device, dtype=dtype)

        def layer(prefix: str) -> Layer:
            return Layer(
                fused={
                    fused: torch.cat([take(f"{prefix}.{part}") for part in parts])
                    for fused, parts in FUSED.items()
                },
                input_norm=take(f"{prefix}.input_layernorm"),
                post_norm=take(f"{prefix}.post_attention_layernorm"),
                q_norm=take(f"{prefix}.self_attn.q_norm"),
                k_norm=take(f"{prefix}.self_attn.k_norm"),
            )

        embedding = take("model.embed_tokens")
        return BaseWeights(
            shape=shape,
            embedding=embedding,
            head=embedding if shape.tie_word_embeddings else take(HEAD),
            norm=take("model.norm"),
            layers=tuple(layer(f"model.layers.{i}") for i in range(shape.num_hidden_layers)),
            eos_tokens=_eos_tokens(folder),
        )


def _eos_tokens(folder: Path) -> tuple[int, ...]:
    """The generation config wins over the model's, as in transformers."""
    eos = None
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        declared = json.loads(path.read_text()) if path.is_file() else {}
        eos = declared.get("eos_token_id", eos)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)
